"""Are the copies of mirrored variables really the same? Looked up in the devices' memory, on all workers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import jax
import numpy as np

from . import _home, _runtime
from ._agreement import require_same_history
from ._checksum import checksum
from ._coordination import Coordination
from ._errors import ReplicasDivergeError
from ._mesh import ReplicaMesh
from ._progress import progress
from ._stall import numbered
from ._variables import Variable

#: The share of the time of the runs of a program that comparing its variables may take.
MAX_COST = 0.01
#: So many runs are timed, after as many have been left to warm up.
_MEASURED_RUNS = 20


def check(mesh: ReplicaMesh, variables: Sequence[Variable]) -> None:
    """Compare the checksums of all copies of mirrored variables; with several workers, all call this together.

    Garbage is collected at other times on other workers, so what is compared is what all of them still have.

    Raises:
        ProgramMismatchError: on every worker, when they have not taken the same number of batches, or run the same programs.
        ReplicasDivergeError: on every worker, naming the first variable whose copies differ, the replicas and the workers.
    """
    if mesh.num_replicas == 1:
        return
    own = [[variable._number, [checksum(copy) for _, copy in variable._local_arrays()]] for variable in variables]
    with progress.phase("the comparison of the copies of variables", waits=not mesh.is_alone):
        every = _coordination(mesh).exchange("the copies of variables", [progress.history(), own])
    require_same_history([history for history, _ in every])
    by_worker = [dict(sums) for _, sums in every]
    for variable in variables:
        if all(variable._number in sums for sums in by_worker):
            column = np.array([value for sums in by_worker for value in sums[variable._number]], np.uint32)
            _compare(mesh, variable, column)


def _coordination(mesh: ReplicaMesh) -> Coordination:
    runtime = None if mesh.is_alone else _runtime.current()
    return Coordination() if runtime is None else runtime.coordination


def _compare(mesh: ReplicaMesh, variable: Variable, column: np.ndarray) -> None:
    values, counts = np.unique(column, return_counts=True)
    is_tie = list(counts).count(max(counts)) > 1
    usual = column[0] if is_tie else values[np.argmax(counts)]  # what most have, else what replica 0 has
    differing = np.flatnonzero(column != usual).tolist()
    if not differing:
        return
    others = int(np.flatnonzero(column == usual)[0])
    workers = sorted({mesh.devices[replica].process_index for replica in differing})
    where = "" if mesh.is_alone else f" ({numbered(workers)})"
    raise ReplicasDivergeError(
        f"the copies of variable {variable.name!r} differ: replicas {differing}{where} from replica {others}. They were changed "
        f"behind the library's back, or a device computes wrongly. Restore the last checkpoint. {variable!r}"
    )


class Watch:
    """Compare the copies of the variables that a program uses, and what the workers have done, every so many of its runs.

    With several workers only runs in the main thread count: those of another are in no order that the workers share.

    How many is measured once, so that it costs at most 1 % of the time of the runs.

    Attributes:
        is_joint: whether other workers take part.
        count: runs of the program so far; who runs it counts, and calls `look` when `next` is reached.
        next: see there.
        every: runs between two comparisons, None while it is not known.
    """

    def __init__(self, mesh: ReplicaMesh, variables: Sequence[Variable]) -> None:
        self._mesh, self._variables, self.is_joint = mesh, variables, not mesh.is_alone
        self.count, self.next = 0, _MEASURED_RUNS
        self.every: int | None = None
        self._since: float | None = None

    def look(self) -> None:
        """Do what is due at this run.

        Raises:
            ReplicasDivergeError: when copies differ.
        """
        if self._since is None:
            self._since = self._now()
            self.next += _MEASURED_RUNS
            return
        now = self._now()
        check(self._mesh, self._variables)
        if self.every is None:
            cost, run = time.perf_counter() - now, (now - self._since) / _MEASURED_RUNS
            every = max(_MEASURED_RUNS, math.ceil(cost / (MAX_COST * max(run, 1e-6))))
            self.every = max(_coordination(self._mesh).exchange("how often to compare", every))
        self.next += self.every

    def _now(self) -> float:
        jax.block_until_ready(_home.arrays_of(self._variables))
        return time.perf_counter()


def watch(mesh: ReplicaMesh, variables: Sequence[Variable]) -> Watch | None:
    """Return what watches the copies of the mirrored ones among variables; None when there is nothing to compare.

    Those that a program only reads too: a copy that differs makes its results wrong. With several workers also a program without
    variables, because of what else is compared.
    """
    mirrored = [variable for variable in variables if not variable._on_read]
    return Watch(mesh, mirrored) if not mesh.is_alone or (mirrored and mesh.num_replicas > 1) else None
