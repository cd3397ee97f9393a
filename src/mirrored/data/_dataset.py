"""The distributed dataset: global batches in, PerReplica trees out."""

from __future__ import annotations

import collections.abc
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from .._mesh import ReplicaMesh
from .._options import InputOptions
from .._typing import PyTree
from .._values import PerReplica
from . import _feed, _rebatch
from ._source import NumpyDataset

_logger = logging.getLogger("mirrored")


class DistributedDataset:
    """Divide each global batch of a dataset among the replicas; made by `strategy.distribute_dataset`.

    Iterating yields trees of PerReplica values. It can be iterated again whenever the dataset can, and has a
    length when the dataset has one.

    >>> dataset = strategy.distribute_dataset([{"x": np.arange(4)}])
    >>> for batch in dataset:
    ...     print(batch["x"])
    PerReplica(shape=(2,), dtype=int32,
      0: [0 1],
      1: [2 3])

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedDataset
    """

    def __init__(self, dataset: Iterable[PyTree], mesh: ReplicaMesh, options: InputOptions) -> None:
        """Wrap a checked dataset; users call `strategy.distribute_dataset`."""
        self._dataset = dataset
        self._mesh = mesh
        self._options = options
        self._has_dropped = False

    def __iter__(self) -> Iterator[PyTree]:
        return _feed.feed(self._stacked(), self._mesh, self._options.prefetch)

    def __len__(self) -> int:
        if isinstance(self._dataset, NumpyDataset) and self._options.drop_remainder:
            return self._dataset._num_batches(at_least=self._mesh.num_replicas)  # of smaller ones nothing is left
        if not isinstance(self._dataset, collections.abc.Sized):
            raise TypeError(f"the length of {type(self._dataset).__name__} is not known before it ends.")
        return len(self._dataset)

    def __repr__(self) -> str:
        return f"DistributedDataset({type(self._dataset).__name__} on {self._mesh.num_replicas} replicas)"

    def describe(self) -> str:
        """Say in one line how the rows reach the replicas."""
        rule = "the remainder of each global batch is dropped" if self._options.drop_remainder else "every row is used"
        return (
            f"{type(self._dataset).__name__}: each global batch is cut into {self._mesh.num_replicas} contiguous parts, in "
            f"replica order; {rule}; {self._options.prefetch} batches ahead"
        )

    def _stacked(self) -> Iterator[PyTree]:
        for batch in self._dataset:
            arrays = _rebatch.to_numpy(batch)
            num_rows, num_replicas = _rebatch.count_rows(arrays), self._mesh.num_replicas
            stacked = _rebatch.stack_rows(arrays, num_replicas, self._options.drop_remainder)
            dropped = num_rows % num_replicas
            if dropped and not self._has_dropped:
                self._has_dropped = True
                _logger.info(
                    "dropping %d of the %d rows of a global batch: %d replicas do not divide it", dropped, num_rows, num_replicas
                )
            if num_rows - dropped:
                yield stacked


def check_dataset(dataset: Any) -> None:
    """Refuse what cannot be iterated as global batches, or only once without saying so."""
    if isinstance(dataset, NumpyDataset):
        dataset._rows_per_batch()
        return
    if isinstance(dataset, DistributedDataset):
        raise TypeError("the dataset is distributed already; iterate over it.")
    if isinstance(dataset, np.ndarray | jax.Array | PerReplica) or (
        isinstance(dataset, dict | tuple) and not _is_batches(dataset)
    ):
        raise TypeError(
            f"distribute_dataset got {type(dataset).__name__}, one set of arrays; expected a dataset that yields global batches. "
            "Write strategy.distribute_dataset(strategy.make_numpy_dataset(arrays).batch(global_batch_size))."
        )
    if isinstance(dataset, collections.abc.Iterator):
        raise TypeError(
            f"distribute_dataset got {dataset!r}, an iterator that can be used only once; a second epoch would be empty. Pass "
            "an object whose __iter__ starts anew: a list of batches, a dataset, or a class with `def __iter__(self): yield ...`."
        )
    if not isinstance(dataset, collections.abc.Iterable) and not hasattr(type(dataset), "__getitem__"):
        raise TypeError(
            f"distribute_dataset got {dataset!r} of type {type(dataset).__name__}; expected an iterable of global batches, for "
            "example strategy.make_numpy_dataset(arrays).batch(global_batch_size)."
        )
    if isinstance(dataset, str | bytes | dict):
        raise TypeError(f"distribute_dataset got {dataset!r}; expected an iterable of global batches.")


def _is_batches(dataset: Any) -> bool:
    """Tell a tuple of batches from one batch that is a tuple of arrays: only the former holds nests."""
    return isinstance(dataset, tuple) and any(isinstance(element, dict | list | tuple) for element in dataset)
