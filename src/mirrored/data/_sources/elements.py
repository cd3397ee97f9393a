"""What an element of a dataset looks like, and what a function makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..._typing import PyTree


@dataclasses.dataclass(frozen=True)
class PerReplicaSpec:
    """What each replica gets of one array of a batch: its shape, with None for the number of rows, and its dtype.

    >>> strategy.distribute_dataset([{"x": np.zeros((6, 3), "float32")}]).element_spec
    {'x': PerReplicaSpec(shape=(None, 3), dtype=dtype('float32'))}

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedDataset#element_spec
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def spec_of_batch(batch: PyTree) -> PyTree:
    """Return a PerReplicaSpec for each array of a batch, in its structure."""
    dtype_of = jax.dtypes.canonicalize_dtype
    return jax.tree.map(lambda leaf: PerReplicaSpec((None, *leaf.shape[1:]), dtype_of(leaf.dtype)), batch)


def check_int(given: str, value: object, at_least: int, what: str) -> int:
    """Return what must be an int of a size, or say what it is: `check_int("batch_size is", 0, 1, "the number of rows")`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{given} {value!r}; expected an int, {what}.")
    if value < at_least:
        raise ValueError(f"{given} {value}; expected at least {at_least}, {what}.")
    return int(value)


def checked_function(fn: object) -> Callable[..., PyTree]:
    """Return a function that `map` was given, or say that it is none."""
    if not callable(fn):
        raise TypeError(f"map got {fn!r}; expected a function of a batch, for example lambda x, y: (x / 255, y).")
    return fn


def applied(fn: Callable[..., PyTree], element: PyTree) -> PyTree:
    """Call a function with an element, a tuple as several arguments."""
    try:
        return fn(*element) if type(element) is tuple else fn(element)
    except StopIteration as end:  # which would be taken for the end of the data
        raise RuntimeError(
            "the function that map was given raised StopIteration, which says that an iterator it calls `next` on has ended, and "
            "not the data: the batches after it would be lost. Let that iterator have an element for each call, or write "
            "next(iterator, default)."
        ) from end
