"""Which rows of a dataset each replica gets in each step: one generator for each way to share it out."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax

from ..._typing import PyTree
from ..._workers.progress import BatchPlace
from .._sources.position import Position, Source
from .agree import InputWorker, OwnStep, SameBatches, agree
from .rows import copied, count_rows, join_rows, require_same_rows, reshape_rows, split_rows, split_sizes, stack_rows, to_numpy


@dataclasses.dataclass(frozen=True)
class Step:
    """The rows of this worker's replicas for one step.

    Attributes:
        stacked: arrays `[L, rows, ...]` for L local replicas, padded with zeros to the longest of all replicas.
        sizes: the true number of rows of each of the R replicas.
        position: of the source after this step.
        extra: what else is needed to go on from there.
        place: which batch it is of those that all workers read; None where each worker has batches of its own.
    """

    stacked: PyTree
    sizes: tuple[int, ...]
    position: Position
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    place: BatchPlace | None = None


@dataclasses.dataclass(frozen=True)
class LocalReplicas:
    """The place of this worker's replicas among all, and whether they must get equal numbers of rows.

    Attributes:
        num_replicas: of all workers, R.
        worker: this worker.
        drop_remainder: leave rows out rather than give replicas different numbers.
        on_drop: is told how many of how many rows of a batch were left out.
        lookahead: of how many steps the workers tell each other at once, where each has batches of its own; so many more batches
            are held.
    """

    num_replicas: int
    worker: InputWorker
    drop_remainder: bool = False
    on_drop: Callable[[int, int], None] = lambda dropped, num_rows: None
    lookahead: int = 1

    @property
    def num_local(self) -> int:
        return self.num_replicas // self.worker.count

    def mine(self, sizes: tuple[int, ...] | list[int]) -> list[int]:
        """Return the entries of this worker's replicas."""
        first = self.worker.index * self.num_local
        return list(sizes[first : first + self.num_local])


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What this worker has for one step, before the others are asked: at most one part for each local replica."""

    parts: list[PyTree]
    position: Position
    extra: dict[str, int] = dataclasses.field(default_factory=dict)


Steps = Generator[Step, None, None]

_END = object()


def rows_of_every_batch(source: Source, layout: LocalReplicas, extra: dict[str, int]) -> Steps:
    """Take this worker's rows of each global batch, which all workers read."""
    first = layout.worker.index * layout.num_local
    same = SameBatches(layout.worker)
    for batch in itertools.chain(source, [_END]):
        arrays = None if batch is _END else to_numpy(batch)
        num_rows = 0 if batch is _END else count_rows(arrays)
        if not same.are_there(arrays, num_rows):
            return
        kept = num_rows - num_rows % layout.num_replicas if layout.drop_remainder else num_rows
        if kept < num_rows:
            layout.on_drop(num_rows - kept, num_rows)
        if not kept:
            continue
        sizes = split_sizes(kept, layout.num_replicas)
        start = sum(sizes[:first])
        if source.is_owned and sizes[0] == sizes[-1]:
            stacked = reshape_rows(arrays, start, layout.num_local, sizes[0])
        else:
            stacked = stack_rows(split_rows(arrays, layout.mine(sizes), start), sizes[0])
        yield Step(stacked, tuple(sizes), source.position(), place=same.place)


def own_batches(source: Source, layout: LocalReplicas, extra: dict[str, int]) -> Steps:
    """Divide each batch of this worker's own stream among its own replicas."""

    def taken() -> Iterator[_Parts]:
        for batch in source:
            arrays = to_numpy(batch) if source.is_owned or layout.lookahead == 1 else copied(to_numpy(batch))
            sizes = split_sizes(count_rows(arrays), layout.num_local)
            if sizes[0]:
                yield _Parts(split_rows(arrays, sizes), source.position())

    return _in_step(taken(), source, layout)


def one_element_each(source: Source, layout: LocalReplicas, extra: dict[str, int]) -> Steps:
    """Give each of this worker's replicas the next element of its own stream; at the end some get none."""

    def taken() -> Iterator[_Parts]:
        while elements := [copied(to_numpy(e)) for e in itertools.islice(source, layout.num_local)]:
            require_same_rows(elements, "the elements of one step")
            yield _Parts(elements, source.position())

    return _in_step(taken(), source, layout)


def rows_of_own_files(source: Source, layout: LocalReplicas, extra: dict[str, int]) -> Steps:
    """Take this worker's share of each global batch from its own files, across the batches that they yield.

    Args:
        source: batches of the files of this worker.
        layout: where its replicas are.
        extra: of a position to go on from: `rows` of the next batch that were taken already, and `batch_size`.
    """
    held = _Held(source, extra.get("rows", 0))
    batch_size = max(layout.worker.exchange(extra.get("batch_size") or held.num_rows()))
    rest = batch_size % layout.num_replicas if layout.drop_remainder else 0  # it begins the next global batch
    sizes = split_sizes(max(batch_size - rest, layout.num_replicas), layout.num_replicas)
    share = sum(layout.mine(sizes))  # at least one row, or the records of this worker would never come

    def taken() -> Iterator[_Parts]:
        while (rows := held.take(share)) is not None:
            sizes = split_sizes(count_rows(rows), layout.num_local)
            position, skip = held.position()
            yield _Parts(split_rows(rows, sizes), position, {"rows": skip, "batch_size": batch_size})

    yield from _in_step(taken(), source, layout)


def _in_step(taken: Iterator[_Parts], source: Source, layout: LocalReplicas) -> Steps:
    """Take as many steps as the worker with the most rows; the others have replicas without rows meanwhile."""
    worker, like, last = layout.worker, None, _Parts([], source.position())
    ahead, count = _ReadAhead(taken), 1  # the first batch is not kept waiting for others
    while True:
        ahead.read(count)
        own = [_own_step(parts, layout.num_local) for parts in ahead.parts]
        steps = agree(worker, own, ahead.has_ended, like, layout.num_replicas)
        if not steps:
            return
        count = min(2 * count, layout.lookahead)
        for agreed in steps:
            last = ahead.take() or dataclasses.replace(last, parts=[])
            like, every, parts = agreed.like, agreed.sizes, last.parts
            if layout.drop_remainder:
                smallest = min(every)
                if smallest * layout.num_replicas < sum(every):
                    layout.on_drop(sum(every) - smallest * layout.num_replicas, sum(every))
                if agreed.num_ended:
                    return  # nothing that it has left could be given to all
                parts = [jax.tree.map(lambda leaf: leaf[:smallest], part) for part in parts]  # noqa: B023
                every = (smallest,) * layout.num_replicas
            if any(every):
                parts = parts + [like] * (layout.num_local - len(parts))
                yield Step(stack_rows(parts, max(every)), every, last.position, last.extra)
            ahead.read_one(count)


def _own_step(parts: _Parts, num_local: int) -> OwnStep:
    sizes = [count_rows(part) for part in parts.parts]
    return OwnStep(sizes + [0] * (num_local - len(sizes)), jax.tree.map(lambda leaf: leaf[:0], parts.parts[0]))


class _ReadAhead:
    """The next parts of this worker, so that it can say of several steps at once what it has.

    Attributes:
        parts: those that were read and not taken yet.
        has_ended: whether there are no more.
    """

    def __init__(self, taken: Iterator[_Parts]) -> None:
        self._taken = taken
        self.parts: collections.deque[_Parts] = collections.deque()
        self.has_ended = False
        self._failure: Exception | None = None

    def read(self, count: int) -> None:
        """Read until there are so many.

        Raises:
            Exception: of the pipeline, when the parts before it have been taken.
        """
        while len(self.parts) < count and not self.has_ended and self._failure is None:
            try:
                self.parts.append(next(self._taken))
            except StopIteration:
                self.has_ended = True
            except Exception as error:
                self._failure = error
        if self._failure is not None and not self.parts:
            raise self._failure

    def read_one(self, count: int) -> None:
        """Read one more, while another step is used, unless there are so many."""
        if self.parts:
            self.read(min(count, len(self.parts) + 1))

    def take(self) -> _Parts | None:
        """Return the next; None at the end."""
        return self.parts.popleft() if self.parts else None


class _Held:
    """The batches of a source of which some rows have not been taken yet."""

    def __init__(self, source: Source, skip: int) -> None:
        self._source = source
        self._batches: collections.deque[tuple[PyTree, Position]] = collections.deque()  # each with the position before it
        self._skip = 0  # rows of the first that were taken
        self._left = 0
        self.take(skip)

    def num_rows(self) -> int:
        """Return how many rows the next batch has left; 0 at the end."""
        self._fill(1)
        return count_rows(self._batches[0][0]) - self._skip if self._batches else 0

    def take(self, num_rows: int) -> PyTree | None:
        """Return the next so many rows, or what is left, or None at the end."""
        self._fill(num_rows)
        wanted = min(num_rows, self._left)
        if not wanted:
            return None
        rows: list[PyTree] = []
        missing = wanted
        while missing:
            batch, _ = self._batches[0]
            part = jax.tree.map(lambda leaf: leaf[self._skip : self._skip + missing], batch)  # noqa: B023
            rows.append(part)
            missing -= count_rows(part)
            self._skip += count_rows(part)
            if self._skip == count_rows(batch):
                self._batches.popleft()
                self._skip = 0
        self._left -= wanted
        return join_rows(rows)

    def position(self) -> tuple[Position, int]:
        """Return the position before the next batch with rows left, and how many of its rows were taken."""
        return (self._batches[0][1], self._skip) if self._batches else (self._source.position(), 0)

    def _fill(self, num_rows: int) -> None:
        while self._left < num_rows:
            position = self._source.position()
            try:
                batch = next(self._source)
            except StopIteration:
                return
            arrays = copied(to_numpy(batch))
            count = count_rows(arrays)
            if count:
                self._batches.append((arrays, position))
                self._left += count
