"""Keras' layers, losses and metrics in a loop of one's own: what one device has, whatever the replicas and the batches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr

keras = pytest.importorskip("keras")

pytestmark = [
    pytest.mark.usefixtures("in_numpy"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras' variables
]


def test_normalization_sees_the_global_batch_and_dropout_differs_by_replica(strategy3: mr.Strategy) -> None:
    random = np.random.RandomState(0)
    x, mask = random.randn(7, 5, 3).astype(np.float32), random.rand(7, 5) > 0.4
    with strategy3.scope():
        mine = {kind: keras.layers.BatchNormalization() for kind in ("plain", "masked")}
        dropout = keras.layers.Dropout(0.5, seed=3)

    def step(x: Any, mask: Any) -> Any:
        results = {kind: layer(x, training=True, mask=mask if kind == "masked" else None) for kind, layer in mine.items()}
        return results, dropout(np.ones((10, 40), np.float32), training=True)

    dataset = strategy3.distribute_dataset([(x, mask)])  # 3, 2 and 2 rows
    [(results, dropped), (_, again)] = [strategy3.run(step, args=batch) for batch in [*dataset, *dataset]]
    for kind, layer in mine.items():
        seen = x[mask] if kind == "masked" else x.reshape(-1, 3)
        expected = (x - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-3)
        np.testing.assert_allclose(strategy3.gather(results[kind], 0), expected, atol=2e-6)
        np.testing.assert_allclose(layer.moving_mean, 0.0199 * seen.mean(0), atol=1e-6)  # after two steps
    masks = [np.asarray(value) for value in (*dropped.values, *again.values)]
    one = keras.layers.Dropout(0.5, seed=3)
    assert (masks[0] == one(np.ones((10, 40), np.float32), training=True)).all(), "replica 0 has the mask of one device"
    assert len({value.tobytes() for value in masks}) == 6 and all(0.8 < value.mean() < 1.2 for value in masks)
    assert dropout.seed_generator.state.numpy().tolist() == [3, 2]


def test_wrong_recipes_are_refused_and_change_nothing(strategy2: mr.Strategy) -> None:
    """Those that tf.distribute with Keras runs without a word: copies that drift, gradients that are summed twice."""
    with strategy2.scope():
        layer, optimizer = keras.layers.Dense(1), keras.optimizers.SGD(1.0)
        layer.build((None, 2))
        own_mean = keras.Variable(np.zeros(2), trainable=False)
    before = layer.get_weights()
    [x] = strategy2.distribute_dataset([np.arange(8, dtype=np.float32).reshape(4, 2)])

    def gradients(x: Any) -> Any:
        return mr.value_and_grad(lambda: mr.losses.compute_average_loss(layer(x).sum(1)), layer.trainable_variables)()[1]

    def without_sum(x: Any) -> None:
        for variable, gradient in zip(layer.trainable_variables, gradients(x), strict=True):
            variable.assign_sub(gradient)

    def twice(x: Any) -> None:
        summed = mr.get_replica_context().all_reduce("sum", gradients(x))
        optimizer.apply_gradients(zip(summed, layer.trainable_variables, strict=True))

    def new_layer(x: Any) -> Any:
        return keras.layers.Dense(1)(x)

    def local_statistics(x: Any) -> None:
        own_mean.assign(keras.ops.mean(x, axis=0))

    def fails(x: Any) -> None:
        optimizer.apply_gradients(zip(gradients(x), layer.trainable_variables, strict=True))
        raise KeyError("the user's")

    for step, error, message in [
        (without_sum, mr.ReplicasDivergeError, r"variable 'dense\w*/kernel' is mirrored, .* at .*test_keras_layers"),
        (twice, mr.FactorOfReplicasError, r"gradient of variable 'dense\w*/kernel' .* at .*test_keras_layers.* combined over"),
        (new_layer, mr.ContextError, r"makes new Keras variables, such as 'dense\w*/\w+', .* before the step"),
        (local_statistics, mr.ReplicasDivergeError, "may differ by replica"),
        (fails, KeyError, "the user's"),
    ]:
        with pytest.raises(error, match=message):
            strategy2.run(step, args=(x,))
        assert all(map(np.array_equal, before, layer.get_weights())) and int(optimizer.iterations) == 0
    assert optimizer.built and optimizer.learning_rate == 1.0, "built by the steps that failed, and ready"
    strategy2.run(lambda x: optimizer.apply(gradients(x), layer.trainable_variables), args=(x,))
    np.testing.assert_allclose(layer.get_weights()[1], [-1.0])  # the sum of the replicas' gradients of a mean
    with pytest.warns(mr.FactorOfReplicasWarning, match="2 times"):
        strategy2.run(lambda: optimizer.apply([np.zeros((2, 1), np.float32), np.ones(1, np.float32)], layer.trainable_variables))
    np.testing.assert_allclose(layer.get_weights()[1], [-3.0])


def test_losses_constraints_and_mixed_precision_are_as_on_one_device(strategy3: mr.Strategy) -> None:
    def make(dtype: str = "float32") -> Any:
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1", dtype=dtype)
        return keras.Sequential([keras.Input((3,)), dense, keras.layers.Dense(1, kernel_constraint="non_neg")])

    x = np.random.RandomState(0).randn(6, 3).astype(np.float32)
    one = make()
    with strategy3.scope():
        many, optimizer = make(), keras.optimizers.SGD(0.1)

    def loss_of_one(values: Any) -> Any:
        y, _, losses = one.stateless_call(values, [], x, return_losses=True)
        return keras.ops.mean(y**2) + sum(losses)

    gradients = jax.jit(jax.grad(loss_of_one))([variable.value for variable in one.trainable_variables])
    expected = [old - 0.1 * np.asarray(gradient) for old, gradient in zip(one.get_weights(), gradients, strict=True)]
    expected[2] = np.maximum(expected[2], 0)  # the constraint

    def step(x: Any) -> Any:
        def loss() -> Any:
            y = many(x, training=True)
            return mr.losses.compute_average_loss((y**2).sum(1)) + mr.losses.mean_over_own_rows(sum(many.losses))

        value, gradients = mr.value_and_grad(loss, many.trainable_variables)()
        optimizer.apply_gradients(zip(gradients, many.trainable_variables, strict=True))
        return value

    for batch in strategy3.distribute_dataset([x]):
        strategy3.run(step, args=(batch,))
    for own, of_one in zip(many.get_weights(), expected, strict=True):
        np.testing.assert_allclose(own, of_one, atol=1e-6)
    with strategy3.scope():
        mixed = make("mixed_bfloat16")
    hidden, output = strategy3.run(lambda: (mixed.layers[0](x), mixed(x)))
    assert (hidden.dtype, output.dtype, mixed.layers[0].kernel.value.dtype) == ("bfloat16", "float32", "float32")


def test_a_loss_of_keras_is_a_mean_over_own_rows_and_says_so_in_a_word(strategy2: mr.Strategy) -> None:
    x, y = np.cos(np.arange(14, dtype=np.float32)).reshape(7, 2), np.sin(np.arange(7, dtype=np.float32))[:, None]
    mean, each = keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError(reduction=None)

    def update(words: list[Any], optimizer_of: Any = lambda: keras.optimizers.SGD(0.5)) -> list[np.ndarray]:
        with strategy2.scope():
            layers = [keras.layers.Dense(1, kernel_initializer="ones") for _ in words]
            optimizers = [optimizer_of() for _ in words]
            for layer in layers:
                layer.build((None, 2))

        def step(x: Any, y: Any) -> None:
            for word, layer, optimizer in zip(words, layers, optimizers, strict=True):
                gradients = mr.grad(lambda w=word, m=layer, o=optimizer: w(y, m(x), o), layer.trainable_variables)()
                optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))

        for batch in strategy2.distribute_dataset([(x, y)]):  # 4 and 3 rows
            strategy2.run(step, args=batch)
        return [layer.get_weights()[0] for layer in layers]

    expected = 1 - 0.5 * 2 * (x.T @ (x.sum(1, keepdims=True) - y)) / 7
    for found in (
        *update([lambda y, z, _: mr.losses.mean_over_own_rows(mean(y, z)), lambda y, z, _: each(y, z)]),
        *update(
            [lambda y, z, optimizer: optimizer.scale_loss(mr.losses.mean_over_own_rows(mean(y, z)))],
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
        ),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.warns(mr.FactorOfReplicasWarning, match=r"nobody has said.*\n.*\n.*mr\.losses\.mean_over_own_rows\(loss\)"):
        update([lambda y, z, _: mean(y, z)])


class Extreme(keras.metrics.Metric):
    """A metric whose state is written in many ways."""

    def __init__(self, update: Any, **options: Any) -> None:
        super().__init__(name="extreme")
        self.update, self.value = update, self.add_variable((), "zeros", name="value", **options)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, values: Any) -> None:
        self.count.assign_add(keras.ops.cast(keras.ops.size(values), "float32"))
        self.value.assign(self.update(self.value, values))

    def result(self) -> Any:
        return self.value + 0


def initial_max(values: Any) -> Any:
    return jnp.max(values, initial=0.0)


#: Updates of a state, and what one device has after two batches of rows.
SUMS = {
    "added": (lambda old, values: old + keras.ops.sum(values), lambda rows: rows.sum()),
    "added in parts": (
        lambda old, values: jnp.where(values.sum() > 0, values.sum() + old - 1.0 + 1.0, old + 0.0), lambda rows: rows.sum()
    ),
    "added to a cast": (lambda old, values: jnp.reshape(old.value.astype("float32"), ()) + values.sum(), lambda rows: rows.sum()),
}  # fmt: skip
NO_SUMS = {
    "largest": lambda old, values: keras.ops.maximum(old, initial_max(values)),
    "last": lambda old, values: keras.ops.sum(values),
    "moving": lambda old, values: 0.9 * old + 0.1 * keras.ops.sum(values),
    "twice": lambda old, values: old + old + keras.ops.sum(values),
    "taken from": lambda old, values: keras.ops.sum(values) - old,
    "of a count": lambda old, values: old + (keras.ops.sum(values) - old) / 9.0,
}


def test_a_metric_whose_state_is_no_sum_is_refused(strategy3: mr.Strategy) -> None:
    rows = np.random.default_rng(0).uniform(1, 2, size=(9, 2)).astype(np.float32)

    def result(update: Any, **options: Any) -> float:
        with strategy3.scope():
            metric = Extreme(update, **options)
        for batch in strategy3.distribute_dataset([rows[:6], rows[6:8], rows[8:]]):  # in the last some replicas have no rows
            strategy3.run(lambda values, metric=metric: metric.update_state(values), args=(batch,))
        assert float(metric.count.value) == rows.size
        return float(metric.result())

    for name, (update, expected) in SUMS.items():
        np.testing.assert_allclose(result(update), expected(rows), rtol=1e-5, err_msg=name)
    for name, update in NO_SUMS.items():
        with pytest.raises(mr.FactorOfReplicasError, match=r"'extreme\w*/value' of a Keras metric .*only_first_replica.*pmax"):
            result(update), pytest.fail(name)
    largest = lambda old, values: keras.ops.maximum(old, jax.lax.pmax(initial_max(values), "replica"))  # noqa: E731
    assert result(largest, aggregation="only_first_replica") == rows.max()


def test_a_loss_of_keras_that_is_a_mean_takes_a_replica_without_rows(strategy3: mr.Strategy) -> None:
    x = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)

    def loss_of(x: Any) -> Any:
        return keras.losses.MeanSquaredError()(jnp.ones((len(x), 1)), x.sum(1, keepdims=True))

    for rows in (x, x[:2]):
        [batch] = strategy3.distribute_dataset([rows])
        loss = strategy3.run(lambda x: mr.losses.mean_over_own_rows(loss_of(x)), args=(batch,))
        np.testing.assert_allclose(strategy3.reduce("sum", loss), loss_of(rows), rtol=1e-5)
