"""Replaces the calls of a traced program by what they call, so that a walk sees all of it as one list of equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax._src import core

from . import jaxprs
from .jaxprs import Atom, Equation, Jaxpr, Literal, Var
from .primitives import AGAIN, INLINE_CALLS


class Inlined(NamedTuple):
    """A program without calls, except those that compute something again, or have a derivative of their own."""

    equations: list[Equation]
    results: list[Atom]
    origins: dict[Var, Var]  # new variable -> that of the program, or of a call in it, for which it stands
    constants: dict[Var, Any]  # of the calls


def inlined(jaxpr: Jaxpr) -> Inlined:
    """Return a program with its calls replaced; a call with a collective inside gives up its own derivative."""
    flat = Inlined([], [], {}, {})
    names: dict[Var, Atom] = {}
    _inline(flat, jaxpr.eqns, names, None)
    flat.results.extend(_named(atom, names) for atom in jaxpr.outvars)
    return flat


def _inline(flat: Inlined, equations: Sequence[Equation], names: dict[Var, Atom], around: Any) -> None:
    """Append equations to a program; `names` are its atoms for their variables, `around` JAX's names around them."""
    for equation in equations:
        source = equation.source_info
        if around is not None:
            source = source.replace(name_stack=around + source.name_stack)
        operands = [_named(atom, names) for atom in equation.invars]
        inner = jaxprs.callee(equation)
        if inner is None or not _is_entered(equation):
            results = [var if isinstance(var, core.DropVar) else Var(var.aval) for var in equation.outvars]
            flat.origins.update(zip(results, equation.outvars, strict=True))
            names.update(zip(equation.outvars, results, strict=True))
            flat.equations.append(equation.replace(invars=operands, outvars=results, source_info=source))
            continue
        own: dict[Var, Atom] = dict(zip(inner.jaxpr.invars, operands, strict=True))
        for var, constant in zip(inner.jaxpr.constvars, inner.consts, strict=True):
            own[var] = Var(var.aval)
            flat.constants[own[var]] = constant
        _inline(flat, inner.jaxpr.eqns, own, source.name_stack)
        names.update(zip(equation.outvars, [_named(atom, own) for atom in inner.jaxpr.outvars], strict=True))


def _is_entered(equation: Equation) -> bool:
    name = equation.primitive.name
    return name in INLINE_CALLS or (name not in AGAIN and jaxprs.has_collective(equation))


def _named(atom: Atom, names: dict[Var, Atom]) -> Atom:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)
