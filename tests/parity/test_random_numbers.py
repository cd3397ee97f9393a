"""Each library with dropout and noise beside itself alone on one device: the losses are the same on any number of replicas."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import keras
import numpy as np
import optax
import pytest
from flax import nnx
from parameters import nightly
from strategies import ctx, jit, strategy_of

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

Batch = tuple[np.ndarray, np.ndarray]
SIZES = (24, 25)  # even for 3 and 8 replicas, and one row more


def batches() -> list[Batch]:
    random = np.random.default_rng(0)
    return [(random.normal(size=(n, 4)).astype("f"), random.normal(size=(n, 3)).astype("f")) for n in SIZES]


class Net(nn.Module):
    """Dropout and noise."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dropout(0.5, deterministic=False)(nn.Dense(8)(x))
        return nn.Dense(3)(x + 0.1 * jax.random.normal(self.make_rng("dropout"), x.shape))


def jax_alone(data: list[Batch], strategy: mr.Strategy | None = None) -> list[float]:
    """Train a model of Linen by optax; in a strategy's step with a key by rows."""
    net, tx, losses = Net(), optax.sgd(0.3), []
    weights = net.init({"params": jax.random.key(0), "dropout": jax.random.key(0)}, np.ones((2, 4), "f"))
    errors = lambda w, key, x, y: ((net.apply(w, x, rngs={"dropout": key}) - y) ** 2).mean(1)  # noqa: E731
    if strategy is not None:
        with strategy.scope():
            own = mr.Variable(weights, name="weights")
            optimizer = mr.Optimizer(tx, own)

        def train(key: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
            return optimizer.minimize(lambda: errors(own.value, ctx().rng(key), x, y))

        for number, batch in enumerate(strategy.distribute_dataset(data)):
            losses.append(strategy.reduce("sum", strategy.run(train, args=(jax.random.key(number), *batch))))
        return list(map(float, losses))
    state = tx.init(weights)
    grad = jax.jit(jax.value_and_grad(lambda w, key, x, y: errors(w, key, x, y).mean()))
    for number, batch in enumerate(data):
        loss, gradients = grad(weights, jax.random.key(number), *batch)
        updates, state = tx.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        losses.append(float(loss))
    return losses


def drawn(key: jax.Array, shape: tuple[int, ...], dtype: Any, *_: object) -> jax.Array:
    """Draw first weights by NumPy: XLA compiles the library's for each shape."""
    return jax.numpy.asarray(np.random.default_rng(0).normal(size=shape), dtype)


class Attending(nnx.Module):
    """Dropout of rows and of attention, which has one mask for all rows, each with a stream of its own."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        first = {"kernel_init": drawn, "rngs": rngs}
        self.first, self.last, self.drop = nnx.Linear(4, 8, **first), nnx.Linear(8, 3, **first), nnx.Dropout(0.5, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, 4, dropout_rate=0.5, deterministic=False, decode=False, **first)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.drop(self.first(x))
        return self.last(self.attention(x.reshape(len(x), 2, 4)).reshape(len(x), 8))


def nnx_alone(data: list[Batch], strategy: mr.Strategy | None = None) -> list[float]:
    model, losses = Attending(), []
    optimizer = nnx.Optimizer(model, optax.sgd(0.3), wrt=nnx.Param)
    errors = lambda model, x, y: ((model(x) - y) ** 2).mean(1)  # noqa: E731

    def train(model: Attending, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        loss_of = lambda model: errors(model, x, y).mean()  # noqa: E731
        if strategy is not None:
            loss_of = lambda model: mr.losses.compute_average_loss(errors(model, x, y))  # noqa: E731
        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients if strategy is None else ctx().all_reduce("sum", gradients))
        return loss

    if strategy is not None:
        for batch in strategy.distribute_dataset(data):
            losses.append(float(strategy.reduce("sum", strategy.run(train, args=(model, optimizer, *batch)))))
        return losses
    graph, state = nnx.split((model, optimizer))

    @jit
    def alone(state: nnx.State, x: jax.Array, y: jax.Array) -> tuple[jax.Array, nnx.State]:
        objects = nnx.merge(graph, state)
        return train(*objects, x, y), nnx.state(objects)

    for batch in data:
        loss, state = alone(state, *batch)
        losses.append(float(loss))
    return losses


def keras_alone(data: list[Batch], strategy: mr.Strategy | None = None) -> list[float]:
    """Train by a loop of one's own; alone by Keras' `train_on_batch`."""
    keras.utils.set_random_seed(0)
    layers = keras.layers

    def made() -> Any:
        wide = [layers.Dense(8), layers.Dropout(0.5, seed=1), layers.GaussianNoise(0.1, seed=2)]
        return keras.Sequential([keras.Input((4,)), *wide, layers.Dense(3)])

    if strategy is None:
        model = made()
        model.compile(keras.optimizers.SGD(0.3), loss="mse")
        return [float(model.train_on_batch(*batch)) for batch in data]
    with strategy.scope():
        model, optimizer = made(), keras.optimizers.SGD(0.3)
        optimizer.build(model.trainable_variables)

    def train(x: jax.Array, y: jax.Array) -> jax.Array:
        loss_of = lambda: ((model(x, training=True) - y) ** 2).mean(1)  # noqa: E731
        loss, gradients = mr.value_and_grad(loss_of, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return [float(strategy.reduce("sum", strategy.run(train, args=batch))) for batch in strategy.distribute_dataset(data)]


REPLICAS = [3, *nightly(1, 8)]


@pytest.mark.parametrize("train", [nnx_alone, *nightly(jax_alone, keras_alone)])
@pytest.mark.parametrize("num_replicas", REPLICAS)
def test_a_library_draws_what_it_draws_alone(num_replicas: int, train: Callable[..., list[float]]) -> None:
    """Even and odd rows; each replica has two at least, so that a mask for all rows is known."""
    expected = train(batches())
    np.testing.assert_allclose(train(batches(), strategy_of(num_replicas)), expected, rtol=1e-5)
