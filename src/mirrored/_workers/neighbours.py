"""Which workers of this host still run? Asked of the kernel, which knows at once. No jax here."""

from __future__ import annotations

import contextlib
import json
import os
import select
from pathlib import Path
from typing import NamedTuple

from .coordination import Coordination
from .messages import read

#: The namespaces of a process's number, and of the clock that says when it began.
_NAMESPACES = ("/proc/self/ns/pid", "/proc/self/ns/time")


class Process(NamedTuple):
    """A process, named so that no other is taken for it."""

    host: str  # the running kernel, and the namespaces of the number and the time; "" if the kernel does not tell
    number: int
    began: str  # because numbers are used again

    @classmethod
    def own(cls) -> Process:
        """Return this process."""
        try:
            _state_of(1)  # else /proc hides processes, and one that cannot be seen is not a dead one
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespaces = [os.stat(path).st_ino for path in _NAMESPACES if os.path.exists(path)]
            return cls(f"{boot} {namespaces}", os.getpid(), _state_of(os.getpid())[1])
        except (OSError, IndexError):
            return cls("", os.getpid(), "")

    @classmethod
    def decode(cls, text: str) -> Process | None:
        """Return the process in a text of another worker; None if there is none, or its host is unknown."""
        process = read(cls, text)
        if process is None or not process.host or process.number <= 0:
            return None
        return process

    def encode(self) -> str:
        """Return the text that `decode` takes."""
        return json.dumps(self)

    def is_dead(self) -> bool:
        """Tell whether it has ended; only for a process of this host."""
        try:
            state, began = _state_of(self.number)
        except FileNotFoundError:
            return True
        except (OSError, IndexError):  # unknown, so not known to be dead
            return False
        return state in "ZX" or began != self.began  # ended, and nobody has asked how yet; or another has its number


class Neighbours:
    """The other workers of this host."""

    def __init__(self, coordination: Coordination) -> None:
        self.own = Process.own()
        self._coordination = coordination
        self._key = f"guard/process/{self.own.host.replace(' ', '-') or 'unknown'}"
        self._num_meetings = 0
        self._found: dict[int, Process | None] = {}  # None: of another host
        self._handles: list[int] = []  # become readable when the process has ended
        self._woken, self._wakes = os.pipe()

    def introduce(self) -> None:
        """Publish this process, for the others of this host."""
        self._coordination.say(self._key, self.own.encode())

    def meet(self) -> None:
        """Note the other workers of this host, often at first and then rarely: some come late."""
        this = self._coordination
        self._num_meetings += 1
        if len(self._found) == this.num_workers - 1 or (self._num_meetings > 20 and self._num_meetings % 16):
            return
        for worker, text in this.by_worker(self._key).items():
            if worker != this.worker and worker not in self._found:
                self._found[worker] = self._near(Process.decode(text))

    def _near(self, process: Process | None) -> Process | None:
        """Return a process of this host, and listen for its end; None for one of another host."""
        if process is None or process.host != self.own.host:
            return None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # the process has ended, or too many files are open: `dead` sees its end later
                self._handles.append(os.pidfd_open(process.number))
        return process

    def near(self) -> set[int]:
        """Return the workers of this host."""
        return {worker for worker, process in self._found.items() if process is not None}

    def dead(self) -> tuple[int, ...]:
        """Return the workers of this host that have ended."""
        return tuple(worker for worker, process in sorted(dict(self._found).items()) if process is not None and process.is_dead())

    def await_death(self, seconds: float) -> None:
        """Wait until a worker of this host ends, if the kernel tells, or `wake` is called; each end is told once."""
        poll = select.poll()
        for handle in (self._woken, *self._handles):
            poll.register(handle, select.POLLIN)
        for handle, _ in poll.poll(1000 * seconds):
            if handle != self._woken:
                self._handles.remove(handle)
                os.close(handle)

    def wake(self) -> None:
        """End the waiting for a death, for ever."""
        os.write(self._wakes, b"1")

    def close(self) -> None:
        """Close the file descriptors; the last call."""
        for handle in (self._woken, self._wakes, *self._handles):
            os.close(handle)
        self._handles.clear()


def _state_of(number: int) -> tuple[str, str]:
    """Return the state of a process and when it began, in ticks since the boot."""
    fields = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
