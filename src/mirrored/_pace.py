"""How many programs may be in flight at once on virtual CPU devices.

Replicas that share this machine's CPU wait for each other on threads of one pool, and XLA's own limit of
programs in flight makes further programs wait on threads of the same pool, until the replica that all wait
for gets none: docs/design/cpu-rendezvous.md. Real accelerators have queues of their own and are left alone.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

import jax
from jax.sharding import NamedSharding

#: Programs in flight per process, over all strategies: XLA blocks a thread of the pool from the 33rd on.
#: Two keep the devices busy while Python prepares the next one, and an error is seen two steps late at most.
MAX_IN_FLIGHT = 2

_in_flight: collections.deque[jax.Array] = collections.deque()
_lock = threading.Lock()


def dispatch(placement: NamedSharding, program: Any, *arguments: Any) -> Any:
    """Run a program with one result, and keep the number of programs in flight within bounds."""
    result = program(*arguments)
    if not isinstance(result, jax.core.Tracer) and is_paced(placement):
        started(result)
    return result


def is_paced(placement: NamedSharding) -> bool:
    """Tell whether programs on these devices need a bound on their number in flight."""
    return placement.num_devices > 1 and placement.mesh.devices.flat[0].platform == "cpu"


def started(witness: jax.Array) -> None:
    """Note that a program which makes `witness` was dispatched; wait for an older one when there are too many.

    Args:
        witness: a result of the program that nobody donates, so that it can be waited for.
    """
    with _lock:
        _in_flight.append(witness)
        oldest = _in_flight.popleft() if len(_in_flight) > MAX_IN_FLIGHT else None
    if oldest is not None and not oldest.is_deleted():
        oldest.block_until_ready()
