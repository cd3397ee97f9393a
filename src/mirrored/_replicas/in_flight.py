"""How many programs may be in flight at once on virtual CPU devices, and on several workers.

Replicas that share this machine's CPU wait for each other on threads of one pool, and XLA's own limit of
programs in flight makes further programs wait on threads of the same pool, until the replica that all wait
for gets none: docs/design/cpu-rendezvous.md. Several workers wait for each other in every program, and a worker that
runs ahead would take thousands of steps after another was lost: docs/design/failures.md. Real accelerators of one
process have queues of their own and are left alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .. import _process
from .._errors import ContextError
from .._jax import distributed, forks
from .._process import waited
from .._workers.progress import progress
from .planned import is_for_plan
from .platforms import PLATFORMS, XLAS_WAY

#: Programs in flight per process, over all strategies: XLA blocks a thread of the pool from the 33rd on, and programs
#: that other code dispatches count too.
MAX_IN_FLIGHT = 16
#: How many are waited for at once. Waiting in every step would wake this thread in every step, and the replicas
#: want the cores (benchmarks/step_time.py, W1).
WAIT_FOR = 8
#: Programs of several workers in flight: an error of one surfaces at most so many steps late.
MAX_JOINT_IN_FLIGHT = 2


def _begin_child() -> None:
    _process.is_forked = distributed.has_backend()
    forks.leave_to_parent()


os.register_at_fork(after_in_child=_begin_child)


def require_threads() -> None:
    """Refuse to run a program in a forked child: it would wait for ever for threads that only the parent has."""
    if _process.is_forked:
        raise ContextError(
            "this process was forked from one in which JAX was running, whose threads it does not have, so a program would never "
            "end. Start processes that use JAX with multiprocessing.get_context('spawn'), and keep JAX out of data loaders."
        )


def dispatch(placement: NamedSharding, program: Callable[..., Any], *arguments: Any) -> Any:
    """Run a program that returns an array or a list of arrays, and bound the number of programs in flight."""
    require_threads()
    result = program(*arguments)
    witness = result[-1] if isinstance(result, list) else result
    if not isinstance(witness, jax.core.Tracer) and is_paced(placement):
        (joined if is_joint(placement) else started)(witness)
    return result


def is_paced(placement: NamedSharding) -> bool:
    """Tell whether programs on these devices need a bound on their number in flight."""
    return placement.num_devices > 1 and (
        PLATFORMS.get(placement.mesh.devices.flat[0].platform, XLAS_WAY).is_paced or is_joint(placement)
    )


def new_witness(placement: NamedSharding) -> list[jax.Array]:
    """Return a further result of a program on these devices, to be waited for; none where nobody waits."""
    return [jnp.zeros((), jnp.int32)] if is_paced(placement) else []


def is_joint(placement: NamedSharding) -> bool:
    """Tell whether other workers take part in programs on these devices."""
    return not placement.is_fully_addressable and not is_for_plan(placement)


def started(witness: jax.Array) -> None:
    """Note a dispatched program by a result of it that nobody donates; when too many are in flight, wait for older ones."""
    _process.in_flight.append(witness)
    if len(_process.in_flight) < MAX_IN_FLIGHT:
        return
    with _process.in_flight_lock:
        waited_for = [_process.in_flight.popleft() for _ in range(WAIT_FOR)] if len(_process.in_flight) >= MAX_IN_FLIGHT else []
    for old in reversed(waited_for):
        if not old.is_deleted():  # XLA runs them one after the other, so the last that can be waited for is enough
            start = time.perf_counter()
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # its results say so to whom they concern
                old.block_until_ready()
            waited.devices += time.perf_counter() - start
            return


def joined(witness: jax.Array, check: Callable[[Any], None] | None = None) -> None:
    """As `started`, for a program of all workers; `check`, called at most two programs later, may raise for its witness."""
    if not isinstance(witness.dtype, np.dtype):  # a random key has no `is_ready`, which the guard asks
        witness = jax.random.key_data(witness)
    _process.joint_in_flight.append((witness, check))
    progress.witness = witness
    if len(_process.joint_in_flight) > MAX_JOINT_IN_FLIGHT:
        finish(MAX_JOINT_IN_FLIGHT)


def finish(left: int = 0) -> None:
    """Wait until only `left` programs of several workers are in flight, and call their checks."""
    while len(_process.joint_in_flight) > left:
        with _process.in_flight_lock:
            witness, check = _process.joint_in_flight.popleft() if len(_process.joint_in_flight) > left else (None, None)
        if witness is None or witness.is_deleted():
            continue
        start = time.perf_counter()
        witness.block_until_ready()
        waited.devices += time.perf_counter() - start
        progress.finished += 1
        if check is not None:
            check(witness)


progress.finish = finish  # at the end of a program nothing comes later that would wait
