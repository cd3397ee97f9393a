"""Divides a value into parts: each replica gets equally many elements, in order; zeros pad the last parts."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from .._options import ReduceOp
from .._typing import REPLICA_AXIS, Shape
from .collectives import ReplicaAxis, move_packed, weigh_by_rows
from .reductions import divide

#: For more replicas at once XLA makes an all-reduce and a slice on TPUs; for groups of neighbours, and then across the groups,
#: reduce-scatters (16 to 256 chips of v5e, v5p and v6e).
MOST_AT_ONCE = 8


def part_size(shape: Shape, num_replicas: int) -> int:
    """Return the number of elements in each replica's part of a value of this shape, padding included."""
    return -(-math.prod(shape) // num_replicas)


def split_parts(whole: jax.Array, num_replicas: int) -> jax.Array:
    """Return the parts of all replicas, `[R, part]`, of a whole value."""
    flat = whole.reshape(-1)
    size = part_size(whole.shape, num_replicas)
    if num_replicas * size > flat.size:
        flat = jnp.pad(flat, (0, num_replicas * size - flat.size))
    return flat.reshape(num_replicas, size)


def join_parts(stack: Any, shape: Shape, everywhere: NamedSharding | None = None) -> Any:
    """Join the parts of all replicas, `[R, part]`, into the whole value, on the devices or on the host.

    With `everywhere`, bring the parts to all devices first: XLA may join them by adding zeros, which turns -0.0 into 0.0.
    """
    if everywhere is not None:
        stack = jax.lax.with_sharding_constraint(stack, everywhere)
    return stack.reshape(-1)[: math.prod(shape)].reshape(shape)


def own_part(whole: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Return this replica's part, `[part]`, of a value that is the same on every replica."""
    return jax.lax.dynamic_index_in_dim(split_parts(whole, axis.size), axis.index(), keepdims=False)


def num_real(shape: Shape, axis: ReplicaAxis) -> Any:
    """Return the number of elements in this replica's part, without padding."""
    size, total = part_size(shape, axis.size), math.prod(shape)
    return jnp.asarray([min(max(total - i * size, 0), size) for i in range(axis.size)], jnp.int32)[axis.index()]


def reduce_scatter(op: ReduceOp, arrays: Sequence[jax.Array], axis: ReplicaAxis) -> list[jax.Array]:
    """Combine arrays over the replicas, and return this replica's part of each; a MEAN weighs by rows, as in `all_reduce`."""
    is_mean = {ReduceOp.SUM: False, ReduceOp.MEAN: True}[op]  # an optimizer takes no other
    values = weigh_by_rows(arrays, axis) if is_mean else arrays
    rows = [split_parts(value, axis.size) for value in values]
    scatter = functools.partial(_scatter, axis.lanes) if axis.bound else operator.itemgetter(0)
    own = move_packed(rows, axis.groups(values), lambda packs: list(map(scatter, packs)), num_kept=1)
    if not is_mean:
        return own
    _, count = axis.rows()
    return [divide(total, count, array.dtype) for total, array in zip(own, arrays, strict=True)]


def _scatter(lanes: int, pack: jax.Array) -> jax.Array:
    """Add up the replicas' packs, `[R, n]`, and return this replica's row; with `lanes`, scatter rows of so many numbers."""
    if not lanes:
        return jax.lax.psum_scatter(pack, REPLICA_AXIS)
    count, size = pack.shape
    near = count
    if count > MOST_AT_ONCE:  # in two rounds, first among `near` neighbours: the smallest divisor from the square root on
        near = next(k for k in range(1, count + 1) if count % k == 0 and k**2 >= count)
    rows = jnp.pad(pack, ((0, 0), (0, -size % lanes))).reshape(count // near, near, -1, lanes).swapaxes(0, 1).reshape(-1, lanes)
    neighbours = [list(range(i, i + near)) for i in range(0, count, near)]
    rounds = [neighbours, list(zip(*neighbours, strict=True))] if near < count else [None]
    for groups in rounds:
        rows = jax.lax.psum_scatter(rows, REPLICA_AXIS, tiled=True, axis_index_groups=groups)
    return rows.reshape(-1)[:size]


def all_gather_parts(parts: Sequence[jax.Array], shapes: Sequence[Shape], axis: ReplicaAxis) -> list[jax.Array]:
    """Gather the replicas' parts into whole values."""
    stacks = move_packed(parts, axis.groups(parts), lambda packs: list(map(axis.stack, packs)))
    return [join_parts(stack, shape) for stack, shape in zip(stacks, shapes, strict=True)]
