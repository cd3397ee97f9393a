"""Makes aligned host memory, which XLA's CPU devices use without a copy.

They keep the memory of a numpy array whose address is a multiple of 64, and copy any other array. They never write into it: a
program that is given such an array gets new memory. Give an array made here to nobody else: a device shares its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._typing import Shape
from .mesh import ReplicaMesh
from .platforms import platform_of

#: XLA's smallest alignment of a buffer on CPU.
_ALIGNMENT = 64
#: From this size on, a copy costs more than finding an aligned address.
_ALIGN_FROM_BYTES = 64 * 1024
#: From this size on, a gather goes through host memory; below it a program is better, because this thread need not wait.
_GATHER_FROM_BYTES = 1024 * 1024


def empty_rows(num_rows: int, shape: Shape, dtype: DTypeLike) -> np.ndarray:
    """Return new memory for `[num_rows, *shape]`, in which each row begins at an aligned address."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if num_rows * size < _ALIGN_FROM_BYTES:
        return np.empty((num_rows, *shape), dtype)
    stride = -(-size // _ALIGNMENT) * _ALIGNMENT
    memory = np.empty(num_rows * stride + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    rows = memory[start : start + num_rows * stride].reshape(num_rows, stride)[:, :size]
    return rows.view(dtype).reshape(num_rows, *shape)


def gathers(mesh: ReplicaMesh, stack: jax.Array) -> bool:
    """Tell whether to use `gather` for a stack: whether it is in this host's memory, and large."""
    return (
        mesh.is_alone
        and platform_of(mesh.mesh).is_host_memory
        and not isinstance(stack, jax.core.Tracer)
        and not jnp.issubdtype(stack.dtype, jax.dtypes.extended)
        and stack.nbytes >= _GATHER_FROM_BYTES
    )


def gather(mesh: ReplicaMesh, stack: jax.Array, axis: int, shapes: Sequence[Shape] | None) -> jax.Array:
    """Concatenate the replicas' values along `axis` in memory that all devices share; `shapes` are given if they differ."""
    shards = [(shard.index[0].start or 0, np.asarray(shard.data)) for shard in stack.addressable_shards]
    parts = {first + i: row for first, rows in shards for i, row in enumerate(rows)}
    rows = [parts[i] if shapes is None else parts[i][tuple(map(slice, shapes[i]))] for i in range(stack.shape[0])]
    size = sum(row.shape[axis] for row in rows)
    [joined] = empty_rows(1, (*rows[0].shape[:axis], size, *rows[0].shape[axis + 1 :]), stack.dtype)
    np.concatenate(rows, axis=axis, out=joined)
    return jax.device_put(joined, mesh.mirrored)
