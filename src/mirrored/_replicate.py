"""From a step function to one compiled program on every replica: prove, compile, cache, dispatch."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from . import _guards, _lift, _mirror_proof, _signature, _uneven
from ._errors import ContextError, StrategyMismatchError, UnevenReplicasError
from ._jax import tracing
from ._lift import Lifted
from ._mirror_proof import Findings, State
from ._programs import Programs
from ._replicas import frames, in_flight, placement
from ._replicas.collectives import ReplicaAxis
from ._replicas.context import ReplicaContext, own_parts
from ._replicas.frames import Frame
from ._replicas.mesh import ReplicaMesh
from ._replicas.per_replica import PerReplica
from ._signature import Call
from ._step import trace_step
from ._typing import REPLICA_AXIS, PyTree
from ._variables import equal_copies, storage
from ._variables.bindings import Bindings, read_outer, with_few_compilations, write_outer
from ._variables.equal_copies import Watch
from ._variables.storage import Home
from ._workers import joint_programs
from ._workers.progress import in_main_thread

is_eager: contextvars.ContextVar[bool] = contextvars.ContextVar("mirrored_eager", default=False)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run steps operation by operation inside this block, to print values and to stop in a debugger.

    `print(x)` in a step then shows the value on each replica, and breakpoints stop in the step with real
    values. Results are the same as compiled ones; it is many times slower. The first call with new shapes
    also traces the step, silently, to prove that mirrored values stay mirrored.

    >>> def step(x):
    ...     return x + 1
    >>> with mr.eager():
    ...     int(strategy.run(step, args=(np.int32(1),)))
    2
    """
    token = is_eager.set(True)
    try:
        yield
    finally:
        is_eager.reset(token)


@dataclasses.dataclass(frozen=True)
class Program:
    """A step, proven and ready to run on a mesh.

    Attributes:
        name: the user's name of the step.
        num_replicas: how many replicas it is for.
        is_joint: whether other workers run it too.
        lifted: the pure function and its variables.
        home: where the arrays of the variables that it writes are.
        findings: what the proof found.
        mapped: the pure function of global arrays `(written, read_only, arrays, constants)`.
        compiled: `mapped`, compiled; the written variables' arrays are donated.
        constants: the arrays that the step closes over, placed on the mesh.
        is_mirrored: for each result array, whether it is the same on every replica.
        pins: what the cache key identifies by identity.
        watch: compares the copies of the variables that it writes now and then.
    """

    name: str
    num_replicas: int
    is_joint: bool
    lifted: Lifted
    home: Home
    findings: Findings
    mapped: Callable[..., Any]
    compiled: Callable[..., Any]
    constants: list[Any]
    is_mirrored: tuple[bool, ...]
    pins: list[Any]
    watch: Watch | None

    def run(self, arrays: list[Any]) -> PyTree:
        lifted = self.lifted
        read_only = storage.arrays_of(lifted.read_only) if lifted.read_only else []
        results, _, witness = storage.overwrite(self.compiled, self.home, lifted.written, read_only, arrays, self.constants)
        if witness:
            (in_flight.joined if self.is_joint else in_flight.started)(witness[0])
        if (watch := self.watch) is not None and (not watch.is_joint or in_main_thread()):
            watch.count += 1
            if watch.count >= watch.next:
                watch.look()
        return self.rebuild(results)

    def rebuild(self, results: list[Any]) -> PyTree:
        """Make the step's result of the program's, in place."""
        plan = self.lifted.plan
        for index in self._differing:
            results[index] = PerReplica(results[index], plan.shapes[index])
        return results[0] if self._is_one_array else plan.rebuild(results)

    @functools.cached_property
    def _differing(self) -> list[int]:
        return [index for index, same in enumerate(self.is_mirrored) if not same]

    @functools.cached_property
    def _is_one_array(self) -> bool:
        plan = self.lifted.plan
        return plan.static == (None,) and jax.tree_util.treedef_is_leaf(plan.treedef)


def run(strategy: Any, mesh: ReplicaMesh, programs: Programs[Program], function: Any, args: Sequence[Any], kwargs: Any) -> PyTree:
    """Call `function` on every replica: find or make its program, and run it."""
    frame = frames.current()
    if frame is not None and frame.axis is not None:
        return _run_merged(strategy, frame, function, args, kwargs)
    key, arrays = _signature.key_of(function, args, kwargs, programs.functions)
    program = programs.get(key)
    is_plain = (frame is None or frame.bindings is None) and tracing.is_clean() and not is_eager.get()
    if program is not None and is_plain and _are_placed(mesh, arrays):
        return program.run(arrays)
    call, is_new = _signature.take_apart(function, args, kwargs), program is None
    if program is None:
        with _silenced() if is_eager.get() else contextlib.nullcontext():
            program = _make_program(strategy, mesh, call)
        if not _holds_tracers(program):
            programs.add(call, program)
    if frames.is_traced() or any(isinstance(array, jax.core.Tracer) for array in call.arrays):
        return _run_traced(program, call)
    if is_eager.get():
        _refuse_eager(call, mesh)
        return _run_eagerly(strategy, mesh, program, call)
    if is_new:
        placement.check_later(mesh, call.arrays, lambda index: f"the argument {_signature.argument_names(call)[index]}")
    return program.run(_place(mesh, call))


# -- running


def _run_traced(program: Program, call: Call) -> PyTree:
    """Make the program part of a larger one that is being traced."""
    _signature.check_replicas(call.arrays, call.array_leaves(), lambda: _signature.argument_names(call), program.num_replicas)
    lifted = program.lifted
    written = [read_outer(variable) for variable in lifted.written]
    read_only = [read_outer(variable) for variable in lifted.read_only]
    results, new, _ = program.mapped(written, read_only, call.arrays, program.constants)
    for variable, value in zip(lifted.written, new, strict=True):
        write_outer(variable, value)
    return program.rebuild(results)


def _run_merged(strategy: Any, frame: Frame, function: Any, args: Sequence[Any], kwargs: Any) -> PyTree:
    """Run a step from within `merge_call`: every replica is there already, so call it in place."""
    assert frame.axis is not None
    context = ReplicaContext(strategy, frame.axis)
    own_args, own_kwargs = own_parts((tuple(args), kwargs), frame.axis)
    with frames.entered(dataclasses.replace(frame, replica=context)):
        result = function(*own_args, **own_kwargs)
    return jax.tree.map(lambda x: PerReplica(frame.axis.stack(x)) if isinstance(x, jax.Array) else x, result)


def _run_eagerly(strategy: Any, mesh: ReplicaMesh, program: Program, call: Call) -> PyTree:
    """Run the user's function operation by operation, then check and keep what it wrote.

    All results come back stacked; which of them are mirrored is what the proof of the traced program says.
    """
    lifted = program.lifted
    new_lifted: dict[str, Any] = {}

    def body(caches: Callable[[], Any], values: list[Any], arrays: list[Any]) -> list[Any]:
        local = [_unstacked(a, v._on_read) for a, v in zip(values, lifted.variables, strict=True)]
        own = [_unstacked(a, leaf.is_per_replica) for a, leaf in zip(arrays, call.array_leaves(), strict=True)]
        with caches() as renew:
            bindings = Bindings(dict(zip(lifted.variables, local, strict=True)), _lift.undiscovered, renew)
            with frames.entered(_replica_frame(strategy, mesh, bindings)):
                new_lifted["plan"], results = _lift.plan_result(call.apply(own, lambda _, array: array))
        return [jnp.asarray(x)[None] for x in (*results, *bindings.values(lifted.written))]

    replicated, stacked = PartitionSpec(), PartitionSpec(REPLICA_AXIS)
    value_specs = [stacked if v._on_read else replicated for v in lifted.variables]
    array_specs = [stacked if leaf.is_per_replica else replicated for leaf in call.array_leaves()]
    values, arrays = storage.arrays_of(lifted.variables), _place(mesh, call)

    def compute(caches: Callable[[], Any]) -> list[Any]:
        own_body = functools.partial(body, caches)
        specs = {"in_specs": (value_specs, array_specs), "out_specs": stacked, "check_vma": False}
        return jax.shard_map(own_body, mesh=mesh.mesh, **specs)(values, arrays)

    outputs = with_few_compilations(compute)
    results = outputs[: lifted.num_results]
    for variable, new in zip(lifted.written, outputs[lifted.num_results :], strict=True):
        variable._set_array(new if variable._on_read else _first_row(mesh, new))
    rows = [_first_row(mesh, r) if same else r for r, same in zip(results, program.is_mirrored, strict=True)]
    return dataclasses.replace(program, lifted=dataclasses.replace(lifted, plan=new_lifted["plan"])).rebuild(rows)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep the proof's trace of a step from printing and from stopping at `breakpoint()`."""
    printed, hook = io.StringIO(), sys.breakpointhook
    sys.breakpointhook = lambda *args, **kwargs: None
    try:
        with contextlib.redirect_stdout(printed):
            yield
    except BaseException:
        sys.stdout.write(printed.getvalue())
        raise
    finally:
        sys.breakpointhook = hook


def _first_row(mesh: ReplicaMesh, stack: jax.Array) -> jax.Array:
    return placement.mirror(mesh, [stack[0]])[0]


def _are_placed(mesh: ReplicaMesh, arrays: Sequence[Any]) -> bool:
    """Tell whether no array is tied to other devices, nor traced; everything else `jit` moves by itself.

    With several workers it does not: there every array must be placed.
    """
    for array in arrays:
        if isinstance(array, np.ndarray):
            if mesh.is_alone:
                continue
            return False
        if array.sharding is mesh.stacked or array.sharding is mesh.mirrored:
            continue
        if isinstance(array, jax.core.Tracer):
            return False
        if (array.committed or not mesh.is_alone) and array.sharding not in (mesh.stacked, mesh.mirrored):
            return False
    return True


def _place(mesh: ReplicaMesh, call: Call) -> list[Any]:
    """Bring arrays that are tied to other devices, or are this worker's only, to the mesh."""
    arrays = list(call.arrays)
    plain: list[int] = []
    for position, array in enumerate(arrays):
        if _are_placed(mesh, (array,)):
            continue
        leaf = call.array_leaves()[position]
        if leaf.is_per_replica:
            raise StrategyMismatchError(
                f"the argument {_signature.argument_names(call)[position]} is a PerReplica whose values lie on "
                f"{sorted(str(d) for d in array.sharding.device_set)}, but this strategy runs on "
                f"{[str(d) for d in mesh.devices]}; it comes from another strategy."
            )
        plain.append(position)
    if not plain:
        return arrays

    def differ(index: int, workers: Sequence[int]) -> None:
        name = _signature.argument_names(call)[plain[index]]
        placement.refuse_argument(f"the argument {name}, a plain array", index, workers)

    placed = placement.mirror(mesh, [arrays[position] for position in plain], differ, is_checked_late=True)
    for position, array in zip(plain, placed, strict=True):
        arrays[position] = array
    return arrays


# -- making a program


def _make_program(strategy: Any, mesh: ReplicaMesh, call: Call) -> Program:
    leaves = call.array_leaves()
    _signature.check_replicas(call.arrays, leaves, lambda: _signature.argument_names(call), mesh.num_replicas)
    frame_with = functools.partial(_replica_frame, strategy, mesh, None)
    if _uneven.is_uneven(call):
        lifted = _uneven.lift_uneven(call, frame_with, functools.partial(_input_states, call))
    else:
        lifted = trace_step(_lift.lift, call, [leaf.shape for leaf in leaves], frame_with(None))
    _refuse_per_replica_results(lifted)
    findings = _mirror_proof.prove(lifted.closed.jaxpr, _input_states(call, lifted))
    _guards.check_assignments(lifted, findings)
    _guards.check_gradients(findings, mesh.num_replicas)
    is_mirrored = tuple(state.is_mirrored for state in findings.outputs[: lifted.num_results])
    name = call.name
    is_split = [leaf.is_per_replica for leaf in leaves]
    text = "" if mesh.is_alone else f"arguments by replica: {is_split}\n{lifted.describe()}\nmirrored results: {is_mirrored}"
    mapped = _map(mesh, lifted, is_split, is_mirrored)
    compiled = jax.jit(mapped, donate_argnums=0)
    if text:
        compiled = joint_programs.prepared(name, text, compiled)
    constants = placement.mirror_constants(mesh, lifted.closed.consts, "an array that the step closes over")
    home, pins = storage.home_of(lifted.written), _signature.pinned(call)
    watch = equal_copies.watch(mesh, lifted.variables)
    return Program(
        name, mesh.num_replicas, bool(text), lifted, home, findings, mapped, compiled, constants, is_mirrored, pins, watch
    )  # fmt: skip


def _map(mesh: ReplicaMesh, lifted: Lifted, is_per_replica: Sequence[bool], is_mirrored: Sequence[bool]) -> Callable[..., Any]:
    """Make the function of global arrays: each replica takes its rows, runs the step, and gives rows back."""

    def body(written: list[Any], read_only: list[Any], arrays: list[Any], constants: list[Any]) -> Any:
        values = [_unstacked(a, v._on_read) for a, v in zip((*written, *read_only), lifted.variables, strict=True)]
        own = [_unstacked(a, split) for a, split in zip(arrays, is_per_replica, strict=True)]
        outputs = tracing.evaluate(lifted.closed, constants, [*values, *own])
        results = [_stacked_unless(same, r) for r, same in zip(outputs[: lifted.num_results], is_mirrored, strict=True)]
        new = [_stacked_unless(not v._on_read, n) for v, n in zip(lifted.written, outputs[lifted.num_results :], strict=True)]
        return results, new, [jnp.zeros((), jnp.int32)] if mesh.is_paced else []

    replicated, stacked = PartitionSpec(), PartitionSpec(REPLICA_AXIS)
    specs_of = lambda variables: [stacked if v._on_read else replicated for v in variables]  # noqa: E731
    in_specs = (
        specs_of(lifted.written),
        specs_of(lifted.read_only),
        [stacked if split else replicated for split in is_per_replica],
        replicated,
    )
    out_specs = ([replicated if same else stacked for same in is_mirrored], specs_of(lifted.written), replicated)
    # check_vma=False: gradients are local, and `_mirror_proof` takes the place of JAX's own check.
    return jax.shard_map(body, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _unstacked(array: Any, is_stacked: bool) -> Any:
    return jnp.squeeze(array, 0) if is_stacked else array


def _stacked_unless(is_mirrored: bool, array: Any) -> Any:
    return array if is_mirrored else jnp.expand_dims(array, 0)


def _replica_frame(strategy: Any, mesh: ReplicaMesh, bindings: Any, sizes: Any = None) -> Frame:
    axis = ReplicaAxis(mesh.num_replicas, sizes=sizes, bytes_per_pack=strategy._bytes_per_pack)
    return Frame(strategy, mesh, ReplicaContext(strategy, axis), axis, bindings)


def _input_states(call: Call, lifted: Lifted) -> list[State]:
    states = []
    for variable in lifted.variables:
        origin = f"the sync-on-read variable {variable.name!r}, which has one value per replica"
        states.append(_mirror_proof.varying(origin) if variable._on_read else _mirror_proof.SAME)
    names = _signature.argument_names(call)
    for leaf, name in zip(call.array_leaves(), names, strict=True):
        origin = f"the argument {name}, of which each replica has its own"
        states.append(_mirror_proof.varying(origin) if leaf.is_per_replica else _mirror_proof.SAME)
    return states


def _refuse_eager(call: Call, mesh: ReplicaMesh) -> None:
    if not mesh.is_alone:
        raise ContextError(
            "mr.eager() runs each operation by itself, which works with one worker only. Run the same script without a "
            "cluster: the numbers are the same with as many replicas, mr.MirroredStrategy(['cpu:0', 'cpu:1', ...])."
        )
    for position, leaf in enumerate(call.array_leaves()):
        if leaf.shapes is not None:
            raise UnevenReplicasError(
                f"the argument {_signature.argument_names(call)[position]} has a different shape on each replica: "
                f"{', '.join(map(str, leaf.shapes))}. Inside mr.eager() all replicas run each operation together, so shapes "
                "must be equal: look at a batch that the number of replicas divides. Outside mr.eager() it runs as it is."
            )


def _refuse_per_replica_results(lifted: Lifted) -> None:
    if any(lifted.plan.stacked):
        raise TypeError(
            "the step returned a PerReplica, which it must have taken from outside. Pass the PerReplica to the step in "
            "strategy.run(fn, args=(...)): inside it is this replica's own array, and may be returned."
        )


def _holds_tracers(program: Program) -> bool:
    return any(isinstance(constant, jax.core.Tracer) for constant in program.constants)
