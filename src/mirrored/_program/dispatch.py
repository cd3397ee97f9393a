"""Which way does a call of a step or an `mr.function` take? All ways are in one list, `Dispatcher.dispatch`."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax

from .._jax import tracing
from .._models import objects
from .._replicas import frames, in_flight, placement
from .._replicas.context import ReplicaContext, own_parts
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica
from .._replicas.spent import Spent, forget_pause, waited
from .._typing import PyTree, UserFunction
from .._variables.access import claimed, load, store
from .._variables.variable import spec_of
from . import lift
from .cache import Programs
from .call import Call, argument_names, array_leaves, check_replicas, key_of, of_last_batch, take_apart
from .eager import is_eager, run_eagerly, silenced
from .own_code import Sight
from .program import Program, StepProgram, place
from .recompilations import Recompilations

ProgramT = TypeVar("ProgramT", bound=Program)


class Dispatcher(abc.ABC, Generic[ProgramT]):
    """The programs for calls of steps, or of `mr.function`s, and the ways that a call may take."""

    #: Whether the calls are those of an `mr.function`, which runs steps, and else of steps.
    runs_steps: ClassVar[bool]

    def __init__(self, mesh: ReplicaMesh | None = None, spent: Spent | None = None) -> None:
        self._mesh = mesh  # None: each call's variables and arguments choose the devices
        self._spent = spent  # None: the time of a call is that of no step
        self.programs: Programs[ProgramT] = Programs()
        self._recompilations = Recompilations()

    @abc.abstractmethod
    def make(self, strategy: object, call: Call) -> ProgramT:
        """Trace the function of a call, and make its program."""

    def dispatch(self, strategy: object, function: UserFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> PyTree:
        """Run a call, in the first of these ways that fits."""
        start = time.perf_counter(), waited.devices
        frame = frames.current()
        is_traced = tracing.current_trace() is not tracing.NO_TRACE or (frame is not None and frame.bindings is not None)
        is_plain = not is_traced and not is_eager.get()
        is_short = is_plain and not kwargs
        # It repeats the last call, or one of the last ones, of its function.
        if is_short and (repeated := self._find_repeated(function, args)) is not None:
            return self._execute(*repeated, *start)
        # An `mr.function` in a larger program, or operation by operation, is plain code.
        if self.runs_steps and not is_plain:
            return function(*args, **kwargs)
        # Among its arguments are objects that hold arrays, such as NNX's: a call with these arrays takes another way.
        if (kind := objects.held_in((args, kwargs))) is not None:
            return objects.run_with(kind, functools.partial(self.dispatch, strategy), self._mesh, function, args, kwargs)
        # In `merge_call`, where all replicas are already.
        if frame is not None and frame.axis is not None:
            return _call_in_place(strategy, frame, function, args, kwargs)
        # Its program is known.
        key, functions, arrays = key_of(function, args, kwargs, self.runs_steps)
        short_args = args if is_short else None
        program = self.programs.get(key, functions, short_args)
        if program is not None and is_plain:
            names = lambda: argument_names(take_apart(function, args, kwargs))  # noqa: E731
            return self._execute(program, place(program, arrays, lambda: array_leaves(key), names), *start)
        # The other ways need a program too, for what its proof says of the results; none of them is a step of a loop.
        forget_pause()
        call = take_apart(function, args, kwargs, self.runs_steps)
        if is_new := program is None:
            program = self._make_and_keep(strategy, call, args, kwargs, is_plain)
        # It is part of a larger program that is being traced.
        if frames.is_traced() or any(isinstance(array, jax.core.Tracer) for array in (*call.arrays, *program.constants)):
            return _call_traced(program, call)
        # It runs operation by operation.
        if is_eager.get() and isinstance(program, StepProgram):
            return run_eagerly(strategy, program, call)
        # It is new, or an eager transformation of JAX is around it, such as `jax.grad`, whose arrays it does not take.
        names = functools.partial(argument_names, call)
        if is_new and not program.mesh.is_alone:
            placement.check_later(program.mesh, call.arrays, lambda index: f"the argument {names()[index]}")
            if program.lifted.donated:  # what is donated cannot be compared later
                in_flight.finish()
        return self._execute(program, place(program, call.arrays, call.array_leaves, names), *start)

    def _find_repeated(self, function: UserFunction, args: Sequence[Any]) -> tuple[ProgramT, list[Any]] | None:
        """Return the program and arrays of a call that repeats an earlier one, of this function or of another with its code."""
        # By its code, too: a lambda in the loop is another function in each turn, and the guards compare what it closes over.
        paths = self.programs.fast_paths
        path = paths.get(id(function)) or paths.get(id(getattr(function, "__code__", None)))
        if path is None or (arrays := path.arrays_of(function, args)) is None:
            return None
        return path.program, arrays

    def _execute(self, program: ProgramT, arrays: list[Any], start: float, waited_before: float) -> PyTree:
        """Run a program on placed arrays, and note the time since the call's start, as a compilation's or a warm step's."""
        is_compiled = program.has_run
        if not is_compiled:
            forget_pause()
        result = program.rebuild(program.execute(arrays))
        if (spent := self._spent) is None:
            return result
        end, input, devices, thread = time.perf_counter(), waited.input, waited.devices, threading.get_ident()
        if not is_compiled:
            spent.num_compiled += 1
            spent.compiling += end - start
        elif spent.thread in (0, thread):
            spent.thread = thread
            if (before := spent.last) is not None:
                last, last_input, last_devices = before
                inside = end - start - (devices - waited_before)
                spent.steps.append((end - last, input - last_input, devices - last_devices, inside))
            spent.last = end, input, devices
        return result

    # -- new calls

    def _make_and_keep(
        self, strategy: object, call: Call, args: Sequence[Any], kwargs: dict[str, Any], is_plain: bool
    ) -> ProgramT:
        """Make the program of a new call, and another one if the last batch of its dataset is uneven."""
        with silenced() if is_eager.get() else contextlib.nullcontext():
            program = self.make(strategy, call)
        sight = call.sees()  # after the trace, which may have set globals, such as a count of traces
        if is_plain and not self.runs_steps:  # else the names may hold arrays of a larger trace
            lift.warn_of_leaks(call.function, sight)
        later: list[tuple[Call, ProgramT]] = []
        if is_plain and (args or kwargs) and (arguments := of_last_batch((tuple(args), kwargs))):
            later = self._make_for_last_batch(strategy, call.function, *arguments)
        if later:
            sight = call.sees()  # once more, after the second trace
        if not any(isinstance(constant, jax.core.Tracer) for constant in program.constants):
            self._keep(call, program, sight)
            for last_call, last_program in later:
                self._keep(last_call, last_program, last_call.sees())
        return program

    def _keep(self, call: Call, program: ProgramT, sight: Sight) -> None:
        compilation = self._recompilations.note(call, program.lifted.variables, sight)
        self.programs.add(call, program, sight, compilation.cause)
        compilation.tell(program)

    def _make_for_last_batch(
        self, strategy: object, function: UserFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[tuple[Call, ProgramT]]:
        """Trace at once for a dataset's last batch, if that is a new call: a mistake shows before the first step has run."""
        call = take_apart(function, args, kwargs, self.runs_steps)
        if self.programs.get(call.key, call.functions) is not None:
            return []
        try:
            return [(call, self.make(strategy, call))]
        except Exception as error:
            num_rows = next(sum(rows for rows, *_ in leaf.shapes) for leaf in call.array_leaves() if leaf.shapes is not None)
            note = (
                f"Nothing has run yet: this is about the last batch of the dataset, of {num_rows} rows, for which a new step is "
                "traced at once. If the loop ends before it, say so: dataset.take(steps)."
            )
            notes = getattr(error, "__notes__", [])
            error.__notes__ = [*notes[:1], note, *notes[1:]]  # after the replicas that it is about, before JAX's own
            raise


# -- ways into a larger program


def _call_in_place(strategy: object, frame: Frame, function: UserFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> PyTree:
    """Call a step's function from within `merge_call`, as plain code for all replicas."""
    assert frame.axis is not None
    context = ReplicaContext(strategy, frame.axis)
    own_args, own_kwargs = own_parts((tuple(args), kwargs), frame.axis)
    with frames.entered(dataclasses.replace(frame, replica=context)):
        result = function(*own_args, **own_kwargs)
    return jax.tree.map(lambda x: PerReplica(frame.axis.stack(x)) if isinstance(x, jax.Array) else x, result)


def _call_traced(program: Program, call: Call) -> PyTree:
    """Make a step's program part of a larger one that is being traced."""
    check_replicas(call.arrays, call.array_leaves(), lambda: argument_names(call), program.mesh.num_replicas)
    lifted = program.lifted
    with claimed(lifted.written):
        written = [spec_of(variable).stored(load(variable)) for variable in lifted.written]
        read_only = [spec_of(variable).stored(load(variable)) for variable in lifted.read_only]
        results, new, _ = program.mapped(written, read_only, call.arrays, program.constants)
        for variable, stored in zip(lifted.written, new, strict=True):
            store(variable, spec_of(variable).whole(stored))
    return program.rebuild(results)
