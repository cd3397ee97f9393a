"""Does another process of this host still run? Asked of the kernel, which knows at once. No jax here."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

_MAX_TEXT = 200


@dataclasses.dataclass(frozen=True)
class Process:
    """Name a process so that no other is taken for it.

    Attributes:
        host: the kernel that runs, and the namespace in which the number holds; empty where the kernel does not say.
        number: its number there.
        began: when it began, because numbers are used again.
    """

    host: str
    number: int
    began: str

    @classmethod
    def own(cls) -> Process:
        """Return this process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(f"{boot} {os.stat('/proc/self/ns/pid').st_ino}", os.getpid(), _state_of(os.getpid())[1])
        except (OSError, IndexError):
            return cls("", os.getpid(), "")

    @classmethod
    def decode(cls, text: str) -> Process | None:
        """Return the process in a text of another worker, None when it is none, or its host is not known."""
        try:
            host, number, began = json.loads(text[:_MAX_TEXT])
        except (ValueError, TypeError, RecursionError):
            return None
        is_one = isinstance(host, str) and host and type(number) is int and number > 0 and isinstance(began, str)
        return cls(host, number, began) if is_one else None

    def encode(self) -> str:
        """Return it as what `decode` takes."""
        return json.dumps([self.host, self.number, self.began])

    def is_dead(self) -> bool:
        """Tell whether it has ended; only for a process of this host."""
        try:
            state, began = _state_of(self.number)
        except FileNotFoundError:
            return True
        except (OSError, IndexError):
            return False
        return state in "ZX" or began != self.began  # ended, and nobody has asked how yet; or another has its number


def _state_of(number: int) -> tuple[str, str]:
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
