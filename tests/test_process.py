"""Whether another process of this host runs is known at once, and never wrongly."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mirrored._process import Process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")


def start() -> tuple[subprocess.Popen, Process]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = Process.own()
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    return child, Process(own.host, child.pid, fields[19])


def test_a_process_that_runs_or_is_stopped_is_not_dead() -> None:
    child, process = start()
    try:
        assert not process.is_dead() and not Process.own().is_dead()
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert not process.is_dead()
    finally:
        child.kill()
        child.communicate()


def test_one_that_was_killed_is_dead_before_and_after_it_is_waited_for() -> None:
    child, process = start()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.is_dead(), "a zombie"
    child.communicate()
    assert process.is_dead()


def test_another_that_has_the_number_is_not_taken_for_it() -> None:
    own = Process.own()
    assert Process(own.host, own.number, "1").is_dead()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "3", '["", 1, "2"]', '["h", true, "2"]', '["h", -1, "2"]', '["h", 1, 2]', "[" * 9999]
)
def test_what_is_no_process_is_none(text: str) -> None:
    assert Process.decode(text) is None


def test_it_is_told_to_others_as_it_is() -> None:
    own = Process.own()
    assert Process.decode(own.encode()) == own
    assert json.loads(own.encode())[1] == os.getpid()
