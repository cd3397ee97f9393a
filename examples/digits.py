"""Train a small convolutional network on real handwritten digits, on all GPUs or on four virtual CPU devices.

    make demo                                  # sets everything up, then runs this file
    make demo-cluster                          # the same on 2 workers with 2 replicas each, by `mirrored launch`
    make demo-cluster ARGS=--kill-one          # one of which is killed on the way
    python examples/digits.py --epochs 10      # in an environment that has the `data` and `examples` extras
    JAX_NUM_CPU_DEVICES=8 python examples/digits.py   # another number of virtual devices

The images are written once as TFRecord shards and read from there. 4 replicas divide neither the last batch of an epoch
nor that of the held-out images; every image counts exactly once all the same. Writes out/digits.png.
With --checkpoints every epoch is saved, and the program goes on after the last one that was.
"""

import argparse
import os
import signal
import time
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")  # before jax starts; ignored where there are GPUs

import grain
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import mirrored as mr

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NUM_SHARDS = 4
NUM_HELD_OUT = 359
GLOBAL_BATCH_SIZE = 120
STEPS_PER_EPOCH = 12
FEATURES = {"image": mr.data.FixedLenFeature((8, 8, 1), np.uint8), "label": mr.data.FixedLenFeature((), np.int32)}


def write_shards(folder: Path) -> dict[str, list[Path]]:
    """Write scikit-learn's digits, images of 0 to 16 in uint8, as `tf.train.Example` records, unless they are there."""
    shards = {
        name: [folder / f"{name}-{i:05d}-of-{NUM_SHARDS:05d}.tfrecord" for i in range(NUM_SHARDS)] for name in ("train", "test")
    }
    if all(path.exists() for paths in shards.values() for path in paths):
        return shards
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    rows = train_test_split(np.arange(len(digits.target)), test_size=NUM_HELD_OUT, stratify=digits.target, random_state=0)
    for paths, members in zip(shards.values(), rows, strict=True):
        for i, path in enumerate(paths):
            images, labels = digits.images.astype(np.uint8)[members[i::NUM_SHARDS]], digits.target[members[i::NUM_SHARDS]]
            examples = [{"image": image.tobytes(), "label": int(label)} for image, label in zip(images, labels, strict=True)]
            mr.data.write_tfrecords(path, map(mr.data.make_example, examples))
    return shards


def batches_of(records: grain.IterDataset) -> grain.IterDataset:
    """Return global batches of (images, labels): images of shape [n, 8, 8, 1] in [0, 1]."""

    def parsed(examples: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        features = mr.data.parse_example(examples, FEATURES)
        return features["image"].astype(np.float32) / 16, features["label"]

    return records.batch(GLOBAL_BATCH_SIZE, batch_fn=list).map(parsed)


def shuffled(files: list[Path], epoch: int) -> grain.IterDataset:
    """Return the records of all files in an order of this epoch's own."""
    return grain.experimental.WindowShuffleIterDataset(mr.data.tfrecord_dataset(files), window_size=2048, seed=epoch)


def initial_weights(key: jax.Array) -> dict[str, jax.Array]:
    """Return He-initialised kernels and zero biases of two convolutions and two dense layers."""
    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "dense1": (4 * 4 * 32, 64), "dense2": (64, 10)}
    weights = {}
    for name, shape in shapes.items():
        key, own = jax.random.split(key)
        weights[name] = jax.random.normal(own, shape) * np.sqrt(2 / np.prod(shape[:-1]))
        weights[f"{name}_bias"] = jnp.zeros(shape[-1])
    return weights


def logits_of(weights: dict, images: jax.Array) -> jax.Array:
    """Apply the network to images of shape [n, 8, 8, 1]."""

    def convolve(x: jax.Array, name: str) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, weights[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y + weights[f"{name}_bias"])

    x = convolve(convolve(images, "conv1"), "conv2")
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ weights["dense1"] + weights["dense1_bias"])
    return x @ weights["dense2"] + weights["dense2_bias"]


def main() -> None:
    """Train, evaluate, check the copies, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--checkpoints", type=Path, help="a folder that all workers share")
    parser.add_argument("--kill-one", action="store_true", help="kill the last worker in the middle of its first attempt")
    arguments = parser.parse_args()
    started = time.perf_counter()

    strategy = mr.MultiWorkerMirroredStrategy()  # one worker, unless something such as `mirrored launch` says otherwise
    if strategy.is_chief:
        write_shards(arguments.out / "digits")
        print(f"{strategy.num_replicas_in_sync} replicas: {', '.join(map(str, strategy.devices))}")
    strategy.barrier("the shards are written")
    shards = write_shards(arguments.out / "digits")
    with strategy.scope():
        weights = {name: mr.Variable(value, name=name) for name, value in initial_weights(jax.random.key(0)).items()}
        optimizer = mr.Optimizer(optax.adam(optax.cosine_decay_schedule(4e-3, arguments.epochs * STEPS_PER_EPOCH)), weights)
        num_right, num_seen = (mr.Variable(0, synchronization="on_read", aggregation="sum") for _ in range(2))

    def train_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            logits = logits_of(jax.tree.map(jnp.asarray, weights), images)
            per_example = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return mr.losses.compute_average_loss(per_example)

        value, gradients = mr.value_and_grad(loss, weights)()
        optimizer.apply_gradients(gradients)
        return value

    def test_step(images: jax.Array, labels: jax.Array) -> None:
        predictions = jnp.argmax(logits_of(jax.tree.map(jnp.asarray, weights), images), axis=-1)
        num_right.assign_add(jnp.sum(predictions == labels))
        num_seen.assign_add(len(labels))

    options = mr.InputOptions(auto_shard_policy="data")  # the same batches on any number of workers; "file" would read less
    held_out = strategy.distribute_dataset(batches_of(mr.data.tfrecord_dataset(shards["test"])), options)

    losses = np.full((arguments.epochs, STEPS_PER_EPOCH), np.nan, np.float32)
    accuracies = np.full(arguments.epochs, np.nan)
    with strategy.scope():
        named = {"weights": weights, "optimizer": optimizer, "losses": losses, "accuracies": accuracies}
        checkpoint = mr.Checkpoint(arguments.checkpoints, **named) if arguments.checkpoints else None
    done = (checkpoint.restore_latest() or 0) if checkpoint else 0
    progress = tqdm(total=losses.size, unit="step", initial=done * STEPS_PER_EPOCH, disable=not strategy.is_chief)
    for epoch in range(done, arguments.epochs):
        steps = []
        for images, labels in strategy.distribute_dataset(batches_of(shuffled(shards["train"], epoch)), options):
            steps.append(strategy.reduce("sum", strategy.run(train_step, args=(images, labels))))
            progress.update()
            if arguments.kill_one and epoch == arguments.epochs // 2 and len(steps) == 4:
                kill_the_last_worker(strategy)
        losses[epoch] = np.stack(steps)
        num_right.assign(0)
        num_seen.assign(0)
        for images, labels in held_out:
            strategy.run(test_step, args=(images, labels))
        accuracies[epoch] = int(num_right) / int(num_seen)
        progress.set_postfix(loss=f"{losses[epoch, -1]:.3f}", accuracy=f"{accuracies[epoch]:.1%}")
        if checkpoint:
            checkpoint.save(epoch + 1)
    progress.close()
    if checkpoint:
        checkpoint.close()
    strategy.assert_mirrored()
    if not strategy.is_chief:
        return

    picture = draw(losses, accuracies, arguments.out)
    print(
        f"trained {losses.size} steps on {strategy.num_replicas_in_sync} replicas in {time.perf_counter() - started:.0f} s: "
        f"{round(accuracies[-1] * NUM_HELD_OUT)} of {NUM_HELD_OUT} held-out images right ({accuracies[-1]:.1%}), "
        f"all copies bit-equal, curves in {picture}"
    )


def kill_the_last_worker(strategy: mr.Strategy) -> None:
    """End the last worker without a word, in the first attempt."""
    is_last = strategy.cluster is not None and strategy.cluster.worker_index == strategy.num_workers - 1
    if is_last and os.environ.get("MIRRORED_ATTEMPT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def draw(losses: np.ndarray, accuracies: np.ndarray, folder: Path) -> Path:
    """Draw the loss of each step and the held-out accuracy of each epoch."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.semilogy(np.arange(1, losses.size + 1) / STEPS_PER_EPOCH, losses.ravel(), linewidth=0.8)
    left.set(xlabel="epoch", ylabel="loss of the global batch", title="Training")
    right.plot(np.arange(1, len(accuracies) + 1), 100 * accuracies, marker="o", markersize=3)
    right.set(xlabel="epoch", ylabel="held-out images right (%)", title=f"Accuracy: {accuracies[-1]:.1%} at the end")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "digits.png"
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    main()
