"""Which processes of this host still run? Asked of the kernel, which knows at once. No jax here."""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .messages import parse, read

_MAX_TEXT = 200


class Process(NamedTuple):
    """A process, named so that no other is taken for it."""

    host: str  # the kernel that runs, and the namespace in which the number holds; empty where the kernel does not say
    number: int
    began: str  # because numbers are used again

    @classmethod
    def own(cls) -> Process:
        """Return this process."""
        try:
            _state_of(1)  # else /proc hides processes, and one that cannot be seen is not a dead one
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(f"{boot} {os.stat('/proc/self/ns/pid').st_ino}", os.getpid(), _state_of(os.getpid())[1])
        except (OSError, IndexError):
            return cls("", os.getpid(), "")

    @classmethod
    def decode(cls, text: str) -> Process | None:
        """Return the process in a text of another worker, None when it is none, or its host is not known."""
        process = read(cls, parse(text, _MAX_TEXT))
        return process if process and process.host and process.number > 0 else None

    def encode(self) -> str:
        """Return it as what `decode` takes."""
        return json.dumps(self)

    def is_dead(self) -> bool:
        """Tell whether it has ended; only for a process of this host."""
        try:
            state, began = _state_of(self.number)
        except FileNotFoundError:
            return True
        except (OSError, IndexError):
            return False
        return state in "ZX" or began != self.began  # ended, and nobody has asked how yet; or another has its number


class Neighbours:
    """The workers of this host other than `worker`, of `num_workers` on all hosts."""

    def __init__(self, worker: int, num_workers: int) -> None:
        self.own = Process.own()
        self._worker, self._num_workers = worker, num_workers
        self._found: dict[int, Process | None] = {}  # None: of another host
        self._handles: list[int] = []  # become readable when the process has ended
        self._woken, self._wakes = os.pipe()

    @property
    def host(self) -> str:
        """The name of this host, as part of a key."""
        return self.own.host.replace(" ", "-") or "unknown"

    @property
    def are_known(self) -> bool:
        """Whether all workers have been met."""
        return len(self._found) == self._num_workers - 1

    def meet(self, texts: Mapping[int, str]) -> None:
        """Take note of workers that introduce themselves."""
        for worker in texts.keys() - self._found.keys() - {self._worker}:
            if worker < self._num_workers:
                process = Process.decode(texts[worker])
                is_near = process is not None and process.host == self.own.host
                if process is not None and is_near and hasattr(os, "pidfd_open"):
                    with contextlib.suppress(OSError):  # it has ended, or too many files are open: `dead` sees it later
                        self._handles.append(os.pidfd_open(process.number))
                self._found[worker] = process if is_near else None

    def near(self) -> set[int]:
        """Return those of this host."""
        return {worker for worker, process in self._found.items() if process is not None}

    def dead(self) -> tuple[int, ...]:
        """Return those of this host that have ended."""
        return tuple(worker for worker, process in sorted(dict(self._found).items()) if process is not None and process.is_dead())

    def await_death(self, seconds: float) -> bool:
        """Wait for a death among those of this host, or `wake`, and tell whether there was one; each is told once, at once."""
        poll = select.poll()
        for handle in (self._woken, *self._handles):
            poll.register(handle, select.POLLIN)
        ended = {handle for handle, _ in poll.poll(1000 * seconds)} - {self._woken}
        for handle in ended:
            self._handles.remove(handle)
            os.close(handle)
        return bool(ended)

    def forget(self) -> None:
        """Take nobody for dead any more: the job is over, and the others may go."""
        self._found.clear()

    def wake(self) -> None:
        """End the waiting for a death, for ever."""
        os.write(self._wakes, b"1")

    def close(self) -> None:
        """Give back what the kernel lent; after this, nothing may be asked."""
        for handle in (self._woken, self._wakes, *self._handles):
            os.close(handle)
        self._handles.clear()


def _state_of(number: int) -> tuple[str, str]:
    fields = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
