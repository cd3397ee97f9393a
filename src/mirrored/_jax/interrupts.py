"""A Ctrl-C that Python ignores is sent again.

JAX has a callback in Python for the garbage collector. A Ctrl-C that comes while garbage is collected is raised in the first
Python code that runs afterwards, which is this callback; and Python ignores what callbacks of the collector raise, as it does
in finalizers.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from typing import Any


def send_ignored_again() -> None:
    """Let a Ctrl-C that Python ignores in the main thread come again, from now on; all else goes to the hook that was there."""
    if not isinstance(sys.unraisablehook, _Hook) and hasattr(signal, "pthread_kill"):  # Windows has no signals for threads
        sys.unraisablehook = _Hook(sys.unraisablehook)


class _Hook:
    """A `sys.unraisablehook`, before another one."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __call__(self, unraisable: Any) -> None:
        is_interrupt = isinstance(unraisable.exc_value, KeyboardInterrupt)
        if not is_interrupt or threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
            self._other(unraisable)
            return
        callback = next((callback for callback in gc.callbacks if callback is unraisable.object), None)
        if callback is not None:
            gc.callbacks.remove(callback)  # else it may be there again when the signal comes
        threading.Thread(target=_send, args=(callback,), name="mirrored: Ctrl-C again", daemon=True).start()


def _send(callback: Any) -> None:
    """Interrupt the main thread when it has left the hook, in which an interrupt would be ignored as well."""
    main = threading.main_thread().ident or 0
    while _is_in_hook(main):
        time.sleep(0.001)
    if callable(signal.getsignal(signal.SIGINT)):  # else it would end the process, or nobody wants it
        signal.pthread_kill(main, signal.SIGINT)
    if callback is not None:
        time.sleep(0.01)
        gc.callbacks.append(callback)


def _is_in_hook(main: int) -> bool:
    frame = sys._current_frames().get(main)
    while frame is not None and frame.f_code is not _Hook.__call__.__code__:
        frame = frame.f_back
    return frame is not None
