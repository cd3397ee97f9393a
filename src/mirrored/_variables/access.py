"""Lends the arrays of variables to the wings above, while other threads run steps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._replicas import cross_replica, frames, placement
from .._replicas.per_replica import PerReplica
from .._replicas.planned import Planned
from . import storage
from .variable import Variable


def lent(variables: Sequence[Variable]) -> contextlib.AbstractContextManager[list[jax.Array]]:
    """Lend the arrays of variables: nobody overwrites them inside this block."""
    return storage.lent([variable._slot for variable in variables])


def claimed(variables: Sequence[Variable]) -> contextlib.AbstractContextManager[None]:
    """Let no other thread write variables inside this block; in a trace no other thread can."""
    return storage.claimed([variable._slot for variable in variables], frames.current())


def copied(variables: Sequence[Variable]) -> list[jax.Array | jax.ShapeDtypeStruct]:
    """Return copies of mirrored variables; unlike `variable.value`, they let a program overwrite the variables in place.

    A copy is one array, tied to no device; with several workers, or for a variable in parts, it is placed like the value.
    """
    with lent(variables) as arrays:
        return [_copied(variable._joined(array)) for variable, array in zip(variables, arrays, strict=True)]


def _copied(value: jax.Array) -> jax.Array | jax.ShapeDtypeStruct:
    if isinstance(value, Planned):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    is_mirrored = value.is_fully_addressable and value.is_fully_replicated
    return jax.device_put(np.array(value.addressable_data(0))) if is_mirrored else jnp.copy(value)


def load(variable: Variable) -> jax.Array:
    """Return the stored array, or its value in the current trace."""
    return variable._load(frames.current())


def store(variable: Variable, array: jax.Array) -> None:
    """Set the stored array, or its value in the current trace."""
    with claimed([variable]):
        variable._store(frames.current(), array)


def lose(variables: Sequence[Variable], error: BaseException) -> None:
    """Mark variables as lost: a restore replaced them before it failed, and others have older values. Note it on the error."""
    slots = [variable._slot for variable in variables]
    lost = storage.Lost.of([slot.name for slot in slots], error, "a restore, after it had replaced this value,")
    with claimed(variables), storage.lock:
        for slot in slots:
            slot.array = lost
    if slots:
        error.add_note(lost)


def store_in_parts(variable: Variable, value: placement.Sliced) -> None:
    """Set a variable in parts from a host value that every worker has; a worker reads only its own slices."""
    spec = variable._spec
    assert spec.division is not None
    with claimed([variable]):
        variable._keep(placement.divide_slices(spec.mesh, spec.division, value))


def all_copies(variable: Variable) -> PerReplica:
    """Return all copies as a PerReplica, in cross-replica context."""
    frame, spec = frames.current(), variable._spec

    def of_stored(stored: jax.Array) -> PerReplica:
        if frame is not None and frame.axis is not None:
            return PerReplica(frame.axis.stack(stored))
        if spec.is_on_read:
            return PerReplica(jnp.copy(stored))
        broadcast = cross_replica.compiled(cross_replica.broadcast_stack, spec.mesh.stacked, spec.mesh.num_replicas)
        return PerReplica(broadcast(stored))

    return variable._use_stored(frame, of_stored)
