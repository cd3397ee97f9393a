"""A worker that computes what one device computes; arguments: a folder, and names of PARTS. It says which were right.

Each part returns arrays that must have the same bits on all workers.
"""

import gc
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent.parent))

import mirrored as mr
from mirrored._replicas import division

division.LEAST_BYTES = 16  # of arrays in parts
folder, *parts = sys.argv[1:]
strategy = mr.MultiWorkerMirroredStrategy()
alone = mr.OneDeviceStrategy()
count = strategy.num_replicas_in_sync


class Model:
    """Three variables, an optimizer, and how they train."""

    rows = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)

    def __init__(self, strategy: mr.Strategy, **options: bool) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.w = mr.Variable(np.linspace(-1, 1, 40, dtype=np.float32).reshape(5, 8), name="w")
            self.b = mr.Variable(np.full(7, 0.1, np.float32), name="b")
            self.scale = mr.Variable(np.float32(2), name="scale")
            tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
            self.optimizer = mr.Optimizer(tx, [self.w, self.b, self.scale], **options)

    def train(self) -> None:
        """Train an epoch; 6 rows are uneven on four replicas."""

        def step(x: jax.Array) -> None:
            losses = lambda: jnp.sum((x @ self.w.value) ** 2, axis=-1) * self.scale.value + jnp.sum(self.b.value**2)  # noqa: E731
            self.optimizer.minimize(lambda: mr.losses.compute_average_loss(losses()))

        for batch in self.strategy.distribute_dataset(self.strategy.make_numpy_dataset(self.rows).batch(6)):
            self.strategy.run(step, args=(batch,))

    def checkpoint(self, name: str) -> mr.Checkpoint:
        with self.strategy.scope():
            return mr.Checkpoint(Path(folder, name), w=self.w, b=self.b, scale=self.scale, optimizer=self.optimizer)

    def state(self) -> list[mr.Variable]:
        return jax.tree.leaves(self.optimizer.state, is_leaf=lambda x: isinstance(x, mr.Variable))

    def numbers(self) -> list[np.ndarray]:
        """Return all that is saved, as whole arrays."""
        return list(map(np.asarray, [self.w, self.b, self.scale, self.optimizer.iterations, *self.state()]))

    def bytes_by_device(self) -> list[int]:
        """Return how much of the optimizer's state each device of this worker holds."""
        shards = [shard for variable in self.state() for shard in variable._array.addressable_shards]
        return [sum(s.data.nbytes for s in shards if s.device == device) for device in jax.local_devices()]


def sharded() -> list[Any]:
    """Go on from one device's checkpoint with `shard_state=True` and without, and on one device from the former's."""

    def compare(one: Model, other: Model, **tolerance: float) -> None:
        for ours, theirs in zip(one.numbers(), other.numbers(), strict=True):
            np.testing.assert_allclose(ours, theirs, **tolerance)

    single, whole, parts = Model(alone), Model(strategy), Model(strategy, shard_state=True)
    single.train()
    if strategy.is_chief:
        with single.checkpoint("alone") as checkpoint:
            checkpoint.save(1)
    strategy.barrier("the first checkpoint is written")
    for model in (whole, parts):
        assert model.checkpoint("alone").restore_latest() == 1
    compare(whole, parts, rtol=0, atol=0)
    for model in (single, whole, parts):
        model.train()
    strategy.assert_mirrored()
    compare(whole, parts, rtol=2e-5, atol=2e-6)
    sizes, num_devices = (40, 7, 1), jax.local_device_count()
    assert whole.bytes_by_device() == [4 * (1 + 2 * sum(sizes))] * num_devices
    of_parts = 5 * 2 + 2 + 1  # two of 8 columns, two of 7 and padding; the scale is on each device, as the optimizer's count
    assert count == 4 and parts.bytes_by_device() == [4 * (1 + 2 * of_parts)] * num_devices
    with parts.checkpoint("workers") as checkpoint:
        checkpoint.save(2)
    strategy.barrier("the second checkpoint is written")
    again, back = Model(strategy, shard_state=True), Model(alone)
    for model in (again, back):
        assert model.checkpoint("workers").restore_latest() == 2
    compare(again, parts, rtol=0, atol=0)
    compare(back, single, rtol=1e-4, atol=1e-5)
    return whole.numbers() + again.numbers()


def named() -> list[Any]:
    """Name arrays in several programs; the chief drops the first of them, so it alone has kept nothing then."""
    table, weights = np.full((301, 303), 2, np.float32), jnp.full((301, 303), 3.0)

    def make() -> Callable[[Any], Any]:
        return lambda x: mr.get_replica_context().all_reduce("sum", x.sum() * jnp.asarray(table)[0, 0] * weights[0, 0])

    steps, found = [make() for _ in range(3)], []
    for rows, step in enumerate(steps, 1):
        x = strategy.distribute_values_from_function(lambda context, rows=rows: np.ones(rows, np.float32))
        found.append(strategy.run(step, args=(x,)))
        if strategy.is_chief and rows == 1:
            [strategy._steps.programs.drop(entry) for entry in list(strategy._steps.programs._entries)]
            gc.collect()
    assert list(map(float, found)) == [6.0 * count * rows for rows in (1, 2, 3)]
    alive = [array for array in jax.live_arrays() if array.shape == table.shape]
    places = {shard.data.unsafe_buffer_pointer() for array in alive for shard in array.addressable_shards}
    assert len(places) == 1 + 2 * jax.local_device_count(), "the user's, and what the chief has sent"
    return found


def programs(are_quick: bool) -> list[Any]:
    """Run a third of the table of tests/parity, each program in one way; of those with README's step the first.

    At first half of what XLA compiles soon, later all else.
    The chief compares what it has found with the same by hand, and what all have found is compared to the bit.
    """
    from parity import test_programs as table

    class OnWorkers(table.Way):
        def strategy(self) -> mr.Strategy:
            return strategy

    odd = (2 * count, count + 1)
    ways = {
        "odd": OnWorkers(count, odd, table.one_by_one),
        "function, odd": OnWorkers(count, odd, table.in_a_function),
        "sharded, odd": OnWorkers(count, odd, table.one_by_one, shard_state=True),
        "scan": OnWorkers(count, (2 * count,) * 2, table.in_a_scan),
    }
    table.WAYS.update(ways)
    own = [name for name, program in table.PROGRAMS.items() if name == "Readme" or not program.has_readmes_step()]
    quick = [name for name in own if not table.PROGRAMS[name].is_slow][::2]
    chosen = quick if are_quick else [name for name in own if name not in quick]
    found = []
    for names, way in zip(table.in_groups(chosen, -(-len(chosen) // len(ways))), ways, strict=True):
        print("PROGRAMS", names, way, flush=True)
        found.append(table.check(names, way, is_compared=strategy.is_chief))
    return found


PARTS: dict[str, Callable[[], list[Any]]] = {
    "sharded": sharded, "named": named, "programs": lambda: programs(True), "more_programs": lambda: programs(False),
}  # fmt: skip

for part in parts:
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(PARTS[part]()))
    print("RIGHT", part, zlib.crc32(bits), flush=True)
