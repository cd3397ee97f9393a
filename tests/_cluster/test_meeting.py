"""Workers that are all there and alike come together; everything else is an error that names who and where, in time."""

import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirrored._cluster import gathering as _gathering
from mirrored._cluster import hello as _hello
from mirrored._cluster import meeting
from mirrored._cluster.meeting import Meeting, meet
from mirrored._cluster.resolvers import discover
from mirrored._cluster.spec import Cluster, ClusterSpec
from mirrored._errors import ClusterConfigError, ClusterStartError

VERSIONS = {"jax": "0.10.2", "mirrored": "0.1.0"}
Outcome = tuple[Meeting | Exception, float]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for sock in sockets:
            sock.bind((host, 0))
        return [sock.getsockname()[1] for sock in sockets]


def addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    name = f"[{host}]" if ":" in host else host
    return [f"{name}:{port}" for port in free_ports(count, "127.0.0.1" if host == "localhost" else host)]


def worker(workers: Sequence[str], index: int, **more: Any) -> Cluster:
    return Cluster(ClusterSpec.of({"worker": list(workers)}), "worker", index, **more)


def checked(cluster: Cluster, versions: Mapping[str, str], timeout: float) -> Outcome:
    before = time.monotonic()
    try:
        return meet(cluster, versions, timeout), time.monotonic() - before
    except Exception as error:
        return error, time.monotonic() - before


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Outcome]]]:
    """Start a worker in a thread of its own."""
    with ThreadPoolExecutor(40) as pool:
        yield lambda cluster, timeout=5.0, versions=VERSIONS: pool.submit(checked, cluster, versions, timeout)


@pytest.fixture(autouse=True)
def _no_socket_and_no_thread_is_left() -> Iterator[None]:
    def sockets() -> int:
        links = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{name}"))
        return sum(link.startswith("socket:") for link in links)

    before, threads = sockets(), threading.active_count()
    yield
    assert sockets() <= before
    assert threading.active_count() <= threads


def outcomes(futures: Sequence[Future[Outcome]], within: float) -> list[Any]:
    results = [future.result(timeout=60) for future in futures]
    assert max(seconds for _, seconds in results) < within, results
    return [result for result, _ in results]


def can_bind(address: str) -> bool:
    """Whether a port is free even for one who does not share it."""
    host, port = address.rsplit(":", 1)
    with socket.socket() as sock:
        try:
            sock.bind((host, int(port)))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    """Connect as soon as somebody listens there."""
    host, port = address.rsplit(":", 1)
    until = time.monotonic() + 5
    while True:
        try:
            sock = socket.create_connection((host, int(port)), timeout=5)
            break
        except OSError:
            assert time.monotonic() < until
    with sock:
        yield sock


# Those who are right come together.


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize("num_workers", [2, 5])
def test_workers_that_are_alike_come_together_and_leave_the_port_free(num_workers: int, host: str, start) -> None:
    workers = addresses(num_workers, host)
    chief, *others = outcomes([start(worker(workers, i)) for i in range(num_workers)], within=3)
    loopback = "::1" if host == "::1" else "127.0.0.1"
    port = workers[0].rsplit(":", 1)[1]
    assert chief == Meeting(loopback, f"[::1]:{port}" if host == "::1" else f"127.0.0.1:{port}")
    assert others == [Meeting(loopback, None)] * (num_workers - 1)
    if host != "::1":
        assert can_bind(f"127.0.0.1:{port}")


def test_workers_whose_addresses_nobody_said_come_together(start) -> None:
    port = free_ports(1)[0]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1), "WORLD_SIZE": "3"}
    clusters = [discover(environment=variables | {"RANK": str(rank)})[0] for rank in range(3)]
    assert [m.host for m in outcomes([start(cluster) for cluster in clusters], within=3)] == ["127.0.0.1"] * 3


def test_one_worker_and_an_evaluator_need_nobody() -> None:
    spec = ClusterSpec.of({"worker": ["203.0.113.1:1", "203.0.113.2:1"]})
    assert meet(Cluster(), VERSIONS, 5) == meet(Cluster(spec, "evaluator"), VERSIONS, 5) == Meeting()
    assert meet(worker(["203.0.113.1:1"], 0), VERSIONS, 5) == Meeting()


def test_the_order_in_which_workers_start_does_not_matter(start) -> None:
    workers = addresses(3)
    early = [start(worker(workers, 2)), start(worker(workers, 1))]
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        assert not any(future.done() for future in early)
    assert all(isinstance(m, Meeting) for m in outcomes([*early, start(worker(workers, 0))], within=4))


def test_a_worker_that_left_may_come_again(start) -> None:
    workers = addresses(3)
    chief = start(worker(workers, 0))
    with connected(workers[0]) as sock:
        sock.sendall(hello(worker(workers, 1)))
        assert b"waiting" in sock.recv(1000)
    again = [start(worker(workers, 1)), start(worker(workers, 2))]
    assert all(isinstance(m, Meeting) for m in outcomes([chief, *again], within=4))


def test_a_worker_that_left_unseen_may_come_again() -> None:
    """Its end and the hello of its next start may be there at once, and are then read in any order."""
    clusters = [worker(["127.0.0.1:1", "127.0.0.1:2"], index) for index in (0, 1)]
    clock = _gathering.Clock(time.monotonic(), time.monotonic() + 5)
    gathering = _gathering.Gathering(clusters[0], _hello.introduce(clusters[0], VERSIONS, "chief", "0"), [], clock)
    pairs = [socket.socketpair() for _ in range(3)]
    try:
        peers = [_gathering._Peer(ours, f"127.0.0.1:{i}", clock.deadline) for i, (ours, _) in enumerate(pairs)]
        for peer in peers:
            peer.sock.setblocking(False)
            gathering.peers[peer] = None
            gathering.selector.register(peer.sock, 1, peer)
        for i, peer in enumerate(peers[:2]):
            gathering._judge(peer, _hello.introduce(clusters[1], VERSIONS, "worker", f"start {i}"))
            assert gathering.failure is None and gathering.present == {1: peer}
            if not i:
                pairs[0][1].close()
        gathering._judge(peers[2], _hello.introduce(clusters[1], VERSIONS, "another", "while the second is there"))
        assert gathering.failure is not None and "two processes say that they are worker 1" in gathering.failure[1]
    finally:
        gathering.selector.close()
        for sock in itertools.chain(*pairs):
            sock.close()


def test_a_worker_that_connects_twice_is_one_worker(start) -> None:
    workers = addresses(3)
    chief = start(worker(workers, 0))
    with connected(workers[0]) as first, connected(workers[0]) as second:
        for sock in (first, second):
            sock.sendall(hello(worker(workers, 1)))
            assert b"waiting" in sock.recv(1000)
        assert first.recv(1000) == b""
        other = start(worker(workers, 2))
        assert b"go" in second.recv(1000)
    assert all(isinstance(m, Meeting) for m in outcomes([chief, other], within=4))


def test_what_an_ended_run_left_on_the_port_does_not_take_it(start) -> None:
    workers = addresses(2)
    port = int(workers[0].rsplit(":", 1)[1])
    with socket.socket() as listener:  # the side that hangs up first keeps the port in use for a minute
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            client.recv(1)
    assert not can_bind(workers[0])
    assert all(isinstance(m, Meeting) for m in outcomes([start(worker(workers, i)) for i in range(2)], within=3))


# Those who are wrong are told so, everywhere.


def test_a_missing_worker_is_named_everywhere(start) -> None:
    workers = addresses(4)
    errors = outcomes([start(worker(workers, i), timeout=0.5) for i in (0, 1, 3)], within=2.5)
    for error in errors:
        assert isinstance(error, ClusterStartError)
        assert str(error).startswith(f"waiting for worker 2 ({workers[2]}); 3 of 4 present after ")
        assert "Is it started, with the same cluster as the chief (the arguments), and can it reach " + workers[0] in str(error)


def test_the_deadline_is_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks: list[_gathering.Clock] = []

    def own_host(cluster: Cluster, clock: _gathering.Clock) -> None:
        clocks.append(clock)
        raise ClusterStartError("enough seen")

    monkeypatch.setattr(meeting, "_own_host", own_host)
    with pytest.raises(ClusterStartError, match="enough seen"):
        meet(worker(["a:1", "b:1"], 0), VERSIONS, 7.0)
    [clock] = clocks
    assert clock.deadline - clock.started == pytest.approx(7.0) and 0 < clock.left <= 7.0


def test_many_missing_workers_are_named_in_a_short_line(start) -> None:
    workers = addresses(30)
    (error,) = outcomes([start(worker(workers, 0), timeout=0.2)], within=2.2)
    assert f"worker 8 ({workers[8]}) and 21 more; 1 of 30 present" in str(error)


def test_a_missing_chief_is_named(start) -> None:
    workers = addresses(3)
    for error in outcomes([start(worker(workers, i), timeout=0.5) for i in (1, 2)], within=2.5):
        assert isinstance(error, ClusterStartError)
        assert f"for the chief ({workers[0]}): Connection refused. Is worker 0 started, with the same cluster" in str(error)


def test_those_who_wait_say_so_in_the_log(start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gathering, "PROGRESS_SECONDS", 0.2)
    workers, lonely = addresses(3), addresses(2)
    with caplog.at_level(logging.WARNING, logger="mirrored"):
        outcomes([start(worker(workers, i), timeout=0.7) for i in (0, 1)] + [start(worker(lonely, 1), timeout=0.7)], within=3)
    lines = [record.getMessage() for record in caplog.records if record.name == "mirrored"]
    waiting = [line for line in lines if line.startswith(f"waiting for worker 2 ({workers[2]}); 2 of 3 present after ")]
    assert len(waiting) == 2  # after 0.2 s and 0.4 s; 0.8 s would be the next
    assert any(f"waiting for the chief ({workers[0]}): it knows this worker, and is waiting for others" in line for line in lines)
    assert any(f"worker 1 is waiting for the chief ({lonely[0]}): Connection refused" in line for line in lines)


@pytest.mark.parametrize("index", [0, 1])
def test_an_index_that_two_have_is_an_error_with_both_addresses(index: int, start) -> None:
    workers = addresses(3)
    errors = outcomes([start(worker(workers, i)) for i in (0, 1, index)], within=2)
    for error in errors:
        assert isinstance(error, ClusterConfigError)
        assert f"two processes say that they are worker {index}: worker {index} (127.0.0.1:" in str(error)
        assert str(error).count("127.0.0.1:") == 2 and f"pid {os.getpid()}" in str(error)
    assert index or workers[0] in str(errors[0])


def test_different_versions_are_an_error_that_names_both(start) -> None:
    workers = addresses(3)
    other = VERSIONS | {"jax": "0.9\n\x1b[31m"}
    errors = outcomes([start(worker(workers, i), versions=other if i == 2 else VERSIONS) for i in range(3)], within=2)
    for error in errors:
        assert isinstance(error, ClusterConfigError) and str(error).isprintable()
        assert (
            "worker 2 (127.0.0.1:" in str(error) and "runs jax '0.9\\n\\x1b[31m'" in str(error) and "runs '0.10.2'" in str(error)
        )


def test_a_version_that_only_one_has_is_a_difference(start) -> None:
    workers = addresses(2)
    for error in outcomes([start(worker(workers, 0)), start(worker(workers, 1), versions=VERSIONS | {"x": "1"})], within=2):
        assert "runs x '1'" in str(error) and "runs 'none'" in str(error)


def test_different_numbers_of_workers_are_an_error_that_names_both(start) -> None:
    workers = addresses(4)
    errors = outcomes([start(worker(workers[: 4 if i == 1 else 3], i)) for i in range(3)], within=2)
    for error in errors:
        assert isinstance(error, ClusterConfigError)
        assert "worker 1 (127.0.0.1:" in str(error) and "was told of 4 workers, the chief" in str(error) and "of 3;" in str(error)


def test_different_clusters_are_an_error_that_names_the_first_difference(start) -> None:
    workers = addresses(4)
    errors = outcomes([start(worker([*workers[:2], workers[3 if i == 1 else 2]], i)) for i in range(3)], within=2)
    for error in errors:
        assert isinstance(error, ClusterConfigError)
        assert f"worker 2 is at '{workers[3]}' for the one, at '{workers[2]}' for the other" in str(error)


def test_a_cluster_too_large_for_a_line_is_compared_by_its_digest() -> None:
    many = [f"h{i}.example.org:1" for i in range(500)]
    mine, theirs = (_hello.introduce(worker(w, 0), {}, "p", "t") for w in (many, [*many[:-1], "other:1"]))
    assert not mine.workers and len(_hello.encode(mine.message())) < _hello.MAX_LINE
    assert _hello.first_difference("they", theirs, "me", mine) == "they was given another cluster than me; give both the same"
    assert _hello.first_difference("they", mine, "me", mine) == ""


def test_an_address_of_another_host_is_an_error_on_the_worker_that_has_it(start) -> None:
    for workers in (
        ["203.0.113.1:2222", "203.0.113.2:2222"],
        ["203.0.113.1:2222", "203.0.113.1:2223"],
        ["127.0.0.1:1", "203.0.113.2:1"],
    ):
        index = 1 if workers[0].startswith("127") else 0
        (error,) = outcomes([start(worker(workers, index, found_in="TF_CONFIG"))], within=2)
        assert isinstance(error, ClusterConfigError)
        assert f"TF_CONFIG: this process is worker {index} at {workers[index]}, but 203.0.113." in str(error)
        assert f"is not an address of this host ({socket.gethostname()})" in str(error)


@pytest.mark.parametrize("index", [0, 1])
def test_a_name_that_does_not_exist_is_an_error_at_once(index: int, start) -> None:
    (error,) = outcomes([start(worker(["no-such-host.invalid:2222", "127.0.0.1:1"], index), timeout=30)], within=2)
    assert isinstance(error, ClusterConfigError | ClusterStartError)
    assert "the host name 'no-such-host.invalid' in the arguments has no address" in str(error)


def test_a_name_server_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, silent = socket.getaddrinfo, threading.Event()

    def never(host: str, port: int, **more: Any) -> Any:
        if not more["flags"]:
            silent.wait(30)
        return asked(host, port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", never)
    before = time.monotonic()
    with pytest.raises(ClusterStartError, match=r"no name server answered within 1\.9 s"):
        meet(worker(["localhost:1", "127.0.0.1:1"], 0), VERSIONS, 30)
    assert time.monotonic() - before < 2.2
    silent.set()
    for thread in threading.enumerate():
        if thread.name == "mirrored-look-up":
            thread.join()


@pytest.mark.parametrize("late", [True, False])
def test_only_in_kubernetes_a_name_may_appear_late(late: bool, start, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, calls = socket.getaddrinfo, []

    def slowly(host: str, port: int, **more: Any) -> Any:
        if host == "pod-0.pods" and not more["flags"]:
            calls.append(host)
            if len(calls) < 3:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = "127.0.0.1"
        return asked(host, port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    workers = [f"pod-0.pods:{free_ports(1)[0]}", *addresses(1)]
    results = outcomes([start(worker(workers, i, names_come_late=late)) for i in range(2)], within=5)
    assert all(isinstance(result, Meeting if late else ClusterConfigError) for result in results), results


def test_a_chief_that_only_its_own_host_can_reach_says_so(start) -> None:
    workers = [f"localhost:{free_ports(1)[0]}", "203.0.113.2:2222"]
    (error,) = outcomes([start(worker(workers, 0), timeout=0.3)], within=2.3)
    assert "the chief's address means 127.0.0.1 on the chief's host, which other hosts cannot reach" in str(error)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "60", None, 10**9])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(ClusterConfigError, match=r"timeout_seconds is .*; expected seconds up to"):
        meet(worker(addresses(2), 0), VERSIONS, timeout)


# The port.


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("bound_to", ["127.0.0.1", "", "::"])
def test_a_port_that_stays_taken_is_an_error_in_time_and_whoever_has_it_keeps_it(
    bound_to: str, share: bool, start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "LINGER_SECONDS", 0.1)
    with socket.socket(socket.AF_INET6 if bound_to == "::" else socket.AF_INET) as listener:
        if bound_to == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if share:  # as gRPC does
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((bound_to, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with caplog.at_level(logging.WARNING, logger="mirrored"):
            (error,) = outcomes([start(worker([f"127.0.0.1:{port}", *addresses(1)], 0), timeout=0.5)], within=2.5)
        assert isinstance(error, ClusterStartError)
        assert f"port {port} on 127.0.0.1 is taken by another program or job, after " in str(error)
        assert f"worker 0 is waiting for port {port} on 127.0.0.1, which another run or program has; after 0 s" in caplog.messages
        listener.settimeout(5)
        with socket.create_connection(("127.0.0.1", port)) as client:
            while (accepted := listener.accept())[1][1] != client.getsockname()[1]:
                accepted[0].close()  # the question whether it is one of us
            accepted[0].close()
            assert client.recv(1) == b""


SETTINGS = b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + b"\x00\x04\x00\x40\x00\x00" * 3  # what gRPC says first


@contextlib.contextmanager
def program_at(address: str, says: bytes) -> Iterator[Callable[[int], None]]:
    """Let somebody have a port who says something to everyone; yield what waits until so many have come."""
    came = threading.Semaphore(0)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as peer, contextlib.suppress(OSError):
                    peer.sendall(says)
                    came.release()
                    peer.recv(1 << 16)

    def wait_for(count: int) -> None:
        assert all(came.acquire(timeout=10) for _ in range(count))

    host, port = address.rsplit(":", 1)
    server = socket.create_server((host, int(port)))
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield wait_for
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        server.close()


def test_a_port_of_another_program_is_an_error_at_once(start) -> None:
    workers = addresses(2)
    with program_at(workers[0], b"HTTP/1.1 400 Bad Request\r\n\r\n"):
        (error,) = outcomes([start(worker(workers, 0), timeout=30)], within=2)
    assert isinstance(error, ClusterStartError) and "is taken by another program or job, after 0 s" in str(error)


def test_an_earlier_run_that_ends_is_waited_for(start) -> None:
    workers = addresses(3)
    with program_at(workers[0], SETTINGS) as wait_for:
        futures = [start(worker(workers, i), timeout=30) for i in range(3)]
        wait_for(9)
        assert not any(future.done() for future in futures)
    assert all(isinstance(m, Meeting) for m in outcomes(futures, within=10))


def test_a_job_that_does_not_end_is_named_after_the_timeout(start) -> None:
    workers = addresses(2)
    with program_at(workers[0], SETTINGS):
        errors = outcomes([start(worker(workers, i), timeout=0.5) for i in range(2)], within=2.5)
    for error, text in zip(errors, ["taken by another program", "a job runs there, an earlier run of this one or"], strict=True):
        assert isinstance(error, ClusterStartError) and text in str(error) and workers[0].rsplit(":", 1)[1] in str(error)


def test_a_chief_that_waits_for_its_port_says_so_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    (address,) = addresses(1)
    clock = _gathering.Clock(time.monotonic() - 100, time.monotonic() + 0.6)
    ours = _hello.introduce(worker([address, *addresses(1)], 0), VERSIONS, "chief", "0")
    with program_at(address, SETTINGS), socket.socket() as sock, pytest.raises(OSError, match="in use"):
        host, port = address.rsplit(":", 1)
        meeting._bind(sock, (host, int(port)), ours, clock)
    assert caplog.messages == [f"worker 0 is waiting for port {port} on {host}, which another run or program has; after 100 s"]


def test_a_worker_that_waited_for_another_job_does_not_disturb_it(start) -> None:
    workers = addresses(2)
    chief = start(worker(workers, 0))
    with connected(workers[0]) as sock:
        sock.sendall(hello(worker([workers[0], *addresses(2)], 1), is_late=True))
        assert b"another cluster starts there (worker 1 (127.0.0.1:" in sock.recv(1000)
    assert all(isinstance(m, Meeting) for m in outcomes([chief, start(worker(workers, 1))], within=5))


def test_a_job_that_took_the_port_of_another_leaves_it_to_that(start) -> None:
    ours = addresses(2)
    with program_at(ours[0], SETTINGS) as wait_for:
        taker = start(worker([ours[0], *addresses(2)], 0), timeout=30)
        wait_for(2)
    first = start(worker(ours, 1), timeout=30)  # our job starts again
    (error,) = outcomes([taker], within=10)
    assert isinstance(error, ClusterStartError)
    assert "worker 1 (127.0.0.1:" in str(error) and "was told of 2 workers, the chief" in str(error)
    assert f"port {ours[0].rsplit(':', 1)[1]} belongs to another job, which has started again: give each its own" in str(error)
    assert all(isinstance(m, Meeting) for m in outcomes([first, start(worker(ours, 0))], within=10))


def test_a_connection_to_a_host_that_vanished_does_not_stay(start) -> None:
    workers = addresses(2)
    chief = start(worker(workers, 0))
    seen = []

    class Watched(_gathering._Peer):
        def say(self, **message: Any) -> bool:
            seen.append([self.sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in _gathering._KEEP_ALIVE])
            seen.append(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
            return super().say(**message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gathering, "_Peer", Watched)
        outcomes([chief, start(worker(workers, 1))], within=4)
    assert seen[:2] == [[5, 2, 3], 1]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sock:
        now = time.monotonic()
        meeting._connect(sock, server.getsockname(), _gathering.Clock(now, now + 5))
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_a_privileged_or_impossible_port_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        if address[1]:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ClusterConfigError, match=r"the chief cannot listen at 127.0.0.1:80 \(127.0.0.1\): Permission denied"):
        meet(worker(["127.0.0.1:80", "127.0.0.1:81"], 0), VERSIONS, 5)


def test_another_cluster_on_the_port_does_not_disturb_the_first(start) -> None:
    workers = addresses(2)
    first = start(worker(workers, 0))
    with connected(workers[0]):
        (error,) = outcomes([start(worker([workers[0], *addresses(2)], 0))], within=2)
    assert isinstance(error, ClusterStartError)
    assert f"port {workers[0].rsplit(':', 1)[1]} is taken: another cluster starts there" in str(error)
    assert all(isinstance(m, Meeting) for m in outcomes([first, start(worker(workers, 1))], within=5))


@pytest.mark.parametrize(
    "says", [b"\x00\x00\x12\x04\x00\x00\x00\x00\x01", b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"a": 1}\n', b"x" * 99_999]
)
def test_a_program_that_is_not_the_chief_is_an_error_at_once(says: bytes, start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        workers = [f"127.0.0.1:{server.getsockname()[1]}", *addresses(1)]
        future = start(worker(workers, 1), timeout=30)
        with server.accept()[0] as peer:
            with contextlib.suppress(OSError):
                peer.sendall(says)
            (error,) = outcomes([future], within=2)
    assert isinstance(error, ClusterStartError) and str(error).isprintable() and len(str(error)) < 400
    assert f"what answers at {workers[0]} is not the chief of this cluster: it says '" in str(error)


def test_an_answer_without_an_end_is_not_collected() -> None:
    ours, theirs = socket.socketpair()
    now = time.monotonic()
    with ours, theirs:
        theirs.sendall(_hello.encode({})[:-2] + b" " * _hello.MAX_LINE)
        answers = meeting._answers(ours, _gathering.Clock(now, now - 0.5))
        assert isinstance(next((answer for answer in answers if answer is not None), None), bytes)


def test_a_program_that_says_nothing_is_waited_for_until_the_timeout(start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (error,) = outcomes([start(worker([f"127.0.0.1:{server.getsockname()[1]}", *addresses(1)], 1), timeout=0.3)], within=2.3)
    assert isinstance(error, ClusterStartError) and "it accepts connections but says nothing" in str(error)


def test_what_a_false_chief_says_is_shown_escaped(start) -> None:
    text = "evil\n\x1b[2Jtext \u202e é"
    with socket.create_server(("127.0.0.1", 0)) as server:
        future = start(worker([f"127.0.0.1:{server.getsockname()[1]}", *addresses(1)], 1))
        with server.accept()[0] as peer:
            peer.sendall(_hello.encode({"state": "error", "kind": "config", "text": text}))
            (error,) = outcomes([future], within=3)
    assert str(error) == r"evil\n\x1b[2Jtext \u202e \xe9"


def test_a_worker_does_not_take_its_own_connection_for_the_chief(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = addresses(2)
    host, port = workers[0].rsplit(":", 1)
    connect = socket.socket.connect

    def to_itself(self: socket.socket, address: Any) -> None:
        if address[1] == int(port):
            self.bind(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", to_itself)
    with pytest.raises(ClusterStartError, match="Connection refused"):
        meet(worker(workers, 1), VERSIONS, 0.3)
    assert can_bind(f"{host}:{port}")


# Strangers.


def hello(cluster: Cluster, **change: Any) -> bytes:
    return _hello.encode(_hello.introduce(cluster, VERSIONS, "test", "t").message() | change)


STRANGERS = {
    "nothing": b"",
    "a line": b"hello\n",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes": bytes(range(256)) * 4,
    "a long line": b"x" * 100_000,
    "half a hello": b'{"magic": "mirrored-preflight-1", "index": 1',
    "json": b'{"index": 1}\n',
    "a nest": b"[" * 5000 + b"\n",
    "a wrong index": hello(worker(["h:1", "h:2"], 1), index=-1),
    "a fractional index": hello(worker(["h:1", "h:2"], 1), index=1.5),
    "a late one that is no bool": hello(worker(["h:1", "h:2"], 1), is_late=1),
    "a true index": hello(worker(["h:1", "h:2"], 1), index=True),
    "a field more": hello(worker(["h:1", "h:2"], 1), more=1),
    "versions that are none": hello(worker(["h:1", "h:2"], 1), versions=[]),
    "long words": hello(worker(["h:1", "h:2"], 1), token="x" * 1000),
    "another protocol": hello(worker(["h:1", "h:2"], 1), magic="mirrored-preflight-0"),
}


@pytest.mark.parametrize("says", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_neither_stops_the_chief_nor_keeps_its_port(says: bytes, start) -> None:
    workers = addresses(2)
    chief = start(worker(workers, 0))
    with connected(workers[0]) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(says)
        assert all(isinstance(m, Meeting) for m in outcomes([chief, start(worker(workers, 1))], within=3))
        assert can_bind(workers[0])


def test_a_stranger_that_writes_slowly_is_cut_off(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gathering, "PATIENCE_SECONDS", 0.2)
    workers = addresses(2)
    chief = start(worker(workers, 0))
    with connected(workers[0]) as stranger:
        before = time.monotonic()
        stranger.settimeout(0.02)
        with pytest.raises(ConnectionError):
            for byte in hello(worker(workers, 1)) * 100:
                stranger.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(1):
                        raise ConnectionError
        assert 0.15 < time.monotonic() - before < 1.5
    outcomes([chief, start(worker(workers, 1))], within=4)


def test_hundreds_of_strangers_are_no_obstacle(start) -> None:
    workers = addresses(3)
    chief = start(worker(workers, 0))
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(workers[0]))
        results = outcomes([chief, *(start(worker(workers, i)) for i in (1, 2))], within=5)
    assert all(isinstance(m, Meeting) for m in results)


def test_a_line_or_a_word_that_is_too_long_is_not_read() -> None:
    line = hello(worker(["h:1", "h:2"], 1)).rstrip(b"\n")
    answer = _hello.encode({"state": "go"}).rstrip(b"\n")
    for parse, right in ((_hello.parse_hello, line), (_hello.parse_answer, answer)):
        assert parse(right.ljust(_hello.MAX_LINE)) is not None
        assert parse(right.ljust(_hello.MAX_LINE + 1)) is None
    for length, is_read in ((300, True), (301, False)):
        word = "x" * length
        for change in ({"token": word}, {"workers": [word]}, {"versions": {"jax": word}}, {"versions": {word: "1"}}):
            assert (_hello.parse_hello(hello(worker(["h:1", "h:2"], 1), **change)) is not None) == is_read, change


def test_a_stranger_that_says_too_much_is_cut_off_at_once(start) -> None:
    workers = addresses(2)
    chief = start(worker(workers, 0))
    with connected(workers[0]) as stranger:
        before = time.monotonic()
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"x" * (_hello.MAX_LINE + 1))
            assert stranger.recv(1) == b""
        assert time.monotonic() - before < _gathering.PATIENCE_SECONDS / 2
    outcomes([chief, start(worker(workers, 1))], within=4)


def test_of_too_many_strangers_the_oldest_goes(start) -> None:
    workers = addresses(2)
    chief = start(worker(workers, 0))
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connected(workers[0]))
        for _ in range(_gathering.MAX_STRANGERS):
            stack.enter_context(connected(workers[0]))
        first.settimeout(_gathering.PATIENCE_SECONDS / 2)
        with pytest.raises(ConnectionResetError):
            first.recv(1)
    outcomes([chief, start(worker(workers, 1))], within=4)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.binary(max_size=200)
    | st.lists(st.none() | st.integers() | st.text(max_size=5), max_size=3).map(lambda x: json.dumps(x).encode())
)
def test_no_bytes_are_an_error_to_the_parser(line: bytes) -> None:
    assert _hello.parse_hello(line) is None
    assert _hello.parse_answer(line) is None


SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.sampled_from(["index", "num_workers", "digest", "workers", "versions", "process", "token", "magic"]),
    SIMPLE | st.lists(SIMPLE, max_size=2) | st.dictionaries(st.text(max_size=5), SIMPLE, max_size=2),
)
def test_a_hello_with_odd_fields_is_refused_or_right(field: str, odd: object) -> None:
    parsed = _hello.parse_hello(hello(worker(["h:1", "h:2"], 1), **{field: odd}))
    if parsed is not None:
        assert type(parsed.index) is int and type(parsed.num_workers) is int
        words = [*parsed.workers, *parsed.versions.values(), parsed.digest, parsed.process, parsed.token]
        assert all(isinstance(word, str) for word in words)


# With jax itself.

JOB = """
import sys, jax
from mirrored._cluster import meeting
from mirrored._cluster import resolvers
cluster, found = resolvers.discover()
try:
    met = meeting.meet(cluster, {"jax": jax.__version__}, 60)
except Exception as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(76)
jax.distributed.initialize(
    cluster.coordinator_address, cluster.num_workers, cluster.worker_index, cluster_detection_method="deactivate",
    coordinator_bind_address=met.bind_address,
)
print("up", found, flush=True)
sys.stdin.readline()
jax.distributed.shutdown()
print("done", flush=True)
"""


def test_jax_starts_on_the_port_and_a_second_job_there_waits_without_disturbing_it(start) -> None:
    workers = addresses(2)
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()} | {
        "PYTHONPATH": str(Path(meeting.__file__).parents[2]),
        "JAX_PLATFORMS": "cpu",
    }

    def process(index: int) -> subprocess.Popen[str]:
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        return subprocess.Popen(
            [sys.executable, "-c", JOB],
            env=environment | {"TF_CONFIG": json.dumps(task)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    with contextlib.ExitStack() as stack:
        job = [stack.enter_context(process(index)) for index in range(2)]
        for p in job:
            stack.callback(p.kill)
        said = [p.stdout.readline() for p in job if p.stdout]
        assert [line.split(",")[0] for line in said] == [f"up worker {i} of 2 ({workers[i]})" for i in range(2)]
        # The same job once more, which gRPC would let in, so that it kills the first.
        second, third = outcomes([start(worker(workers, i), timeout=1) for i in range(2)], within=3)
        assert isinstance(second, ClusterStartError) and "is taken by another program or job" in str(second)
        assert isinstance(third, ClusterStartError) and "a job runs there" in str(third)
        next_run = [start(worker(workers, i), timeout=60) for i in range(2)]
        for p in job:
            assert p.poll() is None and p.stdin
            p.stdin.write("\n")
            p.stdin.flush()
        assert [(p.communicate(timeout=60)[0], p.returncode) for p in job] == [("done\n", 0)] * 2
        assert all(isinstance(m, Meeting) for m in outcomes(next_run, within=60))
