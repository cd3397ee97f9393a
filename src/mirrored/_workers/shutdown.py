"""How does a job end together? One worker calls the roll, and all leave, worker 0 last. No jax here.

The first worker to call the roll calls it for all: the others wait for its verdict. A worker that answers publishes its
history only if it differs from the published ones, so that a call needs few messages for any number of workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
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
CALL, _VERDICT = "guard/call", "guard/verdict"
#: The texts of a call: leave; answer, and leave; all workers have come to the end.
_LEAVE, _TELL, DONE = "leave", "tell", "done"
#: Where workers say that they have heard the call, and that they leave.
_HERE, _LEFT = "guard/here", "guard/left"
_CALLERS, _TRAIL = "guard/callers", "guard/trail"
#: Begins the names of the guard's threads.
THREADS = "mirrored-guard-"
#: How long the others have to answer the roll; a second caller waits twice as long for the first one's verdict.
_ANSWER_SECONDS = 0.6
#: How long leaving may block, on a full pipe or a dead service, before the process exits.
LAST_RESORT_SECONDS = 3.0
#: How long the first to know, and worker 0, wait for the others to leave: worker 0 longer, because JAX aborts late ones.
_LEAVE_SECONDS, _LAST_LEAVE_SECONDS = 0.6, 1.5


@dataclasses.dataclass(eq=False)
class Shutdown:
    """The end of this worker in its job."""

    _coordination: Coordination
    _neighbours: Neighbours
    _progress: Progress
    _stopped: threading.Event  # set when the guard has been stopped
    _exit: Callable[[int], Any]
    begun: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # held by the thread that leaves

    # ---- the roll

    def lost(self, title: str) -> Verdict:
        """Find the worker that was lost, after a collective has failed: ask the kernel, then the verdict, then all workers."""
        try:
            if not self._neighbours.dead():  # else the kernel knows who is lost
                self._neighbours.meet()
                if verdict := self.known() or self._call():
                    return verdict
            return self._await_answers(title)
        except Exception:  # jaxlib's errors have no classes of their own
            return self.gone((0,), "", title)

    def _await_answers(self, title: str) -> Verdict:
        present: set[int] = set()
        deadline = time.monotonic() + _ANSWER_SECONDS
        while present != self._coordination.others and time.monotonic() < deadline:
            if dead := self._neighbours.dead():
                return self.gone(dead)
            time.sleep(0.01)
            present = self._coordination.by_worker(_HERE).keys() & self._coordination.others
        if is_other_order(trails := self._coordination.of_all(_TRAIL)):  # so collectives of different programs have met
            return told_apart(other_order(trails), wants_stacks=True)
        who, why = "lost a connection", "all workers answered"
        if missing := sorted(self._coordination.others - present):
            who, why = f"lost {numbered(missing)}", f"{named(missing)} not answered"
        what = f"at step {self._progress.step}: a collective failed on worker {self._coordination.worker}, and {why}"
        return Verdict(f"{who} {what}", title, tuple(missing))

    def gone(self, lost: Sequence[int], why: str = ": the process is gone", detail: str = "") -> Verdict:
        """Return the verdict on workers that have ended; `why` says how it was seen, by default by this host's kernel."""
        # When worker 0 is gone the others follow at once, so it is the one to name.
        who = "worker 0, which hosts the coordination service," if 0 in lost else numbered(lost)
        return Verdict(f"lost {who} at step {self._progress.step}{why}", detail, tuple(lost))

    def trails(self) -> Sequence[str]:
        """Ask all workers for their histories, before they leave; equal histories are sent once."""
        self._call()
        self._coordination.await_workers(_HERE, self._coordination.others, time.monotonic() + _ANSWER_SECONDS)
        return self._coordination.of_all(_TRAIL)

    def answer(self, call: str) -> None:
        """Answer the call of another worker."""
        if call == _TELL:
            own, told = self._progress.tell(), list(self._coordination.of_all(_TRAIL))
            told[self._coordination.worker] = own
            is_first = not any(told[index] for index in self._coordination.others)
            if is_first or is_other_order(told):
                self._coordination.say(_TRAIL, own)
        self._coordination.say(_HERE)

    def _call(self) -> Verdict | None:
        """Call all workers; if another worker has called them, wait for its verdict and return that."""
        self._coordination.say(_TRAIL, self._progress.tell())
        if self._coordination.count(_CALLERS) > 1:
            return self.known(2 * _ANSWER_SECONDS)
        self._coordination.put(CALL, _TELL)
        return None

    def known(self, seconds: float = 0.0) -> Verdict | None:
        """Return the verdict that a worker has published, or publishes within `seconds`."""
        text = self._coordination.get(_VERDICT, seconds) if seconds else self._coordination.peek(_VERDICT)
        return None if text is None else Verdict.decode(text)

    def tell(self, verdict: Verdict) -> Verdict | None:
        """Publish a verdict and call all workers; if another worker has published one, return that."""
        if known := self.known():
            return known
        self._coordination.put(_VERDICT, verdict.encode())
        self._coordination.put(CALL, _LEAVE)
        return None

    # ---- leaving

    def leave(self, verdict: Verdict, code: int, is_first: bool) -> None:
        """End this process; `is_first` if no other worker knows the reason."""
        if not self.begun.acquire(blocking=False):  # another thread is leaving
            self._stopped.wait(2 * LAST_RESORT_SECONDS)
            return
        self.arm_last_resort(code)
        with contextlib.suppress(Exception):  # a stream may be closed
            _logger.critical("worker %d leaves with code %d: %s", self._coordination.worker, code, verdict)
            if verdict.wants_stacks:
                _logger.critical("worker %d was here:\n%s", self._coordination.worker, _stacks())
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        if 0 not in verdict.lost:  # else a call into the service would block
            with contextlib.suppress(Exception):  # the service may end in this moment
                self._let_others_go(verdict, is_first)
        self._exit(code)

    def arm_last_resort(self, code: int) -> None:
        """Exit in LAST_RESORT_SECONDS, even if this thread blocks."""
        timer = threading.Timer(LAST_RESORT_SECONDS, self._exit, (code,))
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # at the end of Python 3.12, which starts none
            timer.start()

    def _let_others_go(self, verdict: Verdict, is_first: bool) -> None:
        """Wait for others to leave first: this worker's end breaks their collectives, and worker 0's stops the service."""
        others = self._coordination.others - {0, *verdict.lost}
        if is_first and self._coordination.worker:
            deadline = time.monotonic() + _LEAVE_SECONDS
            self._coordination.await_workers(_LEFT, others, deadline)
            self._coordination.await_workers(_HERE, {0}, deadline)
        self._coordination.say(_LEFT)
        if self._coordination.worker == 0:
            deadline = time.monotonic() + _LAST_LEAVE_SECONDS
            self._coordination.await_workers(_LEFT, others, deadline)
            time.sleep(0.05)  # from "I leave" to the exit; of workers on other hosts nothing more is seen
            near = self._neighbours.near() & others
            while not near <= set(self._neighbours.dead()) and time.monotonic() < deadline:
                time.sleep(0.01)


def told_apart(text: str, wants_stacks: bool = False) -> Verdict:
    """Return the verdict on workers that have done different things, so that starting again would not help."""
    title, _, detail = text.partition("\n")
    return Verdict(f"{ProgramMismatchError.__name__}: {title}", detail, wants_stacks=wants_stacks, code=FAILED)


def _stacks() -> str:
    """Return the stacks of all threads except the guard's."""
    frames, lines = sys._current_frames(), []
    for thread in threading.enumerate():
        if thread.ident in frames and not thread.name.startswith(THREADS) and not isinstance(thread, threading.Timer):
            lines += [f"{thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
    return "".join(lines).rstrip()
