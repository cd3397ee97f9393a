"""Ctrl-C after each call of ours, one after the other."""

import inspect
import sys
from collections.abc import Callable

from mirrored._jax import user_code


def interrupt() -> None:
    raise KeyboardInterrupt


def after_each_call(work: Callable[[], object], check: Callable[[], object], handler: Callable[[], object] = interrupt) -> int:
    """Run `work` again and again; call `handler` where Python looks for signals, first after the first call, then the second...

    `check` is called each time. Returns in how many runs `handler` was called before `work` came to its end.
    """
    remaining = 0

    def stop(frame, event, argument):
        nonlocal remaining
        # Python swallows what is raised while it closes a generator that nobody reads to its end (`any`, `next`).
        closes = event == "return" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if event != "c_call" and not closes and frame.f_code.co_filename.startswith(user_code._PACKAGE_FOLDER):
            remaining -= 1
            if remaining < 0:
                sys.setprofile(None)
                handler()

    outer, hook, stopped, is_done = sys.getprofile(), sys.unraisablehook, 0, False
    sys.unraisablehook = lambda _: None  # else what Python swallows elsewhere comes again, as a signal to the tests
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
            check()
    finally:
        sys.unraisablehook = hook
    return stopped
