"""Sends a Ctrl-C again that Python has ignored.

JAX registers a Python callback with the garbage collector. A Ctrl-C during a collection is raised in the first Python code that
runs afterwards, which is this callback. Python ignores exceptions in the collector's callbacks, as it does in finalizers.
"""

from __future__ import annotations

import functools
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any


def send_ignored_again() -> None:
    """From now on, send a Ctrl-C again that Python ignored in the main thread; pass all else to the former hook."""
    is_installed = getattr(sys.unraisablehook, "func", None) is _hook
    if not is_installed and hasattr(signal, "pthread_kill"):  # Windows has no signals for threads
        sys.unraisablehook = functools.partial(_hook, sys.unraisablehook)


def _hook(former: Callable[[sys.UnraisableHookArgs], Any], unraisable: sys.UnraisableHookArgs) -> None:
    is_interrupt = isinstance(unraisable.exc_value, KeyboardInterrupt)
    if not is_interrupt or threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
        former(unraisable)
        return
    callback = _callback_of(unraisable.exc_traceback)
    if callback is not None:
        gc.callbacks.remove(callback)  # else it may run again when the signal comes
    threading.Thread(target=_send, args=(callback,), name="mirrored: Ctrl-C again", daemon=True).start()


def _callback_of(traceback: TracebackType | None) -> Callable[..., Any] | None:
    """Return the collector's callback in which a traceback begins; Python 3.14 does not tell it otherwise."""
    if traceback is None:
        return None
    code = traceback.tb_frame.f_code
    return next((callback for callback in gc.callbacks if getattr(callback, "__code__", None) is code), None)


def _send(callback: Callable[..., Any] | None) -> None:
    """Wait until the main thread has left the hook, where Python would ignore the interrupt as well; then interrupt it."""
    main = threading.main_thread().ident or 0
    while _is_in_hook(main):
        time.sleep(0.001)
    if callable(signal.getsignal(signal.SIGINT)):  # else the signal would end the process, or is ignored
        signal.pthread_kill(main, signal.SIGINT)
    if callback is not None:
        time.sleep(0.01)  # until the main thread has got the signal
        gc.callbacks.append(callback)


def _is_in_hook(main: int) -> bool:
    frame = sys._current_frames().get(main)
    while frame is not None and frame.f_code is not _hook.__code__:
        frame = frame.f_back
    return frame is not None
