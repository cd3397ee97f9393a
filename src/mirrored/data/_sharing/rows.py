"""Divides a global batch among the replicas, by one rule for all sources."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..._replicas.arrays import check_range, is_numeric, is_sparse, is_wrapped, refuse_mask
from ..._replicas.host_memory import empty_rows
from ..._replicas.per_replica import PerReplica
from ..._text import shown
from ..._typing import PyTree

_PARSE = "Parse records of files in batches: dataset.batch(n).map(lambda records: mr.data.parse_example(records, spec)). "


def split_sizes(num_rows: int, num_replicas: int) -> list[int]:
    """Return the number of rows of each replica, in order: the first `n mod R` replicas get one more than the others.

    >>> split_sizes(7, 3)
    [3, 2, 2]
    """
    size, extra = divmod(num_rows, num_replicas)
    return [size + 1] * extra + [size] * (num_replicas - extra)


def split_rows(batch: PyTree, sizes: Sequence[int], start: int = 0) -> list[PyTree]:
    """Cut a batch into consecutive parts of these sizes, without copying; the first begins at `start`."""
    ends = list(itertools.accumulate(sizes, initial=start))
    return [jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], batch) for a, b in itertools.pairwise(ends)]


def reshape_rows(batch: PyTree, start: int, num_replicas: int, num_rows: int) -> PyTree:
    """Reshape a batch's rows from `start` on to `[L, num_rows, ...]` for L replicas; only a change of dtype copies them."""

    def reshape(leaf: np.ndarray) -> np.ndarray:
        held = leaf[start : start + num_replicas * num_rows].reshape(num_replicas, num_rows, *leaf.shape[1:])
        return held if held.dtype == jax.dtypes.canonicalize_dtype(held.dtype) else stack_rows(list(held), num_rows)

    return jax.tree.map(reshape, batch)


def stack_rows(parts: Sequence[PyTree], num_rows: int) -> PyTree:
    """Stack the replicas' rows as new arrays `[L, num_rows, ...]`, padded with zeros at the end."""
    # New arrays: a source may refill its buffer before the transfer reads it. On the CPU a device's array may be the buffer.

    def stack(*rows: np.ndarray) -> np.ndarray:
        dtype = jax.dtypes.canonicalize_dtype(rows[0].dtype)
        stacked = empty_rows(len(rows), (num_rows, *rows[0].shape[1:]), dtype)
        for place, part in zip(stacked, rows, strict=True):
            place[: len(part)] = part
            place[len(part) :] = 0
        return stacked

    return jax.tree.map(stack, *parts)


def join_rows(parts: Sequence[PyTree]) -> PyTree:
    """Join the rows of several batches, or raise an error if they do not fit together."""
    if len(parts) == 1:
        return parts[0]
    require_same_rows(parts, "batches of one dataset, whose rows are joined to global batches of one size,")
    return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


def require_same_rows(parts: Sequence[PyTree], title: str) -> None:
    """Refuse batches that differ in more than the number of rows; `title` names them in the error."""
    rows = [jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape[1:])}", part) for part in parts]
    first = jax.tree.flatten(rows[0])  # flattened, because the text of a batch class may contain an address
    for number, kinds in enumerate(rows):
        if jax.tree.flatten(kinds) != first:
            raise ValueError(
                f"{title} have rows of different structure, dtype or shape: {rows[0]}, and number {number} {kinds}. "
                "Pad the rows to one shape in the pipeline."
            )


def count_rows(
    arrays: PyTree,
    given: str = "the dataset yielded",
    advice: str = "If this is a single example, batch the dataset first: dataset.batch(global_batch_size), or of a list of "
    "examples strategy.make_numpy_dataset(np.array(examples)).batch(global_batch_size).",
) -> int:
    """Return the number of rows in a nest of numpy arrays, the same in each; `given` and `advice` are for errors."""
    paths, _ = jax.tree_util.tree_flatten_with_path(arrays)
    if not paths:
        raise TypeError(f"{given} {shown(arrays)}, which holds no array; expected a nest of arrays.")
    if any(leaf.ndim == 0 for _, leaf in paths):
        raise ValueError(_why_scalar(arrays, given, advice))
    counts = {leaf.shape[0] for _, leaf in paths}
    if len(counts) > 1:
        listed = ", ".join(f"{jax.tree_util.keystr(path)}: {leaf.shape[0]}" for path, leaf in paths)
        raise ValueError(f"{given} arrays with different numbers of rows ({listed}). {advice}")
    return counts.pop()


def _why_scalar(arrays: PyTree, given: str, advice: str) -> str:
    """Say which leaf of a batch is a scalar, and what to write."""

    def is_of_numbers(node: object) -> bool:
        return isinstance(node, list) and node != [] and all(isinstance(leaf, np.ndarray) and leaf.ndim == 0 for leaf in node)

    leaves = jax.tree_util.tree_flatten_with_path(arrays, is_leaf=is_of_numbers)[0]
    path, leaf = next((path, leaf) for path, leaf in leaves if isinstance(leaf, list) or leaf.ndim == 0)
    if isinstance(leaf, list):
        what, advice = "a list of numbers", "To Python it is one scalar beside the other: make an array of it, np.array(numbers)."
    else:
        what = "a scalar"
        if any(not isinstance(leaf, list) and leaf.ndim for _, leaf in leaves):
            advice += (
                " If it is one value for all rows, write np.full(num_rows, value), or give it to the step beside the batch: "
                "strategy.run(step, args=(batch, value))."
            )
    return f"{given} {what}{_at(path)}; expected arrays whose first axis counts rows. {advice}"


def to_numpy(batch: PyTree) -> PyTree:
    """Turn a batch's leaves into numpy arrays, without copying, or raise an error that names a leaf without numbers."""

    def convert(path: Sequence[Any], leaf: object) -> np.ndarray:
        if isinstance(leaf, PerReplica):
            raise TypeError(
                f"the dataset yielded a PerReplica{_at(path)}, which is distributed already; expected global batches on the "
                "host. Pass it to strategy.run as it is."
            )
        if is_sparse(leaf):
            raise TypeError(
                f"the dataset yielded a {type(leaf).__name__}{_at(path)}, of which the stored values would be cut in place of "
                "the rows. Make it dense: dataset.map(lambda x: x.todense())."
            )
        refuse_mask(leaf, lambda: f"the dataset yielded{_at(path)}")
        refuse_keys(leaf, f"the dataset yielded{_at(path)}")
        array = np.asarray(leaf)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)  # from files of other byte orders, such as IDX
        if not is_numeric(array.dtype) or array.dtype.char in "gG":  # of 16 bytes
            advice = "Encode it as numbers, or leave it out of the batch."
            if array.dtype.kind == "S":
                advice = _PARSE + advice
            if dataclasses.is_dataclass(leaf):
                advice += "\nIf it holds arrays, write @jax.tree_util.register_dataclass above the class."
            kind = f"{type(leaf).__name__} of dtype {array.dtype}{_at(path)}"
            raise TypeError(f"the dataset yielded {kind}, which no device can hold. {advice}")
        check_range(array, lambda: f"the dataset yielded{_at(path)}")
        return array

    return jax.tree_util.tree_map_with_path(convert, batch, is_leaf=is_wrapped)


def refuse_keys(leaf: object, what: str) -> None:
    """Refuse random keys, which numpy does not hold; `what` begins the message."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"{what} random keys, and the rows of a dataset are numpy arrays. Write jax.random.key_data(keys) in the dataset, "
            f"and keys = jax.random.wrap_key_data(data, impl={str(jax.random.key_impl(leaf))!r}) in the step."
        )


def copied(batch: PyTree) -> PyTree:
    """Copy a batch's arrays, to keep them while the source makes the next batch, perhaps in the same memory."""
    return jax.tree.map(np.array, batch)


def _at(path: Sequence[Any]) -> str:
    return f" at {jax.tree_util.keystr(tuple(path))}" * bool(path)
