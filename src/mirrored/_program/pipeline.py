"""From a call to its program: `Call -> Lifted -> Proven -> Mapped -> StepProgram`, each made of the one before."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._jax import interpreter
from .._replicas import in_flight
from .._replicas.collectives import ReplicaAxis
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh
from .._variables.variable import spec_of
from . import proof, refusals, virtual
from .call import Call, argument_names, check_replicas
from .chosen_sums import choose_sums
from .joined_sums import Joined, join_sums, mean_of
from .lift import Lifted, trace_step
from .program import StepProgram
from .proof import SAME, Findings, State, varying
from .uneven import traces


@dataclasses.dataclass(frozen=True)
class Proven:
    """A lifted step of which is known what is the same on all replicas.

    Attributes:
        call: the call that it was lifted from.
        lifted: the pure function.
        findings: what the proof found.
        is_mirrored: for each result array, whether it is the same on every replica.
        axis: the replicas, as its collectives reach them.
    """

    call: Call
    lifted: Lifted
    findings: Findings
    is_mirrored: tuple[bool, ...]
    axis: ReplicaAxis

    @property
    def is_split(self) -> list[bool]:
        """For each array argument, whether each replica has its own."""
        return [leaf.is_per_replica for leaf in self.call.array_leaves()]

    def describe(self) -> str:
        """Write the step as text that is equal on two workers which may run it together."""
        text = f"arguments by replica: {self.is_split}\n{self.lifted.describe()}\nmirrored results: {self.is_mirrored}"
        return text if self.axis.ops is None else f"{text}\nadded up by {self.axis.ops}"


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A proven step as one function of global arrays.

    Attributes:
        proven: the step.
        sums: which of its sums travel together.
        function: takes the written variables, those only read, the arrays and the constants.
    """

    proven: Proven
    sums: Joined
    function: Callable[..., Any]


def make_program(mesh: ReplicaMesh, call: Call, frame_with: Callable[[Any], Frame]) -> StepProgram:
    """Make the program of a call.

    Args:
        mesh: the devices.
        call: the step and its arguments.
        frame_with: makes the place in which to trace, given what knows the other replicas' sizes.
    """
    check_replicas(call.arrays, call.array_leaves(), lambda: argument_names(call), mesh.num_replicas)
    lifted, findings = (_lift_uneven if call.is_uneven() else _lift_even)(call, frame_with)
    axis = frame_with(None).axis
    assert axis is not None
    return _compile(mesh, _map(mesh, _prove(call, lifted, findings, axis)))


# -- Call -> Lifted


def _lift_even(call: Call, frame_with: Callable[[Any], Frame]) -> tuple[Lifted, Findings]:
    frame = frame_with(None)
    assert frame.axis is not None
    traced = trace_step(call, [leaf.shape for leaf in call.array_leaves()], frame)
    lifted = traced.lifted(traced.touched)
    _refuse_per_replica_results(lifted)
    findings = proof.prove(lifted.shown.jaxpr, _input_states(call, lifted))
    refusals.check_assignments(lifted, findings)
    refusals.check_gradients(findings, frame.axis.size)
    return lifted, findings


def _lift_uneven(call: Call, frame_with: Callable[[Any], Frame]) -> tuple[Lifted, Findings]:
    lifted, findings = traces.lift_uneven(call, frame_with, functools.partial(_input_states, call))
    _refuse_per_replica_results(lifted)
    refusals.check_assignments(lifted, findings)
    return lifted, findings


def _input_states(call: Call, lifted: Lifted) -> list[State]:
    states = []
    for variable in lifted.variables:
        origin = f"the sync-on-read variable {variable.name!r}, which has one value per replica"
        states.append(varying(origin) if spec_of(variable).is_on_read else SAME)
    names = argument_names(call)
    for leaf, name in zip(call.array_leaves(), names, strict=True):
        origin = f"the argument {name}, of which each replica has its own"
        states.append(varying(origin) if leaf.is_per_replica else SAME)
    return states


def _refuse_per_replica_results(lifted: Lifted) -> None:
    if any(lifted.plan.stacked):
        raise TypeError(
            "the step returned a PerReplica, which it must have taken from outside. Pass the PerReplica to the step in "
            "strategy.run(fn, args=(...)): inside it is this replica's own array, and may be returned."
        )


# -- Lifted -> Proven


def _prove(call: Call, lifted: Lifted, findings: Findings, axis: ReplicaAxis) -> Proven:
    is_mirrored = tuple(state.is_mirrored for state in findings.outputs[: lifted.num_results])
    return Proven(call, lifted, findings, is_mirrored, axis)


# -- Proven -> Mapped


def _map(mesh: ReplicaMesh, proven: Proven) -> Mapped:
    """Make the function of global arrays: each replica takes its rows, runs the step, and gives rows back."""
    lifted, has_own_device = proven.lifted, mesh.per_device == 1
    sums = Joined(lifted.closed)
    if proven.findings.collectives and has_own_device:
        sums = join_sums(lifted, proven.is_mirrored, proven.axis)
        sums = choose_sums(sums, mesh, proven.axis)
    num_results, num_outputs = lifted.num_results, lifted.num_results + len(lifted.writes.slots)
    is_own = [spec_of(variable).is_on_read for variable in lifted.variables] + proven.is_split
    ends = [not same for same in proven.is_mirrored] + [spec_of(variable).is_on_read for variable in lifted.written]
    run = _run_replica if has_own_device else functools.partial(virtual.run_replicas, mesh, lifted)

    def body(written: list[Any], read_only: list[Any], arrays: list[Any], constants: list[Any]) -> Any:
        outputs = run(sums, constants, [*written, *read_only, *arrays], is_own, ends)
        results = outputs[:num_results]
        for total in outputs[num_outputs:]:
            results += [total, mean_of(total, mesh.num_replicas)]
        return results, outputs[num_results:num_outputs], in_flight.new_witness(mesh.mirrored)

    replicated, stacked = PartitionSpec(), PartitionSpec(mesh.axis)
    inputs, outputs = ([stacked if own else replicated for own in flags] for flags in (is_own, ends))
    first, rest = len(lifted.written), len(lifted.variables)
    in_specs = (inputs[:first], inputs[first:rest], inputs[rest:], replicated)
    out_specs = ([*outputs[:num_results], *[replicated] * (2 * len(sums.carried))], outputs[num_results:], replicated)
    # check_vma=False: gradients are local, and `_program/proof` takes the place of JAX's own check.
    function = jax.shard_map(body, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return Mapped(proven, sums, function)


def _run_replica(sums: Joined, constants: list[Any], inputs: list[Any], is_own: list[bool], ends: list[bool]) -> list[Any]:
    """Run a step on the device of a replica; arrays of its own values have a first axis of 1 outside of it."""
    values = [jnp.squeeze(array, 0) if own else array for array, own in zip(inputs, is_own, strict=True)]
    outputs = interpreter.evaluate(sums.closed, constants, values)
    own = [jnp.expand_dims(array, 0) if end else array for array, end in zip(outputs, ends, strict=False)]
    return [*own, *outputs[len(ends) :]]


# -- Mapped -> StepProgram


def _compile(mesh: ReplicaMesh, mapped: Mapped) -> StepProgram:
    proven = mapped.proven
    return StepProgram.compile(
        mesh,
        proven.lifted,
        proven.call.name,
        mapped.function,
        proven.describe,
        "the step",
        findings=proven.findings,
        mapped=mapped.function,
        is_mirrored=proven.is_mirrored,
        joined=mapped.sums,
    )
