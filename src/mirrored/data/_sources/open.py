"""From what a user gives as a dataset to batches: which library it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..._typing import PyTree
from . import grain
from .elements import own_copy
from .numpy_dataset import NumpyDataset
from .position import Source, resumed


class _SequenceIterator:
    """An iterator over batches by their number."""

    def __init__(self, batches: Any, is_copied: bool) -> None:
        self._batches, self._is_copied = batches, is_copied
        self._next = 0

    def __iter__(self) -> _SequenceIterator:
        return self

    def __next__(self) -> PyTree:
        if self._next >= len(self._batches):
            raise StopIteration
        self._next += 1
        batch = self._batches[self._next - 1]
        return own_copy(batch) if self._is_copied else batch

    def get_state(self) -> dict[str, int]:
        return {"next": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        position = state["next"]
        if not 0 <= position <= len(self._batches):
            raise ValueError(f"batch {position} of {len(self._batches)}")
        self._next = position


def open_source(dataset: Any, state: Any = None, maps: Sequence[Callable[..., PyTree]] = ()) -> Source:
    """Start an iterator over the global batches of a dataset, from a position on if one is given, through functions of each."""
    own = _own_stream(dataset, state) if is_hugging_face(dataset) and hasattr(dataset, "load_state_dict") else dataset

    def start() -> Any:
        if grain.is_pipeline(own):
            return grain.open_pipeline(own)
        if is_sequence(own):
            return _SequenceIterator(own, is_copied=bool(maps))
        return iter(own)

    iterator = start() if state is None else resumed(own, start, state)
    is_owned = isinstance(own, NumpyDataset) and not (own.maps or maps)
    return Source(own, iterator, is_owned, maps)


def _own_stream(dataset: Any, state: Any) -> Any:
    """Return a copy of a Hugging Face stream for one pass: a stream begins each pass of an epoch at the position it was given."""
    own = dataset.with_format("numpy")
    if hasattr(dataset, "epoch"):
        own.set_epoch(dataset.epoch if state is None else state.get("epoch", dataset.epoch))
    return own


def is_sequence(dataset: Any) -> bool:
    """Tell whether the batches of a dataset are asked for by their number, up to its length.

    Also where Python would ask until an IndexError: slices of arrays, as in `x[n * i : n * (i + 1)]`, never raise one, and the
    batches behind the end have no rows.
    """
    if isinstance(dataset, Sequence):
        return True
    is_by_number = is_hugging_face(dataset) or not hasattr(type(dataset), "__iter__")
    return is_by_number and hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")


def is_hugging_face(dataset: Any) -> bool:
    """Tell whether an object has the methods of a Hugging Face dataset, which this library never imports."""
    return all(callable(getattr(type(dataset), name, None)) for name in ("with_format", "iter", "batch"))


def adapted(dataset: Any) -> Any:
    """Return a dataset whose elements hold arrays: a Hugging Face dataset yields lists unless it is told otherwise."""
    is_stream = hasattr(dataset, "load_state_dict")  # of which each pass has its own copy, with the epoch that the user set
    return dataset.with_format("numpy") if is_hugging_face(dataset) and not is_stream else dataset
