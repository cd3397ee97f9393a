"""The distributed dataset: global batches in, PerReplica trees out."""

from __future__ import annotations

import collections.abc
import logging
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._options import InputOptions
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica
from ._iterator import DistributedIterator
from ._sharing.agree import InputWorker
from ._sharing.plan import Plan
from ._sharing.steps import LocalReplicas
from ._sources import grain
from ._sources.numpy_dataset import NumpyDataset

_logger = logging.getLogger("mirrored")


class DistributedDataset:
    """A dataset whose batches are divided among the replicas, made by `strategy.distribute_dataset`.

    Iterating yields trees of PerReplica values. It can be iterated again whenever the dataset can, and has a
    length when the dataset has one (with `drop_remainder`, batches of which nothing is left count as well,
    unless the dataset is of `make_numpy_dataset`).

    >>> dataset = strategy.distribute_dataset([{"x": np.arange(3)}])
    >>> for batch in dataset:
    ...     print(batch["x"])
    PerReplica(shape=(None,), dtype=int32,
      0: [0 1],
      1: [2])

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedDataset
    """

    def __init__(self, mesh: ReplicaMesh, options: InputOptions, worker: InputWorker, plan: Plan) -> None:
        """Wrap a checked dataset; users call `strategy.distribute_dataset`."""
        self._mesh = mesh
        self._options = options
        self._plan = plan
        self._worker = worker
        self._has_dropped = False
        if worker.count > 1:
            _logger.info("dataset %s", self.describe())

    def __iter__(self) -> DistributedIterator:
        layout = LocalReplicas(self._mesh.num_replicas, self._worker, self._options.drop_remainder, self._report_dropped)
        return DistributedIterator(self._plan, layout, self._mesh, self._options.prefetch)

    def __len__(self) -> int:
        dataset, kind = self._plan.dataset, self._plan.kind
        if isinstance(dataset, NumpyDataset) and self._options.drop_remainder and kind == "DATA":
            return dataset._num_batches(at_least=self._mesh.num_replicas)  # of smaller ones nothing is left
        if not isinstance(dataset, collections.abc.Sized) or not _has_length(dataset):
            raise TypeError(f"the length of {type(dataset).__name__} is not known before it ends.")
        if kind == "DATA":
            return len(dataset)
        if kind == "FUNCTION" and self._worker.count == 1:
            complete, rest = divmod(len(dataset), self._mesh.num_replicas)
            return complete + (rest > 0 and not self._options.drop_remainder)
        raise TypeError("the number of steps is not known before the end: the workers read datasets of their own.")

    def __repr__(self) -> str:
        return f"DistributedDataset({type(self._plan.dataset).__name__} on {self._mesh.num_replicas} replicas)"

    def describe(self) -> str:
        """Say in one line how the rows reach the replicas, and why in this way."""
        rule = (
            "rows are dropped so that all replicas get the same number"
            if self._options.drop_remainder
            else "every row is used, also when the replicas get different numbers"
        )
        return f"{type(self._plan.dataset).__name__}: {self._plan.how}; {rule}; {self._options.prefetch} batches ahead"

    def _report_dropped(self, dropped: int, num_rows: int) -> None:
        if not self._has_dropped:
            self._has_dropped = True
            _logger.info("dropping %d of the %d rows of a step, so that all replicas get the same number", dropped, num_rows)


#: The devices over which a dataset is distributed.
mesh_of: Callable[[DistributedDataset], ReplicaMesh] = operator.attrgetter("_mesh")


def check_dataset(dataset: Any, verb: str) -> None:
    """Refuse what cannot be iterated as batches, or only once without saying so."""
    batches, size = "global batches", "global_batch_size"
    if verb == "distribute_datasets_from_function":
        batches, size = "per-replica batches", "context.get_per_replica_batch_size(global_batch_size)"
    example = f"strategy.make_numpy_dataset(arrays).batch({size})"
    if isinstance(dataset, NumpyDataset):
        dataset._rows_per_batch()
        return
    if isinstance(dataset, DistributedDataset):
        raise TypeError("the dataset is distributed already; iterate over it.")
    if isinstance(dataset, np.ndarray | jax.Array | PerReplica) or (
        isinstance(dataset, dict | tuple) and not _is_batches(dataset)
    ):
        raise TypeError(
            f"{verb} got {type(dataset).__name__}, one set of arrays; expected a dataset that yields {batches}: {example}."
        )
    if isinstance(dataset, collections.abc.Iterator):
        raise TypeError(
            f"{verb} got {dataset!r}, an iterator that can be used only once; a second epoch would be empty. Pass "
            "an object whose __iter__ starts anew: a list of batches, a dataset, or a class with `def __iter__(self): yield ...`."
        )
    if not isinstance(dataset, collections.abc.Iterable) and not hasattr(type(dataset), "__getitem__"):
        raise TypeError(
            f"{verb} got {dataset!r} of type {type(dataset).__name__}; expected an iterable of {batches}, for example {example}."
        )
    if isinstance(dataset, str | bytes | dict):
        raise TypeError(f"{verb} got {dataset!r}; expected an iterable of {batches}.")


def _has_length(dataset: Any) -> bool:
    return not grain.is_pipeline(dataset) or grain.has_length(dataset)


def _is_batches(dataset: Any) -> bool:
    """Tell a tuple of batches from one batch that is a tuple of arrays: only the former holds nests."""
    return isinstance(dataset, tuple) and any(isinstance(element, dict | list | tuple) for element in dataset)
