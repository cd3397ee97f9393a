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

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_parts.files import NUM_HELD_OUT, STEPS_PER_EPOCH, batches_of, shuffled, write_shards
from digits_parts.network import initial_weights, logits_of
from digits_parts.picture import draw
from tqdm import tqdm

import mirrored as mr


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
        weights = {name: mr.Variable(value, name=name) for name, value in initial_weights(np.random.default_rng(2)).items()}
        optimizer = mr.Optimizer(optax.adam(optax.cosine_decay_schedule(4e-3, arguments.epochs * STEPS_PER_EPOCH)), weights)
        num_right, num_seen = (mr.Variable(0, synchronization="on_read", aggregation="sum") for _ in range(2))

    def train_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            logits = logits_of(jax.tree.map(jnp.asarray, weights), images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels)  # one for each example

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


if __name__ == "__main__":
    main()
