"""A worker that trains a Keras net by fit and in a loop of its own; the chief does the same on one device too. Both print it.

Argument: the directory of the checkpoints.
"""

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import mirrored as mr

workers = mr.MultiWorkerMirroredStrategy()
random = np.random.RandomState(0)
x = random.randn(22, 4).astype(np.float32)
y = x.sum(1, keepdims=True)


def make(worker: int) -> Any:
    keras.utils.set_random_seed(worker)  # only the chief's weights count
    layers = keras.layers
    normal = [layers.Dense(8, use_bias=False), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((4,)), *normal, layers.Dropout(0.2, seed=None if worker else 7), layers.Dense(1)])


def trained(strategy: mr.Strategy, worker: int, directory: Path) -> tuple[Any, dict[str, Any]]:
    found: dict[str, Any] = {"replicas": strategy.num_replicas_in_sync}
    with strategy.scope():
        model = make(worker)
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    np.random.seed(3 + worker)  # Keras shuffles by it: the chief's counts
    if strategy is not workers:
        np.random.seed(int(np.random.randint(2**31, dtype=np.int32)))
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x[:8], y[:8]))
    found["history"] = history.history
    found["devices"] = len(model.layers[0].kernel.value.devices())

    model.layers[2].rate = 0.0
    with strategy.scope():
        optimizer, mean = keras.optimizers.SGD(0.05, global_clipnorm=1.0), keras.metrics.Mean()

    def step(x: Any, y: Any) -> None:
        def loss() -> Any:
            error = model(x, training=True) - y
            mean.update_state(error**2)
            return mr.losses.compute_average_loss(error[:, 0] ** 2)

        gradients = mr.value_and_grad(loss, model.trainable_variables)()[1]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    dataset = strategy.distribute_dataset(strategy.make_numpy_dataset((x[:18], y[:18])).batch(6))  # uneven, and one program
    for batch in dataset:
        strategy.run(step, args=batch)
    found["mean"] = float(mean.result())
    with strategy.scope(), mr.Checkpoint(directory, model=model, optimizer=optimizer, mean=mean) as checkpoint:
        checkpoint.save(1)
        saved = model.get_weights()
        for batch in dataset:
            strategy.run(step, args=batch)
        found["weights"] = [weight.ravel().tolist() for weight in model.get_weights()]
        checkpoint.wait()
        strategy.barrier("the checkpoint is written")
        assert checkpoint.restore_latest() == 1
    assert all(map(np.array_equal, model.get_weights(), saved)) and float(mean.result()) == found["mean"]
    strategy.assert_mirrored()
    return model, found


worker = int(not workers.is_chief)
model, found = trained(workers, worker, Path(sys.argv[1], "together"))
if workers.is_chief:
    found["alone"] = trained(mr.OneDeviceStrategy("cpu:0"), 0, Path(sys.argv[1], "alone"))[1]
try:
    model.fit((x + worker)[:8], y[:8], batch_size=8, verbose=0, epochs=4)
    workers.barrier("the end")
except mr.StrategyMismatchError as error:
    found["refused"] = str(error)
print("FOUND" + json.dumps(found), flush=True)
