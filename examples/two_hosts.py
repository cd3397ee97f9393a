"""Train on two hosts; when a machine is lost or preempted, go on from the last checkpoint with the same rows.

    mirrored launch -n 2 --cpu-devices 2 examples/two_hosts.py      # here: two workers with two replicas each
    python examples/two_hosts.py                                    # one worker, with the devices that there are

On two hosts, with GPUs, in a folder that both see; the first host is called gpu-0 here, and 9000 is a free port of it:

    mirrored launch --nnodes 2 --node-rank 0 --coordinator gpu-0:9000 --max-restarts 3 examples/two_hosts.py    # on gpu-0
    mirrored launch --nnodes 2 --node-rank 1 --coordinator gpu-0:9000 --max-restarts 3 examples/two_hosts.py    # on the other

`-n 8` starts eight workers on each host, with one GPU each. docs/clusters.md has the same for Slurm, Kubernetes and others:
nothing in this file names who starts it. Run it again, and it goes on after the last step that was saved.
"""

import argparse
import socket
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored as mr

GLOBAL_BATCH_SIZE = 100


def make_rows(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points of a plane, and whether each is inside of a ring: the same on every worker."""
    points = np.random.default_rng(0).uniform(-1, 1, size=(num_rows, 2)).astype(np.float32)
    return points, (np.abs(np.linalg.norm(points, axis=1) - 0.6) < 0.2).astype(np.float32)


def initial_weights(key: jax.Array, width: int = 64) -> dict[str, jax.Array]:
    """Return He-initialised weights of an MLP with two hidden layers."""
    weights = {}
    for i, shape in enumerate([(2, width), (width, width), (width, 1)]):
        weights[f"kernel{i}"] = jax.random.normal(jax.random.fold_in(key, i), shape) * np.sqrt(2 / shape[0])
        weights[f"bias{i}"] = jnp.zeros(shape[1])
    return weights


def logits_of(weights: dict, points: jax.Array) -> jax.Array:
    """Apply the network to points [n, 2]."""
    x = jax.nn.relu(points @ weights["kernel0"] + weights["bias0"])
    x = jax.nn.relu(x @ weights["kernel1"] + weights["bias1"])
    return (x @ weights["kernel2"] + weights["bias2"])[:, 0]


def main() -> None:
    """Join the cluster, restore, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--checkpoints", type=Path, default=Path("out/two_hosts"), help="a folder that all workers share")
    arguments = parser.parse_args()

    strategy = mr.MultiWorkerMirroredStrategy()  # before anything else uses JAX: it finds the other workers
    here = ", ".join(str(device) for device in strategy.devices if device.process_index == jax.process_index())
    print(f"worker {jax.process_index()} of {strategy.num_workers}, on {socket.gethostname()}, with {here}", flush=True)
    with strategy.scope():
        weights = {name: mr.Variable(value, name=name) for name, value in initial_weights(jax.random.key(0)).items()}
        optimizer = mr.Optimizer(optax.adam(3e-3), weights)
        rows = strategy.make_numpy_dataset(make_rows(arguments.rows)).shuffle(seed=0)
        batches = iter(strategy.distribute_dataset(rows.batch(GLOBAL_BATCH_SIZE).repeat(arguments.epochs)))
        checkpoint = mr.Checkpoint(arguments.checkpoints, weights=weights, optimizer=optimizer, batches=batches)

    def train_step(points: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss() -> tuple[jax.Array, jax.Array]:
            logits = logits_of(jax.tree.map(jnp.asarray, weights), points)
            is_right = ((logits > 0) == (labels > 0)).astype(jnp.float32)
            losses = optax.sigmoid_binary_cross_entropy(logits, labels)
            return losses, mr.losses.compute_average_loss(is_right)

        values, gradients = mr.value_and_grad(loss, weights, has_aux=True)()
        optimizer.apply_gradients(gradients)  # here the workers meet: one all-reduce over all hosts
        return mr.get_replica_context().all_reduce("sum", values)

    first = step = checkpoint.restore_latest() or 0
    value, accuracy = np.nan, np.nan
    with batches, checkpoint, mr.PreemptionHandler(checkpoint) as preemption:  # SIGTERM: all save this step, and leave
        for points, labels in batches:
            value, accuracy = strategy.run(train_step, args=(points, labels))
            step += 1
            if step % 40 == 0:
                checkpoint.save(step)
            if step % 100 == 0 and strategy.is_chief:
                print(f"step {step}: loss {float(value):.3f}, {float(accuracy):.0%} of the batch right", flush=True)
            preemption.after_step(step)
        checkpoint.save(step)
    strategy.assert_mirrored()
    if strategy.is_chief:
        print(
            f"steps {first + 1} to {step} on {strategy.num_replicas_in_sync} replicas of {strategy.num_workers} workers: "
            f"loss {float(value):.3f}, {float(accuracy):.0%} of the last batch right, all copies bit-equal"
        )


if __name__ == "__main__":
    main()
