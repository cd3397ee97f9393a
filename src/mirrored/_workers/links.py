"""Which other workers does this one not reach, although both reach worker 0? Asked of the kernel. No jax here.

A collective waits for ever when packets between two workers are lost: nobody has died, and both speak with the service. But the
kernel of one of them resends packets that the other does not acknowledge: those of a connection that was there, or, where a
firewall drops them, the first one of a new connection. A process that is stopped or busy is no such case: its kernel
acknowledges them.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .._text import escape, numbered
from .coordination import Coordination
from .messages import read_all
from .verdict import MAX_TEXT, Verdict

_logger = logging.getLogger("mirrored")

#: How often the kernel has sent the same in vain before a connection counts as stuck, at growing distances: for some 3 s.
STUCK_RETRIES = 4
#: The same of the first packet of a connection: for 3 s, before Linux 6.5 for 7 s.
UNANSWERED_RETRIES = 3
#: After so many more seconds it is lost; by then JAX takes a worker for lost from which worker 0 hears nothing.
LOST_SECONDS = 8.0
_OPEN = "/proc/self/fd"
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
#: Of the kernel's states.
ESTABLISHED, UNANSWERED, LISTENING = 1, 2, 10
_IPV4_IN_IPV6 = "::ffff:"
_KEY = "guard/links"
_MAX_SHOWN = 5


class Connection(NamedTuple):
    """A TCP socket of this process: its ends as host and port, the number of retransmissions in vain, and its state."""

    local: str
    remote: str  # empty where the socket listens
    retries: int
    state: int = ESTABLISHED


class Links:
    """The connections to other workers that get no answer."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination
        self._has_told = False  # whether the others may still read something of this worker
        self._is_asked = False  # whether a connection of some worker is not answered: at which addresses does this one listen?
        self.warning = ""  # what this worker has said of connections that are not answered, since it waits
        self._stuck: dict[int, float] = {}  # worker -> seconds

    def check(self, step: int, elapsed: float) -> Verdict | None:
        """Publish the connections without an answer, and return the verdict when one to this worker is lost; for one that waits.

        The kernel knows addresses, not workers: one worker publishes both ends of a connection, and the worker that has the other
        end knows the two workers. The last look was `elapsed` seconds ago.
        """
        told = self._tell_and_hear()
        before, self._stuck = self._stuck, {worker: self._stuck.get(worker, -elapsed) + elapsed for worker in self._cut_off(told)}
        for worker, seconds in self._stuck.items():
            pair = numbered(sorted((worker, self._coordination.worker)))
            if seconds >= LOST_SECONDS:
                title = f"lost the connection between {pair} at step {step}: what one sends does not reach the other"
                return Verdict(title, "All workers reach worker 0, so it is the network between these two.")
            if worker not in before:
                _logger.warning("what one of %s sends does not reach the other: the network between them is cut", pair)
        if not self.warning and (text := describe_unanswered(told, self._coordination.worker)):
            self.warning = text
            _logger.warning("%s", escape(text, MAX_TEXT))
        return None

    def rest(self) -> None:
        """Take back what this worker has published, when it does not wait any more."""
        self.warning, self._is_asked = "", False
        self._stuck.clear()
        if self._has_told:
            self._has_told = False
            self._coordination.say(_KEY, "[]")

    def describe(self) -> str:
        """Say which connections of all workers are not answered, for the error at the limit; "" if there are none."""
        return describe_unanswered(self._hear())

    def _tell_and_hear(self) -> Mapping[int, Sequence[Connection]]:
        """Publish what others need to know of this worker's sockets, and return what all workers have published."""
        own = [one for one in connections(UNANSWERED_RETRIES) if one.state == UNANSWERED or one.retries >= STUCK_RETRIES]
        if self._is_asked:
            own += [one for one in connections() if one.state == LISTENING]
        if own or self._has_told:
            self._coordination.say(_KEY, json.dumps(own))
            self._has_told = bool(own)
        told = self._hear()
        self._is_asked = any(one.state == UNANSWERED for sockets in told.values() for one in sockets)
        return told

    def _hear(self) -> Mapping[int, Sequence[Connection]]:
        texts = self._coordination.by_worker(_KEY)
        return {worker: read_all(Connection, text) or [] for worker, text in texts.items()}

    def _cut_off(self, told: Mapping[int, Sequence[Connection]]) -> list[int]:
        """Return the workers whose stuck connections end here."""
        stuck = {
            worker: {(one.remote, one.local) for one in sockets if one.state == ESTABLISHED}
            for worker, sockets in told.items()
            if worker != self._coordination.worker
        }
        ends = {(one.local, one.remote) for one in connections()} if any(stuck.values()) else set()
        return sorted(worker for worker, those in stuck.items() if those & ends)


def describe_unanswered(told: Mapping[int, Sequence[Connection]], of: int | None = None) -> str:
    """Say which workers' first packets are not answered, and by which worker; "" if there are none.

    `of` one worker: those between it and a worker. A program may have connections to others too, and only an error names these.
    """
    at = {one.local: worker for worker, sockets in told.items() for one in sockets if one.state == LISTENING}
    unanswered = [(worker, one) for worker, sockets in sorted(told.items()) for one in sockets if one.state == UNANSWERED]
    if of is not None:
        unanswered = [(worker, one) for worker, one in unanswered if one.remote in at and of in (worker, at[one.remote])]
    if not unanswered:
        return ""
    pairs = [
        f"worker {worker} cannot reach {f'worker {at[one.remote]} at ' if one.remote in at else ''}{one.remote}"
        f" ({one.retries + 1} tries)"
        for worker, one in unanswered[:_MAX_SHOWN]
    ]
    more = f", and {len(unanswered) - _MAX_SHOWN} more" if len(unanswered) > _MAX_SHOWN else ""
    return (
        f"{', '.join(pairs)}{more}: nobody answers there, as where a firewall drops the packets. Open all TCP ports between the "
        "hosts of the workers: collectives listen at ports that the kernel chooses, of net.ipv4.ip_local_port_range."
    )


def connections(min_retries: int = 0) -> Iterator[Connection]:
    """Yield the TCP sockets of this process, with at least so many retries; none where the kernel does not say."""
    try:
        numbers = list(map(int, os.listdir(_OPEN)))
    except OSError:  # there is no such folder, or this process has as many files open as it may
        return
    for number in numbers:
        try:
            status = os.fstat(number)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            # SOCK_NONBLOCK keeps Python from setting a mode: it is one with that of the socket, which is another library's.
            with socket.fromfd(number, -1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as copy:
                state, _, retries = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)
                if state in (ESTABLISHED, UNANSWERED, LISTENING) and retries >= min_retries:
                    remote = _end(copy.getpeername()) if state == ESTABLISHED else ""
                    if state == UNANSWERED and not (remote := _asked_end(status.st_ino)):
                        continue
                    yield Connection(_end(copy.getsockname()), remote, retries, state)
        except OSError:  # closed in this moment, or no TCP
            continue


def _asked_end(inode: int) -> str:
    """Return the end that a connection without an answer asks for, which a socket does not tell; "" where the kernel does not."""
    found = (unanswered_ends(Path(table).read_text()).get(inode, "") for table in _TABLES if os.path.exists(table))
    return next(filter(None, found), "")


def unanswered_ends(table: str) -> dict[int, str]:
    """Return inode -> remote end of the connections without an answer, of a text such as that of /proc/net/tcp."""
    found = {}
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and int(fields[3], 16) == UNANSWERED:
            host, _, port = fields[2].partition(":")
            words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))  # each in the order of this machine
            packed = struct.pack(f"={len(words)}I", *words)
            family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
            found[int(fields[9])] = _end((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def _end(address: tuple[str, int]) -> str:
    """Return an end as both hosts name it: each has names of its own for network devices."""
    host, port, *_ = address
    return f"{host.removeprefix(_IPV4_IN_IPV6).partition('%')[0]}:{port}"
