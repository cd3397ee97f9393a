"""Tells which scope, step and trace the program is in: a stack of frames."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from .. import _process
from .._errors import ContextError, StrategyMismatchError
from .._jax import tracing, user_code
from .collectives import ReplicaAxis
from .mesh import ReplicaMesh


class VariableValues(Protocol):
    """The variables' values while a function is traced, which a frame reads and writes."""

    @property
    def caches(self) -> Callable[[], Any]: ...

    def read(self, variable: Any) -> jax.Array: ...

    def value_of(self, variable: Any) -> jax.Array: ...

    def write(self, variable: Any, value: jax.Array) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One place in the program."""

    strategy: Any  # whose scope or replica this is; None in an `mr.function` outside every scope
    mesh: ReplicaMesh | None  # the strategy's devices
    replica: Any = None  # the ReplicaContext; None in cross-replica context
    axis: ReplicaAxis | None = None  # the way to the other replicas; set inside a step, also in its `merge_call`
    bindings: VariableValues | None = None  # the variables' values while tracing; None: they are in their arrays


#: Return the innermost frame, or None outside every scope.
current: Callable[[], Frame | None] = _process.frame.get


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[Frame]:
    """Make a frame the current one during a block."""
    token = _process.frame.set(frame)
    try:
        yield frame
    finally:
        _process.frame.reset(token)


def is_traced() -> bool:
    """Tell whether the running code is being traced, by this library or by JAX."""
    frame = _process.frame.get()
    return (frame is not None and (frame.bindings is not None or frame.axis is not None)) or tracing.is_staging()


def check_enterable(strategy: object) -> None:
    """Refuse a strategy's scope inside a scope or step of another strategy."""
    frame = current()
    if frame is None or frame.strategy is None:
        return
    if frame.replica is not None:
        raise ContextError(
            "strategy.scope() was entered inside a step that strategy.run is running. A step is one replica's "
            "program; make variables before it, in `with strategy.scope():`, and use "
            "mr.get_replica_context().merge_call(fn) for the few things that concern all replicas."
        )
    if frame.strategy is not strategy:
        raise StrategyMismatchError(
            f"the scope of {strategy!r} was entered inside the scope of {frame.strategy!r}. Scopes of different "
            "strategies do not nest, because a variable belongs to one of them; leave the outer scope first."
        )


def require_no_mesh_around() -> None:
    """Refuse a program inside `jax.set_mesh`, for whose mesh JAX would compile it, or in `jax.ensure_compile_time_eval`."""
    if tracing.computes_constants():
        raise ContextError(
            "a program of a strategy was started inside jax.ensure_compile_time_eval(), where JAX computes at once, outside of "
            "the replicas, what depends on no argument. Run steps, reduce and gather outside of that block; a step may have one."
        )
    if tracing.current_trace() is tracing.NO_TRACE and not (mesh := jax.sharding.get_abstract_mesh()).empty:
        raise ContextError(
            f"a program of a strategy was started inside jax.set_mesh(...) of the axes {dict(mesh.shape)}, and JAX compiles what "
            "starts there for that mesh. A strategy has devices of its own: run steps, reduce and gather outside of `with "
            "jax.set_mesh(mesh):`. Your own functions with jax.jit may run inside of it."
        )


def require_cross_replica(verb: str, instead: str) -> None:
    """Refuse a verb that concerns all replicas when one replica's step calls it."""
    frame = _process.frame.get()
    if frame is not None and frame.replica is not None:
        raise ContextError(
            f"strategy.{verb} was called inside a step that strategy.run is running, where only one replica's "
            f"values are known. {instead}"
        )


def in_cross_replica_context() -> bool:
    """Tell whether this is cross-replica context: inside `strategy.scope()`, but not inside a step.

    >>> mr.in_cross_replica_context()
    False
    >>> with strategy.scope():
    ...     mr.in_cross_replica_context()
    True

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/in_cross_replica_context
    """
    frame = current()
    return frame is not None and frame.strategy is not None and frame.replica is None


def foreign_trace_message(action: str, name: str, frame: Frame | None) -> str:
    """Explain why a variable cannot be used under a transformation that does not know the variable."""
    if frame is not None and frame.bindings is not None:
        return (
            f"variable {name!r} was {action} at {user_code.user_line()} under a JAX transformation inside the step "
            "(jit, scan, cond, while_loop, vmap or grad), whose body would leak the new value. Leave jax.jit out: strategy.run "
            "compiles the step. Use mr.scan, mr.fori_loop and mr.cond instead of those of jax.lax, and mr.value_and_grad instead "
            "of jax.grad; or return the value, as from jax.lax.while_loop, and assign it outside of the loop."
        )
    return (
        f"variable {name!r} was {action} at {user_code.user_line()} under a JAX transformation (jit, scan, cond, vmap, "
        "shard_map) that does not know about it, so its value of this moment would be baked into the compiled program. Use "
        "mr.function instead of jax.jit and mr.scan instead of jax.lax.scan, or pass variable.value as an argument."
    )
