"""The training loop of the README: a linear model on two replicas.

python examples/quickstart.py
"""

import numpy as np
import optax

import mirrored as mr

x = np.random.default_rng(0).normal(size=(256, 3)).astype("float32")
y = x @ np.array([1.0, 2.0, 3.0], "float32")

strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])  # omit the list to use every GPU
with strategy.scope():
    w = mr.Variable(np.zeros(3, "float32"))
    optimizer = mr.Optimizer(optax.adam(0.1), [w])


def train_step(x, y):  # one replica's program, on its part of the batch
    return optimizer.minimize(lambda: (x @ w - y) ** 2)  # one loss per example


dataset = strategy.make_numpy_dataset((x, y)).shuffle(seed=0).batch(32).repeat(20)
for batch in strategy.distribute_dataset(dataset):
    loss = strategy.reduce("sum", strategy.run(train_step, args=batch))
print(f"loss {float(loss):.5f}, w {w.numpy().round(2)}")  # w [1. 2. 3.]
