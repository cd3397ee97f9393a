"""The sums of a proven step are made in the way that the user's `cross_device_ops` names: docs/design/collectives.md."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from .._jax import sums
from .._jax.jaxprs import ClosedJaxpr
from .._jax.sums import Sum
from .._replicas.collectives import ReplicaAxis
from .._replicas.cross_device import is_for, sum_by
from .._replicas.mesh import ReplicaMesh
from .joined_sums import Joined


def choose_sums(joined: Joined, mesh: ReplicaMesh, axis: ReplicaAxis) -> Joined:
    """Return a step, traced with plain sums over the replicas, with those that `axis.ops` makes differently."""
    if axis.ops is None:
        return joined
    per_host, num_arrays = len(mesh.local_replicas), 0

    def sum_of(atom: Any) -> Sum | None:
        nonlocal num_arrays
        if not sums.is_number(atom) or not is_for(axis.ops, sums.num_bytes_of(atom)):
            return None
        num_arrays += 1
        return functools.partial(sum_by, axis.ops, num_replicas=axis.size, per_host=per_host)

    closed = joined.closed
    program = ClosedJaxpr(sums.with_sums_by(closed.jaxpr, sum_of, axis.size), closed.consts)
    arrays = "1 array" if num_arrays == 1 else f"{num_arrays} arrays"
    return dataclasses.replace(joined, closed=program, otherwise=f"{arrays} by {axis.ops}" if num_arrays else "")
