"""A value in parts: each replica has the same number of its elements, in order, in a flat array that ends with zeros."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from .._options import ReduceOp
from .._typing import REPLICA_AXIS, Shape
from .collectives import ReplicaAxis, divide, groups_of, wide_by_rows


def part_size(shape: Shape, num_replicas: int) -> int:
    """Return how many elements each replica has of a value of this shape; the last ones may be zeros beyond its end."""
    return -(-math.prod(shape) // num_replicas)


def split_parts(whole: jax.Array, num_replicas: int) -> jax.Array:
    """Return the parts of all replicas, `[R, part]`, of a whole value."""
    flat = whole.reshape(-1)
    size = part_size(whole.shape, num_replicas)
    if num_replicas * size > flat.size:
        flat = jnp.pad(flat, (0, num_replicas * size - flat.size))
    return flat.reshape(num_replicas, size)


def join_parts(stack: Any, shape: Shape, everywhere: NamedSharding | None = None) -> Any:
    """Return the whole value of the parts of all replicas, `[R, part]`, on the devices or on the host.

    With `everywhere`, the parts are brought to all devices first, as they are: XLA may add zeros to join them, which makes
    0.0 of -0.0.
    """
    if everywhere is not None:
        stack = jax.lax.with_sharding_constraint(stack, everywhere)
    return stack.reshape(-1)[: math.prod(shape)].reshape(shape)


def own_part(whole: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Return this replica's part, `[part]`, of a value that is the same on every replica."""
    return jax.lax.dynamic_index_in_dim(split_parts(whole, axis.size), axis.index(), keepdims=False)


def num_real(shape: Shape, axis: ReplicaAxis) -> Any:
    """Return how many elements of this replica's part belong to the value; the zeros at its end do not."""
    size, total = part_size(shape, axis.size), math.prod(shape)
    return jnp.asarray([min(max(total - i * size, 0), size) for i in range(axis.size)], jnp.int32)[axis.index()]


def reduce_scatter(op: ReduceOp, arrays: Sequence[jax.Array], axis: ReplicaAxis) -> list[jax.Array]:
    """Combine arrays over the replicas, and return this replica's part of each; a MEAN weighs by rows, as in `all_reduce`."""
    if op is ReduceOp.SUM:
        return _packed(arrays, axis, _scattered)
    _, count = axis.rows()
    totals = _packed(wide_by_rows(arrays, axis), axis, _scattered)
    return [divide(total, count, array.dtype) for total, array in zip(totals, arrays, strict=True)]


def _scattered(arrays: Sequence[jax.Array], axis: ReplicaAxis) -> list[jax.Array]:
    rows = [split_parts(array, axis.size) for array in arrays]
    if not axis.bound:
        return [row[0] for row in rows]
    buffer = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)
    return _cut(jax.lax.psum_scatter(buffer, REPLICA_AXIS), [row.shape[1] for row in rows])


def all_gather_parts(parts: Sequence[jax.Array], shapes: Sequence[Shape], axis: ReplicaAxis) -> list[jax.Array]:
    """Return the whole values of which each replica gives its part."""
    stacks = _packed(parts, axis, _stacked)
    return [join_parts(stack, shape) for stack, shape in zip(stacks, shapes, strict=True)]


def _stacked(parts: Sequence[jax.Array], axis: ReplicaAxis) -> list[jax.Array]:
    return _cut(axis.stack(parts[0] if len(parts) == 1 else jnp.concatenate(parts)), [part.size for part in parts])


def _cut(buffer: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Cut the last axis of a buffer into pieces of these sizes."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [buffer] if len(sizes) == 1 else jnp.split(buffer, ends[:-1], axis=-1)


def _packed(
    arrays: Sequence[jax.Array], axis: ReplicaAxis, collective: Callable[[list[jax.Array], ReplicaAxis], list[jax.Array]]
) -> list[jax.Array]:
    """Give small arrays to a collective together, large ones alone."""
    results: list[Any] = [None] * len(arrays)
    for members in groups_of(arrays, axis.bytes_per_pack):
        for i, result in zip(members, collective([arrays[i] for i in members], axis), strict=True):
            results[i] = result
    return results
