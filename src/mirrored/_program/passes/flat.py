"""A step as one list of equations: calls are opened, and what is computed again in a backward pass stands behind a barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..._jax import jaxprs, tracing
from ..._jax.interpreter import Flattening
from ..._jax.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Var
from ..._jax.marks import mark_p
from ..._jax.primitives import INLINE_CALLS
from ..proof import SAME, prove, varying


def flattened(jaxpr: Jaxpr) -> tuple[list[Equation], list[Atom]]:
    """Return the equations of a step, without our marks, and its outputs; loops, conditions and derivatives stay whole."""
    flat = _Flat()
    outputs = flat.run(jaxpr, jaxpr.constvars, jaxpr.invars)
    return flat.equations, outputs


def varying_in(jaxpr: Jaxpr, equations: Sequence[Equation], outputs: Sequence[Atom], own: set[Var]) -> set[Var]:
    """Prove a flattened program again, and return the variables that may differ by replica if its `own` inputs do."""
    states = [varying("its own") if var in own else SAME for var in jaxpr.invars]
    return own | prove(jaxpr.replace(eqns=list(equations), outvars=list(outputs)), states).varying


class _Flat(Flattening[Atom]):
    """A walk that makes the list."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self._around: Equation | None = None

    def constant(self, value: Any, aval: jax.core.AbstractValue) -> Atom:
        return value if isinstance(value, Var) else Literal(value, aval)

    def plain(self, equation: Equation, values: Sequence[Atom]) -> list[Atom]:
        if equation.primitive is mark_p:
            return list(values)
        outputs = [Var(variable.aval) for variable in equation.outvars]
        self.equations.append(jaxprs.inside_of(self._around, equation).replace(invars=list(values), outvars=outputs))
        return list(outputs)

    def call(self, equation: Equation, inner: ClosedJaxpr, values: list[Atom]) -> list[Atom]:
        held = jaxprs.held_operands(equation)
        if inner.consts or (held is None and equation.primitive.name not in INLINE_CALLS):
            return self.plain(equation, values)
        operands = list(values)
        if held:
            kept = self.plain(tracing.barrier([values[k].aval for k in held]), [values[k] for k in held])
            for k, value in zip(held, kept, strict=True):
                operands[k] = value
        outside, self._around = self._around, jaxprs.inside_of(self._around, equation)
        results = self.run_closed(inner, operands)
        self._around = outside
        return results
