"""What does an all-reduce cost, and from which size on does an array travel better alone than packed with others?

The trees are `strategy.reduce` and `strategy.gather` of many small values, outside of a step. The table after them is the reason
for `PACK_BELOW_BYTES` in `_replicas/collectives.py`:
docs/design/collectives.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Contender, Row, Times, check_losses, interleave, parse, print_table, show_seconds
from jax.sharding import NamedSharding, PartitionSpec

import mirrored as mr
from mirrored._program.passes import fuse_all_reduces
from mirrored._replicas import collectives

#: No goal is set for the all-reduce alone; ours should not lose to the simplest way of writing it.
GOAL = 1.05
#: A tree that is reduced outside of a step, next to a psum for each leaf by hand.
TREE_GOAL = 0.25
KIB, MIB = 1024, 1024 * 1024
#: Number of arrays, bytes of each.
SWEEP = tuple((32, size * KIB) for size in (1, 4, 16, 24, 32, 48, 64, 256, 1024))


def main() -> None:
    options = parse(__doc__, replicas=2, rounds=40, turn=0.1)
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    replicas = options.replicas
    mr.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])  # starts the backend with so many devices
    cases = ((1, MIB), (20, 4 * KIB)) if options.quick else ((1, 64 * MIB), (200, 4 * KIB))
    for count, size in cases:
        against_by_hand(replicas, count, size, rounds, turn)
    for verb in ("reduce", "gather"):
        of_tree(verb, replicas, *cases[1], rounds, turn)
    rows = [packed_or_alone(replicas, count, size, rounds, turn) for count, size in (SWEEP[:2] if options.quick else SWEEP)]
    limit = show_bytes(collectives.PACK_BELOW_BYTES)
    print_table(f"packed below {limit}, {replicas} replicas, {rounds} rounds; ratio of the chosen way to the other", rows)


def against_by_hand(num_replicas: int, count: int, size: int, rounds: int, turn: float) -> None:
    contenders = [
        by_hand("by hand, a psum each", num_replicas, count, size, psum_each),
        by_hand("by hand, one psum", num_replicas, count, size, lambda arrays: jax.lax.psum(arrays, "data")),
        by_hand("by hand, packed", num_replicas, count, size, packed_psum),
        with_mirrored("mirrored", num_replicas, count, size),
    ]
    times = measure(contenders, rounds, turn)
    reference = contenders[0].name
    rows = [
        Row(c.name, show_seconds(times.median(c.name)), times.ratios(c.name, reference), GOAL if c.name == "mirrored" else None)
        for c in contenders
    ]
    what = f"all-reduce of {count} x {show_bytes(size)}"
    print_table(f"{what}, {num_replicas} replicas, {rounds} rounds; ratio to {reference}", rows)


def of_tree(verb: str, num_replicas: int, count: int, size: int, rounds: int, turn: float) -> None:
    """Measure what `strategy.reduce` or `strategy.gather` of a tree costs, outside of a step."""
    strategy = mr.MirroredStrategy(jax.devices()[:num_replicas])
    tree = strategy.distribute_values_from_function(lambda context: [np.ones(size // 4, np.float32) for _ in range(count)])
    call = {"reduce": lambda x: strategy.reduce("sum", x), "gather": lambda x: strategy.gather(x, axis=0)}[verb]
    one, packed = {"reduce": (psum_each, packed_psum), "gather": (gather_each, packed_gather)}[verb]
    contenders = [
        by_hand("by hand, one for each", num_replicas, count, size, one),
        by_hand("by hand, packed", num_replicas, count, size, packed),
        Contender("leaf by leaf", _repeated(lambda: [call(leaf) for leaf in tree])),
        Contender("mirrored", _repeated(lambda: call(tree))),
    ]
    times = measure(contenders, rounds, turn)
    reference = contenders[0].name
    goals = {"mirrored": TREE_GOAL if verb == "reduce" else None}
    rows = [
        Row(c.name, show_seconds(times.median(c.name)), times.ratios(c.name, reference), goals.get(c.name)) for c in contenders
    ]
    what = f"strategy.{verb} of a tree, {count} x {show_bytes(size)}"
    print_table(f"{what}, {num_replicas} replicas, {rounds} rounds; ratio to {reference}", rows)


def packed_or_alone(num_replicas: int, count: int, size: int, rounds: int, turn: float) -> Row:
    """Compare what `PACK_BELOW_BYTES` chooses for arrays of this size with the other choice."""
    ways = {"packed": 1 << 60, "alone": 0}
    contenders = []
    for name, limit in ways.items():
        with packing_below(limit):
            contenders.append(with_mirrored(name, num_replicas, count, size))
            contenders[-1].run(1)  # compiles, while the limit is in force
    times = measure(contenders, rounds, turn)
    chosen, other = ways if size < collectives.PACK_BELOW_BYTES else reversed(ways)
    value = f"{chosen} {show_seconds(times.median(chosen))}, {other} {show_seconds(times.median(other))}"
    return Row(f"{count} x {show_bytes(size)}", value, times.ratios(chosen, other), GOAL)


def measure(contenders: list[Contender], rounds: int, turn: float) -> Times:
    check_losses(contenders, num_steps=1, tolerance=1e-5)
    return interleave(contenders, rounds, turn)


@contextmanager
def packing_below(limit: int) -> Iterator[None]:
    """Pack arrays below a limit: where they are added up, and where sums of one time join (which packs them, too)."""
    with ExitStack() as stack:
        for module in (collectives, fuse_all_reduces):
            stack.enter_context(mock.patch.object(module, "PACK_BELOW_BYTES", limit))
        yield


def with_mirrored(name: str, num_replicas: int, count: int, size: int) -> Contender:
    """All-reduce the values of variables, one for each replica."""
    strategy = mr.MirroredStrategy(jax.devices()[:num_replicas])
    with strategy.scope():
        buffers = [
            mr.Variable(np.ones(size // 4, np.float32), synchronization="on_read", aggregation="mean") for _ in range(count)
        ]

    def step() -> list[jax.Array]:
        return mr.get_replica_context().all_reduce("sum", [buffer.value for buffer in buffers])

    return Contender(name, _repeated(lambda: strategy.run(step)))


def by_hand(name: str, num_replicas: int, count: int, size: int, reduce: Callable[[Any], Any]) -> Contender:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_replicas]), ("data",))
    split = PartitionSpec("data")
    stack = np.ones((num_replicas, size // 4), np.float32)
    buffers = [jax.device_put(stack.copy(), NamedSharding(mesh, split)) for _ in range(count)]

    def step(arrays: list[jax.Array]) -> list[jax.Array]:
        return reduce([array[0] for array in arrays])

    mapped = jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False)
    compiled = jax.jit(mapped)
    return Contender(name, _repeated(lambda: compiled(buffers)))


def psum_each(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jax.lax.psum(array, "data") for array in arrays]


def gather_each(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jax.lax.all_gather(array, "data", tiled=True) for array in arrays]


def packed_gather(arrays: list[jax.Array]) -> list[jax.Array]:
    parts = jnp.split(jax.lax.all_gather(jnp.concatenate(arrays), "data"), len(arrays), axis=1)
    return [part.reshape(-1) for part in parts]


def packed_psum(arrays: list[jax.Array]) -> list[jax.Array]:
    return jnp.split(jax.lax.psum(jnp.concatenate(arrays), "data"), len(arrays))


def _repeated(call: Callable[[], list[jax.Array]]) -> Callable[[int], float]:
    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            results = call()
        jax.block_until_ready(results)
        return float(np.asarray(results[-1])[0])

    return run


def show_bytes(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB"


if __name__ == "__main__":
    main()
