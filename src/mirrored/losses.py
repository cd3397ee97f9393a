"""Losses whose gradients, summed over the replicas, are those of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import ContextError
from ._jax.marks import Mark as _Mark
from ._jax.marks import Purpose as _Purpose
from ._jax.marks import mark as _mark
from ._replicas import frames
from ._replicas.context import ReplicaContext as _ReplicaContext
from ._replicas.context import axis_of as _axis_of
from ._text import shown as _shown


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | jax.Array | None = None
) -> jax.Array:
    """Divide this replica's sum of losses by the global number of examples.

    The results of all replicas add up to the mean loss over the global batch, and so do their gradients, which
    `mr.Optimizer` sums: the same update as on one device.

    Args:
        per_example_loss: shape `[n, ...]`, the losses of this replica's n examples; further axes are summed.
        sample_weight: broadcasts to `per_example_loss` from the left (shape `[n]` or the same shape); losses
            are multiplied by it, the number of examples stays.
        global_batch_size: the number of examples that all replicas have together; default: counted.

    Raises:
        ContextError: outside a step.
        TypeError: for something that is not an array of real numbers.
        ValueError: for a scalar loss, shapes that do not fit, or a global batch size below one.

    >>> def step(x):
    ...     return mr.losses.compute_average_loss(x)
    >>> x = strategy.distribute_values_from_function(lambda ctx: np.full(4, 1.0 + ctx.replica_id_in_sync_group))
    >>> float(strategy.reduce("sum", strategy.run(step, args=(x,))))
    1.5

    Source: https://www.tensorflow.org/api_docs/python/tf/nn/compute_average_loss
    """
    context = _replica_context("compute_average_loss")
    losses = _as_numbers(per_example_loss, "per_example_loss")
    if losses.ndim == 0:
        raise ValueError(
            "compute_average_loss got a scalar; expected one loss per example, shape [n]. A mean over this replica's "
            "examples cannot be corrected afterwards: take the mean out of the loss function."
        )
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        losses = losses.astype(jnp.result_type(float))
    if sample_weight is not None:
        losses = losses * _broadcast_weight(sample_weight, losses)
    counted = losses.shape[0] if global_batch_size is None else 0
    purpose = _Purpose.SHARE if global_batch_size is None else _Purpose.GIVEN_SHARE
    return _share(jnp.sum(losses) / _global_batch_size(global_batch_size, losses, context), counted, purpose)


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """Divide a sum of regularization losses by the number of replicas.

    Every replica computes the same regularization loss, and gradients are summed over the replicas.

    Args:
        regularization_loss: a number, or an array whose elements are summed.

    Raises:
        ContextError: outside a step.

    >>> float(strategy.run(lambda: mr.losses.scale_regularization_loss(6.0)))
    3.0

    Source: https://www.tensorflow.org/api_docs/python/tf/nn/scale_regularization_loss
    """
    context = _replica_context("scale_regularization_loss")
    return _share(jnp.sum(_as_numbers(regularization_loss, "regularization_loss")) / context.num_replicas_in_sync)


def global_loss(loss: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Make the loss of the whole batch, whose value and gradients are the same on every replica.

    It is for transformations that ask for a loss themselves: `value_fn` of `optax.lbfgs` and of line searches, `obj_fn` of
    `optax.contrib.sophia`, `grad_fn=jax.grad(...)` of `optax.contrib.sam`. Each evaluation sends one message, and each
    gradient one more. The gradients have been combined, so `apply_gradients` takes them with `aggregate=False`.

    Args:
        loss: a function that returns this replica's share, a scalar: the shares of all replicas add up to the whole, as those
            of `compute_average_loss` do. It is differentiated by its arguments, trees of arrays that are the same on all
            replicas; what it closes over may be the replica's own.

    Raises:
        TypeError: for something that is not a function, or does not return a scalar.
        ContextError: when the function that it returns is called outside a step.

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
        axis = _axis_of(_replica_context("global_loss"))

        @jax.custom_jvp
        def same(value: jax.Array) -> jax.Array:
            """Return a value whose cotangents, one on each replica, are added up."""
            return value

        @same.defjvp
        def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
            # The transpose of a sum over the replicas is a sum again: of R equal cotangents here, and of R own ones there.
            return same(*primals), axis.sum(tangents)[0] / axis.size

        own = jax.tree.map(lambda leaf: same(jnp.asarray(leaf)) if _is_differentiable(leaf) else leaf, (args, kwargs))
        share = _as_numbers(loss(*own[0], **own[1]), "the result of the function given to global_loss")
        if share.ndim:
            raise TypeError(
                f"the function given to global_loss returned shape {share.shape}; expected a scalar, this replica's share, for "
                "example mr.losses.compute_average_loss(per_example_loss)."
            )
        return axis.sum([share])[0]

    return whole


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | float) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _share(loss: jax.Array, counted: int = 0, purpose: _Purpose = _Purpose.SHARE) -> jax.Array:
    """Mark a loss as this replica's share, so that nobody is warned that its gradients are summed."""
    return _mark(loss, _Mark(purpose, "loss", "", counted))


def _replica_context(name: str) -> _ReplicaContext:
    frame = frames.current()
    if frame is None or frame.replica is None:
        raise ContextError(
            f"mr.losses.{name} was called outside a step. It scales one replica's loss for a sum over the replicas; "
            "call it in the function given to strategy.run."
        )
    return frame.replica


def _as_numbers(value: Any, what: str) -> jax.Array:
    if not (isinstance(value, jax.Array | np.ndarray | np.generic | int | float | list) or hasattr(value, "__jax_array__")):
        raise TypeError(f"{what} is {_shown(value)} of type {type(value).__name__}; expected an array of numbers.")
    array = jnp.asarray(value)
    if jnp.iscomplexobj(array):
        raise TypeError(f"{what} has dtype {array.dtype}; expected real numbers.")
    return array


def _broadcast_weight(sample_weight: Any, losses: jax.Array) -> jax.Array:
    weight = _as_numbers(sample_weight, "sample_weight").astype(losses.dtype)
    if weight.ndim > losses.ndim or any(w not in (1, n) for w, n in zip(weight.shape, losses.shape, strict=False)):
        expected = " or ".join(sorted({str(losses.shape[:1]), str(losses.shape)}))
        raise ValueError(
            f"sample_weight has shape {weight.shape}, per_example_loss has shape {losses.shape}; expected {expected}."
        )
    return weight.reshape(*weight.shape, *(1,) * (losses.ndim - weight.ndim))


def _global_batch_size(given: Any, losses: jax.Array, context: _ReplicaContext) -> Any:
    if given is None:
        return sum(_axis_of(context).each(losses.shape[0]))
    is_number = isinstance(given, int | float | np.integer | np.floating) and not isinstance(given, bool)
    is_scalar_array = isinstance(given, jax.Array | np.ndarray) and given.ndim == 0
    if is_scalar_array or (is_number and given >= 1 and given == given // 1):
        return given
    raise ValueError(
        f"global_batch_size is {given!r}; expected the whole number of examples on all replicas together, at least 1."
    )
