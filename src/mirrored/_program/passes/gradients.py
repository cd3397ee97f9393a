"""Finds what is added up over the replicas, and moves what stands between a value and its sum up to where the value is made.

A user sums gradients at the end of a step. XLA then makes weight gradients late, and keeps their operands until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..._jax import jaxprs, primitives
from ..._jax.jaxprs import Atom, Equation, Var
from ..._jax.marks import mark_p

#: Operations that make a summed value of others, and run as soon as these are there.
_MOVED_UP = primitives.ELEMENTWISE | primitives.RESHAPES | primitives.TRANSPOSES | primitives.IDENTITIES


class Gradients(NamedTuple):
    """The variables of a program that are added up over the replicas, and those that are only used to make such."""

    sums: set[Var]
    only: set[Var]  # the sums whose addends nothing else uses
    terms: set[Var]


def find_gradients(equations: Sequence[Equation], results: Sequence[Atom], is_summed: Sequence[bool]) -> Gradients:
    """Find what is added up in a program; `is_summed` tells which of its results are only added up outside of it."""
    uses: dict[Var, list[Any]] = {}
    for equation in equations:
        for atom in equation.invars:
            if isinstance(atom, Var):
                uses.setdefault(atom, []).append(equation)
    for atom, ends_in_sum in zip(results, is_summed, strict=True):
        if isinstance(atom, Var):
            uses.setdefault(atom, []).append(ends_in_sum)
    found = Gradients(set(), set(), set())
    for equation in reversed(equations):
        for var in equation.outvars:
            its = uses.get(var, [])
            if any(_adds_up(use, found.sums) for use in its):
                found.sums.add(var)
                if all(_adds_up(use, found.only) for use in its):
                    found.only.add(var)
            elif len(its) == 1 and not isinstance(its[0], bool) and _is_moved_up(its[0], found):
                found.terms.add(var)
    return found


def _adds_up(use: Any, sums: set[Var]) -> bool:
    if isinstance(use, bool):
        return use
    return jaxprs.is_sum(use) or (use.primitive is mark_p and use.outvars[0] in sums)


def _is_moved_up(equation: Equation, found: Gradients) -> bool:
    [first, *_] = equation.outvars
    return equation.primitive.name in _MOVED_UP and (first in found.sums or first in found.terms)


def moved_up(equations: Sequence[Equation], found: Gradients) -> list[Equation]:
    """Return the equations, with those between a gradient and its sum right behind the last of their operands."""
    behind: dict[int, list[Equation]] = {}  # the position of an equation -> it, and what follows it
    made_at: dict[Var, int] = {}
    for position, equation in enumerate(equations):
        place = position
        if _is_moved_up(equation, found):
            place = max((made_at.get(atom, -1) for atom in equation.invars if isinstance(atom, Var)), default=position)
        behind.setdefault(place, []).append(equation)
        made_at.update(dict.fromkeys(equation.outvars, place))
    return [equation for place in sorted(behind) for equation in behind[place]]
