"""A worker that goes on from one device's checkpoint with `shard_state=True` and without, and saves the former.

Argument: a folder with the checkpoint `alone`; the worker says what it found as JSON. The test takes the model from here.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored as mr

ROWS = np.random.default_rng(0).normal(size=(22, 5)).astype(np.float32)


class Model:
    """Three variables, the optimizer, and how they train."""

    def __init__(self, strategy: mr.Strategy, **options: bool) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.w = mr.Variable(np.linspace(-1, 1, 40, dtype=np.float32).reshape(5, 8), name="w")
            self.b = mr.Variable(np.full(7, 0.1, np.float32), name="b")
            self.scale = mr.Variable(np.float32(2), name="scale")
            tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
            self.optimizer = mr.Optimizer(tx, [self.w, self.b, self.scale], **options)

    def step(self, x: jax.Array) -> None:
        """Take a step with a replica's rows."""

        def loss() -> jax.Array:
            each = jnp.sum((x @ self.w.value) ** 2, axis=-1) * self.scale.value + jnp.sum(self.b.value**2)
            return mr.losses.compute_average_loss(each)

        self.optimizer.minimize(loss)

    def train(self) -> None:
        """Train an epoch; its last batch has 6 rows instead of 8."""
        rows = self.strategy.make_numpy_dataset(ROWS).batch(8)
        for batch in self.strategy.distribute_dataset(rows):
            self.strategy.run(self.step, args=(batch,))

    def save(self, folder: Path, step: int) -> None:
        """Save all, and wait for it."""
        with mr.Checkpoint(folder, w=self.w, b=self.b, scale=self.scale, optimizer=self.optimizer) as checkpoint:
            checkpoint.save(step)

    def restore(self, folder: Path) -> int | None:
        """Return the step that was restored."""
        with mr.Checkpoint(folder, w=self.w, b=self.b, scale=self.scale, optimizer=self.optimizer) as checkpoint:
            return checkpoint.restore_latest()

    def numbers(self) -> list[np.ndarray]:
        """Return all that is saved, as whole arrays."""
        tree = (self.w, self.b, self.scale, self.optimizer.iterations, self.optimizer.state)
        return [np.asarray(value) for value in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, mr.Variable))]

    def bytes_by_device(self) -> list[int]:
        """Return how much of the optimizer's state each device of this worker holds."""
        state = jax.tree.leaves(self.optimizer.state, is_leaf=lambda x: isinstance(x, mr.Variable))
        shards = [shard for variable in state for shard in variable._array.addressable_shards]
        return [sum(s.data.nbytes for s in shards if s.device == device) for device in jax.local_devices()]


def main(folder: Path) -> None:
    strategy = mr.MultiWorkerMirroredStrategy()
    whole, sharded = Model(strategy), Model(strategy, shard_state=True)
    assert whole.restore(folder / "alone") == sharded.restore(folder / "alone") == 1
    for ours, theirs in zip(whole.numbers(), sharded.numbers(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for model in (whole, sharded):
        model.train()
    strategy.assert_mirrored()
    for ours, theirs in zip(whole.numbers(), sharded.numbers(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
    sharded.save(folder / "workers", 2)
    strategy.barrier("the checkpoint is written")
    again = Model(strategy, shard_state=True)
    assert again.restore(folder / "workers") == 2
    for ours, theirs in zip(again.numbers(), sharded.numbers(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    found: dict[str, Any] = {"whole": whole.bytes_by_device(), "sharded": sharded.bytes_by_device()}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
