"""How long does a steady training step take, next to the same step written by hand, and with other frameworks?

Data lies on the devices, so no input pipeline is measured. Every contender computes the same losses, which is
checked before anything is timed.
"""

from __future__ import annotations

import argparse
import sys

import _jax_contenders
import _peers
from _harness import Row, check_losses, interleave, parse, print_table, show_seconds
from _workloads import WORKLOADS, Workload

import mirrored as mr

#: The dispatch-bound model may cost this much more than by hand, and steps of 20 ms or more this much.
GOAL_SMALL, GOAL_LARGE, LARGE = 1.15, 1.03, 0.020


def main() -> None:
    options = parse(__doc__, replicas=2, workloads="W1,W2,W3,W4", rounds=60, turn=0.1, peers_python=sys.executable)
    mr.MirroredStrategy([f"cpu:{i}" for i in range(options.replicas)])  # starts the backend with so many devices
    for name in options.workloads.split(","):
        measure(WORKLOADS[name], options)


def measure(workload: Workload, options: argparse.Namespace) -> None:
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    with _peers.running(workload.name, options.replicas, options.peers_python) as peers:
        contenders = [*_jax_contenders.all_of(workload, options.replicas), *peers]
        check_losses(contenders, num_steps=3, tolerance=1e-3)
        times = interleave(contenders, rounds, turn)
    by_hand = contenders[0].name
    goal = GOAL_SMALL if workload.name == "W1" else GOAL_LARGE if times.median(by_hand) >= LARGE else None
    rows = [
        Row(c.name, show_seconds(times.median(c.name)), times.ratios(c.name, by_hand), goal if c.name == "mirrored" else None)
        for c in contenders
    ]
    rows.append(Row("mirrored, ratio to by hand, packed", "", times.ratios("mirrored", "by hand, packed")))
    print_table(f"{workload.name}: {workload.what}, Adam, {options.replicas} replicas, {rounds} rounds; ratio to {by_hand}", rows)


if __name__ == "__main__":
    main()
