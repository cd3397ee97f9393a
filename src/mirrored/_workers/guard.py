"""How does a job of several workers end when one of them cannot go on? Soon, on all of them, and with the reason. No jax here.

A thread publishes this worker's position, and listens for a verdict. The first worker that fails, or finds that the job cannot
go on, publishes one; all log it and leave with `os._exit`, because the main thread may wait in native code for ever, and JAX's
own end of the program for minutes: docs/design/failures.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any

from .._errors import FAILED, INTERRUPTED, RESTART, ProgramMismatchError, ReplicasDivergeError, WorkerLostError
from .._process import Lock
from .._text import numbered
from .coordination import Coordination
from .links import Links
from .neighbours import Neighbours
from .progress import COMPARISON, Progress, in_main_thread
from .same_program import ONE_DATASET, data_ended, other_order, require_same_history
from .shutdown import CALL, DONE, LAST_RESORT_SECONDS, THREADS, Shutdown, told_apart
from .stall import SETTLED_SECONDS, JobView, Others, Own, Position, judge, judge_all, shorter_data
from .verdict import MAX_TEXT, Verdict, exit_code_of, last_error, tells_of_loss, tells_of_lost_service, title_of

_logger = logging.getLogger("mirrored")

#: The seconds between two rounds, in each of which a worker publishes its position; also of one call into the service.
ROUND_SECONDS = 0.5
#: With more workers than this, rounds are rarer, because worker 0 serves all of them in each.
_MANY_WORKERS, _MAX_ROUND_SECONDS = 128, 4.0
#: How long this worker waits for its own error of the same moment, before it leaves with another worker's.
_GRACE_SECONDS = 0.2
#: After how long a worker or the service is reported as silent; and a silent worker is not waited for at the end.
_SILENT_SECONDS, _UNHEARD_SECONDS = 4.0, 2.0
_END_WARNING_SECONDS = 30.0
_PROBE_SECONDS = 0.02
_POSITION, _ENDED = "guard/position", "guard/ended"


def seconds_of_round(num_workers: int) -> float:
    """Return the seconds between two rounds of the guards, for this number of workers."""
    return min(ROUND_SECONDS * max(1.0, num_workers / _MANY_WORKERS), _MAX_ROUND_SECONDS)


class Guard:
    """The guard of this process, which ends it with a message when its job cannot go on.

    A worker may wait for another for `stall_seconds`; by default for 300 seconds, or 20 steps if they are longer.
    """

    def __init__(
        self,
        coordination: Coordination,
        progress: Progress,
        *,
        stall_seconds: float | None = None,
        exit: Callable[[int], Any] = os._exit,
    ) -> None:
        self._coordination, self._progress = coordination, progress
        self._worker, self._num_workers = coordination.worker, coordination.num_workers
        self._round_seconds = seconds_of_round(self._num_workers)
        self._own, self._others = Own(progress, stall_seconds), Others(2 * (self._round_seconds - ROUND_SECONDS))
        self._silent: set[int] = set()
        self._listening: dict[frozenset[int], threading.Thread] = {}  # on worker 0: to the heartbeats of these workers
        self._process = 0  # the watched process; a forked child is another one
        self._threads: list[threading.Thread] = []
        self._is_last = threading.Event()  # worker 0 has stopped, and waits for the others
        self._stopped, self._failing, self._has_ended = threading.Event(), threading.Event(), False
        self._speaking = Lock()
        self._sys_exit_code = 0
        self._looks_in_call, self._was_late = 0, False  # looks of another thread since a call into the service began
        self._hooks: tuple[Any, Any] = (None, None)
        self._last_error: BaseException | None = None
        self._neighbours, self._links = Neighbours(coordination), Links(coordination)
        self._shutdown = Shutdown(coordination, self._neighbours, progress, self._stopped, exit)

    def start(self) -> None:
        """Begin to watch; once."""
        assert not self._threads
        self._process = os.getpid()
        self._hooks = (sys.excepthook, sys.exit)
        self._last_error = last_error()
        # Exceptions of other threads do not end a Python program, so they do not end a job.
        sys.excepthook, sys.exit = self._on_exception, self._on_sys_exit  # pyrefly: ignore[bad-assignment]
        self._threads = [self._started("watch", self._watch), self._started("watch_host", self._watch_host)]
        if self._worker == 0:
            self._listening[frozenset()] = self._started("outlive", self._outlive)

    def stop(self, *, wait: bool = True) -> None:
        """End the watch, at the end of the program and before JAX's own end; do nothing the second time."""
        if os.getpid() != self._process or self._stopped.is_set():
            return
        try:
            error = last_error()
            if wait and error is not None and error is not self._last_error and not hasattr(sys, "ps1"):
                self._fail_with(error)  # a hook of the program's own has taken the place of the guard's
            elif wait:  # as long as the others live: JAX would soon abort all of them
                self._end()
        except KeyboardInterrupt:
            self._fail(Verdict(f"worker {self._worker} was interrupted while it waited for the others to end"), INTERRUPTED)
        except Exception as error:  # jaxlib's errors have no classes of their own
            self._on_service_error(error)
        self._stopped.set()
        self._neighbours.wake()
        for thread in self._threads:
            thread.join(LAST_RESORT_SECONDS)  # at the interpreter's end, a thread in a native call would abort the process
        self._neighbours.close()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hooks[0]
        if sys.exit == self._on_sys_exit:
            sys.exit = self._hooks[1]

    def outlive_others(self, seconds: float) -> None:
        """Let worker 0 wait after `stop` until the others have left its service or are dead: JAX would abort them."""
        self._is_last.set()
        deadline = time.monotonic() + seconds
        for thread in [*self._listening.values()]:
            if thread.is_alive():  # in a native call at the interpreter's end, it would abort the process
                thread.join(max(0.0, deadline - time.monotonic()))

    def _outlive(self) -> None:
        self._is_last.wait()
        self._listen(self._coordination.others)

    def _started(self, name: str, work: Callable[..., None], *args: object) -> threading.Thread:
        """Start a daemon, because Python waits for other threads before it runs what is registered with atexit."""
        thread = threading.Thread(target=work, args=args, name=THREADS + name, daemon=True)
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts none at its end; each limit holds without it
            thread.start()
        return thread

    # ---- the main thread

    def _on_sys_exit(self, code: Any = None, /) -> None:
        """Note the code of `sys.exit` (Python forgets it); the exception may still be caught, or end a thread only."""
        if in_main_thread():
            is_number = code is None or isinstance(code, int)
            self._sys_exit_code = (code or 0) & 0xFF if is_number else FAILED
        self._hooks[1](code)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # In a forked child, after the end, and in an interactive session, where an exception ends nothing.
        if os.getpid() != self._process or self._stopped.is_set() or hasattr(sys, "ps1"):
            self._hooks[0](kind, error, trace)
            return
        self._failing.set()  # before it is printed, which takes a while on a busy machine: another worker's error may come
        if not (tells_of_loss(error) and self._shutdown.begun.locked()):  # else it follows from what is being reported
            self._hooks[0](kind, error, trace)
        self._fail_with(error)

    def _fail_with(self, error: BaseException) -> None:
        """Tell the others of the error that ends this worker's program, or of the lost worker that caused it, and leave."""
        title = title_of(error)
        if tells_of_loss(error):
            verdict = self._shutdown.lost(title)
            if not verdict.lost and self._links.warning:  # all have answered: the kernel has given up a connection
                verdict = dataclasses.replace(verdict, title=f"{verdict.title}. {self._links.warning}")
            self._fail(verdict)
            return
        what = f"worker {self._worker} failed at step {self._progress.step} with {title}"
        is_of_all = isinstance(error, ProgramMismatchError | ReplicasDivergeError)  # a comparison of the workers has found it
        code = FAILED if is_of_all else RESTART
        self._fail(Verdict(what, "".join(traceback.format_exception(error)), code=code), exit_code_of(error))

    def _end(self) -> None:
        """Wait for all workers to come to their end."""
        code = self._sys_exit_code
        self._progress.phases = (self._progress.phase(f"sys.exit({code})"),) * bool(code)
        self._has_ended = True
        self._say_where(0.0)  # at once: who waits for this worker waits in vain
        self._coordination.say(_ENDED)
        try:
            are_known = require_same_history(self._await_ends(), self._shutdown.trails)
        except ProgramMismatchError as error:
            self._fail(told_apart(str(error)))
            return
        try:
            if are_known:  # so all have started the same programs, and these will end
                self._progress.finish()
        except Exception as error:  # such as an argument of the last step that differs by worker
            self._on_exception(type(error), error, error.__traceback__)
        else:
            self._coordination.put(CALL, DONE)  # wakes the guards

    def _await_ends(self) -> Sequence[Any]:
        """Return the histories of all workers, when all have come to their end."""
        waited = 0.0
        while True:
            seconds = max(waited, _END_WARNING_SECONDS)
            try:
                return self._coordination.exchange("end", self._progress.history(), seconds)
            except WorkerLostError:
                waited += seconds
                missing = sorted(self._coordination.others - self._coordination.by_worker(_ENDED).keys())
                message = "worker %d has come to the end of its program, and has waited for %s for %.0f s"
                _logger.warning(message, self._worker, numbered(missing), waited)

    # ---- the guard's threads

    def _watch(self) -> None:
        last = time.monotonic()
        try:
            self._neighbours.introduce()
            while not self._stopped.is_set():
                now = time.monotonic()
                elapsed = min(now - last, 2 * self._round_seconds)  # a process that was stopped has not waited in that time
                if self._round(elapsed):
                    return
                last = now
        except Exception as error:  # jaxlib's errors have no classes of their own
            self._on_service_error(error)

    def _round(self, elapsed: float) -> bool:
        """Publish this worker's position, judge the others', and listen for a call; tell whether this was the last round."""
        # After a pause of this process, the others may have gone on meanwhile: it judges them in its next round.
        was_late, self._was_late = self._was_late, elapsed >= 2 * self._round_seconds
        self._looks_in_call = 1
        try:
            own = self._say_where(elapsed)
        finally:
            self._looks_in_call = 0
        self._neighbours.meet()
        view = self._look_at_others(own, elapsed)
        verdict = self._find_difference(view)
        if not verdict and (was_late or not self._was_late):
            verdict = self._find_stuck(view)
        if not own.waits_in_program:
            self._links.rest()
        elif not verdict and own.still >= SETTLED_SECONDS:
            verdict = self._links.check(own.started, elapsed)
        if verdict:
            self._fail(verdict)
            return True
        call = self._coordination.get(CALL, self._round_seconds)
        if call is None or self._stopped.is_set():
            return False
        if call != DONE:
            self._follow(call)
        return True

    def _find_difference(self, view: JobView) -> Verdict | None:
        """Return the verdict on workers with different histories, or with data of different lengths."""
        contradicts = self._progress.trail.contradicts
        parted = [position for position in view.positions.values() if contradicts(position.done, position.trail)]
        if any(phase.text == COMPARISON for phase in self._progress.phases):  # then the program is told, and may catch it
            parted = [position for position in parted if position.phase != COMPARISON]
        if parted:
            return told_apart(other_order(self._shutdown.trails()), wants_stacks=True)
        if ended := shorter_data(view.positions):
            return Verdict(f"{ValueError.__name__}: {data_ended(*ended)}. {ONE_DATASET}", code=FAILED)
        return None

    def _find_stuck(self, view: JobView) -> Verdict | None:
        """Return the verdict if this worker waits in vain for worker 0; on worker 0, if any worker waits in vain."""
        limit = self._own.limit
        if self._worker == 0:
            text = judge_all(view, limit)
        elif text := judge(self._worker, view, limit, sees_all=False):
            view = self._others.hear(self._coordination.by_worker(_POSITION), 0.0)  # now of all, to name all
            text = judge(self._worker, view, limit) or text
        if not text:
            return None
        title, _, detail = text.partition("\n")
        title = " ".join(filter(None, (title, self._links.describe())))
        # Worker 0 may be silent, but its service answers: one call that lets no other Python thread run is enough.
        silent = [worker for worker, seconds in view.silent.items() if worker and seconds >= _UNHEARD_SECONDS]
        return Verdict(title, detail, tuple(silent), wants_stacks=True)

    def _say_where(self, elapsed: float) -> Position:
        with self._speaking:
            own = self._own.measure(elapsed, self._has_ended)
            self._coordination.say(_POSITION, own.encode())
            return own

    def _watch_host(self) -> None:
        """Leave at once when a worker of this host has died: if it was worker 0, JAX aborts this one within 50 ms."""
        # It watches the other thread's calls too. It calls the service, which may block, only when a worker has died.
        try:
            while not self._stopped.is_set():
                self._neighbours.await_death(ROUND_SECONDS)
                if self._stopped.is_set() or self._is_unanswered() or self._is_left_alone():
                    return
        except Exception as error:  # jaxlib's errors have no classes of their own
            self._on_service_error(error)

    def _is_unanswered(self) -> bool:
        """Warn if the service does not answer, and leave at the limit; JAX would end this process, and name nobody."""
        if not self._looks_in_call:
            return False
        self._looks_in_call += 1
        looks_of_silence = round(_SILENT_SECONDS / ROUND_SECONDS)
        if self._looks_in_call == looks_of_silence + 1:
            _logger.warning(
                "worker 0, which hosts the coordination service, has not answered worker %d for %.0f s: it is stopped, cut "
                "off, or dead", self._worker, _SILENT_SECONDS,
            )  # fmt: skip
        limit = self._own.limit
        if self._looks_in_call <= max(limit / ROUND_SECONDS, looks_of_silence) or not self._progress.is_waiting():
            return False
        title = f"worker 0, which hosts the coordination service, has not answered for {limit:.0f} s"
        self._fail(Verdict(title, lost=(0,), wants_stacks=True))
        return True

    def _is_left_alone(self) -> bool:
        """Leave if workers of this host have ended, with the published reason if there is one; return whether it leaves."""
        dead = self._neighbours.dead()
        if dead and 0 not in dead and self._has_ended:  # after their end, workers may go
            dead = tuple(sorted(set(dead) - self._coordination.by_worker(_ENDED).keys()))
        if not dead:
            return False
        if self._failing.is_set():
            self._shutdown.arm_last_resort(RESTART)
        elif 0 not in dead and (call := self._coordination.peek(CALL)) is not None:
            self._follow(call)
        else:
            self._fail(self._shutdown.gone(dead))
        return True

    def _look_at_others(self, own: Position, elapsed: float) -> JobView:
        """Read the positions: worker 0 compares itself with all, the others with worker 0, so that any difference shows."""
        if self._worker:
            texts = {0: self._coordination.peek(f"{_POSITION}/0") or "", self._worker: own.encode()}
        else:
            texts = self._coordination.by_worker(_POSITION)
        view = self._others.hear(texts, elapsed)
        before, self._silent = self._silent, {worker for worker in view.silent if view.silence(worker) >= _SILENT_SECONDS}
        for worker in sorted(self._silent - before):
            _logger.warning(
                "worker %d has been silent for %.0f s: it is stopped, cut off, dead, or in one long call that lets no other "
                "Python thread run; it was last seen so:\n%s", worker, view.silence(worker), view,
            )  # fmt: skip
        if self._worker == 0:
            for worker in self._silent:
                self._listen_to(frozenset({worker}))
        return view

    def _listen_to(self, workers: frozenset[int]) -> None:
        if workers not in self._listening:
            self._listening[workers] = self._started("listen", self._listen, workers)

    def _listen(self, workers: Collection[int]) -> None:
        """Leave when a silent worker's heartbeats have ceased: JAX sends them natively, so no call of Python holds them up."""
        try:
            self._coordination.await_gone(workers)
            if not self._stopped.is_set() and self._coordination.peek(CALL) != DONE:
                self._fail(self._shutdown.gone(tuple(workers), ": its heartbeats have ceased"))
        except Exception as error:  # jaxlib's errors have no classes of their own
            self._on_service_error(error)

    def _follow(self, call: str) -> None:
        """Answer a call, and leave with the verdict that follows."""
        self._shutdown.answer(call)
        unknown = Verdict("a worker called the others to end, and was gone before it said why")
        verdict = self._shutdown.known(LAST_RESORT_SECONDS) or unknown
        # An error of the program often comes to all workers at the same step: let this one show its own.
        if self._failing.wait(_GRACE_SECONDS):
            self._shutdown.arm_last_resort(verdict.code)
        else:
            self._leave(verdict, is_first=False)

    def _on_service_error(self, error: Exception) -> None:
        """Leave when worker 0 is gone: JAX ends this process 0.1 s later, with a code and a text that name nobody."""
        if self._stopped.is_set():
            return
        if 0 not in self._neighbours.dead() and not tells_of_lost_service(error):
            with contextlib.suppress(Exception):  # jaxlib's errors have no classes of their own
                self._coordination.get(CALL, _PROBE_SECONDS)
                _logger.error("the guard of worker %d ends, because of an error of its own", self._worker, exc_info=error)
                return
        self._fail(self._shutdown.gone((0,), "", str(error)))

    # ---- leaving

    def _leave(self, verdict: Verdict, is_first: bool, code: int | None = None) -> None:
        """Leave with the code of this worker's own error, else of its own `sys.exit`, else of the verdict."""
        if code is None:
            code = (self._has_ended and self._sys_exit_code) or verdict.code
        self._shutdown.leave(verdict, code, is_first)

    def _fail(self, verdict: Verdict, code: int | None = None) -> None:
        """Publish a verdict, unless another worker was first, and leave. With `code`, the error's traceback has been printed."""
        shown = verdict if code is None else Verdict(verdict.title)
        if 0 not in verdict.lost:  # else there is nobody to tell, and a call into the service would block
            with contextlib.suppress(Exception):  # the service may go in this moment
                if told := self._shutdown.tell(verdict):
                    is_printed = code is not None and told.detail == verdict.detail[-MAX_TEXT:]  # all fail alike
                    shown = dataclasses.replace(told, detail="") if is_printed else told
        self._leave(shown, is_first=True, code=code)
