"""How a global batch is divided among the replicas: one rule for all sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._errors import UnevenReplicasError
from .._signature import is_numeric
from .._typing import PyTree
from .._values import PerReplica, is_per_replica


def split_sizes(num_rows: int, num_replicas: int) -> list[int]:
    """Return how many rows each replica gets: the first `n mod R` one more than the rest; contiguous, in order.

    >>> split_sizes(7, 3)
    [3, 2, 2]
    """
    size, extra = divmod(num_rows, num_replicas)
    return [size + 1] * extra + [size] * (num_replicas - extra)


def stack_rows(batch: PyTree, num_replicas: int, drop_remainder: bool) -> PyTree:
    """Turn each leaf `[n, ...]` of a global batch into `[R, n / R, ...]`.

    Raises:
        UnevenReplicasError: when R does not divide n and the remainder may not be dropped, or when dropping
            it would leave nothing.
    """
    num_rows = count_rows(batch)
    kept = num_rows
    if num_rows % num_replicas:
        sizes = split_sizes(num_rows, num_replicas)
        if not drop_remainder:
            raise UnevenReplicasError(
                f"a global batch of {num_rows} rows does not divide evenly among {num_replicas} replicas: they would get "
                f"{', '.join(map(str, sizes))} rows, and one compiled step needs equal shapes. Use a batch size that "
                f"is a multiple of {num_replicas} and .batch(..., drop_remainder=True) for the last batch, or let the "
                "strategy drop the odd rows: strategy.distribute_dataset(dataset, mr.InputOptions(drop_remainder=True))."
            )
        kept = num_rows - num_rows % num_replicas
    return jax.tree.map(lambda leaf: leaf[:kept].reshape(num_replicas, kept // num_replicas, *leaf.shape[1:]), batch)


def count_rows(batch: PyTree) -> int:
    """Return the number of rows of a batch of numpy arrays, which all leaves share."""
    paths, _ = jax.tree_util.tree_flatten_with_path(batch)
    if not paths:
        raise TypeError(f"the dataset yielded {batch!r}, which holds no array; expected a nest of arrays, one global batch.")
    for path, leaf in paths:
        if leaf.ndim == 0:
            raise ValueError(
                f"the dataset yielded a scalar{_at(path)}; expected global batches, arrays whose first axis counts rows. "
                "Batch the dataset first: .batch(global_batch_size)."
            )
    counts = {leaf.shape[0] for _, leaf in paths}
    if len(counts) > 1:
        listed = ", ".join(f"{jax.tree_util.keystr(path)}: {leaf.shape[0]}" for path, leaf in paths)
        raise ValueError(f"the arrays of one batch have different numbers of rows ({listed}).")
    return counts.pop()


def to_numpy(batch: PyTree) -> PyTree:
    """Turn the leaves of a batch into numpy arrays that nobody else can change, or say which one holds no numbers.

    They are copies, because a source may fill the same buffer again for its next batch, and the transfer to the
    devices reads it later than the call returns (on the CPU, the device's array may even be the buffer).
    """

    def convert(path: Sequence[Any], leaf: Any) -> np.ndarray:
        if isinstance(leaf, PerReplica):
            raise TypeError(
                f"the dataset yielded a PerReplica{_at(path)}, which is distributed already; expected global batches on the "
                "host. Pass it to strategy.run as it is."
            )
        array = np.asarray(leaf)
        if not is_numeric(array.dtype):
            raise TypeError(
                f"the dataset yielded {type(leaf).__name__} of dtype {array.dtype}{_at(path)}, which no device can hold. "
                "Encode it as numbers, or leave it out of the batch."
            )
        _check_range(path, array)
        return array if isinstance(leaf, jax.Array) else array.copy()

    return jax.tree_util.tree_map_with_path(convert, batch, is_leaf=is_per_replica)


def _check_range(path: Sequence[Any], array: np.ndarray) -> None:
    held = jax.dtypes.canonicalize_dtype(array.dtype)
    if held == array.dtype or array.dtype.kind not in "iu" or not array.size:
        return
    smallest, largest, limits = array.min(), array.max(), np.iinfo(held)
    if smallest < limits.min or largest > limits.max:
        raise ValueError(
            f"the dataset yielded {array.dtype} values from {smallest} to {largest}{_at(path)}, and JAX holds them as {held}, "
            "which would wrap around. Make them smaller (an index instead of a hash, a difference of times), or "
            "switch JAX to 64 bits at the start: jax.config.update('jax_enable_x64', True)."
        )


def _at(path: Sequence[Any]) -> str:
    return f" at {jax.tree_util.keystr(tuple(path))}" if path else ""
