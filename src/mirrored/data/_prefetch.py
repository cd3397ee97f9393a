"""Makes items ahead: a generator runs in a thread while the program uses the last item."""

from __future__ import annotations

import atexit
import collections
import contextvars
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

import jax

from .._process import Lock

T = TypeVar("T")

#: How long `close` waits for a thread inside the user's pipeline; a slower thread ends when the pipeline returns.
MAX_WAIT_SECONDS = 5.0


class Ahead(Generic[T]):
    """An iterator over a generator that runs in a thread, at most `count` items ahead; its exception comes after its items."""

    def __init__(
        self, owner: object, items: Generator[T, None, None], close: Callable[[], None], count: int, interrupt: Callable[[], None]
    ) -> None:
        """Start the thread. It calls `close` at its end; `interrupt`, called by any thread, ends its wait for other workers."""
        self._count = count
        self._interrupt = interrupt
        self._changed = threading.Condition(Lock())  # which is reentrant: garbage collection can call `close` at any line
        self._ready: collections.deque[T] = collections.deque()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._is_finished = False
        context, is_x64 = contextvars.copy_context(), jax.config.jax_enable_x64  # pyrefly: ignore[missing-attribute]

        def work() -> None:
            with jax.enable_x64(is_x64):
                context.run(self._fill, items, close)

        self._thread = threading.Thread(target=work, name="mirrored input", daemon=True)
        atexit.register(self.close)  # to run before JAX ends its backends: exit functions run in reverse order
        # The thread does not hold the owner: when the program leaves a loop early, the owner is collected, which ends the thread.
        self._finalizer = weakref.finalize(owner, self.close)
        self._thread.start()

    def _fill(self, items: Generator[T, None, None], close: Callable[[], None]) -> None:
        """Fill the queue, in the thread, until there are no more items or the queue is closed."""
        failure: BaseException | None = None
        try:
            while self._wait_for_room():
                item = next(items)
                with self._changed:
                    if not self._is_closed:
                        self._ready.append(item)
                        self._changed.notify_all()
                del item  # else it would live until the next item is made
        except StopIteration:
            pass
        except BaseException as error:  # any kind: the loop that waits for the next item must get it
            failure = error
        try:
            items.close()
            close()
        except BaseException as error:  # the first error is the one to raise
            failure = failure or error
        with self._changed:
            self._is_finished = True
            self._failure = None if self._is_closed else failure
            self._changed.notify_all()
        del failure  # its traceback holds this frame

    def _wait_for_room(self) -> bool:
        """Wait until another item may be made; return False when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._count or self._is_closed)
            return not self._is_closed

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_finished or self._is_closed)
            if self._ready and not self._is_closed:
                self._changed.notify_all()
                return self._ready.popleft()
            failure, self._failure = self._failure, None
        self.close()
        try:
            raise StopIteration if failure is None else failure
        finally:
            del failure  # else frame and exception would hold each other, and batches, until the next collection

    def close(self) -> None:
        """End the thread, and drop the items that nobody has taken."""
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._failure = None
            self._changed.notify_all()
        self._finalizer.detach()
        self._interrupt()
        if self._thread is not threading.current_thread():
            self._thread.join(MAX_WAIT_SECONDS)
            if not self._thread.is_alive():
                atexit.unregister(self.close)
