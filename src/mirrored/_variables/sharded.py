"""Variables of which each replica holds a part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NoReturn

import jax
import jax.numpy as jnp

from .._options import VariableSynchronization
from .._replicas import cross_replica, parts
from .._replicas.frames import Frame
from .._typing import Shape
from .access import store
from .assignment import Assignment, placed
from .spec import Given, creation_mesh, initial_array
from .variable import Variable, flatten, note_use, unflatten


class ShardedVariable(Variable):
    """A variable with one value for all replicas, like a mirrored one, of which each replica holds a part.

    It is read and assigned as a whole: inside a step a read gathers the parts by a collective, and an assignment keeps this
    replica's part of a value that is the same on every replica. `access.load` and `access.store` are for parts.
    """

    __slots__ = ("_whole_shape",)

    def __init__(self, value: jax.Array, *, name: str) -> None:
        mesh = creation_mesh(name)
        whole = placed(initial_array(value, None, name), mesh, name)
        self._whole_shape: Shape = tuple(whole.shape)
        part = parts.part_size(self._whole_shape, mesh.num_replicas)
        super().__init__(jnp.zeros(part, whole.dtype), name=name, synchronization="on_read")
        store(self, cross_replica.compiled(parts.split_parts, mesh.stacked, mesh.num_replicas)(whole))

    @property
    def shape(self) -> Shape:
        """The shape of the whole value."""
        return self._whole_shape

    @property
    def synchronization(self) -> VariableSynchronization:
        """`ON_WRITE`: it has one value."""
        return VariableSynchronization.ON_WRITE

    def _value_of(self, frame: Frame | None, stored: jax.Array) -> jax.Array:
        if frame is not None and frame.axis is not None:
            [whole] = parts.all_gather_parts([stored], [self._whole_shape], frame.axis)
            return whole
        note_use(self, "read")
        mirrored = self._spec.mesh.mirrored
        return cross_replica.compiled(parts.join_parts, mirrored, self._whole_shape, mirrored)(stored)

    def _new_value(self, frame: Frame | None, method: str, operand: Given, combine: Callable[..., jax.Array] | None) -> jax.Array:
        spec = dataclasses.replace(self._spec, shape=self._whole_shape, is_on_read=False)
        read = lambda: self._value_of(frame, self._load(frame))  # noqa: E731
        whole = Assignment(spec, method, operand, combine, read, read).new_value(frame)
        if frame is not None and frame.axis is not None:
            return parts.own_part(whole, frame.axis)
        if not isinstance(whole, jax.core.Tracer):
            whole = placed(whole, spec.mesh)
        return cross_replica.compiled(parts.split_parts, spec.mesh.stacked, spec.mesh.num_replicas)(whole)

    def _scatter(self, method: str, operation: str, indices: Given, updates: Given) -> NoReturn:
        raise TypeError(
            f"{method} to variable {self.name!r}, of which each replica holds a part: rows of it are not written. Assign "
            "the whole value: variable.assign(variable.value.at[indices].set(updates))."
        )

    def __repr__(self) -> str:
        return (
            f"mr.Variable(name={self.name!r}, shape={self.shape}, dtype={self.dtype}, in {self._spec.mesh.num_replicas} parts of "
            f"{self._spec.shape[0]} elements, one on each replica)"
        )


jax.tree_util.register_pytree_node(ShardedVariable, flatten, unflatten)
