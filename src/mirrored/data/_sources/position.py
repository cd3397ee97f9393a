"""Where an iterator over a dataset stands, as JSON, and how to put it back there."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..._typing import PyTree
from .elements import applied

#: A position as JSON text, or the exception that says why there is none.
Position: TypeAlias = str | Exception


class Source:
    """An iterator over the elements of a dataset that knows the position after each.

    Two protocols are understood: datasets with `state_dict` and `load_state_dict` (Hugging Face, torchdata), and
    iterators with `get_state` and `set_state` (grain, and ours).
    """

    def __init__(
        self, dataset: Any, iterator: Iterator[PyTree], is_owned: bool = False, maps: Sequence[Callable[..., PyTree]] = ()
    ) -> None:
        """Take a new iterator over the dataset.

        Args:
            dataset: it may hold the position.
            iterator: it may hold the position.
            is_owned: whether it yields arrays that nobody else holds.
            maps: functions that each element goes through; they do not change the position.
        """
        self._maps = maps
        self._dataset = dataset
        self._iterator = iterator
        self.is_owned = is_owned
        self._has_begun = False

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> PyTree:
        self._has_begun = True
        element = next(self._iterator)
        for fn in self._maps:
            element = applied(fn, element)
        return element

    def position(self) -> Position:
        """Return the position after the last element as JSON text, which later elements do not change."""
        try:
            if hasattr(self._dataset, "state_dict"):
                if not self._has_begun:  # it may still be that of the last pass
                    return ValueError(f"{type(self._dataset).__name__} tells its position only after the first batch.")
                state = self._dataset.state_dict()
            elif hasattr(self._iterator, "get_state"):
                state = self._iterator.get_state()
            else:
                return _no_position(self._dataset)
            state = {"base64": base64.b64encode(state).decode()} if isinstance(state, bytes) else state
            return json.dumps(state, default=_plain_number)
        except Exception as error:  # of the user's pipeline, which need not know its position to be read
            return error

    def close(self) -> None:
        """Free what the iterator holds: files, threads."""
        iterator, self._iterator = self._iterator, iter(())
        if hasattr(iterator, "close"):
            iterator.close()


def resumed(dataset: Any, start: Callable[[], Iterator[PyTree]], state: Any) -> Iterator[PyTree]:
    """Return a new iterator over a dataset that goes on from a position; when that fails, nothing has changed for others.

    Raises:
        TypeError: when the dataset has no position.
        ValueError: when the position is not one of this dataset.
    """
    if isinstance(state, dict) and set(state) == {"base64"}:
        state = base64.b64decode(state["base64"])
    state = copy.deepcopy(state)  # grain keeps parts of it and changes them
    if hasattr(dataset, "load_state_dict"):
        before = dataset.state_dict()
        try:
            dataset.load_state_dict(state)
            return start()  # an iterator may take the position already when it is made
        except Exception as error:
            dataset.load_state_dict(before)
            raise _misfit(dataset, error) from error
    iterator: Any = start()
    if not hasattr(iterator, "set_state"):
        raise _no_position(dataset)
    try:
        iterator.set_state(state)
    except Exception as error:
        raise _misfit(dataset, error) from error
    return iterator


def _misfit(dataset: Any, error: Exception) -> ValueError:
    return ValueError(
        f"the state does not fit {type(dataset).__name__}: {type(error).__name__}: {error}. It must come from get_state of "
        "an iterator over the same dataset; nothing has changed."
    )


def _no_position(dataset: Any) -> TypeError:
    return TypeError(
        f"{type(dataset).__name__} has no position that could be saved: neither its iterators have get_state and set_state nor "
        "itself state_dict and load_state_dict. Use strategy.make_numpy_dataset(arrays), a list of batches, a grain dataset, "
        "mr.data.tfrecord_dataset, a Hugging Face dataset or torchdata's StatefulDataLoader."
    )


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"its state holds {value!r} of type {type(value).__name__}, which JSON cannot hold.")
