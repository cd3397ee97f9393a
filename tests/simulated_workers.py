"""The input of several workers in one process, as `testing.input_of_workers` runs it, with positions and limits."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mirrored._testing.inputs import _make_workers, _run_together
from mirrored.data._passes import Elements, Passes
from mirrored.data._sharing.agree import InputWorker
from mirrored.data._sharing.plan import SharingPlan, make_plan
from mirrored.data._sharing.steps import LocalReplicas, Step
from mirrored.data._sources.verbs import Limit


@dataclasses.dataclass
class Run:
    """What each worker did: its plan and its steps."""

    plans: list[SharingPlan]
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


def run_workers(
    make_dataset: Callable[[int], Any],
    num_workers: int,
    num_local: int = 1,
    policy: str = "auto",
    drop_remainder: bool = False,
    make: Callable[..., SharingPlan] = make_plan,
    positions: list[Any] | None = None,
    max_steps: int | None = None,
    limits: Sequence[Limit] = (),
    is_noted: bool = False,
) -> Run:
    """Read a dataset, made anew on each worker, to its end; the first error of a worker ends all."""
    dropped: list[int] = []

    def read(worker: InputWorker) -> tuple[SharingPlan, list[Step]]:
        worker = dataclasses.replace(worker, is_noted=is_noted)
        plan = make(make_dataset(worker.index), policy, worker, num_workers * num_local)
        layout = LocalReplicas(num_workers * num_local, worker, drop_remainder, lambda lost, _: dropped.append(lost), lookahead=4)
        text, extra = positions[worker.index] if positions else (None, {})
        passes = Passes(Elements(plan, limits=tuple(limits)), None if text is None else json.loads(text), extra)
        with contextlib.closing(passes):
            return plan, list(itertools.islice(passes.steps(layout), max_steps))

    plans, steps = zip(*_run_together(read, _make_workers(num_workers)), strict=True)
    return Run(list(plans), list(steps), sum(dropped))
