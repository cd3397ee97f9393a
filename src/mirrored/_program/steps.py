"""From a step function to one compiled program on every replica: trace, prove, map, compile."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from .._options import ReductionToOneDevice
from .._replicas.collectives import ReplicaAxis
from .._replicas.context import ReplicaContext
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh
from .._replicas.platforms import platform_of
from .._replicas.spent import Spent
from .._variables.variable import spec_of
from . import proof, refusals
from .call import Call, argument_names, check_replicas
from .dispatch import Dispatcher
from .lift import Lifted, trace_step
from .passes.all_passes import mapped, passed
from .passes.proven import Proven
from .program import StepProgram
from .proof import SAME, State, varying
from .uneven import traces


class Steps(Dispatcher[StepProgram]):
    """The steps of a strategy: each is proven and compiled once for each kind of arguments, and kept."""

    runs_steps = False

    def __init__(self, mesh: ReplicaMesh, bytes_per_pack: int = 0, ops: ReductionToOneDevice | None = None) -> None:
        self.mesh, self.spent = mesh, Spent()
        super().__init__(mesh, self.spent)
        way = platform_of(mesh.mesh)
        self._even = ReplicaAxis(mesh.num_replicas, bytes_per_pack=bytes_per_pack, packs=way.packs, ops=ops)

    def make(self, strategy: object, call: Call) -> StepProgram:
        """Make the program of a step for a call."""
        lengths = call.lengths(self.mesh.num_replicas)

        def frame_with(sizes: Any) -> Frame:
            axis = dataclasses.replace(self._even, sizes=sizes, lengths=lengths)
            return Frame(strategy, self.mesh, ReplicaContext(strategy, axis), axis)

        return _make_program(self.mesh, call, frame_with)


# -- making a program: Call -> Lifted -> Proven -> StepProgram


def _make_program(mesh: ReplicaMesh, call: Call, frame_with: Callable[[Any], Frame]) -> StepProgram:
    """Make the program of a call. `frame_with` makes the frame for a trace, from an object that knows all replicas' sizes."""
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
    is_split = [leaf.is_per_replica for leaf in leaves]
    step = passed(Proven.of(mesh, even.axis, lifted, findings, is_split))
    function = mapped(step)
    return StepProgram.compile(
        mesh, lifted, call.name, function, step.describe, findings=findings, axis=even.axis, joined=step.joined
    )


def _input_states(call: Call, lifted: Lifted) -> list[State]:
    inputs = [
        (spec.is_on_read, f"the sync-on-read variable {spec.name!r}, which has one value per replica")
        for spec in map(spec_of, lifted.variables)
    ]
    for leaf, name in zip(call.array_leaves(), argument_names(call), strict=True):
        inputs.append((leaf.is_per_replica, f"the argument {name}, of which each replica has its own"))
    return [varying(origin) if differs else SAME for differs, origin in inputs]
