"""Are the copies of mirrored variables really the same? Looked up on the devices, on all workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from . import _home, _joint, _pace
from ._checksum import checksum
from ._coordination import Coordination
from ._errors import ReplicasDivergeError
from ._mesh import ReplicaMesh
from ._typing import REPLICA_AXIS
from ._variables import Variable


def check(mesh: ReplicaMesh, coordination: Coordination, variables: Sequence[Variable]) -> None:
    """Compare the checksums of all copies of mirrored variables; with several workers, all call this together.

    Garbage is collected at other times on other workers, so they agree first on the variables that all still have.

    Raises:
        ReplicasDivergeError: on every worker, naming the first variable whose copies differ, the replicas and the workers.
    """
    if mesh.num_replicas == 1:
        return
    if not mesh.is_alone:
        lists = coordination.exchange("variables", [variable._number for variable in variables])
        common = set(lists[0]).intersection(*lists[1:])
        variables = [variable for variable in variables if variable._number in common]
    if not variables:
        return
    sums = np.asarray(checksums(mesh, variables))
    for variable, column in zip(variables, sums.T, strict=True):
        differing = [replica for replica in range(mesh.num_replicas) if not _is_usual(column, replica)]
        if differing:
            raise ReplicasDivergeError(describe(mesh, variable, differing))


def checksums(mesh: ReplicaMesh, variables: Sequence[Variable]) -> jax.Array:
    """Return the checksums of all copies of variables, `uint32[R, number of variables]`, the same on every replica."""
    kinds = tuple((variable.shape, str(variable.dtype)) for variable in variables)
    result = _program(mesh, kinds)(_home.arrays_of(variables))
    if mesh.is_paced:
        (_pace.started if mesh.is_alone else _pace.joined)(result)
    return result


@functools.lru_cache(maxsize=64)
def _program(mesh: ReplicaMesh, kinds: tuple[object, ...]) -> Callable[..., jax.Array]:
    def body(copies: list[jax.Array]) -> jax.Array:
        return jax.lax.all_gather(jnp.stack([checksum(copy) for copy in copies]), REPLICA_AXIS)

    # The copies come in as mirrored, and nothing here relies on it: each device computes from its own.
    specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
    program = jax.jit(jax.shard_map(body, mesh=mesh.mesh, **specs))
    if mesh.is_alone:
        return program
    name, text = "the comparison of the copies of variables", "\n".join(map(str, kinds))
    _joint.agree(name, text)
    return _joint.watched(name, text, program)


def _is_usual(column: np.ndarray, replica: int) -> bool:
    """Tell whether a replica's copy is like most; with a tie, like replica 0's."""
    values, counts = np.unique(column, return_counts=True)
    usual = column[0] if list(counts).count(max(counts)) > 1 else values[np.argmax(counts)]
    return column[replica] == usual


def describe(mesh: ReplicaMesh, variable: Variable, differing: Sequence[int]) -> str:
    """Say which copies of a variable differ from the others."""
    others = next(replica for replica in range(mesh.num_replicas) if replica not in differing)
    where = "" if mesh.is_alone else f" (worker {', '.join(str(w) for w in _workers(mesh, differing))})"
    return (
        f"the copies of variable {variable.name!r} differ: replicas {list(differing)}{where} from replica {others}. They were "
        f"changed behind the library's back, or a device computes wrongly. Restore the last checkpoint. {variable!r}"
    )


def _workers(mesh: ReplicaMesh, replicas: Sequence[int]) -> list[int]:
    return sorted({mesh.devices[replica].process_index for replica in replicas})
