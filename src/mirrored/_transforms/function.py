"""Compiles a cross-replica function, with all its runs and reductions, as one program."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from jax.sharding import Mesh, NamedSharding

from .._errors import StrategyMismatchError
from .._jax import interpreter, jaxprs, tracing, user_code
from .._models import nnx
from .._program import eager, lift
from .._program.cache import Programs
from .._program.call import Call, argument_names, array_leaves, check_replicas, key_of, of_last_batch, take_apart
from .._program.lift import Lifted
from .._program.program import Program, place
from .._replicas import frames, in_flight
from .._replicas.division import placement_of_array
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh, default_mesh, replicas_of
from .._replicas.per_replica import PerReplica
from .._replicas.placement import check_later
from .._replicas.spent import forget_pause
from .._text import shown
from .._typing import PyTree, UserFunction
from .._variables.spec import VariableSpec
from .._variables.variable import spec_of

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_programs: Programs[FunctionProgram] = Programs()


def function(fn: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Compile a cross-replica function as one program, however often it calls `run`, `reduce` and `gather`.

    The function is traced once for each structure, shape and static value of its arguments. Tracing finds the
    variables that it reads or writes, directly or in its steps; each call updates them. Arrays and Python numbers
    are passed to the program; bools, strings and objects are compiled in, and so are the values that the code names,
    such as `self.lr`, also in the functions that it names. Inside a step, another `mr.function` or a transformation of
    JAX, such as `jax.grad`, it is an ordinary call.

    Args:
        fn: a function that calls `strategy.run` and friends; its result is any tree of arrays, PerReplica
            values, variables and Python objects.

    Raises:
        TypeError: when `fn` is not callable.

    >>> with strategy.scope():
    ...     total = mr.Variable(0.0)
    >>> def step(x):
    ...     return x * 2
    >>> @mr.function
    ... def train_step(x):
    ...     total.assign_add(strategy.reduce("sum", strategy.run(step, args=(x,))))
    ...     return total.value
    >>> x = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    >>> float(train_step(x)), float(train_step(x))
    (6.0, 12.0)

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/function
    """
    if not callable(fn):
        raise TypeError(f"mr.function got {shown(fn)}; expected a function: @mr.function above def train_step(batch): ...")

    @functools.wraps(fn)
    def compiled(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        try:
            return call_compiled(fn, args, kwargs)
        except (Exception, KeyboardInterrupt) as error:
            user_code.show_users_lines(error)
            raise

    return compiled


def call_compiled(fn: UserFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> PyTree:
    """Call a function as one program; inside a larger trace, or a `jax.vmap` or `jax.grad`, call it as it is."""
    frame = frames.current()
    if frames.is_traced() or eager.is_eager.get() or tracing.current_trace() is not tracing.NO_TRACE:
        return fn(*args, **kwargs)
    if "flax.nnx" in sys.modules and nnx.holds_objects((args, kwargs)):
        return nnx.run_with_objects(call_compiled, None, fn, args, kwargs)
    strategy = None if frame is None else id(frame.strategy)
    fast_path = None if kwargs else _programs.fast_paths.get(id(fn))
    if fast_path is not None and fast_path.key[-2] == strategy:
        arrays = fast_path.arrays_of(fn, args)
        if arrays is not None:
            return fast_path.program.run(arrays)
    key, functions, arrays = key_of(fn, args, kwargs)
    leaves = array_leaves(key)
    places = (getattr(array, "sharding", None) for array, leaf in zip(arrays, leaves, strict=True) if leaf.is_per_replica)
    further = (strategy, tuple(places))
    program = _programs.get((*key, *further), functions, None if kwargs else args)
    if program is None:

        def apart(args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
            call = take_apart(fn, args, kwargs, runs_steps=True)
            return call._replace(key=(*call.key, *further))

        make = functools.partial(_make, frame or Frame(None, None))
        call = apart(args, kwargs)
        program = make(call)
        for each, its in ((call, program), *_programs.made_for_last(of_last_batch((tuple(args), kwargs)), apart, make)):
            # Compilations are counted for each function object (`owner`): a decorator in a factory makes many of one code.
            _programs.add(each, its, each.sees(), owner=fn, also=[] if frame is None else [frame.strategy])
        check_later(program.mesh, arrays, lambda index: f"the argument {argument_names(call)[index]}")
    # PerReplica arguments are in place: `_mesh_of` chose their devices.
    plain = [position for position, leaf in enumerate(leaves) if not leaf.is_per_replica]
    names = lambda: [argument_names(take_apart(fn, args, kwargs))[position] for position in plain]  # noqa: E731
    placed = place(program.mesh, [arrays[position] for position in plain], lambda: [leaves[p] for p in plain], names)
    for position, array in zip(plain, placed, strict=True):
        arrays[position] = array
    return program.run(arrays)


def function_programs(mesh: ReplicaMesh) -> list[tuple[FunctionProgram, str]]:
    """Return the programs of functions on a mesh; each with the reason if its function had been compiled before."""
    return [(program, cause) for program, cause in _programs.causes() if program.mesh == mesh]


@dataclasses.dataclass(eq=False)
class FunctionProgram(Program):
    """The program of a cross-replica function."""

    def run(self, arrays: list[Any]) -> PyTree:
        plan = self.lifted.plan
        if not self.has_run:  # it is compiled, which belongs to no step
            forget_pause()
        results = zip(self.execute(arrays), plan.shapes, plan.stacked, strict=True)
        return plan.rebuild([PerReplica(array, shapes) if is_stacked else array for array, shapes, is_stacked in results])


def _make(frame: Frame, call: Call) -> FunctionProgram:
    leaves = call.array_leaves()
    shapes = [array.shape if leaf.is_per_replica else leaf.shape for leaf, array in zip(leaves, call.arrays, strict=True)]
    lifted = lift.trace(call, shapes, frame).lifted()
    mesh, name = _mesh_of(frame, lifted, call), call.name
    check_replicas(call.arrays, leaves, lambda: argument_names(call), mesh.num_replicas)
    kinds: list[Any] = [atom.aval for atom in lifted.closed.jaxpr.outvars]
    results = zip(lifted.plan.stacked, kinds, strict=False)
    kept = [mesh.stacked if is_stacked else placement_of_array(mesh, kind) for is_stacked, kind in results]
    specs = list(map(spec_of, lifted.variables))
    placements = (kept, [spec.placement for spec in specs[: len(lifted.written)]], mesh.mirrored)
    is_split = [leaf.is_per_replica for leaf in leaves]
    describe = lambda: f"arguments by replica: {is_split}\n{lifted.describe()}"  # noqa: E731
    return FunctionProgram.compile(mesh, lifted, name, functools.partial(_pure, lifted.bare(), mesh, specs), describe, placements)


def _pure(lifted: Lifted, mesh: ReplicaMesh, specs: list[VariableSpec], *inputs: Any) -> Any:
    written, read_only, arrays, constants = inputs
    values = [spec.whole(stored) for spec, stored in zip(specs, [*written, *read_only], strict=True)]
    outputs = interpreter.evaluate(lifted.closed, constants, [*values, *arrays])
    new = [spec.stored(value) for spec, value in zip(specs, outputs[lifted.num_results :], strict=False)]
    return outputs[: lifted.num_results], new, in_flight.new_witness(mesh.mirrored)


def _mesh_of(frame: Frame, lifted: Lifted, call: Call) -> ReplicaMesh:
    """Return the devices of a function's variables and arguments, or the default strategy's; refuse two strategies."""
    meshes = [] if frame.mesh is None else [frame.mesh]
    meshes += [spec_of(variable).mesh for variable in lifted.variables]
    placements = [getattr(array, "sharding", None) for array in call.arrays]
    for placement, leaf in zip(placements, call.array_leaves(), strict=True):
        if leaf.is_per_replica and isinstance(placement, NamedSharding) and isinstance(placement.mesh, Mesh):
            meshes.append(replicas_of(placement.mesh))  # else the user stacked it elsewhere
    meshes += [replicas_of(mesh) for mesh in jaxprs.meshes_in(lifted.closed.jaxpr)]
    for mesh in meshes:
        if mesh != meshes[0]:
            raise StrategyMismatchError(
                f"an mr.function uses two strategies: {meshes[0]} and {mesh}. It is compiled as one "
                "program, which runs on one set of devices; write one mr.function for each strategy."
            )
    return meshes[0] if meshes else default_mesh()
