"""How does a job end together? One worker calls the roll, and each leaves after those whom its end would hurt. No jax here.

The first to ask who is still there, and who has done something else, asks for all: the others wait for what it finds. Who answers
compares what it has done with what was told, and tells it only where it was something else, so that an answer has one length
whatever the number of workers.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence, Set
from typing import Any

from .._errors import FAILED, ProgramMismatchError
from .._text import named, numbered
from .coordination import Coordination
from .neighbours import Neighbours
from .progress import Progress
from .same_program import is_other_order, other_order
from .verdict import Verdict

_logger = logging.getLogger("mirrored")

#: What wakes the guards, and why the job ends.
CALL, VERDICT = "guard/call", "guard/verdict"
#: What a call says: leave; leave, and answer first; all have come to the end.
LEAVE, TELL, DONE = "leave", "tell", "done"
#: Where workers say that they have heard the call, and that they leave.
_HERE, _LEFT = "guard/here", "guard/left"
_CALLERS, _TRAIL, _PROCESS = "guard/callers", "guard/trail", "guard/process"
#: How long the others have to answer, and who asks later to hear what the first has found.
_ANSWER_SECONDS = 0.6
#: Whatever blocks while a worker leaves (a full pipe, a dead service) blocks for so long only.
LAST_RESORT_SECONDS = 3.0
#: How long the others have to leave: before the first to know, and before worker 0, which waits longer because JAX aborts those
#: who are late.
_LEAVE_SECONDS, _LAST_LEAVE_SECONDS = 0.6, 1.5


class Shutdown:
    """The end of a job, of which this process is a worker; `stopped` is set when the guard has been stopped."""

    def __init__(
        self,
        coordination: Coordination,
        neighbours: Neighbours,
        progress: Progress,
        stopped: threading.Event,
        exit: Callable[[int], Any],
    ) -> None:
        self._coordination, self._neighbours, self._progress = coordination, neighbours, progress
        self._stopped, self._exit = stopped, exit
        self._worker, self._num_workers = coordination.worker, coordination.num_workers
        self._num_meetings = 0
        self._begun = threading.Lock()

    # ---- the roll

    def introduce(self) -> None:
        """Tell the others of this host which process this is."""
        self._coordination.put(f"{self._of_host}/{self._worker}", self._neighbours.own.encode())

    def meet(self) -> None:
        """Take note of the others of this host, soon after the start and then now and then: some come late."""
        self._num_meetings += 1
        if not self._neighbours.are_known and (self._num_meetings <= 20 or self._num_meetings % 16 == 0):
            self._neighbours.meet(self._coordination.by_worker(self._of_host))

    @property
    def _of_host(self) -> str:
        return f"{_PROCESS}/{self._neighbours.host}"

    def lost(self, title: str) -> Verdict:
        """Find out after an error of a collective who was lost: who does not answer."""
        step, others = self._progress.step, set(range(self._num_workers)) - {self._worker}
        present: set[int] = set()
        try:
            if not self._neighbours.dead():
                self.meet()
                if known := self._known(0.0):
                    return known
                if not self._call() and (known := self._known(2 * _ANSWER_SECONDS)):
                    return known
            deadline = time.monotonic() + _ANSWER_SECONDS
            while len(present) < len(others) and time.monotonic() < deadline:
                if dead := self._neighbours.dead():
                    return self.gone(dead)
                time.sleep(0.01)
                present = self._coordination.by_worker(_HERE).keys() & others
            if is_other_order(trails := self._told()):  # so collectives of different programs have met
                return told_apart(other_order(trails), wants_stacks=True)
        except Exception:  # jaxlib's errors have no classes of their own
            return Verdict(f"lost worker 0, which hosts the coordination service, at step {step}", title, (0,))
        missing = sorted(others - present)
        who, why = "lost a connection", "all workers answered"
        if missing:
            who, why = f"lost {numbered(missing)}", f"{named(missing)} not answered"
        return Verdict(f"{who} at step {step}: a collective failed on worker {self._worker}, and {why}", title, tuple(missing))

    def gone(self, dead: Sequence[int]) -> Verdict:
        """Return the verdict on workers of this host that have ended."""
        # When worker 0 is gone the others follow at once, so it is the one to name.
        who = "worker 0, which hosts the coordination service," if 0 in dead else numbered(dead)
        return Verdict(f"lost {who} at step {self._progress.step}: the process is gone", lost=tuple(dead))

    def trails(self) -> list[str]:
        """Call all workers to say what they have done last where it is something else, before they leave."""
        if not self._call():
            self._known(2 * _ANSWER_SECONDS)  # of which all are told
        others = set(range(self._num_workers)) - {self._worker}
        self._coordination.await_workers(_HERE, others, time.monotonic() + _ANSWER_SECONDS)
        return self._told()

    def answer(self, call: str) -> None:
        """Answer the call of another worker."""
        if call == TELL:
            own, told = self._progress.tell(), self._told()
            told[self._worker] = own
            if not any(others for index, others in enumerate(told) if index != self._worker) or is_other_order(told):
                self._coordination.put(f"{_TRAIL}/{self._worker}", own)
        self._coordination.put(f"{_HERE}/{self._worker}", "1")

    def _call(self) -> bool:
        """Call all workers, unless another has; tell whether this one has."""
        self._coordination.put(f"{_TRAIL}/{self._worker}", self._progress.tell())
        is_first = self._coordination.count(_CALLERS) == 1
        if is_first:
            self._coordination.put(CALL, TELL)
        return is_first

    def _known(self, seconds: float) -> Verdict | None:
        """Return what another worker has found, if it has found it so soon."""
        text = self._coordination.get(VERDICT, seconds) if seconds else self._coordination.peek(VERDICT)
        return None if text is None else Verdict.decode(text)

    def _told(self) -> list[str]:
        """Return what each worker has done last; empty of one that has not said it."""
        told = self._coordination.by_worker(_TRAIL)
        return [told.get(worker, "") for worker in range(self._num_workers)]

    # ---- leaving

    @property
    def has_begun(self) -> bool:
        """Whether some thread is leaving."""
        return self._begun.locked()

    def leave(self, verdict: Verdict, code: int, is_first: bool, own_threads: Sequence[threading.Thread]) -> None:
        """End this process; `is_first` where it is the first to know why, `own_threads` are those that matter to no person."""
        if not self._begun.acquire(blocking=False):  # another thread is leaving
            self._stopped.wait(2 * LAST_RESORT_SECONDS)
            return
        with contextlib.suppress(Exception):
            self.arm_last_resort(code)
        with contextlib.suppress(Exception):
            _logger.critical("worker %d leaves with code %d: %s", self._worker, code, verdict)
            if verdict.wants_stacks:
                _logger.critical("worker %d was here:\n%s", self._worker, _stacks_except(own_threads))
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        if 0 not in verdict.lost:  # else a call into the service would block
            with contextlib.suppress(Exception):
                self._let_others_go(verdict, is_first)
        self._exit(code)

    def arm_last_resort(self, code: int) -> None:
        """End this process in any case, but not yet."""
        timer = threading.Timer(LAST_RESORT_SECONDS, self._exit, (code,))
        timer.daemon = True
        timer.start()

    def _let_others_go(self, verdict: Verdict, is_first: bool) -> None:
        """Wait for some: who leaves breaks the collectives of the others, and with worker 0 the service goes."""
        others = set(range(1, self._num_workers)) - {self._worker, *verdict.lost}
        if is_first and self._worker:
            deadline = time.monotonic() + _LEAVE_SECONDS
            self._coordination.await_workers(_LEFT, others, deadline)
            self._coordination.await_workers(_HERE, {0}, deadline)
        self._coordination.put(f"{_LEFT}/{self._worker}", "1")
        if self._worker == 0:
            deadline = time.monotonic() + _LAST_LEAVE_SECONDS
            self._coordination.await_workers(_LEFT, others, deadline)
            self._await_gone(others, deadline)

    def _await_gone(self, workers: Set[int], deadline: float) -> None:
        """Wait from "I leave" to having left; those of other hosts get a moment."""
        time.sleep(0.05)
        near = self._neighbours.near() & workers
        while not near <= set(self._neighbours.dead()) and time.monotonic() < deadline:
            time.sleep(0.01)


def told_apart(text: str, wants_stacks: bool = False) -> Verdict:
    """Return the verdict on workers that have done different things, so that starting again would not help."""
    title, _, detail = text.partition("\n")
    return Verdict(f"{ProgramMismatchError.__name__}: {title}", detail, wants_stacks=wants_stacks, code=FAILED)


def _stacks_except(own: Sequence[threading.Thread]) -> str:
    frames, lines = sys._current_frames(), []
    for thread in threading.enumerate():
        if thread.ident in frames and thread not in own and not isinstance(thread, threading.Timer):
            lines += [f"{thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
    return "".join(lines).rstrip()
