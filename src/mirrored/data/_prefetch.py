"""Items made ahead: a generator runs in a thread while the last item is in use."""

from __future__ import annotations

import atexit
import collections
import contextvars
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

import jax

T = TypeVar("T")

#: So long closing waits for a thread that is inside the user's pipeline; the thread ends when the pipeline returns.
MAX_WAIT_SECONDS = 5.0


class Ahead(Generic[T]):
    """An iterator over a generator that runs in a thread, at most `count` items ahead; an exception comes after its items."""

    def __init__(
        self, owner: object, items: Generator[T, None, None], close: Callable[[], None], count: int, interrupt: Callable[[], None]
    ) -> None:
        """Start the thread, which calls `close` once at its end; `interrupt`, in any thread, ends waiting for other workers."""
        self._count = count
        self._interrupt = interrupt
        self._changed = threading.Condition()  # its lock is reentrant: garbage collection can call `close` at any line
        self._ready: collections.deque[T] = collections.deque()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._is_finished = False
        context, is_x64 = contextvars.copy_context(), jax.config.jax_enable_x64  # pyrefly: ignore[missing-attribute]

        def work() -> None:
            with jax.enable_x64(is_x64):
                context.run(self._fill, items, close)

        self._thread = threading.Thread(target=work, name="mirrored input", daemon=True)
        atexit.register(self.close)  # before JAX ends its backends: exit functions run in reverse, and JAX's is there by now
        # The thread does not know the owner, so that a loop which is left early leaves garbage, which ends the thread.
        self._finalizer = weakref.finalize(owner, self.close)
        self._thread.start()

    def _fill(self, items: Generator[T, None, None], close: Callable[[], None]) -> None:
        """Put in items, in the thread, until there are no more or the queue is closed."""
        failure: BaseException | None = None
        try:
            while self._wait_for_room():
                item = next(items)
                with self._changed:
                    if not self._is_closed:
                        self._ready.append(item)
                        self._changed.notify_all()
                del item  # else it would be alive until the next one is made
        except StopIteration:
            pass
        except BaseException as error:  # the loop that waits for the next batch must get any
            failure = error
        try:
            items.close()
            close()
        except BaseException as error:
            failure = failure or error
        with self._changed:
            self._is_finished = True
            self._failure = None if self._is_closed else failure
            self._changed.notify_all()
        del failure  # it holds this frame

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
            del failure  # a frame that held it would keep itself, and the batches in it, until the next collection

    def close(self) -> None:
        """End the thread, and drop the items that are ready."""
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
