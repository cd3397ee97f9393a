"""What do 8 replicas cost on fewer devices: together and one by one, next to 8 devices by hand and one with the whole batch?

Losses are checked against each other before anything is timed.
"""

from __future__ import annotations

import argparse

import _jax_contenders
from _harness import Row, check_losses, interleave, parse, print_table, show_seconds
from _workloads import WORKLOADS, Workload

import mirrored as mr

#: Of one device with 8 replicas together, as a ratio to 8 devices by hand.
GOALS = {"W1": 0.20, "W2": 0.22}


def main() -> None:
    options = parse(__doc__, replicas=8, workloads="W1,W2", rounds=30, turn=0.1)
    mr.MirroredStrategy([f"cpu:{i}" for i in range(options.replicas)])  # starts the backend with so many devices
    for name in options.workloads.split(","):
        measure(WORKLOADS[name], options)


def measure(workload: Workload, options: argparse.Namespace) -> None:
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    few: dict[str, mr.MirroredStrategy] = {}
    for count in (1, 2):
        for schedule in ("together", "one_by_one"):
            devices = [f"cpu:{i}" for i in range(count)]
            strategy = mr.MirroredStrategy(devices, num_replicas=options.replicas, schedule=schedule)
            few[f"on {count} device{'s' if count > 1 else ''}, {schedule}"] = strategy
    contenders = [
        _jax_contenders.by_hand(workload, options.replicas),
        _jax_contenders.on_one_device(workload),
        *(_jax_contenders.with_strategy(name, strategy, workload) for name, strategy in few.items()),
    ]
    check_losses(contenders, num_steps=3, tolerance=1e-3)
    times = interleave(contenders, rounds, turn)
    by_hand = contenders[0].name
    goals = {"on 1 device, together": GOALS.get(workload.name)}
    rows = [Row(c.name, show_seconds(times.median(c.name)), times.ratios(c.name, by_hand), goals.get(c.name)) for c in contenders]
    title = f"{workload.name}: {workload.what}, Adam, {options.replicas} replicas, {rounds} rounds"
    print_table(f"{title}; ratio to {by_hand} on as many devices", rows)


if __name__ == "__main__":
    main()
