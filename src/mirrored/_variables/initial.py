"""What a variable starts with: its name, kind, devices and first value."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._errors import ContextError, PerReplicaError
from .._jax import tracing, user_code
from .._libraries import lines_for
from .._options import SynchronizationName, VariableAggregation, VariableSynchronization
from .._replicas import frames
from .._replicas.arrays import converted_number, host_array, strong
from .._replicas.mesh import ReplicaMesh, default_mesh
from .._replicas.per_replica import PerReplica
from .tree import is_tree

_numbers = itertools.count()


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


def check_aggregated_dtype(aggregation: VariableAggregation, dtype: DTypeLike, name: str) -> None:
    if jnp.issubdtype(dtype, jax.dtypes.extended) and aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
        raise ValueError(
            f"variable {name!r} has dtype {dtype} and aggregation {aggregation.name}, but random keys cannot be added. Use "
            "aggregation='only_first_replica' or 'none'."
        )
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"variable {name!r} has dtype {dtype} and aggregation MEAN, whose results are fractions. Use a floating "
            "dtype, dtype='float32', or aggregation='sum'."
        )


def creation_mesh(name: str) -> ReplicaMesh:
    frame = frames.current()
    if (frame is not None and frame.bindings is not None) or tracing.is_staging():
        raise ContextError(_created_in_trace_message(name))
    return frame.mesh if frame is not None and frame.mesh is not None else default_mesh()


def _created_in_trace_message(name: str) -> str:
    return (
        f"variable {name!r} was created inside a step or another traced function, at {user_code.user_line()}. A step is "
        "traced once and run many times; create variables before it, in `with strategy.scope():`."
    )


def initial_array(value: object, dtype: DTypeLike | None, name: str) -> jax.Array | np.ndarray:
    if isinstance(value, PerReplica):
        raise PerReplicaError(
            f"variable {name!r}: the initial value is a PerReplica, one value per replica; expected one value. Reduce it "
            "first, or assign it to a sync-on-read variable."
        )
    if isinstance(value, jax.core.Tracer):
        raise ContextError(_created_in_trace_message(name))
    if is_tree(value):
        raise TypeError(
            f"variable {name!r}: the function returned a {type(value).__name__}, which holds arrays; expected one array. Give "
            "the tree itself: mr.Variable(make()) instead of mr.Variable(make)." + lines_for(value)
        )
    if isinstance(value, jax.Array):
        return strong(value, value.dtype if dtype is None else dtype)
    what = f"the initial value of variable {name!r}"
    array = host_array(value, what, dtype)
    canonical = jax.dtypes.canonicalize_dtype(array.dtype if dtype is None else dtype)
    return converted_number(array, what, canonical) if array.dtype.kind in "iu" else array.astype(canonical)
