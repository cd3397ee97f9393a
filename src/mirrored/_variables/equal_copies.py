"""The comparison of mirrored variables' copies, in the memory of the devices and on all workers."""

from __future__ import annotations

import collections
import json
import math
import time
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._errors import ReplicasDivergeError
from .._process import Lock
from .._replicas.mesh import PlannedMesh, ReplicaMesh
from .._replicas.placement import checksum
from .._text import numbered
from .._workers import joint_programs, machine
from .._workers.coordination import digest
from .._workers.progress import progress
from .._workers.same_program import require_same_history
from .access import lent
from .storage import WeakVariables
from .variable import Variable, local_arrays, spec_of

#: The share of the time that comparisons take in the long run.
MAX_COST = 0.01
#: Runs before the first comparison, and at least between two.
_MIN_RUNS = 20

_NAME = "the comparison of the copies of variables"

_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_watches_lock = Lock()  # threads may compile and run programs at the same time


class CopiesCompared(NamedTuple):
    """A comparison of copies that has ended."""

    ended: float  # in seconds since 1970
    seconds: float
    num_variables: int
    difference: str  # the message; "" when all copies are equal


#: The last comparison on each strategy's devices, for reports.
last_comparisons: dict[ReplicaMesh, CopiesCompared] = {}


def check(mesh: ReplicaMesh, variables: Sequence[Variable], every: int = 0) -> int:
    """Compare the checksums of all copies of mirrored variables; with several workers, all call this together.

    A variable in parts has one copy of each part, so nothing to compare.

    Workers collect garbage at different times, so only variables that all of them still have are compared. Returns the
    `every` of worker 0, the number of runs after which it would like to compare again.

    Raises:
        ProgramMismatchError: on every worker, when they have taken different numbers of batches, or run different programs.
        ReplicasDivergeError: on every worker, naming the first variable whose copies differ, the replicas and the workers.
    """
    if len(mesh.devices) == 1:
        return every
    start, variables = time.perf_counter(), _with_copies(variables)
    own: list[Any] = [[spec_of(variable).number, _checksums(variable)] for variable in variables]
    differ_here = any(len(set(copies)) > 1 for _, copies in own)
    digest_of_one = None if differ_here else digest(json.dumps([[number, copies[:1]] for number, copies in own]))
    told = _exchange(mesh, [progress.history(), digest_of_one])
    require_same_history([history for history, _ in told], lambda: _exchange(mesh, progress.tell()))
    first = told[0][1]  # None on a worker whose own copies differ
    difference = ""
    if first is None or any(worker_digest != first for _, worker_digest in told):
        difference = _find_difference(mesh, variables, own)
    last_comparisons[mesh] = CopiesCompared(time.time(), time.perf_counter() - start, len(variables), difference)
    if difference:
        raise ReplicasDivergeError(difference)
    if not every or mesh.is_alone:
        return every
    return joint_programs.of_chief(_NAME, every)


def _find_difference(mesh: ReplicaMesh, variables: Sequence[Variable], own: list[Any]) -> str:
    """Compare copies one by one, and describe the first difference; skip variables that some worker no longer has."""
    told = _exchange(mesh, [own, machine.words(device.device_kind for device in mesh.local_devices)])
    by_worker = [dict(sums) for sums, _ in told]
    for variable in variables:
        if all(spec_of(variable).number in sums for sums in by_worker):
            copies = [sums[spec_of(variable).number] for sums in by_worker]
            column = np.array([value for of_worker in copies for value in of_worker], np.uint32)
            if (column != column[0]).any():
                machines = ""
                if all(len(set(of_worker)) == 1 for of_worker in copies):  # machines may compute different last bits
                    machines = machine.difference([words for _, words in told])
                return _describe(mesh, variable, column, machines)
    return ""


def _checksums(variable: Variable) -> list[int]:
    with lent([variable]) as [stored]:
        sums = [checksum(array) for _, array in local_arrays(variable, stored)]
    if spec_of(variable).division is None:
        return sums
    return [zlib.crc32(repr(sums).encode())] * len(sums)  # of all parts, of which each worker has a copy


def _with_copies(variables: Sequence[Variable]) -> list[Variable]:
    """Return the variables that have more than one copy of their value."""
    pairs = zip(variables, map(spec_of, variables), strict=True)
    return [v for v, spec in pairs if not spec.is_on_read and (spec.division is None or spec.division.num_copies > 1)]


def _exchange(mesh: ReplicaMesh, own: Any) -> Sequence[Any]:
    return [own] if mesh.is_alone else joint_programs.exchange(_NAME, own)


def _describe(mesh: ReplicaMesh, variable: Variable, column: np.ndarray, machines: str) -> str:
    values, counts = np.unique(column, return_counts=True)
    is_tie = list(counts).count(max(counts)) > 1
    usual = column[0] if is_tie else values[np.argmax(counts)]  # of most replicas, else of replica 0
    differing = np.flatnonzero(column != usual).tolist()
    others = int(np.flatnonzero(column == usual)[0])
    workers = sorted({mesh.devices[place].process_index for place in differing})
    holder = "replica" if mesh.per_device == 1 else "device"
    where = "" if mesh.is_alone else f" ({numbered(workers)})"
    why = "They were changed behind the library's back, or a device computes wrongly"
    if machines:
        why = f"Programs may compute other last bits where machines differ from worker 0's: {machines}. {machine.REMEDY}"
    return (
        f"the copies of variable {variable.name!r} differ: {holder}s {differing}{where} from {holder} {others}. {why}. Restore "
        f"the last checkpoint. {variable!r}"
    )


class Watch:
    """A periodic comparison of the copies of a program's variables, and of the workers' histories.

    The interval is measured anew at each comparison, so that comparisons cost 1 % of the time; programs that run in turns
    share it. The cheaper of the last two comparisons counts, so that one slowed by a busy machine does not delay the next.

    Attributes:
        count: runs of the program so far; its caller counts, and calls `compare` when `next` is reached.
        next: the run before which copies are compared. An error does not change it, so the next run finds the difference again.
        every: runs between the last comparison and the next; the same on all workers.
    """

    def __init__(self, mesh: ReplicaMesh, variables: Sequence[Variable]) -> None:
        self._mesh, self._variables = mesh, WeakVariables(variables)
        self.count, self.next, self.every = 0, _MIN_RUNS, _MIN_RUNS
        self._since = 0.0  # when the last comparison ended, in seconds
        self._costs: collections.deque[float] = collections.deque(maxlen=2)  # seconds that the last two took
        self._counts: dict[int, int] = {}  # of all programs at the last comparison, by the `id` of what watches them
        with _watches_lock:
            _watches.add(self)

    def compare(self) -> None:
        """Compare by `check`, and choose the next run to do so."""
        due, self.next = self.next, self.next + self.every  # other threads do not compare meanwhile
        try:
            with lent(self._variables.alive()) as arrays:
                jax.block_until_ready(arrays)
            start = time.perf_counter()
            self.every = check(self._mesh, self._variables.alive(), self._wish(start))
        except BaseException:
            self.next = due
            raise
        self._since = time.perf_counter()
        self._costs.append(self._since - start)
        self.next = due + self.every

    def _wish(self, now: float) -> int:
        """Return the runs until the next comparison, by what this worker has measured."""
        with _watches_lock:
            counts = {id(watch): watch.count for watch in _watches}
        num_sharing = sum(count != self._counts.get(key) for key, count in counts.items())  # of the programs that have run since
        self._counts = counts
        if len(self._costs) < 2:
            return _MIN_RUNS
        run = (now - self._since) / self.every
        return max(_MIN_RUNS, math.ceil(num_sharing * min(self._costs) / (MAX_COST * max(run, 1e-6))))


def watch(mesh: ReplicaMesh, variables: Sequence[Variable]) -> Watch | None:
    """Make a watch over the mirrored ones among variables; None when there is nothing to compare."""
    mirrored = _with_copies(variables)
    has_copies = bool(mirrored) and len(mesh.devices) > 1
    # With several workers a program without variables is watched too, because their histories are compared.
    if isinstance(mesh, PlannedMesh) or (mesh.is_alone and not has_copies):  # those of a plan have no values
        return None
    return Watch(mesh, mirrored)
