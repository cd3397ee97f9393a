"""What one worker may do alone, and arrays that differ; the argument is a folder."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored as mr

strategy = mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(timeout_seconds=5))
assert strategy.cluster is not None
worker = strategy.cluster.worker_index
with strategy.scope():
    v = mr.Variable(np.arange(4, dtype=np.float32).reshape(2, 2), name="v")
    key = mr.Variable(jax.random.key(1), name="key")
    count = mr.Variable(0.0, synchronization="on_read", aggregation="sum", name="count")
    own = mr.Variable(0.0, synchronization="on_read", name="own")
    optimizer = mr.Optimizer(optax.adam(0.1), [v])
    checkpoint = mr.Checkpoint(sys.argv[1], v=v, count=count)
x = strategy.distribute_values_from_function(lambda context: np.ones((2, 2), np.float32))
uneven = strategy.distribute_values_from_function(lambda context: np.ones(1 + context.replica_id_in_sync_group))
dataset = strategy.distribute_dataset(strategy.make_numpy_dataset(np.arange(8)).batch(4))
iterator = iter(dataset)
next(iterator)


def step(x: Any) -> Any:
    count.assign_add(x.sum())
    optimizer.apply_gradients([x], aggregate="sum")
    return x.sum(), v.value.sum()


own_total, one = strategy.run(step, args=(x,))


def created() -> mr.Variable:
    with strategy.scope():
        return mr.Variable(1.0)


#: None of these reaches the others.
ALONE: dict[str, Callable[[], Any]] = {
    "print variables": lambda: f"{v!r} {v} {key} {count} {own}",
    "print values": lambda: f"{x!r} {uneven} {own_total} {one}",
    "print the rest": lambda: f"{strategy} {strategy.cluster} {dataset} {checkpoint} {optimizer} {strategy.explain()}",
    "read": lambda: [v.value, v.numpy(), float(v[0, 0]), np.asarray(v), list(v), len(v), v.shape, jax.device_get(v.value)],
    "compute": lambda: [v + 1, v @ v, jnp.mean(v.value), v.value + jnp.ones(2), v.value + np.ones(2)],
    "predict": lambda: jax.jit(lambda w, data: data @ w)(v.value, np.ones((3, 2), np.float32)),
    "results": lambda: [float(one), x.values, jax.tree.map(lambda a: a * 2, x), uneven.shapes],
    "local results": lambda: [strategy.local_results(value) for value in (x, uneven, v, count, own, key)],
    "input": lambda: [len(dataset), iterator.get_state(), dataset.describe(), iter(dataset).close()],
    "checkpoints": checkpoint.steps,
    "local strategy": lambda: mr.MirroredStrategy().run(lambda: mr.get_replica_context().all_reduce("sum", 1)),
    "local variable": lambda: mr.Variable(1.0) + 1,
    "local function": lambda: mr.function(lambda a: a + 1)(np.ones(2)),
}  # fmt: skip

#: All do these, and each has another number.
DIFFERENT: dict[str, Callable[[], Any]] = {
    "assigned": lambda: v.assign(v.value * (1.0 + worker)),
    "initial": lambda: created_from(v.value * (1.0 + worker)),
    "closed over": lambda: closed_over(v.value * (1.0 + worker)),
    "closed over by a function": lambda: function_of(v.value * (1.0 + worker)),
    "argument": lambda: strategy.run(scaled, args=(x,), kwargs={"by": [one, v.value * (1.0 + worker)]}),
    "another name of the placement": lambda: strategy.run(lambda y: y + 1, args=(renamed(v.value * (1.0 + worker)),)),
    "argument of a function": lambda: mr.function(lambda a: strategy.reduce("sum", a))(v.value * (1.0 + worker)),
}


def created_from(value: Any) -> mr.Variable:
    with strategy.scope():
        return mr.Variable(value)


def scaled(x: Any, by: list[Any]) -> Any:
    return x * by[0] * by[1]


def renamed(value: Any) -> Any:
    return jax.device_put(value, jax.sharding.NamedSharding(value.sharding.mesh, jax.sharding.PartitionSpec(None, None)))


def closed_over(value: Any) -> Any:
    return strategy.run(lambda x: x + value, args=(x,))


def function_of(value: Any) -> Any:
    return mr.function(lambda x: strategy.reduce("sum", strategy.run(lambda x: x, args=(x,))) + value)(x)


for name, act in ALONE.items() if strategy.is_chief else ():
    jax.block_until_ready(act())
    print("DID", name, flush=True)
for name, act in DIFFERENT.items():
    try:
        act()
        strategy.barrier("see it now")
    except mr.ReplicasDivergeError as error:
        print(f"REFUSED {name}: {error}", flush=True)
v.assign(np.zeros((2, 2)))
for _ in range(3):
    strategy.run(step, args=(x,))
strategy.barrier("end")
strategy.assert_mirrored()
checkpoint.close()
print("END", len(ALONE), flush=True)
