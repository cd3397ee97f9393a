"""The twenty-line loop of the README: a linear model on two replicas.

python examples/quickstart.py
"""

import jax.numpy as jnp
import numpy as np
import optax

import mirrored as mr

strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])  # leave the list out to take all GPUs
with strategy.scope():
    w = mr.Variable(np.zeros((3, 1)), name="w")
    b = mr.Variable(np.zeros(1), name="b")
    optimizer = mr.Optimizer(optax.adam(0.1), [w, b])


def train_step(x, y):  # one replica's program: its rows, its losses, its gradients
    def loss():
        return jnp.sum((jnp.matmul(x, w) + b - y) ** 2, axis=-1)  # one for each example; nobody divides

    value, gradients = mr.value_and_grad(loss, [w, b])()
    optimizer.apply_gradients(gradients)  # sums the gradients over the replicas
    return value


x = np.random.default_rng(0).normal(size=(256, 3)).astype("float32")
y = x @ np.array([[1.0], [2.0], [3.0]], "float32") + 4.0
batches = strategy.distribute_dataset(strategy.make_numpy_dataset((x, y)).shuffle(seed=0).batch(32))
for epoch in range(20):
    for batch in batches:
        loss = strategy.reduce("sum", strategy.run(train_step, args=batch))
    print(f"epoch {epoch}: loss {float(loss):.5f}")
print(w.numpy().round(2).ravel(), b.numpy().round(2))
