"""One program, the same for any number of workers: writes what it computed as JSON, for test_semantics.py to compare."""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored as mr

strategy = mr.MultiWorkerMirroredStrategy()
R = strategy.num_replicas_in_sync
worker = strategy.cluster.worker_index if strategy.cluster is not None else 0
found: dict[str, Any] = {}


def plain(value: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64).tolist(), value)


def rows(value: Any) -> Any:
    return plain(strategy.gather(value, axis=0))


def start() -> None:
    with strategy.scope():
        own = mr.Variable(np.full(3, 10.0 + worker), name="own")  # each worker has another value in mind
        tricky = mr.Variable(np.array([-0.0, np.nan, np.inf, 1e-45]) + 0 * worker, name="tricky")
        flags = mr.Variable(np.array([True, worker == 0]), name="flags")
        half = mr.Variable(jnp.arange(3, dtype=jnp.bfloat16) + worker, name="half")
        small = mr.Variable(np.arange(3, dtype=np.int8) + np.int8(worker), name="small")
        wave = mr.Variable(np.array([1 + 2j, -0.0 - 1j]) * (1 + worker), name="wave")
        key = mr.Variable(jax.random.key(worker), name="key")
        made = mr.Variable(lambda: np.float32(worker), name="made")
    found["start"] = [plain(own.value), str(tricky.numpy().view(np.uint32)), plain(flags.value), plain(half.value)]
    found["start"] += [plain(small.value), plain([wave.value.real, wave.value.imag]), plain(jax.random.key_data(key.value))]
    found["start"] += [plain(made.value)]
    own.assign(np.full(3, 20.0 + worker))
    own.assign_add(np.ones(3))
    found["assigned"] = plain(own.value)
    strategy.assert_mirrored()


def verbs() -> None:
    x = strategy.distribute_values_from_function(lambda c: np.arange(4.0) + c.replica_id_in_sync_group)
    ragged = strategy.distribute_values_from_function(
        lambda c: np.full((c.replica_id_in_sync_group, 2), c.replica_id_in_sync_group)
    )
    found["reduce"] = plain([strategy.reduce("sum", x), strategy.reduce("mean", x), strategy.reduce("mean", ragged, axis=0)])
    found["reduce plain"] = plain(
        [strategy.reduce("sum", 2.5), strategy.reduce("mean", np.arange(3)), strategy.gather(np.ones(2), 0)]
    )
    found["gather"] = plain([strategy.gather(x, 0), strategy.gather(ragged, 0)])
    assert len(strategy.local_results(x)) == R // strategy.num_workers
    found["mine"] = plain(jnp.stack(strategy.local_results(x)))
    ids = strategy.run(lambda: mr.get_replica_context().replica_id_in_sync_group)
    found["ids"] = plain(strategy.gather(strategy.run(lambda i: i[None], args=(ids,)), 0))

    def step(x: Any, scale: Any) -> Any:
        context = mr.get_replica_context()
        total = context.all_reduce("sum", {"x": x * scale, "n": 1})
        return total, context.all_gather(x, 0), jax.lax.cumsum(x), jax.random.uniform(context.rng(jax.random.key(7)), (2,))

    total, gathered, own, noise = strategy.run(step, args=(x, np.float32(3)))
    found["run"] = [plain([total, gathered]), rows(own), rows(noise)]


def variables() -> None:
    with strategy.scope():
        seen = mr.Variable(0, synchronization="on_read", aggregation="sum")
        mean = mr.Variable(0.0, synchronization="on_read", aggregation="mean")
        first = mr.Variable(-1.0, aggregation="only_first_replica")

    def step() -> None:
        number = mr.get_replica_context().replica_id_in_sync_group
        seen.assign_add(number)
        mean.assign(number.astype(jnp.float32))
        first.assign(5.0 + number)

    strategy.run(step)
    found["variables"] = plain([seen.value, mean.value, first.value])
    seen.assign(7)
    found["split"] = plain([seen.value, strategy.gather(strategy.run(lambda: seen.value[None]), 0)])


def train(policy: str, num_rows: int) -> None:
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(num_rows, 5)).astype(np.float32), "y": rng.normal(size=(num_rows,)).astype(np.float32)}
    dataset = strategy.make_numpy_dataset(data).shuffle(seed=3).batch(8)
    batches = strategy.distribute_dataset(dataset, mr.InputOptions(auto_shard_policy=policy))
    with strategy.scope():
        w = mr.Variable(np.random.default_rng(worker).normal(size=5).astype(np.float32) if worker else np.ones(5, np.float32))
        optimizer = mr.Optimizer(optax.adam(0.1), [w])

    def step(batch: Any) -> Any:
        def loss() -> Any:
            return mr.losses.compute_average_loss((batch["x"] @ w.value - batch["y"]) ** 2)

        value, grads = mr.value_and_grad(loss, [w])()
        optimizer.apply_gradients(grads)
        return value

    losses = [float(strategy.reduce("sum", strategy.run(step, args=(batch,)))) for _ in range(2) for batch in batches]
    strategy.assert_mirrored()
    found[f"train {policy} {num_rows}"] = [losses, plain(w.value)]


def whole() -> None:
    with strategy.scope():
        total = mr.Variable(0.0)

        @mr.function
        def several(x: Any) -> Any:
            for _ in range(2):
                total.assign_add(strategy.reduce("sum", strategy.run(lambda x: x.sum(), args=(x,))))
            return total.value

    x = strategy.distribute_values_from_function(lambda c: np.ones(2) * c.replica_id_in_sync_group)
    found["function"] = plain([several(x), several(x)])

    def loop(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            total.assign_add(mr.get_replica_context().all_reduce("sum", carry.sum()))
            return carry * 2, carry.sum()

        return mr.scan(body, x, None, length=3)

    final, each = strategy.run(loop, args=(x,))
    found["scan"] = [rows(final), rows(each), plain(total.value)]


start()
verbs()
variables()
train("data", 30)
train("auto", 29)
whole()
strategy.barrier("end")
found["mirrored"] = strategy.num_workers
if strategy.is_chief:
    print("FOUND" + json.dumps(found), flush=True)
sys.stdout.flush()
