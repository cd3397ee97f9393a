"""Is the input hidden behind the step, when the pipeline takes 70 % of the time that the step takes?

Every contender reads the loss of each step before it takes the next, so nothing overlaps by itself. The pipeline
waits, as for a disk or a network, and then fills a batch; a second one computes, and so takes cores from the step where
there are no others.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _harness import Contender, Row, check_losses, interleave, parse, print_table, show_seconds
from _jax_contenders import mirrored_step
from _workloads import WORKLOADS, Workload

import mirrored as mr

#: The loop may take this much of the step alone, and the pipeline takes this share of it.
GOAL, SHARE = 1.05, 0.7

Batch = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass
class Pace:
    """Hold how long the pipelines take for a batch: their share of the step alone when it was last timed."""

    seconds: float = 0.01

    def timed(self, contender: Contender) -> Contender:
        """Return a contender that sets the pace by what it takes itself, so that a slow minute slows both sides."""

        def run(num_steps: int) -> float:
            start = time.perf_counter()
            loss = contender.run(num_steps)
            if num_steps > 1:  # the first step alone compiles
                self.seconds = SHARE * (time.perf_counter() - start) / num_steps
            return loss

        return Contender(contender.name, run)


class Pipeline:
    """Yield the batches of a workload for ever, each after some work."""

    def __init__(self, workload: Workload, work: Callable[[float], None], pace: Pace) -> None:
        self.workload, self.work, self.pace = workload, work, pace

    def __iter__(self) -> Iterator[Batch]:
        for x, y in itertools.cycle(self.workload.batches()):
            end = time.perf_counter() + self.pace.seconds
            batch = x.copy(), y.copy()
            self.work(end)
            yield batch


def waiting(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


def computing(end: float) -> None:
    numbers = np.random.default_rng(0).random(20_000)
    while time.perf_counter() < end:
        np.sort(numbers)  # outside the interpreter's lock, as decoding images is


def main() -> None:
    options = parse(__doc__, replicas=2, workload="W2", rounds=20, turn=1.0)
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(options.replicas)])
    workload = WORKLOADS[options.workload]
    pace = Pace()
    contenders = [
        pace.timed(step_alone(strategy, workload)),
        fed_by(Pipeline(workload, waiting, pace), strategy, "waits, 2 batches ahead", prefetch=2),
        fed_by(Pipeline(workload, waiting, pace), strategy, "waits, in the loop", prefetch=0),
        fed_by(Pipeline(workload, computing, pace), strategy, "computes, 2 batches ahead", prefetch=2),
        fed_by(Pipeline(workload, computing, pace), strategy, "computes, in the loop", prefetch=0),
    ]
    check_losses(contenders, num_steps=3, tolerance=1e-3)
    times = interleave(contenders, rounds, turn)
    goals = {"waits, 2 batches ahead": GOAL}
    rows = [
        Row(c.name, show_seconds(times.median(c.name)), times.ratios(c.name, "step alone"), goals.get(c.name)) for c in contenders
    ]
    title = f"{workload.what}, {options.replicas} replicas, pipeline of {SHARE} of the step alone, {rounds} rounds"
    print_table(f"{title}; ratio to it", rows)


def step_alone(strategy: mr.Strategy, workload: Workload) -> Contender:
    """Take batches that lie on the devices."""
    batches = list(strategy.distribute_dataset(workload.batches()))
    return training("step alone", strategy, workload, itertools.cycle(batches))


def fed_by(pipeline: Pipeline, strategy: mr.Strategy, name: str, prefetch: int) -> Contender:
    dataset = strategy.distribute_dataset(pipeline, mr.InputOptions(prefetch=prefetch))
    return training(name, strategy, pipeline.workload, iter(dataset))


def training(name: str, strategy: mr.Strategy, workload: Workload, batches: Iterator[Any]) -> Contender:
    """Take steps with a model of its own, and read the loss each time."""
    step = mirrored_step(strategy, workload)

    def run(num_steps: int) -> float:
        loss = 0.0
        for batch in itertools.islice(batches, num_steps):
            loss = float(strategy.reduce("sum", strategy.run(step, args=batch)))
        return loss

    return Contender(name, run)


if __name__ == "__main__":
    main()
