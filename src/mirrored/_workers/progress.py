"""What is this process doing right now? Written by every step for almost nothing, read by the guard. No jax here.

The fields are plain attributes, so that a step pays one or two assignments; how long nothing has changed is for the
reader to find out, who looks twice a second.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

from .trail import ProgramTrail

_logger = logging.getLogger("mirrored")

Detail: TypeAlias = str | Callable[[], str]

#: The phase in which a worker wants the next batch of its input, whose pipeline runs in another thread. It may wait for its
#: own records or for what the other workers have, so nobody is waited for in particular.
NEXT_BATCH = "the next batch"
#: What its detail says in the latter case.
OTHERS_INPUT = "its own is ready; it waits for the other workers' input"
#: The name, in a history, of taking a batch.
BATCH = "a batch"
#: Stands in a history for what another thread has done, in no order that can be compared.
UNKNOWN = "unknown"


class BatchPlace(NamedTuple):
    """Which batch it is, of those that all workers read."""

    channel: int  # of the iterator
    of_pass: int  # the number of its pass over the data
    count: int  # how many batches of the pass were read with it
    checksum: int  # of these batches, in order


class Phase:
    """What the stepping thread does between programs, for the duration of a `with` block.

    Attributes:
        text: what it does, for a person, such as "saving step 12".
        detail: more about it, which may differ by worker; a function when it changes in the meantime.
        waits: whether it only waits for other workers; then all of them must come to a phase of the same text.
        is_patient: whether it may take as long as it likes, as compiling and saving do.
    """

    __slots__ = ("_progress", "detail", "is_patient", "text", "waits")

    def __init__(self, progress: Progress, text: str, detail: Detail, waits: bool, is_patient: bool) -> None:
        self._progress, self.text, self.detail = progress, text, detail
        self.waits, self.is_patient = waits, is_patient

    def __enter__(self) -> None:
        with self._progress.lock:
            self._progress.phases = (*self._progress.phases, self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._progress.lock:
            self._progress.phases = tuple(phase for phase in self._progress.phases if phase is not self)


class Progress:
    """What the guard wants to know of the thread that takes the steps."""

    def __init__(self) -> None:
        self.started = 0  # programs in which other workers take part, of users and of this library
        self.runs = 0  # of them, calls of `strategy.run` or of an `mr.function`
        self.updates = 0  # of these, those that have written mirrored variables, as training does and evaluation does not
        self.finished = 0  # how many of the started ones are known to have finished
        self.program = ""  # the name of the one started last
        # A result of it that nobody donates (it has `is_deleted` and `is_ready`), so that the guard can see whether this process
        # waits for it; None while the call that starts it has not come back.
        self.witness: Any = None
        self.phases: tuple[Phase, ...] = ()  # what goes on between programs; the last one is the innermost
        self.lock = threading.Lock()  # for changes of them, because input may be read by a thread of the user's
        self.batches = 0  # of all workers, that the main thread has taken
        self.batch: BatchPlace | None = None  # the last of those that all workers read
        # After which batch, by channel, the data of an iterator ended here, while the others are asked about it.
        self.data_ends: dict[int, BatchPlace] = {}
        self.trail = ProgramTrail()  # all that must be done alike and in the same order on all workers
        self.is_threaded = False  # whether some of it was done by another thread than the main one, in an order of chance
        self.finish: Callable[[], None] = lambda: None  # waits for what is in flight, and raises what it found

    @property
    def step(self) -> int:
        """What messages call a step, as users count them: those that train; where nothing is trained, all that they run."""
        return self.updates or self.runs

    def enter(self, program: str, digest: bytes) -> None:
        """Note that a program is about to be started: before the call, which itself may wait for the other workers.

        Its digest is equal on two workers exactly when they may run it together. Set `witness` to a result of it afterwards.
        """
        self.witness = None
        self.program = program
        self.did(program, digest)
        self.started += 1

    def did(self, what: str, digest: bytes) -> None:
        """Note something that all workers must do alike and in the same order."""
        if not (self.is_threaded or in_main_thread()):
            self.is_threaded = True
            _logger.info(
                "%s was started by the thread %r: the order of what the workers do is not compared from now on, since that of "
                "threads is chance",
                what,
                threading.current_thread().name,
            )
        self.trail.add(what, digest, self.started)

    def phase(self, text: str, detail: Detail = "", *, waits: bool = False, is_patient: bool = False) -> Phase:
        """Return a context for what is done between programs, by the thread that takes the steps; see `Phase`."""
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
        """Note that a batch was taken, with the rows of all replicas; None has no place among those that all workers read."""
        if in_main_thread():  # what other threads take is not in step with the programs
            self.batches += 1
            self.batch = place or self.batch
            self.did(BATCH, repr((place, tuple(sizes))).encode())

    def history(self) -> list[str]:
        """Return what is the same on all workers at the same program, for `require_same_history`, or that it is not known."""
        if not in_main_thread():
            return [UNKNOWN] * 2
        return [str(self.batches), UNKNOWN if self.is_threaded else f"{self.trail.last.checksum:08x}"]

    def trail_so_far(self) -> tuple[int, int]:
        """Return how many things were done, and the checksum of them; -1 where the order is chance."""
        last = self.trail.last  # first: who adds in another thread says so before
        return (-1, 0) if self.is_threaded else (last.number, last.checksum)

    def tell(self) -> str:
        """Return `ProgramTrail.encode`, empty where the order is chance."""
        return "" if self.is_threaded else self.trail.encode()

    def contradicts(self, number: int, checksum: int) -> bool:
        """Tell whether another worker, with this checksum after its thing of this number, has done other things than this one."""
        return self.trail.contradicts(number, checksum) and not self.is_threaded


_main = threading.main_thread().ident


def in_main_thread() -> bool:
    """Tell whether this is the thread whose batches and waiting can be compared with programs: others are not in step."""
    return threading.get_ident() == _main  # asked in every step, so by number: the objects take three times as long


def _note_main_thread() -> None:
    global _main
    _main = threading.main_thread().ident


os.register_at_fork(after_in_child=_note_main_thread)  # the thread that forks is the child's main one


#: Of this process.
progress = Progress()
