"""Where the arrays of variables are: in lists that a program takes and gives back whole."""

from __future__ import annotations

import collections
import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

#: How many bytes of variables are copied at once before they are overwritten.
MAX_COPIED_BYTES = 32 * 1024 * 1024

#: Held while variables move, so that two threads never move one variable to two homes. Warm steps move none.
_moving = threading.RLock()


class Home:
    """The arrays of the variables that a program overwrites, in the one list that the program takes.

    Each variable has a place in one home: first in its own, then in that of the program that overwrote it last.
    So a warm step hands over one list, keeps another, and touches no variable. docs/design/variables.md says more.

    A home does not know its variables: one that lives must not keep the others alive.

    Attributes:
        arrays: the arrays, by place.
        taken: the places whose arrays somebody else may hold, so that they are copied before they are overwritten.
        is_whole: whether all the variables that the program overwrites are here.
    """

    __slots__ = ("arrays", "is_whole", "taken")

    def __init__(self, arrays: list[Any], is_whole: bool) -> None:
        self.arrays = arrays
        self.taken: set[int] = set()
        self.is_whole = is_whole


def home_of(variables: Sequence[Any]) -> Home:
    """Return the home that has exactly these variables, in this order, or a new one for them.

    Programs that overwrite the same variables, such as one step for two shapes of batches, share a home.
    """
    places = list(map(_place_of, variables))
    home = places[0][0] if places else Home([], is_whole=True)
    is_theirs = len(home.arrays) == len(places) and places == [(home, index) for index in range(len(places))]
    return home if is_theirs else Home([], is_whole=False)


def arrays_of(variables: Sequence[Any]) -> list[Any]:
    """Return the arrays of variables, wherever they are."""
    return [home.arrays[index] for home, index in map(_place_of, variables)]


def overwrite(compiled: Callable[..., Any], home: Home, variables: Sequence[Any], *others: Any) -> Any:
    """Call a program that is given the arrays of variables to overwrite, and keep the new ones it returns.

    The call and the assignments happen inside one C function, because a Ctrl-C between the program's start, which
    invalidates the old arrays, and the last assignment would lose the variables.

    Arrays that somebody else may hold are copied first, so that what a user took out stays valid.

    Args:
        compiled: takes `(arrays, *others)`, donates `arrays`, and returns `(results, new arrays, ...)`.
        home: the home of the variables that it overwrites.
        variables: these variables.
        others: its other arguments.
    """
    if not home.is_whole:
        return _overwrite_and_move(compiled, home, variables, others)
    if home.taken:
        _give_copies([(home, index) for index in sorted(home.taken)])
    outputs: dict[int, Any] = {}
    call = map(outputs.setdefault, (0,), itertools.starmap(compiled, ((home.arrays, *others),)))
    any(map(setattr, (home,), ("arrays",), map(_new_arrays_of, call)))  # they are all None
    return outputs[0]


def _overwrite_and_move(compiled: Callable[..., Any], home: Home, variables: Sequence[Any], others: Sequence[Any]) -> Any:
    """Do the same for variables of which some are elsewhere, and move them home in the same C function."""
    with _moving:
        places = list(map(_place_of, variables))
        for old, _ in places:
            old.is_whole = False
        _give_copies([(old, index) for old, index in places if index in old.taken])
        outputs: dict[int, Any] = {}
        call = map(outputs.setdefault, (0,), itertools.starmap(compiled, ((arrays_of(variables), *others),)))
        kept = map(setattr, (home,), ("arrays",), map(_new_arrays_of, call))
        moved = map(setattr, variables, itertools.repeat("_place"), zip(itertools.repeat(home), itertools.count()))
        any(itertools.chain(kept, moved))
        for old, index in places:
            if old is not home:
                old.arrays[index] = None
        home.is_whole = True
    return outputs[0]


def _give_copies(places: Sequence[tuple[Home, int]]) -> None:
    """Replace arrays by copies that nobody else holds, some at a time, so that not all exist twice at once."""
    waiting = collections.deque(places)
    while waiting:
        batch = [waiting.popleft()]
        num_bytes = _bytes_at(batch[0])
        while waiting and num_bytes + _bytes_at(waiting[0]) <= MAX_COPIED_BYTES:
            num_bytes += _bytes_at(waiting[0])
            batch.append(waiting.popleft())
        for (home, index), copy in zip(batch, _copy([home.arrays[index] for home, index in batch]), strict=True):
            home.arrays[index] = copy
            home.taken.discard(index)


def _bytes_at(place: tuple[Home, int]) -> int:
    home, index = place
    return home.arrays[index].nbytes


@jax.jit
def _copy(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


_place_of = operator.attrgetter("_place")
_new_arrays_of = operator.itemgetter(1)
