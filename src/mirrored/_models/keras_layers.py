"""Keras' layers and optimizers in a step: layers see the global batch, optimizers the gradients of all replicas."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import random_keys, user_code
from .._jax.marks import Mark, Purpose, mark
from .._options import ReduceOp
from .._process import is_library_update
from .._replicas import rows_drawn
from .._replicas.context import axis_of, current_replica
from . import keras_parts
from .keras_variables import UndiscoveredError, scope_mesh

if TYPE_CHECKING:
    import keras

# -- normalization and random numbers


def moments(old: Callable[..., Any], layer: keras.Layer, inputs: jax.Array, mask: jax.Array | None) -> Any:
    """Compute the mean and variance over the global batch; a replica may hold any number of its rows, or none.

    One collective combines the replicas' own means and sums of squares, without the cancellation of E[x^2] - E[x]^2.
    """
    replica = current_replica()
    if replica is None:
        return old(layer, inputs, mask)
    axis, axes = axis_of(replica), tuple(keras_parts.reduction_axes_of(layer))
    num_elements = math.prod(inputs.shape[a] for a in axes)
    is_real, count = None, num_elements
    if mask is not None:
        is_real = jnp.broadcast_to(jnp.asarray(mask, bool)[..., None], inputs.shape)
        count = jnp.sum(is_real, axes, dtype=inputs.dtype)
    mean = jnp.sum(inputs, axes, where=is_real) / jnp.maximum(count, 1)
    squares = jnp.sum((inputs - jnp.expand_dims(mean, axes)) ** 2, axes, where=is_real)
    if is_real is None:
        counts: Any = np.array(axis.each(num_elements), inputs.dtype)[:, None]
        means, squares = jnp.moveaxis(axis.stack(jnp.stack([mean, squares])), 1, 0)
        total = counts.sum()
    else:
        counts, means, squares = jnp.moveaxis(axis.stack(jnp.stack([count, mean, squares])), 1, 0)
        total = jnp.sum(counts, 0) + sys.modules["keras"].config.epsilon()  # as Keras does
    mean = jnp.sum(counts * means, 0) / total
    return mean, jnp.sum(squares + counts * (means - mean) ** 2, 0) / total


def next_seed(old: Callable[..., Any], generator: keras.random.SeedGenerator, *args: object, **kwargs: object) -> Any:
    """Return a seed by rows, so that layers draw as on one device; the generator's state stays the same on all replicas."""
    seed, replica = old(generator, *args, **kwargs), current_replica()
    if replica is None:
        return seed
    if jax.config.jax_default_prng_impl == random_keys.THREEFRY:  # type: ignore[attr-defined]
        seed = jax.random.wrap_key_data(seed, impl=random_keys.THREEFRY)
    axis = axis_of(replica)
    return rows_drawn.key_of(seed, axis, axis.index(), None)


# -- optimizers


def apply(
    old: Callable[..., Any],
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> None:
    """Sum the gradients over the replicas, and update the variables."""
    replica = current_replica()
    if replica is None or is_library_update.get():  # an optimizer inside another gets sums already
        return old(optimizer, grads, trainable_variables)
    variables = None if trainable_variables is None else list(trainable_variables)
    _build_first(optimizer, variables)
    trained = variables or keras_parts.trained_by(optimizer)
    # Marked, as in `mr.Optimizer`, so that no gradient is summed twice.
    where, grads = user_code.user_line(), list(grads)
    paths = [variable.path for variable in trained] + ["?"] * len(grads)  # Keras raises when their numbers differ
    present = [i for i, gradient in enumerate(grads) if gradient is not None]
    marked = [mark(jnp.asarray(grads[i]), Mark(Purpose.GRADIENT, paths[i], where)) for i in present]
    totals = dict(zip(present, replica.all_reduce(ReduceOp.SUM, marked), strict=True))
    summed = [totals.get(i) for i in range(len(grads))]
    token = is_library_update.set(True)
    try:
        if not isinstance(optimizer, sys.modules["keras"].optimizers.LossScaleOptimizer):
            return old(optimizer, summed, variables)
        return _apply_scaled(optimizer, {id(v): g for g, v in zip(summed, trained, strict=True)})
    finally:
        is_library_update.reset(token)


def _apply_scaled(optimizer: keras.optimizers.Optimizer, by_variable: dict[int, Any]) -> None:
    """Let a `LossScaleOptimizer` update the variables, through its method without side effects.

    Its `apply` assigns variables inside the branches of a `cond`, which leaks their tracers.
    """
    state, trained = optimizer.variables, keras_parts.trained_by(optimizer)
    gradients = [by_variable.get(id(v)) for v in trained]
    new, new_state = optimizer.stateless_apply([v.value for v in state], gradients, [v.value for v in trained])
    for variable, value in zip([*trained, *state], [*new, *new_state], strict=True):
        variable.assign(value)


def _build_first(optimizer: keras.optimizers.Optimizer, variables: list[Any] | None) -> None:
    """Build an optimizer, and start the trace again: some make their slots in a way that leaks tracers."""

    def build() -> list[Any]:
        with sys.modules["keras"].name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        return optimizer.variables

    if not optimizer.built and variables:
        raise UndiscoveredError([], scope_mesh(), build)
