"""Plans how the workers share a dataset's records: by file, by row, or not at all; and says why."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..._options import AutoShardPolicy
from .._input_context import InputContext
from .._sources.kinds import kind_of
from .._sources.open import Source
from .agree import InputWorker
from .steps import LocalReplicas, Steps, in_step, one_element_each, own_batches, rows_of_every_batch, rows_of_own_files


@dataclasses.dataclass(frozen=True)
class SharingPlan:
    """One worker's dataset, and how the replicas share it."""

    dataset: Any
    kind: str  # the chosen policy, or "FUNCTION" if each worker has its own dataset
    how: str  # the same in words, with the reason if AUTO chose it
    sizes: tuple[int, ...] = ()  # that the function was told, of per-replica batches
    is_auto_by_file: bool = False  # whether AUTO chose to divide the data by file
    token: object = dataclasses.field(default_factory=object, repr=False, compare=False)  # identifies the dataset in its batches

    @property
    def is_same_for_all(self) -> bool:
        """Whether all workers read the same batches, so that a position holds for any number of workers."""
        return self.kind == "DATA"

    def steps(self, source: Source, layout: LocalReplicas, extra: dict[str, int]) -> Steps:
        """Return this worker's steps, from an open source's position on."""
        if self.is_same_for_all:
            return rows_of_every_batch(source, layout)
        ways = {"FILE": rows_of_own_files, "OFF": own_batches, "FUNCTION": one_element_each}
        return in_step(ways[self.kind](source, layout, extra), source, layout)


def make_plan(
    dataset: Any, policy: AutoShardPolicy | str, worker: InputWorker, num_replicas: int, drop_remainder: bool = False
) -> SharingPlan:
    """Choose how to divide a dataset of global batches; refuse `FILE` where it would lose, repeat or mispair records."""
    policy = AutoShardPolicy.parse(policy, "auto_shard_policy")
    parts = f"each global batch is cut into {num_replicas} contiguous parts, in replica order"
    if worker.count == 1:
        return SharingPlan(dataset, "DATA", parts)
    workers = f"{worker.count} workers"
    if policy is AutoShardPolicy.OFF:
        how = f"OFF: each of the {workers} divides its own batches among its own {num_replicas // worker.count} replicas"
        return SharingPlan(dataset, "OFF", how)
    by_row = f"every one of the {workers} reads all records; {parts}"
    if policy is AutoShardPolicy.DATA:
        return SharingPlan(dataset, "DATA", f"DATA: {by_row}")
    kind, is_auto = kind_of(dataset), policy is AutoShardPolicy.AUTO
    if drop_remainder and is_auto:
        reason = "drop_remainder=True would leave out by file what others have left when the files of one worker have ended"
    else:
        reason = kind.why_not_by_file(dataset, worker.count, is_auto)
    if reason is None:
        count = kind.num_files(dataset)
        of_all = "" if count is None else f" of {count}"
        which = f"worker i of {worker.count} reads the files i, i + {worker.count}, ...{of_all}"
        how = f"{'AUTO chose ' * is_auto}FILE: {which} and gives its share of each global batch"
        mine = kind.only_files(dataset, slice(worker.index, None, worker.count))
        return SharingPlan(mine, "FILE", how, is_auto_by_file=is_auto)
    if policy is AutoShardPolicy.FILE:
        raise ValueError(
            f"auto_shard_policy FILE cannot share this dataset out among {workers}: {reason}. Use "
            "mr.AutoShardPolicy.DATA, by which every worker reads all records and takes its rows of each global batch, or "
            "AUTO, which chooses it here."
        )
    return SharingPlan(dataset, "DATA", f"AUTO chose DATA, because {reason}: {by_row}")


def plan_of_function(dataset: object, worker: InputWorker, context: InputContext | None = None) -> SharingPlan:
    """Plan a dataset that a function made for this worker alone, given its context."""
    calls = "once" if worker.count == 1 else f"on each of the {worker.count} workers"
    sizes = () if context is None else tuple(context._sizes)
    return SharingPlan(dataset, "FUNCTION", f"made by a function, called {calls}: each replica takes the next element", sizes)
