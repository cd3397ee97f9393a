"""A step that is proven and compiled: what it holds, how it runs, what it says of itself."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import StrategyMismatchError
from .._jax import callbacks, jaxprs, user_code
from .._jax.primitives import LOOPS
from .._jax.tracing import is_wide
from .._replicas import in_flight, placement
from .._replicas.collectives import ReplicaAxis
from .._replicas.context import ReplicaContext
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica
from .._text import bytes_in_words
from .._typing import PyTree, Shape
from .._variables import equal_copies, storage
from .._variables.equal_copies import Watch
from .._variables.storage import Home
from .._variables.variable import spec_of
from .._workers import joint_programs
from .._workers.progress import in_main_thread
from .call import NUMBERS, ArrayLeaf
from .fuse_all_reduces import Joined
from .lift import Lifted
from .proof import Collective, Findings

_PACKAGE = __name__.split(".")[0] + "."
#: What stands between a program and JAX. What else is compiled while a program runs, such as copies of arrays, is no program.
_BETWEEN = frozenset({
    "overwrite", "_overwrite_and_move", "overwrite_when_done", "Program._until_done", "prepared.<locals>.call",
    "started.<locals>.call",
})  # fmt: skip
_ON_HOST = (np.ndarray, *NUMBERS)
#: While a profile is recorded: begins to mark a run of a program in it. What it returns is called when the run was dispatched,
#: with its results, or with none when it failed.
annotate: Callable[[Program], Callable[[list[Any]], None]] | None = None


def describe_program(program: StepProgram) -> str:
    """Say which variables a step touches, and what it communicates."""
    lifted = program.lifted
    sizes: dict[str, list[int]] = {}
    for collective in collectives_of(program):
        sizes.setdefault(name_of_collective(collective), []).append(collective.num_bytes)
    communication = ", ".join(f"{len(b)} {name} of {bytes_in_words(sum(b))}" for name, b in sizes.items()) or "no communication"
    communication += program.joined.describe()
    return f"{program.name}: {len(lifted.written)} variables written, {len(lifted.read_only)} read; {communication}"


def name_of_collective(collective: Collective) -> str:
    """Return the field's name of a collective, and whether it is in a loop."""
    name = "all-reduce" if collective.name == "psum" else collective.name.replace("_", "-")
    return name + (" in a loop" if collective.in_loop else "")


def collectives_of(program: Program) -> list[Collective]:
    """Return the collectives of a step, or of the steps inside a function, in program order."""
    if isinstance(program, StepProgram):
        return program.findings.collectives
    return list(_collectives_in(program.lifted.shown.jaxpr))


def _collectives_in(jaxpr: jaxprs.Jaxpr, in_loop: bool = False) -> Iterator[Collective]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = list(jaxprs.inner_jaxprs(equation))
        if not inner and jaxprs.is_collective(equation):
            yield Collective(name, jaxprs.num_bytes(equation), user_code.equation_line(equation) or "an unknown line", in_loop)
        for each in inner:
            yield from _collectives_in(each.jaxpr, in_loop or name in LOOPS)


@dataclasses.dataclass(frozen=True)
class Program:
    """A pure function of variables and arrays, compiled for a mesh, with the variables that it updates.

    Attributes:
        name: the user's name of the function.
        mesh: the devices that it runs on.
        lifted: the pure function and its variables.
        home: where the arrays of the variables that it writes are.
        compiled: the program of `(written, read_only, arrays, constants)`. The written variables' arrays are donated, unless the
            program has a host callback, which may raise: then they stay as they are until it has ended.
        constants: the arrays that the function closes over, placed on the mesh.
        watch: compares the copies of the variables that it writes now and then.
    """

    name: str
    mesh: ReplicaMesh
    lifted: Lifted
    home: Home
    compiled: Callable[..., Any]
    constants: list[Any]
    watch: Watch | None
    calls_host: bool

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
        """Make the program of a function of `(written, read_only, arrays, constants)`.

        Workers run it together whose `describe()` gives the same text. `more` are further fields of the program.
        """
        calls_host = jaxprs.has_host_callback(lifted.shown.jaxpr)
        options = {} if out_shardings is None else {"out_shardings": out_shardings}
        compiled: Callable[..., Any] = jax.jit(function, donate_argnums=() if calls_host else 0, **options)
        if not mesh.is_alone:
            is_update = any(not spec_of(variable).is_on_read for variable in lifted.written)
            compiled = joint_programs.prepared(name, describe(), compiled, is_run=True, is_update=is_update)
        what = f"an array that {name} closes over"
        constants = lifted.closed.consts and placement.mirror_constants(mesh, lifted.closed.consts, what)
        home, watch = storage.home_of(lifted.writes.slots), equal_copies.watch(mesh, lifted.variables)
        return cls(name, mesh, lifted, home, compiled, constants, watch, calls_host, **more)

    def execute(self, arrays: list[Any]) -> list[Any]:
        """Run on placed arrays, keep what the variables became, and return the arrays of the result."""
        in_flight.require_threads()
        written, read_only = self.lifted.writes.slots, self.lifted.reads.slots
        end_mark = begin(self) if (begin := annotate) is not None else None
        outputs: Any = [[]]
        try:
            if self.calls_host:
                outputs = storage.overwrite_when_done(self._until_done, self.home, written, read_only, arrays, self.constants)
            else:
                outputs = storage.overwrite(self.compiled, self.home, written, read_only, arrays, self.constants)
        finally:
            if end_mark is not None:
                end_mark(outputs[0])
        results, _, witness = outputs
        if witness:
            (in_flight.started if self.mesh.is_alone else in_flight.joined)(witness[0])
        if (watch := self.watch) is not None and (not watch.is_joint or in_main_thread()):
            watch.count += 1
            if watch.count >= watch.next:
                watch.look()
        return results

    def _until_done(self, *arguments: Any) -> Any:
        """Run a program with a host callback to its end, where an error of the callback shows."""
        try:
            return jax.block_until_ready(self.compiled(*arguments))
        except jax.errors.JaxRuntimeError:
            callbacks.forget_failed()
            raise


def program_on_stack() -> Program | None:
    """Return the program that JAX is compiling, when JAX calls the caller while it compiles one of ours."""
    frame, is_in_jax = sys._getframe(), False
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            if frame.f_code is Program.execute.__code__:
                return frame.f_locals["self"]
            if is_in_jax and frame.f_code.co_qualname not in _BETWEEN:
                return None
        else:
            is_in_jax = True  # the frames before are of those who listen
        frame = frame.f_back
    return None


@dataclasses.dataclass(frozen=True)
class StepProgram(Program):
    """The program of a step, proven.

    Attributes:
        findings: what the proof found.
        mapped: the pure function of global arrays, before it is compiled.
        is_mirrored: for each result array, whether it is the same on every replica.
        joined: which sums travel together, and what they carry; the SUM and MEAN of each follow the results.
    """

    findings: Findings
    mapped: Callable[..., Any]
    is_mirrored: tuple[bool, ...]
    joined: Joined

    def run(self, arrays: list[Any]) -> PyTree:
        return self.rebuild(self.execute(arrays))

    def rebuild(self, results: list[Any]) -> PyTree:
        """Make the step's result of the program's, in place; without what it carries, when the program was not run as it is."""
        plan = self.lifted.plan
        carried = results[len(plan.shapes) :]
        del results[len(plan.shapes) :]
        for index, shapes, place in self._differing:
            sums = (carried[place], carried[place + 1], self.mesh) if carried and place is not None else None
            results[index] = PerReplica(results[index], shapes, sums)
        return results[0] if self._is_one_array else self._rebuild(results)

    @functools.cached_property
    def _differing(self) -> list[tuple[int, tuple[Shape, ...] | None, int | None]]:
        """The results that differ by replica: which, their shapes, and where their sums are among those that are carried."""
        shapes, places = self.lifted.plan.shapes, {index: 2 * place for place, index in enumerate(self.joined.carried)}
        return [(index, shapes[index], places.get(index)) for index, same in enumerate(self.is_mirrored) if not same]

    @functools.cached_property
    def _rebuild(self) -> Callable[[list[Any]], PyTree]:
        plan = self.lifted.plan
        return plan.rebuild if any(leaf is not None for leaf in plan.static) else plan.treedef.unflatten

    @functools.cached_property
    def _is_one_array(self) -> bool:
        plan = self.lifted.plan
        return plan.static == (None,) and jax.tree_util.treedef_is_leaf(plan.treedef)


def is_placed(mesh: ReplicaMesh, array: Any) -> bool:
    """Tell whether an argument is where the program takes it from. A program is compiled for the places of its arguments."""
    if isinstance(array, (*_ON_HOST, jax.core.Tracer)):
        return False
    return array.sharding is mesh.stacked or array.sharding is mesh.mirrored or array.sharding in (mesh.stacked, mesh.mirrored)


@functools.lru_cache(maxsize=64)
def _mirrored_number(everywhere: Any, kind: type, text: str, is_wide: bool) -> jax.Array:
    """Bring a number to the replicas; most, such as a learning rate, are the same in the next step."""
    return jax.device_put(kind(text), everywhere)


def _place_numbers(mesh: ReplicaMesh, arrays: Sequence[Any]) -> list[Any]:
    """Bring the numbers among some arguments to the replicas, where no other worker has to be asked for them."""
    if not mesh.is_alone:
        return list(arrays)
    return [_mirrored_number(mesh.mirrored, type(a), repr(a), is_wide()) if type(a) in NUMBERS else a for a in arrays]


def place_quickly(mesh: ReplicaMesh, arrays: list[Any], leaves: Callable[[], Sequence[ArrayLeaf]]) -> list[Any] | None:
    """Bring what is on the host or on JAX's default device to the replicas; None when there is more to see to."""
    arrays = _place_numbers(mesh, arrays)
    elsewhere = [position for position, array in enumerate(arrays) if not is_placed(mesh, array)]
    if not elsewhere:
        return arrays
    moving = [arrays[position] for position in elsewhere]
    if not mesh.is_alone or not all(isinstance(array, _ON_HOST) or not getattr(array, "committed", True) for array in moving):
        return None
    kinds = leaves()
    targets = [mesh.stacked if kinds[position].is_per_replica else mesh.mirrored for position in elsewhere]
    for position, array in zip(elsewhere, jax.device_put(moving, targets), strict=True):
        arrays[position] = array
    return arrays


def place(mesh: ReplicaMesh, arrays: Sequence[Any], leaves: Sequence[ArrayLeaf], names: Callable[[], Sequence[str]]) -> list[Any]:
    """Bring arrays that are tied to other devices, or are this worker's only, to the mesh.

    Args:
        mesh: the devices of the program.
        arrays: its array arguments.
        leaves: what they are.
        names: makes their names, for messages.
    """
    placed = _place_numbers(mesh, arrays)
    plain = [i for i, array in enumerate(placed) if not is_placed(mesh, array)]
    for position in plain:
        if not leaves[position].is_per_replica:
            continue
        if not mesh.is_alone or getattr(arrays[position], "committed", True):
            raise StrategyMismatchError(
                f"the argument {names()[position]} is a PerReplica whose values lie on "
                f"{sorted(str(d) for d in arrays[position].sharding.device_set)}, but this strategy runs on "
                f"{[str(d) for d in mesh.devices]}; it comes from another strategy."
            )
        placed[position] = jax.device_put(arrays[position], mesh.stacked)
    plain = [i for i in plain if not leaves[i].is_per_replica]

    def differ(index: int, workers: Sequence[int]) -> None:
        placement.refuse_argument(f"the argument {names()[plain[index]]}, a plain array", index, workers)

    given = [arrays[position] for position in plain]
    if not mesh.is_alone:  # a message has bytes: a number has those of its type in the trace
        given = [np.asarray(a, leaves[i].dtype) if type(a) in NUMBERS else a for i, a in zip(plain, given, strict=True)]
    new = placement.mirror(mesh, given, differ, is_checked_late=True)
    for position, array in zip(plain, new, strict=True):
        placed[position] = array
    return placed


def unstacked(array: Any, is_stacked: bool) -> Any:
    return jnp.squeeze(array, 0) if is_stacked else array


def replica_frame(strategy: object, mesh: ReplicaMesh, even: ReplicaAxis, sizes: Any = None, bindings: Any = None) -> Frame:
    """Return the place inside a step; `even` is how a replica reaches the others where the batch divides evenly."""
    axis = dataclasses.replace(even, sizes=sizes)
    return Frame(strategy, mesh, ReplicaContext(strategy, axis), axis, bindings)
