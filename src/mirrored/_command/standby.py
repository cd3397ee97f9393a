"""Processes that have imported what the workers import, and wait until a restart needs them: `mirrored launch --standby`.

Not forked, so that they have no locks of threads that are not theirs, and are children of the launcher as other workers are.
This file is run by the workers' Python: what it imports before its turn is of the standard library, and the user's modules.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence

#: So long the workers of an attempt start and compile before the processes for the next one are started.
DELAY_SECONDS = 10.0
Process = subprocess.Popen[bytes]


def start(command: Sequence[str], environment: Mapping[str, str], stdin: int, pass_fds: Sequence[int] = ()) -> Process:
    """Start a process whose output comes through pipes."""
    pipe = subprocess.PIPE
    # In a session of its own: the terminal's Ctrl-C comes to the launcher only, which passes it on once.
    return subprocess.Popen(
        command, 0, env=environment, stdin=stdin, stdout=pipe, stderr=pipe, start_new_session=True, pass_fds=pass_fds
    )


class Standby:
    """The processes that wait, and have imported modules `a,b`; without any, none waits."""

    def __init__(self, modules: str, command: Sequence[str]) -> None:
        self._has_modules = bool(modules)
        self._arguments = [sys.executable, "-u", __file__, modules, *command]
        self._waiting: dict[int, Process] = {}

    def prepare(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start what is missing: a process for each environment, in which its modules are imported."""
        for place, environment in enumerate(environments):
            if self._has_modules and place not in self._waiting:
                self._waiting[place] = start(self._arguments, environment, subprocess.PIPE)

    def take(self, place: int, environment: Mapping[str, str], keeper: int) -> Process | None:
        """Let a process become the worker of an environment, known to the keeper; None if none waits."""
        process = self._waiting.pop(place, None)
        if process is None:
            return None
        if process.poll() is not None:  # its modules cannot be imported; a worker says so itself
            with process:
                return None
        assert process.stdin is not None
        os.write(keeper, b"+%d\n" % process.pid)
        process.stdin.write(json.dumps(dict(environment)).encode() + b"\n")
        process.stdin.close()
        return process

    def close(self) -> None:
        """End all that still wait."""
        while self._waiting:
            _, process = self._waiting.popitem()
            with process:
                process.kill()


def wait(modules: Sequence[str], command: list[str]) -> None:
    """Import modules, wait for an environment, and become the worker; leave when the launcher is gone."""
    is_module = command[0] == "-m"
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    for module in modules:
        # `mirrored` itself loads nothing until the first public name is asked for.
        importlib.import_module("mirrored._public" if module == "mirrored" else module)
    turn = sys.stdin.buffer.readline()
    if not turn:
        os._exit(0)
    os.environ.clear()
    os.environ.update(json.loads(turn))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.argv = command[1:] if is_module else command
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    wait(sys.argv[1].split(","), sys.argv[2:])
