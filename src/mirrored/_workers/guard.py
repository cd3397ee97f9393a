"""How does a job of several workers end when one of them cannot go on? Soon, on all of them, and with the reason. No jax here.

A thread tells the others where this worker is, and listens for a verdict. Whoever fails, or finds that the job cannot go
on, publishes one; everybody logs it and leaves with `os._exit`, because the main thread may wait in native code for
ever, and JAX's own end of the program for minutes: docs/design/failures.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from .._errors import FAILED, INTERRUPTED, RESTART, ProgramMismatchError
from .._text import named, numbered
from .coordination import Coordination
from .leaving import HERE, LAST_RESORT_SECONDS, Leaving
from .links import Links
from .neighbours import Neighbours
from .progress import NEXT_BATCH, UNKNOWN, Progress, in_main_thread
from .same_program import ONE_DATASET, data_ended, decode_history, is_other_order, other_order, require_same_history
from .stall import SETTLED_SECONDS, Others, Own, Position, judge, listed, shorter_data
from .verdict import Verdict, exit_code_of, last_error, tells_of_loss, tells_of_lost_service, title_of

_logger = logging.getLogger("mirrored")

#: How often a worker says where it is, and how long one call into the service blocks.
ROUND_SECONDS = 0.5
#: How long the others have to answer, and to show their own error of the same moment.
_ANSWER_SECONDS, _GRACE_SECONDS = 0.6, 0.2
_SERVICE_SILENT_TICKS = 4
#: Who has been silent for so long is not waited for when all leave.
_UNHEARD_SECONDS = 2.0
_END_WARNING_SECONDS = 30.0
_PROBE_SECONDS = 0.02

_CALL, _VERDICT, _POSITION, _ENDED, _PROCESS, _TRAIL = (
    f"guard/{name}" for name in ("call", "verdict", "position", "ended", "process", "trail")
)
#: What a call says: leave; leave, and tell first what you have done; all have come to the end.
_LEAVE, _TELL, _DONE = "leave", "tell", "done"


class Guard:
    """The guard of this process, which ends it with a message when its job cannot go on.

    Args:
        coordination: reaches the other workers.
        progress: what this process is doing.
        stall_seconds: how long a worker may wait for another; default: 300 seconds, and 20 steps if they are longer.
        exit: ends the process at once.
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
        self._own, self._others = Own(progress, stall_seconds), Others()
        self._process = 0
        self._threads: list[threading.Thread] = []
        self._stopped, self._failing, self._has_ended = threading.Event(), threading.Event(), False
        self._speaking = threading.Lock()
        self._sys_exit_code = 0
        self._ticks_in_service, self._was_late = 0, False
        self._hooks: tuple[Any, Any] = (None, None)
        self._last_error: BaseException | None = None
        self._neighbours, self._links = Neighbours(self._worker, self._num_workers), Links(coordination)
        self._leaving = Leaving(coordination, self._neighbours, self._stopped, exit)

    def start(self) -> None:
        """Begin to watch; once."""
        assert not self._threads
        self._process = os.getpid()
        self._hooks = (sys.excepthook, sys.exit)
        self._last_error = last_error()
        # Exceptions of other threads do not end a Python program, so they do not end a job.
        sys.excepthook, sys.exit = self._on_exception, self._on_sys_exit  # pyrefly: ignore[bad-assignment]
        # Daemons, because Python waits for other threads before it runs what is registered with atexit; `stop` joins them.
        for work in (self._watch, self._watch_service, self._watch_neighbours):
            thread = threading.Thread(target=work, name=f"mirrored-guard-{work.__name__.strip('_')}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """End the watch, at the end of the program and before JAX's own end; does nothing the second time.

        Args:
            wait: for the other workers to come to their end, for as long as they live. JAX would wait for a short time and then
                abort all of them.
        """
        if not self._threads or self._stopped.is_set() or os.getpid() != self._process:
            return
        try:
            error = last_error()
            if wait and error is not None and error is not self._last_error and not hasattr(sys, "ps1"):
                self._fail_with(error)  # a hook of the program's own has taken the place of the guard's
            elif wait:
                self._end()
        except KeyboardInterrupt:
            self._fail(Verdict(f"worker {self._worker} was interrupted while it waited for the others to end"), INTERRUPTED)
        except Exception as error:  # jaxlib's errors have no classes of their own
            self._on_service_error(error)
        self._stopped.set()
        self._neighbours.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(LAST_RESORT_SECONDS)  # at the interpreter's end, a thread in a native call would abort the process
        self._neighbours.close()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hooks[0]
        if sys.exit == self._on_sys_exit:
            sys.exit = self._hooks[1]

    # ---- what the main thread runs into

    def _on_sys_exit(self, code: Any = None, /) -> None:
        """Take note of the code, which Python tells nobody else; the exception may still be caught, or end a thread only."""
        if in_main_thread():
            self._sys_exit_code = 0 if code is None else code & 0xFF if isinstance(code, int) else FAILED
        self._hooks[1](code)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_interactive = hasattr(sys, "ps1")  # then an exception ends nothing
        is_ours = os.getpid() == self._process and not self._stopped.is_set() and not is_interactive
        is_lost = tells_of_loss(error)
        if not (is_ours and is_lost and self._leaving.has_begun):  # else it follows from what is being reported
            self._hooks[0](kind, error, trace)
        if not is_ours:
            return
        self._failing.set()
        self._fail_with(error)

    def _fail_with(self, error: BaseException) -> None:
        """Leave because of an error that ends this worker's program, and tell the others, or find out who is lost."""
        title = title_of(error)
        if tells_of_loss(error):
            self._fail(self._lost(title))
            return
        shown = Verdict(f"worker {self._worker} failed at step {self._progress.step} with {title}")
        whole = dataclasses.replace(shown, detail="".join(traceback.format_exception(error)))
        self._fail(whole, exit_code_of(error), shown)  # the traceback has just been printed

    def _end(self) -> None:
        """Wait for all workers to come to their end."""
        code = self._sys_exit_code
        self._progress.phases = (self._progress.phase(f"sys.exit({code})"),) if code else ()
        self._has_ended = True
        self._say_where(0.0)  # at once: who waits for this worker waits in vain
        self._coordination.put(f"{_ENDED}/{self._worker}", json.dumps(self._progress.history()))
        waited, warn_at, histories = 0.0, _END_WARNING_SECONDS, []
        for worker in range(self._num_workers):
            while (text := self._coordination.get(f"{_ENDED}/{worker}", ROUND_SECONDS)) is None:
                waited += ROUND_SECONDS
                if waited >= warn_at:
                    message = "worker %d has come to the end of its program, and has waited for worker %d for %.0f s"
                    _logger.warning(message, self._worker, worker, waited)
                    warn_at *= 2
            histories.append(decode_history(text))
        try:
            require_same_history(histories, self._trails)
            if all(UNKNOWN not in history for history in histories):  # so all have started the same programs, and these will end
                self._progress.finish()
        except ProgramMismatchError as error:
            self._fail(_told_apart(str(error)), code or None)
        except Exception as error:  # such as an argument of the last step that differs by worker
            self._on_exception(type(error), error, error.__traceback__)
        else:
            self._coordination.put(_CALL, _DONE)  # wakes the guards

    def _lost(self, title: str) -> Verdict:
        """Call the roll after an error of a collective: who does not answer is the one that was lost."""
        step, others = self._progress.step, set(range(self._num_workers)) - {self._worker}
        present: dict[int, str] = {}
        try:
            if not self._neighbours.dead():
                self._meet()
                if (known := self._coordination.peek(_VERDICT)) is not None:
                    return Verdict.decode(known)
                self._call()
            deadline = time.monotonic() + _ANSWER_SECONDS
            while len(present) < len(others) and time.monotonic() < deadline:
                if dead := self._neighbours.dead():
                    return self._gone(dead)
                time.sleep(0.01)
                present = {worker: text for worker, text in self._coordination.by_worker(HERE).items() if worker in others}
            if is_other_order(trails := self._told()):  # so collectives of different programs have met
                return _told_apart(other_order(trails), wants_stacks=True)
        except Exception:  # jaxlib's errors have no classes of their own
            return Verdict(f"lost worker 0, which hosts the coordination service, at step {step}", title, (0,))
        missing = sorted(others - present.keys())
        who, why = "lost a connection", "all workers answered"
        if missing:
            who, why = f"lost {numbered(missing)}", f"{named(missing)} not answered"
        return Verdict(f"{who} at step {step}: a collective failed on worker {self._worker}, and {why}", title, tuple(missing))

    def _trails(self) -> list[str]:
        """Call all workers to say what they have done last, before they leave."""
        self._call()
        self._coordination.await_workers(_TRAIL, set(range(self._num_workers)), time.monotonic() + _ANSWER_SECONDS)
        return self._told()

    def _call(self) -> None:
        self._coordination.put(f"{_TRAIL}/{self._worker}", self._progress.tell())
        self._coordination.put(_CALL, _TELL)

    def _told(self) -> list[str]:
        """Return what each worker has done last; empty of one that has not said it."""
        told = self._coordination.by_worker(_TRAIL)
        return [told.get(worker, "") for worker in range(self._num_workers)]

    def _gone(self, dead: Sequence[int]) -> Verdict:
        # When worker 0 is gone the others follow at once, so it is the one to name.
        who = "worker 0, which hosts the coordination service," if 0 in dead else numbered(dead)
        return Verdict(f"lost {who} at step {self._progress.step}: the process is gone", lost=tuple(dead))

    # ---- what the thread of the guard does

    def _watch(self) -> None:
        last = time.monotonic()
        try:
            self._coordination.put(f"{_PROCESS}/{self._worker}", self._neighbours.introduce())
            while not self._stopped.is_set():
                now = time.monotonic()
                if self._round(min(now - last, 2 * ROUND_SECONDS)):  # a process that was stopped has not waited in that time
                    return
                last = now
        except Exception as error:  # jaxlib's errors have no classes of their own
            self._on_service_error(error)

    def _round(self, elapsed: float) -> bool:
        """Say where this worker is, look at the others where that may be needed, and listen; tell whether this was the last."""
        # A process that was paused looks first at what has come meanwhile.
        was_late, self._was_late = self._was_late, elapsed >= 2 * ROUND_SECONDS
        self._ticks_in_service = 1
        try:
            own = self._say_where(elapsed)
        finally:
            self._ticks_in_service = 0
        self._meet()
        if self._is_left_alone():
            return True
        is_suspicious = own.waits and (own.still >= ROUND_SECONDS or bool(self._coordination.by_worker(_ENDED)))
        is_suspicious |= own.phase == NEXT_BATCH and own.still >= SETTLED_SECONDS
        self._look_at_others(own, elapsed, is_suspicious or self._worker == 0)
        if any(self._progress.contradicts(there.done, there.trail) for there in self._others.positions.values()):
            self._fail(_told_apart(other_order(self._trails()), wants_stacks=True))
            return True
        if ended := shorter_data({**self._others.positions, self._worker: own}):
            self._fail(Verdict(f"{ValueError.__name__}: {data_ended(*ended)}. {ONE_DATASET}", code=FAILED))
            return True
        if is_suspicious and not own.has_ended and (was_late or not self._was_late):
            positions = {**self._others.positions, self._worker: own}
            if text := judge(self._worker, self._own.limit, positions, self._others.silent):
                title, _, detail = text.partition("\n")
                # Worker 0 may be silent, but its service answers: one call that lets no other Python thread run is enough.
                silent = tuple(
                    worker for worker, seconds in self._others.silent.items() if worker and seconds >= _UNHEARD_SECONDS
                )
                self._fail(Verdict(title, detail, silent, wants_stacks=True))
                return True
        if own.waits_in_program and own.still >= SETTLED_SECONDS and (cut := self._links.look_at_times(own.started, elapsed)):
            self._fail(cut)
            return True
        call = self._coordination.get(_CALL, ROUND_SECONDS)
        if call is None or self._stopped.is_set():
            return False
        if call != _DONE:
            self._follow(call)
        return True

    def _say_where(self, elapsed: float) -> Position:
        with self._speaking:
            own = self._own.look(elapsed, self._has_ended)
            self._coordination.put(f"{_POSITION}/{self._worker}", own.encode())
            return own

    def _watch_neighbours(self) -> None:
        """Leave at once when a worker of this host has died: JAX aborts this one within 50 ms when it was worker 0."""
        try:
            while not self._stopped.is_set():
                if self._neighbours.await_death(ROUND_SECONDS) and not self._stopped.is_set() and self._is_left_alone():
                    return
        except Exception as error:  # jaxlib's errors have no classes of their own
            self._on_service_error(error)

    def _is_left_alone(self) -> bool:
        """Leave when others of this host are gone, unless somebody has said why, or this worker is about to; tell whether."""
        dead = self._neighbours.dead()
        if dead and 0 not in dead and self._has_ended:  # after their end, workers may go
            dead = tuple(sorted(set(dead) - self._coordination.by_worker(_ENDED).keys()))
        if not dead:
            return False
        if self._failing.is_set():
            self._leaving.arm_last_resort(RESTART)
        elif 0 not in dead and (call := self._coordination.peek(_CALL)) is not None:
            self._follow(call)
        else:
            self._fail(self._gone(dead))
        return True

    def _meet(self) -> None:
        if not self._neighbours.are_known:
            self._neighbours.meet(self._coordination.by_worker(_PROCESS))

    def _look_at_others(self, own: Position, elapsed: float, at_all: bool) -> None:
        """Take the positions of all, or only of worker 0, so that of any two that differ one finds that it differs from it."""
        before = dict(self._others.silent)
        texts = self._coordination.by_worker(_POSITION) if at_all else {0: self._coordination.peek(f"{_POSITION}/0") or ""}
        self._others.look({worker: text for worker, text in texts.items() if worker < self._num_workers}, elapsed)
        for worker, seconds in self._others.silent.items():
            if worker != self._worker and before.get(worker, 0.0) < _SERVICE_SILENT_TICKS <= seconds:
                _logger.warning(
                    "worker %d has been silent for %.0f s: it is stopped, cut off, dead, or in one long call that lets no other "
                    "Python thread run; it was last seen so:\n%s",
                    worker, seconds, listed({**self._others.positions, self._worker: own}, self._others.silent),
                )  # fmt: skip

    def _watch_service(self) -> None:
        """Warn when the service does not answer; JAX ends this process a few seconds later, and names nobody."""
        while not self._stopped.wait(1.0):
            if self._ticks_in_service:
                self._ticks_in_service += 1
                if self._ticks_in_service > max(self._own.limit, _SERVICE_SILENT_TICKS) and self._progress.is_waiting():
                    title = f"worker 0, which hosts the coordination service, has not answered for {self._own.limit:.0f} s"
                    self._leave(Verdict(title, lost=(0,), wants_stacks=True), RESTART, is_first=False)
                    return
                if self._ticks_in_service == _SERVICE_SILENT_TICKS + 1:
                    _logger.warning(
                        "worker 0, which hosts the coordination service, has not answered worker %d for %d s: it is stopped, cut "
                        "off, or dead",
                        self._worker, _SERVICE_SILENT_TICKS,
                    )  # fmt: skip

    def _follow(self, call: str) -> None:
        """Answer a call, and leave with the verdict that follows."""
        if call == _TELL:
            self._coordination.put(f"{_TRAIL}/{self._worker}", self._progress.tell())
        self._coordination.put(f"{HERE}/{self._worker}", "1")
        text = self._coordination.get(_VERDICT, LAST_RESORT_SECONDS)
        unknown = Verdict("a worker called the others to end, and was gone before it said why")
        verdict = unknown if text is None else Verdict.decode(text)
        # An error of the program often comes to all workers at the same step: let this one show its own.
        if self._failing.wait(_GRACE_SECONDS):
            self._leaving.arm_last_resort(verdict.code)
        else:
            self._leave(verdict, (self._has_ended and self._sys_exit_code) or verdict.code, is_first=False)

    def _on_service_error(self, error: Exception) -> None:
        """Leave when worker 0 is gone: JAX ends this process 0.1 s later, with a code and a text that name nobody."""
        if self._stopped.is_set():
            return
        if 0 not in self._neighbours.dead():
            try:
                self._coordination.get(_CALL, _PROBE_SECONDS)
            except Exception as second:  # jaxlib's errors have no classes of their own
                if "CANCELLED" in str(second):  # somebody called jax.distributed.shutdown(): the job has no guard any more
                    self._neighbours.forget()
                    return
            else:
                if not tells_of_lost_service(error):
                    _logger.error("the guard of worker %d ends, because of an error of its own", self._worker, exc_info=error)
                    return
        title = f"lost worker 0, which hosts the coordination service, at step {self._progress.step}"
        self._leave(Verdict(title, str(error), lost=(0,)), (self._has_ended and self._sys_exit_code) or RESTART, is_first=False)

    # ---- leaving

    def _leave(self, verdict: Verdict, code: int, is_first: bool) -> None:
        self._leaving.leave(verdict, code, is_first, self._threads)

    def _fail(self, verdict: Verdict, code: int | None = None, shown: Verdict | None = None) -> None:
        """Publish a verdict, unless there is one, and leave; with the code of the one that counts, where this worker has none."""
        shown = shown or verdict
        if 0 not in verdict.lost:  # else there is nobody to tell, and a call into the service would block
            with contextlib.suppress(Exception):  # the service may go in this moment
                known = self._coordination.peek(_VERDICT)
                if known is None:
                    self._coordination.put(_VERDICT, verdict.encode())
                    self._coordination.put(_CALL, _LEAVE)
                else:
                    shown = Verdict.decode(known)
        self._leave(shown, shown.code if code is None else code, is_first=True)


def _told_apart(text: str, wants_stacks: bool = False) -> Verdict:
    """Return the verdict on workers that have done different things, so that starting again would not help."""
    title, _, detail = text.partition("\n")
    return Verdict(f"{ProgramMismatchError.__name__}: {title}", detail, wants_stacks=wants_stacks, code=FAILED)
