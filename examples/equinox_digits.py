"""Equinox on the digits, on two replicas: examples/single_device/equinox_digits.py with five lines changed.

python examples/equinox_digits.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mirrored as mr

strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])  # omit the list to use every GPU


class Net(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    pool: eqx.nn.AvgPool2d
    out: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 16, 3, padding=1, use_bias=False, key=first)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.pool = eqx.nn.AvgPool2d(2, 2)
        self.out = eqx.nn.Linear(16 * 16, 10, key=second)

    def __call__(self, x, state):
        x, state = self.norm(self.conv(x), state)
        return self.out(self.pool(jax.nn.relu(x)).reshape(-1)), state


def loss_fn(model, state, batch):
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = batched(batch["image"], state)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return mr.losses.compute_average_loss(losses), state


@eqx.filter_jit
def train_step(model, state, opt_state, batch):
    (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, state, batch)
    loss, grads = mr.get_replica_context().all_reduce("sum", (loss, grads))
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), state, opt_state, loss


digits = load_digits()
images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target
cuts = range(50, 1437, 50)  # the last batch has 37 rows
parts = zip(np.split(images[:1437], cuts), np.split(labels[:1437], cuts), strict=True)
batches = [{"image": image, "label": label} for image, label in parts]

model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
optimizer = optax.adam(3e-3)
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
for epoch in range(3):
    for batch in strategy.distribute_dataset(batches):
        model, state, opt_state, loss = strategy.run(train_step, args=(model, state, opt_state, batch))
    print(f"epoch {epoch}: loss {float(loss):.4f}")
logits, _ = jax.vmap(eqx.nn.inference_mode(model), in_axes=(0, None), out_axes=(0, None))(jnp.asarray(images[1437:]), state)
right = int((jnp.argmax(logits, axis=1) == labels[1437:]).sum())
print(f"{right} of {len(labels) - 1437} held-out images right")
