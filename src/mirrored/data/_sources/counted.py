"""Batches given by number, or by a function: their position is the number of batches taken."""

from __future__ import annotations

import collections.abc
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import jax
import numpy as np

from ..._text import shown
from ..._typing import PyTree
from .verbs import rows_of


class CountedBatches:
    """An iterator over the batches of another one; its position is the number of batches that were taken."""

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

    def __init__(self, dataset: Any, is_copied: bool) -> None:
        super().__init__(iter(()))
        self._dataset, self._is_copied = dataset, is_copied

    def _following(self) -> PyTree:
        if self._next >= len(self._dataset):
            raise StopIteration
        batch = self._dataset[self._next]
        if self._is_copied:  # the dataset keeps these arrays, and a function may change its argument in place, as in `x /= 255`
            return jax.tree.map(lambda leaf: leaf.copy() if type(leaf) is np.ndarray else leaf, batch)
        return batch

    def _pass_over(self, count: int) -> None:
        if not 0 <= count <= len(self._dataset):
            raise ValueError(f"batch {count} of {len(self._dataset)}")
        self._first_rows = rows_of(self._dataset[0]) if count else 0
        self._next = count


#: What can be iterated, and yields no batches.
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


def is_function(dataset: object) -> TypeGuard[Callable[..., object]]:
    """Tell whether an object can only be called, so that it may be a function that makes an iterator."""
    is_iterable = isinstance(dataset, collections.abc.Iterable) or hasattr(type(dataset), "__getitem__")
    return callable(dataset) and not (is_iterable or isinstance(dataset, type))


def check_function(function: Callable[..., object], verb: str) -> None:
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
