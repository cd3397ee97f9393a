"""Listens to XLA's compilations: JAX reports each by an event, whose name it does not promise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

#: JAX reports it even if it finds the program in its cache on disk.
_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def heard(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` with JAX's name of each program that XLA compiles, in the thread of the call that needs the program."""

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        if event == _EVENT:
            tell(str(about.get("fun_name", "?")).removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        with contextlib.suppress(AssertionError, ValueError):  # somebody has removed all listeners
            jax.monitoring.unregister_event_duration_listener(listen)
