"""Compiles a cross-replica function, with all its runs and reductions, as one program."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from jax.sharding import Mesh, NamedSharding

from .._errors import StrategyMismatchError
from .._jax import interpreter, jaxprs, user_code
from .._program import lift
from .._program.call import Call, argument_names, check_replicas
from .._program.dispatch import Dispatcher
from .._program.lift import Lifted
from .._program.program import Program
from .._replicas import frames, in_flight
from .._replicas.division import placement_of_array
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh, default_mesh, replicas_of
from .._replicas.per_replica import PerReplica
from .._text import shown
from .._typing import PyTree, UserFunction
from .._variables.spec import VariableSpec
from .._variables.variable import spec_of

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


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
    """Call a function as one program, with the programs that were made in this scope, or outside of all scopes."""
    frame = frames.current()
    if frame is None or frame.strategy is None:
        return _outside.dispatch(None, fn, args, kwargs)
    functions = _in_scope.get(frame.strategy)
    if functions is None:
        functions = _in_scope.setdefault(frame.strategy, _Functions())
    return functions.dispatch(frame.strategy, fn, args, kwargs)


def function_programs(mesh: ReplicaMesh) -> list[tuple[FunctionProgram, str]]:
    """Return the programs of functions on a mesh, each with the reason for a second compilation, "" for a first one."""
    known = [_outside, *_in_scope.values()]
    return [(program, cause) for functions in known for program, cause in functions.programs.causes() if program.mesh == mesh]


@dataclasses.dataclass(eq=False)
class FunctionProgram(Program):
    """The program of a cross-replica function."""

    def rebuild(self, results: list[Any]) -> PyTree:
        """Rebuild a function's result, with a PerReplica where the function returned one."""
        plan = self.lifted.plan
        kinds = zip(results, plan.shapes, plan.stacked, strict=True)
        return plan.rebuild([PerReplica(array, shapes) if is_stacked else array for array, shapes, is_stacked in kinds])


class _Functions(Dispatcher[FunctionProgram]):
    """The `mr.function`s that are called in the scope of one strategy, or outside of all scopes."""

    runs_steps = True

    def make(self, strategy: object, call: Call) -> FunctionProgram:
        """Make the program of a function for a call."""
        frame, leaves = frames.current() or Frame(None, None), call.array_leaves()
        shapes = [array.shape if leaf.is_per_replica else leaf.shape for leaf, array in zip(leaves, call.arrays, strict=True)]
        lifted = lift.trace(call, shapes, frame).lifted()
        mesh = _mesh_of(frame, lifted, call)
        check_replicas(call.arrays, leaves, lambda: argument_names(call), mesh.num_replicas)
        kinds: list[Any] = [atom.aval for atom in lifted.closed.jaxpr.outvars]
        results = zip(lifted.plan.stacked, kinds, strict=False)
        kept = [mesh.stacked if is_stacked else placement_of_array(mesh, kind) for is_stacked, kind in results]
        specs = list(map(spec_of, lifted.variables))
        placements = (kept, [spec.placement for spec in specs[: len(lifted.written)]], mesh.mirrored)
        is_split = [leaf.is_per_replica for leaf in leaves]
        describe = lambda: f"arguments by replica: {is_split}\n{lifted.describe()}"  # noqa: E731
        pure = functools.partial(_pure, lifted.bare(), mesh, specs)
        return FunctionProgram.compile(mesh, lifted, call.name, pure, describe, placements)


_outside = _Functions()
_in_scope: weakref.WeakKeyDictionary[Any, _Functions] = weakref.WeakKeyDictionary()


def _pure(lifted: Lifted, mesh: ReplicaMesh, specs: list[VariableSpec], *inputs: Any) -> Any:
    written, read_only, arrays, constants = inputs
    values = [spec.whole(stored) for spec, stored in zip(specs, [*written, *read_only], strict=True)]
    outputs = interpreter.evaluate(lifted.closed, constants, [*values, *arrays])
    new = [spec.stored(value) for spec, value in zip(specs, outputs[lifted.num_results :], strict=False)]
    return outputs[: lifted.num_results], new, in_flight.new_witness(mesh.mirrored)


def _mesh_of(frame: Frame, lifted: Lifted, call: Call) -> ReplicaMesh:
    """Return the devices of a function's variables and arguments, or the default strategy's; refuse two strategies."""
    meshes = [spec_of(variable).mesh for variable in lifted.variables]
    if frame.mesh is not None:
        meshes.insert(0, frame.mesh)
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
