"""Does a model with two constants for the all-reduce foretell what a step costs? docs/design/scaling.md has the model.

All replicas share the cores of this machine, so the model's work adds up here: the batch once, the update R times, and the
all-reduce, whose constants are fitted to arrays that are added up alone. Each is measured apart, then the step as a whole.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import _jax_contenders
import jax
import numpy as np
import optax
from _harness import Row, parse, print_table, show_seconds
from _workloads import LEARNING_RATE, WORKLOADS, Workload
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mirrored as mr

#: Bytes of the arrays from which latency and bandwidth are fitted.
SIZES = tuple(4096 << shift for shift in range(0, 15, 2))
#: The model is to be right within a factor of two.
GOAL = 2.0


def main() -> None:
    options = parse(__doc__, replicas="2,4,8", workloads="W1,W2,W3,W4", rounds=9)
    rounds, sizes = (2, SIZES[:2]) if options.quick else (options.rounds, SIZES)
    replicas = [int(r) for r in options.replicas.split(",")][: 1 if options.quick else None]
    mr.MirroredStrategy([f"cpu:{i}" for i in range(max(replicas))])  # starts the backend with so many devices
    links = {r: fitted([(size, seconds_of(all_reduce(r, size), rounds)) for size in sizes]) for r in replicas}
    print_table(
        "the all-reduce, n bytes: latency + n / bandwidth",
        [
            Row(f"{r} replicas", f"{show_seconds(latency)} + n / {1e-9 / a_byte:.2f} GB/s")
            for r, (latency, a_byte) in links.items()
        ],
    )
    rows = []
    for name in options.workloads.split(",")[: 1 if options.quick else None]:
        workload = WORKLOADS[name]
        alone = seconds_of(_jax_contenders.on_one_device(workload).run, rounds)
        update = seconds_of(updating(workload), rounds)
        num_bytes = sum(array.nbytes for array in workload.parameters().values())
        for r in replicas:
            latency, a_byte = links[r]
            foretold = alone + (r - 1) * update + latency + num_bytes * a_byte
            measured = seconds_of(_jax_contenders.with_mirrored(workload, r).run, rounds)
            factor = max(foretold / measured, measured / foretold)
            value = f"{show_seconds(foretold)} foretold, {show_seconds(measured)} measured"
            rows.append(Row(f"{name}, {r} replicas", value, [factor], GOAL))
    print_table("a step: foretold and measured; the factor between them", rows)


def seconds_of(run: Callable[[int], Any], rounds: int) -> float:
    """Return the median time of one call, after the first one, in turns of at least 20 ms."""
    run(1)
    start = time.perf_counter()
    run(3)
    count = max(1, round(0.02 / (time.perf_counter() - start) * 3))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run(count)
        seconds.append((time.perf_counter() - start) / count)
    return statistics.median(seconds)


def all_reduce(num_replicas: int, num_bytes: int) -> Callable[[int], Any]:
    """Add up an array of its own of each device, in place."""
    mesh = Mesh(np.array(jax.devices()[:num_replicas]), ("data",))
    split = PartitionSpec("data")
    add = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    compiled = jax.jit(add, donate_argnums=0)
    x = jax.device_put(np.zeros(num_replicas * num_bytes // 4, np.float32), NamedSharding(mesh, split))

    def run(num_times: int) -> None:
        nonlocal x
        for _ in itertools.repeat(None, num_times):
            x = compiled(x)
        jax.block_until_ready(x)

    return run


def updating(workload: Workload) -> Callable[[int], Any]:
    """Make the update alone, on one device."""
    tx = optax.adam(LEARNING_RATE)
    params = jax.device_put(workload.parameters(), jax.devices()[0])
    state, gradients = tx.init(params), jax.tree.map(lambda x: x * 0.01, params)

    def update(params: Any, state: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(update, donate_argnums=(0, 1))

    def run(num_times: int) -> None:
        nonlocal params, state
        for _ in itertools.repeat(None, num_times):
            params, state = compiled(params, state)
        jax.block_until_ready(params)

    return run


def fitted(times: list[tuple[int, float]]) -> tuple[float, float]:
    """Return the latency and the seconds of a byte: of the smallest array, and the line through it that errs least, by ratio."""
    sizes, seconds = (np.array(column, float) for column in zip(*times, strict=True))
    latency = seconds[0]
    large = sizes > 64 * 1024 if (sizes > 64 * 1024).any() else sizes > sizes[0]
    return float(latency), float(np.exp(np.mean(np.log(np.maximum(seconds[large] - latency, 1e-9) / sizes[large]))))


if __name__ == "__main__":
    main()
