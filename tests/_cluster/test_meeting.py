"""Workers that are all there and alike come together; everything else is an error that names who and where, in time."""

import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from jax._src.lib import _jax

from mirrored._cluster import gathering as _gathering
from mirrored._cluster import hello as _hello
from mirrored._cluster import meeting
from mirrored._cluster.meeting import Meeting, meet
from mirrored._cluster.resolvers import discover
from mirrored._cluster.spec import Cluster, ClusterSpec
from mirrored._errors import ClusterConfigError, ClusterStartError

VERSIONS = {"jax": "0.10.2", "mirrored": "0.2.0"}
#: What comes at once comes long before this timeout, also on a slow machine.
TIMEOUT = 30.0
Outcome = tuple[Meeting | Exception, float]
Start = Callable[..., Future[Outcome]]
Patch, Log = pytest.MonkeyPatch, pytest.LogCaptureFixture


def addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    """Return addresses with ports that are free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for sock in sockets:
            sock.bind((host, 0))
        return [f"[{host}]:{sock.getsockname()[1]}" if ":" in host else f"{host}:{sock.getsockname()[1]}" for sock in sockets]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def worker(workers: Sequence[str], index: int, **more: Any) -> Cluster:
    return Cluster(ClusterSpec.of({"worker": list(workers)}), "worker", index, **more)


def checked(cluster: Cluster, versions: Mapping[str, str], timeout: float) -> Outcome:
    before = time.monotonic()
    try:
        return meet(cluster, versions, timeout), time.monotonic() - before
    except Exception as error:
        return error, time.monotonic() - before


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a worker in a thread of its own."""
    with ThreadPoolExecutor(40) as pool:
        yield lambda cluster, timeout=TIMEOUT, versions=VERSIONS: pool.submit(checked, cluster, versions, timeout)


@pytest.fixture(autouse=True)
def _no_socket_and_no_thread_is_left(monkeypatch: Patch) -> Iterator[None]:
    def sockets() -> int:
        links = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{name}"))
        return sum(link.startswith("socket:") for link in links)

    before, threads = sockets(), threading.active_count()
    monkeypatch.setattr(_gathering, "LINGER_SECONDS", 0.2)
    yield
    assert sockets() <= before
    assert threading.active_count() <= threads


def outcomes(futures: Sequence[Future[Outcome]], at_least: float = 0.0) -> list[Any]:
    results = [future.result(timeout=60) for future in futures]
    assert all(at_least <= seconds < TIMEOUT / 2 for _, seconds in results), results
    return [result for result, _ in results]


def met(*futures: Future[Outcome]) -> bool:
    results = outcomes(futures)
    return all(isinstance(result, Meeting) for result in results) or pytest.fail(str(results))


def can_bind(address: str) -> bool:
    """Whether a port is free even for one who does not share it."""
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port_of(address)))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    """Connect as soon as somebody listens there."""
    until = time.monotonic() + 10
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port_of(address)), timeout=10)
            break
        except OSError:
            assert time.monotonic() < until
    with sock:
        yield sock


def hello(cluster: Cluster, **change: Any) -> bytes:
    return _hello.encode(dataclasses.asdict(_hello.introduce(cluster, VERSIONS, "test", "t")) | change)


# Those who are right come together.


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_workers_that_are_alike_come_together_and_leave_the_port_free(host: str, start: Start) -> None:
    workers = addresses(4, host)
    if host != "::1":
        workers[1:3] = [f"localhost:{port_of(workers[1])}", f"127.0.1.1:{port_of(workers[2])}"]
    chief, *others = outcomes([start(worker(workers, i)) for i in range(4)])
    assert chief == Meeting(host, workers[0])
    assert others == [Meeting(host, None)] * 3, "also that whose own name means another address of loopback"
    assert host == "::1" or can_bind(workers[0])


def test_workers_whose_addresses_nobody_said_come_together(start: Start) -> None:
    port = port_of(addresses(1)[0])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1), "WORLD_SIZE": "3"}
    clusters = [discover(environment=variables | {"RANK": str(rank)})[0] for rank in range(3)]
    assert [m.host for m in outcomes([start(cluster) for cluster in clusters])] == ["127.0.0.1"] * 3


@pytest.mark.parametrize("order", [1, -1])
def test_a_worker_that_left_unseen_may_come_again(order: int, monkeypatch: Patch) -> None:
    """Its end and the hello of its next start may be there at once, and in any order."""
    clusters = [worker(["127.0.0.1:1", "127.0.0.1:2"], index) for index in (0, 1)]
    clock, pairs = _gathering.Clock(5), [socket.socketpair() for _ in range(3)]
    gathering = _gathering.Gathering(clusters[0], _hello.introduce(clusters[0], VERSIONS, "chief", "0"), pairs[0][0], clock)
    select = gathering.selector.select
    monkeypatch.setattr(gathering.selector, "select", lambda timeout: sorted(select(timeout), key=lambda e: order * e[0].fd))
    try:
        for i, (ours, theirs) in enumerate(pairs):
            peer = _gathering._Peer(ours, f"127.0.0.1:{i}", clock.deadline)
            ours.setblocking(False)
            gathering.peers[peer] = None
            gathering.selector.register(ours, 1, peer)
            theirs.sendall(_hello.introduce(clusters[1], VERSIONS, "worker", f"start {i}").encode())
            gathering._turn(clock.deadline)
            assert (gathering.failure is None) == (i < 2), "the third start, while the second is there"
            if i == 0:
                theirs.close()
        assert "two processes say that they are worker 1" in str(gathering.failure)
    finally:
        gathering.selector.close()
        for sock in itertools.chain(*pairs):
            sock.close()


def test_a_worker_that_connects_twice_is_one_worker(start: Start) -> None:
    workers = addresses(3)
    chief = start(worker(workers, 0))
    with connected(workers[0]) as first, connected(workers[0]) as second:
        for sock in (first, second):
            sock.sendall(hello(worker(workers, 1)))
            assert b"waiting" in sock.recv(1000)
        assert first.recv(1000) == b""
        other = start(worker(workers, 2))
        assert b"go" in second.recv(1000)
    assert met(chief, other)


def test_what_an_ended_run_left_on_the_port_does_not_take_it(start: Start) -> None:
    workers = addresses(2)
    with socket.socket() as listener:  # the side that hangs up first keeps the port in use for a minute
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
        listener.bind(("127.0.0.1", port_of(workers[0])))
        listener.listen()
        with socket.create_connection(("127.0.0.1", port_of(workers[0]))) as client:
            listener.accept()[0].close()
            client.recv(1)
    assert not can_bind(workers[0])
    assert met(*(start(worker(workers, i)) for i in range(2)))


# Those who are wrong are told so, everywhere.


def test_a_missing_worker_is_named_everywhere(start: Start, caplog: Log, monkeypatch: Patch) -> None:
    monkeypatch.setattr(_gathering, "PROGRESS_SECONDS", 0.2)
    workers, lonely, shell = addresses(4), addresses(2), addresses(2)
    with caplog.at_level(logging.WARNING, logger="mirrored"):
        futures = [start(worker(workers, i), timeout=0.7) for i in (0, 1, 3)]
        futures.append(start(worker(lonely, 1, found_in="torchrun's variables"), timeout=0.7))
        futures.append(start(worker(shell, 0, found_in="Slurm's variables"), timeout=0.7))
        *errors, of_lonely, of_shell = outcomes(futures, at_least=0.6)
    assert all(isinstance(error, ClusterStartError) for error in (*errors, of_lonely, of_shell))
    by_srun = "which srun starts (a shell of `srun --pty` is one task alone: in it, write `srun --overlap python train.py`)"
    assert str(of_shell).startswith(f"waiting for worker 1 ({shell[1]}), {by_srun}; 1 of 2 present after ")
    for error in errors:
        assert str(error).startswith(f"waiting for worker 2 ({workers[2]}); 3 of 4 present after ")
        assert "Is it started, with the same cluster as the chief (the arguments), and can it reach " + workers[0] in str(error)
    assert f"for the chief ({lonely[0]}): Connection refused. Is worker 0 started, with the same cluster" in str(of_lonely)
    assert str(of_lonely).endswith(": export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, on all hosts")
    lines = [record.getMessage() for record in caplog.records if record.name == "mirrored"]
    for says, count in (
        (f"waiting for worker 2 ({workers[2]}); 3 of 4 present after ", 1),
        (f"waiting for worker 1 ({shell[1]}), {by_srun}; 1 of 2 present after ", 1),
        (f"waiting for the chief ({workers[0]}): it knows this worker, and is waiting for others", 2),
        (f"worker 1 is waiting for the chief ({lonely[0]}): Connection refused", 1),
    ):  # after 0.2 s and 0.4 s; 0.8 s would be the next
        assert count <= sum(line.startswith(says) for line in lines) <= 2 * count, lines


def test_an_index_that_two_have_and_workers_that_differ_are_an_error_that_names_both_everywhere(start: Start) -> None:
    for index in (0, 1):
        workers = addresses(3)
        errors = outcomes([start(worker(workers, i)) for i in (0, 1, index)])
        for error in errors:
            assert isinstance(error, ClusterConfigError)
            assert f"two processes say that they are worker {index}: worker {index} (127.0.0.1:" in str(error)
            assert str(error).count("127.0.0.1:") == 2 and f"pid {os.getpid()}" in str(error)
        assert index or workers[0] in str(errors[0])
    workers = addresses(4)
    for error in outcomes([start(worker(workers[: 4 if i == 1 else 3], i)) for i in range(3)]):
        assert isinstance(error, ClusterStartError), "a job whose size changes starts again, worker by worker"
        assert "worker 1 (127.0.0.1:" in str(error) and "was told of 4 workers, the chief" in str(error) and "of 3;" in str(error)


def test_who_names_another_chief_is_turned_away_and_ends_nobody_but_itself(start: Start, caplog: Log) -> None:
    """One line from anybody, such as a worker of another job with a wrong address, ended worker 0 with 76."""
    workers = addresses(3)
    jobs = [["10.0.0.1:2222", "b:1"], ["10.0.0.1:2222", "b:1", "c:1"], [f"localhost:{port_of(workers[0])}", *workers[1:]]]
    chief = start(worker(workers, 0))
    for job in jobs:
        with connected(workers[0]) as sock:
            sock.sendall(hello(worker(job, 1)))
            error = _hello.parse_answer(sock.recv(_hello.MAX_LINE))
            assert isinstance(error, ClusterConfigError) and "the same" in str(error), error
    assert met(chief, *(start(worker(workers, i)) for i in (1, 2)))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("worker 0 turns away what does not name it as its chief, and waits on: worker 1 (127.0.0.1:")
    assert "was told of 2 workers, the chief" in warning
    late = start(worker(workers, 0), timeout=0.5)
    with connected(workers[0]) as sock:
        sock.sendall(hello(worker(jobs[0], 1)))
        sock.recv(1)
    error = late.result(60)[0]
    assert isinstance(error, ClusterStartError) and "Turned away: worker 1 (127.0.0.1:" in str(error)


def test_the_first_difference_of_two_hellos_is_told() -> None:
    workers = ["h0:1", "h1:1", "h2:1"]
    mine = _hello.introduce(worker(workers, 0), VERSIONS, "p", "t")

    def difference(told: Sequence[str] = workers, versions: Mapping[str, str] = VERSIONS, **change: Any) -> str:
        theirs = _hello.parse_hello(dataclasses.replace(_hello.introduce(worker(told, 1), versions, "p", "t"), **change).encode())
        assert theirs is not None
        return _hello.first_difference("they", theirs, "me", mine)

    assert difference() == difference(index=2) == ""
    assert difference(told=workers[:2]) == (
        "they was told of 2 workers, me of 3; give both the same cluster, or start all again if it has just changed"
    )
    assert difference(told=["h0:1", "h1:1", "h3:1"]) == (
        "they was given another cluster than me: worker 2 is at 'h3:1' for the one, at 'h2:1' for the other; give both the same"
    )
    assert "has an index that is not below 3" in difference(index=3)
    odd = r"they runs jax '0.9\n\x1b[31m', me runs '0.10.2'; install the same version on both"
    assert difference(versions=VERSIONS | {"jax": "0.9\n\x1b[31m"}) == odd
    assert difference(versions=VERSIONS | {"x": "1"}) == "they runs x '1', me runs 'none'; install the same version on both"
    many = [f"h{i}.example.org:1" for i in range(500)]
    mine, theirs = (_hello.introduce(worker(w, 0), {}, "p", "t") for w in (many, [*many[:-1], "other:1"]))
    assert [*mine.workers] == many[:1] and len(mine.encode()) < _hello.MAX_LINE, "too many for a line: compared by digest"
    assert _hello.first_difference("they", theirs, "me", mine) == "they was given another cluster than me; give both the same"


def test_an_address_that_is_not_this_host_s_or_does_not_exist_is_an_error_at_once() -> None:
    before = time.monotonic()
    for index, workers in (
        (0, ["203.0.113.1:2222", "203.0.113.2:2222"]),
        (0, ["203.0.113.1:2222", "203.0.113.1:2223"]),
        (1, ["127.0.0.1:1", "203.0.113.2:1"]),
    ):
        with pytest.raises(ClusterConfigError, match=f"TF_CONFIG: this process is worker {index} at {workers[index]}") as caught:
            meet(worker(workers, index, found_in="TF_CONFIG"), VERSIONS, TIMEOUT)
        assert f"is not an address of this host ({socket.gethostname()})" in str(caught.value)
    for index in (0, 1):
        with pytest.raises((ClusterConfigError, ClusterStartError), match=r"name 'no-such-host.invalid' in the arguments has no"):
            meet(worker(["no-such-host.invalid:2222", "127.0.0.1:1"], index), VERSIONS, TIMEOUT)
    assert time.monotonic() - before < TIMEOUT / 2


def test_a_name_server_that_does_not_answer_holds_nobody_up(monkeypatch: Patch) -> None:
    asked, silent = socket.getaddrinfo, threading.Event()

    def never(host: str, port: int, **more: Any) -> Any:
        if not more["flags"]:
            silent.wait(30)
        return asked(host, port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", never)
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 0.3)
    with pytest.raises(ClusterStartError, match=r"no name server answered within 0\.2 s"):
        meet(worker(["localhost:1", "127.0.0.1:1"], 0), VERSIONS, 5)
    silent.set()
    for thread in threading.enumerate():
        if thread.name == "mirrored-look-up":
            thread.join()


@pytest.mark.parametrize("late", [True, False])
def test_only_in_kubernetes_a_name_may_appear_late(late: bool, start: Start, monkeypatch: Patch) -> None:
    """It means two addresses, in an order of chance: worker 0 listens at one, and the other finds it there."""
    asked, calls = socket.getaddrinfo, []

    def slowly(host: str, port: int, **more: Any) -> Any:
        if host == "pod-0.pods" and not more["flags"]:
            calls.append(host)
            if len(calls) < 3:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            found = [asked(address, port, **more) for address in ("127.0.0.1", "127.0.0.2")]
            return [*found[len(calls) % 2], *found[1 - len(calls) % 2]]
        return asked(host, port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    workers = [f"pod-0.pods:{port_of(addresses(1)[0])}", *addresses(1)]
    results = outcomes([start(worker(workers, i, names_come_late=late)) for i in range(2)])
    assert all(isinstance(result, Meeting if late else ClusterConfigError) for result in results), results


def test_a_chief_that_comes_back_at_another_address_is_found_there(start: Start, monkeypatch: Patch) -> None:
    asked, moved = socket.getaddrinfo, threading.Event()
    calls: list[str] = []
    chief, own = addresses(2)

    def look_up(host: str, port: int, **more: Any) -> Any:
        if host != "localhost" or more["flags"]:
            return asked(host, port, **more)
        calls.append(host)
        if len(calls) > 2:
            moved.set()
        return asked("127.0.0.1", port if moved.is_set() else port_of(own), **more)  # at first, where nobody listens

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    workers = [f"localhost:{port_of(chief)}", own]
    waiting = start(worker(workers, 1))
    assert moved.wait(20)
    results = outcomes([waiting, start(worker(workers, 0))])
    assert all(isinstance(result, Meeting) for result in results), results


def test_the_chief_listens_at_its_own_address_and_on_loopback_where_all_are_on_one_host(start: Start, monkeypatch: Patch) -> None:
    asked, (port, other) = socket.getaddrinfo, map(port_of, addresses(2))
    names = {"chief.name": ("203.0.113.1", "127.0.0.2")}  # the first one is of another host
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **more: [r for h in names.get(host, (host,)) for r in asked(h, *a, **more)]
    )
    (error,) = outcomes([start(worker([f"chief.name:{port}", "203.0.113.2:1"], 0), timeout=0.05)])
    assert "the chief's address means 127.0.0.2 on the chief's host" in str(error)
    local = [f"127.0.0.2:{port}", f"127.0.0.2:{other}"]
    assert outcomes([start(worker(local, i)) for i in range(2)])[0] == Meeting("127.0.0.1", f"127.0.0.1:{port}")


def test_what_a_chief_says_of_many_missing_workers_and_of_an_address_that_only_its_own_host_can_reach(
    start: Start, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(_gathering, "LINGER_SECONDS", 0.0)
    own, *local = addresses(30)
    for others, says in (
        (local, rf"worker 8 \({local[7]}\) and 21 more; 1 of 30 present after 0 s\. Are they started"),
        (["203.0.113.2:2222"], r"the chief's address means 127.0.0.1 on the chief's host, which other hosts cannot reach"),
    ):
        (error,) = outcomes([start(worker([own, *others], 0), timeout=0.05)])
        assert re.search(says, str(error)), error


# The port.


@pytest.mark.parametrize(("bound_to", "share"), [("127.0.0.1", False), ("", True), ("::", True)])
def test_a_port_that_stays_taken_is_an_error_in_time_and_whoever_has_it_keeps_it(
    bound_to: str, share: bool, start: Start, caplog: Log, monkeypatch: Patch
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
            (error,) = outcomes([start(worker([f"127.0.0.1:{port}", *addresses(1)], 0), timeout=0.3)], at_least=0.3)
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

    server = socket.create_server(("127.0.0.1", port_of(address)))
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield wait_for
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        server.close()


def test_a_port_of_another_program_is_an_error_at_once() -> None:
    workers = addresses(2)
    with (
        program_at(workers[0], b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        pytest.raises(ClusterStartError, match="is taken by another program or job, after 0 s"),
    ):
        meet(worker(workers, 0), VERSIONS, 5)


def test_an_earlier_run_that_ends_is_waited_for(start: Start) -> None:
    workers = addresses(3)
    with program_at(workers[0], SETTINGS) as wait_for:
        futures = [start(worker(workers, i)) for i in range(3)]
        wait_for(9)
        assert not any(future.done() for future in futures)
    assert met(*futures)


def test_a_second_job_on_the_port_of_jax_waits_without_disturbing_it(start: Start) -> None:
    """gRPC would let it in, so that it kills the first."""
    workers = addresses(2)
    service = _jax.get_distributed_runtime_service(workers[0], 1)
    client = _jax.get_distributed_runtime_client(workers[0], 0, init_timeout=10)
    client.connect()
    try:
        errors = outcomes([start(worker(workers, i), timeout=0.3) for i in range(2)], at_least=0.3)
        says = ["taken by another program", "a job runs there, an earlier run of this one or"]
        for error, text in zip(errors, says, strict=True):
            assert isinstance(error, ClusterStartError) and text in str(error) and str(port_of(workers[0])) in str(error)
        next_run = [start(worker(workers, i)) for i in range(2)]
        client.key_value_set("still", "there")
        assert client.key_value_try_get("still") == "there" and not any(future.done() for future in next_run)
    finally:
        client.shutdown()
        service.shutdown()
    assert met(*next_run)


def test_a_chief_that_waits_for_its_port_says_so_less_and_less_often(caplog: Log) -> None:
    address, *others = addresses(2)
    clock = _gathering.Clock(0.2)
    clock.started -= 100
    ours = _hello.introduce(worker([address, *others], 0), VERSIONS, "chief", "0")
    with program_at(address, SETTINGS), socket.socket() as sock, pytest.raises(OSError, match="in use"):
        meeting._bind(sock, ("127.0.0.1", port_of(address)), ours, clock)
    says = f"worker 0 is waiting for port {port_of(address)} on 127.0.0.1, which another run or program has; after 100 s"
    assert caplog.messages == [says]


def test_a_worker_that_waited_for_another_job_does_not_disturb_it(start: Start) -> None:
    ours = addresses(2)
    theirs = [ours[0], *addresses(1)]
    with program_at(ours[0], SETTINGS) as wait_for:
        late = start(worker(ours, 1))
        wait_for(2)
    chief = start(worker(theirs, 0))
    (error,) = outcomes([late])
    assert isinstance(error, ClusterStartError) and "another cluster starts there (worker 1 (127.0.0.1:" in str(error)
    assert met(chief, start(worker(theirs, 1)))


def test_a_job_that_took_the_port_of_another_leaves_it_to_that(start: Start) -> None:
    ours = addresses(2)
    with program_at(ours[0], SETTINGS) as wait_for:
        taker = start(worker([ours[0], *addresses(2)], 0))
        wait_for(2)
    first = start(worker(ours, 1))  # our job starts again
    (error,) = outcomes([taker])
    assert isinstance(error, ClusterStartError)
    assert "worker 1 (127.0.0.1:" in str(error) and "was told of 2 workers, the chief" in str(error)
    assert f"port {port_of(ours[0])} belongs to another job, which has started again: give each its own" in str(error)
    assert met(first, start(worker(ours, 0)))


def test_a_connection_to_a_host_that_vanished_does_not_stay(start: Start, monkeypatch: Patch) -> None:
    workers, seen, set_option = addresses(2), set(), socket.socket.setsockopt

    def setsockopt(self: socket.socket, level: int, *option: Any) -> None:
        seen.add((self.getsockname()[1] == port_of(workers[0]), *option))
        set_option(self, level, *option)

    monkeypatch.setattr(socket.socket, "setsockopt", setsockopt)
    assert met(*(start(worker(workers, i)) for i in range(2)))
    options = [(socket.SO_KEEPALIVE, 1), (socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)]
    assert {(of_chief, *option) for of_chief in (True, False) for option in options} <= seen


def test_a_privileged_or_impossible_port_is_an_error_that_names_it(monkeypatch: Patch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        if address[1]:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ClusterConfigError, match=r"the chief cannot listen at 127.0.0.1:80 \(127.0.0.1\): Permission denied"):
        meet(worker(["127.0.0.1:80", "127.0.0.1:81"], 0), VERSIONS, 5)


def test_another_cluster_on_the_port_does_not_disturb_the_first(start: Start) -> None:
    workers = addresses(2)
    first = start(worker(workers, 0))
    with connected(workers[0]):
        (error,) = outcomes([start(worker([workers[0], *addresses(2)], 0))])
    assert isinstance(error, ClusterStartError)
    assert f"port {port_of(workers[0])} is taken: another cluster starts there" in str(error)
    assert met(first, start(worker(workers, 1)))


def answered(says: bytes, start: Start, timeout: float = 5.0) -> tuple[str, Exception]:
    """Return the address at which a worker looks for its chief, and the error that it gets when this answers there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        workers = [f"127.0.0.1:{server.getsockname()[1]}", *addresses(1)]
        future = start(worker(workers, 1), timeout=timeout)
        with server.accept()[0] as peer, contextlib.suppress(OSError):
            peer.sendall(says)
            future.result(60)
        return workers[0], outcomes([future])[0]


def test_a_program_that_is_not_the_chief_is_an_error_at_once(start: Start) -> None:
    endless = _hello.encode({})[:-2] + b" " * _hello.MAX_LINE
    http = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    for says in (b"\x00\x00\x12\x04\x00\x00\x00\x00\x01", http, b'{"a": 1}\n', b"x" * 99_999, endless):
        address, error = answered(says, start)
        assert isinstance(error, ClusterStartError) and str(error).isprintable() and len(str(error)) < 400
        assert f"what answers at {address} is not the chief of this cluster: it says '" in str(error)


def test_a_program_that_says_nothing_is_waited_for_and_what_a_false_chief_says_is_escaped(
    start: Start, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(meeting, "LINGER_SECONDS", 0.1)
    _, error = answered(b"", start, timeout=0.1)
    assert isinstance(error, ClusterStartError) and "it accepts connections but says nothing" in str(error)
    _, error = answered(_hello.encode_answer(ClusterConfigError("evil\n\x1b[2Jtext \u202e é")), start)
    assert str(error) == r"evil\n\x1b[2Jtext \u202e \xe9"


def test_a_worker_does_not_take_its_own_connection_for_the_chief(monkeypatch: Patch) -> None:
    workers, connect = addresses(2), socket.socket.connect

    def to_itself(self: socket.socket, address: Any) -> None:
        if address[1] == port_of(workers[0]):
            self.bind(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", to_itself)
    with pytest.raises(ClusterStartError, match="Connection refused"):
        meet(worker(workers, 1), VERSIONS, 0.1)
    assert can_bind(workers[0])


# Strangers.


def test_what_is_no_hello_is_not_read() -> None:
    cluster = worker(["h:1", "h:2"], 1)
    line, answer = hello(cluster).rstrip(b"\n"), _hello.encode_answer(_hello.GO).rstrip(b"\n")
    for parse, right in ((_hello.parse_hello, line), (_hello.parse_answer, answer)):
        assert parse(right.ljust(_hello.MAX_LINE)) is not None and parse(right.ljust(_hello.MAX_LINE + 1)) is None
    word, changes = "x" * 301, [{"magic": "mirrored-preflight-0"}, {"more": 1}, {"is_late": 1}, {"versions": []}]
    changes += [{name: odd} for name in ("index", "num_workers") for odd in (-1, 1.5, True, "1", None)]
    changes += [{name: odd} for name in ("process", "digest", "token") for odd in (1, None, ["x"])] + [{"workers": [1]}]
    changes += [{"token": word}, {"workers": [word]}, {"versions": {"jax": word}}, {"versions": {word: "1"}}]
    assert [change for change in changes if _hello.parse_hello(hello(cluster, **change)) is not None] == []
    assert _hello.parse_hello(hello(cluster, token=word[1:])) is not None
    for odd in (b"", b"\xff", b"1", b"null", b"[" * 5000):
        assert _hello.parse_hello(odd) is _hello.parse_answer(odd) is None


def test_strangers_neither_stop_the_chief_nor_keep_its_port(start: Start) -> None:
    workers = addresses(3)
    chief = start(worker(workers, 0))
    many = [b""] * 200 + [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(range(256)) * 4, b"x" * 100_000, b'{"index": 1}\n']
    with contextlib.ExitStack() as stack:
        for says in [*many, hello(worker(workers, 1), index=-1), hello(worker(workers, 1))[:40]]:
            stranger = stack.enter_context(connected(workers[0]))
            with contextlib.suppress(OSError):
                stranger.sendall(says)
        assert met(chief, *(start(worker(workers, i)) for i in (1, 2)))
        assert can_bind(workers[0])


@contextlib.contextmanager
def patient_chief(start: Start, monkeypatch: Patch, patience: float = 60.0) -> Iterator[str]:
    """Start a chief, and yield its address; in the end the other worker comes, and all is well."""
    monkeypatch.setattr(_gathering, "PATIENCE_SECONDS", patience)
    workers = addresses(2)
    chief = start(worker(workers, 0), timeout=8)
    yield workers[0]
    assert met(chief, start(worker(workers, 1)))


def test_a_stranger_that_writes_slowly_is_cut_off(start: Start, monkeypatch: Patch) -> None:
    with patient_chief(start, monkeypatch, 0.2) as address, connected(address) as stranger:
        stranger.settimeout(0.02)
        with pytest.raises(ConnectionError):
            for _ in range(200):
                stranger.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(1):
                        raise ConnectionError


def test_a_stranger_that_says_too_much_and_the_oldest_of_too_many_are_cut_off_at_once(start: Start, monkeypatch: Patch) -> None:
    with patient_chief(start, monkeypatch) as address, contextlib.ExitStack() as stack:
        with connected(address) as stranger, contextlib.suppress(ConnectionError):
            stranger.settimeout(5)
            stranger.sendall(b"x" * (_hello.MAX_LINE + 1))
            assert stranger.recv(1) == b""
        first, *_ = [stack.enter_context(connected(address)) for _ in range(_gathering.MAX_STRANGERS + 1)]
        first.settimeout(5)
        with pytest.raises(ConnectionResetError):
            first.recv(1)


def test_a_chief_that_cannot_take_more_tells_all_at_once(start: Start, monkeypatch: Patch) -> None:
    taken: list[socket.socket] = []
    accept = socket.socket.accept

    def limited(self: socket.socket) -> Any:
        if sum(sock.fileno() >= 0 for sock in taken) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        sock, address = accept(self)
        taken.append(sock)
        return sock, address

    monkeypatch.setattr(socket.socket, "accept", limited)
    workers = addresses(4)
    futures = [start(worker(workers, index)) for index in range(4)]
    for outcome in outcomes(futures):
        assert isinstance(outcome, ClusterConfigError), outcome
        assert "worker 0 cannot take more than 2 of 3 connections: Too many open files. It needs an open file for" in str(outcome)


def test_a_worker_may_open_as_many_files_as_it_is_allowed(start: Start) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, meeting.MAX_OPEN_FILES) if hard != resource.RLIM_INFINITY else meeting.MAX_OPEN_FILES
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        workers = addresses(2)
        assert met(*(start(worker(workers, index)) for index in range(2)))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
