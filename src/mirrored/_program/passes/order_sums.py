"""Large gradients are made, and their sums started, before the backward pass goes on.

A step adds its gradients up at its end, and XLA makes a value as late as it likes. So the two operands of a weight's gradient,
such as the logits and their derivative, stay in memory until the backward pass is over. Here the backward pass waits: at a
product with a large weight, and where it computes something again, its value passes a barrier together with the large
gradients made so far. Then their sums start, and `LAG` such places later the backward pass waits for the sums. To move the sums
alone gains nothing, because XLA reorders operations; it keeps barriers. docs/design/passes.md has the figures.

Nothing here knows a layer. The same numbers are added in the same way, so float32 results have the same bits. Barriers change
what XLA fuses, and so where it rounds bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp

from ..._jax import jaxprs, primitives, tracing
from ..._jax.jaxprs import Atom, ClosedJaxpr, Equation, Var
from .flat import flattened, varying_in
from .proven import LARGE_BYTES, Proven

#: How many places later the backward pass waits for a sum: with 1, half as many products run beside each sum.
LAG = 2
PRODUCTS = primitives.DOT_PRODUCTS | primitives.CONVOLUTIONS
_BETWEEN = primitives.ELEMENTWISE | primitives.SPREADS | primitives.TRANSPOSES | primitives.RESHAPES | primitives.PADS


def _is_between(equation: Equation) -> bool:
    """Tell whether an operation may stand between a gradient and its sum: it keeps the array's size."""
    return equation.primitive.name in _BETWEEN


def order_sums(step: Proven) -> Proven:
    """Start the sums of large gradients early, and let the backward pass wait for them."""
    jaxpr = step.closed.jaxpr
    equations, outputs = flattened(jaxpr)
    sums = {var: equation for equation in equations if jaxprs.is_sum(equation) for var in large(equation.invars)}
    if not sums:
        return step
    own_inputs = {var for var, is_own in zip(jaxpr.invars, step.own_inputs, strict=True) if is_own}
    differing = varying_in(jaxpr, equations, outputs, own_inputs)
    sums = {atom: equation for atom, equation in sums.items() if atom in differing}
    if not sums:
        return step
    early = terms_of(sums.keys(), equations, differing)
    order = _Order(differing, sums, early)
    for equation in moved_up(early, equations):
        order.take(equation)
    new = jaxpr.replace(eqns=order.equations, outvars=list(map(order.now, outputs)))
    return dataclasses.replace(step, closed=ClosedJaxpr(new, step.closed.consts))


def large(atoms: Sequence[Atom]) -> list[Var]:
    """Return the large floating point arrays among some values."""
    found = list[Var]()
    for atom in atoms:
        aval: Any = atom.aval
        is_float = isinstance(atom, Var) and jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating)
        if is_float and aval.size * aval.dtype.itemsize >= LARGE_BYTES:
            found.append(atom)
    return found


def terms_of(sums: Set[Var], equations: Sequence[Equation], differing: Set[Var]) -> set[Var]:
    """Return the operands of sums and the terms they are made of, without large values that are the same on every replica."""
    found = set(sums)
    for equation in reversed(equations):
        if _is_between(equation) and not found.isdisjoint(equation.outvars):
            found.update(var for var in equation.invars if isinstance(var, Var))
            found.difference_update(var for var in large(equation.invars) if var not in differing)
    return found


def moved_up(terms: Set[Var], equations: Sequence[Equation]) -> list[Equation]:
    """Move each equation between a gradient and its sum up, right behind the last of its operands."""
    behind: list[list[Equation]] = [[equation] for equation in equations]
    maker: dict[Var, int] = {}
    for place, equation in enumerate(equations):
        if _is_between(equation) and not terms.isdisjoint(equation.outvars):
            behind[place].pop(0)  # out of its old place
            place = max((maker.get(atom, 0) for atom in equation.invars if isinstance(atom, Var)), default=0)
            behind[place].append(equation)
        maker.update(dict.fromkeys(equation.outvars, place))
    return [equation for group in behind for equation in group]


class _Order:
    """A program in the making, in which the backward pass waits for large gradients and their sums."""

    def __init__(self, differing: set[Var], sums: Mapping[Var, Equation], terms: Set[Var]) -> None:
        self.equations: list[Equation] = []
        self._differing, self._sums, self._terms = differing, sums, terms
        self._totals = {total for equation in sums.values() for total in equation.outvars}
        self._names: dict[Var, Var] = {}  # value -> the same behind a barrier
        self._made: list[Var] = []  # gradients, and terms of gradients, for which nothing has waited
        self._started: list[list[Var]] = [[] for _ in range(LAG)]  # the sums for which nothing has waited, place by place
        self._done: set[Var] = set()  # the sums that have been started

    def now(self, atom: Atom) -> Atom:
        return self._names.get(atom, atom) if isinstance(atom, Var) else atom

    def take(self, equation: Equation) -> None:
        """Add an equation, without the sums that have started; if the backward pass waits here, add a barrier first."""
        if waiting := self._waiting(equation):
            self._wait(waiting)
        invars, outvars = list(equation.invars), list(equation.outvars)
        is_sum = not self._totals.isdisjoint(outvars)
        if is_sum:
            rest = [k for k, total in enumerate(outvars) if total not in self._done]
            invars, outvars = [invars[k] for k in rest], [outvars[k] for k in rest]
        if is_sum or (_is_between(equation) and not self._terms.isdisjoint(outvars)):
            self._made = [var for var in self._made if var not in equation.invars]
        if outvars or not is_sum:
            self._add(equation, invars, outvars)
        self._made += [var for var in large(outvars) if var in self._terms]

    def _add(self, equation: Equation, invars: Sequence[Atom], outvars: Sequence[Var]) -> None:
        self.equations.append(equation.replace(invars=list(map(self.now, invars)), outvars=list(outvars)))

    def _waiting(self, equation: Equation) -> list[Var]:
        """Return the operands that wait at an equation: those beside a large weight, or all of a barrier; else none."""
        waiting = [atom for atom in equation.invars if isinstance(atom, Var) and atom in self._differing]
        if equation.primitive.name in primitives.ONE_TO_ONE:
            return waiting
        has_weight = equation.primitive.name in PRODUCTS and not self._differing.issuperset(large(equation.invars))
        if not has_weight:
            return []
        return waiting

    def _wait(self, waiting: Sequence[Var]) -> None:
        made, self._made, due = self._made, [], self._started.pop(0)
        if made or due:
            held = list(dict.fromkeys([*waiting, *due, *made]))
            behind = [Var(var.aval) for var in held]
            self._add(tracing.barrier([var.aval for var in held]), held, behind)
            self._names.update(zip(held, behind, strict=True))
        self._started.append([self._start(var) for var in made if var in self._sums])

    def _start(self, gradient: Var) -> Var:
        """Start the sum of a gradient, and return it."""
        equation = self._sums[gradient]
        total = equation.outvars[equation.invars.index(gradient)]
        self._add(equation, [gradient], [total])
        self._done.add(total)
        return total
