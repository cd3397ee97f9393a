"""A tree of arrays on the digits, on two replicas: examples/single_device/tree_digits.py with its state in a variable.

python examples/tree_digits.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mirrored as mr

strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])  # omit the list to use every GPU


def init(key):
    first, second = jax.random.split(key)
    conv = 0.3 * jax.random.normal(first, (3, 3, 1, 16))
    out = 0.06 * jax.random.normal(second, (16 * 16, 10))
    return {"conv": conv, "out": {"w": out, "b": jnp.zeros(10)}}


def apply(params, x):
    layout = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, params["conv"], (1, 1), "SAME", dimension_numbers=layout)
    x = jax.nn.relu(x).reshape(-1, 4, 2, 4, 2, 16).mean((2, 4))
    return x.reshape(-1, 16 * 16) @ params["out"]["w"] + params["out"]["b"]


def train_step(batch):
    def loss_fn():
        logits = apply(params.value, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses  # one for each example

    loss, grads = mr.value_and_grad(loss_fn, params)()
    optimizer.apply_gradients(grads)  # sums the gradients over the replicas
    return loss


digits = load_digits()
images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target
cuts = range(50, 1437, 50)  # the last batch has 37 rows
parts = zip(np.split(images[:1437], cuts), np.split(labels[:1437], cuts), strict=True)
batches = [{"image": image, "label": label} for image, label in parts]

with strategy.scope():
    params = mr.Variable(init(jax.random.key(0)), name="params")
    optimizer = mr.Optimizer(optax.adam(3e-3), params)
for epoch in range(3):
    for batch in strategy.distribute_dataset(batches):
        loss = strategy.reduce("sum", strategy.run(train_step, args=(batch,)))
    print(f"epoch {epoch}: loss {float(loss):.4f}")
logits = apply(params.value, images[1437:])
right = int((jnp.argmax(logits, axis=1) == labels[1437:]).sum())
print(f"{right} of {len(labels) - 1437} held-out images right")
