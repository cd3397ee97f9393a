"""A small net for handwritten digits, in Keras, trained on one device without us, and in a loop with a strategy."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from sklearn.datasets import load_digits

import mirrored as mr

Batches = list[tuple[np.ndarray, np.ndarray]]

losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32).reshape(-1, 8, 8, 1), labels.astype(np.int32)


def batches(sizes: Sequence[int]) -> Batches:
    images, labels = digits()
    ends = np.cumsum(sizes)[:-1]
    return list(zip(np.split(images[: sum(sizes)], ends), np.split(labels[: sum(sizes)], ends), strict=True))


def net(dropout: float = 0.0) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(dropout, seed=1),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def train_alone(rows: Batches, make_optimizer: Callable[[], Any], dropout: float = 0.0) -> keras.Model:
    """Train by Keras' stateless methods and `jax.jit`, as its guide for JAX does."""
    model, optimizer = net(dropout), make_optimizer()
    optimizer.build(model.trainable_variables)
    groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables

    @jax.jit
    def step(trained: Any, others: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(trained: Any) -> Any:
            logits, new = model.stateless_call(trained, others, x, training=True)
            return jnp.mean(losses(y, logits)), new

        gradients, new = jax.grad(loss, has_aux=True)(trained)
        trained, state = optimizer.stateless_apply(state, gradients, trained)
        return trained, new, state

    values = [[variable.value for variable in group] for group in groups]
    for x, y in rows:
        values = step(*values, x, y)
    for group, own in zip(groups, values, strict=True):
        for variable, value in zip(group, own, strict=True):
            variable.assign(value)
    return model


def train(strategy: mr.Strategy, rows: Batches, make_optimizer: Callable[[], Any], dropout: float = 0.0) -> Any:
    """Train in a loop of one's own, as TensorFlow's tutorial does; returns the model, the optimizer and the metric."""
    with strategy.scope():
        model, optimizer = net(dropout), make_optimizer()
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            return mr.losses.compute_average_loss(losses(y, logits))

        value, gradients = mr.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    for batch in strategy.distribute_dataset(rows):
        strategy.run(step, args=batch)
    return model, optimizer, accuracy


def difference(one: keras.Model, other: keras.Model) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one.get_weights(), other.get_weights(), strict=True))
