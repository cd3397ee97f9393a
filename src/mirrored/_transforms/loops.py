"""Control flow with bodies that may read and write variables: scan, fori_loop, cond."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import UnevenReplicasError
from .._jax import user_code
from .._replicas.arrays import as_array
from .._replicas.per_replica import PerReplica, stack_of, uneven_shapes
from .._text import shown
from .._typing import ArrayLike, PyTree, Shape, UserFunction
from .._variables.access import claimed, load, store
from .._variables.bindings import bound, outer_reader
from .._variables.variable import Variable
from .function import call_compiled


@user_code.shorten_errors
def scan(
    fn: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], init: PyTree, xs: PyTree = None, length: int | None = None
) -> tuple[PyTree, PyTree]:
    """Loop over the leading axis of `xs` like `jax.lax.scan`, with a body that may use variables.

    In cross-replica context the body may call `strategy.run`, so that K training steps are one dispatch.
    Inside a step the body may assign variables. Outside both, the loop is compiled as by `mr.function`.

    Args:
        fn: takes `(carry, x)` and returns `(new carry, y)`; the carry keeps its shapes and dtypes.
        init: the first carry: arrays, PerReplica values, numbers and variables (their values), in any nest.
        xs: arrays of shape `[K, ...]`; in a PerReplica, each replica's value has the leading axis `K`. None
            if you pass `length`.
        length: K, when there is no `xs`.

    Returns:
        The last carry, and the `y` values stacked along a new leading axis (of each replica's value).

    Raises:
        TypeError: for a body that does not return a pair, and for leaves that are not arrays or numbers.
        ValueError: for `xs` without an axis to loop over.
        UnevenReplicasError: (a ValueError) when `K` differs by replica; later axes may differ, as in odd batches.

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
    if length is not None and (not isinstance(length, int) or length < 0):
        raise TypeError(f"mr.scan got length={length!r}; expected an int, 0 or more. The number of steps is compiled in.")
    return call_compiled(functools.partial(_scan, fn, length=length), (init, xs), {})


@user_code.shorten_errors
def fori_loop(lower: int | jax.Array, upper: int | jax.Array, body: Callable[[Any, PyTree], PyTree], init: PyTree) -> PyTree:
    """Loop from `lower` to `upper` like `jax.lax.fori_loop`, with a body that may use variables.

    Args:
        lower, upper: ints; if they are arrays, they may change without another compilation.
        body: takes `(i, carry)` and returns the new carry.
        init: the first carry.

    Raises:
        TypeError: for bounds that are not ints, and for leaves of the carry that are not arrays or numbers.

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
    for limit in (lower, upper):
        is_array = getattr(limit, "ndim", None) == 0 and jnp.issubdtype(getattr(limit, "dtype", float), jnp.integer)
        if not isinstance(limit, int) and not is_array:
            raise TypeError(f"mr.fori_loop got the bounds {lower!r} and {upper!r}; expected two ints.")
    return call_compiled(functools.partial(_fori_loop, body), (lower, upper, init), {})


@user_code.shorten_errors
def cond(pred: ArrayLike, true_fn: Callable[..., PyTree], false_fn: Callable[..., PyTree], *operands: PyTree) -> PyTree:
    """Call one of two functions like `jax.lax.cond`; both may read and assign variables.

    A variable that only one of them assigns keeps its value in the other case. In a step, if a branch assigns a
    mirrored variable or reaches a collective, the condition must be the same on all replicas.

    Args:
        pred: a boolean scalar.
        true_fn, false_fn: functions of the operands; their results have the same structure, shapes and dtypes.
        operands: arrays, PerReplica values and numbers, in any nest.

    >>> with strategy.scope():
    ...     w = mr.Variable(1.0)
    >>> def step(x):
    ...     mean = mr.get_replica_context().all_reduce("mean", x)
    ...     mr.cond(mean > 1, lambda: w.assign_add(mean), lambda: w.assign(0.0))
    >>> x = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    >>> strategy.run(step, args=(x,))
    >>> float(w)
    2.5
    """
    _check_callable(true_fn, "mr.cond")
    _check_callable(false_fn, "mr.cond")
    return call_compiled(functools.partial(_cond, true_fn, false_fn), (pred, *operands), {})


def _cond(true_fn: UserFunction, false_fn: UserFunction, pred: ArrayLike, *operands: PyTree) -> PyTree:
    operands = _as_arrays(operands, "the operands of mr.cond")

    def branch(fn: UserFunction, *operands: PyTree) -> PyTree:
        # A branch such as `lambda: w.assign(0.0)` returns the variable, which is no result.
        result = _map_whole(lambda leaf: None if isinstance(leaf, Variable) else leaf, fn(*operands))
        return _as_arrays(result, "the result of mr.cond")

    def choose(before: list[jax.Array], *branches: UserFunction) -> tuple[PyTree, list[jax.Array]]:
        return jax.lax.cond(pred, *branches, before, *operands)  # type: ignore[no-any-return]

    return _carry_written(choose, [functools.partial(branch, true_fn), functools.partial(branch, false_fn)], *operands)


def _scan(fn: UserFunction, init: PyTree, xs: PyTree, length: int | None) -> tuple[PyTree, PyTree]:
    init = _as_arrays(init, "the carry of mr.scan")
    rows = _map_whole(_replicas_second, xs)

    def body(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        result = fn(carry, x)
        if not isinstance(result, tuple) or len(result) != 2:
            returned = "an array" if isinstance(result, jax.Array) else repr(result)
            raise TypeError(
                f"the body of mr.scan returned {returned}; expected a pair (new carry, y). Write "
                "`return carry, None` when there is nothing to collect."
            )
        carry, y = result
        return _as_arrays(carry, "the carry of mr.scan"), _as_arrays(y, "the y of mr.scan's body")

    def scan(before: list[jax.Array], body: UserFunction) -> tuple[tuple[PyTree, PyTree], list[jax.Array]]:
        def step(state: tuple[PyTree, list[jax.Array]], x: PyTree) -> tuple[tuple[PyTree, list[jax.Array]], PyTree]:
            carry, values = state
            (carry, y), values = body(values, carry, x)
            return (carry, values), y

        (carry, after), ys = jax.lax.scan(step, (init, before), rows, length)
        return (carry, ys), after

    first = jax.tree.map(lambda row: jax.ShapeDtypeStruct(row.shape[1:], row.dtype), rows)
    carry, ys = _carry_written(scan, [body], init, first)

    def replicas_first(y: PyTree) -> PyTree:
        if not isinstance(y, PerReplica):
            return y
        return _swap_axes(y, lambda shape: (len(stack_of(y)), *shape))

    return carry, _map_whole(replicas_first, ys)


def _fori_loop(fn: UserFunction, lower: int | jax.Array, upper: int | jax.Array, init: PyTree) -> PyTree:
    init = _as_arrays(init, "the carry of mr.fori_loop")

    def body(carry: PyTree, i: jax.Array) -> PyTree:
        return _as_arrays(fn(i, carry), "the carry of mr.fori_loop")

    def repeat(before: list[jax.Array], body: UserFunction) -> tuple[PyTree, list[jax.Array]]:
        return jax.lax.fori_loop(lower, upper, lambda i, state: body(state[1], state[0], i), (init, before))

    return _carry_written(repeat, [body], init, jnp.asarray(lower))


def _carry_written(loop: Callable[..., Any], bodies: list[UserFunction], *arguments: PyTree) -> Any:
    """Run control flow that also carries the variables that its bodies write; one extra trace finds them."""
    outer = outer_reader()
    written: dict[Variable, str] = {}

    def record(*traced: PyTree) -> None:
        for body in bodies:
            with bound({}, outer) as bindings:
                body(*traced)
            written.update(bindings.written)

    def carrying(body: UserFunction, values: list[jax.Array], *arguments: PyTree) -> tuple[PyTree, list[jax.Array]]:
        with bound(dict(zip(written, values, strict=True)), outer) as bindings:
            return body(*arguments), bindings.values(list(written))

    jax.eval_shape(record, *arguments)  # the extra trace
    with claimed(list(written)):
        before = [load(variable) for variable in written]
        result, after = loop(before, *(functools.partial(carrying, body) for body in bodies))
        for variable, value in zip(written, after, strict=True):
            store(variable, value)
    return result


def _map_whole(function: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Map over a tree whose leaves are arrays, variables and PerReplica values."""
    return jax.tree.map(function, tree, is_leaf=lambda leaf: isinstance(leaf, PerReplica | Variable))


def _as_arrays(tree: PyTree, what: str) -> PyTree:
    return _map_whole(lambda leaf: leaf if isinstance(leaf, PerReplica) else as_array(leaf, what), tree)


def _replicas_second(x: object) -> Any:
    """Turn `[R, K, ...]` into `[K, R, ...]`, so that each iteration takes one row of every replica."""
    array = x if isinstance(x, PerReplica) else as_array(x, "xs of mr.scan")
    if array.ndim == 0:
        raise ValueError(
            "xs of mr.scan holds a scalar, which has no axis to loop over; expected arrays of shape [K, ...]. For a list of "
            "numbers write jnp.asarray([1.0, 2.0])."
        )
    if not isinstance(x, PerReplica):
        return array
    if len({shape[0] for shape in x.shapes}) > 1:
        raise UnevenReplicasError(
            f"xs of mr.scan holds a PerReplica of shapes {', '.join(map(str, x.shapes))}, whose first axes differ; they "
            "count the steps of the loop, and all take each. To loop over each replica's own rows, call mr.scan in the step."
        )
    return _swap_axes(x, lambda s: s[1:], rank=x.ndim)  # of a row


def _swap_axes(x: PerReplica, change: Callable[[Shape], Shape], rank: int | None = None) -> PerReplica:
    shapes = uneven_shapes(x)
    return PerReplica(jnp.swapaxes(stack_of(x), 0, 1), shapes and tuple(map(change, shapes)), rank=rank)


def _check_callable(fn: object, verb: str) -> None:
    if not callable(fn):
        raise TypeError(f"{verb} got {shown(fn)} as its body; expected a function.")
