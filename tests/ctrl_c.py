"""Ctrl-C after each call of ours, one after the other."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mirrored import _process
from mirrored._jax import user_code
from mirrored._variables import storage


def interrupt() -> None:
    raise KeyboardInterrupt


def require_free_locks() -> None:
    """Take each lock of a step, in another thread than the one that was interrupted."""
    for lock in (storage.lock, _process.in_flight_lock, _process.lax_lock, _process.replaced_lock):
        assert lock.acquire(timeout=10), "a Ctrl-C has left a lock held"
        lock.release()


def after_each_call(work: Callable[[], object], check: Callable[[], object], handler: Callable[[], object] = interrupt) -> int:
    """Run `work` again and again; call `handler` where Python looks for signals, first after the first call, then the second...

    `check` is called each time, when no lock is held. Returns in how many runs `handler` was called before the end of `work`.
    """
    remaining = 0

    def stop(frame, event, argument):
        nonlocal remaining
        # Python looks for signals where its functions begin, and where C functions have ended.
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(user_code._PACKAGE_FOLDER):
            remaining -= 1
            if remaining < 0:
                sys.setprofile(None)
                handler()

    outer, hook, stopped, is_done = sys.getprofile(), sys.unraisablehook, 0, False
    sys.unraisablehook = lambda _: None  # else what Python swallows elsewhere comes again, as a signal to the tests
    other = ThreadPoolExecutor(1)
    try:
        while not is_done:
            remaining = stopped
            try:
                sys.setprofile(stop)
                work()
                is_done = remaining >= 0
                stopped += not is_done
            except KeyboardInterrupt:
                stopped += 1
            finally:
                sys.setprofile(outer)
            other.submit(require_free_locks).result()
            assert not storage.borrowed and not storage.claims
            check()
    finally:
        sys.unraisablehook = hook
        other.shutdown()
    return stopped
