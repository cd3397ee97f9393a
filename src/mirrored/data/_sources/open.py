"""Opens a dataset of any library as a source of batches, with the position after each batch as JSON."""

from __future__ import annotations

import base64
import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from ..._typing import PyTree
from .kinds import kind_of
from .verbs import applied

#: A position as JSON text, or an exception that says why there is none.
Position: TypeAlias = str | Exception
#: The key of a torch tensor's bytes in a position; torchdata's loaders keep their generator's state as a tensor.
_TENSOR = "torch.Tensor"


class Source:
    """An iterator over a dataset's elements that applies `maps` to each, and knows the position after each."""

    def __init__(self, dataset: object, iterator: Iterator[PyTree], maps: Sequence[Callable[..., PyTree]] = ()) -> None:
        self._dataset, self._iterator, self._maps = dataset, iterator, maps
        kind = kind_of(dataset)
        self.is_owned = not maps and kind.yields_new_arrays(dataset)  # nobody else holds the arrays
        self._is_copied = bool(maps) and kind.keeps_arrays  # a function may change its argument in place, as in `x /= 255`

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> PyTree:
        element = next(self._iterator)
        if self._is_copied:
            element = jax.tree.map(lambda leaf: leaf.copy() if type(leaf) is np.ndarray else leaf, element)
        for fn in self._maps:
            element = applied(fn, element)
        return element

    def position(self) -> Position:
        """Return the position after the last element, as JSON text that later elements do not change."""
        if not hasattr(self._iterator, "get_state"):
            return _no_position(self._dataset)
        try:
            if isinstance(state := self._iterator.get_state(), bytes):
                state = {"base64": base64.b64encode(state).decode()}
            _require_text_keys(state)
            return json.dumps(state, default=_as_json)
        except Exception as error:  # the user's pipeline: it may yield batches without knowing its position
            return error

    def close(self) -> None:
        """Free the iterator's files and threads."""
        iterator, self._iterator = self._iterator, iter(())
        if hasattr(iterator, "close"):
            iterator.close()


def adapted(dataset: object) -> Any:
    """Return a dataset as its kind adapts it: one that can be iterated, and has arrays in its elements."""
    return kind_of(dataset).adapt(dataset)


def open_source(dataset: object, state: object = None, maps: Sequence[Callable[..., PyTree]] = ()) -> Source:
    """Start an iterator over a dataset's global batches, at its beginning or at a position; apply `maps` to each batch."""
    iterator = kind_of(dataset).start(dataset)
    if state is not None:
        _go_to(iterator, dataset, state)
    return Source(dataset, iterator, maps)


def _go_to(iterator: Any, dataset: object, state: object) -> None:
    """Move a new iterator to a position; if that fails, the dataset is as it was."""
    if isinstance(state, dict) and set(state) == {"base64"}:
        state = base64.b64decode(state["base64"])
    state = _with_tensors(copy.deepcopy(state))  # a copy: grain keeps parts of it and changes them
    if not hasattr(iterator, "set_state"):
        raise _no_position(dataset)
    try:
        iterator.set_state(state)
    except Exception as error:
        raise ValueError(
            f"the state does not fit {type(dataset).__name__}: {type(error).__name__}: {error}. It must come from get_state of "
            "an iterator over the same dataset; nothing has changed."
        ) from error


def _no_position(dataset: object) -> TypeError:
    return TypeError(
        f"{type(dataset).__name__} has no position that could be saved: neither its iterators have get_state and set_state nor "
        "itself state_dict and load_state_dict. Use strategy.make_numpy_dataset(arrays), a list of batches, a grain dataset, "
        "mr.data.tfrecord_dataset, a Hugging Face dataset or torchdata's StatefulDataLoader. Or let a resume pass over the "
        "batches that were taken: strategy.distribute_dataset(lambda: iter(dataset))."
    )


def _require_text_keys(state: object) -> None:
    """Refuse a state that JSON would change: a number as a key comes back as a text."""
    if isinstance(state, dict):
        if wrong := [key for key in state if type(key) is not str]:
            raise TypeError(
                f"its state has the key {wrong[0]!r}, which would come back from JSON as a text: write str(key) in it."
            )
        state = list(state.values())
    if isinstance(state, list | tuple):
        for value in state:
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
