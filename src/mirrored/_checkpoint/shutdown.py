"""What is done when the program has ended, and threads can still start others.

This is the one place with a private part of the standard library. Functions of `atexit` run when pools of threads take no more
work, so that a thread that writes with them cannot come to its end any more; there is no public way to be called before.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # it registers first that pools end: what is registered last is called first
import sys
import threading
from collections.abc import Callable


def before_pools_end(function: Callable[[], object]) -> None:
    """Call a function when the main thread has ended, also with an error, while pools of threads still take work.

    What it raises, such as KeyboardInterrupt, goes to `sys.excepthook`: Python would leave out what else is to be done then.
    """

    def call() -> None:
        try:
            function()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)

    getattr(threading, "_register_atexit", atexit.register)(call)
