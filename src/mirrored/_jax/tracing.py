"""How JAX traces: in which trace the program is, which caches it uses, and how a function becomes a jaxpr and runs again."""

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
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .. import _process
from .._typing import REPLICA_AXIS
from .jaxprs import ClosedJaxpr, Equation, Jaxpr, Var, all_equations


class Axis(Protocol):
    """The axis of the replicas, as far as a trace knows it."""

    @property
    def size(self) -> int: ...


_cache_token = jax.make_user_context(None)
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})

#: An opaque value that changes when a trace begins or ends.
trace_state = functools.partial(jex_core.get_opaque_trace_state, convention="nnx")
#: The trace that the program is in; when JAX traces nothing, it is `NO_TRACE`. A warm step asks, so it is no function of Python.
current_trace = functools.partial(getattr, core.trace_ctx, "trace")
NO_TRACE = core.eval_trace
#: Makes a block in which operations are executed, whatever is traced around it.
untraced = core.eval_context

#: Whether numbers have 64 bits, by default 32.
is_wide = functools.partial(getattr, config.enable_x64, "value")
#: What `jax.jit` has in its keys beside functions and arguments: JAX's settings and contexts. A warm step asks, too.
context = config.trace_context
#: The implementation of random keys, which is not among them, though it changes what a trace gives.
key_kind = functools.partial(getattr, config.default_prng_impl, "value")


def settings() -> tuple[Any, ...]:
    """Return all of JAX's settings that change what a trace gives, without the caches of `separate_caches`."""
    if _cache_token.value is None:
        return (context(), key_kind())
    with _cache_token(None):
        return (context(), key_kind())


def _traces() -> list[core.Trace]:
    """Return the trace that the program is in, and those around it."""
    traces = [current_trace()]
    while (outer := getattr(traces[-1], "parent_trace", None)) is not None:
        traces.append(outer)
    return traces


def is_mapped_over(name: str) -> bool:
    """Tell whether code is under a `jax.vmap` whose axis has this name, and hides one of the same name around it."""
    return any(getattr(getattr(trace, "axis_data", None), "name", None) == name for trace in _traces())


def is_staging() -> bool:
    """Tell whether operations are being recorded (jit, scan, cond, ...) instead of executed.

    Under an eager `grad`, `vmap` or `shard_map` they are executed, so the answer is False there.
    """
    return current_trace() is not NO_TRACE and jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE()


#: JAX's names of the purposes for which a function is traced and run at once.
_RUN_AT_ONCE = frozenset({"scan", "cond", "switch", "while_cond", "while_body", "fori_loop", "checkpoint / remat"})


def is_for_this_call() -> bool:
    """Tell whether all that is being recorded is run by this call, as under an eager scan or cond, and not kept, as under jit."""
    recording = [trace for trace in _traces() if isinstance(trace, DynamicJaxprTrace)]
    return all(getattr(trace.frame.debug_info, "traced_for", "") in _RUN_AT_ONCE for trace in recording)


@contextlib.contextmanager
def separate_caches() -> Iterator[Callable[[], None]]:
    """Give the tracing inside a block its own JAX caches; the yielded function starts another set.

    JAX caches the trace of an inner `jit` or `scan` body by the function's identity. A body that reads a
    variable has the variable's tracer in that cached trace, so it may be used again neither in another
    trace nor after the variable was written. See docs/design/lifting.md, "inner caches".
    """
    with contextlib.ExitStack() as tokens:

        def renew() -> None:
            tokens.enter_context(_cache_token(next(_process.cache_numbers)))

        renew()
        yield renew


def trace(
    function: Callable[..., Any], arguments: Sequence[Any], axis: Axis | None, user_function: Callable[..., Any]
) -> ClosedJaxpr:
    """Trace `function` to a jaxpr; with a `ReplicaAxis`, the axis is bound while it is traced.

    No mesh is involved yet, so closed-over arrays of any placement become constants of the jaxpr.
    JAX's messages speak of `user_function`, on whose behalf `function` is traced.
    """
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    function.__wrapped__ = user_function  # type: ignore[attr-defined]
    return jax.make_jaxpr(function, axis_env=_axis_env(axis))(*arguments)


def _axis_env(axis: Axis | None) -> list[tuple[str, int]] | None:
    return None if axis is None else [(REPLICA_AXIS, axis.size)]


def lowered(closed: ClosedJaxpr, axis: Axis | None) -> ClosedJaxpr:
    """Return a traced function with JAX's high-level primitives (`hijax`) expanded into calls.

    A high-level primitive, which anybody may define, is an object with a method that computes it: its operations, even
    collectives, are not in the jaxpr. Since jax 0.12, `searchsorted` and `nonzero` are high-level. The result is for looking
    at: derivatives that a user has defined around such a primitive are lost.
    """
    if not closed.jaxpr.is_high:
        return closed
    equations = [_lowered_equation(equation, axis) for equation in closed.jaxpr.eqns]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations, is_high=False), closed.consts)


def _lowered_equation(equation: Equation, axis: Axis | None) -> Equation:
    avals: list[Any] = [atom.aval for atom in equation.invars]
    if not equation.primitive.is_high(*avals, **equation.params) or any(type(a) is not jax.core.ShapedArray for a in avals):
        return equation  # an unknown primitive to the proof
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
    """Return a block in which JAX keeps numbers of 64 bits, if traced functions have any: a step may ask for them itself."""
    return _room_for(v.aval for closed in traced for equation in all_equations(closed.jaxpr) for v in equation.outvars)


def _room_for(avals: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    names = [getattr(getattr(aval, "dtype", None), "name", "") for aval in avals]
    return contextlib.nullcontext() if _WIDE.isdisjoint(names) else jax.enable_x64(True)


def bind(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """Apply one equation of a jaxpr to values, also in place of its literals, in whatever trace is current."""
    variables: list[Any] = [Var(atom.aval) for atom in equation.invars]
    equation = _for_meshes_of(operands, equation.replace(invars=variables))
    info = jex_core.DebugInfo("mirrored", "one equation", ("",) * len(variables), ("",) * len(equation.outvars))
    jaxpr = Jaxpr((), variables, equation.outvars, [equation], equation.effects, info)
    return [_in_this_mesh(result) for result in jax.core.eval_jaxpr(jaxpr, (), *operands)]


def have_mesh(equations: Iterable[Equation]) -> bool:
    """Tell whether some equations were traced with arrays of ours: inside a function, they run in no other mesh."""
    return any(map(_has_mesh, {atom.aval for equation in equations for atom in (*equation.invars, *equation.outvars)}))


def own_axes_first(equation: Equation) -> tuple[ClosedJaxpr, Equation]:
    """Cut a `psum` over the replicas and axes of its operands in two: a function for the latter, and an equation for the rest."""
    axes = equation.params["axes"]
    own = tuple(int(axis) for axis in axes if not isinstance(axis, str))
    operands: list[Any] = [atom.aval for atom in equation.invars]
    stand_ins = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in operands]
    closed = jax.make_jaxpr(lambda *arrays: [jnp.sum(x, axis=own, dtype=x.dtype) for x in arrays])(*stand_ins)
    params = {**equation.params, "axes": tuple(axis for axis in axes if isinstance(axis, str))}
    variables: list[Any] = [Var(aval) for aval in closed.out_avals]
    return closed, equation.replace(params=params, invars=variables)


def barrier(avals: Sequence[Any]) -> Equation:
    """Return an equation that returns its operands, behind which XLA does not look."""
    stand_ins = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    [equation] = jax.make_jaxpr(jax.lax.optimization_barrier)(stand_ins).eqns
    return equation


_NO_MESH = AbstractMesh((), ())


def _for_meshes_of(operands: Sequence[Any], equation: Equation) -> Equation:
    """Return an equation with the mesh of the operands that it is to run with.

    Its settings and parameters keep the mesh of the arrays that it was traced with, such as arrays of ours that a function
    closes over, and JAX lets no other mesh meet that one.
    """
    meshes = [aval.sharding.mesh for aval in map(jax.typeof, operands) if _has_mesh(aval)]
    if not meshes or equation.ctx.cur_abstract_mesh.empty:
        return equation
    here = jax.sharding.get_abstract_mesh()
    mesh = here if here in meshes else meshes[0]
    is_in_type = lambda value: isinstance(value, NamedSharding) and isinstance(value.mesh, AbstractMesh)  # noqa: E731
    params = {name: NamedSharding(mesh, v.spec) if is_in_type(v) else v for name, v in equation.params.items()}
    enter = jax.sharding.use_abstract_mesh
    with equation.ctx.manager, enter(_NO_MESH), enter(mesh):  # inside a mesh of another size JAX lets none be entered
        return equation.replace(params=params, ctx=core.JaxprEqnContext())


def _in_this_mesh(value: Any) -> Any:
    """Give a value the mesh of the `shard_map` that it is computed in.

    A value computed from closed-over arrays of our strategies was traced with their mesh in its type, which JAX does not let
    meet the types of a `shard_map`. JAX converts operands only where it has traced in `shard_map`.
    """
    here = jax.sharding.get_abstract_mesh()
    if here.empty or not isinstance(value, jax.Array) or not _has_mesh(aval := jax.typeof(value)) or aval.sharding.mesh == here:
        return value
    return jax.sharding.reshard(value, NamedSharding(here, PartitionSpec()))


def _has_mesh(aval: object) -> bool:
    placement = getattr(aval, "sharding", None)
    return placement is not None and not placement.mesh.empty


#: An operand that a function has asked for while it was traced, see `new_operand`; it stands for no operation.
operand_p = jex_core.Primitive("mirrored_operand")
operand_p.def_abstract_eval(lambda *, aval, number: aval)


def new_operand(outermost: core.Trace, number: int, aval: jax.core.AbstractValue) -> jax.Array:
    """Ask for a further operand of the function that `outermost` traces, also from inside a loop or a derivative in it."""
    with core.set_current_trace(outermost):
        return operand_p.bind(aval=aval, number=number)  # type: ignore[no-any-return]
