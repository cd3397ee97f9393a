"""A tree of arrays on the digits, on one device: what examples/tree_digits.py changes.

python examples/single_device/tree_digits.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


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


@jax.jit
def train_step(params, opt_state, batch):
    def loss_fn(params):
        logits = apply(params, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


digits = load_digits()
images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target
cuts = range(50, 1437, 50)  # the last batch has 37 rows
parts = zip(np.split(images[:1437], cuts), np.split(labels[:1437], cuts), strict=True)
batches = [{"image": image, "label": label} for image, label in parts]

params = init(jax.random.key(0))
tx = optax.adam(3e-3)
opt_state = tx.init(params)
for epoch in range(3):
    for batch in batches:
        params, opt_state, loss = train_step(params, opt_state, batch)
    print(f"epoch {epoch}: loss {float(loss):.4f}")
logits = apply(params, images[1437:])
right = int((jnp.argmax(logits, axis=1) == labels[1437:]).sum())
print(f"{right} of {len(labels) - 1437} held-out images right")
