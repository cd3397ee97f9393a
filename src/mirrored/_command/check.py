"""`mirrored check`, which every worker runs: tests whether the cluster computes correctly, and how fast it communicates."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import ClusterConfigError, ClusterStartError, DeviceError, RecompilationWarning
from .._options import CommunicationOptions
from .._strategy.current import get_replica_context
from .._strategy.strategies import MultiWorkerMirroredStrategy
from .._strategy.strategy import Strategy, coordination_of
from .._text import counted, escape
from .._workers.coordination import Coordination

#: Lengths of the summed arrays: one, a prime, and a prime that exceeds caches.
LENGTHS = (1, 1_009, 1_000_003)
#: Name, dtype and relative tolerance of the summed values.
KINDS = (("integers", np.int32, 0.0), ("whole floats", np.float32, 0.0), ("floats", np.float32, 1e-5))
#: Bytes of each measured all-reduce, and how often it is measured.
SIZES = ((4, 30), (1 << 10, 30), (1 << 20, 15), (64 << 20, 5))
#: A worker is slow if it takes more than this multiple of the median.
SLOW = 2.0
_MATRIX, _PRODUCTS = 256, 9
#: The number of characters shown of another worker's text.
_MAX_TEXT = 1000


def main(argv: Sequence[str]) -> int:
    """Check the cluster; return 0 if it is in order, else 1."""
    parser = argparse.ArgumentParser(
        "mirrored check", description="Compute and measure with all workers of this cluster. On one host: mirrored launch -n 2 "
        "--cpu-devices 1 -m mirrored check"
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for the other workers (60)")
    options = parser.parse_args(argv)
    start = time.monotonic()
    try:
        limits = CommunicationOptions(timeout_seconds=options.timeout)
        strategy = MultiWorkerMirroredStrategy(communication_options=limits)
    except (ClusterConfigError, ClusterStartError, DeviceError, ValueError) as error:
        sys.stderr.write(f"mirrored check: {error}\n")
        return 1
    seconds = time.monotonic() - start
    coordination = coordination_of(strategy)
    problems: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecompilationWarning)  # each size needs its own program
        for line in _check(strategy, coordination, seconds, problems):
            if coordination.worker == 0:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
    return 1 if problems else 0


def _check(strategy: Strategy, coordination: Coordination, seconds: float, problems: list[str]) -> Iterator[str]:
    """Yield the lines that worker 0 prints; on every worker, add all workers' problems to `problems`."""
    yield f"{counted(coordination.num_workers, 'worker')} met in {seconds:.1f} s, {strategy}"
    for index, text in enumerate(coordination.exchange("check/who", _who())):
        yield f"worker {index}: {escape(str(text), _MAX_TEXT)}"
    for index, found in enumerate(coordination.exchange("check/problems", _compare(strategy, coordination)[:20])):
        problems += [f"worker {index}: {escape(str(problem), _MAX_TEXT)}" for problem in found]
    if strategy.num_replicas_in_sync > 1:
        yield from _measure(strategy, coordination)
    yield from _find_slow(coordination)
    yield from (f"WRONG: {problem}" for problem in problems)
    yield "not " * bool(problems) + "ok"


def _who() -> str:
    kinds = sorted({device.device_kind for device in jax.local_devices()})
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    devices = f"{jax.local_device_count()} x {jax.default_backend()} ({', '.join(kinds)})"
    return f"host {platform.node()}, pid {os.getpid()}, {devices}, {os.cpu_count()} cores, {versions}"


def _compare(strategy: Strategy, coordination: Coordination) -> list[str]:
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
    return problems


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


def _measure(strategy: Strategy, coordination: Coordination) -> Iterator[str]:
    """Measure all-reduces of several sizes, each by the median of repetitions that all workers begin together."""
    replicas = strategy.num_replicas_in_sync
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = min(coordination.exchange("check/memory", memory // (32 * jax.local_device_count())))
    for size, times in SIZES:
        size = min(size, limit) // 4 * 4
        work = _make_all_reduce(strategy, np.ones(size // 4, np.float32))
        seconds = _median(work, times, coordination)
        seconds = max(coordination.exchange("check/seconds", seconds))
        rate = f", {size * 2 * (replicas - 1) / replicas / seconds / 1e9:.3f} GB/s for each replica" * (size > 1024)
        yield f"all-reduce of {size} bytes: {seconds * 1e3:.3f} ms{rate}"


def _find_slow(coordination: Coordination) -> Iterator[str]:
    """Compare the workers' times for a local computation, and for a call of the coordination service."""
    matrix = jnp.full((_MATRIX, _MATRIX), 1.0 / _MATRIX)
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))
    computing = _median(lambda: product(matrix).block_until_ready(), _PRODUCTS, coordination)
    talking = _median(lambda: coordination.put(f"check/ping/{coordination.worker}", "ping"), _PRODUCTS, coordination)
    for task, duration in (("computing", computing), ("talking to worker 0", talking)):
        seconds = coordination.exchange(f"check/{task}", duration)
        middle = statistics.median_low(seconds)
        listed = (f"worker {i} {s * 1e3:.2f}" + " SLOW" * (s > SLOW * middle + 1e-3) for i, s in enumerate(seconds))
        yield f"{task}, ms: {', '.join(listed)}"


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
