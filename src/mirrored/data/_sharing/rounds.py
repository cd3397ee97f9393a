"""How often, and how far, the steps of a dataset are gone through: `take` and `repeat`, with the place in each of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from .steps import Steps

#: `("take", n)` steps, or `("repeat", n)` times, None for no end; each of what the ones before it give.
Limit: TypeAlias = tuple[str, int | None]
#: Starts the steps of one pass over the data: True for the one in which the iterator is when it begins, which may be resumed.
StartPass: TypeAlias = Callable[[bool], Steps]


def all_steps(start: StartPass, limits: Sequence[Limit], places: Sequence[int]) -> Steps:
    """Yield the steps of all passes; each notes in `extra` how far it is in each limit, as `places`.

    All workers count the same steps, so they stop and begin anew together without asking each other.

    Args:
        start: begins a pass.
        limits: innermost first.
        places: how many steps or rounds of each are done, where the first pass begins.
    """
    done = list(places) or [0] * len(limits)
    for step in _limited(start, limits, done, len(limits), is_first=True):
        yield dataclasses.replace(step, extra={**step.extra, "places": list(done)}) if limits else step


def _limited(start: StartPass, limits: Sequence[Limit], done: list[int], depth: int, is_first: bool) -> Steps:
    """Yield the steps of the first so many limits; `done` says at each step where it is in all of them."""
    if depth == 0:
        yield from start(is_first)
        return
    mine = depth - 1
    kind, count = limits[mine]
    is_empty = False
    while (count is None or done[mine] < count) and not is_empty:
        with contextlib.closing(_limited(start, limits, done, mine, is_first)) as steps:
            is_empty = not is_first  # nothing is left of a pass that was resumed at its end
            for step in steps:
                is_empty = False
                done[mine] += kind == "take"
                yield step
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
    """Return how many steps there are in all.

    Raises:
        TypeError: when there is no end.
    """
    total: float = of_one_pass
    for kind, count in limits:
        if kind == "take":
            total = min(total, count or 0)
        elif total:
            total = float("inf") if count is None else total * count
    if total == float("inf"):
        raise TypeError("the dataset repeats without end, and has no length.")
    return int(total)


def check_places(places: Any, limits: Sequence[Limit]) -> list[int]:
    """Return the places of a state, or say that they are not in these limits."""
    fits = isinstance(places, list) and len(places) == len(limits) and all(type(place) is int and place >= 0 for place in places)
    if not fits or any(count is not None and place > count for place, (_, count) in zip(places, limits, strict=True)):
        here = "".join(f".{kind}({'' if count is None else count})" for kind, count in limits) or "neither"
        raise ValueError(f"the state is at {places} of take and repeat, and this dataset has {here}; call the same in both runs.")
    return places
