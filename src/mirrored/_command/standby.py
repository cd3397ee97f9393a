"""Keeps processes that have imported the workers' modules, and wait for a restart. Run as a file, not forked: docs/launch.md."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

#: The workers of an attempt get so long to start and compile before the processes for the next one are started.
DELAY_SECONDS = 10.0
Process = subprocess.Popen[bytes]


def start(command: Sequence[str], environment: Mapping[str, str], stdin: int, pass_fds: Sequence[int] = ()) -> Process:
    """Start a process with pipes in its own session: Ctrl-C reaches the launcher alone, which passes it on once."""
    streams = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, 0, env=environment, start_new_session=True, pass_fds=pass_fds, **streams)


class Standby:
    """The waiting processes, which have imported modules `a,b`; none where no module is given."""

    def __init__(self, modules: str, command: Sequence[str]) -> None:
        self._has_modules = bool(modules)
        self._arguments = [sys.executable, "-u", __file__, modules, *command]
        self._waiting: list[Process] = []  # in the order of the workers

    def prepare(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start a process for each environment, which imports the modules there."""
        for environment in environments if self._has_modules else ():
            self._waiting.append(start(self._arguments, environment, subprocess.PIPE))

    def take(self, environment: Mapping[str, str], keeper: int) -> Process | None:
        """Make the next waiting process a worker, known to the keeper, and return it; None if none waits."""
        if not self._waiting:
            return None
        process = self._waiting.pop(0)
        assert process.stdin is not None
        os.write(keeper, b"+%d\n" % process.pid)
        turn = json.dumps(dict(environment)).encode() + b"\n"
        try:
            with process.stdin as pipe:
                while turn:  # a signal may interrupt a write that is longer than the pipe
                    turn = turn[pipe.write(turn) :]
        except BrokenPipeError:  # it could not import its modules; a worker will show the error
            os.write(keeper, b"-%d\n" % process.pid)
            with process:
                return None
        return process

    def close(self) -> None:
        """End the waiting processes."""
        while self._waiting:
            process = self._waiting.pop()
            with process, contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children


def wait(modules: Sequence[str], command: list[str]) -> None:
    """Import modules, wait for an environment, and become the worker; end when the launcher is gone."""
    is_module = command[0] == "-m"
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    for module in modules:
        # `mirrored` itself loads nothing until the first public name is asked for.
        importlib.import_module("mirrored._public" if module == "mirrored" else module)
    turn = sys.stdin.buffer.readline()
    if not turn:
        os.killpg(0, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(json.loads(turn))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.argv = command[1:] if is_module else command
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # stays, for threads and functions of atexit
    if is_module:  # as `runpy` runs it, whose `__main__` does not stay
        spec: Any = importlib.util.find_spec(command[1])
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{command[1]}.__main__")
        main.__spec__, main.__package__, main.__loader__ = spec, spec.parent, spec.loader
        main.__file__ = sys.argv[0] = spec.origin
        code = spec.loader.get_code(spec.name)
    else:
        main.__file__ = os.path.abspath(command[0])
        with open(main.__file__, "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
    exec(code, vars(main))  # noqa: S102


if __name__ == "__main__":
    wait(sys.argv[1].split(","), sys.argv[2:])
