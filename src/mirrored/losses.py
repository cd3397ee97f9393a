"""Losses that are this replica's share of the global loss: the shares of all replicas add up to the whole.

Their gradients add up too, and `mr.Optimizer` sums them: so the update equals that on one device. From one loss per example,
`mr.value_and_grad` itself makes a share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import ContextError
from ._jax import marks as _marks
from ._jax import user_code as _user_code
from ._replicas import arrays as _arrays
from ._replicas import frames
from ._replicas.collectives import ReplicaAxis as _ReplicaAxis
from ._text import shown as _shown
from ._typing import ArrayLike as _ArrayLike
from ._typing import PyTree as _PyTree


def compute_average_loss(
    per_example_loss: _ArrayLike, sample_weight: _ArrayLike | None = None, global_batch_size: int | jax.Array | None = None
) -> jax.Array:
    """Divide this replica's sum of losses by the global number of examples.

    The results of all replicas add up to the mean loss over the global batch. Their gradients add up too, and `mr.Optimizer`
    sums them, so the update equals that on one device. For a loss per example, `mr.value_and_grad` itself does this.

    Args:
        per_example_loss: shape `[n]`, one number for each of this replica's n examples.
        sample_weight: shape `[n]`; it multiplies the losses, but does not change the number of examples.
        global_batch_size: the number of examples on all replicas together; by default they are counted.

    Raises:
        ContextError: outside a step.
        TypeError: for something that is not an array of real numbers.
        ValueError: for losses that are not one number for each example, weights of another shape, or a global batch size
            below one.

    >>> def step(x):
    ...     return mr.losses.compute_average_loss(x)
    >>> x = strategy.distribute_values_from_function(lambda ctx: np.full(4, 1.0 + ctx.replica_id_in_sync_group))
    >>> float(strategy.reduce("sum", strategy.run(step, args=(x,))))
    1.5

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/nn/compute_average_loss
    """
    replicas = _replicas("compute_average_loss")
    losses = _as_floats(per_example_loss, "per_example_loss")
    if losses.ndim == 0:
        raise ValueError(
            "compute_average_loss got a scalar; expected one loss per example, shape [n]. Take the mean out of the loss "
            "function, or say what it is: mr.losses.mean_over_own_rows(loss)."
        )
    _arrays.check_losses(losses, "compute_average_loss got")
    if sample_weight is not None:
        losses = losses * _weights(sample_weight, losses, "sample_weight", "per_example_loss")
    total = jnp.sum(losses, dtype=jnp.promote_types(losses.dtype, jnp.float32))  # float16 cannot hold 65,536 rows
    count = _global_batch_size(global_batch_size, losses, replicas)
    return _share((total / count).astype(jnp.result_type(losses, count)))


def scale_regularization_loss(regularization_loss: _ArrayLike) -> jax.Array:
    """Divide a sum of regularization losses by the number of replicas.

    Every replica computes the same loss, and gradients are summed over the replicas. For a penalty on the replica's own rows,
    like Keras' activity regularizers, write `mr.losses.mean_over_own_rows(penalty)`, or add it to each example's loss.

    Args:
        regularization_loss: a number, or an array whose elements are summed.

    Raises:
        ContextError: outside a step.
        FactorOfReplicasError: (a ValueError) when it depends on the replica's own rows.

    >>> float(strategy.run(lambda: mr.losses.scale_regularization_loss(6.0)))
    3.0

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/nn/scale_regularization_loss
    """
    replicas = _replicas("scale_regularization_loss")
    loss = jnp.sum(_as_numbers(regularization_loss, "regularization_loss"))
    note = _marks.Mark(_marks.Purpose.REGULARIZATION, "", _user_code.user_line())
    return _share(_marks.mark(loss, note) / replicas.size)


def weighted_mean(losses: _ArrayLike, weights: _ArrayLike, total: _ArrayLike | None = None) -> jax.Array:
    """Divide this replica's weighted sum of losses by the sum of all replicas' weights.

    Use it for losses that are not divided by rows: tokens (padding has weight 0), masks, sample weights. The results of all
    replicas add up to the weighted mean over the global batch, and so do their gradients, even if the weights depend on the
    trained variables. If all weights are 0, both are 0.

    Args:
        losses: shape `[n, ...]`, for example `[n, length]`, one loss for each token.
        weights: booleans or numbers, of the same shape. Turn weights `[n]` of examples into weights of their tokens by
            `jnp.broadcast_to(weights[:, None], losses.shape)`.
        total: the sum of the weights of all parts on all replicas, if you accumulate a batch in parts: compute
            `ctx.all_reduce("sum", weights.sum())` before the loop. Default: the sum of these `weights` on all replicas.

    Raises:
        ContextError: outside a step.
        TypeError: for something that is not an array of real numbers.
        ValueError: for shapes that do not fit, and a `total` with axes.

    >>> def step(lengths):
    ...     is_token = jnp.arange(3) < lengths[:, None]
    ...     return mr.losses.weighted_mean(jnp.full((2, 3), 5.0), is_token)
    >>> [lengths] = strategy.distribute_dataset([np.array([1, 2, 3, 2])])
    >>> float(strategy.reduce("sum", strategy.run(step, args=(lengths,))))
    5.0

    Source: https://github.com/google/flax/tree/main/examples/lm1b
    """
    replicas = _replicas("weighted_mean")
    losses = _as_floats(losses, "losses")
    wide = losses.astype(jnp.promote_types(losses.dtype, jnp.float32))  # bfloat16 cannot hold 257 tokens
    weights = _weights(weights, wide, "weights", "losses")
    whole = replicas.sum([jnp.sum(weights)])[0] if total is None else _as_floats(total, "total")
    if whole.shape:
        raise ValueError(f"total has shape {whole.shape}; expected a scalar: ctx.all_reduce('sum', weights.sum()).")
    divisor = jnp.where(whole == 0, 1, whole)  # 0 / 0 would be NaN, in the gradients too
    return _share((jnp.sum(wide * weights) / divisor).astype(losses.dtype))


def mean_over_own_rows(loss: _ArrayLike) -> jax.Array:
    """Turn a loss that is the mean over this replica's own rows into this replica's share.

    Use it for `keras.losses` and other losses that end in `jnp.mean`. Each replica's mean is weighted by its rows, so that the
    shares of all replicas add up to the mean over the global batch. A term that every replica adds to the mean, such as a penalty
    for large weights, counts once. The share of a replica without rows is 0.

    Args:
        loss: a scalar.

    Raises:
        ContextError: outside a step.
        TypeError: for something that is not a real number.
        ValueError: for an array with axes.
        UnevenReplicasError: (a ValueError) in an uneven step whose arguments divide differently among the replicas.

    >>> def step(x):
    ...     return mr.losses.mean_over_own_rows(jnp.mean(x))
    >>> [x] = strategy.distribute_dataset([np.array([1.0, 2.0, 6.0])])
    >>> float(strategy.reduce("sum", strategy.run(step, args=(x,))))
    3.0

    Source: https://keras.io/api/losses/
    """
    num_rows, total = _replicas("mean_over_own_rows").rows()
    if num_rows:
        return _share(_scalar(loss, "mean_over_own_rows") * (num_rows / total))
    nothing = _as_floats(loss, "the loss given to mean_over_own_rows")  # NaN, or Keras' array without elements
    note = _marks.Mark(_marks.Purpose.NO_ROWS, "mr.losses.mean_over_own_rows", _user_code.user_line())
    return _share(_marks.mark(jnp.zeros((), nothing.dtype), note))


def already_divided(loss: _ArrayLike) -> jax.Array:
    """Declare that a loss is already this replica's share, because it was divided by a global number, such as the batch size.

    Args:
        loss: a scalar; the scalars of all replicas add up to the loss of the global batch.

    Raises:
        ContextError: outside a step.
        TypeError: for something that is not a real number.
        ValueError: for an array with axes.

    >>> def step(x):
    ...     return mr.losses.already_divided(jnp.sum(x) / 4)  # 4 rows on all replicas
    >>> [x] = strategy.distribute_dataset([np.array([1.0, 2.0, 6.0, 3.0])])
    >>> float(strategy.reduce("sum", strategy.run(step, args=(x,))))
    3.0

    In TensorFlow: https://www.tensorflow.org/tutorials/distribute/custom_training
    """
    _replicas("already_divided")
    return _share(_scalar(loss, "already_divided"), "")


def as_share(value: _PyTree) -> _PyTree:
    """Declare that `value` is this replica's share of an intended sum over the replicas, so that the sum causes no warning.

    A sum of gradients over the replicas warns if their loss was not declared a share, or if they were clipped or changed before.
    The library takes a value for a gradient if only results of backward passes make it differ by replica. Use this function if
    such a sum is right: a total force, a vote of signs, per-example gradients that were clipped one by one, `A.T @ y` by
    `jax.vjp`, gradients that are divided after the sum.

    Args:
        value: a tree of arrays, of any shapes; returned as it is.

    Raises:
        ContextError: outside a step.
        TypeError: for something that is not a real number.

    >>> def step(x):
    ...     force = -jax.grad(lambda x: jnp.sum(x**2))(x)
    ...     return mr.get_replica_context().all_reduce("sum", mr.losses.as_share(jnp.sum(force)))
    >>> [x] = strategy.distribute_dataset([np.array([1.0, 2.0, 6.0, 3.0])])
    >>> float(strategy.run(step, args=(x,)))
    -24.0

    In TensorFlow: https://www.tensorflow.org/tutorials/distribute/custom_training
    """
    _replicas("as_share")
    return jax.tree.map(lambda number: _share(_as_numbers(number, "a value given to as_share"), ""), value)


def global_loss(loss: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Return a function for the loss of the global batch, with the same value and gradients on every replica.

    Use it for transformations that evaluate the loss themselves: `value_fn` of `optax.lbfgs` and line searches, `obj_fn` of
    `optax.contrib.sophia`, `grad_fn` of `optax.contrib.sam`. Each evaluation takes one all-reduce, and each
    gradient one more. The gradients are already combined, so pass them to `apply_gradients` with `aggregate=False`.

    Args:
        loss: a function that returns this replica's share, a scalar: the shares of all replicas add up to the whole, like
            those of `compute_average_loss`. Derivatives are with respect to its arguments, trees of arrays that are the same
            on all replicas; it may close over the replica's own values.

    Raises:
        TypeError: when `loss` is no function, or does not return a scalar.
        ContextError: when the returned function is called outside a step.

    >>> with strategy.scope():
    ...     w = mr.Variable([2.0, -1.0])
    ...     optimizer = mr.Optimizer(optax.lbfgs(), w)
    >>> def step(x, y):
    ...     loss = mr.losses.global_loss(lambda w: mr.losses.compute_average_loss((x @ w - y) ** 2))
    ...     value, gradient = jax.value_and_grad(loss)(w.value)
    ...     optimizer.apply_gradients(gradient, aggregate=False, value=value, grad=gradient, value_fn=loss)
    ...     return value
    >>> x, y = np.eye(4, 2, dtype=np.float32), np.ones(4, np.float32)
    >>> for rows in strategy.distribute_dataset([(x, y)] * 3):
    ...     value = strategy.run(step, args=rows)
    >>> print(value < 0.6, np.round(w, 1))  # 0.5 is the smallest
    True [1. 1.]

    Source: https://optax.readthedocs.io/en/latest/api/optimizers.html#lbfgs
    """
    if not callable(loss):
        raise TypeError(
            f"global_loss got {_shown(loss)}; expected a function that computes this replica's share, so that it can be "
            "evaluated again: mr.losses.global_loss(lambda w: mr.losses.compute_average_loss(per_example_loss(w)))."
        )

    @functools.wraps(loss)
    def whole(*args: Any, **kwargs: Any) -> jax.Array:
        replicas = _replicas("global_loss")

        @jax.custom_jvp
        def same(value: jax.Array) -> jax.Array:
            """Return a value, and sum its cotangents over the replicas in the backward pass."""
            return value

        @same.defjvp
        def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
            # The transpose of a sum over the replicas is a sum too: here of R equal cotangents, there of R different ones.
            return same(*primals), replicas.sum(tangents)[0] / replicas.size

        is_float = lambda x: isinstance(x, jax.Array | np.ndarray | float) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)  # noqa: E731
        args, kwargs = jax.tree.map(lambda leaf: same(jnp.asarray(leaf)) if is_float(leaf) else leaf, (args, kwargs))
        share = _as_numbers(loss(*args, **kwargs), "the result of the function given to global_loss")
        if share.ndim:
            raise TypeError(
                f"the function given to global_loss returned shape {share.shape}; expected a scalar, this replica's share, for "
                "example mr.losses.compute_average_loss(per_example_loss)."
            )
        note = _marks.Mark(_marks.Purpose.LOSS, "the loss of all replicas", _user_code.user_line())
        return replicas.sum([_marks.mark(share, note)])[0]

    return whole


def _share(loss: jax.Array, how: str = "divided") -> jax.Array:
    """Mark a loss as this replica's share, so that summing its gradients causes no warning."""
    return _marks.mark(loss, _marks.Mark(_marks.Purpose.SHARE, how, ""))


def _scalar(loss: object, name: str) -> jax.Array:
    loss = _as_floats(loss, f"the loss given to {name}")
    if loss.shape:
        raise ValueError(
            f"{name} got shape {loss.shape}; expected a scalar. One loss for each example, shape [n], needs no word: return it "
            "from the function given to mr.value_and_grad, or pass it to mr.losses.compute_average_loss."
        )
    return loss


def _replicas(name: str) -> _ReplicaAxis:
    frame = frames.current()
    if frame is None or frame.replica is None or frame.axis is None:
        raise ContextError(
            f"mr.losses.{name} was called outside a step. It scales one replica's loss for a sum over the replicas; "
            "call it in the function given to strategy.run."
        )
    return frame.axis


def _as_numbers(value: object, what: str) -> jax.Array:
    if not (isinstance(value, jax.Array | np.ndarray | np.generic | int | float | list) or hasattr(value, "__jax_array__")):
        raise TypeError(f"{what} is {_shown(value)} of type {type(value).__name__}; expected an array of numbers.")
    array = jnp.asarray(value)
    if jnp.iscomplexobj(array):
        raise TypeError(f"{what} has dtype {array.dtype}; expected real numbers.")
    return array


def _as_floats(value: object, what: str) -> jax.Array:
    array = _as_numbers(value, what)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.result_type(float))


def _weights(given: object, losses: jax.Array, name: str, of: str) -> jax.Array:
    weights = _as_numbers(given, name).astype(losses.dtype)
    if weights.shape != losses.shape:
        raise ValueError(
            f"{name} has shape {weights.shape}, {of} has shape {losses.shape}; expected {losses.shape}."
            + f" Weights of examples are those of their elements by jnp.broadcast_to(weights[:, None], {of}.shape)."
            * (weights.ndim < losses.ndim)
        )
    return weights


def _global_batch_size(given: object, losses: jax.Array, replicas: _ReplicaAxis) -> Any:
    if given is None:
        return sum(replicas.examples(losses.shape[0]))
    is_number = isinstance(given, int | float | np.integer | np.floating | np.ndarray | jax.Array) and not isinstance(given, bool)
    if is_number and jnp.ndim(given) == 0:
        is_traced = isinstance(given, jax.core.Tracer)  # then its value is not known
        if is_traced or (np.asarray(given) >= 1 and float(np.asarray(given)).is_integer()):
            return given
    raise ValueError(
        f"global_batch_size is {given!r}; expected the whole number of examples on all replicas together, at least 1."
    )
