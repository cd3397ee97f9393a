"""How often, and how far, something is gone through: `take` and `repeat`, with the place in each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")

#: `("take", n)` items, or `("repeat", n)` times, None for no end; each of what the ones before it give.
Limit: TypeAlias = tuple[str, int | None]


def limited(
    start: Callable[[bool], Generator[T, None, None]], limits: Sequence[Limit], done: list[int], is_first: bool = True
) -> Generator[T, None, None]:
    """Yield the items of all passes; `start` begins one, given whether it is the first, which may be resumed.

    `done` says how many items or rounds of each limit, the innermost first, are done where that pass begins, and after each item.
    """
    if not limits:
        yield from start(is_first)
        return
    *inner, (kind, count) = limits
    mine, is_empty = len(inner), False
    while (count is None or done[mine] < count) and not is_empty:
        is_empty = not is_first  # nothing is left of a pass that was resumed at its end
        with contextlib.closing(limited(start, inner, done, is_first)) as items:
            for item in items:
                is_empty = False
                done[mine] += kind == "take"
                yield item
                if kind == "take" and done[mine] == count:
                    break
        is_first = False
        done[:mine] = [0] * mine
        if kind == "take":
            break
        done[mine] += 1


def num_passes_left(limits: Sequence[Limit], places: Sequence[int]) -> int:
    """Return how many passes there may be from here on, with the one that is under way; 1 when there is no end."""
    total, done = 1, 0
    for (kind, count), place in zip(limits, places or [0] * len(limits), strict=True):
        if kind == "repeat":
            done += total * place
            total *= count or 1
    return max(total - done, 1)


def num_steps(of_one_pass: int, limits: Sequence[Limit]) -> int:
    """Return how many items there are in all, or raise TypeError when there is no end."""
    total: float = of_one_pass
    for kind, count in limits:
        if kind == "take":
            total = total if count is None else min(total, count)
        elif total:
            total = float("inf") if count is None else total * count
    if total == float("inf"):
        raise TypeError("the dataset repeats without end, and has no length.")
    return int(total)


def check_places(places: object, limits: Sequence[Limit]) -> list[int]:
    """Return the places of a state, or say that they are not in these limits."""
    fits = isinstance(places, list) and len(places) == len(limits) and all(type(place) is int and place >= 0 for place in places)
    if not fits or any(count is not None and place > count for place, (_, count) in zip(places, limits, strict=True)):
        here = "".join(f".{kind}({'' if count is None else count})" for kind, count in limits) or "neither"
        raise ValueError(f"the state is at {places} of take and repeat, and this dataset has {here}; call the same in both runs.")
    return places
