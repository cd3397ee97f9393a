"""Flax Linen on the digits, on two replicas: examples/single_device/linen_digits.py with five lines changed.

python examples/linen_digits.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits

import mirrored as mr

strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])  # omit the list to use every GPU


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(-1, 16 * 16))


class TrainState(train_state.TrainState):
    batch_stats: dict


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return mr.losses.compute_average_loss(losses), updates

    (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, grads = mr.get_replica_context().all_reduce("sum", (loss, grads))
    return state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"]), loss


digits = load_digits()
images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target
cuts = range(50, 1437, 50)  # the last batch has 37 rows
parts = zip(np.split(images[:1437], cuts), np.split(labels[:1437], cuts), strict=True)
batches = [{"image": image, "label": label} for image, label in parts]

net = Net()
variables = net.init(jax.random.key(0), images[:1], train=False)
state = TrainState.create(apply_fn=net.apply, tx=optax.adam(3e-3), **variables)
for epoch in range(3):
    for batch in strategy.distribute_dataset(batches):
        state, loss = strategy.run(train_step, args=(state, batch))
    print(f"epoch {epoch}: loss {float(loss):.4f}")
logits = net.apply({"params": state.params, "batch_stats": state.batch_stats}, images[1437:], train=False)
right = int((jnp.argmax(logits, axis=1) == labels[1437:]).sum())
print(f"{right} of {len(labels) - 1437} held-out images right")
