"""Keeps spare processes (`_command/spare`), which have imported the workers' modules and wait for a restart."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from . import spare
from .keeper import tell

#: How long an attempt's workers may start and compile before the spare processes for the next attempt start.
DELAY_SECONDS = 10.0
#: How long a restart waits for spare processes that still import, and for one that does not read its environment.
READY_SECONDS = 1.0
Process = subprocess.Popen[bytes]


def start(command: Sequence[str], environment: Mapping[str, str], stdin: int, pass_fds: Sequence[int] = ()) -> Process:
    """Start a process with pipes in its own session: Ctrl-C reaches the launcher alone, which passes it on once."""
    streams = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, 0, env=environment, start_new_session=True, pass_fds=pass_fds, **streams)


class Standby:
    """The spare processes, which have imported modules `a,b`; none if no module is given."""

    def __init__(self, modules: str, command: Sequence[str]) -> None:
        self._has_modules = bool(modules)
        self._arguments = [sys.executable, "-u", spare.__file__, modules, *command]
        self._waiting: list[tuple[Process, socket.socket]] = []  # in the order of the workers

    def prepare(self, environments: Sequence[Mapping[str, str]], enrol: Sequence[str], keeper: int) -> None:
        """Start a spare process in each environment, to import the modules there; `enrol` tells the keeper about it."""
        for environment in environments if self._has_modules else ():
            own, other = socket.socketpair()
            with other:
                process = start([*enrol, *self._arguments], environment, other.fileno(), pass_fds=(keeper,))
            self._waiting.append((process, own))

    def take(self, environment: Mapping[str, str], keeper: int, until: float) -> Process | None:
        """Turn the next spare process into a worker that the keeper knows; return it, or None if it is not ready in time."""
        if not self._waiting:
            return None
        process, connection = self._waiting.pop(0)
        tell(keeper, "+", process.pid)
        with connection, contextlib.suppress(OSError):  # it has ended, or the time is over
            connection.settimeout(max(0.0, until - time.monotonic()))
            if connection.recv(1):
                connection.settimeout(READY_SECONDS)
                connection.sendall(json.dumps(dict(environment)).encode() + b"\n")
                return process
        _kill(process)  # if importing failed, a worker will show the error
        tell(keeper, "-", process.pid)
        return None

    def close(self) -> None:
        """Kill the spare processes."""
        while self._waiting:
            process, connection = self._waiting.pop()
            with connection:
                _kill(process)


def _kill(process: Process) -> None:
    with process, contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with its children
