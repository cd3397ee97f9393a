"""Train a Keras net on real handwritten digits, by fit or in a loop of one's own, on all GPUs or four virtual CPU devices.

    python examples/keras_digits.py           # model.fit
    python examples/keras_digits.py --loop    # strategy.run

It needs keras and the `examples` extra. docs/keras.md has the program for one device beside it.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # before keras is imported
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")  # before jax starts; ignored where there are GPUs

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mirrored as mr

GLOBAL_BATCH_SIZE = 120


def make_model():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )


def train_by_fit(strategy, train, test, num_epochs):
    with strategy.scope():
        model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    model.fit(*train, batch_size=GLOBAL_BATCH_SIZE, epochs=num_epochs, verbose=0)
    return model.evaluate(*test, batch_size=GLOBAL_BATCH_SIZE, verbose=0)[1]


def train_in_a_loop(strategy, train, test, num_epochs):
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.Adam(3e-3)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def train_step(x, y):
        def loss():
            return loss_fn(y, model(x, training=True))

        value, gradients = mr.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    def test_step(x, y):
        accuracy.update_state(y, model(x, training=False))

    train_rows = strategy.make_numpy_dataset(train).shuffle(seed=0).batch(GLOBAL_BATCH_SIZE)
    for _ in range(num_epochs):
        for batch in strategy.distribute_dataset(train_rows):
            strategy.run(train_step, args=batch)
    for batch in strategy.distribute_dataset(strategy.make_numpy_dataset(test).batch(GLOBAL_BATCH_SIZE)):
        strategy.run(test_step, args=batch)
    return float(accuracy.result())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    x, test_x, y, test_y = train_test_split(images, labels.astype(np.int32), test_size=359, random_state=0)
    strategy = mr.MirroredStrategy()
    if strategy.devices[0].platform == "cpu":
        strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(int(os.environ["JAX_NUM_CPU_DEVICES"]))])
    train = train_in_a_loop if options.loop else train_by_fit
    accuracy = train(strategy, (x, y), (test_x, test_y), options.epochs)
    print(f"{accuracy:.1%} of the held-out images right, with {strategy.num_replicas_in_sync} replicas")


if __name__ == "__main__":
    main()
