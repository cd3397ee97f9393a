"""How much memory does training take at its peak, next to the same step written by hand?

Each contender trains an MLP in a process of its own. What counts is by how much the process grows from before the
model is made to its largest: the parameters and Adam's state of all replicas, gradients, and what a library adds.
malloc is as users have it, so what it keeps of memory that was freed counts too.

And how much do five programs keep that name one large array, next to `jit(shard_map)` with the array on all devices as an
argument? (Five functions that name it keep it more than five times: JAX compiles its numbers into each program.)

`--topology=h100:1x8` compiles a GPT for devices that are not here: with whole arrays, in parts, and in parts by hand in three
ways. It needs the compilers of docs/plan.md, and takes about a minute for a program.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from _harness import Row, parse, print_table
from _workloads import WORKLOADS, mlp

#: Peak memory may be this much of what it is by hand.
GOAL = 1.05
CONTENDERS = ("by hand", "mirrored")
NUM_STEPS = 4
NUM_SHAPES = 5


def main() -> None:
    options = parse(__doc__, contender="", named="", replicas=4, width=2048, rounds=5, topology="", case=-1)
    if options.topology:
        compile_in_parts(options.topology, options.case)
        return
    if options.contender:
        measure = growth_of_named if options.named else growth
        print(measure(options.contender, options.replicas, options.width, *[options.named] * bool(options.named)))
        return
    width, rounds, goal = (512, 1, None) if options.quick else (options.width, options.rounds, GOAL)
    for named in ("", "numpy", "jax"):
        kib = {name: [in_own_process(name, options.replicas, width, named) for _ in range(rounds)] for name in CONTENDERS}
        ratios = [a / b for a, b in zip(kib["mirrored"], kib["by hand"], strict=True)]
        rows = [Row(name, f"{statistics.median(kib[name]) / 1024:.0f} MiB") for name in CONTENDERS]
        rows[1] = dataclasses.replace(rows[1], samples=ratios, goal=goal)
        size = sum(array.nbytes for array in mlp(width).values()) / 2**20
        what = f"{NUM_SHAPES} programs that name an array of {named} of {20 * width**2 / 2**20:.0f} MiB"
        title = what if named else f"an MLP of {size:.0f} MiB, Adam"
        print_table(f"{title}, {options.replicas} replicas, {rounds} rounds; ratio to by hand", rows)


def in_own_process(contender: str, num_replicas: int, width: int, named: str) -> float:
    command = [sys.executable, __file__, f"--contender={contender}", f"--replicas={num_replicas}", f"--width={width}"]
    done = subprocess.run([*command, f"--named={named}"], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def growth(contender: str, num_replicas: int, width: int) -> int:
    """Return the KiB by which this process grows while it makes and trains the model."""
    import _jax_contenders

    import mirrored as mr

    mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])  # starts the backend with so many devices
    make = {"by hand": _jax_contenders.by_hand, "mirrored": _jax_contenders.with_mirrored}[contender]
    make(WORKLOADS["W1"], num_replicas).run(1)  # what a process allocates once, such as the compiler's memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    workload = dataclasses.replace(WORKLOADS["W2"], parameters=functools.partial(mlp, width))
    make(workload, num_replicas).run(NUM_STEPS)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def growth_of_named(contender: str, num_replicas: int, width: int, kind: str) -> int:
    """Return the KiB by which this process has grown after programs, one for each batch size, that name an array."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import mirrored as mr

    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    mesh = Mesh(np.array(strategy.devices), ("replica",))

    def loss(x: jax.Array, frozen: jax.Array | np.ndarray) -> jax.Array:
        return (x.sum() * jnp.asarray(frozen)).sum()

    specs = {"in_specs": (PartitionSpec("replica"), PartitionSpec()), "out_specs": PartitionSpec()}
    program = jax.jit(jax.shard_map(lambda *arrays: jax.lax.psum(loss(*arrays), "replica"), mesh=mesh, **specs))

    def grown(num_rows: int, batch_sizes: list[int]) -> int:
        values = np.random.default_rng(0).random((num_rows, width), np.float32)
        frozen = values if kind == "numpy" else jax.block_until_ready(jnp.array(values))
        del values
        before = resident()
        placed = jax.device_put(frozen, NamedSharding(mesh, PartitionSpec())) if contender == "by hand" else None

        def step(x: jax.Array) -> jax.Array:
            return mr.get_replica_context().all_reduce("sum", loss(x, frozen))

        for size in batch_sizes:
            rows = np.ones(size, np.float32)
            for batch in strategy.distribute_dataset([rows] * NUM_STEPS):
                jax.block_until_ready(strategy.run(step, args=(batch,)) if placed is None else program(rows, placed))
        return resident() - before

    grown(1, [num_replicas])  # what a process allocates once
    return grown(5 * width, [num_replicas * rows for rows in range(2, NUM_SHAPES + 2)])


def compile_in_parts(topology: str, case: int) -> None:
    """Print what devices of a topology need, for each model or for one `case`; next to the best of three ways by hand."""
    from _gpt_in_parts import WAYS, Gpt, by_hand, with_mirrored

    import mirrored as mr

    cases = [Gpt(12, 8), Gpt(12, 2), Gpt(12, 2, has_checkpoint=False), Gpt(24, 8, is_stacked=True)]
    devices = mr.topology(topology)
    for gpt in cases if case < 0 else [cases[case]]:
        hand = {way: by_hand(gpt, devices, way) for way in WAYS}
        rows = [Row(f"by hand, {way}", f"{size:.2f} GB") for way, size in hand.items()]
        whole, parts = (with_mirrored(gpt, devices, storage) for storage in ("whole", "parts"))
        rows.append(Row("mirrored, whole", f"{whole:.2f} GB"))
        rows.append(Row("mirrored, in parts", f"{parts:.2f} GB", samples=[parts / min(hand.values())], goal=GOAL))
        print_table(f"{topology}, {gpt}; ratio to the best by hand", rows)


def resident() -> int:
    """Return the KiB of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


if __name__ == "__main__":
    main()
