"""What is this process doing right now? Written by each step, read by the guard. No jax here.

The fields are plain attributes, so that a step pays one or two assignments; the guard looks twice a second.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

from .._errors import ContextError
from .._process import Lock

Detail: TypeAlias = str | Callable[[], str]

#: The phase of a worker that wants the next batch: the thread that makes it may wait for records, or for other workers' input.
NEXT_BATCH = "the next batch"
#: The detail of that phase, if the thread waits for the other workers.
OTHERS_INPUT = "its own is ready; it waits for the other workers' input"
#: The phase in which a worker compares its next program with the other workers'.
COMPARISON = "the comparison of programs"
#: The name, in a history, of taking a batch.
BATCH = "a batch"
#: The number of batches in a history, if another thread than the main one takes the steps.
UNKNOWN = "unknown"
#: The length of the history that a worker keeps: more entries than any worker adds between two looks at the others.
SIZE = 4096
#: How many entries it tells when they differ, and how much of a name.
_NUM_TOLD, _MAX_NAME = 500, 200


class BatchPlace(NamedTuple):
    """The place of a batch that all workers read."""

    channel: int  # of the iterator
    of_pass: int  # the number of its pass over the data
    count: int  # number of batches of the pass up to it
    checksum: int  # of these batches, in order


class Entry(NamedTuple):
    """One entry of a worker's history: a program, a batch or a variable that all workers must use alike."""

    number: int  # from 1 on
    checksum: int  # of all entries up to it, in order
    step: int  # number of programs of several workers started before
    what: str
    where: str  # the user's file and line that started the program


class ProgramTrail:
    """The last entries of the history of this worker's programs, batches and variables.

    All workers must have the same history, but not at one time: a worker may be many programs ahead. So a worker compares its
    checksum with another worker's of the same number. Only one thread adds: two would add in a different order on each worker,
    and the sum of one program would go into another. Other threads may read at the same time.
    """

    def __init__(self) -> None:
        self._last = (0, 0, 0, "", "")  # the fields of an Entry, which would take twice the time to make
        self._ring = [self._last] * SIZE
        self._thread: threading.Thread | None = None  # the thread that adds: that of the user's first program, while it lives
        self._number_of_thread: int | None = None  # another thread can have this number only when `_thread` has ended

    def take_over(self) -> None:
        """Let this thread add from now on."""
        if (thread := threading.current_thread()) is not self._thread:
            self._thread, self._number_of_thread = thread, threading.get_ident()

    def is_elsewhere(self) -> bool:
        """Tell whether another thread adds."""
        return self._thread is not None and self._thread is not threading.current_thread() and self._thread.is_alive()

    def require_this_thread(self, what: str) -> None:
        """Raise ContextError if this is not the thread that adds; `what` names the operation."""
        if (first := self._thread) is not None and self.is_elsewhere():
            raise ContextError(
                f"{what!r} was called in the thread {threading.current_thread().name!r}; expected {first.name!r}, which starts "
                "what several workers do together. The order of two threads differs by worker, and the sum of one program would "
                "go into that of another. Do it in that thread, between the steps; others may read mirrored variables. Or "
                "hand over, on all workers: strategy.barrier('hand over') in the thread that goes on."
            )

    def add(self, what: str, digest: bytes, step: int, where: str = "") -> None:
        """Add an entry; `digest` is equal for equal entries only."""
        if threading.get_ident() != self._number_of_thread:
            self.require_this_thread(what)
        number, checksum, _, _, _ = self._last
        self._ring[number % SIZE] = self._last = (number + 1, zlib.crc32(digest, checksum), step, what, where)

    def take_back(self, before: Entry, is_refused: bool) -> None:
        """Remove the entry after `before`; skip its number if all workers have refused it, as a new entry would contradict it."""
        self._ring[before.number % SIZE] = (0, 0, 0, "", "")
        self._last = before._replace(number=before.number + is_refused)

    @property
    def last(self) -> Entry:
        return Entry(*self._last)

    def contradicts(self, number: int, checksum: int) -> bool:
        """Tell whether this worker has another checksum at the entry `number`; False if that entry is not kept any more."""
        own_number, own_checksum, *_ = self._ring[(number - 1) % SIZE]
        return own_number == number and own_checksum != checksum

    def encode(self) -> str:
        """Return the last entries, for other workers."""
        known = sorted(entry for entry in self._ring if entry[0])[-_NUM_TOLD:]
        return json.dumps([(*numbers, what[:_MAX_NAME], where[:_MAX_NAME]) for *numbers, what, where in known])


class Habits:
    """A prediction of the next program. All workers make it from the same history, so they expect the same one without a message.

    A program is expected to repeat as often as it did the last time, and then to be followed by the same program. That covers a
    step and a reduction in turns, and epochs of one length with an evaluation after each.
    """

    def __init__(self) -> None:
        self.next = b""  # the digest of the expected program
        # For speed, repeated steps are not added: this program is expected again, up to the start of that number.
        self.again, self.until = b"", -1
        self._known: dict[bytes, tuple[int, bytes]] = {}  # program -> how often it ran in succession, and what followed
        self._last, self._begun, self._then = b"", 0, b""

    def add(self, program: bytes, number: int) -> None:
        """Note that the program of this digest starts, after `number` others."""
        if program != self._last:
            self._known[self._last] = number - self._begun, program
            self._last, self._begun = program, number
            usual, self._then = self._known.get(program, (0, program))
            self.until = number + usual - 1
        self.again = self.next = program
        if number == self.until:
            self.again, self.next = b"", self._then


@dataclasses.dataclass(eq=False, slots=True)
class Phase:
    """What the stepping thread does between programs, for the duration of a `with` block."""

    _progress: Progress
    text: str  # for a person, such as "saving step 12"
    detail: Detail  # may differ by worker; a function if it changes meanwhile
    waits: bool  # whether the thread only waits for other workers, which must all come to a phase of the same text
    is_patient: bool  # whether the phase has no time limit: compiling, saving

    def __enter__(self) -> None:
        if self.waits:
            self._progress.trail.require_this_thread(self.text)
        with self._progress.lock:
            self._progress.phases = (*self._progress.phases, self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._progress.lock:
            self._progress.phases = tuple(phase for phase in self._progress.phases if phase is not self)


class Progress:
    """The state of the thread that takes the steps, for the guard."""

    def __init__(self) -> None:
        self.started = 0  # programs in which other workers take part, of users and of this library
        self.runs = 0  # calls of `strategy.run` or of an `mr.function`
        self.updates = 0  # runs that have written mirrored variables, as training does and evaluation does not
        self.finished = 0  # started programs that are known to have finished
        self.program = ""  # the name of the one started last
        # A result of that program that nobody donates (it has `is_deleted` and `is_ready`): by it the guard sees whether this
        # process waits for the program. None until the call that starts the program returns.
        self.witness: Any = None
        self.phases: tuple[Phase, ...] = ()  # the last one is the innermost
        self.lock = Lock()  # for changes of `phases`, because input may be read by a thread of the user's
        self.batches = 0  # of distributed datasets, that the main thread has taken
        self.batch: BatchPlace | None = None  # the last of the batches that all workers read
        # Channel -> the last batch of an iterator whose data has ended, while the other workers are asked about theirs.
        self.data_ends: dict[int, BatchPlace] = {}
        self.trail, self.habits = ProgramTrail(), Habits()
        self.finish: Callable[[], None] = lambda: None  # waits for programs in flight, and raises their errors

    @property
    def step(self) -> int:
        """The step number in messages, as users count: the runs that train; if none does, all runs."""
        return self.updates or self.runs

    def enter(self, program: str, digest: bytes, is_run: bool = False, where: str = "") -> None:
        """Note that a program is about to start, before the call, which may wait for the other workers.

        Digests are equal on two workers exactly when they may run the program together. With `is_run` (a program of the user's)
        this thread must start all later programs. Set `witness` to a result afterwards.
        """
        self.witness = None
        self.program = program
        self.trail.add(program, digest, self.started, where)
        if digest is not (habits := self.habits).again or self.started == habits.until:
            habits.add(digest, self.started)
        if is_run:
            self.trail.take_over()
        self.started += 1

    def did(self, what: str, digest: bytes, where: str = "") -> None:
        """Add to the history, which must be the same on all workers."""
        self.trail.add(what, digest, self.started, where)

    def phase(self, text: str, detail: Detail = "", *, waits: bool = False, is_patient: bool = False) -> Phase:
        """Return a context for work between programs, in the thread that takes the steps; see `Phase`."""
        return Phase(self, text, detail, waits, is_patient)

    def is_waiting(self) -> bool:
        """Tell whether the stepping thread can go on only with other workers: in a phase that waits, or for a program."""
        phases = self.phases
        if phases:
            return phases[-1].waits
        if self.started <= self.finished:
            return False
        witness = self.witness
        try:
            return witness is None or not (witness.is_deleted() or witness.is_ready())
        except RuntimeError:  # deleted between the two questions
            return False

    def took_batch(self, place: BatchPlace | None, sizes: Sequence[int]) -> None:
        """Note that a batch was taken, with the rows of all replicas; `place` is None if workers read different batches."""
        if in_main_thread() and not self.trail.is_elsewhere():  # what other threads take is not in step with the programs
            self.batches += 1
            self.batch = place or self.batch
            self.did(BATCH, repr((place, tuple(sizes))).encode())

    def history(self) -> list[str]:
        """Return the number of batches and the history's checksum, for `require_same_history`."""
        batches = str(self.batches) if in_main_thread() else UNKNOWN
        return [batches, f"{self.trail.last.checksum:08x}"]

    def tell(self) -> str:
        """Return the last entries of the history, for `require_same_history`."""
        return self.trail.encode()


def in_main_thread() -> bool:
    """Tell whether this is the main thread; batches of other threads come in no fixed order."""
    return threading.current_thread() is threading.main_thread()


#: Of this process.
progress = Progress()
