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
from ..._text import counted
from ..._variables.variable import spec_of
from ..lift import Lifted
from ..proof import Findings

#: Smaller weights and gradients may be made, and added up, at any time.
LARGE_BYTES = 128 * 1024


def _run_replica(step: Proven, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Run a step on a device with one replica: per-replica values have a leading axis of size 1."""
    values = [jnp.squeeze(array, 0) if is_own else array for array, is_own in zip(inputs, step.own_inputs, strict=True)]
    outputs = interpreter.evaluate(step.closed, constants, values)
    results = [jnp.expand_dims(array, 0) if end else array for array, end in zip(outputs, step.own_outputs, strict=False)]
    return [*results, *outputs[len(results) :]]


@dataclasses.dataclass(frozen=True)
class Joined:
    """What rides in the buffers of a step's sums: `num_arrays` other sums, and sums of the results at positions `carried`."""

    carried: tuple[int, ...] = ()
    num_arrays: int = 0

    def describe(self) -> str:
        """Describe the joined and carried sums, as the rest of a sentence; "" for none."""
        text = f", {self.num_arrays} in the buffer of another" if self.num_arrays else ""
        if self.carried:
            text += f"; carries the sum of {counted(len(self.carried), 'result')}, which strategy.reduce looks up"
        return text


@dataclasses.dataclass(frozen=True)
class Proven:
    """A proven step. A pass returns it with another program, or with another way to run the program on a device.

    Its inputs are the written variables, the variables that it only reads, and the arrays; its outputs the results and the new
    values of the written variables. Per-replica values have a leading axis: the replicas of the device.
    """

    mesh: ReplicaMesh
    axis: ReplicaAxis
    lifted: Lifted  # as the user wrote it
    findings: Findings  # of `lifted.shown`
    own_inputs: tuple[bool, ...]  # for each input, whether each replica has its own; any other is the same on all of them
    own_outputs: tuple[bool, ...]
    in_specs: tuple[PartitionSpec, ...]  # where the inputs lie: whole on each device, or a row for each replica
    out_specs: tuple[PartitionSpec, ...]
    may_divide: bool  # whether large arrays that are the same on every replica may lie in parts
    closed: ClosedJaxpr  # the program that runs; the carried sums follow its outputs
    joined: Joined = Joined()
    run: Run = _run_replica

    @classmethod
    def of(cls, mesh: ReplicaMesh, axis: ReplicaAxis, lifted: Lifted, findings: Findings, is_split: Sequence[bool]) -> Proven:
        """Return a step as it leaves the proof; `is_split` tells which arguments are a replica's own."""
        written, variables = lifted.written, lifted.variables
        specs = [spec_of(variable) for variable in variables]
        inputs = *[spec.is_on_read for spec in specs], *is_split
        differ = [not state.is_mirrored for state in findings.outputs[: lifted.num_results]]
        outputs = *differ, *[spec.is_on_read for spec in specs[: len(written)]]
        stacked, whole = PartitionSpec(mesh.axis), PartitionSpec()
        given, made = [tuple([stacked if is_own else whole for is_own in flags]) for flags in (inputs, outputs)]
        bare = lifted.bare()  # its caller passes the arrays that it closes over
        may_divide = mesh.storage is not Storage.WHOLE or {None} != {None, *[spec.division for spec in specs]}
        return cls(mesh, axis, bare, findings, inputs, outputs, given, made, may_divide, bare.closed)

    def may_join_sums(self) -> bool:
        """Tell whether the step sums over replicas with one device each, and the user has not chosen how sums travel."""
        is_users = self.axis.bytes_per_pack or self.axis.ops is not None
        return self.findings.has_collective and self.mesh.per_device == 1 and not is_users

    def may_order_sums(self) -> bool:
        """Tell whether the step has a large array and sums over devices, on a platform where ordering the sums saves memory.

        The sums of arrays in parts are ordered together with their gathers: see `turns`.
        """
        way, avals = platform_of(self.mesh.mesh), [var.aval for var in (*self.closed.jaxpr.constvars, *self.closed.jaxpr.invars)]
        sizes = [getattr(a, "size", 0) * getattr(getattr(a, "dtype", None), "itemsize", 0) for a in avals]
        may_add_up = self.findings.has_collective and self.mesh.per_device == 1 < self.mesh.num_replicas
        return may_add_up and way.orders_sums and max(sizes, default=0) >= LARGE_BYTES and not self.may_divide

    def shares_devices(self) -> bool:
        """Tell whether a device has several replicas."""
        return self.mesh.per_device > 1

    def describe(self) -> str:
        """Describe the step as text. Workers may run it together if their texts are equal."""
        is_split = list(self.own_inputs[len(self.lifted.variables) :])
        is_mirrored = tuple(not is_own for is_own in self.own_outputs[: self.lifted.num_results])
        text = f"arguments by replica: {is_split}\n{self.lifted.describe()}\nmirrored results: {is_mirrored}"
        if self.axis.ops is not None:
            text += f"\nadded up by {self.axis.ops}"
        return text


#: Runs a step on a device, given the step's constants and the device's inputs; returns the outputs.
Run: TypeAlias = Callable[[Proven, Sequence[Any], Sequence[Any]], list[Any]]
