"""What an iterator goes through: the elements of a dataset, mapped, in one pass after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._typing import PyTree
from ._sharing.plan import Plan
from ._sharing.rows import to_numpy
from ._sharing.steps import LocalReplicas, Steps
from ._sources import grain
from ._sources.numpy_dataset import NumpyDataset
from ._sources.open import Position, Source, is_sequence, open_source
from ._sources.verbs import Limit, PerReplicaSpec, limited, num_passes_left, spec_of_batch

_logger = logging.getLogger("mirrored")


class LastBatch(NamedTuple):
    """The last batch of a pass, when it has other rows than those before."""

    num_rows: int
    rows_before: int  # of each batch before it
    step: int  # its number, counted from 1


@dataclasses.dataclass(frozen=True)
class Elements:
    """What a distributed dataset yields."""

    plan: Plan  # of which dataset, and how its rows are shared out
    maps: tuple[Callable[..., PyTree], ...] = ()  # functions that each element goes through before it is shared out, in order
    limits: tuple[Limit, ...] = ()  # how far and how often, innermost first
    _specs: list[PyTree] = dataclasses.field(default_factory=list, init=False, compare=False)

    def open(self, state: object = None) -> Source:
        """Start one pass, from a position on if one is given."""
        return open_source(self.plan.dataset, state, self.maps)

    def of_later_passes(self, places: Sequence[int]) -> Elements:
        """Return what the passes after the one that was just opened, which is at these places, begin with."""
        # The thread that reads ahead begins them at a moment that nobody knows. Their numbers, which say the order of rows that
        # are shuffled, are therefore taken now, before another iterator takes one.
        dataset = self.plan.dataset
        if not (self.limits and isinstance(dataset, NumpyDataset)):
            return self
        later = dataset._of_later_passes(num_passes_left(self.limits, places) - 1)
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, dataset=later))

    def last_batch(self, layout: LocalReplicas) -> LastBatch | None:
        """Return what the last batch of a pass is, if the steps come to it and replicas have different numbers of rows in it."""
        found = _last_batch(self.plan.dataset) if self.plan.kind == "DATA" and not layout.drop_remainder else None
        if found is None or not found.num_rows % layout.num_replicas:
            return None
        is_cut = any(kind == "take" and count is not None and count < found.step for kind, count in self.limits)
        return None if is_cut else found

    def note(self, stacked: PyTree) -> None:
        """Take note of what a batch is like, of arrays `[L, rows, ...]`."""
        if not self._specs:
            self._specs.append(jax.tree.map(lambda leaf: PerReplicaSpec((None, *leaf.shape[2:]), leaf.dtype), stacked))

    def spec(self) -> PyTree:
        """Return what each replica gets of a batch, without a step and without moving an iterator."""
        if not self._specs:
            with contextlib.closing(self._open_sample()) as source:
                try:
                    element = next(source)
                except StopIteration as end:
                    name = type(self.plan.dataset).__name__
                    raise ValueError(f"{name} is empty, so nobody knows what its elements are like.") from end
            self._specs.append(spec_of_batch(to_numpy(element)))
        return self._specs[0]

    def _open_sample(self) -> Source:
        """Start to read an element where that changes no order of others."""
        dataset = self.plan.dataset
        if isinstance(dataset, NumpyDataset):  # a pass of which would have its number
            return Source(dataset, iter([dataset._sample()]), maps=self.maps)
        if grain.is_pipeline(dataset) or is_sequence(dataset):
            return self.open()
        raise TypeError(
            f"what the elements of {type(dataset).__name__} are like is known when an iterator has given one: to read one now "
            "might change the order of others. Ask after `batch = next(iterator)`, or look at the batch."
        )


class Passes:
    """The passes of one iterator, of which one source after the other is open."""

    def __init__(self, elements: Elements, state: object, extra: dict[str, Any]) -> None:
        """Open the first, from a position on if one is given, with what else it holds."""
        self._elements, self._extra = elements, extra
        self._is_resumed = state is not None
        self._source = elements.open(state)
        self.start: Position = self._source.position() if state is None else json.dumps(state)  # begins a pass that has a number
        self._places = list(extra.get("places", [0] * len(elements.limits)))
        self._later = elements.of_later_passes(self._places)

    def steps(self, layout: LocalReplicas) -> Steps:
        """Yield the steps of all passes; each notes in `extra` how far it is in each limit.

        All workers count the same steps, so they stop and begin anew together without asking each other.
        """

        def start(is_first: bool) -> Steps:
            if not is_first:
                self._source.close()
                self._source = self._later.open()
            steps = self._elements.plan.steps(self._source, layout, self._extra if is_first else {})
            return steps if is_first and self._is_resumed else self._not_empty(steps)

        places = self._places
        for step in limited(start, self._elements.limits, places):
            yield dataclasses.replace(step, extra={**step.extra, "places": list(places)}) if places else step

    def _not_empty(self, steps: Steps) -> Steps:
        """Say when a pass has no steps, and one before it had: the dataset can be gone through only once."""
        is_empty = True
        with contextlib.closing(steps):
            for step in steps:
                is_empty = False
                yield step
        if is_empty and self._elements._specs:  # an iterator has given a batch
            _logger.warning(
                "%s gave no batch in this pass, and gave some in an earlier one: it can be gone through only once. Let its "
                "__iter__ begin anew each time: open the files, or call the generator function, in there.",
                type(self._elements.plan.dataset).__name__,
            )

    def close(self) -> None:
        """Close the source that is open."""
        self._source.close()


def _last_batch(dataset: object) -> LastBatch | None:
    """Return what the last batch of a dataset is, without reading one; None where it is like the others, or nobody knows."""
    if isinstance(dataset, NumpyDataset):
        return _of_rows(dataset.num_rows, dataset.batch_size, dataset._batches_until_end())
    if isinstance(dataset, list | tuple) and len(dataset) > 1:
        before, last = _num_rows(dataset[0]), _num_rows(dataset[-1])
        return LastBatch(last, before, len(dataset)) if before and last and last != before else None
    torch = sys.modules.get("torch.utils.data")
    if not isinstance(dataset, getattr(torch, "DataLoader", ())):
        return None
    try:
        num_rows = len(dataset.sampler)
    except TypeError:  # a stream
        return None
    return _of_rows(num_rows, dataset.batch_size, len(dataset) if dataset.drop_last else None)


def _of_rows(num_rows: int, batch_size: int | None, num_batches: int | None) -> LastBatch | None:
    complete, rest = divmod(num_rows, batch_size) if batch_size else (0, 0)
    is_reached = num_batches is None or num_batches > complete
    return LastBatch(rest, batch_size, complete + 1) if batch_size and complete and rest and is_reached else None


def _num_rows(batch: PyTree) -> int:
    arrays = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return int(np.shape(arrays[0])[0]) if arrays else 0
