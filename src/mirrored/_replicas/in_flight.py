"""Bounds the number of programs in flight, on virtual CPU devices and on several workers.

Replicas that share this machine's CPU wait for each other on threads of one pool. XLA has its own limit of programs in flight:
further programs wait on threads of the same pool, until no thread is left for the replica that all others wait for
(docs/design/cpu-rendezvous.md). Several workers wait for each other in every program; without a bound, a worker would run
ahead for thousands of steps after another was lost (docs/design/workers.md). Accelerators of one process have queues: no bound.
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
from .platforms import platform_of

#: The most programs in flight in a process, over all strategies: from the 33rd on, XLA blocks a thread of the pool for each,
#: and programs that other code dispatches count too.
MAX_IN_FLIGHT = 16
#: How many programs a wait covers: a thread that wakes in every step takes a core from the replicas (benchmarks/step_time.py).
WAIT_FOR = 8
#: The most programs of several workers in flight: a program's error surfaces at most so many steps late.
MAX_JOINT_IN_FLIGHT = 2


def _begin_child() -> None:
    _process.is_forked = distributed.has_backend()
    forks.leave_to_parent()


os.register_at_fork(after_in_child=_begin_child)


def require_threads() -> None:
    """Refuse to run a program in a forked child, which would wait for ever for threads that only its parent has."""
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
    return placement.num_devices > 1 and (platform_of(placement.mesh).is_paced or is_joint(placement))


def new_witness(placement: NamedSharding) -> list[jax.Array]:
    """Return an extra result to wait for; none where the number of programs in flight needs no bound."""
    return [jnp.zeros((), jnp.int32)] if is_paced(placement) else []


def is_joint(placement: NamedSharding) -> bool:
    """Tell whether other workers take part in programs on these devices."""
    return not placement.is_fully_addressable and not is_for_plan(placement)


def started(witness: jax.Array) -> None:
    """Note a dispatched program by a result that nobody donates; if too many programs are in flight, wait for older ones."""
    _process.in_flight.append(witness)
    if len(_process.in_flight) < MAX_IN_FLIGHT:
        return
    with _process.in_flight_lock:
        if len(_process.in_flight) < MAX_IN_FLIGHT:  # another thread has taken them out
            return
        waited_for = [_process.in_flight.popleft() for _ in range(WAIT_FOR)]
    for old in reversed(waited_for):
        if not old.is_deleted():  # XLA runs programs in order, so it is enough to wait for the last possible one
            start = time.perf_counter()
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # whoever reads the results gets the error
                old.block_until_ready()
            waited.devices += time.perf_counter() - start
            return


def joined(witness: jax.Array, check: Callable[[Any], None] | None = None) -> None:
    """As `started`, for a program of all workers. `check(witness)` is called at most two programs later, and may raise."""
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
            if len(_process.joint_in_flight) <= left:  # another thread has taken it out
                continue
            witness, check = _process.joint_in_flight.popleft()
        if witness.is_deleted():
            continue
        start = time.perf_counter()
        witness.block_until_ready()
        waited.devices += time.perf_counter() - start
        progress.finished += 1
        if check is not None:
            check(witness)


progress.finish = finish  # the end of the program must wait: no later program does
