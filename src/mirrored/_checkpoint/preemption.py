"""Handles preemption: after SIGTERM to any worker, all workers save the same step and exit."""

from __future__ import annotations

import _thread
import atexit
import ctypes
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import NoReturn, Self

from .._errors import NOTICE_SECONDS, PREEMPTED, CheckpointError, ContextError
from .._process import Lock
from .._strategy.strategy import Strategy, coordination_of
from .._workers.coordination import SLICE_SECONDS, Channel, Coordination, decoded
from .._workers.progress import progress
from .checkpoint import Checkpoint
from .files import checked_step

_logger = logging.getLogger("mirrored")

_CHANNEL = "preemption"
#: `signal.signal` for all threads: a documented function of Python's C API, in the stable ABI.
_set_disposition = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("PyOS_setsig", ctypes.pythonapi))
_numbers = itertools.count()
_handlers: weakref.WeakSet[PreemptionHandler] = weakref.WeakSet()


class PreemptionHandler:
    """A handler for SIGTERM, the notice that a machine is taken away: it saves a step, and exits with code 143.

    Any worker may get the signal, at any time. All workers then agree on a step that none has passed, save it when they have
    taken it, wait until it is on disk, and raise `SystemExit(143)`. The next start goes on with the step after it, so no step
    is repeated. Further SIGTERMs within one second belong to the same notice. A later SIGTERM, or Ctrl-C at any time after
    the first, ends the program at once.

    Make it before the loop, in the main thread of every worker, and close it (or leave its `with` block) after the loop: that
    also handles a signal that came during the last step.

    Args:
        checkpoint: the checkpoint to save with.
        strategy: the strategy whose workers leave together. Default: that of the checkpoint.

    Raises:
        TypeError: when `checkpoint` is no `mr.Checkpoint`.
        ContextError: (a RuntimeError) outside the main thread, because only that one may handle signals.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with strategy.scope():
    ...     w = mr.Variable(0.0, name="w")
    ...     checkpoint = mr.Checkpoint(folder.name, w=w)
    >>> step = checkpoint.restore_latest() or 0
    >>> with checkpoint, mr.PreemptionHandler(checkpoint) as preemption:
    ...     while step < 100:
    ...         step += 1
    ...         _ = w.assign_add(1.0)
    ...         preemption.after_step(step)
    >>> folder.cleanup()

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionCheckpointHandler
    """

    def __init__(self, checkpoint: Checkpoint, *, strategy: Strategy | None = None) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"mr.PreemptionHandler: checkpoint is {checkpoint!r}; expected a mr.Checkpoint.")
        if threading.current_thread() is not threading.main_thread():
            raise ContextError(
                "mr.PreemptionHandler was made in another thread than the main one, which alone may handle signals in Python. "
                "Make it in the main thread, and take the steps there."
            )
        self._checkpoint = checkpoint
        self._coordination = coordination_of(strategy or checkpoint._strategy)
        self._lock = Lock()
        self._last_step: int | None = None
        self._is_signalled = False  # SIGTERM has come to this process
        self._is_noticed = False  # the next `after_step` acts; in a job, set when this worker hears of any worker's signal
        self._quiet_until = 0.0  # until then SIGTERM belongs to the same notice
        self._pid = os.getpid()
        self._watch = _SignalWatch(self, self._coordination) if self._coordination.num_workers > 1 else None
        # The handlers to restore; empty when this one has ended.
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        signal.signal(signal.SIGTERM, self._on_signal)
        _handlers.add(self)

    def after_step(self, step: int) -> None:
        """Note that a step was taken. Call this after every step, or every n-th, with the same numbers on all workers.

        It takes a microsecond or less when no signal has come.

        Args:
            step: the step's number, as for `checkpoint.save`; it grows with each call.

        Raises:
            SystemExit: with code 143, after a signal, when this step is saved.
            CheckpointError: (a RuntimeError) when the step could not be saved.
            TypeError: when `step` is no whole number.
        """
        if type(step) is not int:
            step = checked_step(step, "preemption.after_step")
        with self._lock:
            self._last_step = step
            if not self._is_noticed:
                return
        if self._watch is None or step >= self._watch.target():
            self._leave(step)

    def close(self) -> None:
        """Stop handling signals; with several workers, all must call it. Further calls do nothing.

        Raises:
            SystemExit: with code 143, after a signal since the last step, when that step is saved.
        """
        if not self._previous:
            return
        try:
            with progress.phase("the end of preemption handling", waits=True):
                is_preempted = any(self._coordination.exchange(_CHANNEL, self._is_signalled or self._is_noticed))
            if is_preempted:
                self._leave(self._last_step)
        finally:
            self._end()
        if self._is_signalled:  # it came after the workers had agreed that nobody has one: send it again, to the former handler
            signal.raise_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # do not wait for the other workers: they may go on
            self._end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Set flags only: this runs between two instructions of the main thread, which may hold any lock."""
        if os.getpid() != self._pid:  # a forked child, such as a loader's worker
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._is_signalled:
            return
        self._is_signalled = True
        self._quiet_until = time.monotonic() + NOTICE_SECONDS
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        works = [self._end_notice]
        if self._watch is None:
            self._is_noticed = True
            works.append(self._say_signal)
        # In threads, because the main thread may be in the middle of a log message; by `_thread`, because it may hold a lock of
        # `threading`.
        try:
            for work in works:
                _thread.start_new_thread(work, ())
        except RuntimeError:  # the machine has no threads left
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end_notice(self) -> None:
        """Wait for the end of the notice, then let SIGTERM end the program, even while the main thread hangs in native code."""
        time.sleep(NOTICE_SECONDS)
        with self._lock:
            if signal.getsignal(signal.SIGTERM) == self._on_signal:  # else the former handler has been restored
                _set_disposition(signal.SIGTERM, signal.SIG_DFL)

    def _say_signal(self, where: str = "") -> None:
        """Log the signal at once: it has no other effect before `after_step` or `close`, which a program may forget to call."""
        _logger.warning("SIGTERM%s: saving at the next handler.after_step(step), or at handler.close()", where)

    def _notice(self) -> int | None:
        """Let the next `after_step` wait for the workers' agreement; return the last step."""
        with self._lock:
            self._is_noticed = True
            if not self._is_signalled:  # this worker's own signal may still be on the way
                self._quiet_until = time.monotonic() + NOTICE_SECONDS
            return self._last_step

    def _leave(self, step: int | None) -> NoReturn:
        try:
            if step is None:
                _logger.warning(
                    "preempted by SIGTERM before the first handler.after_step(step), so nothing is saved: leaving with code %d",
                    PREEMPTED,
                )
            else:
                self._checkpoint.save(step)
                latest = self._checkpoint.wait()
                if latest != step:
                    raise CheckpointError(
                        f"this program is preempted, and step {step} could not be saved; the log says why. The last step on disk "
                        f"is {latest}."
                    )
                _logger.warning("preempted by SIGTERM: step %d is saved, leaving with exit code %d", step, PREEMPTED)
        finally:
            self._end()
        sys.exit(PREEMPTED)

    def _end(self) -> None:
        """Restore the former handlers after the notice is over: before, a late signal would kill the program."""
        if self._watch is not None:
            self._watch.stop()
        if self._previous and os.getpid() == self._pid:
            while (left := self._quiet_until - time.monotonic()) > 0:
                time.sleep(left)
            with self._lock:
                for number, former in self._previous.items():
                    if number == signal.SIGTERM or self._is_signalled:
                        later = [handler for handler in list(_handlers) if handler._previous.get(number) == self._on_signal]
                        for handler in later:  # made later and still in use: it restores the former one in turn
                            handler._previous[number] = former
                        if not later:
                            signal.signal(number, former or signal.SIG_DFL)  # None: a handler that was not set from Python
        self._previous = {}


class _SignalWatch:
    """The workers' agreement, after a signal to any of them, on the step to save.

    It runs in a thread: a worker that waits for the agreement and a worker inside a collective would wait for each other. Each
    worker stops before its next step, tells its last step, and goes on when it knows every worker's last step. So no worker
    has passed the step after the latest of them.
    """

    def __init__(self, handler: PreemptionHandler, coordination: Coordination) -> None:
        self._handler, self._coordination = handler, coordination
        self._prefix = f"{_CHANNEL}/{next(_numbers)}"
        self._all_told = Channel(coordination, f"{self._prefix}/told")
        self._stopped = threading.Event()
        self._target: Future[int] = Future()
        # A daemon, because Python would wait for another thread before it calls functions of atexit.
        self._thread = threading.Thread(target=self._run, name="mirrored-preemption", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def target(self) -> int:
        """Wait for the agreement, and return the first step number to save at."""
        with progress.phase("agreeing on the step to save at preemption"):  # the others may first take another step
            return self._target.result()

    def stop(self) -> None:
        """End the thread; it must not be in a native call when the interpreter ends."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._all_told.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._await_signal()
            # A worker that ends before it hears of a signal also tells its last step, so that the others do not wait for it.
            last = self._handler._last_step if self._stopped.is_set() else self._handler._notice()
            self._coordination.put(f"{self._prefix}/last/{self._coordination.worker}", json.dumps(last))
            self._all_told.exchange(None)
            texts = self._coordination.by_worker(f"{self._prefix}/last")
            steps = [decoded(text, worker, _CHANNEL) for worker, text in texts.items()]
            self._target.set_result(max((step + 1 for step in steps if step is not None), default=-1))
        except Exception as error:  # this worker has been stopped, the service is gone, or a step is no number
            self._target.set_exception(error)

    def _await_signal(self) -> None:
        while not self._stopped.is_set():
            if self._handler._is_signalled:
                self._coordination.put(f"{self._prefix}/signal", str(self._coordination.worker))
                self._handler._say_signal()
                return
            worker = self._coordination.get(f"{self._prefix}/signal", SLICE_SECONDS)
            if worker is not None:
                self._handler._say_signal(f" on worker {worker}")
                return


def _forget() -> None:
    """Restore SIGTERM's default action in forked children: our handler would not run while a child waits in C."""
    for handler in _handlers:
        if handler._previous and handler._pid == os.getppid():  # else this is a child's child, and the child has decided for it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
