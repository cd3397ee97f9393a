"""Writing rows of a variable: which rows, which values, and how the replicas' writes become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import PerReplicaError
from .._jax import user_code
from .._options import VariableAggregation
from .._replicas import frames
from .._replicas.arrays import cast, host_array
from .._replicas.per_replica import PerReplica
from .._replicas.reductions import reduction_of
from . import storage
from .spec import Given, VariableSpec

#: Operations of `x.at[...]` that equal an operation with a whole array, to which an aggregation applies.
_WHOLE = {"add": jnp.add, "subtract": jnp.subtract}


class ScatterMethods:
    """The methods of a variable that write its rows at some indices, under TensorFlow's names."""

    __slots__ = ()

    _spec: VariableSpec
    _slot: storage.Slot
    _use: Callable[..., Any]
    _write: Callable[..., Self]

    def scatter_update(self, indices: Given, updates: Given) -> Self:
        """Set the rows at `indices`, and return the variable.

        The same as `variable.assign(variable.value.at[indices].set(updates))`; `scatter_min`, `scatter_max`, `scatter_mul` and
        `scatter_div` are the same with another operation. So inside a step, a mirrored variable takes only rows that are provably
        the same on every replica: gather the replicas' indices and updates first. `scatter_add` and `scatter_sub` are like
        `assign_add`: with an aggregation, each replica's own rows are aggregated.

        Args:
            indices: integers, in any shape, along the first axis of the variable. They are checked when they are known before
                the step is compiled; else indices outside of the variable write nothing, as in JAX.
            updates: an array of shape `indices.shape + variable.shape[1:]`, or one that broadcasts to it. Where an index occurs
                twice, sums and products take both updates; which of two rows to set stays is undefined.

        Raises:
            ReplicasDivergeError: (a ValueError) when the copies would differ, or cannot be shown to be equal.
            ValueError: for another shape; for an index outside; and, inside a step, for a mirrored variable with aggregation SUM
                or MEAN, except in `scatter_add` and `scatter_sub`.
            TypeError: for indices that are no integers, or updates of a dtype of another kind.

        >>> v = mr.Variable([1.0, 2.0, 3.0])
        >>> print(v.scatter_update([0, 2], [10.0, 30.0]).value)
        [10.  2. 30.]

        In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/Variable#scatter_update
        """
        return self._scatter("scatter_update", "set", indices, updates)

    def scatter_add(self, indices: Given, updates: Given) -> Self:
        """Add to the rows at `indices`, and return the variable; an aggregation applies to what is added. See `scatter_update`.

        >>> with strategy.scope():
        ...     seen = mr.Variable(np.zeros(3, int), aggregation="sum")
        >>> classes = strategy.distribute_values_from_function(lambda ctx: np.array([ctx.replica_id_in_sync_group, 2]))
        >>> _ = strategy.run(lambda classes: seen.scatter_add(classes, 1), args=(classes,))
        >>> print(seen.value)
        [1 1 2]
        """
        return self._scatter("scatter_add", "add", indices, updates)

    def scatter_sub(self, indices: Given, updates: Given) -> Self:
        """Subtract from the rows at `indices`, and return the variable; see `scatter_add`."""
        return self._scatter("scatter_sub", "subtract", indices, updates)

    def scatter_mul(self, indices: Given, updates: Given) -> Self:
        """Multiply the rows at `indices`, and return the variable; see `scatter_update`."""
        return self._scatter("scatter_mul", "multiply", indices, updates)

    def scatter_div(self, indices: Given, updates: Given) -> Self:
        """Divide the rows at `indices`, and return the variable; see `scatter_update`."""
        return self._scatter("scatter_div", "divide", indices, updates)

    def scatter_min(self, indices: Given, updates: Given) -> Self:
        """Take the smaller of each row at `indices` and its update, and return the variable; see `scatter_update`."""
        return self._scatter("scatter_min", "min", indices, updates)

    def scatter_max(self, indices: Given, updates: Given) -> Self:
        """Take the larger of each row at `indices` and its update, and return the variable; see `scatter_update`."""
        return self._scatter("scatter_max", "max", indices, updates)

    @user_code.shorten_errors
    def _scatter(self, method: str, operation: str, indices: Given, updates: Given) -> Self:
        spec, frame = self._spec, frames.current()
        in_replica = frame is not None and frame.replica is not None
        rows, new = _checked(spec, method, indices, updates)
        is_merged = spec.aggregation is not VariableAggregation.NONE and not (in_replica and spec.is_on_read)
        reduction = reduction_of(spec.aggregation)
        is_compared = in_replica and reduction is not None and not reduction.adds  # also with the zeros of other rows
        if is_merged and operation in _WHOLE and not is_compared:
            return self._write(method, jnp.zeros(spec.shape, spec.dtype).at[rows].add(new), _WHOLE[operation])
        if is_merged and in_replica and spec.aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
            raise ValueError(
                f"{method} to variable {spec.name!r} inside a step: its aggregation {spec.aggregation.name} would also "
                "combine the rows that are not written. Create the variable without an aggregation and gather first: ctx = "
                f"mr.get_replica_context(); variable.{method}(ctx.all_gather(indices, 0), ctx.all_gather(updates, 0))."
            )

        def scattered(old: jax.Array) -> jax.Array:
            if not (spec.mesh.is_alone or frames.is_traced()):
                old = jnp.asarray(np.asarray(old))  # each worker computes; the chief's result is kept, and compared
            return getattr(old.at[rows], operation)(new)

        with storage.claimed([self._slot], frame):
            return self._write(method, self._use(scattered), None)


def _checked(spec: VariableSpec, method: str, indices: Given, updates: Given) -> tuple[Any, Any]:
    """Return indices and updates as arrays that fit the variable."""
    what = f"{method} to variable {spec.name!r}"
    if not spec.shape:
        raise ValueError(f"{what}: it is a scalar and has no rows; use variable.assign(value).")
    if isinstance(indices, PerReplica) or isinstance(updates, PerReplica):
        raise PerReplicaError(
            f"{what} was given a PerReplica. Pass it to a step: strategy.run(lambda indices, updates: "
            f"variable.{method}(indices, updates), args=(indices, updates)); there it is this replica's value."
        )
    rows = _concrete(indices)
    if isinstance(rows, np.ndarray) and not rows.size:
        rows = rows.astype(np.int32)
    if not jnp.issubdtype(rows.dtype, jnp.integer):
        raise TypeError(f"{what}: indices have the dtype {rows.dtype}; expected integers, the numbers of rows.")
    size = spec.shape[0]
    if isinstance(rows, np.ndarray) and rows.size and not (-size <= rows.min() and rows.max() < size):
        raise ValueError(f"{what} of shape {spec.shape}: indices go from {rows.min()} to {rows.max()}; expected 0 to {size - 1}.")
    new = _concrete(updates)
    if isinstance(new, np.ndarray):
        new = host_array(updates, what, spec.dtype)
    new = cast(jnp.asarray(new), spec.dtype, what)
    expected = (*rows.shape, *spec.shape[1:])
    try:
        return rows, jnp.broadcast_to(new, expected)
    except ValueError as error:
        raise ValueError(
            f"{what} of shape {spec.shape} was given updates of shape {tuple(new.shape)} for indices of shape "
            f"{tuple(rows.shape)}; expected {expected}."
        ) from error


def _concrete(given: Any) -> Any:
    """Return an array on the host, where it is not traced."""
    if not isinstance(given, jax.Array) and hasattr(type(given), "__jax_array__"):
        given = given.__jax_array__()
    return given if isinstance(given, jax.core.Tracer) else np.asarray(given)
