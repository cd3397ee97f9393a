"""When XLA compiles a program: JAX says so by an event, whose name it does not promise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

#: Also when the program is found in JAX's cache on disk.
_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def heard(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` with JAX's name of each program that XLA compiles, in the thread and inside the call that needs it."""

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        if event == _EVENT:
            tell(str(about.get("fun_name", "?")).removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        with contextlib.suppress(AssertionError, ValueError):  # somebody has cleared all listeners
            jax.monitoring.unregister_event_duration_listener(listen)
