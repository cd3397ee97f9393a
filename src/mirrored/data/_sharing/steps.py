"""Yields the rows that each replica gets in each step: one generator for each way to divide a dataset."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from ..._typing import PyTree
from ..._workers.progress import BatchPlace
from .._sources.open import Position, Source
from .agree import InputWorker, OwnStep, SameBatches, agree
from .files import OwnFiles
from .rows import copied, count_rows, join_rows, require_same_rows, reshape_rows, split_rows, split_sizes, stack_rows, to_numpy


@dataclasses.dataclass(frozen=True)
class Step:
    """The rows of this worker's replicas in one step."""

    stacked: PyTree  # arrays `[L, rows, ...]` for L local replicas, padded with zeros to the longest of all R replicas
    sizes: tuple[int, ...]  # the true number of rows on each of the R replicas
    position: Position  # of the source after this step
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # the rest of the state to continue from there
    place: BatchPlace | None = None  # its place among the batches that all workers read; None if each reads its own


@dataclasses.dataclass(frozen=True)
class LocalReplicas:
    """This worker's replicas among all, and whether all replicas must get equally many rows."""

    num_replicas: int  # of all workers, R
    worker: InputWorker
    drop_remainder: bool = False  # drop rows rather than give replicas different numbers of them
    on_drop: Callable[[int, int], None] = lambda num_dropped, num_rows: None
    lookahead: int = 1  # of workers with their own batches: how many steps they exchange at once, and hold

    @property
    def num_local(self) -> int:
        return self.num_replicas // self.worker.count

    def kept(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return how many rows each replica takes of `sizes`: all, or with `drop_remainder` equally many."""
        kept = (min(sizes),) * self.num_replicas if self.drop_remainder else tuple(sizes)
        if sum(kept) < sum(sizes):
            self.on_drop(sum(sizes) - sum(kept), sum(sizes))
        return kept

    def mine(self, sizes: Sequence[int]) -> list[int]:
        """Return the entries that belong to this worker's replicas."""
        first = self.worker.index * self.num_local
        return list(sizes[first : first + self.num_local])


Steps = Generator[Step, None, None]


def rows_of_every_batch(source: Source, layout: LocalReplicas) -> Steps:
    """Take this worker's rows from each global batch; all workers read all of them."""
    first = layout.worker.index * layout.num_local
    same = SameBatches(layout.worker)
    batches = ((arrays, count_rows(arrays)) for arrays in map(to_numpy, source))
    for arrays, num_rows in itertools.chain(batches, [(None, 0)]):  # None: the end
        if not same.has_next(arrays, num_rows):
            return
        sizes = layout.kept(split_sizes(num_rows, layout.num_replicas))
        if not sizes[0]:
            continue
        start = sum(sizes[:first])
        if source.is_owned and sizes[0] == sizes[-1]:
            stacked = reshape_rows(arrays, start, layout.num_local, sizes[0])
        else:
            stacked = stack_rows(split_rows(arrays, layout.mine(sizes), start), sizes[0])
        yield Step(stacked, sizes, source.position(), place=same.place)


def in_step(own: Iterator[OwnStep], source: Source | OwnFiles, layout: LocalReplicas) -> Steps:
    """Yield equally many steps on all workers; when a worker's data has ended, its replicas get no rows."""
    like, last = None, OwnStep([], source.position())
    ahead, count = _ReadAhead(own), 1  # 1, so that the first batch need not wait for others
    while True:
        ahead.read(count)
        common = agree(layout.worker, list(ahead.steps), ahead.has_ended, like, layout.num_local)
        if not common:
            return
        count = min(2 * count, layout.lookahead)
        for agreed in common:
            last = ahead.steps.popleft() if ahead.steps else dataclasses.replace(last, parts=[])
            like, sizes = agreed.like, layout.kept(agreed.sizes)
            if layout.drop_remainder and agreed.num_ended:
                return  # the remaining rows cannot reach all replicas
            if any(sizes):
                parts = last.parts + [like] * (layout.num_local - len(last.parts))
                cut = [split_rows(part, [size])[0] for part, size in zip(parts, layout.mine(sizes), strict=True)]
                yield Step(stack_rows(cut, max(sizes)), sizes, last.position, last.extra)
            if ahead.steps:  # read one more while this one is in use
                ahead.read(min(count, len(ahead.steps) + 1))


def own_batches(source: Source, layout: LocalReplicas) -> Iterator[OwnStep]:
    """Divide each batch of this worker's stream among this worker's replicas."""
    for batch in source:
        arrays = to_numpy(batch)
        if layout.lookahead > 1 and not source.is_owned:  # the source may refill its buffer before the step is taken
            arrays = copied(arrays)
        sizes = split_sizes(count_rows(arrays), layout.num_local)
        if sizes[0]:
            yield OwnStep(split_rows(arrays, sizes), source.position())


def one_element_each(source: Source, layout: LocalReplicas) -> Iterator[OwnStep]:
    """Give each of this worker's replicas the next element of the worker's stream; at the end some get none."""
    while elements := [copied(to_numpy(e)) for e in itertools.islice(source, layout.num_local)]:
        require_same_rows(elements, "the elements of one step")
        yield OwnStep(elements, source.position())


def rows_of_own_files(source: OwnFiles, layout: LocalReplicas, extra: dict[str, int]) -> Iterator[OwnStep]:
    """Take this worker's share of each global batch from its files, across the borders of their batches."""
    batches = source.batches()
    first = list(itertools.islice(batches, 1))
    own_size = sum(count_rows(batch) for batch, _ in first)  # 0 without a batch
    batch_size = max(layout.worker.exchange(extra.get("batch_size") or own_size))
    rest = batch_size % layout.num_replicas if layout.drop_remainder else 0  # these rows begin the next global batch
    sizes = split_sizes(max(batch_size - rest, layout.num_replicas), layout.num_replicas)
    share = sum(layout.mine(sizes))  # at least one row, or this worker's records would never come
    for rows, position in _regroup(source, itertools.chain(first, batches), share):
        sizes = split_sizes(count_rows(rows), layout.num_local)
        yield OwnStep(split_rows(rows, sizes), position, {"batch_size": batch_size})


def _regroup(source: OwnFiles, batches: Iterable[tuple[PyTree, int]], share: int) -> Iterator[tuple[PyTree, Position]]:
    """Yield `share` rows at a time, and the position after them."""
    parts: list[PyTree] = []
    missing = share
    for batch, start in batches:
        num_rows = count_rows(batch)
        while start < num_rows:
            stop = min(start + missing, num_rows)
            parts += split_rows(batch, [stop - start], start)
            missing -= stop - start
            start = stop
            if not missing:
                yield join_rows(parts), source.position(start % num_rows)  # 0: after the whole batch
                parts, missing = [], share
    if parts:
        yield join_rows(parts), source.position()


class _ReadAhead:
    """This worker's next steps, read ahead so that it can tell the others several at once."""

    def __init__(self, own: Iterator[OwnStep]) -> None:
        self._own = own
        self.steps: collections.deque[OwnStep] = collections.deque()  # read, but not taken yet
        self.has_ended = False
        self._failure: Exception | None = None

    def read(self, count: int) -> None:
        """Read until there are `count` steps; raise the pipeline's exception only when all steps before it are taken."""
        while len(self.steps) < count and not self.has_ended and self._failure is None:
            try:
                self.steps.append(next(self._own))
            except StopIteration:
                self.has_ended = True
            except Exception as error:
                self._failure = error
        if self._failure is not None and not self.steps:
            raise self._failure
