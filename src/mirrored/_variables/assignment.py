"""Computes the value that an assignment stores, with the aggregation: in a step, in `merge_call`, outside."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import PerReplicaError, ProgramMismatchError, ReplicasDivergeError, StrategyMismatchError, UnevenReplicasError
from .._jax import user_code
from .._jax.marks import Mark, Purpose, mark
from .._options import VariableAggregation
from .._replicas import collectives, cross_replica, frames, placement
from .._replicas.arrays import cast, host_array
from .._replicas.collectives import ReplicaAxis
from .._replicas.division import Division
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica, require_whole, stack_of
from .._replicas.planned import Planned
from .._workers import joint_programs
from .spec import Given, VariableSpec, without_counters


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A value to assign to a variable, and how to combine it with the old value.

    Attributes:
        combine: makes the new value from the old one and the operand; None: the operand is the new value.
        load: returns the stored array: one copy inside a step, else the mirrored array or the stack of copies.
        read: returns the one value that the variable has.
    """

    spec: VariableSpec
    method: str
    operand: Given
    combine: Callable[..., jax.Array] | None
    load: Callable[[], jax.Array]
    read: Callable[[], jax.Array]

    def new_value(self, frame: Frame | None) -> jax.Array:
        """Return the value to store; in a trace, aggregate a mirrored variable's value, or mark it for the proof."""
        spec, axis = self.spec, None if frame is None else frame.axis
        is_in_replica = frame is not None and frame.replica is not None
        if spec.is_on_read and not is_in_replica:
            return self._of_copies(axis)
        if isinstance(self.operand, PerReplica) and not is_in_replica:
            update = self._aggregated(self.operand, axis)
        else:
            update = self._converted()
        if is_in_replica and spec.is_on_read and spec.aggregation is VariableAggregation.MEAN:
            assert axis is not None
            update = mark(jnp.asarray(update), Mark(Purpose.MEAN, spec.name, user_code.user_line()))
            if axis.sizes is not None:
                update = mark(update, Mark(Purpose.KEPT_MEAN, spec.name, user_code.user_line()))
        if spec.is_on_read or axis is None:
            return self._combined(update)
        if is_in_replica and spec.aggregation is not VariableAggregation.NONE:
            return self._combined(collectives.aggregate(spec.aggregation, update, axis))
        return mark(jnp.asarray(self._combined(update)), Mark(Purpose.ASSIGN, spec.name, user_code.user_line()))

    def _of_copies(self, axis: ReplicaAxis | None) -> jax.Array:
        """Return the stack of copies of a sync-on-read variable, in `merge_call` this replica's copy."""
        spec = self.spec
        if spec.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{self.method} to variable {spec.name!r} outside a step: it has one value per replica and aggregation "
                "NONE, so one value does not say what each replica gets. Assign inside strategy.run, or give the "
                "variable an aggregation. Nothing was changed."
            )
        if isinstance(self.operand, PerReplica):
            return self._combined(_own(self._stack(self.operand), axis))
        if spec.aggregation is VariableAggregation.SUM:
            total = self._converted()
            if self.combine is not None:
                total = self.spec.mesh.evaluate(self.combine, self.read(), total)
            return self._copies(cross_replica.split_stack, total, axis)
        return self._combined(self._copies(cross_replica.broadcast_stack, self._converted(), axis))

    def _combined(self, update: jax.Array) -> jax.Array:
        if self.combine is None:
            return update
        return self.spec.mesh.evaluate(self.combine, self.load(), update)

    def _aggregated(self, operand: PerReplica, axis: ReplicaAxis | None) -> jax.Array:
        spec, stack = self.spec, self._stack(operand)
        if spec.aggregation is VariableAggregation.NONE:
            raise ReplicasDivergeError(
                f"{self.method} to variable {spec.name!r} was given a PerReplica, one value per replica, but the variable is "
                "mirrored and has no aggregation to make one value of them. Reduce it first: "
                f"variable.{self.method}(strategy.reduce('mean', value)), or create the variable with aggregation='mean'."
            )
        if axis is not None:
            return cross_replica.aggregate_stack(stack, spec.aggregation)
        return cross_replica.aggregated(stack, spec.aggregation, spec.mesh.mirrored, spec.name)

    def _stack(self, operand: PerReplica) -> jax.Array:
        check_per_replica(self.spec, self.method, operand)
        return cast(stack_of(operand), self.spec.dtype, f"{self.method} to variable {self.spec.name!r}")

    def _copies(self, distribute: Callable[..., jax.Array], value: jax.Array, axis: ReplicaAxis | None) -> jax.Array:
        """Make the stack of copies (or, in `merge_call`, this replica's copy) from one value."""
        if axis is not None:
            return _own(distribute(value, axis.size), axis)
        return cross_replica.compiled(distribute, self.spec.mesh.stacked, self.spec.mesh.num_replicas)(value)

    def _converted(self) -> jax.Array:
        """Turn the operand into an array of the variable's shape and dtype, or say what is wrong with it."""
        spec, operand, what = self.spec, self.operand, f"{self.method} to variable {self.spec.name!r}"
        if isinstance(operand, PerReplica):
            raise PerReplicaError(
                f"{what} inside a step was given a PerReplica, which holds the values of "
                "all replicas. Pass it to the step in strategy.run(fn, args=...): there it is this replica's value."
            )
        array: Any = operand
        if not isinstance(operand, jax.Array | Planned):
            if not (is_array := hasattr(type(operand), "__jax_array__")):
                array = host_array(operand, what, spec.dtype)
            # `asarray` compiles a program for each shape.
            array = jnp.asarray(array) if is_array or frames.is_traced() else jax.device_put(array)
        if not isinstance(array, jax.core.Tracer) and (array.committed or not spec.mesh.is_alone):
            if array is operand and not frames.is_traced():
                placement.check_later(spec.mesh, [array], lambda _: f"what variable {spec.name!r} was given by {self.method}")
            if spec.mesh.is_alone or not frames.is_traced():
                division = spec.division
                is_as_stored = division is not None and division.is_plain and array.shape == spec.shape
                array = placed(array, spec.mesh, division=division if is_as_stored else None)
            elif array.is_fully_addressable:
                array = jnp.asarray(np.asarray(array))  # a constant of the program
        if tuple(array.shape) != spec.shape:
            raise ValueError(
                f"{what} of shape {spec.shape} was given a value of shape "
                f"{tuple(array.shape)}. A variable keeps its shape; use jnp.broadcast_to or reshape the value."
            )
        return cast(array, spec.dtype, what)


def check_per_replica(spec: VariableSpec, method: str, operand: PerReplica) -> None:
    """Refuse a PerReplica of another strategy, or of another shape than the variable's."""
    require_whole(operand, lambda: f"{method} to variable {spec.name!r} was given")
    if operand.num_replicas != spec.mesh.num_replicas:
        raise StrategyMismatchError(
            f"{method} to variable {spec.name!r} of {spec.mesh.num_replicas} replicas was given a PerReplica of "
            f"{operand.num_replicas} replicas; it comes from another strategy."
        )
    array = stack_of(operand)
    if not isinstance(array, jax.core.Tracer) and array.sharding.device_set != spec.mesh.stacked.device_set:
        raise StrategyMismatchError(
            f"{method} to variable {spec.name!r}, which lives on {spec.mesh}, was given a PerReplica on "
            f"{sorted(map(str, array.devices()))}; it comes from another strategy."
        )
    if operand.shape != spec.shape:
        error = UnevenReplicasError if None in operand.shape else ValueError
        raise error(
            f"{method} to variable {spec.name!r} of shape {spec.shape} was given a PerReplica with shapes "
            f"{', '.join(map(str, operand.shapes))}."
        )


def placed(array: jax.Array | np.ndarray, mesh: ReplicaMesh, name: str = "", division: Division | None = None) -> jax.Array:
    """Return the chief's array in its stored form; it is the first value of the variable `name`."""
    if division is not None:
        now = getattr(array, "sharding", None) or mesh.mirrored  # a ShapeDtypeStruct has None
        is_joint = now.device_set == mesh.mirrored.device_set and not now.is_fully_replicated
        what = name and f"{name} {division}"  # which must be the same, too
        if not (mesh.is_alone or is_joint):
            array = placed(array, mesh, what)
        return placement.divide(mesh, division, array)
    if mesh.is_alone or not name:
        return placement.mirror(mesh, [array])[0]
    # The same program compares the names: a worker with another order of variables would mix their values up.
    sum_of_name = np.uint32(zlib.crc32(without_counters(name).encode()))

    def refuse_name(position: int, _: Sequence[int]) -> None:
        if position == 1:
            _refuse_names(name)

    return placement.mirror(mesh, [array, sum_of_name], refuse_name)[0]


def placed_copy(array: jax.Array | np.ndarray, mesh: ReplicaMesh, name: str = "", division: Division | None = None) -> jax.Array:
    """As `placed`, in a fresh buffer that the first step may donate."""
    # XLA overwrites no buffer that somebody else holds, nor, on CPU, memory that NumPy has allocated.
    if division is not None:
        return mesh.fresh(placed(array, mesh, name, division))  # type: ignore[no-any-return]
    if mesh.is_alone or isinstance(array, jax.Array):
        array = mesh.fresh(array)
    return placed(array, mesh, name)


def _refuse_names(name: str) -> NoReturn:
    """Refuse a variable that has another name on another worker; all workers call this."""
    names = joint_programs.exchange("names of variables", name)
    listed = "; ".join(f"worker {worker}: {other!r}" for worker, other in enumerate(names))
    raise ProgramMismatchError(
        f"the workers create different variables at {user_code.user_line()}: {listed}. They would hold each other's values, "
        "because each starts with the chief's. Every worker must create the same variables in the same order: a set has another "
        "order on each, so go through sorted(...)."
    )


def _own(stack: jax.Array, axis: ReplicaAxis | None) -> jax.Array:
    return stack if axis is None else jax.lax.dynamic_index_in_dim(stack, axis.index(), keepdims=False)
