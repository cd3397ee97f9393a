"""Where the arrays of variables are: in lists that a program takes and gives back whole."""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import VariableLostError
from .._replicas.frames import Frame
from .._typing import PyTree
from .._workers.joint_programs import Announced
from . import turns

#: How many bytes of variables are copied at once, or one variable more, before they are overwritten.
MAX_COPIED_BYTES = 32 * 1024 * 1024


class Home:
    """The arrays of the variables that a program overwrites, in the one list that the program takes.

    Each variable has a place in one home: first in its own, then in that of the program that overwrote it last.
    So a warm step hands over one list, keeps another, and touches no variable. docs/design/variables.md says more.

    A home does not know its variables: one that lives must not keep the others alive.

    Attributes:
        arrays: the arrays, by place.
        taken: the places whose arrays somebody else may hold, so that they are copied before they are overwritten.
        lent: index -> number of readers that borrow the array.
        is_whole: whether all the variables that the program overwrites are here.
    """

    __slots__ = ("arrays", "is_whole", "lent", "taken")

    def __init__(self, arrays: list[Any], is_whole: bool) -> None:
        self.arrays = arrays
        self.taken: set[int] = set()
        self.lent: dict[int, int] = {}
        self.is_whole = is_whole


class Slot:
    """The place of a variable's array, and its name. A program holds the slots of its variables, and so keeps none alive."""

    __slots__ = ("name", "place")

    def __init__(self) -> None:
        self.place = (Home([None], is_whole=True), 0)
        self.name = ""

    @property
    def array(self) -> Any:
        home, index = self.place
        return home.arrays[index]

    @array.setter
    def array(self, array: jax.Array | Lost | None) -> None:
        home, index = self.place
        home.arrays[index] = array

    def note_taken(self) -> None:
        """Note that somebody else may hold the array, so that a program does not overwrite it."""
        home, index = self.place
        home.taken.add(index)


class WeakVariables:
    """Variables of a program, which must not keep a model alive that everybody else has dropped, and their slots."""

    __slots__ = ("_references", "slots")

    def __init__(self, variables: Sequence[Any]) -> None:
        self._references = tuple(map(weakref.ref, variables))
        self.slots = tuple([variable._slot for variable in variables])

    def alive(self) -> tuple[Any, ...]:
        """Return those that live; a program that can still be called has all of its."""
        return tuple(variable for reference in self._references if (variable := reference()) is not None)


class Lost(str):
    """The message in the place of an array that a program had been given when it failed."""

    __slots__ = ()

    @classmethod
    def of(cls, names: Sequence[str], error: BaseException) -> Lost:
        """Say which variables were lost together, and the program's error, in a line."""
        last = (str(error).strip().splitlines() or [""])[-1]
        return cls(
            f"the value of {', '.join(map(repr, names))} is lost: the program that was overwriting it failed "
            f"({type(error).__name__}: {last[:300]}). Other variables are as they were. Go on from the last checkpoint, "
            "checkpoint.restore_latest(), or assign a new value."
        )


def home_of(slots: Sequence[Slot]) -> Home:
    """Return the home that has exactly these slots, in this order, or a new one for them.

    Programs that overwrite the same variables, such as one step for two shapes of batches, share a home.
    """
    places = list(map(_place_of, slots))
    home = places[0][0] if places else Home([], is_whole=True)
    is_theirs = len(home.arrays) == len(places) and places == [(home, index) for index in range(len(places))]
    return home if is_theirs else Home([], is_whole=False)


def arrays_of(slots: Sequence[Slot]) -> list[Any]:
    """Return the arrays of slots, wherever they are; they are valid as long as nobody else can write them."""
    return [home.arrays[index] for home, index in map(_place_of, slots)]


def claimed(slots: Sequence[Slot], frame: Frame | None) -> contextlib.AbstractContextManager[None]:
    """Let no other thread write slots inside this block; in a trace nobody could write what stands for them."""
    return contextlib.nullcontext() if frame is not None and frame.bindings is not None else turns.claimed(slots)


@contextlib.contextmanager
def lent(slots: Sequence[Slot]) -> Iterator[list[jax.Array]]:
    """Give the arrays of slots, which nobody overwrites inside this block; all are of one moment between two steps."""
    places: list[tuple[Home, int]] = []
    arrays: list[Any] = []
    try:
        with turns.lock:
            for home, index in map(_place_of, slots):
                home.lent[index] = home.lent.get(index, 0) + 1
                places.append((home, index))
            arrays = arrays_of(slots)
            refuse_lost(arrays)
        yield arrays
    except jax.errors.JaxRuntimeError as error:
        if failed := [slot.name for slot, array in zip(slots, arrays, strict=False) if _has_failed(array)]:
            raise VariableLostError(Lost.of(failed, error)) from error
        raise
    finally:
        with turns.lock:
            for home, index in places:
                home.lent[index] -= 1
                if not home.lent[index]:
                    del home.lent[index]


def overwrite(compiled: Callable[..., Any], home: Home, slots: Sequence[Slot], read_only: Sequence[Slot], *others: PyTree) -> Any:
    """Call a program that is given the arrays of variables to overwrite, and keep the new ones it returns.

    The call and the assignments happen inside one C function, because a Ctrl-C between the program's start, which
    invalidates the old arrays, and the last assignment would lose the variables.

    Arrays that somebody else may hold are copied first, so that what a user took out stays valid.

    Args:
        compiled: takes `(arrays, read-only arrays, *others)`, donates `arrays`, and returns `(results, new arrays, ...)`.
        home, slots: of the variables that it overwrites.
    """
    try:
        with turns.lock:
            if turns.claims:
                turns.wait_for(slots)
            if not home.is_whole:
                _bring_home(home, slots)
            if home.lent:
                home.taken.update(home.lent)
            outputs: dict[int, Any] = {}
            arguments = (home.arrays, arrays_of(read_only) if read_only else [], *others)
            if type(compiled) is Announced:  # now, because it is Python
                compiled.announce(*arguments)
                compiled = compiled.program
            call: Iterator[Any] = map(outputs.setdefault, (0,), itertools.starmap(compiled, (arguments,)))
            keep = map(setattr, (home,), ("arrays",), map(_new_arrays_of, call))
            while home.taken:  # last, because a signal's handler may take a value until here
                _give_copies(home)
            any(keep)  # they are all None
        return outputs[0]
    except BaseException as error:
        _note_lost(error, slots, read_only)
        raise


def overwrite_when_done(
    compiled: Callable[..., Any], home: Home, slots: Sequence[Slot], read_only: Sequence[Slot], *others: PyTree
) -> Any:
    """Do the same with a program that donates nothing, and that has ended when it returns: if it fails, nothing has changed.

    Others may read all variables meanwhile, and write those that it does not write.
    """
    with turns.claimed(slots, calls_host=True), lent([*slots, *read_only]) as arrays:
        outputs = compiled(arrays[: len(slots)], arrays[len(slots) :], *others)
        with turns.lock:
            if not home.is_whole:
                _bring_home(home, slots)
            home.taken.clear()
            home.arrays = outputs[1]
    return outputs


def _bring_home(home: Home, slots: Sequence[Slot]) -> None:
    """Move variables to a home, inside one C function; what somebody may hold of them stays noted."""
    places = list(map(_place_of, slots))
    for old, _ in places:
        old.is_whole = False
    kept = map(setattr, (home,), ("arrays",), ([old.arrays[index] for old, index in places],))
    moved = map(setattr, slots, itertools.repeat("place"), zip(itertools.repeat(home), itertools.count()))
    _note_held(home, places)
    any(itertools.chain(kept, moved))
    _note_held(home, places)  # what a signal's handler took meanwhile
    for old, index in places:
        if old is not home:
            old.arrays[index] = None
            old.taken.discard(index)
    home.is_whole = True


def _note_held(home: Home, places: Sequence[tuple[Home, int]]) -> None:
    home.taken.update([new for new, (old, index) in enumerate(places) if index in old.taken or index in old.lent])


def _give_copies(home: Home) -> None:
    """Replace arrays that were taken by copies that nobody else holds, some at a time, so that not all exist twice at once."""
    taken = sorted(home.taken)
    refuse_lost([home.arrays[index] for index in taken])
    ends = itertools.accumulate([home.arrays[index].nbytes for index in taken])
    for _, batch in itertools.groupby(zip(taken, ends, strict=True), lambda pair: (pair[1] - 1) // MAX_COPIED_BYTES):
        indices = [index for index, _ in batch]
        for index, copy in zip(indices, _copy([home.arrays[index] for index in indices]), strict=True):
            home.arrays[index] = copy
            home.taken.discard(index)


@jax.jit
def _copy(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


# -- programs that fail


def _note_lost(error: BaseException, slots: Sequence[Slot], read_only: Sequence[Slot]) -> None:
    """Note which arrays a program has taken with it, and say so beside its error; refuse what was lost before."""
    with turns.lock:
        arrays = arrays_of(slots)
        refuse_lost([*arrays, *arrays_of(read_only)])
    may_fail_late = isinstance(error, jax.errors.JaxRuntimeError)
    gone = [
        (slot, array)
        for slot, array in zip(slots, arrays, strict=True)
        if array is not None and (array.is_deleted() or (may_fail_late and _has_failed(array)))
    ]
    lost = Lost.of([slot.name for slot, _ in gone], error)
    with turns.lock:
        for slot, array in gone:
            if slot.array is array:  # else another thread has assigned a new one
                slot.array = lost
    if gone:
        error.add_note(lost)


def refuse_lost(arrays: Sequence[Any]) -> None:
    """Raise what a lost array says."""
    for array in arrays:
        if type(array) is Lost:
            raise VariableLostError(array) from None


def _has_failed(array: jax.Array) -> bool:
    """Tell whether the program that was to compute an array has failed."""
    try:
        jax.block_until_ready(array)
    except jax.errors.JaxRuntimeError:
        return True
    return False


_place_of = operator.attrgetter("place")
_new_arrays_of = operator.itemgetter(1)
