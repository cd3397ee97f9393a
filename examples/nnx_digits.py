"""Flax NNX on the digits, on two replicas: examples/single_device/nnx_digits.py with five lines changed.

python examples/nnx_digits.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import mirrored as mr

strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])  # omit the list to use every GPU


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.out = nnx.Linear(16 * 16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        return self.out(x.reshape(-1, 16 * 16))


def loss_fn(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return mr.losses.compute_average_loss(losses), logits


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    loss, grads = mr.get_replica_context().all_reduce("sum", (loss, grads))
    optimizer.update(model, grads)
    metrics.update(logits=logits, labels=batch["label"])
    return loss


digits = load_digits()
images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target
cuts = range(50, 1437, 50)  # the last batch has 37 rows
parts = zip(np.split(images[:1437], cuts), np.split(labels[:1437], cuts), strict=True)
batches = [{"image": image, "label": label} for image, label in parts]

model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
metrics = nnx.metrics.Accuracy()
for epoch in range(3):
    metrics.reset()
    for batch in strategy.distribute_dataset(batches):
        loss = strategy.run(train_step, args=(model, optimizer, metrics, batch))
    accuracy = float(metrics.compute())
    print(f"epoch {epoch}: loss {float(loss):.4f}, accuracy {accuracy:.4f}")
model.eval()
right = int((jnp.argmax(model(images[1437:]), axis=1) == labels[1437:]).sum())
print(f"{right} of {len(labels) - 1437} held-out images right")
