"""Which signals end the launcher, and how its loop hears of them and of the ends of workers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Any

from .._errors import NOTICE_SECONDS


class Signals:
    """The signals that end the launcher. They wake its loop, and so does the end of a worker."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}
        self._notice_ends = 0.0

    def __enter__(self) -> Signals:
        self.wakeup, self._write = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a job in the background
                self._before[number] = signal.signal(number, self._receive)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.wakeup)
        os.close(self._write)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            if time.monotonic() < self._notice_ends:
                return
            self._notice_ends = time.monotonic() + NOTICE_SECONDS
        self.received.append(number)

    def drain(self) -> None:
        """Forget what woke the loop."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wakeup, 4096):
                pass
