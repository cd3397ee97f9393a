"""Several workers in one process: threads that exchange values as processes would."""

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from mirrored.data._passes import Elements, Passes
from mirrored.data._sharing.agree import InputWorker
from mirrored.data._sharing.plan import Plan, make_plan
from mirrored.data._sharing.steps import LocalReplicas, Step
from mirrored.data._sources.verbs import Limit


@dataclasses.dataclass
class Run:
    """What each worker did: its plan and its steps."""

    plans: list[Plan]
    steps: list[list[Step]]
    dropped: int

    def global_batches(self) -> list[Any]:
        """The rows of each step in replica order, over all workers; checks that the workers agree."""
        assert len({len(steps) for steps in self.steps}) == 1, "all workers take the same number of steps"
        batches = []
        for by_worker in zip(*self.steps, strict=True):
            assert len({step.sizes for step in by_worker}) == 1, "and agree on the sizes"
            sizes = by_worker[0].sizes
            longest = {leaf.shape[1] for step in by_worker for leaf in jax.tree.leaves(step.stacked)}
            assert longest == {max(sizes)}
            stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(step.stacked for step in by_worker))
            batches.append(jax.tree.map(lambda leaf, sizes=sizes: _true_rows(leaf, sizes), stacked))
        return batches


def _true_rows(stacked: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    assert not any(row[size:].any() for row, size in zip(stacked, sizes, strict=True)), "padding is zeros"
    return np.concatenate([row[:size] for row, size in zip(stacked, sizes, strict=True)])


def exchanges(barrier: threading.Barrier) -> list[Callable[[Any], list[Any]]]:
    """One `exchange` for each worker; values pass through JSON, as between processes."""
    slots = [""] * barrier.parties

    def of_worker(index: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            slots[index] = json.dumps(value)
            barrier.wait()
            values = [json.loads(text) for text in slots]
            barrier.wait()
            return values

        return exchange

    return [of_worker(index) for index in range(barrier.parties)]


def run_workers(
    make_dataset: Callable[[int], Any],
    num_workers: int,
    num_local: int = 1,
    policy: str = "auto",
    drop_remainder: bool = False,
    make: Callable[..., Plan] = make_plan,
    positions: list[Any] | None = None,
    max_steps: int | None = None,
    limits: Sequence[Limit] = (),
    lookahead: int = 4,
    is_noted: bool = False,
) -> Run:
    """Read a dataset, made anew on each worker, to its end; the first error of a worker ends all."""
    dropped: list[int] = []
    barrier = threading.Barrier(num_workers, timeout=30)

    def work(index: int, exchange: Any) -> tuple[Plan, list[Step]]:
        try:
            return read(index, exchange)
        except BaseException:
            barrier.abort()
            raise

    def read(index: int, exchange: Any) -> tuple[Plan, list[Step]]:
        worker = InputWorker(index, num_workers, exchange, is_noted=is_noted)
        plan = make(make_dataset(index), policy, worker, num_workers * num_local)
        layout = LocalReplicas(num_workers * num_local, worker, drop_remainder, lambda lost, _: dropped.append(lost), lookahead)
        text, extra = positions[index] if positions else (None, {})
        elements = Elements(plan, limits=tuple(limits))
        passes = Passes(elements, None if text is None else json.loads(text), extra)
        steps = []
        for step in passes.steps(layout):
            steps.append(step)
            if len(steps) == max_steps:
                break
        passes.close()
        return plan, steps

    with ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(work, index, exchange) for index, exchange in enumerate(exchanges(barrier))]
    errors = [error for future in futures if (error := future.exception())]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    plans, steps = zip(*(future.result() for future in futures), strict=True)
    return Run(list(plans), list(steps), sum(dropped))
