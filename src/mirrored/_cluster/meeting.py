"""Are all workers there, and alike? Asked before `jax.distributed` starts, because JAX's answer is SIGABRT or SIGSEGV.

Worker 0 listens at the coordinator's address until all others have said hello, then frees it (docs/design/clusters.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import queue
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from .._errors import ClusterConfigError, ClusterStartError
from .._text import describe
from .environments import TORCHRUN
from .gathering import LINGER_SECONDS, PATIENCE_SECONDS, Clock, Gathering, keep_alive, reset_on_close
from .hello import GO, MAX_LINE, RUNNING, Hello, introduce, may_be_ours, parse_answer
from .spec import Cluster, is_loopback, join_address, split_address

#: The limit of open files if the host sets none; not more, as some programs loop over all numbers up to it.
MAX_OPEN_FILES = 1 << 20
_BY_TORCHRUN = (
    ". When rank 0 is lost, torchrun keeps the old MASTER_PORT: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, on "
    "all hosts"
)

_Address = tuple[socket.AddressFamily, Any]


@dataclasses.dataclass(frozen=True)
class Meeting:
    """A worker's addresses, known after it has met the others."""

    host: str  # the numeric address at which other workers reach this one, for the collectives
    bind_address: str | None = None  # the only address at which worker 0's coordinator is to listen


def meet(cluster: Cluster, versions: Mapping[str, str], timeout_seconds: float) -> Meeting:
    """Wait until all workers are there, and check that they have the same cluster and versions.

    For several workers. On return, worker 0's port is free for `jax.distributed`. An error comes within the timeout and 2 s.

    Raises:
        ClusterConfigError: when starting again would not help: an address that is not this host's, a name that does not
            exist, an index that two workers have, workers that differ in their cluster or versions.
        ClusterStartError: when a worker is missing, the chief cannot be reached, or the port is taken.
    """
    clock = Clock(timeout_seconds)
    _allow_open_files()
    own_host = _own_host(cluster, clock)
    hello = introduce(cluster, versions, f"{socket.gethostname()} pid {os.getpid()}", secrets.token_hex(8))
    if not cluster.is_chief:
        return Meeting(_join(cluster, hello, clock, own_host))
    host, port = split_address(cluster.coordinator_address or "")
    if own_host and not cluster.is_local:
        host = own_host
    family, address = _resolve(host, port, cluster, clock)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        _listen(listener, address, cluster.coordinator_address or "", hello, clock)
        Gathering(cluster, hello, listener, clock).gather()
    return Meeting(address[0], join_address(*address[:2]))


def _allow_open_files() -> None:
    """Raise this process's limit of open files (mostly 1,024) as far as allowed: it needs one for each other worker."""
    with contextlib.suppress(OSError, ValueError):  # the host may forbid it
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _join(cluster: Cluster, hello: Hello, clock: Clock, own_host: str | None) -> str:
    """Say hello to worker 0 until it lets all start; return this worker's own host."""
    chief = cluster.coordinator_address or ""
    addresses = _resolve(*split_address(chief), cluster, clock)
    why = ""
    while True:
        for family, address in addresses:
            try:
                with _ask(family, address, hello, clock) as sock:
                    why = _await_start(sock, chief, hello, clock)
                    if not why:
                        host = sock.getsockname()[0]
                        if own_host is None or is_loopback(own_host):
                            return host
                        return own_host
            except OSError as error:
                why = error.strerror or str(error)
        if clock.left <= 0:
            raise ClusterStartError(
                f"worker {cluster.worker_index} waited {clock.waited} for the chief ({chief}): {why}. Is worker 0 started, with "
                f"the same cluster as here ({cluster.found_in}), and can this host reach it there (the right address and port, "
                "no firewall)? If it only needs longer: mr.CommunicationOptions(timeout_seconds=...)"
                f"{_BY_TORCHRUN * (cluster.found_in == TORCHRUN)}"
            )
        clock.wait(f"worker {cluster.worker_index} is waiting for the chief ({chief}): {why};")
        if isinstance(found := _look_up(*split_address(chief), 1.0), list):  # it may have come back at another address
            addresses = found


@contextlib.contextmanager
def _ask(family: socket.AddressFamily, address: Any, hello: Hello, clock: Clock) -> Iterator[socket.socket]:
    """Connect, and say hello."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(max(0.01, min(PATIENCE_SECONDS, clock.left)))  # 0 would mean not to wait
        sock.connect(address)
        keep_alive(sock)
        if sock.getsockname() == sock.getpeername():
            # On one host, the kernel may choose the chief's port for our end too, and then connects us to ourselves.
            reset_on_close(sock)
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        sock.sendall(hello.encode())
        yield sock


def _await_start(sock: socket.socket, chief: str, hello: Hello, clock: Clock) -> str:
    """Wait for worker 0's answer: return "" for go, else the reason to try again, or raise worker 0's error."""
    # A running job is a reason to wait, not an error: the launchers of several hosts do not restart at the same moment.
    state = "it accepts connections but says nothing"
    for answer in _answers(sock, clock):
        if answer is None:
            clock.report(f"waiting for the chief ({chief}): {state};")
        elif answer == RUNNING:
            hello.is_late = True
            return "a job runs there, an earlier run of this one or another that has the same port"
        elif isinstance(answer, bytes):
            raise ClusterStartError(
                f"what answers at {chief} is not the chief of this cluster: it says {describe(answer.decode('latin1'), 40)}; "
                "another program has the port"
            )
        elif isinstance(answer, Exception):
            raise answer
        elif answer == GO:
            return ""
        else:
            state = "it knows this worker, and is waiting for others"
    return "it hung up" if clock.left > -LINGER_SECONDS else state


def _answers(sock: socket.socket, clock: Clock) -> Iterator[str | Exception | bytes | None]:
    """Yield parsed answers, unparsed bytes, and None whenever it is time to log; stop at the deadline or hang-up."""
    buffer = b""
    while (left := clock.left + LINGER_SECONDS) > 0:
        sock.settimeout(max(0.01, min(left, clock.next_report - time.monotonic())))  # 0 would mean not to wait
        try:
            data = sock.recv(MAX_LINE)
        except TimeoutError:
            yield None
            continue
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            yield parse_answer(line) or line
        if len(buffer) > MAX_LINE or not may_be_ours(buffer):
            yield parse_answer(buffer) or buffer


def _listen(sock: socket.socket, address: Any, chief: str, hello: Hello, clock: Clock) -> None:
    """Listen at the address that jax's service will take, and at no other."""
    sock.setblocking(False)
    try:
        _bind(sock, address, hello, clock)
        sock.listen(128)
        # The connections inherit this, so that none of them keeps jax from the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        host, port = address[:2]
        if error.errno == errno.EADDRINUSE:
            raise ClusterStartError(
                f"port {port} on {host} is taken by another program or job, after {clock.waited}; give the chief ({chief}) "
                "another port"
            ) from error
        raise ClusterConfigError(f"the chief cannot listen at {chief} ({host}): {error.strerror}") from error


def _bind(sock: socket.socket, address: Any, hello: Hello, clock: Clock) -> None:
    """Bind the socket; wait for the end of a job that has the port, perhaps an earlier run of this one."""
    first_report = clock.started + LINGER_SECONDS  # early, so that a slip is seen
    while not _is_bound(sock, address, hello, clock):
        clock.next_report, first_report = min(clock.next_report, first_report), math.inf
        clock.wait(f"worker 0 is waiting for port {address[1]} on {address[0]}, which another run or program has;")


def _is_bound(sock: socket.socket, address: tuple[object, ...], hello: Hello, clock: Clock) -> bool:
    """Bind the port alone, which fails if any socket is on it. If none of these listens, bind it with SO_REUSEADDR."""
    # A socket that does not listen is left from an ended run, and jax may bind beside it; or it is about to listen.
    for share in (0, 1):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, share)
        try:
            sock.bind(address)
            return True
        except OSError as error:
            if error.errno != errno.EADDRINUSE or clock.left <= 0:
                raise
        if _is_listened_to(sock.family, address, dataclasses.replace(hello, is_late=True)):
            hello.is_late = True
            return False
    return False


def _is_listened_to(family: socket.AddressFamily, address: Any, hello: Hello) -> bool:
    """Tell whether jax listens at an address; raise the error of a cluster that starts there, OSError for another program."""
    clock = Clock(0.2)  # for the connection; the answer has LINGER_SECONDS more
    try:
        with _ask(family, address, hello, clock) as sock:
            answer = next(_answers(sock, clock), None)
    except ConnectionRefusedError:
        return False
    except OSError:  # somebody is there, who does not answer in time
        return True
    if isinstance(answer, bytes):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    if isinstance(answer, Exception):
        raise answer
    return True


def _own_host(cluster: Cluster, clock: Clock) -> str | None:
    """Return this worker's numeric address; raise ClusterConfigError if its address belongs to another host."""
    if cluster.address is None:
        return None
    host, _ = split_address(cluster.address)
    for family, address in _resolve(host, 0, cluster, clock):
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            try:
                sock.bind(address)
            except OSError:  # not an address of this host
                continue
            return address[0]
    raise ClusterConfigError(
        f"{cluster.found_in}: this process is worker {cluster.worker_index} at {cluster.address}, but {host} is not an "
        f"address of this host ({socket.gethostname()}); check the index and the address"
    )


def _resolve(host: str, port: int, cluster: Cluster, clock: Clock) -> list[_Address]:
    """Return the addresses of a host; an unknown name is an error at once, in Kubernetes after the timeout."""
    while True:
        found = _look_up(host, port, min(PATIENCE_SECONDS, max(0.1, clock.left)) - 0.1)
        if isinstance(found, list):
            return found
        if not cluster.names_come_late or clock.left <= 0:
            break
        clock.wait(f"waiting for the name {host} to appear in the DNS")
    text = f"the host name {describe(host)} in {cluster.found_in} has no address: {found.strerror or found}"
    if found.errno == socket.EAI_NONAME:
        raise ClusterConfigError(text)
    raise ClusterStartError(text)


def _look_up(host: str, port: int, seconds: float) -> list[_Address] | OSError:
    """Ask the resolver in a thread, because a call that waits for a name server cannot be interrupted."""

    def ask(flags: int) -> list[_Address] | OSError:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        except OSError as error:
            return error
        except UnicodeError as error:
            return OSError(socket.EAI_NONAME, str(error))
        return list(dict.fromkeys((family, address) for family, _, _, _, address in found))

    numeric = ask(socket.AI_NUMERICHOST)
    if isinstance(numeric, list):
        return numeric
    answers: queue.SimpleQueue[list[_Address] | OSError] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(ask(0)), name="mirrored-look-up", daemon=True).start()
    try:
        return answers.get(timeout=max(0.05, seconds))
    except queue.Empty:
        return OSError(socket.EAI_AGAIN, f"no name server answered within {seconds:.1f} s")
