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

#: Programs in flight per process, over all strategies: XLA blocks a thread of the pool from the 33rd on, and programs
#: that other code dispatches count too.
MAX_IN_FLIGHT = 16
#: How many are waited for at once. Waiting in every step would wake this thread in every step, and the replicas
#: want the cores (benchmarks/step_time.py, W1).
WAIT_FOR = 8

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
    """Note that a program which makes `witness` was dispatched; wait for older ones when there are too many.

    Args:
        witness: a result of the program that nobody donates, so that it can be waited for.
    """
    _in_flight.append(witness)
    if len(_in_flight) >= MAX_IN_FLIGHT:
        _wait()


def _wait() -> None:
    with _lock:
        waited_for = [_in_flight.popleft() for _ in range(WAIT_FOR)] if len(_in_flight) >= MAX_IN_FLIGHT else []
    # XLA runs them one after the other, so the last that can be waited for is enough.
    last = next((old for old in reversed(waited_for) if not old.is_deleted()), None)
    if last is not None:
        last.block_until_ready()
