"""Compiled programs of steps and functions: donation, dispatch, results, and the text of `strategy.explain`."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np

from .._errors import StrategyMismatchError
from .._jax import callbacks, jaxprs, user_code
from .._jax.primitives import DEVICE_MAPS, HOST_CALLBACKS, LOOPS, PRINTS, SUMS
from .._jax.tracing import have_explicit_axes, is_wide
from .._options import Storage
from .._replicas import in_flight, placement
from .._replicas.collectives import ReplicaAxis
from .._replicas.division import division_of_array, placement_of_array
from .._replicas.mesh import PlannedMesh, ReplicaMesh
from .._replicas.per_replica import PerReplica
from .._replicas.platforms import platform_of
from .._text import bytes_in_words, counted
from .._typing import PyTree, Shape
from .._variables import equal_copies, storage
from .._variables.variable import spec_of
from .._workers import joint_programs
from . import memory, mistakes
from .call import NUMBERS, ArrayLeaf
from .lift import Lifted
from .passes.proven import Joined
from .proof import Findings, State

_ON_HOST = (np.ndarray, *NUMBERS)
#: While a profile is recorded: begins the mark of a program's run in it, and returns a function to be called when the run has
#: been dispatched, with its results, or with none when it failed.
annotate: Callable[[Program], Callable[[list[Any]], None]] | None = None


def describe_program(program: StepProgram) -> str:
    """Say which variables a step touches, and what it communicates."""
    lifted = program.lifted
    sizes: dict[str, list[int]] = {}
    for collective in collectives_of(program):
        sizes.setdefault(name_of_collective(collective), []).append(collective.num_bytes)
    communication = ", ".join(f"{len(b)} {name} of {bytes_in_words(sum(b))}" for name, b in sizes.items()) or "no communication"
    communication += program.joined.describe()
    draws = ", ".join(f"{count} {kind}" for kind, count in sorted(program.findings.drawn.kinds.items()))
    if draws:
        communication += f"; draws of random numbers: {draws}"
    return (
        f"{program.name}: {counted(len(lifted.written), 'variable')} written, {len(lifted.read_only)} only read; {communication}"
    )


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    name: str
    num_bytes: int  # that each replica contributes
    where: str  # the user's line
    in_loop: bool


def name_of_collective(collective: Collective) -> str:
    """Return the field's name of a collective, and whether it is in a loop."""
    name = "all-reduce" if collective.name in SUMS else collective.name.replace("_", "-")
    return name + " in a loop" * collective.in_loop


def collectives_of(program: Program) -> list[Collective]:
    """Return the collectives of a step, or of the steps inside a function, in program order; one device has none."""
    return [] if len(program.mesh.devices) == 1 else list(collectives_in(program.lifted.shown.jaxpr))


def collectives_in(jaxpr: jaxprs.Jaxpr, around: tuple[jaxprs.Equation, ...] = ()) -> Iterator[Collective]:
    """Yield the collectives of a jaxpr; `around` are the equations around it, innermost first."""
    in_loop = any(equation.primitive.name in LOOPS for equation in around)
    for equation in jaxpr.eqns:
        inner = jaxprs.inner_jaxprs(equation)
        if not inner and jaxprs.is_collective(equation):
            where = user_code.equation_line(equation, *around)
            yield Collective(equation.primitive.name, jaxprs.num_bytes(equation), where, in_loop)
        for closed in inner:
            yield from collectives_in(closed.jaxpr, (equation, *around))


_WHERE_A_NAN_IS_MADE = (
    "To see the line of a NaN, make the call in `with mr.eager(), jax.debug_nans(True):`, which runs it operation by operation. "
    "For an infinity it is jax.debug_infs(True)."
)


@dataclasses.dataclass(eq=False)
class Program(abc.ABC):
    """A pure function of variables and arrays, compiled for a mesh, with the variables that it updates."""

    name: str  # the user's, of the function
    mesh: ReplicaMesh
    lifted: Lifted
    home: storage.Home  # has the arrays of the variables that it writes
    mapped: Callable[..., Any]  # of `(written, read_only, arrays, constants)`, before it is compiled
    compiled: Callable[..., Any]
    jax_name: str  # of what is compiled
    constants: list[Any]  # the arrays that the function closes over, placed on the mesh
    shared: list[jax.Array]  # parts of these, in the user's own memory
    watch: equal_copies.Watch | None  # compares the copies of the written variables now and then
    calls_host: bool  # may raise when it runs, so nothing is donated
    refused_maps: ClassVar[frozenset[str]] = frozenset()  # primitives that the program may not have on several devices
    has_run: bool = dataclasses.field(default=False, init=False)  # so that JAX starts it without Python code

    @classmethod
    def compile(
        cls,
        mesh: ReplicaMesh,
        lifted: Lifted,
        name: str,
        function: Callable[..., Any],
        describe: Callable[[], str],
        out_shardings: Any = None,
        **more: Any,
    ) -> Self:
        """Make the program of a function of `(written, read_only, arrays, constants)`; `more` are further fields.

        Only workers whose `describe()` gives the same text run it together.
        """
        equations = jaxprs.all_equations(lifted.shown.jaxpr)
        names = {equation.primitive.name for equation in equations}
        places = cls.refused_maps and jaxprs.placements_in(equations)
        if not names.isdisjoint(PRINTS | cls.refused_maps) or places or have_explicit_axes(equations):
            mistakes.refuse_devices(lifted.shown.jaxpr, cls.refused_maps, len(mesh.devices))
        calls_host = not names.isdisjoint(HOST_CALLBACKS)
        options: dict[str, Any] = {}
        if not calls_host:
            options["donate_argnums"] = (0, *(3 + position for position in lifted.donated))
        if out_shardings is not None:
            options["out_shardings"] = out_shardings
        variables = lifted.variables
        if mesh.storage is not Storage.WHOLE or any(spec_of(variable).division for variable in variables):
            options["compiler_options"] = platform_of(mesh.mesh).options_of_parts
        jitted = jax.jit(_spread(function) if lifted.donated else function, **options)
        compiled: Any = mesh.executable(jitted, name, lambda: [spec_of(variable).trainable for variable in lifted.variables])
        jax_name = compiled.__name__
        if not mesh.is_alone:
            is_update = any(not spec_of(variable).is_on_read for variable in lifted.written)
            compiled = joint_programs.prepared(name, describe(), compiled, is_run=True, is_update=is_update)
        closed_over = lifted.closed.consts
        constants = closed_over and placement.mirror_constants(mesh, closed_over, f"an array that {name} closes over")
        home, watch = storage.home_of(lifted.writes.slots), equal_copies.watch(mesh, variables)
        # JAX looks at the first device only: with a part deleted on another, the program would take the variables with it.
        shared = closed_over and placement.shared_with_user(closed_over, constants)
        return cls(name, mesh, lifted.bare(), home, function, compiled, jax_name, constants, shared, watch, calls_host, **more)

    @abc.abstractmethod
    def rebuild(self, results: list[Any]) -> PyTree:
        """Make a call's result of the arrays that the program has computed; it may change the list."""

    def execute(self, arrays: list[Any]) -> list[Any]:
        """Run on placed arrays, keep the new values of the variables, and return the arrays of the result."""
        in_flight.require_threads()
        if self.shared and any(array.is_deleted() for array in self.shared):
            raise RuntimeError(
                f"an array that {self.name} closes over has been deleted, by a program that donates it or by its delete(). "
                "Nothing was changed. Pass the present array, strategy.run(step, args=(x,)), or donate a copy, jnp.copy(x)."
            )
        read_only = self.lifted.reads.slots
        given: tuple[Any, ...] = arrays, self.constants
        if self.lifted.donated:
            given = self.constants, *placement.unshared(self.mesh, arrays, storage.held_arrays())
        end_mark = begin(self) if (begin := annotate) is not None else None
        outputs: Any = [[]]
        try:
            if self.calls_host:
                outputs = storage.overwrite_when_done(self._until_done, self.home, read_only, *given)
                self.has_run = True
            elif self.has_run:
                outputs = storage.overwrite(self.compiled, self.home, read_only, *given)
            else:
                self._refuse_too_large(given)
                with _delaying_ctrl_c():
                    outputs = storage.overwrite(self.compiled, self.home, read_only, *given)
                self.has_run = True
        except Exception as error:
            if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
                error.add_note(_WHERE_A_NAN_IS_MADE)
            raise
        finally:
            if end_mark is not None:
                end_mark(outputs[0])
        results, _, witness = outputs
        if witness:
            if self.mesh.is_alone:
                in_flight.started(witness[0])
            else:
                in_flight.joined(witness[0])
        if (watch := self.watch) is not None:
            watch.count += 1
            if watch.count >= watch.next:
                watch.compare()
        return results

    def _refuse_too_large(self, given: tuple[Any, ...]) -> None:
        """Raise an error, before the first run, if the program does not fit into the memory of a device."""
        if (has := self.mesh.memory_limit()) is not None:
            is_trained = [spec_of(variable).trainable for variable in self.lifted.variables]
            with storage.lent([*self.lifted.writes.slots, *self.lifted.reads.slots]) as values:
                count = len(self.lifted.writes.slots)
                arguments = values[:count], values[count:], *given
                memory.refuse_too_large(self.name, self.compiled, has, is_trained, arguments)

    def _until_done(self, *arguments: Any) -> Any:
        """Run a program with a host callback to its end, where an error of the callback shows."""
        try:
            return jax.block_until_ready(self.compiled(*arguments))
        except jax.errors.JaxRuntimeError:
            callbacks.forget_failed()
            raise


def _spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function its arrays one by one, so that `jax.jit` donates some of them; a list costs less in each call."""

    def program(written: list[Any], read_only: list[Any], constants: list[Any], *arrays: Any) -> Any:
        return function(written, read_only, list(arrays), constants)

    program.__name__ = getattr(function, "__name__", "function")
    return program


@contextlib.contextmanager
def _delaying_ctrl_c() -> Iterator[None]:
    """Delay a Ctrl-C until the end of this block, because JAX starts the first run of a program in Python."""
    if threading.current_thread() is not threading.main_thread() or not callable(before := signal.getsignal(signal.SIGINT)):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def program_compiled(jax_name: str) -> Program | None:
    """Return this thread's running program, if JAX compiles it under this name; None if JAX compiles anything else."""
    # JAX tells a compilation by the program's name only, and compiles in the thread that runs it: so look who has called.
    frame = sys._getframe()
    while frame is not None and frame.f_code is not Program.execute.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    running: Program = frame.f_locals["self"]
    return running if running.jax_name == jax_name else None


@dataclasses.dataclass(eq=False)
class StepProgram(Program):
    """The program of a step, proven."""

    refused_maps = DEVICE_MAPS
    findings: Findings
    axis: ReplicaAxis  # that the step was traced with
    joined: Joined  # after the results come the SUMs of results that a sum carries, then their MEANs if they differ

    def rebuild(self, results: list[Any]) -> PyTree:
        """Rebuild a step's result; the arrays of an eager run carry no sums."""
        plan = self.lifted.plan
        carried = results[len(plan.shapes) :]
        del results[len(plan.shapes) :]
        count = len(self.joined.carried)
        for index, shapes, place, state in self._differing:
            sums = None
            if carried and place is not None:  # from the end, where the MEANs are; without MEANs the SUMs
                sums = carried[place], carried[place - count], self.mesh
            results[index] = PerReplica(results[index], shapes, sums, None, state)
        return plan.rebuild(results)

    @functools.cached_property
    def _differing(self) -> list[tuple[int, tuple[Shape, ...] | None, int | None, State]]:
        """For each result that differs by replica: its position, its shapes, the place of its SUM, and its proven state."""
        shapes, places = self.lifted.plan.shapes, {index: place for place, index in enumerate(self.joined.carried)}
        differing = [(i, state) for i, state in enumerate(self.findings.outputs[: len(shapes)]) if not state.is_mirrored]
        return [(index, shapes[index], places.get(index), state) for index, state in differing]


def is_placed(mesh: ReplicaMesh, array: Any) -> bool:
    """Tell whether an argument has one of the placements that programs are compiled for."""
    if isinstance(array, (*_ON_HOST, jax.core.Tracer)):
        return False
    if array.sharding is mesh.stacked or array.sharding is mesh.mirrored or array.sharding in (mesh.stacked, mesh.mirrored):
        return True
    return mesh.storage is not Storage.WHOLE and array.sharding == placement_of_array(mesh, array)


@functools.lru_cache(maxsize=64)
def _mirrored_number(mesh: ReplicaMesh, kind: type, text: str, is_wide: bool) -> jax.Array:
    """Put a number on the replicas; cached, because a learning rate is mostly the same in the next step."""
    return mesh.put(kind(text), mesh.mirrored)


def place(
    program: Program, arrays: Sequence[Any], leaves_of: Callable[[], Sequence[ArrayLeaf]], names: Callable[[], Sequence[str]]
) -> list[Any]:
    """Move a program's arguments to its mesh if they are elsewhere, or on this worker only; `names` are for messages."""
    mesh, placed = program.mesh, list(arrays)
    if mesh.is_alone:
        placed = [_mirrored_number(mesh, type(a), repr(a), is_wide()) if type(a) in NUMBERS else a for a in arrays]
    elsewhere = [position for position, array in enumerate(placed) if not is_placed(mesh, array)]
    if not elsewhere:
        return placed
    for position in elsewhere:
        if type(placed[position]) is jax.ShapeDtypeStruct and not isinstance(mesh, PlannedMesh):
            raise TypeError(
                f"the argument {names()[position]} is a jax.ShapeDtypeStruct, which has a shape and no value. Pass an array, "
                "such as jnp.zeros(x.shape, x.dtype). For the shapes of the results alone write jax.eval_shape(lambda x: "
                "strategy.run(step, args=(x,)), x); mr.plan compiles for a topology without values."
            )
    leaves = leaves_of()
    for position in (position for position in elsewhere if leaves[position].is_per_replica):
        array = placed[position]
        is_free = isinstance(array, _ON_HOST) or not getattr(array, "committed", True)
        if not is_free and array.sharding.device_set == mesh.mirrored.device_set:  # on these devices, cut in another way
            placed[position] = mesh.put(array, mesh.stacked)
        elif not (is_free and mesh.is_alone):
            raise StrategyMismatchError(
                f"the argument {names()[position]} is a PerReplica whose values lie on "
                f"{sorted(str(d) for d in arrays[position].sharding.device_set)}, but this strategy has {mesh}; it comes from "
                "another strategy. Distribute the data with the strategy that runs the step."
            )
    elsewhere = [position for position in elsewhere if not is_placed(mesh, placed[position])]
    moving = [placed[position] for position in elsewhere]
    if mesh.is_alone:
        kinds = [leaves[position] for position in elsewhere]
        targets = [mesh.stacked if kind.is_per_replica else placement_of_array(mesh, kind) for kind in kinds]
        moving = list(map(placement.own_copy, moving))
        if program.lifted.donated:
            beside = [array for position, array in enumerate(placed) if position not in elsewhere]
            moving = placement.unshared(mesh, moving, [*beside, *program.constants, *storage.held_arrays()], is_moving=True)
        moved = mesh.put(moving, targets)
    else:

        def differ(index: int, workers: Sequence[int]) -> None:
            placement.refuse_argument(f"the argument {names()[elsewhere[index]]}, a plain array", index, workers)

        # A message has bytes: a number has those of its type in the trace.
        given = [np.asarray(a, leaves[i].dtype) if type(a) in NUMBERS else a for i, a in zip(elsewhere, moving, strict=True)]
        moved = placement.mirror(mesh, given, differ, is_checked_late=True)
        kinds = [division_of_array(mesh, array.shape, array.dtype) for array in moved]
        moved = [a if kind is None else placement.divide(mesh, kind, a) for kind, a in zip(kinds, moved, strict=True)]
    for position, array in zip(elsewhere, moved, strict=True):
        placed[position] = array
    return placed
