"""Which other workers does this one no longer reach, although both reach worker 0? Asked of the kernel. No jax here.

A collective waits for ever when packets between two workers are lost: nobody has died, and both speak with the service. But the
kernel of one of them resends packets that the other does not acknowledge. A process that is stopped or busy is no such case: its
kernel acknowledges them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
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
#: Between two looks: the kernel takes some 8 ms to list the connections.
LOOK_SECONDS = 2.0
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED, _SENDS_AGAIN = "01", "01"
_IPV4_IN_IPV6 = "0000000000000000FFFF0000"
_KEY = "guard/links"


class Connection(NamedTuple):
    """A TCP connection of this process: its ends as the kernel writes them, and the number of retransmissions in vain."""

    local: str
    remote: str
    retries: int


class Links:
    """The connections to other workers that get no answer."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination
        self._has_told = False
        self._since_look = LOOK_SECONDS  # the first look is at once
        self._stuck: dict[int, float] = {}  # worker -> seconds

    def look(self, step: int, elapsed: float) -> Verdict | None:
        """Publish the connections without an answer, and return the verdict when one to this worker is lost; for one that waits.

        The kernel knows addresses, not workers: one worker publishes both ends of a connection, and the worker that has the other
        end knows the two workers. Does nothing until it is time again, `elapsed` seconds after the last call.
        """
        self._since_look += elapsed
        if self._since_look < LOOK_SECONDS:
            return None
        since, self._since_look = self._since_look, 0.0
        before, self._stuck = self._stuck, {worker: self._stuck.get(worker, -since) + since for worker in self._unreached()}
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
            this.put(f"{_KEY}/{this.worker}", json.dumps(stuck))
            self._has_told = True
        told = {
            worker: read_all(Connection, text) or [] for worker, text in this.by_worker(_KEY).items() if worker != this.worker
        }
        ends = {(one.local, one.remote) for one in connections()} if any(told.values()) else set()
        return sorted(worker for worker, stuck in told.items() if any((one.remote, one.local) in ends for one in stuck))


def connections(min_retries: int = 0) -> Iterator[Connection]:
    """Yield the TCP connections of this process, with at least so many retries; none where the kernel does not say."""
    own: set[str] | None = None  # the numbers of its sockets, which take longer to find than the rest
    for table in _TABLES:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            _, local, remote, state, _, timer, retries, _, _, inode, *_ = fields
            count = int(retries, 16) if timer.startswith(f"{_SENDS_AGAIN}:") else 0
            if state == _ESTABLISHED and count >= min_retries:
                own = set(_sockets()) if own is None else own
                if inode in own:
                    yield Connection(local.removeprefix(_IPV4_IN_IPV6), remote.removeprefix(_IPV4_IN_IPV6), count)


def _sockets() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # closed in this moment
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]
