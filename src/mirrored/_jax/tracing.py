"""Traces with JAX: tells the current trace, separates caches, turns a function into a jaxpr, and runs its equations."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax._src import config, core
from jax._src.interpreters.partial_eval import DynamicJaxprTrace, lower_jaxpr2
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _process
from .._typing import REPLICA_AXIS
from .jaxprs import ClosedJaxpr, Equation, Jaxpr, Var, all_equations


class Axis(Protocol):
    """The replicas' axis, as a trace sees it."""

    @property
    def size(self) -> int: ...


_cache_token = jax.make_user_context(None)
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})

#: An opaque value that changes when a trace begins or ends.
trace_state = functools.partial(jex_core.get_opaque_trace_state, convention="nnx")
#: Return the current trace, or `NO_TRACE` if JAX traces nothing. A warm step calls it, so it is no Python function.
current_trace = functools.partial(getattr, core.trace_ctx, "trace")
NO_TRACE = core.eval_trace
#: Make a block in which operations are executed, even inside a trace.
untraced = core.eval_context
#: Tell whether numbers have 64 bits; by default they have 32.
is_wide = functools.partial(getattr, config.enable_x64, "value")
#: Tell whether this is inside `jax.ensure_compile_time_eval`: a trace computes at once what depends on none of its arguments.
computes_constants = functools.partial(getattr, config.eager_constant_folding, "value")
#: Return what `jax.jit` puts into its keys beside functions and arguments: JAX's settings and contexts. Warm steps call it.
context = config.trace_context
#: Return the implementation of random keys, which `context` lacks, although it changes the result of a trace.
key_kind = functools.partial(getattr, config.default_prng_impl, "value")


def settings() -> tuple[Any, ...]:
    """Return all of JAX's settings that change the result of a trace, without the caches of `separate_caches`."""
    if _cache_token.value is None:
        return (context(), key_kind())
    with _cache_token(None):
        return (context(), key_kind())


def _traces() -> list[core.Trace]:
    """Return the current trace, and the traces around it."""
    traces = [current_trace()]
    while (outer := getattr(traces[-1], "parent_trace", None)) is not None:
        traces.append(outer)
    return traces


def is_mapped_over(name: str) -> bool:
    """Tell whether code is under a `jax.vmap` whose axis has this name, and so hides an outer axis with the same name."""
    return any(getattr(getattr(trace, "axis_data", None), "name", None) == name for trace in _traces())


def is_staging() -> bool:
    """Tell whether JAX records operations (jit, scan, cond, ...) instead of executing them.

    Under an eager `grad`, `vmap` or `shard_map` it executes them, so the answer is False.
    """
    return current_trace() is not NO_TRACE and jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE()


#: JAX's names of the purposes for which it traces a function and runs it at once.
_RUN_AT_ONCE = frozenset({"scan", "cond", "switch", "while_cond", "while_body", "fori_loop", "checkpoint / remat"})


def is_for_this_call() -> bool:
    """Tell whether JAX runs the trace once and drops it, as in an eager scan or cond; under jit it keeps the trace."""
    recording = [trace for trace in _traces() if isinstance(trace, DynamicJaxprTrace)]
    return all(getattr(trace.frame.debug_info, "traced_for", "") in _RUN_AT_ONCE for trace in recording)


@contextlib.contextmanager
def separate_caches() -> Iterator[Callable[[], None]]:
    """Give the tracing inside a block its own JAX caches; the yielded function starts another set.

    JAX caches the trace of an inner `jit` or `scan` body by the function's identity. If a body reads a
    variable, the cached trace holds the variable's tracer, so it is wrong in another trace, and wrong
    after the variable was written. See docs/design/lifting.md, "inner caches".
    """
    with contextlib.ExitStack() as tokens:

        def renew() -> None:
            tokens.enter_context(_cache_token(next(_process.cache_numbers)))

        renew()
        yield renew


def trace(
    function: Callable[..., Any], arguments: Sequence[Any], axis: Axis | None, user_function: Callable[..., Any]
) -> ClosedJaxpr:
    """Trace `function` to a jaxpr; with a `ReplicaAxis`, bind the axis meanwhile.

    There is no mesh yet, so closed-over arrays of any placement become constants of the jaxpr.
    JAX's messages name `user_function`, on whose behalf we trace `function`.
    """
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    function.__wrapped__ = user_function  # type: ignore[attr-defined]
    return jax.make_jaxpr(function, axis_env=_axis_env(axis))(*arguments)


def _axis_env(axis: Axis | None) -> list[tuple[str, int]] | None:
    return None if axis is None else [(REPLICA_AXIS, axis.size)]


def lowered(closed: ClosedJaxpr, axis: Axis | None) -> ClosedJaxpr:
    """Return a traced function with JAX's high-level primitives (`hijax`) expanded into calls.

    A high-level primitive, which anybody may define, is an object with a method that computes it: the jaxpr does not show
    its operations, not even collectives. Since jax 0.12, `searchsorted` and `nonzero` are high-level. Do not run the result:
    it loses derivatives that a user has defined around such a primitive.
    """
    if not closed.jaxpr.is_high:
        return closed
    equations = [_lowered_equation(equation, axis) for equation in closed.jaxpr.eqns]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations, is_high=False), closed.consts)


def _lowered_equation(equation: Equation, axis: Axis | None) -> Equation:
    avals: list[Any] = [atom.aval for atom in equation.invars]
    if not equation.primitive.is_high(*avals, **equation.params) or any(type(a) is not jax.core.ShapedArray for a in avals):
        return equation  # to the proof, an unknown primitive
    with _room_for(avals), core.extend_axis_env_nd(_axis_env(axis) or ()):
        arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
        [around] = jax.make_jaxpr(jax.jit(lambda *operands: bind(equation, operands)))(*arguments).eqns
        inside = lower_jaxpr2(around.params["jaxpr"])
    return around.replace(
        invars=equation.invars,
        outvars=equation.outvars,
        params={**around.params, "jaxpr": inside},
        source_info=equation.source_info,
        ctx=equation.ctx,
    )


def room_for(traced: Iterable[ClosedJaxpr]) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which JAX keeps 64-bit numbers, if the traced functions have any: a step may enable them itself."""
    return _room_for(v.aval for closed in traced for equation in all_equations(closed.jaxpr) for v in equation.outvars)


def _room_for(avals: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    names = [getattr(getattr(aval, "dtype", None), "name", "") for aval in avals]
    return contextlib.nullcontext() if _WIDE.isdisjoint(names) else jax.enable_x64(True)


def bind(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """Apply one equation of a jaxpr to values, in the current trace; values replace literals too."""
    variables: list[Any] = [Var(atom.aval) for atom in equation.invars]
    equation = equation.replace(invars=variables)
    if not equation.ctx.cur_abstract_mesh.empty:
        equation = _for_meshes_of(operands, equation)
    info = jex_core.DebugInfo("mirrored", "one equation", ("",) * len(variables), ("",) * len(equation.outvars))
    jaxpr = Jaxpr((), variables, equation.outvars, [equation], equation.effects, info)
    results = jax.core.eval_jaxpr(jaxpr, (), *operands)
    return results if jax.sharding.get_abstract_mesh().empty else list(map(_in_this_mesh, results))


def have_mesh(equations: Iterable[Equation]) -> bool:
    """Tell whether equations were traced with arrays that have a mesh: as they are, they run in no other mesh."""
    return any(map(_has_mesh, {atom.aval for equation in equations for atom in (*equation.invars, *equation.outvars)}))


def have_explicit_axes(equations: Iterable[Equation]) -> bool:
    """Tell whether the type of a result is tied to the devices of a mesh with Explicit axes, those of `jax.make_mesh`."""
    placements = [getattr(variable.aval, "sharding", None) for equation in equations for variable in equation.outvars]
    return any(placement is not None and AxisType.Explicit in placement.mesh.axis_types for placement in placements)


def own_axes_first(equation: Equation) -> tuple[ClosedJaxpr, Equation]:
    """Split a `psum` over replicas and array axes: return a function that sums along the axes, and an equation for the rest."""
    axes = equation.params["axes"]
    numbers = tuple(int(axis) for axis in axes if not isinstance(axis, str))
    operands: list[Any] = [atom.aval for atom in equation.invars]
    stand_ins = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in operands]
    closed = jax.make_jaxpr(lambda *arrays: [jnp.sum(x, axis=numbers, dtype=x.dtype) for x in arrays])(*stand_ins)
    params = {**equation.params, "axes": tuple(axis for axis in axes if isinstance(axis, str))}
    variables: list[Any] = [Var(aval) for aval in closed.out_avals]
    return closed, equation.replace(params=params, invars=variables)


def barrier(avals: Sequence[Any]) -> Equation:
    """Return an `optimization_barrier` for operands of these types: XLA moves no operation through it."""
    stand_ins = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    [equation] = jax.make_jaxpr(jax.lax.optimization_barrier)(stand_ins).eqns
    return equation


_NO_MESH = AbstractMesh((), ())


def _for_meshes_of(operands: Sequence[Any], equation: Equation) -> Equation:
    """Return an equation with the mesh of the operands on which it will run.

    Its settings and parameters keep the mesh of the arrays with which it was traced, such as closed-over arrays of ours, and
    JAX refuses operands with another mesh.
    """
    meshes = [aval.sharding.mesh for aval in map(jax.typeof, operands) if _has_mesh(aval)]
    if not meshes:
        return equation
    here = jax.sharding.get_abstract_mesh()
    mesh = here if here in meshes else meshes[0]
    is_in_type = lambda value: isinstance(value, NamedSharding) and isinstance(value.mesh, AbstractMesh)  # noqa: E731
    params = {name: NamedSharding(mesh, v.spec) if is_in_type(v) else v for name, v in equation.params.items()}
    enter = jax.sharding.use_abstract_mesh
    with equation.ctx.manager, enter(_NO_MESH), enter(mesh):  # none first: JAX enters no mesh inside one of another size
        return equation.replace(params=params, ctx=core.JaxprEqnContext())


def _in_this_mesh(value: Any) -> Any:
    """Give a value the mesh of the `shard_map` that computes it.

    A value computed from closed-over arrays of our strategies has their mesh in its type, which JAX refuses beside the types
    of a `shard_map`. JAX itself converts only operands that it traced inside `shard_map`.
    """
    here = jax.sharding.get_abstract_mesh()
    if not isinstance(value, jax.Array) or not _has_mesh(aval := jax.typeof(value)) or aval.sharding.mesh == here:
        return value
    return jax.sharding.reshard(value, NamedSharding(here, PartitionSpec()))


def _has_mesh(aval: object) -> bool:
    placement = getattr(aval, "sharding", None)
    return placement is not None and not placement.mesh.empty


#: An operand that a function asked for during its trace (see `new_operand`); it computes nothing.
operand_p = jex_core.Primitive("mirrored_operand")
operand_p.def_abstract_eval(lambda *, aval, number: aval)


def new_operand(outermost: core.Trace, number: int, aval: jax.core.AbstractValue) -> jax.Array:
    """Add an operand to the function that `outermost` traces, even from inside a loop or an `ensure_compile_time_eval` in it."""
    with core.set_current_trace(outermost), config.eager_constant_folding(False):
        return operand_p.bind(aval=aval, number=number)  # type: ignore[no-any-return]
