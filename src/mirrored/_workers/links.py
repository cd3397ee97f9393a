"""Which other workers does this one no longer reach, although both reach worker 0? Asked of the kernel. No jax here.

A collective waits for ever when packets between two workers are lost: nobody has died, and both speak with the service. But the
kernel of one of them resends packets that the other does not acknowledge. A process that is stopped or busy is no such case: its
kernel acknowledges them.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
from collections.abc import Iterator
from typing import NamedTuple

from .._text import numbered
from .coordination import Coordination
from .messages import read_all
from .verdict import Verdict

_logger = logging.getLogger("mirrored")

#: How often the kernel has sent the same in vain before a connection counts as stuck, at growing distances: for some 3 s.
STUCK_RETRIES = 4
#: After so many more seconds it is lost; by then JAX takes a worker for lost from which worker 0 hears nothing.
LOST_SECONDS = 8.0
_OPEN = "/proc/self/fd"
_ESTABLISHED = 1  # of the kernel's states
_IPV4_IN_IPV6 = "::ffff:"
_KEY = "guard/links"


class Connection(NamedTuple):
    """A TCP connection of this process: its ends as host and port, and the number of retransmissions in vain."""

    local: str
    remote: str
    retries: int


class Links:
    """The connections to other workers that get no answer."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination
        self._has_told = False
        self._stuck: dict[int, float] = {}  # worker -> seconds

    def look(self, step: int, elapsed: float) -> Verdict | None:
        """Publish the connections without an answer, and return the verdict when one to this worker is lost; for one that waits.

        The kernel knows addresses, not workers: one worker publishes both ends of a connection, and the worker that has the other
        end knows the two workers. The last look was `elapsed` seconds ago.
        """
        before, self._stuck = self._stuck, {worker: self._stuck.get(worker, -elapsed) + elapsed for worker in self._unreached()}
        for worker, seconds in self._stuck.items():
            pair = numbered(sorted((worker, self._coordination.worker)))
            if seconds >= LOST_SECONDS:
                title = f"lost the connection between {pair} at step {step}: what one sends does not reach the other"
                return Verdict(title, "All workers reach worker 0, so it is the network between these two.")
            if worker not in before:
                _logger.warning("what one of %s sends does not reach the other: the network between them is cut", pair)
        return None

    def _unreached(self) -> list[int]:
        """Publish the stuck connections of this worker, and return the workers whose stuck connections end here."""
        this, stuck = self._coordination, list(connections(STUCK_RETRIES))
        if stuck or self._has_told:
            this.say(_KEY, json.dumps(stuck))
            self._has_told = True
        told = {
            worker: read_all(Connection, text) or [] for worker, text in this.by_worker(_KEY).items() if worker != this.worker
        }
        ends = {(one.local, one.remote) for one in connections()} if any(told.values()) else set()
        return sorted(worker for worker, stuck in told.items() if any((one.remote, one.local) in ends for one in stuck))


def connections(min_retries: int = 0) -> Iterator[Connection]:
    """Yield the TCP connections of this process, with at least so many retries; none where the kernel does not say."""
    try:
        numbers = list(map(int, os.listdir(_OPEN)))
    except OSError:  # there is no such folder, or this process has as many files open as it may
        return
    for number in numbers:
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            # SOCK_NONBLOCK keeps Python from setting a mode: it is one with that of the socket, which is another library's.
            with socket.fromfd(number, -1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as copy:
                state, _, retries = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)
                if state == _ESTABLISHED and retries >= min_retries:
                    yield Connection(_end(copy.getsockname()), _end(copy.getpeername()), retries)
        except OSError:  # closed in this moment, or no TCP
            continue


def _end(address: tuple[str, int]) -> str:
    """Return an end as both hosts name it: each has names of its own for network devices."""
    host, port, *_ = address
    return f"{host.removeprefix(_IPV4_IN_IPV6).partition('%')[0]}:{port}"
