"""From host batches to PerReplica values on the devices, a few ahead of the one in use."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import jax

from .._mesh import ReplicaMesh
from .._typing import PyTree
from .._values import PerReplica


def feed(stacked_batches: Iterator[PyTree], mesh: ReplicaMesh, prefetch: int) -> Iterator[PyTree]:
    """Yield each batch of `[R, n / R, ...]` arrays as PerReplica values.

    Transfers are started ahead, in this thread; JAX carries them out while the step runs. An exception of
    the source is raised after the batches before it.
    """
    ahead: collections.deque[PyTree] = collections.deque()
    failure: Exception | None = None
    is_done = False
    while True:
        while not is_done and len(ahead) <= prefetch:
            try:
                ahead.append(to_devices(next(stacked_batches), mesh))
            except StopIteration:
                is_done = True
            except Exception as error:
                failure, is_done = error, True
        if not ahead:
            break
        yield ahead.popleft()
    if failure is not None:
        raise failure


def to_devices(stacked: PyTree, mesh: ReplicaMesh) -> PyTree:
    """Put each row of each leaf on its replica's device."""
    return jax.tree.map(lambda leaf: PerReplica(jax.device_put(leaf, mesh.stacked)), stacked)
