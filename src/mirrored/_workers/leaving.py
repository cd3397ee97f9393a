"""How does this worker leave when its job ends? With its message, and after those whom its end would hurt. No jax here."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence, Set
from typing import Any

from .coordination import Coordination
from .neighbours import Neighbours
from .verdict import Verdict

_logger = logging.getLogger("mirrored")

#: Whatever blocks while a worker leaves (a full pipe, a dead service) blocks for so long only.
LAST_RESORT_SECONDS = 3.0
#: How long the others have to leave: before the first to know, and before worker 0, which waits longer because JAX aborts those
#: who are late.
_LEAVE_SECONDS, _LAST_LEAVE_SECONDS = 0.6, 1.5
#: Where workers say that they have heard the call, and that they leave.
HERE, _LEFT = "guard/here", "guard/left"


class Leaving:
    """The end of this process; `stopped` is set when the guard has been stopped."""

    def __init__(
        self, coordination: Coordination, neighbours: Neighbours, stopped: threading.Event, exit: Callable[[int], Any]
    ) -> None:
        self._coordination, self._neighbours, self._stopped, self._exit = coordination, neighbours, stopped, exit
        self._worker, self._num_workers = coordination.worker, coordination.num_workers
        self._begun = threading.Lock()

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
            self._coordination.await_workers(HERE, {0}, deadline)
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


def _stacks_except(own: Sequence[threading.Thread]) -> str:
    frames, lines = sys._current_frames(), []
    for thread in threading.enumerate():
        if thread.ident in frames and thread not in own and not isinstance(thread, threading.Timer):
            lines += [f"{thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
    return "".join(lines).rstrip()
