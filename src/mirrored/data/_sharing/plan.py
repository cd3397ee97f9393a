"""Plans how the workers share a dataset's records: by file, by row, or not at all; and says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..._options import AutoShardPolicy
from ..._typing import PyTree
from .._input_context import InputContext
from .._sources.kinds import kind_of
from .._sources.open import Source, open_source
from .agree import InputWorker
from .files import BY_FILE, OwnFiles, share_of
from .steps import LocalReplicas, Steps, in_step, one_element_each, own_batches, rows_of_every_batch, rows_of_own_files


@dataclasses.dataclass(frozen=True)
class SharingPlan:
    """One worker's dataset, and how the replicas share it."""

    dataset: Any
    kind: str  # the chosen policy, or "FUNCTION" if each worker has its own dataset
    how: str  # the same in words, with the reason if AUTO chose it
    sizes: tuple[int, ...] = ()  # the per-replica batch sizes that the user's function asked for
    share: tuple[int, int] = (0, 1)  # this worker's number, and the number of workers
    by_file: AutoShardPolicy | None = None  # the policy, if it allows several workers to divide a dataset by file
    is_auto_by_file: bool = False  # whether AUTO chose to divide the data by file
    token: object = dataclasses.field(default_factory=object, repr=False, compare=False)  # identifies the dataset in its batches

    def open(self, state: Any = None, maps: Sequence[Callable[..., PyTree]] = ()) -> Source | OwnFiles:
        """Open this worker's data, at its beginning or at a position."""
        if isinstance(state, dict) and BY_FILE in state:
            return OwnFiles(self.dataset, state[BY_FILE], maps)
        if self.kind == "FILE":
            return OwnFiles(self.dataset, [share_of(self.dataset, *self.share)], maps)
        return open_source(self.dataset, state, maps)

    def steps(self, source: Source | OwnFiles, layout: LocalReplicas, extra: dict[str, int]) -> Steps:
        """Return this worker's steps, from an open source's position on."""
        if isinstance(source, OwnFiles):
            return in_step(rows_of_own_files(source, layout, extra), source, layout)
        if self.kind == "DATA":  # all workers read the same batches
            return rows_of_every_batch(source, layout)
        own_steps = own_batches if self.kind == "OFF" else one_element_each
        return in_step(own_steps(source, layout), source, layout)

    def goes_on_by_file(self, policy: str) -> bool:
        """Tell whether reading resumes by file from a position saved under `policy`, at least for the rest of its pass."""
        if policy == self.kind or {policy, self.kind} != {"FILE", "DATA"}:
            return policy == self.kind == "FILE"
        is_auto = self.by_file is AutoShardPolicy.AUTO
        return self.by_file is not None and kind_of(self.dataset).why_not_by_file(self.dataset, 1, is_auto) is None


def make_plan(
    dataset: Any, policy: AutoShardPolicy | str, worker: InputWorker, num_replicas: int, drop_remainder: bool = False
) -> SharingPlan:
    """Choose how to divide a dataset of global batches; refuse `FILE` if it would lose, repeat or mispair records."""
    policy = AutoShardPolicy.parse(policy, "auto_shard_policy")
    parts = f"each global batch is cut into {num_replicas} contiguous parts, in replica order"
    kind, is_auto, share = kind_of(dataset), policy is AutoShardPolicy.AUTO, (worker.index, worker.count)
    by_file = None if (drop_remainder and is_auto) or policy in (AutoShardPolicy.OFF, AutoShardPolicy.DATA) else policy
    if worker.count == 1:
        return SharingPlan(dataset, "DATA", parts, by_file=by_file)
    workers = f"{worker.count} workers"
    if policy is AutoShardPolicy.OFF:
        how = f"OFF: each of the {workers} divides its own batches among its own {num_replicas // worker.count} replicas"
        return SharingPlan(dataset, "OFF", how)
    by_row = f"every one of the {workers} reads all records; {parts}"
    if policy is AutoShardPolicy.DATA:
        return SharingPlan(dataset, "DATA", f"DATA: {by_row}")
    if drop_remainder and is_auto:
        reason = "drop_remainder=True would leave out by file what others have left when the files of one worker have ended"
    else:
        reason = kind.why_not_by_file(dataset, worker.count, is_auto)
    if reason is None:
        count = kind.num_files(dataset)
        of_all = f" of {count}" * (count is not None)
        which = f"worker i of {worker.count} reads the files i, i + {worker.count}, ...{of_all}"
        how = f"{'AUTO chose ' * is_auto}FILE: {which} and gives its share of each global batch"
        return SharingPlan(dataset, "FILE", how, share=share, by_file=by_file, is_auto_by_file=is_auto)
    if policy is AutoShardPolicy.FILE:
        raise ValueError(
            f"auto_shard_policy FILE cannot share this dataset out among {workers}: {reason}. Use "
            "mr.AutoShardPolicy.DATA, by which every worker reads all records and takes its rows of each global batch, or "
            "AUTO, which chooses it here."
        )
    return SharingPlan(dataset, "DATA", f"AUTO chose DATA, because {reason}: {by_row}", by_file=by_file)


def plan_of_function(dataset: object, worker: InputWorker, context: InputContext | None = None) -> SharingPlan:
    """Plan a dataset that a function made for this worker alone, given its context."""
    calls = "once" if worker.count == 1 else f"on each of the {worker.count} workers"
    sizes = () if context is None else tuple(context._sizes)
    return SharingPlan(dataset, "FUNCTION", f"made by a function, called {calls}: each replica takes the next element", sizes)
