"""Worker 0's part of the meeting before jax starts: collects all hellos, tells the outcome (docs/design/clusters.md)."""

from __future__ import annotations

import dataclasses
import errno
import logging
import selectors
import socket
import struct
import time

from .._errors import ClusterConfigError, ClusterStartError
from .._text import describe
from .environments import SLURM
from .hello import GO, MAX_LINE, WAITING, Hello, encode_answer, first_difference, parse_hello
from .spec import Cluster, is_loopback, join_address, split_address

#: The time for a new connection to say hello, for a name server to answer, and for one attempt to connect.
PATIENCE_SECONDS = 2.0
#: When a waiting worker logs that it waits; then again at twice the time, and so on.
PROGRESS_SECONDS = 10.0
#: How long worker 0 tells a failure to late workers, and how long a worker waits for it.
LINGER_SECONDS = 1.0
#: The most connections without a hello; if there are more, worker 0 closes the oldest.
MAX_STRANGERS = 64
#: When the kernel probes a silent connection: it gives up after 5 + 3 * 2 seconds.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
_BY_SRUN = ", which srun starts (a shell of `srun --pty` is one task alone: in it, write `srun --overlap python train.py`)"
_logger = logging.getLogger("mirrored")


def reset_on_close(sock: socket.socket) -> None:
    """End a connection by a reset: after a hang-up the port would stay in use for a minute."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def keep_alive(sock: socket.socket) -> None:
    """End a connection soon after the other host has died without hanging up."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Clock:
    """A deadline, and the time of the next log line of a worker that waits."""

    def __init__(self, seconds: float) -> None:
        self.started = time.monotonic()
        self.deadline, self.next_report = self.started + seconds, self.started + PROGRESS_SECONDS
        self._pause = 0.02

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def waited(self) -> str:
        return f"{time.monotonic() - self.started:.0f} s"

    def report(self, what: str) -> None:
        """Log the state of a wait when it is time for it."""
        if time.monotonic() >= self.next_report:
            _logger.warning("%s after %s", what, self.waited)
            self.next_report = self.started + 2 * (time.monotonic() - self.started)

    def wait(self, what: str) -> None:
        """Report a wait, and sleep for a moment, for longer each time."""
        self.report(what)
        time.sleep(max(0.0, min(self._pause, self.left)))
        self._pause = min(2 * self._pause, 0.5)


@dataclasses.dataclass(eq=False)
class _Peer:
    """A connection to worker 0: a stranger's, until it has said hello."""

    sock: socket.socket
    address: str
    until: float
    buffer: bytearray = dataclasses.field(default_factory=bytearray)
    hello: Hello | None = None

    def answer(self, answer: str | Exception) -> bool:
        """Send a line without waiting: it is so short that it fits, unless the peer does not read."""
        try:
            return self.sock.send(line := encode_answer(answer)) == len(line)
        except OSError:
            return False


class Gathering:
    """Worker 0's side of the meeting, which collects a hello from every other worker and tells all of them the outcome."""

    # One thread serves all connections without blocking on any, so that a stranger cannot hold up the others.
    def __init__(self, cluster: Cluster, hello: Hello, listener: socket.socket, clock: Clock) -> None:
        self.cluster, self.hello, self.listener, self.clock = cluster, hello, listener, clock
        self.selector = selectors.DefaultSelector()
        self.peers: dict[_Peer, None] = {}  # in the order in which they came
        self.present: dict[int, _Peer] = {}
        self.failure: Exception | None = None  # for all workers
        self.turned_away = ""  # why the first worker of another job was turned away

    def gather(self) -> None:
        """Wait until all workers are there, tell them, and close all connections."""
        try:
            self.selector.register(self.listener, selectors.EVENT_READ)
            while not self.failure and self._missing():
                if self.clock.left <= 0:
                    turned_away = f". Turned away: {self.turned_away}" * bool(self.turned_away)
                    text = f"{self._waiting()} after {self.clock.waited}{self._hint()}. {self._advice()}{turned_away}"
                    self.failure = ClusterStartError(text)
                else:
                    self.clock.report(self._waiting())
                    self._turn(min(self.clock.deadline, self.clock.next_report))
            self._tell_all(self.failure)
        finally:
            for peer in list(self.peers):
                self._drop(peer)
            self.selector.close()

    def _tell_all(self, failure: Exception | None) -> None:
        """Tell all workers, late ones too, to start or the failure; wait until they have hung up."""
        if not failure:  # close the port first, so that nobody takes us for jax
            self.selector.unregister(self.listener)
            self.listener.close()
        for peer in self.peers:
            if peer.hello and not peer.answer(failure or GO) and not failure:
                raise ClusterStartError(f"{self._name(peer.hello.index)} left while all were told to start")
        seconds = LINGER_SECONDS if failure else PATIENCE_SECONDS
        until = time.monotonic() + seconds
        some_are_late = bool(self._missing())
        while time.monotonic() < until and (some_are_late or any(peer.hello for peer in self.peers)):
            self._turn(until)
        if failure:
            raise failure

    def _turn(self, until: float) -> None:
        """Wait for events, and handle them: hang-ups before hellos, because a worker may leave and come again."""
        until = min([until, *(peer.until for peer in self.peers if not peer.hello)])
        for key, _ in self.selector.select(max(0.0, until - time.monotonic())):
            if key.data:
                self._read(key.data)
            else:
                self._accept()
        strangers = [peer for peer in self.peers if not peer.hello]
        for peer in strangers:
            line, end, _ = bytes(peer.buffer).partition(b"\n")
            if end or len(line) > MAX_LINE:
                if hello := parse_hello(line):
                    self._judge(peer, hello)
                else:
                    self._drop(peer, f"said {describe(line[:40].decode('latin1'))}")
            elif time.monotonic() >= peer.until or peer in strangers[:-MAX_STRANGERS]:
                self._drop(peer, "said nothing in time, or while many others came")

    def _accept(self) -> None:
        try:
            sock, address = self.listener.accept()
        except (BlockingIOError, ConnectionError):  # it hung up before it was accepted
            return
        except OSError as error:
            self.failure = self.failure or self._no_more(error)
            time.sleep(0.01)  # the connection stays in the queue, and is reported again and again
            return
        sock.setblocking(False)
        keep_alive(sock)
        peer = _Peer(sock, join_address(*address[:2]), time.monotonic() + PATIENCE_SECONDS)
        self.peers[peer] = None
        self.selector.register(sock, selectors.EVENT_READ, peer)

    def _no_more(self, error: OSError) -> Exception:
        text = f"worker 0 cannot take more than {len(self.peers)} of {self.cluster.num_workers - 1} connections: {error.strerror}"
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return ClusterStartError(text)
        return ClusterConfigError(
            f"{text}. It needs an open file for each worker: raise the limit on its host, which `ulimit -Hn` shows, or start one "
            "worker for each host instead of one for each device"
        )

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(MAX_LINE)
        except BlockingIOError:  # the kernel may announce data, and then drop it
            return
        except OSError:  # a reset is a hang-up too
            data = b""
        if not data:
            self._drop(peer, "left")
        elif not peer.hello:
            peer.buffer += data

    def _judge(self, peer: _Peer, hello: Hello) -> None:
        """Take a worker, possibly one that comes again. A difference ends all workers; between two jobs it ends the later one."""
        before = self.present.get(hello.index)
        difference = self._difference(peer, hello, before)
        is_foreign = not self._has_same_chief(hello)  # then it fails alone: it may be anybody
        if difference and hello.digest != self.hello.digest and (is_foreign or hello.is_late or self.hello.is_late):
            self._turn_away(peer, hello, difference, is_foreign)
            return
        peer.hello = hello
        self.present[hello.index] = peer
        self.failure = self.failure or difference
        if before and not self.failure:
            self._drop(before)
        peer.answer(self.failure or WAITING)

    def _has_same_chief(self, hello: Hello) -> bool:
        return [*hello.workers[:1]] == [*self.hello.workers[:1]]

    def _turn_away(self, peer: _Peer, hello: Hello, difference: Exception, is_foreign: bool) -> None:
        port = split_address(self.cluster.coordinator_address or "")[1]
        if hello.is_late:
            peer.answer(ClusterStartError(f"port {port} is taken: another cluster starts there ({difference})"))
        elif is_foreign:
            peer.answer(difference)
            if not self.turned_away:
                _logger.warning("worker 0 turns away what does not name it as its chief, and waits on: %s", difference)
            self.turned_away = self.turned_away or str(difference)
        else:
            text = f"{difference}. Or port {port} belongs to another job, which has started again: give each its own"
            self.failure = self.failure or ClusterStartError(text)
        self._drop(peer)

    def _difference(self, peer: _Peer, hello: Hello, before: _Peer | None) -> Exception | None:
        """Return the error of a worker that differs from worker 0, or has the index of another worker."""
        they = f"worker {hello.index} ({peer.address}, {describe(hello.process)})"
        me = f"the chief ({self.cluster.coordinator_address}, {describe(self.hello.process)})"
        if difference := first_difference(they, hello, me, self.hello):
            # When the size of a job changes, its workers start one by one, some of them with the old size.
            is_resized = hello.num_workers != self.hello.num_workers and self._has_same_chief(hello)
            if is_resized:
                return ClusterStartError(difference)
            return ClusterConfigError(difference)
        if hello.index == 0 or (before and before.hello and before.hello.token != hello.token):
            other = f"another ({before.address}, {describe(before.hello.process)})" if before and before.hello else me
            text = f"two processes say that they are worker {hello.index}: {they} and {other}; give each its own index"
            return ClusterConfigError(text)
        return None

    def _drop(self, peer: _Peer, why: str = "") -> None:
        """Close a connection; reset a stranger's, so that the port is free at once."""
        del self.peers[peer]
        if peer.hello is None:
            _logger.debug("hung up on %s, which %s", peer.address, why)
            reset_on_close(peer.sock)
        elif self.present.get(peer.hello.index) is peer:
            del self.present[peer.hello.index]
        self.selector.unregister(peer.sock)
        peer.sock.close()

    def _missing(self) -> list[int]:
        return [index for index in range(1, self.cluster.num_workers) if index not in self.present]

    def _name(self, index: int) -> str:
        address = self.cluster.workers[index]
        return f"worker {index}" + f" ({address})" * bool(address)

    def _waiting(self) -> str:
        missing = self._missing()
        names = ", ".join(self._name(index) for index in missing[:8]) + f" and {len(missing) - 8} more" * (len(missing) > 8)
        by_srun = _BY_SRUN * (self.cluster.found_in == SLURM)
        return f"waiting for {names}{by_srun}; {self.cluster.num_workers - len(missing)} of {self.cluster.num_workers} present"

    def _advice(self) -> str:
        are, they = ("Is", "it") if len(self._missing()) == 1 else ("Are", "they")
        return (
            f"{are} {they} started, with the same cluster as the chief ({self.cluster.found_in}), and can {they} reach "
            f"{self.cluster.coordinator_address} (the right address and port, no firewall)? If it only needs longer: "
            "mr.CommunicationOptions(timeout_seconds=...)"
        )

    def _hint(self) -> str:
        host = self.listener.getsockname()[0]
        if self.cluster.is_local or not is_loopback(host):
            return ""
        return f" (the chief's address means {host} on the chief's host, which other hosts cannot reach)"
