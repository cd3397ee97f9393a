"""Runs operations on parts: each device computes the elements that it stores of an array that is the same on every replica.

The padding of the last parts may hold anything, even NaN, so operations that combine elements of several places leave it out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import along_axes, primitives, tracing
from ..._jax.jaxprs import Atom, Equation
from ..._replicas.division import Division
from ..._typing import Shape


@dataclasses.dataclass(eq=False, slots=True)
class Whole:
    """An array that this device holds whole."""

    array: Any
    is_same: bool  # on every replica, as the proof has shown
    number: Any = None  # the value of every element, if known


@dataclasses.dataclass(eq=False, slots=True)
class DevicePart:
    """This device's part of an array that is the same on every replica, and the shape of the whole array."""

    array: Any
    division: Division
    shape: Shape


@dataclasses.dataclass(eq=False, slots=True)
class Addend:
    """A per-replica value whose sum over the replicas is stored in parts; `value` is None where only the sum is used."""

    value: Whole | None
    division: Division
    total: Any = None  # this device's part of the sum, once the sum is begun


#: Operations that compute each element of their result from the operands' elements at the same place.
_BY_PLACE = primitives.ELEMENTWISE | primitives.SPREADS - primitives.RESHAPES
Value: TypeAlias = Whole | DevicePart | Addend
#: None: the operation needs whole arrays.
Results: TypeAlias = "list[DevicePart | Whole] | None"


def shape_of(atom: Atom) -> Shape:
    return getattr(atom.aval, "shape", ())  # a token has none


class Gathers(NamedTuple):
    """Makes parts of whole arrays, and whole arrays of parts, on this device."""

    name: str  # of the mesh's axis
    whole: Callable[[Value], Any]  # gathers

    def part(self, value: Value, division: Division, shape: Shape) -> Any:
        """Return this device's part of a value that is the same on every replica."""
        if isinstance(value, DevicePart) and value.division == division:
            return value.array
        if isinstance(value, Whole) and value.number is not None:
            return jnp.broadcast_to(value.number, division.part_shape(shape))
        return division.own_part(jnp.asarray(self.whole(value)), self.name)

    def real(self, array: jax.Array, division: Division, other: float) -> jax.Array:
        """Return a part with its padding replaced by the number `other`."""
        if not division.is_padded:
            return array
        position = division.begin(self.name) + jax.lax.broadcasted_iota(jnp.int32, array.shape, division.axis)
        return jnp.where(position < division.length, array, jnp.asarray(other, array.dtype))


def run_on_parts(gathers: Gathers, equation: Equation, values: Sequence[Value]) -> Results:
    """Run an operation with at least one operand in parts; return None if it needs whole arrays."""
    name, first = equation.primitive.name, next(value for value in values if isinstance(value, DevicePart))
    if any(isinstance(value, Addend) or (isinstance(value, Whole) and not value.is_same) for value in values):
        return None
    if any(isinstance(parameter, jax.sharding.Sharding) for parameter in equation.params.values()):
        return None
    if name in _BY_PLACE:
        return _by_place(gathers, equation, values, first)
    if name in along_axes.CONCATENATIONS:
        return _side_by_side(gathers, equation, values, first)
    if values[0] is first and (rule := _RULES.get(name)) is not None:
        return rule(gathers, equation, first, values[1:])
    return None


def _by_place(gathers: Gathers, equation: Equation, values: Sequence[Value], first: DevicePart) -> Results:
    """Run an elementwise operation on parts; operands that are broadcast along the divided axis stay whole."""
    shape, division, operands = shape_of(equation.outvars[0]), first.division, []
    for atom, value in zip(equation.invars, values, strict=True):
        given = shape_of(atom)
        if given and len(given) != len(shape):
            return None
        if given and given[division.axis] == division.length:
            operands.append(gathers.part(value, division, given))
        else:
            operands.append(gathers.whole(value))
    [result] = tracing.bind(equation, operands)
    return [DevicePart(result, division, shape)]


def _side_by_side(gathers: Gathers, equation: Equation, values: Sequence[Value], first: DevicePart) -> Results:
    """Concatenate along an axis that is not divided."""
    axis, shapes = equation.params["dimension"], list(map(shape_of, equation.invars))
    if axis == first.division.axis:
        return None
    parts = [gathers.part(value, first.division, shape) for value, shape in zip(values, shapes, strict=True)]
    [result] = tracing.bind(equation, parts)
    return [DevicePart(result, first.division, shape_of(equation.outvars[0]))]


# -- operations on one part


def _transpose(gathers: Gathers, equation: Equation, part: DevicePart, rest: Sequence[Value]) -> Results:
    order = equation.params["permutation"]
    division = dataclasses.replace(part.division, axis=order.index(part.division.axis))
    return [DevicePart(jax.lax.transpose(part.array, order), division, shape_of(equation.outvars[0]))]


def _reshape(gathers: Gathers, equation: Equation, part: DevicePart, rest: Sequence[Value]) -> Results:
    """Reshape if the parts are slices of the result, too: the axes before the divided one keep their number of elements."""
    new, old, division = shape_of(equation.outvars[0]), part.shape, part.division
    if "new_sizes" in equation.params and equation.params["dimensions"] is not None:
        return None
    before, count = math.prod(old[: division.axis]), division.num_parts
    for axis, length in enumerate(new):
        fits = length % count == division.length % count == 0 and (length % division.length == 0 or division.length % length == 0)
        if math.prod(new[:axis]) == before and length > 1 and (fits or length == division.length):
            moved = dataclasses.replace(division, axis=axis, length=length)
            return [DevicePart(jnp.reshape(part.array, moved.part_shape(new)), moved, new)]
    return None


def _broadcast(gathers: Gathers, equation: Equation, part: DevicePart, rest: Sequence[Value]) -> Results:
    new, axes = shape_of(equation.outvars[0]), equation.params["broadcast_dimensions"]
    division = dataclasses.replace(part.division, axis=int(axes[part.division.axis]))
    return [DevicePart(jax.lax.broadcast_in_dim(part.array, division.part_shape(new), axes), division, new)]


def _slice(gathers: Gathers, equation: Equation, part: DevicePart, rest: Sequence[Value]) -> Results:
    """Slice along axes that are not divided, at static or computed indices."""
    new, division, params = shape_of(equation.outvars[0]), part.division, dict(equation.params)
    if new[division.axis] != division.length or not all(isinstance(value, Whole) for value in rest):
        return None
    if "limit_indices" in params:
        params["limit_indices"] = division.part_shape(params["limit_indices"])
    else:
        params["slice_sizes"] = division.part_shape(params["slice_sizes"])
    [result] = tracing.bind(equation.replace(params=params), [part.array, *map(gathers.whole, rest)])
    return [DevicePart(result, division, new)]


def _reduce(gathers: Gathers, equation: Equation, part: DevicePart, rest: Sequence[Value]) -> Results:
    """Reduce along axes. Along the divided one, each device reduces its part, and a collective combines the results."""
    name, axes, division = equation.primitive.name, equation.params["axes"], part.division
    if division.axis not in axes:
        [reduced] = tracing.bind(equation, [part.array])
        moved = dataclasses.replace(division, axis=division.axis - sum(axis < division.axis for axis in axes))
        return [DevicePart(reduced, moved, shape_of(equation.outvars[0]))]
    [reduced] = tracing.bind(equation, [gathers.real(part.array, division, _neutral(name, part.array.dtype))])
    every = jax.lax.all_gather(reduced, gathers.name)[: division.num_parts]
    [result] = tracing.bind(equation.replace(params={**equation.params, "axes": (0,)}), [every])
    return [Whole(result, True)]


def _neutral(name: str, dtype: np.dtype) -> Any:
    """Return a reduction's neutral element, in a dtype."""
    number = np.asarray(along_axes.NEUTRAL[name])
    if not np.isinf(number):
        return number.astype(dtype)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if is_float and np.isinf(infinite := number.astype(dtype)):  # some types of 8 bits have no infinity
        return infinite
    if dtype == jnp.bool_:
        return number > 0
    limits = jnp.finfo(dtype) if is_float else jnp.iinfo(dtype)
    return limits.max if number > 0 else limits.min


_RULES: dict[str, Callable[[Gathers, Equation, DevicePart, Sequence[Value]], Results]] = {
    **dict.fromkeys(primitives.TRANSPOSES, _transpose),
    **dict.fromkeys(primitives.RESHAPES, _reshape),
    **dict.fromkeys(primitives.BROADCASTS, _broadcast),
    **dict.fromkeys(along_axes.SLICES, _slice),
    **dict.fromkeys(along_axes.NEUTRAL, _reduce),
}
