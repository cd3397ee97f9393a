"""Two workers that do not reach each other are named, by what the kernel of one says of a connection that the other has too."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_service import FakeClient

from mirrored._workers import links
from mirrored._workers.coordination import Coordination
from mirrored._workers.links import LOST_SECONDS, STUCK_RETRIES, Connection, Links, connections

A, B, C = ("10.0.0.1:8080", "10.0.0.2:50000", "10.0.0.3:22")


class Job:
    """Workers whose connections are what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: list[list[Connection]]) -> None:
        client, self.of = FakeClient(), of
        self.links = [Links(Coordination(client, worker, 3)) for worker in range(3)]
        for text in ("", "1", "[[1, 2, 3]]", "[" * 100_000):  # what is no connection of another worker is left alone
            client.values[f"mirrored/guard/links/{9 + len(text)}"] = text
        self._patch = monkeypatch

    def look(self, worker: int, elapsed: float = 0.5) -> str:
        self._patch.setattr(links, "connections", lambda least=0: (one for one in self.of[worker] if one.retries >= least))
        verdict = self.links[worker].look(7, elapsed)
        return "" if verdict is None else str(verdict)


def test_the_two_ends_of_a_connection_without_an_answer_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of = [[Connection(C, A, 0)], [Connection(A, B, STUCK_RETRIES), Connection(A, C, 0)], [Connection(B, A, 0)]]
    job = Job(monkeypatch, of)
    for _ in range(int(LOST_SECONDS / 0.5)):
        assert [job.look(worker) for worker in (1, 2, 0)] == ["", "", ""]
    assert caplog.messages == ["what one of workers 1, 2 sends does not reach the other: the network between them is cut"]
    assert not job.look(1) and not job.look(0)
    assert job.look(2).startswith("lost the connection between workers 1, 2 at step 7: what one sends does not reach the other")


def test_what_arrives_again_or_is_only_slow_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(monkeypatch, [[], [Connection(A, B, STUCK_RETRIES - 1)], [Connection(B, A, 0)]])
    assert [job.look(worker, 100.0) for worker in (1, 2, 1, 2)] == [""] * 4 and not caplog.messages
    for retries in (STUCK_RETRIES, 0, STUCK_RETRIES):
        job.of[1] = [Connection(A, B, retries)]
        assert [job.look(worker, LOST_SECONDS - 1) for worker in (1, 2, 2)] == [""] * 3, retries
    assert len(caplog.messages) == 2


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    if not Path("/proc/self/fd").exists():
        pytest.skip("asks Linux")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def test_the_connections_of_this_process_are_those_that_its_sockets_have(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And asking leaves a socket, which is another library's, as it is."""
    one, other = (f"127.0.0.1:{end.getsockname()[1]}" for end in ends)
    num_open = len(os.listdir("/proc/self/fd"))
    socket.setdefaulttimeout(5.0)
    try:
        assert {Connection(one, other, 0), Connection(other, one, 0)} <= set(connections())
    finally:
        socket.setdefaulttimeout(None)
    assert all(end.getblocking() and os.get_blocking(end.fileno()) for end in ends)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert not [found for found in connections() if found.remote.endswith(":0")], "what listens is none"

    def say(state: int) -> Callable[..., bytes]:
        def getsockopt(asked: socket.socket, *_: int) -> bytes:
            if asked.family == socket.AF_UNIX:  # as of other tests in this process: no TCP
                raise OSError(95, "Operation not supported")
            return bytes((state, 0, 6))  # sent again six times

        return getsockopt

    monkeypatch.setattr(socket.socket, "getsockopt", say(1))  # established
    assert Connection(one, other, 6) in list(connections(6)) and not list(connections(7))
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "getsockopt", say(4))
        assert not list(connections()), "what is being closed is none"
    for host, shown in (("::ffff:127.0.0.1", "127.0.0.1"), ("fe80::1%eth0", "fe80::1")):
        monkeypatch.setattr(socket.socket, "getpeername", lambda _, host=host: (host, 22, 0, 0))
        assert Connection(one, f"{shown}:22", 6) in list(connections(6))


def test_where_the_kernel_says_nothing_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where this process has as many files open as it may, or the system has no such folder."""

    def refuse(folder: str) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(links.os, "listdir", refuse)
    assert list(links.connections()) == []
