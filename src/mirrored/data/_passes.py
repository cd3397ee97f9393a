"""The passes of an iterator through a dataset: its elements, mapped, one pass after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._typing import PyTree
from ._sharing.plan import SharingPlan
from ._sharing.rows import to_numpy
from ._sharing.steps import LocalReplicas, Steps
from ._sources import grain
from ._sources.numpy_dataset import NumpyDataset
from ._sources.open import Position, Source, is_sequence, open_source, rows_of
from ._sources.verbs import Limit, PerReplicaSpec, limited, num_passes_left, num_steps, spec_of_batch

_logger = logging.getLogger("mirrored")


class LastBatch(NamedTuple):
    """The last batch of a pass, if its number of rows differs from the others'."""

    num_rows: int
    rows_before: int  # the rows of each earlier batch
    step: int  # its number, from 1


@dataclasses.dataclass(frozen=True)
class Elements:
    """The elements of a distributed dataset."""

    plan: SharingPlan
    maps: tuple[Callable[..., PyTree], ...] = ()  # functions applied to each element before it is divided
    limits: tuple[Limit, ...] = ()  # innermost first
    _specs: list[PyTree] = dataclasses.field(default_factory=list, init=False, compare=False)

    def last_batch(self, layout: LocalReplicas) -> LastBatch | None:
        """Return the last batch of a pass, if the steps reach it and its replicas have different numbers of rows."""
        is_known = self.plan.kind == "DATA" and not (layout.drop_remainder or self.maps)  # a map may change the number of rows
        found = _last_batch(self.plan.dataset) if is_known else None
        if found is None or not found.num_rows % layout.num_replicas:
            return None
        is_cut = any(kind == "take" and count is not None and count < found.step for kind, count in self.limits)
        return None if is_cut else found

    def note(self, stacked: PyTree) -> None:
        """Note the shapes and dtypes of a batch, whose arrays are `[L, rows, ...]`."""
        if not self._specs:
            self._specs.append(jax.tree.map(lambda leaf: PerReplicaSpec((None, *leaf.shape[2:]), leaf.dtype), stacked))

    def spec(self) -> PyTree:
        """Return the PerReplicaSpecs of a batch, without taking a step or moving an iterator."""
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
        """Open a source to read one element, without changing the order of later passes."""
        dataset = self.plan.dataset
        if isinstance(dataset, NumpyDataset):  # a pass would take an epoch number
            return Source(dataset, iter([dataset._sample()]), maps=self.maps)
        if grain.is_pipeline(dataset) or is_sequence(dataset):
            return open_source(dataset, None, self.maps)
        raise TypeError(
            f"what the elements of {type(dataset).__name__} are like is known when an iterator has given one: to read one now "
            "might change the order of others. Ask after `batch = next(iterator)`, or look at the batch."
        )


class Passes:
    """The passes of one iterator, one source after the other."""

    def __init__(self, elements: Elements, state: object, extra: dict[str, Any]) -> None:
        """Open the first source, at its beginning or at a position `state`; `extra` is the rest of that state."""
        self._elements, self._extra = elements, extra
        self._is_resumed = state is not None
        self._source = open_source(elements.plan.dataset, state, elements.maps)
        self.start: Position = self._source.position() if state is None else json.dumps(state)  # the call begins a pass
        self._places = list(extra.get("places", [0] * len(elements.limits)))
        self._later = elements.plan.dataset  # the dataset for the passes after the first
        if elements.limits and isinstance(self._later, NumpyDataset):
            # The thread that reads ahead begins these passes at any moment. The order of shuffled rows depends on their
            # numbers, so they get them now, before another iterator takes some.
            self._later = self._later._of_later_passes(num_passes_left(elements.limits, self._places) - 1)

    def steps(self, layout: LocalReplicas) -> Steps:
        """Yield the steps of all passes, with the counts of the limits: all workers count alike, and so end together."""

        def start(is_first: bool) -> Steps:
            if not is_first:
                self._source.close()
                self._source = open_source(self._later, None, self._elements.maps)
            steps = self._elements.plan.steps(self._source, layout, self._extra if is_first else {})
            return steps if is_first and self._is_resumed else self._not_empty(steps)

        places = self._places
        for step in limited(start, self._elements.limits, places):
            yield dataclasses.replace(step, extra={**step.extra, "places": list(places)}) if places else step

    def _not_empty(self, steps: Steps) -> Steps:
        """Yield a pass's steps; warn if it has none and an earlier pass had: such a dataset can be iterated only once."""
        is_empty = True
        with contextlib.closing(steps):
            for step in steps:
                is_empty = False
                yield step
        if is_empty and self._elements._specs:  # an iterator has yielded a batch
            _logger.warning(
                "%s gave no batch in this pass, and gave some in an earlier one: it can be gone through only once. Let its "
                "__iter__ begin anew each time: open the files, or call the generator function, in there.",
                type(self._elements.plan.dataset).__name__,
            )

    def close(self) -> None:
        """Close the open source."""
        self._source.close()


def _last_batch(dataset: object) -> LastBatch | None:
    """Return the last batch of a dataset, without reading any; None if it is like the others, or unknown."""
    if isinstance(dataset, list | tuple) and is_sequence(dataset) and len(dataset) > 1:
        before, last = rows_of(dataset[0]), rows_of(dataset[-1])
        return LastBatch(last, before, len(dataset)) if before and last and last != before else None
    if isinstance(dataset, NumpyDataset):
        is_of_rows = all(is_by_row for _, is_by_row in dataset.maps)  # a function of batches may change their number of rows
        num_rows, size = dataset.num_rows, (dataset.batch_size or 0) * is_of_rows
        num_batches = num_steps(dataset._num_batches_of_epoch(), (("take", dataset.batches_per_pass),))
    elif isinstance(dataset, getattr(torch := sys.modules.get("torch.utils.data"), "DataLoader", ())):
        if getattr(dataset, "collate_fn", None) is not getattr(torch, "default_collate", None):
            return None  # a user's function may change the number of rows
        try:
            num_rows, size, num_batches = len(dataset.sampler), dataset.batch_size or 0, len(dataset)
        except (TypeError, RuntimeError):  # a stream, or a loader that does not know its length
            return None
    else:
        return None
    complete, rest = divmod(num_rows, size) if size else (0, 0)
    return LastBatch(rest, size, complete + 1) if complete and rest and num_batches > complete else None
