"""From a step function to one compiled program on every replica: trace, prove, map, compile."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._jax import interpreter
from .._options import ReductionToOneDevice
from .._replicas import in_flight
from .._replicas.collectives import ReplicaAxis
from .._replicas.context import ReplicaContext
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh
from .._replicas.platforms import PLATFORMS, XLAS_WAY
from .._replicas.reductions import divide
from .._replicas.spent import Spent
from .._variables.variable import spec_of
from . import proof, refusals, virtual
from .call import Call, argument_names, check_replicas
from .dispatch import Dispatcher
from .fuse_all_reduces import Joined, join_sums
from .lift import Lifted, trace_step
from .program import StepProgram
from .proof import SAME, Findings, State, varying
from .uneven import traces


class Steps(Dispatcher[StepProgram]):
    """The steps of a strategy: each is proven and compiled once for each kind of arguments, and kept."""

    runs_steps = False

    def __init__(self, mesh: ReplicaMesh, bytes_per_pack: int = 0, ops: ReductionToOneDevice | None = None) -> None:
        self.mesh, self.spent = mesh, Spent()
        super().__init__(mesh, self.spent)
        way = PLATFORMS.get(mesh.devices[0].platform, XLAS_WAY)
        self._even = ReplicaAxis(mesh.num_replicas, bytes_per_pack=bytes_per_pack, packs=way.packs, lanes=way.lanes, ops=ops)

    def make(self, strategy: object, call: Call) -> StepProgram:
        """Make the program of a step that is called so."""
        lengths = call.lengths(self.mesh.num_replicas)

        def frame_with(sizes: Any) -> Frame:
            axis = dataclasses.replace(self._even, sizes=sizes, lengths=lengths)
            return Frame(strategy, self.mesh, ReplicaContext(strategy, axis), axis)

        return _make_program(self.mesh, call, frame_with)


# -- making a program: Call -> Lifted -> Proven -> StepProgram


@dataclasses.dataclass(frozen=True)
class Proven:
    """The lifted step of a call, with the findings of the proof."""

    call: Call
    lifted: Lifted
    findings: Findings
    is_mirrored: tuple[bool, ...]  # for each result array, whether it is the same on every replica
    axis: ReplicaAxis

    @property
    def is_split(self) -> list[bool]:
        """For each array argument, whether each replica has its own."""
        return [leaf.is_per_replica for leaf in self.call.array_leaves()]

    def describe(self) -> str:
        """Write the step as text that is equal on two workers which may run it together."""
        text = f"arguments by replica: {self.is_split}\n{self.lifted.describe()}\nmirrored results: {self.is_mirrored}"
        return text if self.axis.ops is None else f"{text}\nadded up by {self.axis.ops}"


def _make_program(mesh: ReplicaMesh, call: Call, frame_with: Callable[[Any], Frame]) -> StepProgram:
    """Make the program of a call; `frame_with` makes the frame to trace in, given an object that knows other replicas' sizes."""
    leaves, even = call.array_leaves(), frame_with(None)
    assert even.axis is not None
    check_replicas(call.arrays, leaves, lambda: argument_names(call), mesh.num_replicas)
    if call.is_uneven():
        lifted, findings = traces.lift_uneven(call, frame_with, functools.partial(_input_states, call))
    else:
        lifted, findings = trace_step(call, [leaf.shape for leaf in leaves], even).lifted(), None
    if any(lifted.plan.stacked):
        raise TypeError(
            "the step returned a PerReplica, which it must have taken from outside. Pass the PerReplica to the step in "
            "strategy.run(fn, args=(...)): inside it is this replica's own array, and may be returned."
        )
    findings = findings or proof.prove(lifted.shown.jaxpr, _input_states(call, lifted))
    refusals.check_assignments(lifted, findings)
    if not call.is_uneven():  # else `lift_uneven` has looked at each kind of replicas
        refusals.check_gradients(findings.marks, mesh.num_replicas)
        refusals.check_noise(findings)
    refusals.check_results(call, lifted, findings)
    is_mirrored = tuple(state.is_mirrored for state in findings.outputs[: lifted.num_results])
    proven = Proven(call, lifted.bare(), findings, is_mirrored, even.axis)
    sums, mapped = _map(mesh, proven)
    return StepProgram.compile(mesh, lifted, call.name, mapped, proven.describe, findings=findings, axis=even.axis, joined=sums)


def _input_states(call: Call, lifted: Lifted) -> list[State]:
    states = []
    for spec in map(spec_of, lifted.variables):
        origin = f"the sync-on-read variable {spec.name!r}, which has one value per replica"
        states.append(varying(origin) if spec.is_on_read else SAME)
    for leaf, name in zip(call.array_leaves(), argument_names(call), strict=True):
        origin = f"the argument {name}, of which each replica has its own"
        states.append(varying(origin) if leaf.is_per_replica else SAME)
    return states


def _map(mesh: ReplicaMesh, proven: Proven) -> tuple[Joined, Callable[..., Any]]:
    """Make the function of global arrays, in which each replica runs the step on its rows; and tell which sums are joined."""
    lifted, has_own_device = proven.lifted, mesh.per_device == 1
    may_join = has_own_device and proven.findings.has_collective
    sums = join_sums(lifted, proven.is_mirrored, proven.axis) if may_join else Joined(lifted.closed)
    num_results, num_outputs = lifted.num_results, lifted.num_results + len(lifted.writes.slots)
    is_own = [spec_of(variable).is_on_read for variable in lifted.variables] + proven.is_split
    ends = [not same for same in proven.is_mirrored] + [spec_of(variable).is_on_read for variable in lifted.written]
    run = _run_replica if has_own_device else functools.partial(virtual.run_replicas, mesh, lifted, proven.findings.varying)

    def body(written: list[Any], read_only: list[Any], arrays: list[Any], constants: list[Any]) -> Any:
        outputs = run(sums, constants, [*written, *read_only, *arrays], is_own, ends)
        results = outputs[:num_results]
        results += outputs[num_outputs:]
        if mesh.num_replicas > 1:  # else each is its own mean, too
            results += [divide(total, mesh.num_replicas, total.dtype) for total in outputs[num_outputs:]]
        return results, outputs[num_results:num_outputs], in_flight.new_witness(mesh.mirrored)

    replicated, stacked = PartitionSpec(), PartitionSpec(mesh.axis)
    inputs, outputs = ([stacked if own else replicated for own in flags] for flags in (is_own, ends))
    first, rest = len(lifted.written), len(lifted.variables)
    in_specs = (inputs[:first], inputs[first:rest], inputs[rest:], replicated)
    out_specs = (
        [*outputs[:num_results], *[replicated] * (len(sums.carried) * min(mesh.num_replicas, 2))],
        outputs[num_results:],
        replicated,
    )
    # check_vma=False: gradients are local, and `_program/proof` takes the place of JAX's own check.
    return sums, jax.shard_map(body, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _run_replica(sums: Joined, constants: list[Any], inputs: list[Any], is_own: list[bool], ends: list[bool]) -> list[Any]:
    """Run a step on the device of a replica; outside, an array of per-replica values has a first axis, here of size 1."""
    values = [jnp.squeeze(array, 0) if own else array for array, own in zip(inputs, is_own, strict=True)]
    outputs = interpreter.evaluate(sums.closed, constants, values)
    own = [jnp.expand_dims(array, 0) if end else array for array, end in zip(outputs, ends, strict=False)]
    return [*own, *outputs[len(ends) :]]
