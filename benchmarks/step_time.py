"""How long does a steady training step take, next to the same step written by hand, and with other frameworks?

Data lies on the devices, so no input pipeline is measured. Every contender computes the same losses, which is
checked before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import _jax_contenders
import _peers
from _harness import Row, check_losses, interleave, parse, print_table, show_seconds
from _workloads import WORKLOADS, Workload

import mirrored as mr

#: The dispatch-bound model may cost this much more than by hand, and steps of 20 ms or more this much.
GOAL_SMALL, GOAL_LARGE, LARGE = 1.15, 1.03, 0.020


def main() -> None:
    options = parse(__doc__, replicas="2", workloads="W1,W2,W3,W4", rounds=60, turn=0.1, peers_python=sys.executable)
    sizes = [int(number) for number in options.replicas.split(",")]
    mr.MirroredStrategy([f"cpu:{i}" for i in range(max(sizes))])  # starts the backend with so many devices
    for name, num_replicas in itertools.product(options.workloads.split(","), sizes):
        measure(WORKLOADS[name], num_replicas, options)


def measure(workload: Workload, num_replicas: int, options: argparse.Namespace) -> None:
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    with _peers.running(workload.name, num_replicas, options.peers_python) as peers:
        contenders = [*_jax_contenders.all_of(workload, num_replicas), *peers]
        check_losses(contenders, num_steps=3, tolerance=1e-3)
        times = interleave(contenders, rounds, turn)
    by_hand = contenders[0].name
    goal = GOAL_SMALL if workload.name == "W1" else GOAL_LARGE if times.median(by_hand) >= LARGE else None
    rows = [
        Row(c.name, show_seconds(seconds), times.ratios(c.name, by_hand), goal if c.name == "mirrored" else None, seconds=seconds)
        for c, seconds in ((c, times.median(c.name)) for c in contenders)
    ]
    rows.append(Row("mirrored, ratio to by hand, packed", "", times.ratios("mirrored", "by hand, packed")))
    title = f"{workload.name}: {workload.what}, Adam, R = {num_replicas}, {rounds} rounds; ratio to {by_hand}"
    print_table(title, rows, workload=workload.name, num_replicas=num_replicas)


if __name__ == "__main__":
    main()
