"""What we must know about JAX's tracing, in one place.

Everything here that is not in the public `jax` namespace is in `jax.extend`, whose stability JAX does not
promise; `tests/test_tracing.py` fails loudly when any of it moves.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from ._typing import REPLICA_AXIS

Jaxpr = jex_core.Jaxpr
ClosedJaxpr = jex_core.ClosedJaxpr
Literal = jex_core.Literal

_PACKAGE_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_NOT_USER_CODE = (_PACKAGE_FOLDER, _JAX_FOLDER, "<frozen", os.path.dirname(contextlib.__file__) + os.sep + "contextlib")

_cache_token = jax.make_user_context(None)
_new_token = itertools.count()
_trace_state = jex_core.get_opaque_trace_state


def trace_state() -> Any:
    """Return a token that is equal for two points of a program iff they belong to the same JAX trace."""
    return _trace_state(convention="nnx")


def is_clean() -> bool:
    """Tell whether JAX traces nothing at all."""
    return _trace_state(convention="nnx") == _CLEAN


def is_staging() -> bool:
    """Tell whether operations are being recorded (jit, scan, cond, ...) instead of executed.

    Under an eager `grad`, `vmap` or `shard_map` they are executed, so the answer is False there.
    """
    return not is_clean() and jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE()


@contextlib.contextmanager
def separate_caches() -> Iterator[Callable[[], None]]:
    """Give the tracing inside a block its own JAX caches; the yielded function starts another set.

    JAX caches the trace of an inner `jit` or `scan` body by the function's identity. A body that reads a
    variable has the variable's tracer in that cached trace, so it may be used again neither in another
    trace nor after the variable was written. See docs/design/lifting.md, "inner caches".
    """
    with contextlib.ExitStack() as tokens:

        def renew() -> None:
            tokens.enter_context(_cache_token(next(_new_token)))

        renew()
        yield renew


def trace(function: Callable[..., Any], arguments: Sequence[Any], axis: Any, user_function: Any) -> ClosedJaxpr:
    """Trace `function` to a jaxpr; with a `ReplicaAxis`, the axis is bound while it is traced.

    No mesh is involved yet, so closed-over arrays of any placement become constants of the jaxpr.
    JAX's messages speak of `user_function`, on whose behalf `function` is traced.
    """
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    function.__wrapped__ = user_function  # type: ignore[attr-defined]
    axis_env = None if axis is None else [(REPLICA_AXIS, axis.size)]
    return jax.make_jaxpr(function, axis_env=axis_env)(*arguments)


def evaluate(closed: ClosedJaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Run a traced function on values, in whatever trace is current."""
    jaxpr = closed.jaxpr
    if not any(_has_mesh(atom.aval) for equation in jaxpr.eqns for atom in equation.outvars):
        return jax.core.eval_jaxpr(jaxpr, constants, *arguments)
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
    for equation in jaxpr.eqns:
        own = list(dict.fromkeys(atom for atom in equation.invars if not isinstance(atom, Literal)))
        known.update(zip(equation.outvars, _run(equation, own, [known[atom] for atom in own]), strict=True))
    return [atom.val if isinstance(atom, Literal) else known[atom] for atom in jaxpr.outvars]


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Apply one equation of a jaxpr to values, also in place of its literals, in whatever trace is current."""
    variables = [jex_core.Var(atom.aval) for atom in equation.invars]
    return _run(equation.replace(invars=variables), variables, operands)


def _run(equation: Any, variables: list[Any], operands: Sequence[Any]) -> list[Any]:
    info = jex_core.DebugInfo("mirrored", "one equation", ("",) * len(variables), ("",) * len(equation.outvars))
    jaxpr = Jaxpr((), variables, equation.outvars, [equation], equation.effects, info)
    return [_in_this_mesh(result) for result in jax.core.eval_jaxpr(jaxpr, (), *operands)]


def _in_this_mesh(value: Any) -> Any:
    """Give a value the mesh of the `shard_map` that it is computed in.

    What a function computes with arrays of our strategies that it closes over was traced with their mesh in its type, which
    JAX does not let meet the types of a `shard_map`. JAX converts operands by itself only where it has traced in `shard_map`.
    """
    here = jax.sharding.get_abstract_mesh()
    if here.empty or not isinstance(value, jax.Array) or not _has_mesh(aval := jax.typeof(value)) or aval.sharding.mesh == here:
        return value
    return jax.sharding.reshard(value, jax.sharding.NamedSharding(here, jax.sharding.PartitionSpec()))


def _has_mesh(aval: Any) -> bool:
    placement = getattr(aval, "sharding", None)
    return placement is not None and not placement.mesh.empty


def meshes_in(jaxpr: Jaxpr) -> Iterator[jax.sharding.Mesh]:
    """Yield the meshes that a traced cross-replica function maps over or places results on."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            yield equation.params["mesh"]
        for placement in equation.params.get("out_shardings", ()):
            if isinstance(placement, jax.sharding.NamedSharding) and isinstance(placement.mesh, jax.sharding.Mesh):
                yield placement.mesh
        for inner in jex_core.jaxprs_in_params(equation.params):
            yield from meshes_in(inner)


def inner_constants(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the arrays that functions inside a traced function close over: their text shows no more than shapes of them."""
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(tuple(equation.params.values())):
            if isinstance(inner, ClosedJaxpr):
                yield from inner.consts
                yield from inner_constants(inner.jaxpr)
            elif isinstance(inner, Jaxpr):
                yield from inner_constants(inner)
            elif isinstance(inner, np.ndarray | jax.Array):
                yield inner


def placeholder(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Make a value of which only the shape and dtype matter, in the current trace."""
    return jnp.zeros(shape, dtype)


def user_line() -> str:
    """Return `file:line` of the innermost frame that is neither ours nor JAX's."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_NOT_USER_CODE):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "<unknown>"


def user_stacklevel() -> int:
    """Return the `stacklevel` with which the caller's `warnings.warn` points at the user's line."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USER_CODE):
        frame, level = frame.f_back, level + 1
    return level


def raising_line(error: BaseException) -> str:
    """Return `file:line` of the innermost user code that an exception came through."""
    where = "<unknown>"
    traceback = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not filename.startswith(_NOT_USER_CODE):
            where = f"{filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return where


def equation_line(equation: Any) -> str | None:
    """Return `file:line` of the user's code that made an equation of a jaxpr, or None when JAX does not know it."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_NOT_USER_CODE):
            return f"{frame.file_name}:{frame.line_num}"
    return None


_CLEAN = trace_state()
