"""Loops whose bodies may read and write variables: scan and fori_loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import _context, _lift, _tracing
from ._function import call_compiled
from ._typing import PyTree
from ._values import PerReplica, is_per_replica
from ._variables import Variable


def scan(
    fn: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
) -> tuple[PyTree, PyTree]:
    """Loop over the leading axis of `xs` like `jax.lax.scan`, with a body that may use variables.

    In cross-replica context the body may call `strategy.run`, so that K training steps are one dispatch.
    Inside a step it may assign variables. Outside both it is compiled as by `mr.function`.

    Args:
        fn: takes `(carry, x)` and returns `(new carry, y)`; shapes and dtypes of the carry stay.
        init: the first carry: arrays, PerReplica values and numbers, in any nest.
        xs: arrays of shape `[K, ...]`; of a PerReplica, each replica's value has the leading axis `K`. None
            together with `length`.
        length: K, when there is no `xs`.

    Returns:
        The last carry, and the `y` values stacked along a new leading axis (of each replica's value).

    >>> with strategy.scope():
    ...     w = mr.Variable(1.0)
    >>> def body(carry, x):
    ...     w.assign(w * x)
    ...     return carry + x, w.value
    >>> total, history = mr.scan(body, 0.0, np.array([2.0, 3.0], "float32"))
    >>> float(total), history, float(w)
    (5.0, Array([2., 6.], dtype=float32), 6.0)
    """
    _check_callable(fn, "mr.scan")
    if _is_traced():
        return _scan(fn, init, xs, length)
    return call_compiled(_scan, (fn, _as_arrays(init), xs, length), {})


def fori_loop(lower: Any, upper: Any, body: Callable[[Any, PyTree], PyTree], init: PyTree) -> PyTree:
    """Loop from `lower` to `upper` like `jax.lax.fori_loop`, with a body that may use variables.

    Args:
        lower, upper: ints; as arrays they may change without another compilation.
        body: takes `(i, carry)` and returns the new carry.
        init: the first carry.

    >>> with strategy.scope():
    ...     w = mr.Variable(1.0)
    >>> def body(i, carry):
    ...     w.assign_add(1.0)
    ...     return carry
    >>> mr.fori_loop(0, 3, body, None)
    >>> float(w)
    4.0
    """
    _check_callable(body, "mr.fori_loop")
    if _is_traced():
        return _fori_loop(lower, upper, body, init)
    return call_compiled(_fori_loop, (lower, upper, body, _as_arrays(init)), {})


def _scan(fn: Any, init: PyTree, xs: PyTree, length: int | None) -> tuple[PyTree, PyTree]:
    rows = jax.tree.map(_replicas_second, xs, is_leaf=is_per_replica)

    def user_body(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        return _checked_pair(fn(carry, x))

    first = jax.tree.map(lambda row: jax.ShapeDtypeStruct(row.shape[1:], row.dtype), rows)
    written = _written_by(user_body, init, first)

    def body(state: Any, x: PyTree) -> Any:
        carry, values = state
        with _lift.bound(dict(zip(written, values, strict=True))) as bindings:
            carry, y = user_body(carry, x)
            return (carry, bindings.values(written)), y

    before = [_lift.read_outer(variable) for variable in written]
    (carry, after), ys = jax.lax.scan(body, (init, before), rows, length)
    _write_back(written, after)
    return carry, jax.tree.map(_replicas_first, ys, is_leaf=is_per_replica)


def _fori_loop(lower: Any, upper: Any, fn: Any, init: PyTree) -> PyTree:
    written = _written_by(fn, jnp.asarray(lower), init)

    def body(i: Any, state: Any) -> Any:
        carry, values = state
        with _lift.bound(dict(zip(written, values, strict=True))) as bindings:
            return fn(i, carry), bindings.values(written)

    before = [_lift.read_outer(variable) for variable in written]
    carry, after = jax.lax.fori_loop(lower, upper, body, (init, before))
    _write_back(written, after)
    return carry


def _written_by(body: Any, *arguments: PyTree) -> list[Variable]:
    """Trace a loop's body once to find the variables that it writes."""
    written: dict[Variable, str] = {}

    def record(*traced: PyTree) -> None:
        with _lift.bound({}) as bindings:
            body(*traced)
        written.update(bindings.written)

    jax.eval_shape(record, *arguments)
    return list(written)


def _write_back(written: list[Variable], values: list[jax.Array]) -> None:
    for variable, value in zip(written, values, strict=True):
        _lift.write_outer(variable, value)


def _is_traced() -> bool:
    frame = _context.current()
    return (frame is not None and (frame.bindings is not None or frame.axis is not None)) or _tracing.is_staging()


def _as_arrays(init: PyTree) -> PyTree:
    """Make arrays of the numbers in a first carry, so that a changed number is not another program."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, int | float | complex) else x, init)


def _replicas_second(x: Any) -> Any:
    """Turn `[R, K, ...]` into `[K, R, ...]`, so that a loop takes one step of all replicas at a time."""
    return PerReplica(jnp.moveaxis(x._array, 1, 0)) if isinstance(x, PerReplica) else jnp.asarray(x)


def _replicas_first(y: Any) -> Any:
    return PerReplica(jnp.moveaxis(y._array, 1, 0)) if isinstance(y, PerReplica) else y


def _checked_pair(result: Any) -> tuple[PyTree, PyTree]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"the body of mr.scan returned {type(result).__name__}; expected a pair (new carry, y). Write "
            "`return carry, None` when there is nothing to collect."
        )
    return result


def _check_callable(fn: Any, verb: str) -> None:
    if not callable(fn):
        raise TypeError(f"{verb} got {fn!r} as its body; expected a function.")
