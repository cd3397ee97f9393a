"""How replicas add up what TensorFlow's `cross_device_ops` names: hierarchically, at one device, in packs.

The result of each function has the same bits on every replica, though the mirror proof, which knows no groups of replicas,
could not tell: docs/design/collectives.md. So steps are proven with plain sums, and these take their place afterwards.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._options import CrossDeviceOps, HierarchicalCopyAllReduce, ReductionToOneDevice
from .._typing import REPLICA_AXIS

#: From this size on an array is added up hierarchically: docs/design/collectives.md.
SCATTER_FROM_BYTES = 32 * 1024


def is_for(ops: CrossDeviceOps | None, num_bytes: int) -> bool:
    """Tell whether there is a way other than XLA's all-reduce to add up an array of numbers of this size."""
    if isinstance(ops, HierarchicalCopyAllReduce):
        return num_bytes >= SCATTER_FROM_BYTES
    return isinstance(ops, ReductionToOneDevice)


def sum_by(ops: CrossDeviceOps | None, array: jax.Array, num_replicas: int, per_host: int) -> jax.Array:
    """Add up an array of numbers over the replicas in the way that `ops` names; `per_host` neighbours are on one host."""
    if not is_for(ops, array.size * array.dtype.itemsize):
        return jax.lax.psum(array, REPLICA_AXIS)
    if isinstance(ops, HierarchicalCopyAllReduce):
        return _hierarchical(array, num_replicas, per_host)
    return _in_order(list(jax.lax.all_gather(array, REPLICA_AXIS)))


def _hierarchical(array: jax.Array, num_replicas: int, per_host: int) -> jax.Array:
    """Add up inside each host, then between the hosts, each replica its share."""
    if per_host == 1:
        return jax.lax.psum(array, REPLICA_AXIS)
    hosts = [list(range(first, first + per_host)) for first in range(0, num_replicas, per_host)]
    inside = hosts if len(hosts) > 1 else None
    flat = jnp.pad(array.reshape(-1), (0, -array.size % per_host))
    share = jax.lax.psum_scatter(flat, REPLICA_AXIS, axis_index_groups=inside, tiled=True)
    if inside is not None:
        between = [list(peers) for peers in zip(*hosts, strict=True)]
        share = jax.lax.psum(share, REPLICA_AXIS, axis_index_groups=between)
    whole = jax.lax.all_gather(share, REPLICA_AXIS, axis_index_groups=inside, tiled=True)
    return whole[: array.size].reshape(array.shape)


def _in_order(rows: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, rows)


def accumulated(ops: ReductionToOneDevice, stack: jax.Array) -> jax.Array:
    """Add the replicas' arrays, `[R, ...]`, up in their order, or give them to the function that takes the place of the sum.

    Raises:
        TypeError: when it returns something else than an array like one of them.
    """
    rows = list(stack)
    if ops.accumulation_fn is None:
        return _in_order(rows)
    result = ops.accumulation_fn(rows)
    expected = f"{rows[0].dtype}{list(rows[0].shape)}"
    if not hasattr(result, "dtype") or (jnp.shape(result), result.dtype) != (rows[0].shape, rows[0].dtype):
        given = f"{result.dtype}{list(jnp.shape(result))}" if hasattr(result, "dtype") else repr(result)
        raise TypeError(
            f"accumulation_fn returned {given} for {len(rows)} arrays {expected}; expected one array like them, such as that of "
            "lambda values: jnp.stack(values).max(axis=0)."
        )
    return result


def packs_of(arrays: Sequence[jax.Array], num_packs: int) -> list[list[int]]:
    """Share out arrays, by their positions, among packs of about equal bytes for each dtype; 0 packs: each array alone."""
    if num_packs == 0:
        return [[position] for position in range(len(arrays))]
    totals: Counter[Any] = Counter()
    for array in arrays:
        totals[array.dtype] += array.size
    packs: dict[Any, list[int]] = defaultdict(list)
    before: Counter[Any] = Counter()
    for position, array in enumerate(arrays):
        number = before[array.dtype] * num_packs // max(totals[array.dtype], 1)
        packs[array.dtype, min(number, num_packs - 1)].append(position)
        before[array.dtype] += array.size
    return list(packs.values())
