"""Programs in processes of their own that need not import everything anew: each is a fork of one process that has.

That process has imported and done nothing more, so it has no threads of Python and no devices, and a fork of it runs and ends as
`python -c` does.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SERVER = """
import json, os, sys, warnings
import mirrored, orbax.checkpoint
for line in sys.stdin:
    code, sys.argv[1:], folder = json.loads(line)
    with warnings.catch_warnings(action="ignore"):  # JAX warns of forks: it may have threads
        child = os.fork()
    if not child:
        for descriptor, name in enumerate((os.devnull, folder + "/out", folder + "/err")):
            os.dup2(os.open(name, os.O_RDWR), descriptor)
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
del line, child, descriptor, name, folder
exec(code)
"""


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    atexit.register(server.communicate)  # the end of its input ends it
    return server


class Program:
    """A program that was started: its process, and what it has written so far."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder, self.pid, self._code = folder, pid, None

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text()

    def wait_for(self, text: str) -> None:
        """Wait until it has written a text."""
        deadline = time.monotonic() + 60
        while text not in self.out:
            assert time.monotonic() < deadline and not self._has_ended(0), (self.out, self.err)
            time.sleep(0.01)

    def wait(self, seconds: float = 100) -> int:
        """Return its exit code, negative for a signal."""
        assert self._has_ended(seconds), f"it runs for more than {seconds} s: {self.out}{self.err}"
        return self._code

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def _has_ended(self, seconds: float) -> bool:
        if self._code is None and select.select([_server().stdout], [], [], seconds)[0]:
            self._code = int(_server().stdout.readline())
        return self._code is not None


@contextlib.contextmanager
def started(code: str, *arguments: object) -> Iterator[Program]:
    """Start a program; it is killed when it runs still at the end of the `with` block. One at a time."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("out", "err"):
            Path(folder, name).touch()
        _server().stdin.write(json.dumps([code, [str(a) for a in arguments], folder]).encode() + b"\n")
        program = Program(Path(folder), int(_server().stdout.readline()))
        try:
            yield program
        finally:
            if not program._has_ended(0):
                program.send(signal.SIGKILL)
                program.wait()


def ended(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    with started(code, *arguments) as program:
        return subprocess.CompletedProcess(arguments, program.wait(), program.out, program.err)
