"""Waits, for the launcher, for signals, the ends of workers, and their output."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from .._errors import NOTICE_SECONDS
from .output import Outlet


class Signals:
    """The signals that end the launcher, and those for the workers. Each wakes its loop, as does a worker's end."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.of_workers: list[int] = []
        self._before: dict[int, Any] = {}
        self._notice_ends = 0.0

    def __enter__(self) -> Signals:
        self._wakeup, self._write = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job, ignores it
                self._before[number] = signal.signal(number, self._receive)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._wakeup)
        os.close(self._write)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self.of_workers.append(number)
            return
        if number == signal.SIGTERM:
            if time.monotonic() < self._notice_ends:
                return
            self._notice_ends = time.monotonic() + NOTICE_SECONDS
        self.received.append(number)

    def wait(self, outlets: Iterable[Outlet], pipes: Iterable[int], seconds: float | None) -> bool:
        """Wait for a signal, a worker's end, data in a pipe or a ready outlet; write to ready outlets, tell if there are any."""
        poll = select.poll()
        for pipe in (self._wakeup, *pipes):
            poll.register(pipe, select.POLLIN)
        waiting = {outlet for outlet in outlets if outlet.is_waiting}
        for outlet in waiting:
            poll.register(outlet.fd, select.POLLOUT)
        milliseconds = None if seconds is None else max(0, int(seconds * 1000) + 1)  # rounded up: then the deadline has passed
        found = {fd for fd, _ in poll.poll(milliseconds)}
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup, 4096):
                pass
        ready = [outlet for outlet in waiting if outlet.fd in found]
        for outlet in ready:
            outlet.flush()
        return bool(ready)
