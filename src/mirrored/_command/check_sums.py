"""Does this cluster sum correctly, and how fast? The computations of `mirrored check`."""

from __future__ import annotations

import os
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._strategy.current import get_replica_context
from .._strategy.strategy import Strategy
from .._text import bytes_in_words
from .._workers.coordination import Coordination
from .check_lines import Finding

#: Lengths of the summed arrays: one, a prime, and a prime that exceeds caches.
LENGTHS = (1, 1_009, 1_000_003)
#: Name, dtype and relative tolerance of the summed values.
KINDS = (("integers", np.int32, 0.0), ("whole floats", np.float32, 0.0), ("floats", np.float32, 1e-5))
#: Bytes of each measured all-reduce, and how often it is measured.
SIZES = ((4, 30), (1 << 20, 15), (64 << 20, 5))
#: A worker is slow if it takes more than this multiple of the median.
SLOW = 2.0
_MATRIX, _PRODUCTS, _MAX_PROBLEMS = 256, 9, 20


def sums(strategy: Strategy, coordination: Coordination) -> Finding:
    """Sum known values over the replicas; describe sums that are wrong, or differ between workers."""
    problems = []
    replicas = strategy.num_replicas_in_sync
    for length in LENGTHS:
        base = np.arange(length) % 97
        for name, dtype, tolerance in KINDS:
            values = base / 7 if tolerance else base
            result = np.asarray(_make_all_reduce(strategy, values.astype(dtype))())
            expected = values.astype(np.float64) * (replicas * (replicas + 1) // 2)
            if not np.allclose(result, expected, rtol=tolerance, atol=0.0):
                at = int(np.argmax(np.abs(result - expected)))
                problems.append(f"sum of {length} {name}: element {at} is {result[at]}, expected {expected[at]}")
            digests = coordination.exchange("check/digests", zlib.crc32(result.tobytes()))
            if len(set(digests)) > 1:
                problems.append(f"sum of {length} {name}: the workers have different results")
    fact = f"of integers and floats, up to {LENGTHS[-1]:,} of them: right, and the same on all"
    return Finding(fact, "; ".join(problems[:_MAX_PROBLEMS]))


def _make_all_reduce(strategy: Strategy, values: np.ndarray) -> Callable[[], Any]:
    """Return a function that sums `(i + 1) * values` over the replicas i, and waits for the sum."""
    by_replica = strategy.distribute_values_from_function(
        lambda ctx: values * values.dtype.type(ctx.replica_id_in_sync_group + 1)
    )

    def step(value: jax.Array) -> Any:
        context = get_replica_context()
        assert context is not None
        return context.all_reduce("sum", value)

    return lambda: jax.block_until_ready(strategy.run(step, args=(by_replica,)))


def rates(strategy: Strategy, coordination: Coordination) -> Finding:
    """Measure all-reduces of several sizes, each by the median of repetitions that all workers begin together."""
    replicas = strategy.num_replicas_in_sync
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = min(coordination.exchange("check/memory", memory // (32 * jax.local_device_count())))
    measured = []
    for size, times in SIZES:
        size = min(size, limit) // 4 * 4
        work = _make_all_reduce(strategy, np.ones(size // 4, np.float32))
        seconds = max(coordination.exchange("check/seconds", _median(work, times, coordination)))
        rate = f" ({size * 2 * (replicas - 1) / replicas / seconds / 1e9:.3f} GB/s)" if size > 1024 else ""
        measured.append(f"{bytes_in_words(size)} in {seconds * 1e3:.2f} ms{rate}")
    return Finding(f"{', '.join(measured)} on each replica")


def computing(coordination: Coordination) -> Finding:
    """Compare how long each worker takes for the same local computation."""
    matrix = jnp.full((_MATRIX, _MATRIX), 1.0 / _MATRIX)
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))
    return _compared(lambda: product(matrix).block_until_ready(), coordination)


def messages(coordination: Coordination) -> Finding:
    """Compare how long each worker takes for a call of worker 0's coordination service."""
    return _compared(lambda: coordination.put(f"check/ping/{coordination.worker}", "ping"), coordination)


def _compared(work: Callable[[], object], coordination: Coordination) -> Finding:
    seconds = coordination.exchange("check/medians", _median(work, _PRODUCTS, coordination))
    middle = statistics.median_low(seconds)
    listed = (f"worker {i} {s * 1e3:.2f}" + " SLOW" * (s > SLOW * middle + 1e-3) for i, s in enumerate(seconds))
    return Finding(f"{', '.join(listed)} ms")


def _median(work: Callable[[], object], times: int, coordination: Coordination) -> float:
    """Return the median of the seconds that a function takes, without its first call."""
    seconds = []
    for i in range(times + 1):
        coordination.barrier("check")
        start = time.perf_counter()
        work()
        if i:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
