"""A worker that trains a Keras net by fit and in a loop of its own; it prints what it found.

Arguments: the directory of the checkpoint; "alone" for the same on one device, without a strategy for fit.
"""

import json
import sys
from typing import Any

import keras
import numpy as np

import mirrored as mr

is_alone = sys.argv[2:] == ["alone"]
strategy = mr.OneDeviceStrategy("cpu:0") if is_alone else mr.MultiWorkerMirroredStrategy()

random = np.random.RandomState(0)
x = random.randn(22, 4).astype(np.float32)
y = x.sum(1, keepdims=True)
worker = int(not strategy.is_chief)


def make() -> Any:
    keras.utils.set_random_seed(0 if is_alone else worker)  # only the chief's weights count
    layers = keras.layers
    normal = [layers.Dense(8, use_bias=False), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((4,)), *normal, layers.Dropout(0.2, seed=None if worker else 7), layers.Dense(1)])


found: dict[str, Any] = {"replicas": strategy.num_replicas_in_sync}
with strategy.scope():
    model = make()
model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
np.random.seed(3 if is_alone else 3 + worker)  # Keras shuffles by it: the chief's counts
if is_alone:
    np.random.seed(int(np.random.randint(2**31, dtype=np.int32)))
history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x[:8], y[:8]))
found["history"] = history.history
found["predictions"] = np.asarray(model.predict(x[:5], verbose=0)).ravel().tolist()
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


dataset = strategy.distribute_dataset(strategy.make_numpy_dataset((x, y)).batch(8))  # the last with 6 rows
for batch in dataset:
    strategy.run(step, args=batch)
found["mean"] = float(mean.result())
with mr.Checkpoint(sys.argv[1], model=model, optimizer=optimizer, mean=mean) as checkpoint:
    checkpoint.save(1)
    saved = model.get_weights()
    for batch in dataset:
        strategy.run(step, args=batch)
    found["weights"] = [weight.ravel().tolist() for weight in model.get_weights()]
    checkpoint.wait()
    strategy.barrier("the checkpoint is written")
    assert checkpoint.restore_latest() == 1
assert all(map(np.array_equal, model.get_weights(), saved)) and float(mean.result()) == found["mean"]
history = model.fit(dataset, epochs=1, verbose=0)
found["on a distributed dataset"] = history.history
strategy.assert_mirrored()
if not is_alone:
    try:
        model.fit((x + worker)[:8], y[:8], batch_size=8, verbose=0, epochs=4)
        strategy.barrier("the end")
    except mr.StrategyMismatchError as error:
        found["refused"] = str(error)
print("FOUND" + json.dumps(found), flush=True)
