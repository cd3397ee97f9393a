"""Two workers that do not reach each other are named, by what the kernel of one says of a connection that the other has too."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_service import FakeClient

from mirrored._workers import links
from mirrored._workers.coordination import Coordination
from mirrored._workers.links import LOST_SECONDS, STUCK_RETRIES, Connection, Links, connections

A, B, C = ("0100000A:1F90", "0200000A:C350", "0300000A:0016")


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
    if not Path("/proc/self/net/tcp").exists():
        pytest.skip("asks Linux")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def test_the_connections_of_this_process_are_those_that_the_kernel_lists(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(end: socket.socket) -> str:
        return f"0100007F:{end.getsockname()[1]:04X}"

    one, other = ends
    assert {Connection(shown(one), shown(other), 0), Connection(shown(other), shown(one), 0)} <= set(connections())
    own, head = os.fstat(one.fileno()).st_ino, "  sl  local_address rem_address st ...\n"
    mapped = "0000000000000000FFFF0000"
    lines = [f"{mapped}{A} {mapped}{B} 01 00000001:00000000 01:00000123 00000006 0 0 {own} 2 x"]  # sends again
    lines += [f"{A} {C} 01 00000001:00000000 04:00000123 00000006 0 0 {own} 2 x"]  # asks whether there is room again
    lines += [f"{A} {C} 0A 0:0 01:0 00000006 0 0 {own} 2 x", f"{B} {C} 01 0:0 01:0 00000006 0 0 1 2 x"]  # listens; is another's
    (tmp_path / "tcp6").write_text(head + "\n".join(f"   {number}: {line}" for number, line in enumerate(lines)))
    monkeypatch.setattr(links, "_TABLES", (str(tmp_path / "none"), str(tmp_path / "tcp6")))
    assert list(connections()) == [Connection(A, B, 6), Connection(A, C, 0)]
    assert list(connections(6)) == [Connection(A, B, 6)] and not list(connections(7))
