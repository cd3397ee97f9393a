"""The distributed dataset: it takes global batches, and yields trees of PerReplica values."""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import itertools
import logging
import operator
from collections.abc import Callable

import jax
import numpy as np

from .. import _html, _tf_names
from .._options import AutoShardPolicy, InputOptions
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica
from .._text import shown
from .._typing import PyTree
from ._iterator import DistributedIterator
from ._passes import Elements
from ._sharing.agree import InputWorker
from ._sharing.plan import SharingPlan
from ._sharing.steps import LocalReplicas
from ._sources.kinds import NO_SOURCE, kind_of
from ._sources.verbs import Limit, check_int, checked_function, num_steps

_logger = logging.getLogger("mirrored")


@_tf_names.hints("mr.data.DistributedDataset")
class DistributedDataset:
    """A dataset whose batches are divided among the replicas, made by `strategy.distribute_dataset`.

    Iterating yields trees of PerReplica values. It can be iterated again if the dataset can. A pass without a step warns, and
    says why. `len` is the number of steps, if the dataset has a length. With `drop_remainder` the dataset must also know the
    rows of its batches: arrays, lists, grain's `batch` and torch's DataLoader do. `map` counts as a function that keeps them.

    >>> dataset = strategy.distribute_dataset([{"x": np.arange(3)}])
    >>> for batch in dataset:
    ...     print(batch["x"])
    PerReplica(shape=(None,), dtype=int32,
      0: [0 1],
      1: [2])

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedDataset
    """

    def __init__(self, mesh: ReplicaMesh, options: InputOptions, worker: InputWorker, plan: SharingPlan) -> None:
        """Wrap a checked dataset; users call `strategy.distribute_dataset`."""
        self._mesh = mesh
        self._options = options
        self._elements = Elements(plan)
        self._worker = worker
        self._made_of: DistributedDataset | None = None
        self._has_dropped = False
        if worker.count > 1:
            _logger.info("dataset %s", self.describe())

    def __iter__(self) -> DistributedIterator:
        layout = LocalReplicas(self._mesh.num_replicas, self._worker, self._options.drop_remainder, self._report_dropped)
        return DistributedIterator(self._elements, layout, self._mesh, self._options.prefetch)

    @property
    def _plan(self) -> SharingPlan:
        return self._elements.plan

    @property
    def element_spec(self) -> PyTree:
        """The shapes and dtypes of a batch on each replica, as a tree of `mr.data.PerReplicaSpec`, with None for the rows.

        Raises:
            TypeError: when only a batch would tell, and no iterator has yielded one yet.
            ValueError: when the dataset is empty.
        """
        return self._elements.spec()

    def take(self, count: int) -> DistributedDataset:
        """Stop after `count` steps, on all workers; earlier if there are fewer.

        >>> [x.values[0].tolist() for x in strategy.distribute_dataset([np.arange(2)] * 9).take(2)]
        [[0], [0]]
        """
        return self._with(("take", check_int("take got", count, 0, "the number of steps")))

    def repeat(self, count: int | None = None) -> DistributedDataset:
        """Repeat the steps `count` times, or endlessly; each pass begins like a new iterator, in its own order.

        An iterator's position says which pass it is in. An endless loop needs its own end:

        >>> batches = iter(strategy.distribute_dataset([np.arange(2), np.arange(4)]).repeat())
        >>> [next(batches).values[0].tolist() for _ in range(5)]
        [[0], [0, 1], [0], [0, 1], [0]]
        >>> batches.close()
        """
        if count is not None:
            count = check_int("repeat got", count, 1, "the number of passes, or None for no end")
        return self._with(("repeat", count))

    def map(self, fn: Callable[..., PyTree]) -> DistributedDataset:
        """Apply a function to each batch on the host, before it is divided among the replicas.

        Args:
            fn: takes a batch of the dataset (a tuple as several arguments), and returns a nest of arrays. Each worker calls it
                for the batches that it reads; under `AutoShardPolicy.DATA` the results must be equal on all workers.

        >>> dataset = strategy.distribute_dataset([(np.arange(4), np.ones(4))]).map(lambda x, y: {"sum": x + y})
        >>> [batch["sum"].values[1].tolist() for batch in dataset]
        [[3.0, 4.0]]
        """
        return self._with(maps=(checked_function(fn),))

    def _with(self, *limits: Limit, maps: tuple[Callable[..., PyTree], ...] = ()) -> DistributedDataset:
        made, old = copy.copy(self), self._elements
        made._elements = dataclasses.replace(old, limits=(*old.limits, *limits), maps=(*old.maps, *maps))
        made._made_of = self  # keep it alive: the strategy describes it, but holds it weakly
        return made

    def __len__(self) -> int:
        return num_steps(self._num_steps_of_pass(), self._elements.limits)

    def _num_steps_of_pass(self) -> int:
        kind, dataset = kind_of(self._plan.dataset), self._plan.dataset
        needed = self._mesh.num_replicas if self._options.drop_remainder else 1  # how many replicas must get rows
        if self._plan.kind == "DATA":
            return kind.num_batches(dataset, needed)
        if self._plan.kind != "FUNCTION" or self._worker.count > 1:
            raise TypeError("the number of steps is not known before the end: the workers read datasets of their own.")
        rows = kind.num_rows(dataset) or [1] * kind.num_batches(dataset, 1)
        groups = itertools.batched(rows, self._mesh.num_replicas)  # in each step every replica takes one element
        return sum(sum(map(bool, group)) >= needed for group in groups)

    def __repr__(self) -> str:
        return f"DistributedDataset({type(self._plan.dataset).__name__} on {self._mesh.num_replicas} replicas)"

    def _repr_html_(self) -> str:
        how = self.describe().partition(": ")[2]
        return _html.outline(f"{self!r}\n" + "\n".join(how.split("; ")))

    def describe(self) -> str:
        """Say in one line how the rows reach the replicas, and why so."""
        rule = "every row is used, also when the replicas get different numbers"
        if self._options.drop_remainder:
            rule = "rows are dropped so that all replicas get the same number"
        return f"{type(self._plan.dataset).__name__}: {self._plan.how}; {rule}; {self._options.prefetch} batches ahead"

    def _report_dropped(self, dropped: int, num_rows: int) -> None:
        if not self._has_dropped:
            self._has_dropped = True
            _logger.info("dropping %d of the %d rows of a step, so that all replicas get the same number", dropped, num_rows)


#: The devices of a distributed dataset.
mesh_of: Callable[[DistributedDataset], ReplicaMesh] = operator.attrgetter("_mesh")


def batch_rows(dataset: DistributedDataset) -> int | None:
    """Return the number of rows in each global batch but the last; None if only the dataset itself knows."""
    cut = kind_of(dataset._plan.dataset).cut(dataset._plan.dataset)
    if cut is None or dataset._plan.kind != "DATA":
        return None
    return cut.batch_size


def check_dataset(dataset: object, verb: str, policy: AutoShardPolicy | str = AutoShardPolicy.AUTO) -> None:
    """Refuse a dataset that yields no batches, or that can be iterated only once."""
    batches, size = "global batches", "global_batch_size"
    if verb == "distribute_datasets_from_function":
        batches, size = "per-replica batches", "context.get_per_replica_batch_size(global_batch_size)"
    example = f"strategy.make_numpy_dataset(arrays).batch({size})"
    if isinstance(dataset, DistributedDataset):
        raise TypeError("the dataset is distributed already; iterate over it.")
    # A tuple of batches contains only nests; a tuple that is one batch contains arrays.
    is_batches = isinstance(dataset, tuple) and dataset != () and all(isinstance(part, dict | list | tuple) for part in dataset)
    if isinstance(dataset, np.ndarray | jax.Array | PerReplica | dict | tuple) and not is_batches:
        raise TypeError(
            f"{verb} got {type(dataset).__name__}, one set of arrays; expected a dataset that yields {batches}: {example}."
        )
    if isinstance(dataset, collections.abc.Iterator):
        name = getattr(dataset, "__name__", "")
        name = name if name.isidentifier() else "make_batches"  # "<genexpr>" is no name
        raise TypeError(
            f"{verb} got {shown(dataset)}, an iterator that can be used only once; a second epoch would be empty. Pass the "
            f"function that makes one for each epoch, without calling it: {name}; or with arguments lambda: {name}(...)."
        )
    kind = kind_of(dataset)
    if kind is NO_SOURCE:
        raise TypeError(
            f"{verb} got {shown(dataset)} of type {type(dataset).__name__}; expected an iterable of {batches}, for "
            f"example {example}, or a function that makes an iterator."
        )
    shared_by_user = verb == "distribute_datasets_from_function" or policy is AutoShardPolicy.OFF
    if reason := kind.why_no_batches(dataset, verb, size) or (not shared_by_user and _why_share(dataset)):
        raise ValueError(f"{verb} expected {batches}, and {type(dataset).__name__} {reason}")


def _why_share(dataset: object) -> str | None:
    """Say which share of the rows a loader yields, if it has a sampler for torch.distributed; None if it yields all rows."""
    batch_sampler = getattr(dataset, "batch_sampler", None)
    for sampler in (getattr(dataset, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        count, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if isinstance(count, int) and isinstance(rank, int) and count > 1:
            return (
                f"gives 1/{count} of the rows, those of rank {rank}, by its {type(sampler).__name__}. The strategy divides the "
                "rows among the replicas and workers itself, so leave the sampler out, and its set_epoch: "
                f"{type(dataset).__name__}(data, batch_size=global_batch_size, shuffle=True)."
            )
    return None
