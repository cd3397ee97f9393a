"""Every environment variable that the library reads or sets, in one table. No jax here."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class EnvironmentVariable:
    """Describe one environment variable: its name, and what the library does with it."""

    name: str
    use: str

    def get(self) -> str | None:
        return os.environ.get(self.name)

    def get_int(self) -> int:
        """Return the value as an int, 0 when it is unset or no number."""
        text = self.get() or ""
        return int(text) if text.isdecimal() else 0


CPU_THREADS = EnvironmentVariable(
    "PJRT_NPROC",
    "XLA sizes its CPU thread pools with it when the backend starts. Raised for that moment only, never lowered: "
    "docs/design/cpu-rendezvous.md.",
)
CPU_THREADS_FALLBACK = EnvironmentVariable("NPROC", "What XLA reads when PJRT_NPROC is unset; respected, never set.")
XLA_FLAGS = EnvironmentVariable(
    "XLA_FLAGS", "Read, never set: --xla_force_host_platform_device_count says how many CPU devices there will be."
)
TF_CONFIG = EnvironmentVariable("TF_CONFIG", "MirroredStrategy is for one machine and ignores it; the log says so.")

TABLE = (CPU_THREADS, CPU_THREADS_FALLBACK, XLA_FLAGS, TF_CONFIG)


def forced_host_devices() -> int:
    """Return the number of CPU devices that `XLA_FLAGS` asks for, 0 when it does not say."""
    counts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", XLA_FLAGS.get() or "")
    return int(counts[-1]) if counts else 0


@contextlib.contextmanager
def at_least(variable: EnvironmentVariable, minimum: int, fallback: EnvironmentVariable) -> Iterator[None]:
    """Raise a number in the environment to `minimum` for the duration of a block."""
    before = variable.get()
    os.environ[variable.name] = str(max(minimum, variable.get_int() or fallback.get_int()))
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable.name]
        else:
            os.environ[variable.name] = before
