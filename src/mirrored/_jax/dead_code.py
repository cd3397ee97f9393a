"""Cuts a loop, condition or call down to what some of its results need, by JAX's own dead-code elimination."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
from jax._src import core
from jax._src.interpreters import partial_eval

from . import jaxprs, user_code
from .jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Var
from .marks import Mark, Purpose, mark_p
from .primitives import CUSTOM_DERIVATIVE


class Smaller(NamedTuple):
    """An equation that computes some of another equation's results."""

    equation: Equation
    operands: list[int]  # the positions of its operands among the other's
    results: list[int]


def all_of(equation: Equation) -> Smaller:
    """Return all of an equation as a part of it."""
    return Smaller(equation, list(range(len(equation.invars))), list(range(len(equation.outvars))))


def is_undivided(equation: Equation) -> bool:
    """Tell whether an equation, or one inside it, has jaxprs that JAX cannot cut."""
    found = (equation, *jaxprs.inside(equation))
    return any(jaxprs.inner_jaxprs(inner) and computing(inner, range(len(inner.outvars))) is None for inner in found)


def computing(equation: Equation, results: Collection[int]) -> Smaller | None:
    """Cut an equation down to what these results need; return None if JAX cannot."""
    inner = jaxprs.inner_jaxprs(equation)
    if not inner or equation.primitive not in partial_eval.dce_rules:
        return None
    operands: list[Atom] = [Var(atom.aval) for atom in equation.invars]
    outputs = [Var(atom.aval) for atom in equation.outvars]
    alone = equation.replace(invars=operands, outvars=outputs)
    jaxpr = inner[0].jaxpr.replace(constvars=[], invars=operands, outvars=outputs, eqns=[alone], effects=equation.effects)
    used = [position in results for position in range(len(outputs))]
    smaller, _ = partial_eval.dce_jaxpr(jaxpr, used)
    if len(smaller.eqns) != 1:
        return None
    [found] = smaller.eqns
    places = {variable: position for position, variable in enumerate(outputs)}
    if not all(atom in operands for atom in found.invars) or not all(variable in places for variable in found.outvars):
        return None
    return Smaller(found, [operands.index(atom) for atom in found.invars], [places[variable] for variable in found.outvars])


def pruned(closed: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """Return a program without what no result needs, and its constants."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jaxpr, closed.consts


def opened(equation: Equation) -> Equation:
    """Return an equation in which calls with custom derivatives are plain calls, at any depth.

    JAX keeps all operands of such a call, because its derivative may need them. Taking the derivative of the returned
    equation, from outside the step, is an error.
    """
    if all(inner.primitive.name not in CUSTOM_DERIVATIVE for inner in (equation, *jaxprs.inside(equation))):
        return equation
    inner = jaxprs.callee(equation)
    if equation.primitive.name not in CUSTOM_DERIVATIVE or inner is None:
        return equation.replace(params={name: jax.tree.map(_opened_inside, value) for name, value in equation.params.items()})
    results = [Var(atom.aval) for atom in inner.jaxpr.outvars]
    note = Mark(Purpose.NO_DERIVATIVE, "", user_code.equation_line(equation))
    marks = [
        equation.replace(invars=[old], outvars=[new], primitive=mark_p, params={"note": note}, effects=core.no_effects)
        for old, new in zip(inner.jaxpr.outvars, results, strict=True)
    ]
    jaxpr = inner.jaxpr.replace(eqns=[*map(opened, inner.jaxpr.eqns), *marks], outvars=results)
    return equation.replace(primitive=core.closed_call_p, params={"call_jaxpr": ClosedJaxpr(jaxpr, inner.consts)})


def _opened_inside(value: object) -> object:
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(value.jaxpr.replace(eqns=list(map(opened, value.jaxpr.eqns))), value.consts)
    return value.replace(eqns=list(map(opened, value.eqns))) if isinstance(value, Jaxpr) else value
