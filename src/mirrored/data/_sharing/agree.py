"""Agrees on the steps of workers that read input together, and checks that they read the same batches."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from ..._text import escape
from ..._typing import PyTree
from ..._workers.coordination import Channel, Coordination
from ..._workers.progress import BatchPlace, progress
from ..._workers.same_program import ONE_DATASET, data_ended
from .._sources.open import Position
from .rows import count_rows

#: Send a JSON value to all workers, and return the values of all, in worker order; every worker must call it.
Exchange: TypeAlias = Callable[[Any], Sequence[Any]]

#: The number of characters shown of the structure of another worker's batch.
_MAX_SHOWN = 1000


@dataclasses.dataclass(frozen=True)
class InputWorker:
    """This worker, and its connection to the others that read the input with it."""

    index: int = 0
    count: int = 1  # the number of workers, W; each has equally many replicas, in worker order
    exchange: Exchange = lambda value: [value]
    close: Callable[[], None] = lambda: None  # end an exchange in which another thread waits
    coordination: Coordination | None = None  # to open a channel for an iterator
    channel: Channel | None = None  # the channel of `exchange` and `close`
    is_noted: bool = False  # whether `Progress.took_batch` compares the batches, if all workers read the same ones

    def for_iterator(self, *, is_noted: bool) -> InputWorker:
        """Return this worker with a new channel, for one iterator and its thread."""
        if self.coordination is None or self.count == 1:
            return self
        channel = self.coordination.channel("input")
        return dataclasses.replace(self, exchange=channel.exchange, close=channel.close, channel=channel, is_noted=is_noted)


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """This worker's rows for a step, before it has asked the others."""

    parts: list[PyTree]  # at most one part for each local replica
    position: Position  # the source's position after this step
    extra: dict[str, int] = dataclasses.field(default_factory=dict)  # see `Step`

    @property
    def like(self) -> PyTree:
        """A batch like the parts, without rows."""
        return jax.tree.map(lambda leaf: leaf[:0], self.parts[0])

    def sizes(self, num_local: int) -> list[int]:
        """Return the number of rows of each local replica."""
        return [*map(count_rows, self.parts), *[0] * (num_local - len(self.parts))]


@dataclasses.dataclass(frozen=True)
class CommonStep:
    """A step on which all workers have agreed, before they take it."""

    sizes: tuple[int, ...]  # the rows of each of the R replicas
    like: PyTree  # a batch without rows
    num_ended: int  # the number of workers without more rows


def agree(worker: InputWorker, ahead: Sequence[OwnStep], has_ended: bool, like: PyTree, num_local: int) -> list[CommonStep]:
    """Exchange the workers' next steps (`ahead` on this one); return the steps that all can take now, [] at the end."""
    # `like` is an earlier batch without rows, for a worker whose data has ended. A step is told again until it is taken.
    if worker.count == 1:
        return [CommonStep(tuple(step.sizes(num_local)), step.like, 0) for step in ahead]
    messages = worker.exchange({"steps": [[step.sizes(num_local), _encode(step.like)] for step in ahead], "ended": has_ended})
    counts = [len(message["steps"]) for message in messages if not message["ended"]]
    by_step = itertools.zip_longest(*(message["steps"] for message in messages))
    steps: list[CommonStep] = []
    for number, reports in enumerate(itertools.islice(by_step, min(counts, default=None))):
        if number < len(ahead):
            like = ahead[number].like
        steps.append(_common_step(reports, like, num_local))
        like = steps[-1].like
    return steps


def _common_step(reports: Sequence[Any], like: PyTree, num_local: int) -> CommonStep:
    """Join the workers' reports of a step: the sizes and kinds of their rows, None from a worker whose data has ended."""
    kinds = {index: report[1] for index, report in enumerate(reports) if report is not None}
    first = next(iter(kinds))
    for index, kind in kinds.items():
        if kind is not kinds[first] and kind != kinds[first]:  # equal messages are often one object
            raise ValueError(
                f"the workers yielded batches that do not fit together: worker {first} {_show(kinds[first])}, worker {index} "
                f"{_show(kind)}. Structure, dtypes and shapes must be the same apart from the number of rows. Batches that are "
                "padded to their own longest row need mr.InputOptions(auto_shard_policy='data'): then all read the same ones."
            )
    sizes = itertools.chain.from_iterable(report[0] if report else (0,) * num_local for report in reports)
    return CommonStep(tuple(sizes), _decode(kinds[first], like), len(reports) - len(kinds))


class SameBatches:
    """Compares the workers' batches of one pass: each batch, or only the first and the end if the history compares the rest."""

    def __init__(self, worker: InputWorker) -> None:
        self._worker = worker
        channel = worker.channel
        self._number, self._pass = (-1, 0) if channel is None else (channel.number, channel.next_pass())
        self._num_batches = self._checksum = 0

    @property
    def place(self) -> BatchPlace:
        return BatchPlace(self._number, self._pass, self._num_batches, self._checksum)

    def has_next(self, batch: PyTree | None, num_rows: int) -> bool:
        """Tell whether there is a next batch (`batch` is None at the end); raise ValueError if the workers' batches differ."""
        if self._worker.count == 1:
            return batch is not None
        self._num_batches += batch is not None
        self._checksum = _checksum(batch, self._checksum)
        if batch is None:
            progress.data_ends[self._number] = self.place
        if batch is None or not self._worker.is_noted or self._num_batches == 1:
            reports = self._worker.exchange([batch is None, self._num_batches, num_rows, _kinds(batch), self._checksum])
            for index, report in enumerate(reports):
                if report != reports[0]:
                    raise ValueError(f"{_difference(reports[0], report, index)}. {ONE_DATASET}")
        progress.data_ends.pop(self._number, None)
        return batch is not None


def _difference(first: Sequence[Any], other: Sequence[Any], worker: int) -> str:
    """Say how the batches of another worker differ from those of worker 0."""
    if first[:2] != other[:2]:
        if (other[1], not other[0]) < (first[1], not first[0]):  # fewer batches, or as many and the end
            return data_ended(worker, 0)
        return data_ended(0, worker)
    if first[2] != other[2]:
        return f"the next batch of worker 0 has {first[2]} rows, and that of worker {worker} {other[2]}"
    if first[3] != other[3]:
        kinds = f"{escape(first[3], _MAX_SHOWN)} and that of worker {worker} {escape(str(other[3]), _MAX_SHOWN)}"
        return f"the rows of the next batch of worker 0 are {kinds}"
    batches = "the batches, since the first," if first[0] else "the next batches"
    return f"{batches} of worker 0 and worker {worker} hold different records"


def _checksum(batch: PyTree, checksum: int) -> int:
    """Update a checksum with all bytes of a batch, in a tenth of the time of a copy."""
    for leaf in jax.tree.leaves(batch):
        checksum = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8), checksum)
    return checksum


def _kinds(batch: PyTree) -> str:
    """Return the dtypes and shapes of a batch's rows as a short text."""
    return ", ".join(f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in jax.tree.leaves(batch))[:_MAX_SHOWN]


def _encode(tree: PyTree) -> dict[str, Any]:
    """Return the structure of a batch, and the dtypes and shapes of its rows, as JSON."""
    leaves, treedef = jax.tree.flatten(tree)
    rows = [[leaf.dtype.name, list(leaf.shape[1:])] for leaf in leaves]
    return {"structure": str(treedef), "skeleton": _skeleton(tree), "leaves": rows}


def _show(rows: dict[str, Any]) -> str:
    text = f"{rows['structure']} of " + ", ".join(f"{dtype}{shape}" for dtype, shape in rows["leaves"])
    return escape(text, _MAX_SHOWN)


def _decode(rows: dict[str, Any], like: PyTree) -> PyTree:
    """Make a batch without rows from another worker's `_encode`, in the structure of `like` if there is one."""
    leaves = [np.zeros((0, *shape), dtype) for dtype, shape in rows["leaves"]]
    if like is None:
        like = _from_skeleton(rows["skeleton"])
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _skeleton(tree: PyTree) -> Any:
    if type(tree) is dict:
        return {"dict": [[key, _skeleton(child)] for key, child in tree.items()]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_skeleton(child) for child in tree]}
    if isinstance(tree, np.ndarray):
        return 0
    return None if tree is None else {"class": type(tree).__name__}


def _from_skeleton(skeleton: dict[str, Any] | int | None) -> PyTree:
    match skeleton:
        case {"dict": items}:
            return {key: _from_skeleton(child) for key, child in items}
        case {"list": children}:
            return [_from_skeleton(child) for child in children]
        case {"tuple": children}:
            return tuple(_from_skeleton(child) for child in children)
        case {"class": name}:
            raise TypeError(
                f"this worker has had no record, and so cannot make an empty batch of class {name}. Yield batches made of dicts, "
                "lists and tuples, or use mr.InputOptions(auto_shard_policy='data')."
            )
    return skeleton
