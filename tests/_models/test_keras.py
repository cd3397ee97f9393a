"""Keras is found, and its variables become the strategy's, wherever and whenever they are made."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr

keras = pytest.importorskip("keras")

pytestmark = [
    pytest.mark.usefixtures("in_numpy"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


class Lazy(keras.Model):
    """A model that makes its variables when it is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = keras.layers.Dense(1, kernel_initializer="ones"), keras.layers.BatchNormalization()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.norm(self.dense(x), training=training)


def is_on(strategy: mr.Strategy, *variables: Any) -> bool:
    return all(variable.value.devices() == set(strategy.devices) for variable in variables)


def test_variables_are_taken_over_where_a_step_meets_or_makes_them(strategy3: mr.Strategy) -> None:
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    [batch] = strategy3.distribute_dataset([x])
    with strategy3.scope():
        inside = keras.layers.Dense(1)  # made, and not built
        total = keras.metrics.Mean()
    total.update_state(6.0)  # what was counted already
    outside, optimizer, count = Lazy(), keras.optimizers.SGD(0.01, momentum=0.9), keras.metrics.Mean()
    count.update_state([2.0, 7.0])

    def look(x: Any) -> Any:
        total.update_state(x[:, 0])
        count.update_state(x[:, 0])
        return inside(x), outside(x)

    strategy3.run(look, args=(batch,))
    assert is_on(strategy3, *inside.variables, *outside.variables, *total.variables, *count.variables)
    assert float(total.result()) == pytest.approx((6 + 12) / 5) and float(count.result()) == (9 + 12) / 6
    total.reset_state()
    assert float(total.count.value) == 0.0

    def train(x: Any) -> Any:
        def loss() -> Any:
            return mr.losses.compute_average_loss(((outside(x, training=True) - 1) ** 2).sum(1))

        value, gradients = mr.value_and_grad(loss, outside.trainable_variables)()
        optimizer.apply_gradients(zip(gradients, outside.trainable_variables, strict=True))  # makes its slots
        return value

    function = mr.function(lambda x: strategy3.reduce("sum", strategy3.run(train, args=(x,))))
    first, second = (float(function(batch)) for _ in range(2))
    assert second < first and int(optimizer.iterations) == 2 and is_on(strategy3, *optimizer.variables)
    [even] = strategy3.distribute_dataset([x[:3]])

    def scanned(x: Any) -> Any:
        return mr.scan(lambda carry, x: (carry, train(x)), 0, jnp.stack([x, x]))[1]

    strategy3.run(scanned, args=(even,))
    assert int(optimizer.iterations) == 4
    strategy3.assert_mirrored()
    with pytest.raises(mr.StrategyMismatchError, match=r"kernel' lives on 3 replicas"):
        mr.OneDeviceStrategy("cpu:1").run(lambda x: inside(x), args=(x,))
    with pytest.raises(mr.ContextError, match="under a JAX transformation"):
        jax.jit(lambda: inside.kernel.value + 1)()


def test_gradients_and_optimizers_of_ours_take_keras_variables(strategy2: mr.Strategy) -> None:
    x = np.ones((4, 2), np.float32)
    [batch] = strategy2.distribute_dataset([x])
    with strategy2.scope():
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        layer.build((None, 2))
        optimizer = mr.Optimizer(optax.sgd(1.0), layer.trainable_variables)
    made_before = mr.value_and_grad(
        lambda x: mr.losses.compute_average_loss(layer(x).sum(1)), {"w": layer.kernel, "b": layer.bias}
    )

    def step(x: Any) -> Any:
        gradients = made_before(x)[1]
        optimizer.apply_gradients([(gradients["w"], layer.kernel), (gradients["b"], layer.bias)])
        optimizer.apply_gradients([gradients["w"], gradients["b"]])

    strategy2.run(step, args=(batch,))
    assert np.asarray(layer.kernel.value).ravel().tolist() == [-1.0, -1.0] and float(layer.bias.value[0]) == -2.0

    def stateless(x: Any) -> Any:  # the way of Keras' guide for JAX; its scope hides ours
        values = [variable.value for variable in layer.trainable_variables]
        loss = lambda values: mr.losses.compute_average_loss(layer.stateless_call(values, [], x)[0].sum(1))  # noqa: E731
        layer.kernel.assign(layer.kernel * 2)  # what is not given to the inner scope is read from the step
        return jax.grad(loss)(values), layer(x), made_before(x)[1]["w"]

    [given, _], output, own = strategy2.run(stateless, args=(batch,))
    np.testing.assert_allclose(np.stack(given.values), np.stack(own.values))
    np.testing.assert_allclose(np.stack(output.values), -6.0)
    alone = keras.layers.Dense(1, kernel_initializer="ones")
    alone.build((None, 2))
    value, [gradient, _] = mr.value_and_grad(lambda: keras.ops.sum(alone(x)), alone.trainable_variables)()
    assert float(value) == 8.0 and np.asarray(gradient).ravel().tolist() == [4.0, 4.0]
    lazy = Lazy()

    def builds(x: Any) -> Any:
        return mr.value_and_grad(
            lambda: mr.losses.compute_average_loss(lazy(x, training=True).sum(1)), lazy.trainable_variables
        )()[1]

    assert len(strategy2.run(builds, args=(batch,))) == len(lazy.trainable_variables) == 4
    with pytest.raises(TypeError, match=r"no variables.*before it is built: model.build"):
        mr.value_and_grad(lambda: 0.0, Lazy().trainable_variables)


def test_another_backend_is_refused_in_a_scope_and_a_late_import_is_told(strategy2: mr.Strategy, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(keras.config, "backend", lambda: "numpy")
        with strategy2.scope(), pytest.raises(mr.ContextError, match=r"computes with 'numpy'.*KERAS_BACKEND=jax"):
            keras.layers.Dense(1).build((None, 2))
    monkeypatch.delitem(sys.modules, "keras")
    with pytest.warns(UserWarning, match="keras was imported inside"), strategy2.scope():
        sys.modules["keras"] = keras


def test_state_of_arrays_goes_through_a_stateless_step_and_keras_variables_are_named(strategy3: mr.Strategy) -> None:
    [batch] = strategy3.distribute_dataset([np.arange(8, dtype=np.float32).reshape(4, 2)])
    with strategy3.scope():
        layer, optimizer = keras.layers.Dense(1, kernel_initializer="ones", name="fc"), keras.optimizers.SGD(0.5)
        layer.build((None, 2))
        optimizer.build(layer.trainable_variables)

    def step(weights: Any, slots: Any, x: Any) -> Any:
        loss = lambda weights: mr.losses.compute_average_loss(layer.stateless_call(weights, [], x)[0].sum(1))  # noqa: E731
        return optimizer.stateless_apply(slots, jax.grad(loss)(weights), weights)

    state = [[variable.value for variable in one.variables] for one in (layer, optimizer)]
    [kernel, bias], _ = strategy3.run(step, args=(*state, batch))
    assert np.asarray(kernel).ravel().tolist() == [-0.5, -1.0] and np.asarray(bias).tolist() == [-0.5]
    named = r"the argument `weights\[0\]` is a variable of Keras, 'fc/kernel', and so are 3 more\..*v\.value for v"
    for refused in (step, jax.jit(step)):
        with pytest.raises(TypeError, match=named):
            strategy3.run(refused, args=(layer.variables, optimizer.variables, batch))
    with pytest.raises(TypeError, match=r"was given a variable, at .*test_keras\.py:\d+; these take arrays only, and of Keras'"):
        strategy3.run(lambda: jax.grad(lambda weights: weights[0].sum())(layer.variables))
    assert np.asarray(layer.kernel).ravel().tolist() == [1.0, 1.0], "what passes through a step is no variable"
