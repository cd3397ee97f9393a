"""Batches from a list, a sequence or a function: their position is the number of batches taken."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..._text import shown
from ..._typing import PyTree
from .kind import Cut, SourceKind
from .verbs import rows_of


class CountedBatches:
    """An iterator that counts the batches of another iterator; its position is the number of batches taken."""

    def __init__(self, batches: Iterator[PyTree]) -> None:
        self._batches = batches
        self._next = self._first_rows = 0

    def __iter__(self) -> CountedBatches:
        return self

    def __next__(self) -> PyTree:
        batch = self._following()
        self._next += 1
        if self._next == 1:
            self._first_rows = rows_of(batch)
        return batch

    def _following(self) -> PyTree:
        return next(self._batches)

    def _pass_over(self, count: int) -> None:
        """Go on after the first `count` batches; raise ValueError if there are fewer."""
        if sum(1 for _ in itertools.islice(self, count)) < count:
            raise ValueError(f"batch {count} of {self._next}")

    def get_state(self) -> dict[str, int]:
        return {"next": self._next, "first_rows": self._first_rows}

    def set_state(self, state: dict[str, int]) -> None:
        self._pass_over(state["next"])
        if state.get("first_rows", self._first_rows) != self._first_rows:
            raise ValueError(
                f"it counts batches, whose first had {state['first_rows']} rows, and here it has {self._first_rows}: rows would "
                "be used twice, or left out. Make batches of the same size, or use strategy.make_numpy_dataset(arrays).batch(n), "
                "whose position counts rows"
            )

    def close(self) -> None:
        if hasattr(self._batches, "close"):
            self._batches.close()


class BatchesByNumber(CountedBatches):
    """An iterator over batches that a dataset gives by number."""

    def __init__(self, dataset: Sequence[PyTree]) -> None:
        super().__init__(iter(()))
        self._dataset = dataset

    def _following(self) -> PyTree:
        if self._next >= len(self._dataset):
            raise StopIteration
        return self._dataset[self._next]

    def _pass_over(self, count: int) -> None:
        if not 0 <= count <= len(self._dataset):
            raise ValueError(f"batch {count} of {len(self._dataset)}")
        self._first_rows = rows_of(self._dataset[0]) if count else 0
        self._next = count


class OwnPosition(CountedBatches):
    """An iterator over a dataset whose own `state_dict` and `load_state_dict` hold the position of the pass."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(_begun_later(dataset))
        self._dataset = dataset

    def get_state(self) -> Any:
        if not self._next:  # it may still be that of the last pass
            raise ValueError(f"{type(self._dataset).__name__} tells its position only after the first batch.")
        return self._dataset.state_dict()

    def set_state(self, state: object) -> None:
        before = self._dataset.state_dict()
        try:
            self._dataset.load_state_dict(state)
            self._batches = iter(self._dataset)  # an iterator may read the position already in its constructor
        except Exception:
            self._dataset.load_state_dict(before)
            raise


def _begun_later(dataset: Iterable[PyTree]) -> Iterator[PyTree]:
    yield from dataset


def begin(dataset: Iterable[PyTree]) -> Iterator[PyTree]:
    """Begin a pass over any iterable."""
    return OwnPosition(dataset) if hasattr(dataset, "state_dict") else iter(dataset)


def is_by_number(dataset: object) -> bool:
    """Tell whether a dataset gives batches by number, up to its length."""
    return hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")


def _is_sequence(dataset: object) -> bool:
    """Tell whether a dataset gives batches by number, and has no `__iter__` with another order."""
    # Python would ask until an IndexError, which slices of arrays, such as `x[n * i : n * (i + 1)]`, never raise.
    own = getattr(type(dataset), "__iter__", None)
    return is_by_number(dataset) and own in (None, *(kind.__iter__ for kind in (list, tuple, collections.deque, Sequence)))


def _cut_in_memory(batches: Sequence[PyTree]) -> Cut | None:
    size, last = (rows_of(batches[0]), rows_of(batches[-1])) if len(batches) > 1 else (0, 0)
    return Cut(size * (len(batches) - 1) + last, size, len(batches)) if 0 < last <= size else None


#: Iterables that yield no batches.
_NO_DATASETS = (str, bytes, collections.abc.Mapping, np.ndarray, jax.Array)


class FunctionDataset:
    """A function without arguments, which each pass calls once for a new iterator over batches."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._last: Callable[[], object] = lambda: None  # the iterator of the last pass, if it is still there

    def __iter__(self) -> CountedBatches:
        name = f"the function {shown(self._function)}, which begins a pass over the data,"
        try:
            made = self._function()
        except StopIteration as end:  # it would count as the end of the data
            raise RuntimeError(f"{name} raised StopIteration: an iterator that it calls `next` on has ended.") from end
        if not isinstance(made, collections.abc.Iterator):
            is_dataset = isinstance(made, collections.abc.Iterable) and not isinstance(made, _NO_DATASETS)
            raise TypeError(
                f"{name} returned {shown(made)} of type {type(made).__name__}; expected a new iterator over global batches, as a "
                "function with `yield batch` makes one." + " Of this result write lambda: iter(function())." * is_dataset
            )
        is_begun = inspect.isgenerator(made) and inspect.getgeneratorstate(made) != inspect.GEN_CREATED
        if is_begun or made is self._last():
            raise ValueError(
                f"{name} returned {shown(made)}, which has begun already, so that its first batches would be missing. Make the "
                "iterator inside of the function, anew in each call: def batches(): yield ..."
            )
        try:
            self._last = weakref.ref(made)
        except TypeError:  # an iterator of Python's own, such as that of a list
            self._last = lambda: made
        return CountedBatches(made)


def _is_iterable(dataset: object) -> bool:
    return isinstance(dataset, collections.abc.Iterable) or hasattr(type(dataset), "__getitem__")


def _check_function(function: Callable[..., object], verb: str, size: str) -> None:
    """Refuse a function that cannot be called without arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        name = getattr(function, "__name__", "function")
        raise TypeError(
            f"{verb} got the function {shown(function)}, and each pass calls it without arguments: {error}. Give them now: "
            f"functools.partial({name}, ...), or lambda: {name}(...)."
        ) from None
    except ValueError:  # a function in C, which has no signature
        return


BY_NUMBER = SourceKind(is_one=_is_sequence, start=BatchesByNumber, sample=BatchesByNumber, keeps_arrays=True)
IN_MEMORY = dataclasses.replace(
    BY_NUMBER,
    is_one=lambda dataset: isinstance(dataset, list | tuple) and _is_sequence(dataset),
    cut=_cut_in_memory,
    num_rows=lambda batches: [rows_of(batch) for batch in batches],
    why_empty=lambda batches: f"The {type(batches).__name__} is empty, or its batches have no rows.",
)
FUNCTION = SourceKind(
    is_one=lambda dataset: callable(dataset) and not (_is_iterable(dataset) or isinstance(dataset, type)),
    start=lambda dataset: iter(FunctionDataset(dataset)),
    adapt=FunctionDataset,
    why_no_batches=_check_function,
)
ITERABLE = SourceKind(is_one=lambda dataset: _is_iterable(dataset) and not isinstance(dataset, str | bytes), start=begin)
