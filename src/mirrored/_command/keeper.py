"""Who ends the workers when the launcher itself was killed and can end nothing: a process that outlives it.

Run as a file, in Python's isolated mode, so that it starts in 15 ms and sees nothing of the user's environment: docs/launch.md.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def enrol(keeper: int, command: list[str]) -> None:
    """Make this process known to the keeper, which waits while somebody holds the pipe, and then become the worker."""
    os.write(keeper, b"+%d\n" % os.getpid())
    os.close(keeper)
    os.execv(command[0], command)


def keep(folder: str) -> None:
    """Wait until nobody holds the pipe any more, and end the process groups that are still enrolled."""
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
