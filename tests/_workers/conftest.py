"""What several tests of workers need."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mirrored._workers.neighbours import Process


class Child(subprocess.Popen):
    """Another process of this host, with the name under which a worker would introduce itself."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        self.process = Process(Process.own().host, self.pid, fields[19])

    def die(self) -> None:
        self.kill()
        self.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    if not sys.platform.startswith("linux"):
        pytest.skip("asks Linux")
    with Child() as started:
        yield started
        started.die()
