"""Opens a user's dataset, of whichever library, as a source of batches that knows the position after each as JSON."""

from __future__ import annotations

import base64
import collections
import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..._typing import PyTree
from . import grain
from .counted import BatchesByNumber, FunctionDataset, is_function
from .numpy_dataset import NumpyDataset
from .verbs import applied

#: A position as JSON text, or an exception that says why there is none.
Position: TypeAlias = str | Exception
#: The key of a torch tensor's bytes in a position; torchdata's loaders keep their generator's state as a tensor.
_TENSOR = "torch.Tensor"


class Source:
    """An iterator over a dataset's elements that applies `maps` to each, and knows the position after each.

    It understands two protocols: datasets with `state_dict` and `load_state_dict` (Hugging Face, torchdata), and
    iterators with `get_state` and `set_state` (grain, and ours).
    """

    def __init__(
        self, dataset: object, iterator: Iterator[PyTree], is_owned: bool = False, maps: Sequence[Callable[..., PyTree]] = ()
    ) -> None:
        """Wrap a new iterator over a dataset; `is_owned` says that nobody else holds the arrays that it yields."""
        self._dataset, self._iterator, self._maps = dataset, iterator, maps
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
        """Return the position after the last element, as JSON text that later elements do not change."""
        try:
            if hasattr(self._dataset, "state_dict"):
                if not self._has_begun:  # its position may still be the last pass's
                    return ValueError(f"{type(self._dataset).__name__} tells its position only after the first batch.")
                state = self._dataset.state_dict()
            elif hasattr(self._iterator, "get_state"):
                state = self._iterator.get_state()
            else:
                return _no_position(self._dataset)
            state = {"base64": base64.b64encode(state).decode()} if isinstance(state, bytes) else state
            _require_text_keys(state)
            return json.dumps(state, default=_as_json)
        except Exception as error:  # the user's pipeline: it may yield batches without knowing its position
            return error

    def close(self) -> None:
        """Free the iterator's files and threads."""
        iterator, self._iterator = self._iterator, iter(())
        if hasattr(iterator, "close"):
            iterator.close()


def open_source(dataset: Any, state: Any = None, maps: Sequence[Callable[..., PyTree]] = ()) -> Source:
    """Start an iterator over a dataset's global batches, at its beginning or at a position; apply `maps` to each batch."""
    own = dataset
    if is_hugging_face(dataset) and hasattr(dataset, "load_state_dict"):
        # A copy for this pass: the user's own dataset would begin every pass at the position that it was given.
        own = dataset.with_format("numpy")
        if hasattr(dataset, "epoch"):
            own.set_epoch(dataset.epoch if state is None else state.get("epoch", dataset.epoch))

    def start() -> Any:
        if grain.is_pipeline(own):
            return grain.open_pipeline(own)
        if is_sequence(own):
            return BatchesByNumber(own, is_copied=bool(maps))
        return iter(own)

    iterator = start() if state is None else _resume(own, start, state)
    is_owned = isinstance(own, NumpyDataset) and not (own.maps or maps)
    return Source(own, iterator, is_owned, maps)


def is_sequence(dataset: object) -> bool:
    """Tell whether a dataset has no `__iter__`, but gives batches by number, up to its length."""
    # Python would ask until an IndexError, which slices of arrays, such as `x[n * i : n * (i + 1)]`, never raise.
    own = getattr(type(dataset), "__iter__", None)
    by_number = (list, tuple, collections.deque, Sequence)
    is_by_number = is_hugging_face(dataset) or own in (None, *(kind.__iter__ for kind in by_number))
    return is_by_number and hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")


def is_hugging_face(dataset: object) -> bool:
    """Tell whether an object has the methods of a Hugging Face dataset; we never import that library."""
    return all(callable(getattr(type(dataset), name, None)) for name in ("with_format", "iter", "batch"))


def adapted(dataset: Any) -> Any:
    """Return a dataset that can be iterated, and whose elements hold arrays: a Hugging Face dataset has lists by default."""
    if is_function(dataset):
        return FunctionDataset(dataset)
    is_stream = hasattr(dataset, "load_state_dict")  # each pass copies it, with the epoch that the user set
    is_set = (getattr(dataset, "format", None) or {}).get("type") is not None
    return dataset.with_format("numpy") if is_hugging_face(dataset) and not (is_stream or is_set) else dataset


def _resume(dataset: Any, start: Callable[[], Any], state: Any) -> Iterator[PyTree]:
    """Start an iterator at a position; if that fails, leave the dataset as it was."""
    if isinstance(state, dict) and set(state) == {"base64"}:
        state = base64.b64decode(state["base64"])
    state = _with_tensors(copy.deepcopy(state))  # a copy: grain keeps parts of it and changes them
    if hasattr(dataset, "load_state_dict"):
        before = dataset.state_dict()
        try:
            dataset.load_state_dict(state)
            return start()  # an iterator may read the position already in its constructor
        except Exception as error:
            dataset.load_state_dict(before)
            raise _misfit(dataset, error) from error
    iterator = start()
    if not hasattr(iterator, "set_state"):
        raise _no_position(dataset)
    try:
        iterator.set_state(state)
    except Exception as error:
        raise _misfit(dataset, error) from error
    return iterator


def _misfit(dataset: object, error: Exception) -> ValueError:
    return ValueError(
        f"the state does not fit {type(dataset).__name__}: {type(error).__name__}: {error}. It must come from get_state of "
        "an iterator over the same dataset; nothing has changed."
    )


def _no_position(dataset: object) -> TypeError:
    return TypeError(
        f"{type(dataset).__name__} has no position that could be saved: neither its iterators have get_state and set_state nor "
        "itself state_dict and load_state_dict. Use strategy.make_numpy_dataset(arrays), a list of batches, a grain dataset, "
        "mr.data.tfrecord_dataset, a Hugging Face dataset or torchdata's StatefulDataLoader. Or let a resume pass over the "
        "batches that were taken: strategy.distribute_dataset(lambda: iter(dataset))."
    )


def _require_text_keys(state: object) -> None:
    """Refuse a state that JSON would change: a number as a key comes back as a text."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if type(key) is not str:
            raise TypeError(f"its state has the key {key!r}, which would come back from JSON as a text: write str(key) in it.")
        _require_text_keys(value)
    for value in state if isinstance(state, list | tuple) else ():
        _require_text_keys(value)


def _as_json(value: object) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        array = np.asarray(value)
        return {_TENSOR: base64.b64encode(array.tobytes()).decode(), "dtype": array.dtype.name, "shape": array.shape}
    raise TypeError(f"its state holds {value!r} of type {type(value).__name__}, which JSON cannot hold.")


def _with_tensors(state: PyTree) -> PyTree:
    """Restore the tensors in a position; a program with a torch loader has already imported torch."""
    if isinstance(state, list):
        return [_with_tensors(part) for part in state]
    if not isinstance(state, dict):
        return state
    if set(state) != {_TENSOR, "dtype", "shape"}:
        return {key: _with_tensors(part) for key, part in state.items()}
    array = np.frombuffer(bytearray(base64.b64decode(state[_TENSOR])), state["dtype"]).reshape(state["shape"])
    return sys.modules["torch"].from_numpy(array)
