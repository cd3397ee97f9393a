"""The arrays of variables, in lists that a program takes and gives back whole."""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._errors import ContextError, VariableLostError
from .._replicas.frames import Frame
from .._replicas.planned import Planned
from .._typing import PyTree
from .._workers.joint_programs import Announced

#: Held while a program that takes arrays over is started, and while somebody looks where arrays are. Nobody who holds it waits
#: for a device: a program on it may have a host callback, which may want to read a variable.
lock = threading.RLock()
_claims_changed = threading.Condition(lock)
#: Bytes of variables that are copied at once before they are overwritten; one variable may exceed them.
MAX_COPIED_BYTES = 32 * 1024 * 1024
#: Names in the message of lost variables.
MAX_NAMES = 20


class Home:
    """The arrays of the variables that a program overwrites, in the one list that the program takes.

    Each variable has a place in one home: first in its own, then in that of the program that overwrote it last.
    So a warm step hands over one list, keeps another, and touches no variable (docs/design/variables.md). A home holds no
    variable: one that lives must not keep the others alive.

    Attributes:
        taken: indices of arrays that a user may hold: they are copied before they are overwritten.
        lent: index -> number of readers that borrow the array.
        names: of the variables, for messages; empty in a variable's own home.
        is_whole: whether all variables that the program overwrites have their places here.
    """

    __slots__ = ("arrays", "is_whole", "lent", "names", "taken")

    def __init__(self, arrays: list[Any], is_whole: bool, names: Sequence[str] = ()) -> None:
        self.arrays = arrays
        self.taken: set[int] = set()
        self.lent: dict[int, int] = {}
        self.names = names
        self.is_whole = is_whole


class Slot:
    """The place of a variable's array, and its name. A program holds slots, so that it keeps no variable alive."""

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
        """Note that a user may hold the array, so that no program overwrites it."""
        home, index = self.place
        home.taken.add(index)


class WeakVariables:
    """The slots of a program's variables, and weak references: the program must not keep a dropped model alive."""

    __slots__ = ("_references", "slots")

    def __init__(self, variables: Sequence[Any]) -> None:
        self._references = tuple(map(weakref.ref, variables))
        self.slots = tuple([variable._slot for variable in variables])

    def alive(self) -> tuple[Any, ...]:
        """Return the variables that live; a program that can still be called has all of them."""
        return tuple(variable for reference in self._references if (variable := reference()) is not None)


class Lost(str):
    """The message in the place of an array that a program had been given when it failed."""

    __slots__ = ()

    @classmethod
    def of(cls, names: Sequence[str], error: BaseException) -> Lost:
        """Make the message of variables that one program's error has lost."""
        last = (str(error).strip().splitlines() or [""])[-1].replace("Error dispatching computation: ", "")
        again = " to each of them" if len(names) > 1 else ""
        more = f" and {len(names) - MAX_NAMES} more variables" if len(names) > MAX_NAMES else ""
        return cls(
            f"the value of {', '.join(map(repr, names[:MAX_NAMES]))}{more} is lost: the program that was to compute it failed "
            f"({type(error).__name__}: {last[:300]}). Other variables are as they were. Go on from the last checkpoint, "
            f"checkpoint.restore_latest(), or assign a new value{again}; for an optimizer's, make the optimizer again."
        )


def home_of(slots: Sequence[Slot]) -> Home:
    """Return the home of exactly these slots, in this order, or a new one for them.

    Programs that overwrite the same variables, such as one step for two shapes of batches, share a home.
    """
    places = list(map(_place_of, slots))
    home = places[0][0] if places else Home([], is_whole=True)
    if places == [(home, index) for index in range(len(home.arrays))]:
        return home
    return Home([], is_whole=False, names=[slot.name for slot in slots])


def arrays_of(slots: Sequence[Slot]) -> list[Any]:
    """Return the arrays of slots; they are valid as long as nobody else can write them."""
    return [home.arrays[index] for home, index in map(_place_of, slots)]


# -- threads that write


class Claim(NamedTuple):
    """Slots of variables that a thread is about to write, without the lock: their old arrays stay readable."""

    thread: int
    slots: frozenset[Slot]
    calls_host: bool  # the thread waits for a program with a host callback


#: All claims of the moment; hardly ever more than one.
claims: dict[object, Claim] = {}


@contextlib.contextmanager
def claimed(slots: Sequence[Slot], frame: Frame | None = None, calls_host: bool = False) -> Iterator[None]:
    """Let no other thread write slots inside this block, which may take its time; in a trace no other thread can."""
    if frame is not None and frame.bindings is not None:
        yield
        return
    token = object()
    try:
        with lock:
            _wait_for(slots)
            claims[token] = Claim(threading.get_ident(), frozenset(slots), calls_host)
        yield
    finally:
        claims.pop(token, None)
        with lock:
            _claims_changed.notify_all()


def _wait_for(slots: Sequence[Slot]) -> None:
    """Wait, with the lock, until no other thread claims any of some slots."""
    this, wanted = threading.get_ident(), frozenset(slots)
    while claim := next((c for c in claims.values() if (c.thread != this or c.calls_host) and c.slots & wanted), None):
        # JAX calls a callback in the thread that waits for it, or in one that Python did not start.
        is_in_callback = claim.thread == this or threading.current_thread().name.startswith("Dummy-")
        if claim.calls_host and is_in_callback:
            names = ", ".join(sorted(repr(slot.name) for slot in claim.slots & wanted))
            raise ContextError(
                f"a host callback writes {names}, which the step that it belongs to writes too: each would wait for the other. "
                "Return the new value from the callback, and assign it in the step."
            )
        _claims_changed.wait()


@contextlib.contextmanager
def lent(slots: Sequence[Slot]) -> Iterator[list[jax.Array]]:
    """Lend the arrays of slots, all of one moment between two steps: nobody overwrites them inside this block."""
    places: list[tuple[Home, int]] = []
    arrays: list[Any] = []
    try:
        with lock:
            for home, index in map(_place_of, slots):
                home.lent[index] = home.lent.get(index, 0) + 1
                places.append((home, index))
            arrays = arrays_of(slots)
            refuse_lost(arrays)
        yield arrays
    except jax.errors.JaxRuntimeError as error:
        _note_lost(error, slots)
        raise
    finally:
        with lock:
            for home, index in places:
                home.lent[index] -= 1
                if not home.lent[index]:
                    del home.lent[index]


# -- programs that overwrite


def overwrite(compiled: Callable[..., Any], home: Home, slots: Sequence[Slot], read_only: Sequence[Slot], *others: PyTree) -> Any:
    """Call a program that overwrites the arrays of variables, and keep the new ones it returns.

    The call and the assignments happen inside one C function, because a Ctrl-C between the program's start, which
    invalidates the old arrays, and the last assignment would lose the variables. Arrays that a user may hold are copied
    first, so that they stay valid.

    Args:
        compiled: takes `(arrays, read-only arrays, *others)`, donates `arrays`, and returns `(results, new arrays, ...)`.
        home, slots: of the variables that it overwrites.
    """
    try:
        with lock:
            if claims:
                _wait_for(slots)
            if not home.is_whole:
                _bring_home(home, slots)
            if home.lent:
                home.taken.update(home.lent)
            outputs: dict[int, Any] = {}
            arguments = (home.arrays, arrays_of(read_only) if read_only else [], *others)
            _refuse_failed(arguments[0] or arguments[1])
            if type(compiled) is Announced:  # now, because it is Python
                compiled.announce(*arguments)
                compiled = compiled.program
            call: Iterator[Any] = map(outputs.setdefault, (0,), itertools.starmap(compiled, (arguments,)))
            keep = map(setattr, (home,), ("arrays",), map(_new_arrays_of, call))
            while home.taken:  # at the end, because a signal's handler may take a value until here
                _give_copies(home)
            any(keep)  # they are all None
        return outputs[0]
    except BaseException as error:
        _note_lost(error, [*slots, *read_only])
        raise


def overwrite_when_done(
    compiled: Callable[..., Any], home: Home, slots: Sequence[Slot], read_only: Sequence[Slot], *others: PyTree
) -> Any:
    """As `overwrite`, for a program that donates nothing and has ended when it returns: if it fails, nothing has changed.

    Other threads may read all variables meanwhile, and write those that the program does not write.
    """
    with claimed(slots, calls_host=True), lent([*slots, *read_only]) as arrays:
        outputs = compiled(arrays[: len(slots)], arrays[len(slots) :], *others)
        with lock:
            if not home.is_whole:
                _bring_home(home, slots)
            home.taken.clear()
            home.arrays = outputs[1]
    return outputs


def _bring_home(home: Home, slots: Sequence[Slot]) -> None:
    """Move variables to a home, inside one C function as in `overwrite`, with the notes of who holds their arrays."""
    places = list(map(_place_of, slots))
    for old, _ in places:
        old.is_whole = False
    kept = map(setattr, (home,), ("arrays",), ([old.arrays[index] for old, index in places],))
    moved = map(setattr, slots, itertools.repeat("place"), zip(itertools.repeat(home), itertools.count()))
    _note_held(home, places)
    any(itertools.chain(kept, moved))
    _note_held(home, places)  # again: a signal's handler may have taken arrays meanwhile
    for old, index in places:
        if old is not home:
            old.arrays[index] = None
            old.taken.discard(index)
    home.is_whole = True


def _note_held(home: Home, places: Sequence[tuple[Home, int]]) -> None:
    home.taken.update([new for new, (old, index) in enumerate(places) if index in old.taken or index in old.lent])


def _give_copies(home: Home) -> None:
    """Replace taken arrays by copies that nobody else holds, some at a time, so that not all exist twice at once."""
    taken = sorted(home.taken)
    refuse_lost([home.arrays[index] for index in taken])
    if isinstance(home.arrays[taken[0]], Planned):  # nothing overwrites what has no values
        home.taken.clear()
        return
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


def _refuse_failed(arrays: Sequence[Any]) -> None:
    """Raise the error of the program that was to compute some arrays, if it has failed by now; wait for nothing."""
    for array in arrays:
        if (is_ready := getattr(array, "is_ready", None)) is not None:  # random keys and lost arrays have none
            if is_ready():
                array.block_until_ready()
            return


def _note_lost(error: BaseException, slots: Sequence[Slot]) -> None:
    """Put a `Lost` in the place of each array that has failed, or that a failed program has deleted, here and beside these.

    An error that comes late, with the arrays that an earlier program was to compute, is raised as a VariableLostError. What has
    just failed is noted on the error itself.
    """
    with lock:
        refuse_lost(arrays_of(slots))
        names = {(home, index): name for home, _ in map(_place_of, slots) for index, name in enumerate(home.names)}
        names |= {slot.place: slot.name for slot in slots}
        arrays = {(home, index): home.arrays[index] for home, index in names if home.arrays}
    may_fail_late = isinstance(error, jax.errors.JaxRuntimeError)
    present = {place: array for place, array in arrays.items() if array is not None and type(array) is not Lost}
    deleted = [place for place, array in present.items() if array.is_deleted()]
    failed = [place for place, array in present.items() if may_fail_late and place not in deleted and _has_failed(array)]
    lost = Lost.of([names[place] for place in (*deleted, *failed)], error)
    with lock:
        for home, index in (*deleted, *failed):
            if home.arrays[index] is present[home, index]:  # else another thread has assigned a new one
                home.arrays[index] = lost
    if failed:
        raise VariableLostError(lost) from error
    if deleted:
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
