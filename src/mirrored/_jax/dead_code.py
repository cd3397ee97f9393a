"""The smallest loop, condition or call that computes some of its results: JAX's own dead-code elimination."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from jax._src.interpreters import partial_eval

from . import jaxprs
from .jaxprs import Atom, Equation, Var


class Smaller(NamedTuple):
    """An equation that computes some results of another one."""

    equation: Equation
    operands: list[int]  # the positions of its operands among those of the other
    results: list[int]


def computing(equation: Equation, results: Collection[int]) -> Smaller | None:
    """Return the smallest equation that computes these results of another; None where JAX does not know one."""
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
