"""What does it cost to bring a large batch from host memory to the replicas, and to gather it again?

The reference is `jax.device_put` of the same array. XLA's CPU devices keep host memory that begins at a multiple of 64 bytes, and
copy any other, so "by hand, aligned" copies the rows to such memory first: the least that leaves the user's array his own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from _harness import Contender, Row, check_losses, interleave, parse, print_table, show_seconds
from jax.sharding import NamedSharding, PartitionSpec

import mirrored as mr

MIB = 1024 * 1024
#: Ratios to `jax.device_put`, at most.
GOALS = {"distribute_dataset": 1.3, "make_numpy_dataset": 1.3, "distribute_values_from_function": 1.3, "gather": 3.0}


def main() -> None:
    options = parse(__doc__, rounds=20, mebibytes=256, replicas="2,4")
    rounds, size = (2, 4) if options.quick else (options.rounds, options.mebibytes)
    counts = [int(count) for count in options.replicas.split(",")]
    mr.MirroredStrategy([f"cpu:{i}" for i in range(max(counts))])  # starts the backend with so many devices
    for count in counts:
        show(count, size, rounds)


def show(num_replicas: int, mebibytes: int, rounds: int) -> None:
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    rows = np.random.default_rng(0).random((64 * num_replicas, mebibytes * MIB // 256 // num_replicas), np.float32)
    ways = ways_of(strategy, rows)
    contenders = [Contender(name, _repeated(way)) for name, way in ways.items()]
    check_losses(contenders, num_steps=1, tolerance=0)
    times = interleave(contenders, rounds, turn=0.01)
    reference = contenders[0].name
    table = [
        Row(c.name, show_seconds(times.median(c.name)), times.ratios(c.name, reference), GOALS.get(c.name)) for c in contenders
    ]
    print_table(f"{mebibytes} MiB, {num_replicas} replicas, {rounds} rounds; ratio to {reference}", table)


def ways_of(strategy: mr.Strategy, rows: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return ways of bringing rows to the replicas, and of gathering them; each returns arrays that hold the last row."""
    num_replicas = strategy.num_replicas_in_sync
    split = NamedSharding(strategy.mesh, PartitionSpec(strategy.mesh.axis_names[0]))
    size = len(rows) // num_replicas
    stack = rows.reshape(num_replicas, size, -1)
    values = strategy.distribute_values_from_function(lambda context: stack[context.replica_id_in_sync_group])
    listed = strategy.distribute_dataset([rows])
    in_memory = strategy.distribute_dataset(strategy.make_numpy_dataset(rows).batch(len(rows)))

    def aligned() -> jax.Array:
        memory = np.empty(stack.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        copy = memory[start : start + stack.nbytes].view(stack.dtype).reshape(stack.shape)
        copy[...] = stack
        return jax.device_put(copy, split)

    return {
        "device_put": lambda: jax.device_put(stack, split),
        "by hand, aligned": aligned,
        "distribute_dataset": lambda: _only(listed),
        "make_numpy_dataset": lambda: _only(in_memory),
        "distribute_values_from_function": lambda: strategy.distribute_values_from_function(
            lambda context: stack[context.replica_id_in_sync_group]
        ),
        "gather": lambda: strategy.gather(values, axis=0),
    }


def _only(batches: Iterable[Any]) -> Any:
    [batch] = batches
    return batch


def _repeated(way: Callable[[], Any]) -> Callable[[int], float]:
    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            [array] = jax.tree.leaves(way())
            array.block_until_ready()
            last = float(np.asarray(array.addressable_shards[-1].data)[(-1,) * array.ndim])
            del array
        return last

    return run


if __name__ == "__main__":
    main()
