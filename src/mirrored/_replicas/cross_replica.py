"""What cross-replica code does with a value that has a replica axis: reduce, gather, split.

These are plain functions of the stacked array `[R, ...]`. Called from outside they run as one compiled
program whose collectives XLA's partitioner writes; in `mr.function` and `merge_call` they are traced in place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from .._errors import UnevenReplicasError
from .._options import ReduceOp, ReductionToOneDevice, VariableAggregation
from .._typing import Shape
from .._workers import joint_programs
from . import in_flight
from .collectives import Axes, accumulate, finished, join_rows, local_sums
from .per_replica import PerReplica, uneven_shapes


def reduce_stack(
    stack: jax.Array, op: ReduceOp, axes: Axes, shapes: tuple[Shape, ...] | None, ops: ReductionToOneDevice | None = None
) -> jax.Array:
    """Reduce over `axes` of each replica's value, counting only real rows, and over the replicas, as the user's function does."""
    stack, count = with_zero_padding(stack, axes, shapes)
    own_axes = tuple(axis + 1 for axis in axes)
    if ops is None:
        return finished(op, local_sums(op, stack, (0, *own_axes), count), count, stack.dtype)
    [own] = local_sums(op, stack, own_axes, 0)
    return finished(op, [accumulate(ops, own)], count, stack.dtype)


def with_zero_padding(stack: jax.Array, axes: Axes, shapes: tuple[Shape, ...] | None) -> tuple[jax.Array, int]:
    """Return the stack with zeros in what is no row of a replica, and how many elements make one of the result."""
    if shapes is not None:
        stack = jnp.where(_is_real(stack.shape, shapes), stack, jnp.zeros_like(stack))
    true_shapes = shapes or (stack.shape[1:],) * stack.shape[0]
    return stack, sum(math.prod(shape[a] for a in axes) for shape in true_shapes)


def reduce_mirrored(value: jax.Array, op: ReduceOp, axes: Axes, num_replicas: int, ops: ReductionToOneDevice | None) -> jax.Array:
    """Reduce a value that is the same on each replica: the SUM is R times it, the MEAN is itself, to the bit."""
    if ops is not None:
        return reduce_stack(broadcast_stack(value, num_replicas), op, axes, None, ops)
    count = math.prod(value.shape[a] for a in axes)
    result = finished(op, local_sums(op, value, axes, count), count, value.dtype)
    return result * jnp.asarray(num_replicas).astype(result.dtype) if op is ReduceOp.SUM else result


def gather_stack(stack: jax.Array, axis: int, shapes: tuple[Shape, ...] | None, whole: NamedSharding | None) -> jax.Array:
    """Concatenate the replicas' values along `axis`, in replica order.

    With `whole`, the stack is brought to all devices first: XLA takes one row out of a split array by adding zeros, which
    makes 0.0 of -0.0.
    """
    if whole is not None:
        stack = jax.lax.with_sharding_constraint(stack, whole)
    true_shapes = shapes or (stack.shape[1:],) * stack.shape[0]
    return join_rows(stack, axis, [shape[axis] for shape in true_shapes])


def gather_mirrored(value: jax.Array, axis: int, num_replicas: int) -> jax.Array:
    """Concatenate a value that is the same on each replica."""
    return jnp.concatenate([value] * num_replicas, axis=axis)


def aggregate_stack(stack: jax.Array, mode: VariableAggregation) -> jax.Array:
    """Make one value of the copies of a variable; the dtype stays."""
    if mode is not VariableAggregation.MEAN and jnp.iscomplexobj(stack):
        return jax.lax.complex(aggregate_stack(stack.real, mode), aggregate_stack(stack.imag, mode))
    is_floating = jnp.issubdtype(stack.dtype, jnp.floating)
    if mode is VariableAggregation.ONLY_FIRST_REPLICA:
        return _first_bits(stack) if is_floating else stack[0]
    if mode is VariableAggregation.SUM and is_floating:
        return _sum_by_bits(stack)
    return reduce_stack(stack, ReduceOp[mode.name], (), None).astype(stack.dtype)


@jax.custom_jvp
def _first_bits(stack: jax.Array) -> jax.Array:
    """Take the first copy by its bits: XLA takes a row out of a split array by adding zeros, 0.0 for -0.0 and subnormals."""
    return jax.lax.bitcast_convert_type(_bits_of(stack)[0], stack.dtype)


@_first_bits.defjvp
def _first_tangent(stacks: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _first_bits(stacks[0]), tangents[0][0]


@jax.custom_jvp
def _sum_by_bits(stack: jax.Array) -> jax.Array:
    """Add up copies. If all but one are zero, take the bits of that one: XLA on CPU takes a subnormal for zero when it adds."""
    bits = _bits_of(stack)
    is_zero = (bits << 1) == 0
    alone = jax.lax.bitcast_convert_type(jnp.sum(jnp.where(is_zero, 0, bits), axis=0, dtype=bits.dtype), stack.dtype)
    return jnp.where(jnp.sum(~is_zero, axis=0) == 1, alone, reduce_stack(stack, ReduceOp.SUM, (), None))


@_sum_by_bits.defjvp
def _sum_tangent(stacks: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _sum_by_bits(stacks[0]), reduce_stack(tangents[0], ReduceOp.SUM, (), None)


def _bits_of(value: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(value, f"uint{jnp.finfo(value.dtype).bits}")


def broadcast_stack(value: jax.Array, num_replicas: int) -> jax.Array:
    """Give every replica the same value."""
    return jnp.broadcast_to(value, (num_replicas, *value.shape))


def split_stack(value: jax.Array, num_replicas: int) -> jax.Array:
    """Give every replica a part of `value`, such that the parts add up to exactly `value` in any order.

    All parts are multiples of the spacing of floating point numbers at `value` (of 1 for integers) and no
    partial sum is larger than `value`, so no addition rounds. 7 over 2 replicas is 4 and 3. A subnormal, which XLA on CPU
    takes for zero in all arithmetic, is the first replica's.
    """
    if value.dtype == jnp.bool_ or not jnp.issubdtype(value.dtype, jnp.number):
        raise TypeError(f"a value of dtype {value.dtype} cannot be split into a sum over replicas.")
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return jax.lax.complex(split_stack(value.real, num_replicas), split_stack(value.imag, num_replicas))
    part = _part(value, num_replicas)
    first = jnp.where(part == 0, value, value - part * (num_replicas - 1))
    return jnp.concatenate([first[None], jnp.broadcast_to(part, (num_replicas - 1, *value.shape))])


def _part(value: jax.Array, num_replicas: int) -> jax.Array:
    if jnp.issubdtype(value.dtype, jnp.integer):
        return jax.lax.div(value, jnp.full_like(value, num_replicas))  # rounds towards zero
    magnitude = jnp.abs(value)
    spacing = magnitude - jnp.nextafter(magnitude, jnp.zeros_like(magnitude))
    part = jnp.trunc(value / num_replicas / spacing) * spacing
    return jnp.where(jnp.isfinite(value) & (magnitude > 0) & jnp.isfinite(part), part, 0).astype(value.dtype)


def _is_real(padded: Shape, shapes: tuple[Shape, ...]) -> jax.Array:
    mask = jnp.ones(padded, jnp.bool_)
    for axis in range(len(padded) - 1):
        sizes = jnp.array([shape[axis] for shape in shapes]).reshape(-1, *(1,) * (len(padded) - 1))
        mask &= jax.lax.broadcasted_iota(jnp.int32, padded, axis + 1) < sizes
    return mask


def require_equal_except(axes: Axes, value: PerReplica, verb: str) -> None:
    """Refuse a PerReplica whose replicas' shapes differ along an axis that is not one of `axes`."""
    shapes = uneven_shapes(value)
    if shapes is None or len({tuple(size for a, size in enumerate(shape) if a not in axes) for shape in shapes}) == 1:
        return
    different = [a for a, size in enumerate(value.shape) if size is None]
    named = "axis=None" if not axes else f"axis={axes[0] if len(axes) == 1 else axes}"
    remedy = f"axis={different[0]}" if len(different) == 1 else f"axis={tuple(different)}"
    raise UnevenReplicasError(
        f"{verb} with {named} needs equal shapes on all replicas apart from that axis, but they are "
        f"{', '.join(map(str, shapes))}. "
        + (
            f"Name the axis along which they differ: strategy.{verb}(..., {remedy})"
            + (", which also counts the true number of rows." if verb == "reduce" else ".")
            if verb == "reduce" or len(different) == 1
            else "gather joins along one axis only; use strategy.local_results for the separate values."
        )
    )


def compiled(function: Callable[..., Any], placement: NamedSharding, *static: Any) -> Callable[..., Any]:
    """Return `function(array, *static)`, or of a list of arrays, as a compiled program with a known placement of its results."""
    return functools.partial(in_flight.dispatch, placement, _compile(function, placement, static))


@functools.lru_cache(maxsize=1024)
def _compile(function: Callable[..., Any], placement: NamedSharding, static: tuple[Any, ...]) -> Any:
    program = jax.jit(lambda array: function(array, *static), out_shardings=placement)
    return joint_programs.agreed(function.__name__, str(static), program) if in_flight.is_joint(placement) else program
