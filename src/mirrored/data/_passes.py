"""The passes of an iterator through a dataset: its elements, mapped, one pass after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax

from .._text import counted
from .._typing import PyTree
from ._sharing.plan import SharingPlan
from ._sharing.rows import to_numpy
from ._sharing.steps import LocalReplicas, Steps
from ._sources.kind import Cut
from ._sources.kinds import kind_of
from ._sources.open import Position, Source
from ._sources.verbs import Limit, PerReplicaSpec, limited, num_passes_left, spec_of_batch

#: More batches dropped in a row are an error: an endless dataset would be read for ever.
_MAX_DROPPED = 1000


@dataclasses.dataclass(frozen=True)
class Elements:
    """The elements of a distributed dataset."""

    plan: SharingPlan
    maps: tuple[Callable[..., PyTree], ...] = ()  # functions applied to each element before it is divided
    limits: tuple[Limit, ...] = ()  # innermost first
    _specs: list[PyTree] = dataclasses.field(default_factory=list, init=False, compare=False)

    def uneven_end(self, layout: LocalReplicas) -> Cut | None:
        """Return how a pass is cut into batches, if its last batch is uneven: replicas get different numbers of rows."""
        if self.plan.kind != "DATA" or layout.drop_remainder or self.maps:  # a map may change the number of rows
            return None
        cut = kind_of(self.plan.dataset).cut(self.plan.dataset)
        if cut is None or not cut.rest % layout.num_replicas:
            return None
        is_left_out = any(kind == "take" and count is not None and count < cut.num_batches for kind, count in self.limits)
        return None if is_left_out else cut

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
        if (sample := kind_of(dataset).sample(dataset)) is not None:
            return Source(dataset, sample, self.maps)
        raise TypeError(
            f"what the elements of {type(dataset).__name__} are like is known when an iterator has given one: to read one now "
            "might change the order of others. Ask after `batch = next(iterator)`, or look at the batch."
        )


class Passes:
    """The passes of one iterator, one source after the other."""

    def __init__(self, elements: Elements, state: object, extra: dict[str, Any]) -> None:
        """Open the first source, at its beginning or at the position `state`; `extra` is the rest of that state."""
        self._elements, self._extra = elements, extra
        self._is_resumed = state is not None
        self._source = elements.plan.open(state, elements.maps)
        self.start: Position = self._source.position() if state is None else json.dumps(state)  # the call begins a pass
        self._places = list(extra.get("places", [0] * len(elements.limits)))
        self._dropped: list[int] = []  # the rows of the batches that were dropped whole since the last step
        self.why_no_step = ""  # why a pass that began at its beginning made no step, if one did not
        self._later = elements.plan  # for the passes after the first
        if elements.limits:
            # Numbered now, as the order of shuffled rows depends on it: the thread begins them later, after other iterators'.
            dataset, num_passes = elements.plan.dataset, num_passes_left(elements.limits, self._places) - 1
            self._later = dataclasses.replace(elements.plan, dataset=kind_of(dataset).for_later(dataset, num_passes))

    def steps(self, layout: LocalReplicas) -> Steps:
        """Yield the steps of all passes, with the counts of the limits: all workers count alike, and so end together."""

        def start(is_first: bool) -> Steps:
            extra = self._extra if is_first else {}
            if not is_first:
                self._source.close()
                self._source = self._later.open(maps=self._elements.maps)
            steps = self._elements.plan.steps(self._source, noting, extra)
            self._dropped.clear()
            return self._watched(steps, layout, is_whole=not (is_first and self._is_resumed))

        def note_dropped(num_dropped: int, num_rows: int) -> None:
            layout.on_drop(num_dropped, num_rows)
            if num_dropped == num_rows:
                self._dropped.append(num_rows)
            if len(self._dropped) > _MAX_DROPPED:
                raise ValueError(
                    f"{len(self._dropped)} batches in a row made no step, and the dataset may have no end. {self._why(layout)}"
                )

        noting, places = dataclasses.replace(layout, on_drop=note_dropped), self._places
        for step in limited(start, self._elements.limits, places):
            if places:
                step = dataclasses.replace(step, extra={**step.extra, "places": list(places)})
            yield step

    def _watched(self, steps: Steps, layout: LocalReplicas, is_whole: bool) -> Steps:
        """Yield a pass's steps; if there are none in a whole pass, note why."""
        is_empty = is_whole
        with contextlib.closing(steps):
            for step in steps:
                is_empty = False
                self._dropped.clear()
                yield step
        if is_empty:
            self.why_no_step = self._why(layout)

    def _why(self, layout: LocalReplicas) -> str:
        """Say why a pass made no step; "" if the user asked for none."""
        if self._dropped:
            return (
                f"mr.InputOptions(drop_remainder=True) drops a batch in which some of the {layout.num_replicas} replicas would "
                f"get no row; here it dropped {counted(sum(self._dropped), 'row')}, and used none. Make larger batches, or leave "
                "drop_remainder out: then every row is used."
            )
        dataset = self._elements.plan.dataset
        name, why = type(dataset).__name__, kind_of(dataset).why_empty(dataset)
        if why is not None:
            return why
        if self._elements._specs:
            return (
                f"{name} gave no batch in this pass, and gave some in an earlier one: it can be gone through only once. Let its "
                "__iter__, or the function, begin anew each time: open the files, or call the generator function, in there."
            )
        return (
            f"{name} gave no batch with rows. It may have no files or records, a filter may leave all of them out, or they are "
            "fewer than a batch, and its own drop_remainder=True drops them."
        )

    def close(self) -> None:
        """Close the open source."""
        self._source.close()
