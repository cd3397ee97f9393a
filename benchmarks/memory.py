"""How much memory does training take at its peak, next to the same step written by hand?

Each contender trains an MLP in a process of its own. What counts is by how much the process grows from before the
model is made to its largest: the parameters and Adam's state of all replicas, gradients, and what a library adds.
malloc is as users have it, so what it keeps of memory that was freed counts too.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
import statistics
import subprocess
import sys

from _harness import Row, parse, print_table
from _workloads import WORKLOADS, mlp

#: Peak memory may be this much of what it is by hand.
GOAL = 1.05
CONTENDERS = ("by hand", "mirrored")
NUM_STEPS = 4


def main() -> None:
    options = parse(__doc__, contender="", replicas=4, width=2048, rounds=5)
    if options.contender:
        print(growth(options.contender, options.replicas, options.width))
        return
    width, rounds = (512, 1) if options.quick else (options.width, options.rounds)
    kib = {name: [in_own_process(name, options.replicas, width) for _ in range(rounds)] for name in CONTENDERS}
    ratios = [a / b for a, b in zip(kib["mirrored"], kib["by hand"], strict=True)]
    goal = None if options.quick else GOAL
    rows = [
        Row("by hand", f"{statistics.median(kib['by hand']) / 1024:.0f} MiB"),
        Row("mirrored", f"{statistics.median(kib['mirrored']) / 1024:.0f} MiB", ratios, goal),
    ]
    size = sum(array.nbytes for array in mlp(width).values()) / 2**20
    title = f"an MLP of {size:.0f} MiB, Adam, {options.replicas} replicas, {rounds} rounds; ratio to by hand"
    print_table(title, rows)


def in_own_process(contender: str, num_replicas: int, width: int) -> float:
    command = [sys.executable, __file__, f"--contender={contender}", f"--replicas={num_replicas}", f"--width={width}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
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


if __name__ == "__main__":
    main()
