"""Whose turn it is to write variables: steps and assignments of several threads take turns, and readers hardly wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._errors import ContextError

#: Held while a program that takes arrays over is started, and while somebody looks where arrays are. Nobody who holds it waits
#: for a device: a program on it may have a host callback, which may want to read a variable.
lock = threading.RLock()
_changed = threading.Condition(lock)


class Claim(NamedTuple):
    """Slots of variables that a thread is about to write, without the lock: their old arrays stay readable."""

    thread: int
    slots: frozenset[Any]
    calls_host: bool  # the thread waits for a program with a host callback

    def stops(self, slots: frozenset[Any]) -> bool:
        """Tell whether the current thread has to wait before it writes some slots."""
        is_own = self.thread == threading.get_ident() and not self.calls_host
        return not is_own and not self.slots.isdisjoint(slots)


#: Those that there are; hardly ever one.
claims: dict[object, Claim] = {}


@contextlib.contextmanager
def claimed(slots: Sequence[Any], calls_host: bool = False) -> Iterator[None]:
    """Let nobody else write some variables inside this block, which may take its time."""
    token = object()
    try:
        with lock:
            wait_for(slots)
            claims[token] = Claim(threading.get_ident(), frozenset(slots), calls_host)
        yield
    finally:
        claims.pop(token, None)
        with lock:
            _changed.notify_all()


def wait_for(slots: Sequence[Any]) -> None:
    """Wait, with the lock, until nobody has claimed any of these."""
    wanted = frozenset(slots)
    while claim := next((claim for claim in claims.values() if claim.stops(wanted)), None):
        # JAX calls a callback in the thread that waits for it, or in one that Python did not start.
        is_in_callback = claim.thread == threading.get_ident() or threading.current_thread().name.startswith("Dummy-")
        if claim.calls_host and is_in_callback:
            names = ", ".join(sorted(repr(slot.name) for slot in claim.slots & wanted))
            raise ContextError(
                f"a host callback writes {names}, which the step that it belongs to writes too: each would wait for the other. "
                "Return the new value from the callback, and assign it in the step."
            )
        _changed.wait()
