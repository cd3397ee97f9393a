"""Ends the workers when the launcher was killed: a process that outlives it.

Run as a file, in Python's isolated mode: it starts in 15 ms and ignores the user's environment (docs/launch.md).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def enrol(keeper: int, command: list[str]) -> None:
    """Tell the keeper the number of this process, and become the worker."""
    os.write(keeper, b"+%d\n" % os.getpid())
    os.close(keeper)
    os.execv(command[0], command)


def keep(folder: str) -> None:
    """Wait until all writers of the pipe are gone, and end the process groups that are still enrolled."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        keep(sys.argv[2])
    else:
        enrol(int(sys.argv[2]), sys.argv[3:])
