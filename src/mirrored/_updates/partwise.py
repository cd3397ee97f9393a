"""Evaluates a traced function on parts: each replica computes the elements that it holds, and gathers the others when needed.

A value is one of four: this replica's `OwnPart` of an array; its `OwnSum`, which still needs a sum over the replicas; an array
`Filled` with one number; or a whole array or number, the same on every replica. Elementwise operations run on parts, all others
on whole arrays, after an all-gather. So the result equals that of whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from .._jax import jaxprs, tracing
from .._jax.interpreter import Interpreter
from .._jax.primitives import AXIS_SUMS, BROADCASTS, COMMUTATIVE, ELEMENTWISE
from .._replicas import parts
from .._replicas.collectives import ReplicaAxis
from .._typing import Shape


class OwnPart(NamedTuple):
    """This replica's elements of an array, and the shape of the whole array."""

    array: jax.Array
    shape: Shape


class OwnSum(NamedTuple):
    """This replica's share of a sum over the replicas, which is still to be made."""

    array: jax.Array


class Filled(NamedTuple):
    """An array in which every element is one number."""

    number: jax.Array
    shape: Shape


Value: TypeAlias = OwnPart | OwnSum | Filled | jax.Array


class Partwise(Interpreter[Value]):
    """An evaluation of traced functions on parts.

    Args:
        same: marks a whole value that is used with parts, and returns it: it must be the same on every replica. The result
            of an all-gather looks the same, even if the replicas' parts came from different arrays.
    """

    def __init__(self, axis: ReplicaAxis, same: Callable[[jax.Array], jax.Array]) -> None:
        self.axis = axis
        self._same = same
        self._made: dict[int, tuple[jax.Array, jax.Array]] = {}  # id of an array -> the array, and what was made of it

    def part(self, value: Value, shape: Shape) -> jax.Array:
        """Return this replica's elements of a value with this whole shape."""
        if isinstance(value, OwnPart):
            return value.array
        if isinstance(value, Filled):
            return jnp.broadcast_to(self._note(value.number), (parts.part_size(shape, self.axis.size),))
        return parts.own_part(self._note(self.whole(value)), self.axis)

    def whole(self, value: Value) -> jax.Array:
        """Return a value as a whole array."""
        if isinstance(value, Filled):
            return jnp.broadcast_to(value.number, value.shape)
        if isinstance(value, OwnSum):
            return self._once(value.array, lambda array: self.axis.sum([array])[0])
        if isinstance(value, OwnPart):
            return self._once(value.array, lambda array: parts.all_gather_parts([array], [value.shape], self.axis)[0])
        return value

    def call(self, equation: Any, inner: jaxprs.ClosedJaxpr, values: list[Value]) -> Sequence[Value]:
        """Evaluate inside a call that has parts as arguments; treat any other call as one operation."""
        has_parts = any(isinstance(value, OwnPart | OwnSum) for value in values)
        return self.run_closed(inner, values) if has_parts else self.plain(equation, values)

    def plain(self, equation: Any, values: list[Value]) -> Sequence[Value]:
        """Run an operation on parts if possible, else on whole arrays."""
        name = equation.primitive.name
        if name in ELEMENTWISE and _is_by_place(equation):
            shape = equation.outvars[0].aval.shape
            if any(isinstance(value, OwnPart) for value in values):
                return [OwnPart(self._by_place(equation, values, shape), shape)]
            numbers = [number for value in values if (number := _number_in(value)) is not None]
            if any(isinstance(value, Filled) for value in values) and len(numbers) == len(values):
                [number] = tracing.bind(equation, numbers)
                return [Filled(number, shape)]
        if name in BROADCASTS and len(values) == 1 and (number := _number_in(values[0])) is not None:
            return [Filled(number, equation.outvars[0].aval.shape)]
        if name in COMMUTATIVE | AXIS_SUMS and (total := self._sum(equation, values)) is not None:
            return [total]
        return tracing.bind(equation, list(map(self.whole, values)))

    def _by_place(self, equation: Any, values: Sequence[Value], shape: Shape) -> jax.Array:
        """Run an elementwise operation on this replica's elements of all operands, and on scalars unchanged."""
        operands = []
        for atom, value in zip(equation.invars, values, strict=True):
            is_scalar = atom.aval.shape == () != shape
            operands.append(self._note(self.whole(value)) if is_scalar else self.part(value, shape))
        [result] = tracing.bind(equation, operands)
        return result

    def _sum(self, equation: Any, values: Sequence[Value]) -> OwnSum | None:
        """Return this replica's share where an equation adds up all elements of an array, or adds to a sum; else None."""
        if equation.primitive.name in COMMUTATIVE:
            if equation.outvars[0].aval.shape != () or not any(isinstance(value, OwnSum) for value in values):
                return None
            return OwnSum(*tracing.bind(equation, [v.array if isinstance(v, OwnSum) else self._of_first(v) for v in values]))
        [value] = values
        if not isinstance(value, OwnPart) or len(equation.params["axes"]) < len(value.shape):
            return None
        is_real = jnp.arange(value.array.size) < parts.num_real(value.shape, self.axis)
        real = jnp.where(is_real, value.array, jnp.zeros_like(value.array))
        return OwnSum(jnp.sum(real, dtype=value.array.dtype))

    def _of_first(self, value: Value) -> jax.Array:
        """Return a value on the first replica and zero on the others, so that they add up to the value."""
        whole = jnp.asarray(self._note(self.whole(value)))
        return jnp.where(self.axis.index() == 0, whole, jnp.zeros_like(whole))

    def _note(self, value: jax.Array) -> jax.Array:
        """Mark a value as one that must be the same on every replica."""
        return self._once(value, self._same) if isinstance(value, jax.core.Tracer) else value

    def _once(self, array: jax.Array, make: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Return `make(array)`, made once for each array; keep the array, so that no other one gets its `id`."""
        if id(array) not in self._made:
            self._made[id(array)] = array, make(array)
        return self._made[id(array)][1]


def _is_by_place(equation: Any) -> bool:
    """Tell whether every operand is a scalar or has the result's shape, and the operation names no placement."""
    [result] = equation.outvars
    shapes = {atom.aval.shape for atom in equation.invars}
    return shapes <= {(), result.aval.shape} and not any(isinstance(v, jax.sharding.Sharding) for v in equation.params.values())


def _number_in(value: Value) -> jax.Array | None:
    """Return the one number in a filled or scalar value, else None."""
    if isinstance(value, Filled):
        return value.number
    return value if not isinstance(value, OwnPart | OwnSum) and jnp.ndim(value) == 0 else None
