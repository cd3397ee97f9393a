"""Two workers that do not reach each other are named, by what the kernel of one says of a connection that the other has too."""

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_service import FakeClient

from mirrored._workers import links
from mirrored._workers.coordination import Coordination
from mirrored._workers.links import (
    ESTABLISHED,
    LISTENING,
    LOST_SECONDS,
    STUCK_RETRIES,
    UNANSWERED,
    UNANSWERED_RETRIES,
    Connection,
    Links,
    connections,
    unanswered_ends,
)  # fmt: skip

Patch, Log = pytest.MonkeyPatch, pytest.LogCaptureFixture
A, B, C = ("10.0.0.1:8080", "10.0.0.2:50000", "10.0.0.3:22")


class Job:
    """Workers whose connections are what the test says."""

    def __init__(self, monkeypatch: Patch, of: list[list[Connection]]) -> None:
        self.client, self.of = FakeClient(), of
        self.links = [Links(Coordination(self.client, worker, 3)) for worker in range(3)]
        for text in ("", "1", "[[1, 2, 3, 4]]", "[" * 100_000):  # what is no connection of another worker is left alone
            self.client.values[f"mirrored/guard/links/{9 + len(text)}"] = text
        self._patch = monkeypatch

    def look(self, worker: int, elapsed: float = 0.5) -> str:
        self._patch.setattr(links, "connections", lambda least=0: (one for one in self.of[worker] if one.retries >= least))
        verdict = self.links[worker].check(7, elapsed)
        return "" if verdict is None else str(verdict)


def test_the_two_ends_of_a_connection_without_an_answer_are_named(monkeypatch: Patch, caplog: Log) -> None:
    of = [[Connection(C, A, 0)], [Connection(A, B, STUCK_RETRIES), Connection(A, C, 0)], [Connection(B, A, 0)]]
    job = Job(monkeypatch, of)
    for _ in range(int(LOST_SECONDS / 0.5)):
        assert [job.look(worker) for worker in (1, 2, 0)] == ["", "", ""]
    assert caplog.messages == ["what one of workers 1, 2 sends does not reach the other: the network between them is cut"]
    assert not job.look(1) and not job.look(0)
    assert job.look(2).startswith("lost the connection between workers 1, 2 at step 7: what one sends does not reach the other")


def test_a_worker_that_goes_on_takes_back_what_it_has_published(monkeypatch: Patch) -> None:
    """Else the other one, which waits for it in a later step, would take the connection for lost."""
    job = Job(monkeypatch, [[], [Connection(A, B, STUCK_RETRIES)], [Connection(B, A, 0)]])
    assert [job.look(worker) for worker in (1, 2)] == ["", ""]
    job.of[1] = [Connection(A, B, 0)]
    job.links[1].rest()
    assert not job.look(2, 2 * LOST_SECONDS) and not job.look(2, 2 * LOST_SECONDS)
    num_calls = job.client.counted.total()
    job.links[1].rest()
    job.links[0].rest()
    assert job.client.counted.total() == num_calls
    job.of[1] = [Connection(A, B, STUCK_RETRIES)]
    for _ in range(3):  # in three steps, each time for less than the limit
        assert [job.look(1), job.look(2), job.look(2, LOST_SECONDS - 1)] == ["", "", ""]
        job.links[2].rest()


HINT = (
    ": nobody answers there, as where a firewall drops the packets. Open all TCP ports between the hosts of the workers: "
    "collectives listen at ports that the kernel chooses, of net.ipv4.ip_local_port_range."
)


def test_the_two_ends_of_a_connection_that_is_not_answered_are_named_once(monkeypatch: Patch, caplog: Log) -> None:
    of = [[Connection(A, "", 0, LISTENING)], [], [Connection(B, A, UNANSWERED_RETRIES, UNANSWERED)]]
    job = Job(monkeypatch, of)
    for _ in range(5):
        assert [job.look(worker, LOST_SECONDS) for worker in range(3)] == ["", "", ""], "only the limit ends this job"
    warned = [message for message in caplog.messages if "(4 tries)" in message]
    assert warned == caplog.messages == [f"worker 2 cannot reach worker 0 at {A} (4 tries){HINT}"] * 2, "one of each end"
    of[2] = [Connection(B, A, 7, UNANSWERED), Connection(B, C, 3, UNANSWERED)]
    job.look(2)
    for links_ in job.links:
        assert links_.describe() == f"worker 2 cannot reach worker 0 at {A} (8 tries), worker 2 cannot reach {C} (4 tries){HINT}"
    of[2] = [Connection(B, f"{C}{number}", 3, UNANSWERED) for number in range(5)]
    job.look(2)
    assert f"reach {C}4 (4 tries): nobody answers" in job.links[0].describe()
    of[2] = [Connection(B, f"{C}{number}", 3, UNANSWERED) for number in range(7)]
    job.look(2)
    assert f"reach {C}4 (4 tries), and 2 more: nobody answers" in job.links[0].describe()
    of[2] = [Connection(B, A, 0)]
    for _ in range(3):
        assert [job.look(worker) for worker in range(3)] == ["", "", ""]
    assert job.links[1].describe() == "" and len(caplog.messages) == 2
    assert job.client.values["mirrored/guard/links/0"] == "[]", "nobody asks where it listens any more"


def test_what_is_open_only_slow_arrives_again_or_is_the_programs_own_ends_nothing(monkeypatch: Patch, caplog: Log) -> None:
    for sockets in (
        [Connection(B, A, UNANSWERED_RETRIES - 1, UNANSWERED)],  # one packet was lost
        [Connection(B, C, 9, UNANSWERED)],  # of the program, and of no worker
        [Connection(B, A, 0), Connection(B, "", 0, LISTENING)],
    ):
        job = Job(monkeypatch, [[Connection(A, "", 0, LISTENING)], [], sockets])
        for _ in range(5):
            assert [job.look(worker, LOST_SECONDS) for worker in range(3)] == ["", "", ""]
            job.links[0].rest()
        told = {f"mirrored/guard/links/{worker}" for worker in range(3)} & job.client.values.keys()
        assert bool(told) == any(one.retries >= UNANSWERED_RETRIES for one in sockets), "else nobody says anything"
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


def test_the_connections_of_this_process_are_those_that_its_sockets_have(ends, monkeypatch: Patch) -> None:
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
    assert Connection(other, "", 0, LISTENING) in list(connections()), "one of both has the address of what listens"

    def say(state: int) -> Callable[..., bytes]:
        def getsockopt(asked: socket.socket, *_: int) -> bytes:
            if asked.family == socket.AF_UNIX:  # as of other tests in this process: no TCP
                raise OSError(95, "Operation not supported")
            return bytes((state, 0, 6))  # sent again six times

        return getsockopt

    monkeypatch.setattr(socket.socket, "getsockopt", say(ESTABLISHED))
    assert Connection(one, other, 6) in list(connections(6)) and not list(connections(7))
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "getsockopt", say(4))
        assert not list(connections()), "what is being closed is none"
    for host, shown in (("::ffff:127.0.0.1", "127.0.0.1"), ("fe80::1%eth0", "fe80::1")):
        monkeypatch.setattr(socket.socket, "getpeername", lambda _, host=host: (host, 22, 0, 0))
        assert Connection(one, f"{shown}:22", 6) in list(connections(6))


def table_line(remote: bytes, port: int, state: int, inode: int) -> str:
    """Write a line as the kernel does, which shows an address as numbers of four bytes in this machine's order."""
    words = struct.unpack(f"={len(remote) // 4}I", remote)
    end = "".join(f"{word:08X}" for word in words)
    return (
        f"   1: 0100007F:1F90 {end}:{port:04X} {state:02X} 00000001:00000000 01:00000019 00000003     0        0 {inode} 2 0 20\n"
    )


def test_the_kernel_s_table_says_where_a_connection_without_an_answer_goes() -> None:
    mapped = socket.inet_pton(socket.AF_INET6, "::ffff:10.0.0.7")
    lines = [(socket.inet_aton("10.0.0.1"), 41234, UNANSWERED, 11), (socket.inet_aton("10.0.0.2"), 41234, ESTABLISHED, 12)]
    table = "header\n" + "".join(
        table_line(*line) for line in (*lines, (bytes(4), 0, LISTENING, 13), (mapped, 80, UNANSWERED, 14))
    )
    assert unanswered_ends(table) == {11: "10.0.0.1:41234", 14: "10.0.0.7:80"}
    assert unanswered_ends("") == unanswered_ends("header\n\n  1: cut off") == {}


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_connection_that_the_kernel_does_not_answer_is_found_with_its_other_end(
    family: socket.AddressFamily, host: str
) -> None:
    """A queue of connections that nobody accepts: when it is full, the kernel drops the packets of more."""
    if not Path("/proc/self/net/tcp6").exists():
        pytest.skip("asks Linux, which has IPv6")
    with socket.create_server((host, 0), family=family, backlog=0) as server, contextlib.ExitStack() as stack:
        there = f"{host}:{server.getsockname()[1]}"
        for _ in range(3):
            one = stack.enter_context(socket.socket(family))
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        found = [found for found in connections() if found.state == UNANSWERED and found.remote == there]
        assert f"{host}:{one.getsockname()[1]}" in {found.local for found in found}


def test_where_the_kernel_says_nothing_there_are_none(monkeypatch: Patch) -> None:
    """As where this process has as many files open as it may, or the system has no such folder."""

    def refuse(folder: str) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(links.os, "listdir", refuse)
    assert list(links.connections()) == []
