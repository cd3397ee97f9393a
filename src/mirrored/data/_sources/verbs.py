"""The common part of `take`, `repeat`, `map` and `element_spec` of distributed and numpy datasets."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from ..._typing import PyTree

T = TypeVar("T")

#: `("take", n)` items, or `("repeat", n)` times (None: endlessly); each limit applies to the result of the limits before it.
Limit: TypeAlias = tuple[str, int | None]


@dataclasses.dataclass(frozen=True)
class PerReplicaSpec:
    """The shape and dtype of one array of a batch on each replica; the number of rows is None.

    >>> strategy.distribute_dataset([{"x": np.zeros((6, 3), "float32")}]).element_spec
    {'x': PerReplicaSpec(shape=(None, 3), dtype=dtype('float32'))}

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedDataset#element_spec
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def spec_of_batch(batch: PyTree) -> PyTree:
    """Return a PerReplicaSpec for each array of a batch, in the batch's structure."""
    dtype_of = jax.dtypes.canonicalize_dtype
    return jax.tree.map(lambda leaf: PerReplicaSpec((None, *leaf.shape[1:]), dtype_of(leaf.dtype)), batch)


def check_int(given: str, value: object, at_least: int, what: str) -> int:
    """Return an int of at least `at_least`; refuse others, as in `check_int("batch_size is", 0, 1, "the number of rows")`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{given} {value!r}; expected an int, {what}.")
    if value < at_least:
        raise ValueError(f"{given} {value}; expected at least {at_least}, {what}.")
    return int(value)


def at_most(count: int, limit: int | None) -> int:
    """Return a count, or a smaller limit if there is one."""
    return count if limit is None else min(count, limit)


def checked_function(fn: object) -> Callable[..., PyTree]:
    """Return the argument of `map`; refuse it if it is no function."""
    if not callable(fn):
        raise TypeError(f"map got {fn!r}; expected a function of a batch, for example lambda x, y: (x / 255, y).")
    return fn


def rows_of(batch: PyTree) -> int:
    """Return the number of rows in a batch that a dataset yields; 0 if it holds no array."""
    arrays = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return int(np.shape(arrays[0])[0]) if arrays else 0


def applied(fn: Callable[..., PyTree], element: PyTree) -> PyTree:
    """Call a function with an element; a tuple becomes several arguments."""
    try:
        return fn(*element) if type(element) is tuple else fn(element)
    except StopIteration as end:  # it would count as the end of the data
        raise RuntimeError(
            "the function that map was given raised StopIteration, which says that an iterator it calls `next` on has ended, and "
            "not the data: the batches after it would be lost. Let that iterator have an element for each call, or write "
            "next(iterator, default)."
        ) from end


def limited(
    start: Callable[[bool], Generator[T, None, None]], limits: Sequence[Limit], places: list[int], is_first: bool = True
) -> Generator[T, None, None]:
    """Yield the items of all passes, from the counts in `places` on; `start(is_first)` begins a pass."""
    # `places` counts the items or rounds of each limit, the innermost first, and is up to date at each item.
    if not limits:
        yield from start(is_first)
        return
    *inner, (kind, count) = limits
    mine, is_empty = len(inner), False
    while (count is None or places[mine] < count) and not is_empty:
        is_empty = not is_first  # a pass resumed at its end yields nothing, but is not empty
        with contextlib.closing(limited(start, inner, places, is_first)) as items:
            for item in items:
                is_empty = False
                places[mine] += kind == "take"
                yield item
                if kind == "take" and places[mine] == count:
                    break
        is_first = False
        places[:mine] = [0] * mine
        if kind == "take":
            break
        places[mine] += 1


def num_passes_left(limits: Sequence[Limit], places: Sequence[int]) -> int:
    """Return the number of passes left, the current one included; of an endless `repeat`, any number of at least 1."""
    total, num_done = 1, 0
    for (kind, count), place in zip(limits, places, strict=True):
        if kind == "repeat":
            num_done += total * place
            total *= count or 1
    return max(total - num_done, 1)


def num_steps(of_one_pass: int, limits: Sequence[Limit]) -> int:
    """Return the number of items in all passes; raise TypeError if there is no end."""
    total: float = of_one_pass
    for kind, count in limits:
        most = float("inf") if count is None else count
        if kind == "take":
            total = min(total, most)
        elif total:  # 0 times infinity is no number
            total *= most
    if total == float("inf"):
        raise TypeError("the dataset repeats without end, and has no length.")
    return int(total)


def check_places(places: object, limits: Sequence[Limit]) -> list[int]:
    """Return the counts in a state, one for each limit; refuse others."""
    fits = isinstance(places, list) and len(places) == len(limits) and all(type(place) is int and place >= 0 for place in places)
    if not fits or any(count is not None and place > count for place, (_, count) in zip(places, limits, strict=True)):
        here = "".join(f".{kind}({'' if count is None else count})" for kind, count in limits) or "neither"
        raise ValueError(f"the state is at {places} of take and repeat, and this dataset has {here}; call the same in both runs.")
    return places
