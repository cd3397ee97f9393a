"""Where global batches come from: arrays in memory, or anything that can be iterated again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._typing import PyTree


@dataclasses.dataclass(frozen=True)
class NumpyDataset:
    """Hold rows in memory, and yield them as batches: a dataset made by `strategy.make_numpy_dataset`.

    Each method returns a new dataset; a dataset can be iterated again and again. As in tf.data their order
    matters in one way: everything applies to rows, and `batch` comes last.

    Attributes:
        arrays: a nest of arrays with the same number of rows.
        batch_size: rows per global batch, or None before `batch`.
        drop_remainder: whether a last batch with fewer rows is left out.
        shuffle_seed: None for the rows' own order; else each pass over the data has another order, and the
            k-th pass of every run has the same one.
        num_epochs: how often the rows are repeated within one pass.

    >>> dataset = strategy.make_numpy_dataset({"x": np.arange(5)}).batch(2)
    >>> [batch["x"].tolist() for batch in dataset], len(dataset)
    ([[0, 1], [2, 3], [4]], 3)
    """

    arrays: PyTree
    batch_size: int | None = None
    drop_remainder: bool = False
    shuffle_seed: int | None = None
    num_epochs: int = 1
    _passes: list[int] = dataclasses.field(default_factory=lambda: [0], repr=False, compare=False)

    def __post_init__(self) -> None:
        check_rows(self.arrays)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return jax.tree.leaves(self.arrays)[0].shape[0]

    def batch(self, batch_size: int, drop_remainder: bool = False) -> NumpyDataset:
        """Make global batches of `batch_size` rows; the last has what is left, unless `drop_remainder`."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
            raise TypeError(f"batch_size is {batch_size!r}; expected an int.")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected at least 1 row.")
        if self.batch_size is not None:
            raise ValueError(f"the dataset is batched already, by {self.batch_size}; call batch once.")
        return dataclasses.replace(self, batch_size=int(batch_size), drop_remainder=bool(drop_remainder))

    def shuffle(self, seed: int) -> NumpyDataset:
        """Order the rows at random, anew in each pass; the same seed gives the same orders in every run."""
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"seed is {seed!r}; expected an int, so that a run can be repeated.")
        return dataclasses.replace(self, shuffle_seed=int(seed), _passes=[0])

    def repeat(self, num_epochs: int) -> NumpyDataset:
        """Go over the rows `num_epochs` times in one pass; batches do not mix two epochs."""
        if isinstance(num_epochs, bool) or not isinstance(num_epochs, int | np.integer):
            raise TypeError(f"num_epochs is {num_epochs!r}; expected an int.")
        if num_epochs < 1:
            raise ValueError(f"num_epochs is {num_epochs}; expected at least 1.")
        return dataclasses.replace(self, num_epochs=self.num_epochs * int(num_epochs))

    def __len__(self) -> int:
        per_epoch = self.num_rows / self._rows_per_batch()
        return self.num_epochs * int(np.floor(per_epoch) if self.drop_remainder else np.ceil(per_epoch))

    def __iter__(self) -> Iterator[PyTree]:
        rows_per_batch = self._rows_per_batch()
        for _ in range(self.num_epochs):
            order = self._order()
            for start in range(0, self.num_rows, rows_per_batch):
                stop = start + rows_per_batch
                if stop > self.num_rows and self.drop_remainder:
                    break
                rows = slice(start, stop) if order is None else order[start:stop]
                yield jax.tree.map(lambda array, rows=rows: array[rows], self.arrays)

    def _order(self) -> np.ndarray | None:
        if self.shuffle_seed is None:
            return None
        generator = np.random.default_rng([self.shuffle_seed, self._passes[0]])
        self._passes[0] += 1
        return generator.permutation(self.num_rows)

    def _rows_per_batch(self) -> int:
        if self.batch_size is None:
            raise ValueError(
                "the dataset has rows, not batches. Say how many rows all replicas take together in one step: "
                "strategy.make_numpy_dataset(arrays).batch(global_batch_size)."
            )
        return self.batch_size


def check_rows(arrays: PyTree) -> None:
    """Refuse a nest whose leaves are not arrays with one common number of rows."""
    paths, _ = jax.tree_util.tree_flatten_with_path(arrays)
    if not paths:
        raise TypeError(f"the dataset {arrays!r} holds no array; expected a nest of numpy arrays.")
    for path, leaf in paths:
        name = jax.tree_util.keystr(path) or "the array"
        if not isinstance(leaf, np.ndarray):
            raise TypeError(
                f"{name} is {leaf!r} of type {type(leaf).__name__}; expected a numpy array whose first axis counts rows."
            )
        if leaf.ndim == 0:
            raise ValueError(f"{name} is a scalar; expected an array whose first axis counts rows.")
        if leaf.dtype.kind in "OUSMm":
            raise TypeError(f"{name} has dtype {leaf.dtype}, which no device can hold. Encode it as numbers first.")
    counts = {jax.tree_util.keystr(path) or "the array": leaf.shape[0] for path, leaf in paths}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(f"the arrays have different numbers of rows ({listed}); each row must be one example of all of them.")


def stacked_lists(arrays: PyTree) -> PyTree:
    """Turn what numpy can turn into arrays into arrays; a list of arrays is stacked, as in tf.data."""

    def is_leaf(node: Any) -> bool:
        return isinstance(node, list)

    return jax.tree.map(np.asarray, arrays, is_leaf=is_leaf)
