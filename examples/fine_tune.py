"""Train on four replicas; go on with other images on three: the checkpoint does not know the number of replicas.

    python examples/fine_tune.py             # a quarter of a minute on two cores; writes out/fine_tune.png

A network learns handwritten digits from 900 images. Then another camera comes, whose images are one pixel to the right, and 48
of them have labels. On three replicas, with a new optimizer, the weights go on from the checkpoint; beside it they start anew.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits

import mirrored as mr

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DEVICES = [f"cpu:{i}" for i in range(4)]  # or "gpu:0" to "gpu:3"


def make_weights(seed: int) -> dict[str, mr.Variable]:
    """Make the variables of two convolutions and two dense layers. Call it in a scope."""
    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "dense1": (4 * 4 * 32, 64), "dense2": (64, 10)}
    weights, random = {}, np.random.default_rng(seed)
    for name, shape in shapes.items():
        weights[name] = mr.Variable(np.float32(random.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1]))), name=name)
        weights[f"{name}_bias"] = mr.Variable(np.zeros(shape[-1], np.float32), name=f"{name}_bias")
    return weights


def logits_of(weights: dict, images: jax.Array) -> jax.Array:
    """Apply the network to images of shape [n, 8, 8, 1]."""
    x = images
    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(x, weights[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + weights[f"{name}_bias"])
    x = x.reshape(-1, 4, 2, 4, 2, 32).max(axis=(2, 4))
    x = jax.nn.relu(x.reshape(-1, 4 * 4 * 32) @ weights["dense1"] + weights["dense1_bias"])
    return x @ weights["dense2"] + weights["dense2_bias"]


def train(strategy: mr.Strategy, weights: dict, optimizer: mr.Optimizer, rows: tuple, size: int, held_out: tuple) -> list[float]:
    """Train 20 epochs in batches of a size; return the share of held-out images that are right before and after each."""

    def train_step(images: jax.Array, labels: jax.Array) -> None:
        def loss() -> jax.Array:
            logits = logits_of(jax.tree.map(jnp.asarray, weights), images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

        optimizer.apply_gradients(mr.grad(loss, weights)())

    def test_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        predicted = jnp.argmax(logits_of(jax.tree.map(jnp.asarray, weights), images), axis=1)
        return mr.losses.compute_average_loss((predicted == labels).astype(jnp.float32))

    batches = strategy.distribute_dataset(strategy.make_numpy_dataset(rows).shuffle(seed=0).batch(size))
    [test] = strategy.distribute_dataset([held_out])
    accuracies = [strategy.reduce("sum", strategy.run(test_step, args=test))]
    for _ in range(20):
        for batch in batches:
            strategy.run(train_step, args=batch)
        accuracies.append(strategy.reduce("sum", strategy.run(test_step, args=test)))
    strategy.assert_mirrored()
    return [float(accuracy) for accuracy in accuracies]


def main() -> None:
    """Train, save, restore the weights on another number of replicas, train on, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    moved = np.roll(images, 1, axis=2)
    four, three, accuracies = mr.MirroredStrategy(DEVICES), mr.MirroredStrategy(DEVICES[:3]), {}
    with tempfile.TemporaryDirectory() as folder:
        with four.scope():
            weights = make_weights(seed=0)
            optimizer = mr.Optimizer(optax.adam(2e-3), weights)
            checkpoint = mr.Checkpoint(folder, weights=weights, optimizer=optimizer)
        first = train(four, weights, optimizer, (images[:900], labels[:900]), 60, (images[950:], labels[950:]))
        with checkpoint:
            checkpoint.save(1)

        for start in ("from the checkpoint", "from nothing"):
            with three.scope():
                weights = make_weights(seed=1)
                if start == "from the checkpoint":
                    mr.Checkpoint(folder, weights=weights).restore_latest(partial=True)  # leaves the old optimizer there
                optimizer = mr.Optimizer(optax.adam(2e-3), weights)
            few, held_out = (moved[900:948], labels[900:948]), (moved[950:], labels[950:])
            accuracies[start] = train(three, weights, optimizer, few, 24, held_out)

    ends = ", ".join(f"{values[-1]:.1%} {start}" for start, values in accuracies.items())
    print(f"on 4 replicas {first[-1]:.1%} of the held-out images right; moved, on 3 replicas: {ends}")
    print(f"curves in {draw(accuracies, arguments.out)}")


def draw(accuracies: dict[str, list[float]], folder: Path) -> Path:
    """Draw how many held-out images are right after each epoch."""
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for start, values in accuracies.items():
        axes.plot([100 * value for value in values], marker="o", markersize=3, label=start)
    axes.set(xlabel="epoch", ylabel="images right (%)", title="48 images of another camera, 3 replicas", xticks=range(0, 21, 5))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(path := folder / "fine_tune.png", dpi=120)
    return path


if __name__ == "__main__":
    main()
