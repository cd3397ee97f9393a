"""A step that the proof has accepted, on its way to the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..._jax import interpreter
from ..._jax.jaxprs import ClosedJaxpr
from ..._options import Storage
from ..._replicas.collectives import ReplicaAxis
from ..._replicas.mesh import ReplicaMesh
from ..._replicas.platforms import platform_of
from ..._variables.variable import spec_of
from ..lift import Lifted
from ..proof import Findings


def _run_replica(step: Proven, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Run a step on the device of a replica, where an array of per-replica values has a first axis of size 1."""
    values = [jnp.squeeze(array, 0) if own else array for array, own in zip(inputs, step.own_inputs, strict=True)]
    outputs = interpreter.evaluate(step.closed, constants, values)
    own = [jnp.expand_dims(array, 0) if end else array for array, end in zip(outputs, step.own_outputs, strict=False)]
    return [*own, *outputs[len(own) :]]


@dataclasses.dataclass(frozen=True)
class Joined:
    """What the sums of a step bring along: the sums of results, by the results' positions, and other sums, by their number."""

    carried: tuple[int, ...] = ()
    num_arrays: int = 0

    def describe(self) -> str:
        """Describe the sums that are joined and carried, in a part of a sentence; "" for none."""
        text = f", {self.num_arrays} in the buffer of another" if self.num_arrays else ""
        if self.carried:
            noun = "1 result" if len(self.carried) == 1 else f"{len(self.carried)} results"
            text += f"; carries the sum of {noun}, which strategy.reduce looks up"
        return text


@dataclasses.dataclass(frozen=True)
class Proven:
    """A proven step. A pass returns it with another program, or with another way to run the program on a device.

    Its inputs are the written variables, the variables that it only reads, and the arrays; its outputs the results and the new
    values of the written variables. A value that each replica has for itself has a first axis for the replicas outside.
    """

    mesh: ReplicaMesh
    axis: ReplicaAxis
    lifted: Lifted  # as the user wrote it
    findings: Findings  # of `lifted.shown`
    own_inputs: tuple[bool, ...]  # for each input, whether each replica has its own; any other is the same on all of them
    own_outputs: tuple[bool, ...]
    in_specs: tuple[PartitionSpec, ...]  # where the inputs lie: whole on each device, or a row for each replica
    out_specs: tuple[PartitionSpec, ...]
    closed: ClosedJaxpr  # what runs; behind the outputs it gives the sums that it carries
    joined: Joined = Joined()
    run: Run = _run_replica

    @classmethod
    def of(cls, mesh: ReplicaMesh, axis: ReplicaAxis, lifted: Lifted, findings: Findings, is_split: Sequence[bool]) -> Proven:
        """Return a step as it leaves the proof; `is_split` tells which arguments are a replica's own."""
        written, variables = lifted.written, lifted.variables
        inputs = *(spec_of(variable).is_on_read for variable in variables), *is_split
        differ = (not state.is_mirrored for state in findings.outputs[: lifted.num_results])
        outputs = *differ, *(spec_of(variable).is_on_read for variable in written)
        stacked, whole = PartitionSpec(mesh.axis), PartitionSpec()
        given, made = [tuple([stacked if is_own else whole for is_own in flags]) for flags in (inputs, outputs)]
        bare = lifted.bare()  # who runs the step gives it the arrays that it closes over
        return cls(mesh, axis, bare, findings, inputs, outputs, given, made, bare.closed)

    def may_join_sums(self) -> bool:
        """Tell whether it adds up over replicas with devices of their own, and the user has not said how sums travel."""
        is_users = self.axis.bytes_per_pack or self.axis.ops is not None
        return self.findings.has_collective and self.mesh.per_device == 1 and not is_users

    def may_order_sums(self) -> bool:
        """Tell whether it adds up over replicas with devices of their own, on a platform where the order of sums saves memory.

        Arrays in parts have an order of their own, with their gathers.
        """
        way = platform_of(self.mesh.mesh)
        is_ordered = way.orders_sums or way.orders_scatters
        is_needed = self.findings.has_collective and self.mesh.per_device == 1 < self.mesh.num_replicas
        return is_needed and is_ordered and not self.has_parts()

    def shares_devices(self) -> bool:
        """Tell whether a device has several replicas."""
        return self.mesh.per_device > 1

    def has_parts(self) -> bool:
        """Tell whether large arrays that are the same on every replica may lie in parts."""
        divisions = [spec_of(variable).division for variable in self.lifted.variables]
        return self.mesh.storage is not Storage.WHOLE or any(divisions)

    def describe(self) -> str:
        """Write the step as text that is equal on two workers which may run it together."""
        is_split = list(self.own_inputs[len(self.lifted.variables) :])
        is_mirrored = tuple(not is_own for is_own in self.own_outputs[: self.lifted.num_results])
        text = f"arguments by replica: {is_split}\n{self.lifted.describe()}\nmirrored results: {is_mirrored}"
        return text if self.axis.ops is None else f"{text}\nadded up by {self.axis.ops}"


#: Runs a step on a device, given the arrays that it closes over, and its inputs as the device has them; returns its outputs.
Run: TypeAlias = Callable[[Proven, Sequence[Any], Sequence[Any]], list[Any]]
