"""The rows of a dataset that each replica gets in each step: one generator for each way to share it out."""

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
from .rows import copied, count_rows, join_rows, require_same_rows, reshape_rows, split_rows, split_sizes, stack_rows, to_numpy


@dataclasses.dataclass(frozen=True)
class Step:
    """The rows of this worker's replicas for one step."""

    stacked: PyTree  # arrays `[L, rows, ...]` for L local replicas, padded with zeros to the longest of all replicas
    sizes: tuple[int, ...]  # the true number of rows of each of the R replicas
    position: Position  # of the source after this step
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # the rest of the state that goes on from there
    place: BatchPlace | None = None  # among the batches that all workers read; None where each reads its own


@dataclasses.dataclass(frozen=True)
class LocalReplicas:
    """This worker's replicas among all, and whether all must get equal numbers of rows."""

    num_replicas: int  # of all workers, R
    worker: InputWorker
    drop_remainder: bool = False  # leave rows out rather than give replicas different numbers
    on_drop: Callable[[int, int], None] = lambda num_dropped, num_rows: None
    lookahead: int = 1  # the number of steps that workers with batches of their own tell each other at once, and hold

    @property
    def num_local(self) -> int:
        return self.num_replicas // self.worker.count

    def kept(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the rows that the replicas take of these: all, or equally many where rows are rather left out."""
        kept = (min(sizes),) * self.num_replicas if self.drop_remainder else tuple(sizes)
        if sum(kept) < sum(sizes):
            self.on_drop(sum(sizes) - sum(kept), sum(sizes))
        return kept

    def mine(self, sizes: Sequence[int]) -> list[int]:
        """Return the entries of this worker's replicas."""
        first = self.worker.index * self.num_local
        return list(sizes[first : first + self.num_local])


Steps = Generator[Step, None, None]


def rows_of_every_batch(source: Source, layout: LocalReplicas) -> Steps:
    """Take this worker's rows of each global batch, which all workers read."""
    first = layout.worker.index * layout.num_local
    same = SameBatches(layout.worker)
    batches = ((arrays, count_rows(arrays)) for arrays in map(to_numpy, source))
    for arrays, num_rows in itertools.chain(batches, [(None, 0)]):  # None: the end
        if not same.are_there(arrays, num_rows):
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


def in_step(own: Iterator[OwnStep], source: Source, layout: LocalReplicas) -> Steps:
    """Let all workers take as many steps as the one with the most rows; replicas of the others have no rows meanwhile."""
    like, last = None, OwnStep([], source.position())
    ahead, count = _ReadAhead(own), 1  # the first batch is not kept waiting for others
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
                return  # no row that is left could be given to all
            if any(sizes):
                parts = last.parts + [like] * (layout.num_local - len(last.parts))
                cut = [split_rows(part, [size])[0] for part, size in zip(parts, layout.mine(sizes), strict=True)]
                yield Step(stack_rows(cut, max(sizes)), sizes, last.position, last.extra)
            if ahead.steps:  # one more, while this one is used
                ahead.read(min(count, len(ahead.steps) + 1))


def own_batches(source: Source, layout: LocalReplicas, extra: dict[str, int]) -> Iterator[OwnStep]:
    """Divide each batch of this worker's own stream among its own replicas."""
    for batch in source:
        arrays = to_numpy(batch) if source.is_owned or layout.lookahead == 1 else copied(to_numpy(batch))
        sizes = split_sizes(count_rows(arrays), layout.num_local)
        if sizes[0]:
            yield OwnStep(split_rows(arrays, sizes), source.position())


def one_element_each(source: Source, layout: LocalReplicas, extra: dict[str, int]) -> Iterator[OwnStep]:
    """Give each of this worker's replicas the next element of its own stream; at the end some get none."""
    while elements := [copied(to_numpy(e)) for e in itertools.islice(source, layout.num_local)]:
        require_same_rows(elements, "the elements of one step")
        yield OwnStep(elements, source.position())


def rows_of_own_files(source: Source, layout: LocalReplicas, extra: dict[str, int]) -> Iterator[OwnStep]:
    """Take this worker's share of each global batch from its own files, across the batches that they yield.

    A position holds how many `rows` of the next batch were taken already, and the `batch_size`.
    """
    batches = _read(source)
    first = list(itertools.islice(batches, 1))
    own_size = sum(count_rows(batch) for _, batch in first)  # 0 when there is none
    batch_size = max(layout.worker.exchange(extra.get("batch_size") or own_size))
    rest = batch_size % layout.num_replicas if layout.drop_remainder else 0  # it begins the next global batch
    sizes = split_sizes(max(batch_size - rest, layout.num_replicas), layout.num_replicas)
    share = sum(layout.mine(sizes))  # at least one row, or the records of this worker would never come
    for rows, position, skip in _regroup(source, itertools.chain(first, batches), extra.get("rows", 0), share):
        sizes = split_sizes(count_rows(rows), layout.num_local)
        yield OwnStep(split_rows(rows, sizes), position, {"rows": skip, "batch_size": batch_size})


def _read(source: Source) -> Iterator[tuple[Position, PyTree]]:
    """Yield each batch that has rows, with the position before it."""
    position = source.position()
    for batch in source:
        arrays = copied(to_numpy(batch))
        if count_rows(arrays):
            yield position, arrays
        position = source.position()


def _regroup(
    source: Source, batches: Iterable[tuple[Position, PyTree]], skip: int, share: int
) -> Iterator[tuple[PyTree, Position, int]]:
    """Yield `share` rows at a time, with the position before the next batch, and the number of its rows to skip from there."""
    parts: list[PyTree] = []
    missing = share
    for position, batch in batches:
        num_rows = count_rows(batch)
        start = min(skip, num_rows)
        skip -= start
        while start < num_rows:
            stop = min(start + missing, num_rows)
            parts += split_rows(batch, [stop - start], start)
            missing -= stop - start
            start = stop
            if not missing:
                is_cut = start < num_rows
                yield join_rows(parts), position if is_cut else source.position(), start if is_cut else 0
                parts, missing = [], share
    if parts:
        yield join_rows(parts), source.position(), 0


class _ReadAhead:
    """The next steps of this worker, so that it can tell the others of several at once."""

    def __init__(self, own: Iterator[OwnStep]) -> None:
        self._own = own
        self.steps: collections.deque[OwnStep] = collections.deque()  # read and not taken yet
        self.has_ended = False
        self._failure: Exception | None = None

    def read(self, count: int) -> None:
        """Read until there are `count` steps; an exception of the pipeline comes when the steps before it have been taken."""
        while len(self.steps) < count and not self.has_ended and self._failure is None:
            try:
                self.steps.append(next(self._own))
            except StopIteration:
                self.has_ended = True
            except Exception as error:
                self._failure = error
        if self._failure is not None and not self.steps:
            raise self._failure
