"""Whether another process of this host runs is known at once, and never wrongly."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mirrored._workers.neighbours import Neighbours, Process

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


def test_a_text_that_is_too_long_is_not_read() -> None:
    assert Process.decode(json.dumps(["h" * 300, 1, "2"])) is None


def test_it_is_told_to_others_as_it_is() -> None:
    own = Process.own()
    assert Process.decode(own.encode()) == own
    assert json.loads(own.encode())[1] == os.getpid()


def test_where_processes_are_hidden_none_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(number: int) -> tuple[str, str]:
        raise FileNotFoundError

    child, process = start()
    child.kill()
    child.communicate()
    with monkeypatch.context() as patch:
        patch.setattr("mirrored._workers.neighbours._state_of", hidden)
        neighbours = Neighbours(0, 2)
    neighbours.meet({1: process.encode()})
    assert neighbours.are_known and neighbours.dead() == ()


def test_neighbours_are_the_other_workers_of_this_host() -> None:
    child, process = start()
    neighbours = Neighbours(0, 4)
    far = Process("another host", 1, "1")
    try:
        neighbours.meet({1: process.encode(), 7: process.encode(), 0: process.encode()})
        assert not neighbours.are_known and neighbours.dead() == ()
        neighbours.meet({2: far.encode(), 3: "garbage"})
        assert neighbours.are_known and neighbours.dead() == ()
    finally:
        child.kill()
        child.communicate()
    assert neighbours.dead() == (1,)
    neighbours.meet({1: far.encode(), 2: "garbage"})
    assert neighbours.dead() == (1,), "the first introduction counts"
