"""What a variable is, from its creation to its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from .._options import VariableAggregation
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica
from .._typing import ArrayLike, Shape

#: What users give as an array, or as one for each replica.
Given: TypeAlias = ArrayLike | Sequence[Any] | PerReplica


@dataclasses.dataclass(frozen=True, slots=True)
class VariableSpec:
    """The facts of a variable, which no assignment changes; shape and dtype are those of one copy.

    Attributes:
        number: how many were created on these replicas before; the same on every worker.
        is_on_read: whether each replica has its own value, which is aggregated when it is read outside a step.
    """

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    mesh: ReplicaMesh
    number: int
    is_on_read: bool
    aggregation: VariableAggregation
    trainable: bool

    @property
    def stored_shape(self) -> Shape:
        """The shape of what is stored: one value, or the stack of all."""
        return (self.mesh.num_replicas, *self.shape) if self.is_on_read else self.shape
