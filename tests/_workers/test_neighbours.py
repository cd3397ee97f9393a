"""Whether another process of this host runs is known at once, and never wrongly."""

import json
import os
import signal
from pathlib import Path

import pytest
from fake_service import FakeClient

from mirrored._workers.coordination import Coordination
from mirrored._workers.neighbours import Neighbours, Process


def test_a_process_is_dead_when_it_has_ended_and_no_other_is_taken_for_it(child) -> None:
    own = Process.own()
    assert not child.process.is_dead() and not own.is_dead()
    assert Process(own.host, own.number, "1").is_dead(), "another has its number"
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert not child.process.is_dead(), "it is only stopped"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.process.is_dead(), "a zombie"
    child.wait()
    assert child.process.is_dead()


def test_what_is_no_process_is_none() -> None:
    wrong = ["", "[]", "{}", "3", '["", 1, "2"]', '["h", true, "2"]', '["h", -1, "2"]', '["h", 1, 2]', "[" * 9999]
    assert [text for text in wrong if Process.decode(text)] == []
    own = Process.own()
    assert Process.decode(own.encode()) == own and json.loads(own.encode())[1] == os.getpid()


def test_a_process_of_another_time_namespace_is_on_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock since the boot is another, so when it began says nothing here."""
    own = Process.own()
    asked = os.stat
    shifted = lambda path, **more: asked("/proc/self/ns/pid" if path == "/proc/self/ns/time" else path, **more)  # noqa: E731
    monkeypatch.setattr(os, "stat", shifted)
    other = Process.own()
    assert other.host != own.host and other.host.split()[0] == own.host.split()[0]


def meeting(num_workers: int) -> tuple[Neighbours, dict[str, str]]:
    """Return the neighbours of worker 0, and the entries of those that introduce themselves."""
    client = FakeClient()
    neighbours = Neighbours(Coordination(client, 0, num_workers))
    neighbours.introduce()
    return neighbours, client.values


def introduce(entries: dict[str, str], texts: dict[int, str]) -> None:
    [own] = [key for key in entries if key.endswith("/0")]
    entries.update({own[:-1] + str(worker): text for worker, text in texts.items()})


def test_where_processes_are_hidden_none_is_taken_for_dead(child, monkeypatch: pytest.MonkeyPatch) -> None:
    child.die()
    read = Path.read_text
    gone = lambda path, **more: read(Path("/gone") if path == Path("/proc/1/stat") else path, **more)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", gone)
        neighbours, entries = meeting(2)
    introduce(entries, {1: child.process.encode()})
    neighbours.meet()
    assert neighbours.dead() == ()


def test_neighbours_are_the_other_workers_of_this_host(child) -> None:
    neighbours, entries = meeting(4)
    far = Process("another host", 1, "1").encode()
    introduce(entries, {1: child.process.encode(), 7: child.process.encode()})
    neighbours.meet()
    introduce(entries, {2: far, 3: "garbage"})
    neighbours.meet()
    assert neighbours.dead() == () and neighbours.near() == {1}
    child.die()
    assert neighbours.dead() == (1,)
    introduce(entries, {1: far, 2: child.process.encode()})
    neighbours.meet()
    assert neighbours.dead() == (1,), "the first introduction counts"
