"""Which other workers does this one not reach, although both reach worker 0? Asked of the kernel. No jax here.

A collective waits for ever when packets between two workers are lost: nobody has died, and both reach the service. But the kernel
of one of them resends packets that the other does not acknowledge: on an established connection, or, behind a firewall, the first
packet of a new one. A stopped or busy process is no such case: its kernel acknowledges packets.
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

#: Retransmissions, rarer each time, until an established connection counts as stuck: some 3 s.
STUCK_RETRIES = 4
#: Unanswered SYNs until a new connection counts as blocked: 3 s, before Linux 6.5 7 s.
UNANSWERED_RETRIES = 3
#: How long a stuck connection may last: by then JAX gives up workers that worker 0 does not hear, which is another fault.
LOST_SECONDS = 8.0
_OPEN = "/proc/self/fd"
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
#: The kernel's numbers of states.
ESTABLISHED, UNANSWERED, LISTENING = 1, 2, 10
_IPV4_IN_IPV6 = "::ffff:"
_KEY = "guard/links"
_MAX_SHOWN = 5


class Connection(NamedTuple):
    """A TCP socket of this process: its ends as host and port, the number of retransmissions in vain, and its state."""

    local: str
    remote: str  # "" of a socket that listens
    retries: int
    state: int = ESTABLISHED


class Links:
    """The connections to other workers that get no answer."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination
        self._has_told = False  # whether this worker has published connections
        self._is_asked = False  # whether a worker gets no answer, so that all publish the addresses at which they listen
        self.warning = ""  # the warning of unanswered connections, since this worker waits
        self._stuck: dict[int, float] = {}  # worker -> seconds

    def check(self, step: int, elapsed: float) -> Verdict | None:
        """Publish the connections without an answer, `elapsed` seconds after the last call; return a verdict if one is lost."""
        # The kernel knows addresses, not workers: a worker publishes both ends, and the worker at the other end knows both.
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
        """Withdraw the published connections, when this worker does not wait any more."""
        self.warning, self._is_asked = "", False
        self._stuck.clear()
        if self._has_told:
            self._has_told = False
            self._coordination.say(_KEY, "[]")

    def describe(self) -> str:
        """Say which connections of all workers are unanswered, for the error at the limit; "" if there are none."""
        return describe_unanswered(self._hear())

    def _tell_and_hear(self) -> Mapping[int, Sequence[Connection]]:
        """Publish this worker's connections without an answer, and return those of all workers."""
        mine = [link for link in connections(UNANSWERED_RETRIES) if link.state == UNANSWERED or link.retries >= STUCK_RETRIES]
        if self._is_asked:
            mine += [link for link in connections() if link.state == LISTENING]
        if mine or self._has_told:
            self._coordination.say(_KEY, json.dumps(mine))
            self._has_told = bool(mine)
        told = self._hear()
        self._is_asked = any(link.state == UNANSWERED for links in told.values() for link in links)
        return told

    def _hear(self) -> Mapping[int, Sequence[Connection]]:
        texts = self._coordination.by_worker(_KEY)
        return {worker: read_all(Connection, text) or [] for worker, text in texts.items()}

    def _cut_off(self, told: Mapping[int, Sequence[Connection]]) -> list[int]:
        """Return the workers whose stuck connections end here."""
        stuck = {
            worker: {(link.remote, link.local) for link in links if link.state == ESTABLISHED}
            for worker, links in told.items()
            if worker != self._coordination.worker
        }
        mine = {(link.local, link.remote) for link in connections()} if any(stuck.values()) else set()
        return sorted(worker for worker, ends in stuck.items() if ends & mine)


def describe_unanswered(told: Mapping[int, Sequence[Connection]], of: int | None = None) -> str:
    """Say which workers get no answer to their first packets, and from which worker; with `of`, only for links of worker `of`."""
    at = {link.local: worker for worker, links in told.items() for link in links if link.state == LISTENING}
    unanswered = [(worker, link) for worker, links in sorted(told.items()) for link in links if link.state == UNANSWERED]
    if of is not None:  # between workers only: a program may connect to strangers too, whom only an error names
        unanswered = [(worker, link) for worker, link in unanswered if link.remote in at and of in (worker, at[link.remote])]
    if not unanswered:
        return ""
    names = {address: f"worker {worker} at {address}" for address, worker in at.items()}
    pairs = [
        f"worker {worker} cannot reach {names.get(link.remote, link.remote)} ({link.retries + 1} tries)"
        for worker, link in unanswered[:_MAX_SHOWN]
    ]
    more = f", and {len(unanswered) - _MAX_SHOWN} more" * (len(unanswered) > _MAX_SHOWN)
    return (
        f"{', '.join(pairs)}{more}: nobody answers there, as where a firewall drops the packets. Open all TCP ports between the "
        "hosts of the workers: collectives listen at ports that the kernel chooses, of net.ipv4.ip_local_port_range."
    )


def connections(min_retries: int = 0) -> Iterator[Connection]:
    """Yield the TCP sockets of this process with at least `min_retries` retries; none if the kernel does not tell."""
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
    """Return an unanswered connection's remote end from the kernel's tables, as the socket has none; "" if unknown."""
    found = (unanswered_ends(Path(table).read_text()).get(inode, "") for table in _TABLES if os.path.exists(table))
    return next(filter(None, found), "")


def unanswered_ends(table: str) -> dict[int, str]:
    """Return inode -> remote end of the unanswered connections in a text such as /proc/net/tcp."""
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
    """Return an end as both hosts name it, without the network device, whose name differs by host."""
    host, port, *_ = address
    return f"{host.removeprefix(_IPV4_IN_IPV6).partition('%')[0]}:{port}"
