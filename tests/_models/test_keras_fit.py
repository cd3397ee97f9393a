"""Keras' own fit, evaluate and predict on all devices of a strategy: the numbers of one device, also with Dropout."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameters import nightly
from strategies import divide_small_arrays

import mirrored as mr

keras = pytest.importorskip("keras")
load_digits = pytest.importorskip("sklearn.datasets").load_digits

pytestmark = [
    pytest.mark.usefixtures("in_numpy"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras' variables
]

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
each_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images, and labels of int64, of which JAX warns when nobody keeps it from that."""
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels


def compiled(model: Any, **options: Any) -> Any:
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=0.1, clipnorm=0.1)
    model.compile(optimizer, LOSS, metrics=["accuracy"], **options)
    return model


def small() -> Any:
    keras.utils.set_random_seed(0)
    kinds = keras.layers
    layers = [kinds.Dense(12, use_bias=False), kinds.BatchNormalization(), kinds.Dropout(0.3, seed=1)]
    return keras.Sequential([keras.Input((64,)), *layers, kinds.Dense(10)])


def fitted(model: Any) -> tuple[Any, Any, Any, Any]:
    """Fit and use a model: its history, evaluation, predictions and weights."""
    images, labels = digits()
    keras.utils.set_random_seed(1)
    validation = images[75:107], labels[75:107]
    history = model.fit(
        images[:75], labels[:75], batch_size=32, epochs=2, validation_data=validation, class_weight={0: 2.0, 1: 0.5}, verbose=0
    )
    evaluation = model.evaluate(*validation, batch_size=32, verbose=0)
    return history.history, evaluation, model.predict(images[:43], batch_size=32, verbose=0), model.get_weights()


def require_equal(own: Any, expected: Any) -> None:
    for a, b in zip(own[3], expected[3], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_allclose(own[2], expected[2], atol=1e-5)
    assert own[1] == pytest.approx(expected[1], rel=1e-5)
    assert {name: pytest.approx(values, rel=1e-5) for name, values in own[0].items()} == expected[0]


@pytest.mark.parametrize(
    ("num_replicas", "options", "storage"),
    [(2, {}, "whole"), *nightly((5, {"steps_per_execution": 2}, "whole"), (2, {}, "parts"))],
)
def test_fit_is_that_of_one_device(
    num_replicas: int, options: dict[str, Any], storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide_small_arrays(monkeypatch, 256)
    with warnings.catch_warnings():  # JAX warns of labels of int64 where no strategy is
        warnings.filterwarnings("ignore", "Explicitly requested dtype int64")
        expected = fitted(compiled(small(), **options))
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], storage=storage)
    with strategy.scope():
        model = compiled(small(), **options)
    assert repr(model.name) not in strategy.explain()
    if num_replicas == 5:
        with pytest.warns(UserWarning, match="batches of 32 rows for 5 replicas.*Use a multiple of 5"):
            own = fitted(model)  # after the scope
    else:
        own = fitted(model)
    require_equal(own, expected)
    assert f"Keras model {model.name!r}: fit, evaluate and predict share" in strategy.explain()
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    assert {len(variable.value.devices()) for variable in variables} == {num_replicas}
    assert all(variable.value.is_fully_replicated for variable in variables) == (storage == "whole")
    strategy.assert_mirrored()


@pytest.mark.slow
def test_a_model_is_trained_by_steps_and_by_fit_in_turns_and_by_distributed_datasets(tmp_path, strategy2: mr.Strategy) -> None:
    images, labels = digits()
    x, y = images[:8], labels[:8].astype(np.int32)

    class Lazy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.drop = keras.layers.Dense(10, kernel_initializer="ones"), keras.layers.Dropout(0.2, seed=1)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.dense(self.drop(x, training=training))

    one = Lazy()
    with strategy2.scope():
        many = Lazy()  # makes its variables in fit, after the scope
    for model in (one, many):
        compiled(model).fit(x, y, batch_size=4, shuffle=False, verbose=0)
    dataset = strategy2.distribute_dataset(strategy2.make_numpy_dataset((x[:7], y[:7])).batch(4))  # 2 + 2 rows and 2 + 1
    again = many.fit(dataset, validation_data=dataset, verbose=0).history
    options = {"batch_size": 4, "verbose": 0}
    expected = one.fit(x[:7], y[:7], shuffle=False, validation_data=(x[:7], y[:7]), **options).history
    assert {name: pytest.approx(values, rel=1e-5) for name, values in again.items()} == expected
    np.testing.assert_allclose(many.predict(dataset, verbose=0), one.predict(x[:7], **options), atol=1e-5)

    optimizer = many.optimizer

    def step(x: Any, y: Any) -> None:
        def loss() -> Any:
            return mr.losses.compute_average_loss(each_loss(y, many(x, training=True)))

        gradients = mr.value_and_grad(loss, many.trainable_variables)()[1]
        optimizer.apply_gradients(zip(gradients, many.trainable_variables, strict=True))

    strategy2.run(step, args=next(iter(dataset)))

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt

    path = tmp_path / "m.weights.h5"
    slower = keras.callbacks.LearningRateScheduler(lambda epoch: 1e-3)
    callbacks = [keras.callbacks.ModelCheckpoint(path, save_weights_only=True), keras.callbacks.EarlyStopping(patience=1), slower]
    many.fit(x, y, validation_split=0.5, sample_weight=np.ones(8, np.float32), callbacks=callbacks, **options)
    one.load_weights(path)
    assert float(optimizer.learning_rate) == np.float32(1e-3)
    assert all(map(np.array_equal, one.get_weights(), many.get_weights()))
    with pytest.raises(KeyboardInterrupt):
        many.fit(x, y, callbacks=[Stop()], **options)
    assert int(optimizer.iterations) == 2 + 2 + 1 + 1 + 1, "what was done is kept"
    with pytest.raises(ValueError):  # of Keras
        many.fit(x, np.zeros((8, 7, 3)), **options)
    assert int(optimizer.iterations) == 7 and many.train_on_batch(x[:4], y[:4])[0] > 0
    strategy2.assert_mirrored()


def test_weights_of_classes_are_the_third_element_of_a_distributed_dataset(strategy3: mr.Strategy) -> None:
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    y, of_class, weights = (x[:, 0] > 0).astype(np.int32), {0: 1.0, 1: 3.0}, np.array([1.0, 3.0])
    batches = strategy3.make_numpy_dataset((x, y)).batch(5)
    dataset = strategy3.distribute_dataset(lambda: iter(batches))  # a function for each epoch, too
    found = []
    for data, options in (
        ((x, y), {"class_weight": of_class, "batch_size": 5, "shuffle": False}),
        ((dataset.map(lambda x, y: (x, y, weights[y])),), {}),
    ):
        keras.utils.set_random_seed(0)
        with strategy3.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with warnings.catch_warnings(action="ignore"):  # batches that the replicas do not divide
            model.fit(*data, **options, epochs=2, verbose=0)
        found.append(model.get_weights()[0])
    np.testing.assert_allclose(*found, rtol=1e-5)
    with pytest.raises(ValueError, match=r"class_weight; .*dataset\.map\(lambda x, y: \(x, y, weights\[y\]\)\)"):
        model.fit(dataset, class_weight=of_class, verbose=0)


def test_what_would_train_elsewhere_is_refused(strategy2: mr.Strategy, strategy3: mr.Strategy) -> None:
    def make() -> Any:
        return compiled(keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)]))

    images, labels = digits()
    x, y = images[:6], labels[:6].astype(np.int32)
    with strategy2.scope():
        model = make()
    dataset, foreign = (strategy.distribute_dataset([(x, y)]) for strategy in (strategy2, strategy3))
    with pytest.raises(mr.StrategyMismatchError, match=r"distributed over 3 replicas .* lives on 2 replicas"):
        model.fit(foreign, verbose=0)
    with pytest.raises(ValueError, match=r"Unrecognized data type: x=DistributedDataset"):  # Keras' own: here nothing is replaced
        make().fit(dataset, verbose=0)
    with pytest.raises(ValueError, match=r"fit got a distributed dataset and class_weight; expected the dataset alone"):
        model.fit(dataset, class_weight={0: 1.0}, verbose=0)
    with pytest.raises(ValueError, match=r"fit got a distributed dataset and sample_weight; expected the dataset alone"):
        model.fit(dataset, sample_weight=np.ones(6), verbose=0)
    with pytest.raises(ValueError, match=r"fit got a distributed dataset and positional arguments.* by their names"):
        model.fit(dataset, None, verbose=0)
    with (
        strategy3.scope(),
        pytest.raises(mr.StrategyMismatchError, match=r"lives on 2 .*scope of a strategy on 3 .*Leave the scope"),
    ):
        model.fit(x, y, verbose=0)
    outside = make()
    with strategy3.scope():
        outside.fit(x, y, verbose=0)  # taken over
    assert {len(variable.value.devices()) for variable in outside.variables} == {3}


def test_the_page_is_the_program_for_one_device_and_four_marked_lines() -> None:
    page = (Path(__file__).parents[2] / "docs" / "keras.md").read_text()
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].splitlines()
    marks = [line.partition("  # ")[2] for line in program if re.search(r"  # (new|indented)$", line)]
    assert sorted(marks) == ["indented", "new", "new", "new"]
    one = [line for line in program if not line.endswith("# new")]
    alone = "\n".join(line.strip() if line.endswith("# indented") else line for line in one)
    assert re.search(r"strategy|\bmr\b", alone) is None
    compile(alone, "keras.md", "exec")


def test_a_dataset_without_a_step_is_an_error_of_fit_and_a_warning_for_validation(strategy2: mr.MirroredStrategy) -> None:
    """In the place of a bare StopIteration, or of a variable inside of Keras that has no value."""
    x, y = digits()
    none, some = strategy2.distribute_dataset([]), strategy2.distribute_dataset([(x[:4], y[:4])])
    with strategy2.scope():
        model = compiled(small())
    for verb in (model.evaluate, model.fit, model.predict):
        message = rf"^model\.{verb.__name__} got a dataset that makes no step\. A warning before"
        with pytest.warns(UserWarning, match="no step was made in") as said, pytest.raises(ValueError, match=message):
            verb(none, verbose=0)
        assert [warning.filename for warning in said] == [__file__]
        if verb == model.evaluate:
            model.build((None, *x.shape[1:]))  # after this Keras alone would fail elsewhere
    with pytest.warns(UserWarning, match="no step was made|ran out of data"):  # the second is Keras' own
        history = model.fit(some, validation_data=none, verbose=0, epochs=2, steps_per_epoch=3).history
    assert np.isfinite(history["loss"]).all() and len(history["loss"]) == 2
