"""From a step function to one compiled program on every replica: prove, compile, cache, dispatch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._jax import tracing
from .._options import CrossDeviceOps
from .._replicas import frames, placement
from .._replicas.collectives import ReplicaAxis
from .._replicas.context import ReplicaContext, own_parts
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica, of_last_batch
from .._replicas.spent import Spent, waited
from .._typing import PyTree
from .._variables.access import claimed, load, store
from . import lift, pipeline, returned_states
from .cache import Programs
from .call import Call, argument_names, array_leaves, check_replicas, key_of, take_apart
from .eager import is_eager, refuse_eager, run_eagerly, silenced
from .program import StepProgram, place, place_quickly, replica_frame
from .uneven import last_batch


class Steps:
    """The steps of a strategy: each is proven and compiled once for each kind of arguments, and kept.

    Args:
        mesh: the strategy's devices.
        bytes_per_pack: see `CommunicationOptions`.
        ops: how replicas add up, where the user has said so.

    Attributes:
        programs: those that are kept.
        spent: where the time of a loop of steps goes.
    """

    def __init__(self, mesh: ReplicaMesh, bytes_per_pack: int = 0, ops: CrossDeviceOps | None = None) -> None:
        self._mesh = mesh
        self._even = ReplicaAxis(mesh.num_replicas, bytes_per_pack=bytes_per_pack, ops=ops)
        self.programs: Programs[StepProgram] = Programs()
        self.spent = Spent()

    def run(self, strategy: Any, function: Any, args: Sequence[Any], kwargs: Any) -> PyTree:
        """Call `function` on every replica: find or make its program, and run it."""
        start, waited_before = time.perf_counter(), waited.devices
        frame = frames.current()
        if frame is not None and frame.axis is not None:
            return _run_merged(strategy, frame, function, args, kwargs)
        is_traced = (frame is not None and frame.bindings is not None) or tracing.current_trace() is not tracing.NO_TRACE
        is_plain = not is_traced and not is_eager.get()
        if is_plain and not kwargs and (fast_path := self.programs.fast_path) is not None:
            arrays = fast_path.arrays_of(function, args)
            if arrays is not None:
                result = fast_path.program.run(arrays)
                self._took(start, waited_before)
                return result
        key, arrays = key_of(function, args, kwargs)
        last_key, program = self.programs.last
        if key != last_key:  # a loop of steps needs not hash its key
            program = self.programs.get(key)
        elif is_plain and not kwargs and program is not None:
            self.programs.shorten(key, program, function, args, self._mesh.stacked)
        if (
            program is not None
            and is_plain
            and (placed := place_quickly(self._mesh, arrays, lambda: array_leaves(key))) is not None
        ):
            result = program.run(placed)
            self._took(start, waited_before)
            return result
        self.spent.last = None
        coming = of_last_batch((tuple(args), kwargs)) if program is None and is_plain and (args or kwargs) else None
        return self._run_otherwise(strategy, program, take_apart(function, args, kwargs), coming)

    def _took(self, start: float, waited_before: float) -> None:
        """Note where the time of a warm step went, and of what the loop did before it."""
        spent, thread = self.spent, threading.get_ident()
        if thread != spent.thread:
            if spent.thread:
                return
            spent.thread = thread
        end = time.perf_counter()
        if (before := spent.last) is not None:
            last, last_input, last_devices = before
            spent.num_steps += 1
            spent.wall += end - last
            spent.input += waited.input - last_input
            spent.devices += waited.devices - last_devices
            spent.python += end - start - (waited.devices - waited_before)
        spent.last = end, waited.input, waited.devices

    def _run_otherwise(self, strategy: Any, program: StepProgram | None, call: Call, coming: Any) -> PyTree:
        """Run a step that is new, traced, eager, or whose arguments are elsewhere.

        Args:
            strategy: the user's.
            program: that of the call, if there is one.
            call: the call.
            coming: the arguments of the last batch, for which a new step is traced too; see `of_last_batch`.
        """
        mesh = self._mesh
        frame_with = functools.partial(replica_frame, strategy, mesh, self._even)
        is_new = program is None
        if program is None:
            with silenced() if is_eager.get() else contextlib.nullcontext():
                program = pipeline.make_program(mesh, call, frame_with)
            if not frames.is_traced() and not is_eager.get():
                lift.warn_of_leaks(call.function)
            made = [(call, program), *self._made_for_last(call, coming, frame_with)]
            if not any(isinstance(constant, jax.core.Tracer) for constant in program.constants):
                before, *_ = [self.programs.add(each.keyed_again(), its, its.lifted.variables) for each, its in made]
                if before is not None:
                    returned_states.check(before.treedef, before.leaves, call, bool(program.findings.collectives))
        if frames.is_traced() or any(isinstance(array, jax.core.Tracer) for array in call.arrays):
            return _run_traced(program, call)
        if is_eager.get():
            refuse_eager(call, mesh)
            return run_eagerly(frame_with, mesh, program, call)
        names = functools.partial(argument_names, call)
        if is_new and not mesh.is_alone:
            placement.check_later(mesh, call.arrays, lambda index: f"the argument {names()[index]}")
        return program.run(place(mesh, call.arrays, call.array_leaves(), names))

    def _made_for_last(self, call: Call, coming: Any, frame_with: Callable[..., Frame]) -> list[tuple[Call, StepProgram]]:
        """Make the program for the last batch, which is compiled when that comes; none if it is there, or nobody knows."""
        later = None if coming is None else take_apart(call.function, *coming)
        if later is None or self.programs.get(later.key) is not None:
            return []
        with last_batch.explained(coming):
            return [(later, pipeline.make_program(self._mesh, later, frame_with))]


# -- running


def _run_traced(program: StepProgram, call: Call) -> PyTree:
    """Make the program part of a larger one that is being traced."""
    check_replicas(call.arrays, call.array_leaves(), lambda: argument_names(call), program.mesh.num_replicas)
    lifted = program.lifted
    with claimed(lifted.written):
        written = [load(variable) for variable in lifted.written]
        read_only = [load(variable) for variable in lifted.read_only]
        results, new, _ = program.mapped(written, read_only, call.arrays, program.constants)
        for variable, value in zip(lifted.written, new, strict=True):
            store(variable, value)
    return program.rebuild(results)


def _run_merged(strategy: Any, frame: Frame, function: Any, args: Sequence[Any], kwargs: Any) -> PyTree:
    """Run a step from within `merge_call`: every replica is there already, so call it in place."""
    assert frame.axis is not None
    context = ReplicaContext(strategy, frame.axis)
    own_args, own_kwargs = own_parts((tuple(args), kwargs), frame.axis)
    with frames.entered(dataclasses.replace(frame, replica=context)):
        result = function(*own_args, **own_kwargs)
    return jax.tree.map(lambda x: PerReplica(frame.axis.stack(x)) if isinstance(x, jax.Array) else x, result)
