"""A worker that adds up and trains in each way of `cross_device_ops`, and compares with XLA's all-reduce."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored as mr

#: Large enough to be scattered; no number of replicas divides it.
SIZE = 9001
ROWS = np.random.default_rng(0).normal(size=(7, 120)).astype(np.float32)
WAYS = [None, mr.HierarchicalCopyAllReduce(), mr.HierarchicalCopyAllReduce(2), mr.ReductionToOneDevice()]


def found(strategy: mr.Strategy) -> list[np.ndarray]:
    """Return sums of large values, and what an uneven step has trained."""
    with strategy.scope():
        w = mr.Variable(np.full((120, 80), 0.1, np.float32), name="w")
        optimizer = mr.Optimizer(optax.sgd(1e-3), w)

    def step(x: jax.Array) -> None:
        optimizer.minimize(lambda: mr.losses.compute_average_loss(jnp.sum((x @ w.value) ** 2, axis=1)))

    def add(x: jax.Array) -> list[jax.Array]:
        return mr.get_replica_context().all_reduce("sum", [x, (100 * x).astype(jnp.int32), x[:3]])

    rng = np.random.default_rng(1)
    values = [rng.normal(size=SIZE).astype(np.float32) for _ in range(strategy.num_replicas_in_sync)]
    x = strategy.distribute_values_from_function(lambda ctx: values[ctx.replica_id_in_sync_group])
    for batch in strategy.distribute_dataset([ROWS]):
        strategy.run(step, args=(batch,))
    results = [*strategy.run(add, args=(x,)), strategy.reduce("sum", x)]
    strategy.assert_mirrored()
    for result in results[:3]:
        assert len({np.asarray(shard.data).tobytes() for shard in result.addressable_shards}) == 1
    return [np.asarray(value) for value in (*results, w)]


def main() -> None:
    strategies = [mr.MultiWorkerMirroredStrategy(cross_device_ops=ops) for ops in WAYS]
    expected, *others = map(found, strategies)
    for other in others:
        for ours, theirs in zip(other, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    bits = [hashlib.sha256(b"".join(value.tobytes() for value in each)).hexdigest() for each in others]
    explained = strategies[1].explain()
    assert "by mr.HierarchicalCopyAllReduce(num_packs=1)" in explained.splitlines()[-1], explained
    largest = mr.ReductionToOneDevice(accumulation_fn=lambda rows: jnp.stack(rows).max(axis=0))
    strategy = mr.MultiWorkerMirroredStrategy(cross_device_ops=largest)
    number = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
    assert int(strategy.reduce("sum", number)) == strategy.num_replicas_in_sync - 1
    print(json.dumps(bits), flush=True)


if __name__ == "__main__":
    main()
