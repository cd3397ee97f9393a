"""From a step function to one compiled program on every replica: prove, compile, cache, dispatch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .._jax import tracing
from .._models import nnx
from .._options import ReductionToOneDevice
from .._replicas import frames, placement
from .._replicas.collectives import ReplicaAxis
from .._replicas.context import ReplicaContext, own_parts
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica
from .._replicas.platforms import PLATFORMS, XLAS_WAY
from .._replicas.spent import Spent, waited
from .._typing import PyTree, UserFunction
from .._variables.access import claimed, load, store
from .._variables.variable import spec_of
from . import lift, proof, refusals
from .cache import Programs
from .call import Call, argument_names, array_leaves, check_replicas, key_of, of_last_batch, take_apart
from .eager import is_eager, refuse_eager, run_eagerly, silenced
from .lift import Lifted, trace_step
from .passes.all_passes import mapped, passed
from .passes.proven import Proven
from .program import StepProgram, place
from .proof import SAME, State, varying
from .uneven import traces


class Steps:
    """The steps of a strategy: each is proven and compiled once for each kind of arguments, and kept."""

    def __init__(self, mesh: ReplicaMesh, bytes_per_pack: int = 0, ops: ReductionToOneDevice | None = None) -> None:
        self._mesh = mesh
        its = PLATFORMS.get(mesh.devices[0].platform, XLAS_WAY)
        self._even = ReplicaAxis(mesh.num_replicas, bytes_per_pack=bytes_per_pack, packs=its.packs, lanes=its.lanes, ops=ops)
        self.programs: Programs[StepProgram] = Programs()
        self.spent = Spent()

    def run(self, strategy: object, function: UserFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> PyTree:
        """Call `function` on every replica: find or make its program, and run it."""
        start, waited_before = time.perf_counter(), waited.devices
        frame = frames.current()
        is_traced = (frame is not None and frame.bindings is not None) or tracing.current_trace() is not tracing.NO_TRACE
        is_plain = not is_traced and not is_eager.get()
        paths = self.programs.fast_paths if is_plain and not kwargs else {}
        fast_path = paths.get(id(function)) or paths.get(id(getattr(function, "__code__", None)))
        if fast_path is not None and (arrays := fast_path.arrays_of(function, args)) is not None:
            program = fast_path.program
        elif "flax.nnx" in sys.modules and nnx.holds_objects((args, kwargs)):
            return nnx.run_with_objects(functools.partial(self.run, strategy), self._mesh, function, args, kwargs)
        elif frame is not None and frame.axis is not None:
            return _run_merged(strategy, frame, function, args, kwargs)
        else:
            key, functions, given = key_of(function, args, kwargs)
            program = self.programs.get(key, functions, args if is_plain and not kwargs else None)
            if program is None or not is_plain:
                self.spent.last, is_new = None, program is None and is_plain
                coming = of_last_batch((tuple(args), kwargs)) if is_new and (args or kwargs) else None
                with self._compiling() if is_new else contextlib.nullcontext():
                    return self._run_otherwise(strategy, program, take_apart(function, args, kwargs), coming)
            names = lambda: argument_names(take_apart(function, args, kwargs))  # noqa: E731
            arrays = place(self._mesh, given, lambda: array_leaves(key), names)
        if not program.has_run:
            with self._compiling():
                return program.run(arrays)
        result = program.run(arrays)
        self._took(start, waited_before)
        return result

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """Count the time of a block as a compilation."""
        start, self.spent.last = time.perf_counter(), None
        yield
        self.spent.num_compiled += 1
        self.spent.compiling += time.perf_counter() - start

    def _took(self, start: float, waited_before: float) -> None:
        """Note the time of a warm step, and of the rest of the loop before it."""
        spent, thread = self.spent, threading.get_ident()
        if thread != spent.thread:
            if spent.thread:
                return
            spent.thread = thread
        end, input, devices = time.perf_counter(), waited.input, waited.devices
        if (before := spent.last) is not None:
            last, last_input, last_devices = before
            inside = end - start - (devices - waited_before)
            spent.steps.append((end - last, input - last_input, devices - last_devices, inside))
        spent.last = end, input, devices

    def _run_otherwise(self, strategy: object, program: StepProgram | None, call: Call, coming: Any) -> PyTree:
        """Run a step that is new, traced or eager; a new one is traced for the last batch too, which is `coming`."""
        mesh, is_new = self._mesh, program is None

        def frame_with(call: Call, sizes: Any = None, bindings: Any = None) -> Frame:
            axis = dataclasses.replace(self._even, sizes=sizes, lengths=call.lengths(mesh.num_replicas))
            return Frame(strategy, mesh, ReplicaContext(strategy, axis), axis, bindings)

        if program is None:
            make = lambda call: _make_program(mesh, call, functools.partial(frame_with, call))  # noqa: E731
            with silenced() if is_eager.get() else contextlib.nullcontext():
                program = make(call)
            sight = call.sees()  # after the trace, which may have set globals, such as a count of traces
            if tracing.current_trace() is tracing.NO_TRACE and not is_eager.get():  # else the names may hold arrays of that trace
                lift.warn_of_leaks(call.function, sight)
            later = self.programs.made_for_last(coming, functools.partial(take_apart, call.function), make)
            if not any(isinstance(constant, jax.core.Tracer) for constant in program.constants):
                self.programs.add(call, program, call.sees() if later else sight)
                for each, its in later:
                    self.programs.add(each, its, each.sees())
        if frames.is_traced() or any(isinstance(array, jax.core.Tracer) for array in (*call.arrays, *program.constants)):
            return _run_traced(program, call)
        if is_eager.get():
            refuse_eager(call, mesh)
            return run_eagerly(functools.partial(frame_with, call), mesh, program, call)
        names = functools.partial(argument_names, call)
        if is_new and not mesh.is_alone:
            placement.check_later(mesh, call.arrays, lambda index: f"the argument {names()[index]}")
        return program.run(place(mesh, call.arrays, call.array_leaves, names))


# -- running


def _run_traced(program: StepProgram, call: Call) -> PyTree:
    """Make the program part of a larger one that is being traced."""
    check_replicas(call.arrays, call.array_leaves(), lambda: argument_names(call), program.mesh.num_replicas)
    lifted = program.lifted
    with claimed(lifted.written):
        written = [spec_of(variable).stored(load(variable)) for variable in lifted.written]
        read_only = [spec_of(variable).stored(load(variable)) for variable in lifted.read_only]
        results, new, _ = program.mapped(written, read_only, call.arrays, program.constants)
        for variable, stored in zip(lifted.written, new, strict=True):
            store(variable, spec_of(variable).whole(stored))
    return program.rebuild(results)


def _run_merged(strategy: object, frame: Frame, function: UserFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> PyTree:
    """Run a step from within `merge_call`: every replica is there already, so call it in place."""
    assert frame.axis is not None
    context = ReplicaContext(strategy, frame.axis)
    own_args, own_kwargs = own_parts((tuple(args), kwargs), frame.axis)
    with frames.entered(dataclasses.replace(frame, replica=context)):
        result = function(*own_args, **own_kwargs)
    return jax.tree.map(lambda x: PerReplica(frame.axis.stack(x)) if isinstance(x, jax.Array) else x, result)


# -- making a program: Call -> Lifted -> Proven -> StepProgram


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
    is_split = [leaf.is_per_replica for leaf in leaves]
    step = passed(Proven.of(mesh, even.axis, lifted, findings, is_split))
    function = mapped(step)
    more = {"findings": findings, "mapped": function, "joined": step.joined}
    return StepProgram.compile(mesh, lifted, call.name, function, step.describe, **more)


def _input_states(call: Call, lifted: Lifted) -> list[State]:
    states = []
    for spec in map(spec_of, lifted.variables):
        origin = f"the sync-on-read variable {spec.name!r}, which has one value per replica"
        states.append(varying(origin) if spec.is_on_read else SAME)
    for leaf, name in zip(call.array_leaves(), argument_names(call), strict=True):
        origin = f"the argument {name}, of which each replica has its own"
        states.append(varying(origin) if leaf.is_per_replica else SAME)
    return states
