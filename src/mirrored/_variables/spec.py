"""The facts of a variable, and the checks of what a new one is given: name, kind, devices and first value."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from .._errors import ContextError, PerReplicaError
from .._jax import tracing, user_code
from .._options import Storage, StorageName, SynchronizationName, VariableAggregation, VariableSynchronization
from .._replicas import frames
from .._replicas.arrays import converted_number, host_array, strong
from .._replicas.division import Division, Shaped, division_of, placement_of
from .._replicas.mesh import PlannedMesh, ReplicaMesh, default_mesh
from .._replicas.per_replica import PerReplica
from .._replicas.reductions import reduction_of
from .._typing import ArrayLike, Shape

#: A value that users give: an array, or one for each replica.
Given: TypeAlias = ArrayLike | Sequence[Any] | PerReplica


@dataclasses.dataclass(frozen=True, slots=True)
class VariableSpec:
    """The facts of a variable, which no assignment changes; shape and dtype are those of one copy.

    Attributes:
        number: of variables created on these replicas before; the same on every worker.
        is_on_read: whether each replica has its own value, which is aggregated when it is read outside a step.
        division: how the devices divide the value into parts; None: each has all of it.
    """

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    mesh: ReplicaMesh
    number: int
    is_on_read: bool
    aggregation: VariableAggregation
    trainable: bool
    division: Division | None = None

    def __post_init__(self) -> None:
        reduction = reduction_of(self.aggregation)
        if reduction is not None:
            refused, verb = [jax.dtypes.extended], "added"
            if not reduction.adds:
                refused, verb = [jax.dtypes.extended, jnp.complexfloating], "compared"
            if any(jnp.issubdtype(self.dtype, kind) for kind in refused):
                raise ValueError(
                    f"variable {self.name!r} has dtype {self.dtype} and aggregation {self.aggregation.name}, but such values "
                    f"cannot be {verb}. Use aggregation='only_first_replica' or 'none'."
                )
        if self.aggregation is VariableAggregation.MEAN and not jnp.issubdtype(self.dtype, jnp.inexact):
            raise ValueError(
                f"variable {self.name!r} has dtype {self.dtype} and aggregation MEAN, whose results are fractions. Use a "
                "floating dtype, dtype='float32', or aggregation='sum'."
            )

    @property
    def traced_shape(self) -> Shape:
        """The shape of the variable in a trace outside of the replicas: one value, or the stack of all copies."""
        return (self.mesh.num_replicas, *self.shape) if self.is_on_read else self.shape

    @property
    def placement(self) -> NamedSharding:
        """The placement of the stored array."""
        return self.mesh.stacked if self.is_on_read else placement_of(self.mesh, self.division)

    @property
    def whole_bytes(self) -> int:
        """The bytes of one whole value; a random key counts as two numbers of 32 bits."""
        if jax.dtypes.issubdtype(self.dtype, jax.dtypes.extended):
            return math.prod(self.shape) * 8
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_on_device(self) -> int:
        """The bytes that each device stores."""
        if self.division is not None:
            return math.prod(self.division.part_shape(self.shape)) * self.dtype.itemsize
        if self.is_on_read:
            return self.whole_bytes * self.mesh.per_device
        return self.whole_bytes

    def stored(self, value: jax.Array) -> jax.Array:
        """Return a value in its stored form, in a trace outside of the replicas."""
        return value if self.division is None else self.division.stored(value)

    def whole(self, stored: jax.Array) -> jax.Array:
        """Return the value of a stored array, in a trace outside of the replicas."""
        return stored if self.division is None else self.division.whole(stored)


_numbers = itertools.count()
_COUNTED = re.compile(r"(?<=variable)_\d+|_\d+(?=/)")


def without_counters(name: str) -> str:
    """Return a name without the counters in default names, ours and Keras', so that it is equal on all workers."""
    # One worker may have made another variable or model for itself.
    return _COUNTED.sub("", name)


def check_name(name: object) -> str:
    if name is None:
        return f"variable_{next(_numbers)}"
    if not isinstance(name, str) or not name:
        raise TypeError(f"name is {name!r}; expected a non-empty string.")
    return name


def takes_each_value(synchronization: VariableSynchronization | SynchronizationName, name: str) -> bool:
    """Tell whether the variable is sync-on-read."""
    mode = VariableSynchronization.parse(synchronization, "synchronization")
    if mode is VariableSynchronization.NONE:
        raise ValueError(
            f"variable {name!r}: synchronization NONE is not supported. Use 'on_write' for a mirrored variable or "
            "'on_read' for one value per replica."
        )
    return mode is VariableSynchronization.ON_READ


def stored_in(
    storage: Storage | StorageName | None, mesh: ReplicaMesh, array: Shaped, is_on_read: bool, name: str
) -> Division | None:
    """Return how a new variable is divided: as its `storage` says, or else its strategy's."""
    how = None
    if storage is not None:
        how = Storage.parse(storage, "storage")
    if is_on_read and how is not None:
        raise ValueError(
            f"variable {name!r}: storage {how.name} is for mirrored variables, and this one is sync-on-read: each replica has a "
            "value of its own, so that there is nothing to divide. Leave storage out."
        )
    return None if is_on_read else division_of(mesh, array.shape, array.dtype, how)


def creation_mesh(name: str) -> ReplicaMesh:
    frame = frames.current()
    if (frame is not None and frame.bindings is not None) or tracing.is_staging():
        raise ContextError(_created_in_trace_message(name))
    if frame is not None and frame.mesh is not None:
        return frame.mesh
    return default_mesh()


def _created_in_trace_message(name: str) -> str:
    return (
        f"variable {name!r} was created inside a step or another traced function, at {user_code.user_line()}. A step is "
        "traced once and run many times; create variables before it, in `with strategy.scope():`."
    )


def initial_array(value: object, dtype: DTypeLike | None, name: str) -> Any:
    if isinstance(value, PerReplica):
        raise PerReplicaError(
            f"variable {name!r}: the initial value is a PerReplica, one value per replica; expected one value. Reduce it "
            "first, or assign it to a sync-on-read variable."
        )
    if isinstance(value, jax.core.Tracer):
        raise ContextError(_created_in_trace_message(name))
    if isinstance(value, jax.ShapeDtypeStruct) and isinstance(creation_mesh(name), PlannedMesh):
        return jax.ShapeDtypeStruct(value.shape, value.dtype if dtype is None else dtype)
    if isinstance(value, jax.Array):
        return strong(value, value.dtype if dtype is None else dtype)
    what = f"the initial value of variable {name!r}"
    array = host_array(value, what, dtype)
    canonical = jax.dtypes.canonicalize_dtype(array.dtype if dtype is None else dtype)
    if array.dtype.kind in "iu":
        return converted_number(array, what, canonical)
    return array.astype(canonical)
