"""The arrays of variables, in lists (homes) that a program takes and gives back whole: donation, the lock, lost arrays."""

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
from .._process import Lock
from .._replicas.frames import Frame
from .._replicas.planned import Planned
from .._typing import PyTree
from .._workers.joint_programs import Announced

#: Held while a program that takes arrays over is started, and while somebody looks where arrays are. Nobody who holds it waits
#: for a device: a program on it may have a host callback, which may want to read a variable.
lock = Lock()
_claims_changed = threading.Condition(lock)
#: Bytes of variables that are copied at once before they are overwritten; one variable may exceed them.
MAX_COPIED_BYTES = 32 * 1024 * 1024
#: Names in the message of lost variables.
MAX_NAMES = 20
#: Slots whose arrays a user may hold: they are copied before they are overwritten.
held: set[Slot] = set()
#: Slot -> number of readers that borrow its array.
borrowed: dict[Slot, int] = {}


class Home:
    """The arrays of the variables that a program overwrites, in the one list that the program takes.

    A variable's array is in one home: first in its own, then in that of the program that overwrote it last. So a warm step hands
    over one list, keeps another, and touches no variable (docs/design/variables.md). A home keeps no variable alive.

    Attributes:
        slots, every: the slots of the variables that the program overwrites, in its order, and as a set.
        arrays: in the order of `slots`; None where the array is in another home, or the variable is gone.
        is_whole: whether all variables are known to have their arrays here.
    """

    __slots__ = ("arrays", "every", "is_whole", "slots")

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self.slots, self.every = slots, frozenset(slots)
        self.arrays: list[Any] = [None] * len(slots)
        self.is_whole = False


class Slot:
    """The place of a variable's array, and its name. A program holds slots, so that it keeps no variable alive."""

    __slots__ = ("name", "place")

    def __init__(self) -> None:
        self.name = ""
        self.place = (Home((self,)), 0)

    @property
    def array(self) -> Any:
        home, index = self.place
        return home.arrays[index]

    @array.setter
    def array(self, array: jax.Array | Lost | None) -> None:
        home, index = self.place
        home.arrays[index] = array

    def note_held(self) -> None:
        """Note that a user may hold the array, so that no program overwrites it."""
        held.add(self)

    def clear(self, held: set[Slot] = held) -> None:
        """Free a collected variable's array. At the end of the process, this module's globals may be gone already."""
        self.array = None
        held.discard(self)


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
    """The message in place of a lost array: a failed program had taken the array, or a failed restore had replaced it."""

    __slots__ = ()

    @classmethod
    def of(cls, names: Sequence[str], error: BaseException, what: str = "the program that was to compute it") -> Lost:
        """Make the message for variables that were lost by one error: of a program, or of `what`."""
        last = (str(error).strip().splitlines() or [""])[-1].replace("Error dispatching computation: ", "")
        again = " to each of them" if len(names) > 1 else ""
        more = f" and {len(names) - MAX_NAMES} more variables" if len(names) > MAX_NAMES else ""
        return cls(
            f"the value of {', '.join(map(repr, names[:MAX_NAMES]))}{more} is lost: {what} failed "
            f"({type(error).__name__}: {last[:300]}). Other variables are as they were. Go on from the last checkpoint, "
            f"checkpoint.restore_latest(), or assign a new value{again}; for an optimizer's, make the optimizer again."
        )


def home_of(slots: tuple[Slot, ...]) -> Home:
    """Return the home of exactly these slots, in this order, or a new one for them."""
    # Programs that overwrite the same variables, such as one step for two shapes of batches, share a home.
    if slots and (home := slots[0].place[0]).slots == slots:
        return home
    return Home(slots)


def held_arrays() -> list[Any]:
    """Return the arrays of variables that a user may hold, such as those of `variable.value`."""
    with lock:
        return arrays_of(tuple(held))


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
    """Lend the arrays of slots as they are between two steps: nobody overwrites them inside this block."""
    noted: list[Slot] = []
    arrays: list[Any] = []
    try:
        with lock:
            for slot in slots:
                borrowed[slot] = borrowed.get(slot, 0) + 1
                noted.append(slot)
            arrays = arrays_of(slots)
            refuse_lost(arrays)
        yield arrays
    except jax.errors.JaxRuntimeError as error:
        _note_lost(error, slots)
        raise
    finally:
        _ = True in lock.taking  # `with` would look for signals first, and a Ctrl-C would leave them borrowed
        try:
            for slot in noted:
                borrowed[slot] -= 1
                if not borrowed[slot]:
                    del borrowed[slot]
        finally:
            lock.release()


# -- programs that overwrite


def overwrite(compiled: Callable[..., Any], home: Home, read_only: Sequence[Slot], *others: PyTree) -> Any:
    """Call a program that overwrites the arrays of a home, and keep the new ones; return all that it returns.

    Arrays that a user may hold are copied first, so that they stay valid.

    Args:
        compiled: takes `(arrays, read-only arrays, *others)`, donates `arrays`, and returns `(results, new arrays, ...)`.
    """
    try:
        if type(compiled) is Announced:
            compiled.compare()  # before the lock: it may wait for other workers, and readers of variables must not
        _ = True in lock.taking  # `with lock` without its call
        try:
            if claims:
                _wait_for(home.slots)
            if not home.is_whole:
                _bring_home(home)
            if borrowed:
                held.update(borrowed.keys() & home.every)
            arguments = (home.arrays, arrays_of(read_only) if read_only else [], *others)
            first = next((array for array in arguments[0] or arguments[1] if hasattr(array, "is_ready")), None)
            if first is not None and first.is_ready():  # random keys and lost arrays have none
                first.block_until_ready()  # raises now if the program that was to compute it has failed
            if type(compiled) is Announced:  # now, because it is Python
                compiled.announce(*arguments)
                compiled = compiled.program
            return _start_and_keep(compiled, home, arguments)
        finally:
            lock.release()
    except BaseException as error:
        _note_lost(error, [*home.slots, *read_only])
        raise


def _start_and_keep(program: Callable[..., Any], home: Home, arguments: tuple[Any, ...]) -> Any:
    """Start a program that takes the arrays of a home, keep the new ones there, and return all that it returns.

    The start deletes the arrays that the program takes, so a Ctrl-C between it and the keeping would lose the variables. Python
    looks for signals after each call of its own, and never inside a C function. So both happen in one call: `any` asks the
    iterators for what `setattr` returns. A signal's handler may take an array, so `held` is read last, right before that call.
    """
    outputs, again = itertools.tee(itertools.starmap(program, (arguments,)))
    keep = map(setattr, (home,), ("arrays",), map(_new_arrays_of, outputs))
    while held & home.every:
        _give_copies(home)
    any(keep)
    return next(again)


def overwrite_when_done(compiled: Callable[..., Any], home: Home, read_only: Sequence[Slot], *others: PyTree) -> Any:
    """As `overwrite`, for a program that donates nothing and has ended when it returns: if it fails, nothing has changed."""
    # Other threads may read all variables meanwhile, and write those that the program does not write.
    count = len(home.slots)
    with claimed(home.slots, calls_host=True), lent([*home.slots, *read_only]) as arrays:
        outputs = compiled(arrays[:count], arrays[count:], *others)
        with lock:
            if not home.is_whole:
                _bring_home(home)
            held.difference_update(home.every)
            home.arrays = outputs[1]
    return outputs


def _bring_home(home: Home) -> None:
    """Move the arrays of a home's variables back from other homes; a Ctrl-C leaves each array in one of the two homes."""
    for index, slot in enumerate(home.slots):
        old, place = slot.place
        if old is not home:
            old.is_whole = False
            home.arrays[index] = old.arrays[place]
            slot.place = (home, index)
            old.arrays[place] = None
    home.is_whole = True


def _give_copies(home: Home) -> None:
    """Replace held arrays by copies that nobody else holds, some at a time, so that not all exist twice at once."""
    indices = [index for index, slot in enumerate(home.slots) if slot in held]
    refuse_lost([home.arrays[index] for index in indices])
    for index in indices:  # JAX looks at the first device only, and would wait on another forever
        if any(shard.data.is_deleted() for shard in getattr(home.arrays[index], "addressable_shards", ())):
            raise RuntimeError(
                f"variable {home.slots[index].name!r} has been deleted on one of its devices: a program of JAX has donated what "
                "has its memory, such as jax.device_put(variable.value, device). Assign a new value; donate jnp.copy(array)."
            )
    if isinstance(home.arrays[indices[0]], Planned):  # nothing overwrites what has no values
        held.difference_update(home.every)
        return
    ends = itertools.accumulate([home.arrays[index].nbytes for index in indices])
    for _, batch in itertools.groupby(zip(indices, ends, strict=True), lambda pair: (pair[1] - 1) // MAX_COPIED_BYTES):
        some = [index for index, _ in batch]
        for index, copy in zip(some, _copy([home.arrays[index] for index in some]), strict=True):
            home.arrays[index] = copy
            held.discard(home.slots[index])


@jax.jit
def _copy(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


# -- programs that fail


def _note_lost(error: BaseException, slots: Sequence[Slot]) -> None:
    """Put a `Lost` in place of each failed or deleted array, of these slots and of others in the same homes."""
    with lock:
        refuse_lost(arrays_of(slots))
        beside = dict.fromkeys(other for slot in slots for other in slot.place[0].slots)
        present = {slot: array for slot in beside if (array := slot.array) is not None and type(array) is not Lost}
    may_fail_late = isinstance(error, jax.errors.JaxRuntimeError)
    deleted = [slot for slot, array in present.items() if array.is_deleted()]
    failed = [slot for slot, array in present.items() if may_fail_late and slot not in deleted and _has_failed(array)]
    lost = Lost.of([slot.name for slot in (*deleted, *failed)], error)
    with lock:
        for slot in (*deleted, *failed):
            if slot.array is present[slot]:  # else another thread has assigned a new one
                slot.array = lost
    if failed:  # the error came late, with the arrays that an earlier program was to compute
        raise VariableLostError(lost) from error
    if deleted:
        error.add_note(lost)


def refuse_lost(arrays: Sequence[Any]) -> None:
    """Raise the message of the first lost array; do nothing if all arrays are there."""
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
