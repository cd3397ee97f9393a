"""The keeper: a process that outlives a killed launcher, and ends its workers.

It runs as a file, in Python's isolated mode: so it starts in 15 ms and ignores the user's environment (docs/launch.md).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

#: How long trackers have to remove the shared memory of the other processes of their groups.
TRACKER_SECONDS = 1.0
#: A part of the command line of a tracker, multiprocessing's or joblib's.
_TRACKER = b"resource_tracker import main"


def tell(keeper: int, sign: str, pid: int) -> None:
    """Tell the keeper to remember ("+") or forget ("-") a process group; do nothing if it is gone or does not read."""
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(keeper, f"{sign}{pid}\n".encode())


def enrol(keeper: int, command: list[str]) -> None:
    """Tell the keeper this process's number, and become the worker."""
    tell(keeper, "+", os.getpid())
    os.close(keeper)
    os.execv(command[0], command)


def keep(folder: str) -> None:
    """Wait until all writers to the pipe are gone, then kill the process groups that are still enrolled."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        change = groups.add if line.startswith(b"+") else groups.discard
        change(int(line[1:]))
    until = time.monotonic() + TRACKER_SECONDS
    while kill_but_trackers(groups) and time.monotonic() < until:
        time.sleep(0.02)
    for group in groups:
        kill(group)
    shutil.rmtree(folder, ignore_errors=True)


def kill(group: int) -> None:
    """Kill a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or belongs to another user
        os.killpg(group, signal.SIGKILL)


def kill_but_trackers(groups: set[int]) -> bool:
    """Kill process groups except resource trackers; tell whether there are trackers: they remove shared memory and semaphores."""
    found = False
    names = os.listdir("/proc") if os.path.isdir("/proc") else ()
    for pid in map(int, filter(str.isdecimal, names)):
        stat = _read(pid, "stat").rpartition(b") ")[2].split()  # state, parent, group ...
        if not stat or int(stat[2]) not in groups:
            continue
        if _TRACKER in _read(pid, "cmdline"):
            found = True
        else:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return found


def _read(pid: int, file: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{file}", "rb") as opened:
            return opened.read()
    except OSError:  # the process has ended
        return b""


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        keep(sys.argv[2])
    else:
        enrol(int(sys.argv[2]), sys.argv[3:])
