"""What `mirrored check` finds out about the hosts of a cluster together: versions, connections, clocks."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .._cluster.spec import join_address
from .._text import counted
from .check_lines import Finding, Lines

#: A worker connects to at most so many others, waits so long for each, and gives up after so many failures.
_MAX_PEERS, _CONNECT_SECONDS, _MAX_FAILURES = 64, 5.0, 3
_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
#: Clocks may differ by so much.
_MOST_SECONDS = 1.0


def differences(lines: Lines, facts: Mapping[str, str]) -> Finding:
    """Compare this worker's facts with those of worker 0."""
    theirs = lines.exchange("facts", facts)[0]
    names = [name for name in sorted({*facts, *theirs}) if facts.get(name) != theirs.get(name)]
    if not names:
        return Finding(f"{', '.join(facts)}: the same on all")
    listed = "; ".join(f"{name} {facts.get(name, 'none')}, not {theirs.get(name, 'none')} as worker 0" for name in names)
    return Finding("", f"has {listed}: use the same on all hosts")


def connections(lines: Lines, host: str) -> Finding:
    """Connect to the other workers at ports that their kernels choose, as collectives do."""
    count, ports = len(lines.hosts), _ports()
    num_peers = min(count - 1, _MAX_PEERS)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=2 * _MAX_PEERS) as listener:
        addresses = lines.exchange("addresses", listener.getsockname()[:2])
        failures: list[str] = []
        for distance in range(1, num_peers + 1):
            peer = (lines.worker + distance) % count
            try:
                socket.create_connection(tuple(addresses[peer]), _CONNECT_SECONDS).close()
            except OSError as error:
                reason = error.strerror or str(error)
                failures.append(f"cannot reach {lines.call(peer)} at {join_address(*addresses[peer])} ({reason})")
            if len(failures) == _MAX_FAILURES:
                break
        lines.exchange("connected", None)
    remedy = f"open the TCP ports {ports} between the hosts: collectives listen at ports that the kernel chooses"
    if failures:
        return Finding("", f"{', '.join(failures)}; {remedy}")
    return Finding(f"each worker reaches {counted(num_peers, 'other')}, at ports of {ports}")


def _ports() -> str:
    """Return the range of ports from which this kernel chooses."""
    with contextlib.suppress(OSError):
        return "-".join(Path(_PORTS).read_text().split())
    return "49152-65535"


def clocks(lines: Lines, clock: Callable[[], float] = time.time) -> Finding:
    """Compare this host's clock with worker 0's.

    All workers read their clocks before and after a common moment, so the difference is known to within these readings.
    """
    lines.exchange("clocks begin", None)
    before = clock()
    lines.exchange("clocks", None)
    after = clock()
    moments = lines.exchange("moments", [before, after])
    least, most = before - moments[0][1], after - moments[0][0]
    if least <= _MOST_SECONDS and most >= -_MOST_SECONDS:
        apart = max(abs(moment[1] - moments[0][1]) for moment in moments)
        return Finding(f"differ by at most {apart:.3f} s")
    direction = "ahead of" if least > 0 else "behind"
    remedy = "start NTP (`timedatectl set-ntp true`, or chronyd)"
    return Finding("", f"its clock is {abs(after - moments[0][1]):.1f} s {direction} worker 0's: {remedy}")
