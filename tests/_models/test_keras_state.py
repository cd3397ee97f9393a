"""Keras' objects are saved and restored: by mr.Checkpoint, by Keras itself, and copied."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mirrored as mr

keras = pytest.importorskip("keras")

pytestmark = [
    pytest.mark.usefixtures("in_numpy"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def test_a_model_goes_on_where_it_was_saved(tmp_path: Path, strategy2: mr.Strategy) -> None:
    x = np.random.RandomState(0).randn(8, 3).astype(np.float32)

    def make() -> Any:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
        optimizer, mean = keras.optimizers.Adam(0.1), keras.metrics.Mean()
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")

        def step(x: Any) -> Any:
            def loss() -> Any:
                y = model(x, training=True)
                mean.update_state(y)
                return mr.losses.compute_average_loss((y**2).sum(1))

            gradients = mr.value_and_grad(loss, model.trainable_variables)()[1]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        return model, optimizer, mean, step

    def train(step: Any) -> None:
        for batch in strategy2.distribute_dataset([x, x]):
            strategy2.run(step, args=(batch,))

    with strategy2.scope():
        model, optimizer, mean, step = make()
        again = make()  # the variables of which Keras gives other numbers
    train(step)
    held, saved = model.layers[0].kernel.value, model.get_weights()
    with mr.Checkpoint(tmp_path / "c", model=model, optimizer=optimizer, metric=mean) as checkpoint:
        checkpoint.save(1)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    total = float(mean.total.value)
    train(step)
    later = model.get_weights()
    assert np.array_equal(held, saved[0]) and not np.array_equal(later[0], saved[0])

    with mr.Checkpoint(tmp_path / "c", model=again[0], optimizer=again[1], metric=again[2]) as checkpoint:
        assert checkpoint.restore_latest() == 1
    assert float(again[2].total.value) == total
    train(again[3])
    assert all(map(np.array_equal, again[0].get_weights(), later)), "seeds and slots too"

    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert all(map(np.array_equal, loaded.get_weights(), saved)) and int(loaded.optimizer.iterations) == 2
    assert len(loaded.layers[0].kernel.value.devices()) == 1, "outside of the scope"
    model.load_weights(tmp_path / "model.weights.h5")
    assert all(map(np.array_equal, model.get_weights(), saved))
    train(step)
    model.set_weights(later)
    kernel = model.layers[0].kernel
    for other in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):  # noqa: S301
        assert type(other) is keras.Variable and np.array_equal(other.value, later[0])
        other.assign(other * 0)
    assert np.array_equal(kernel.value, later[0])
    strategy2.assert_mirrored()


def test_what_has_no_state_yet_is_refused(tmp_path: Path, strategy2: mr.Strategy) -> None:
    with strategy2.scope():
        lazy, optimizer = keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.Adam()
    for objects, message in [
        ({"model": lazy}, r"has not made its variables yet. Build it first.*model.build\(input_shape\)"),
        ({"optimizer": optimizer}, r"Build it first.*optimizer.build\(model.trainable_variables\)"),
        ({"model": keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])}, r"belongs to no strategy. Make the model"),
    ]:
        with pytest.raises(TypeError, match=message):
            mr.Checkpoint(tmp_path, **objects)
