"""Host memory that CPU devices keep as it is, so that values go to the devices and come back without further copies.

XLA's CPU devices use the memory of a numpy array whose address is a multiple of 64, as long as they need it, and copy any
other. They never write into it: a program that such an array is donated to gets memory of its own. So what is made here
must be given to nobody else: who changed the numpy array would change the device's.
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

#: XLA's smallest alignment of a buffer on CPU.
_ALIGNMENT = 64
#: From this size on a copy costs more than the address is worth looking for.
_ALIGN_FROM_BYTES = 64 * 1024
#: From this size on a gather goes through host memory; a program for less does not keep this thread waiting.
_GATHER_FROM_BYTES = 1024 * 1024


def empty_rows(num_rows: int, shape: Shape, dtype: DTypeLike) -> np.ndarray:
    """Return new memory for `[num_rows, *shape]`, in which each row begins where a CPU device can keep it."""
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
    """Tell whether `gather` is right for a stack: it lies in this host's memory, and is large."""
    return (
        mesh.is_alone
        and mesh.devices[0].platform == "cpu"
        and not isinstance(stack, jax.core.Tracer)
        and not jnp.issubdtype(stack.dtype, jax.dtypes.extended)
        and stack.nbytes >= _GATHER_FROM_BYTES
    )


def gather(mesh: ReplicaMesh, stack: jax.Array, axis: int, shapes: Sequence[Shape] | None) -> jax.Array:
    """Concatenate the replicas' values `[R, ...]` along their `axis`; all devices share the memory of the result.

    The true shapes are given if they differ.
    """
    parts: dict[int, np.ndarray] = {}
    for shard in stack.addressable_shards:
        first = shard.index[0].start or 0
        parts |= {first + i: row for i, row in enumerate(np.asarray(shard.data))}
    rows = [parts[i] if shapes is None else parts[i][tuple(map(slice, shapes[i]))] for i in range(stack.shape[0])]
    size = sum(row.shape[axis] for row in rows)
    [joined] = empty_rows(1, (*rows[0].shape[:axis], size, *rows[0].shape[axis + 1 :]), stack.dtype)
    np.concatenate(rows, axis=axis, out=joined)
    return jax.device_put(joined, mesh.mirrored)
