"""A worker of a job whose workers do not do the same: arguments are the limit of time, and the mistakes, one after the other.

"alone" is no mistake: what one worker may do without the others.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flips import flip

import mirrored as mr
from mirrored._variables import equal_copies

strategy = mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(timeout_seconds=float(sys.argv[1])))
assert strategy.cluster is not None
worker = strategy.cluster.worker_index
is_last = worker == strategy.num_workers - 1
with strategy.scope():
    variable = mr.Variable(0.0, name="variable")
    frozen = mr.Variable(3.0, name="frozen")
    counters = [mr.Variable(0.0, synchronization="on_read", aggregation="sum") for _ in range(2)]
    key = mr.Variable(jax.random.key(1), name="key")
x = strategy.distribute_values_from_function(lambda context: np.ones(3, np.float32))


uneven = strategy.distribute_values_from_function(lambda context: np.ones(1 + context.replica_id_in_sync_group))
own = jnp.full(3, float(worker))
table = np.arange(3.0, dtype=np.float32) + worker


def add(x: Any) -> Any:
    return mr.get_replica_context().all_reduce("sum", x)


def twice(x: Any) -> Any:
    return add(x * 2.0)


def average(x: Any) -> Any:
    return mr.get_replica_context().all_reduce("mean", x[:2])  # gloo aborts where it meets the sum of another size


@jax.jit
def scaled(x: Any) -> Any:
    return x * own


@jax.jit
def scanned(x: Any) -> Any:
    return jax.lax.scan(lambda total, row: (total + row, None), x, table)[0]


def run(function: Callable[..., Any], *args: Any) -> Any:
    return strategy.run(function, args=args)


def in_a_step(what: Callable[[], Any]) -> None:
    """Let the others run a program that all know while the chief does something else."""
    run(add, x)
    if strategy.is_chief:
        what()
    run(add, x)


def fail_in_the_middle() -> None:
    for number in range(10):
        if number == 5 and is_last:
            raise ValueError("the data is gone")
        run(add, x)


mistakes: dict[str, Callable[[], Any]] = {
    "argument": lambda: run(add, np.full(3, float(worker), np.float32)),
    "closed-over array": lambda: run(lambda: add(own)),
    "array in an inner jit": lambda: run(lambda x: add(scaled(x)), x),
    "numpy table in an inner jit": lambda: run(lambda x: add(scanned(x)), x),
    "settings": lambda: other_settings(),
    "another variable": lambda: run(lambda: [frozen, variable][is_last].assign_add(1.0)),
    "another variable read": lambda: run(lambda x: add(x * [frozen, variable][is_last].value), x),
    "another variable assigned and reduced": lambda: other_variables(),
    "order of known programs": lambda: known_programs(),
    "order before the end": lambda: [in_another_order(), sys.exit()],
    "a number that changes": lambda: numbers_in_turn(),
    "reduced number": lambda: strategy.reduce("sum", float(worker)),
    "shape of a variable": lambda: make_variable(np.zeros(5 + is_last, np.float32)),
    "names of variables": lambda: [make_variable(0.0, name) for name in ("ba" if is_last else "ab")],
    "kind of an argument": lambda: [run(add, np.ones(3, np.float32)), run(twice, x if is_last else np.ones(3, np.float32))],
    "python number": lambda: run(lambda x: x * (worker + 1.0), x),
    "more steps": lambda: [run(add, x) for _ in range(10 + 5 * is_last)] + [strategy.reduce("sum", x)],
    "one fails": lambda: fail_in_the_middle(),
    "ways of combining": lambda: combined(),
    "computed initial value": lambda: make_variable(computed()),
    "computed array closed over": lambda: closed_over(computed()),
    "computed array closed over by a function": lambda: closed_over_by_a_function(computed()),
    "computed argument": lambda: run(lambda x, by: add(x * by[1]), x, [one, computed()]),
    "computed argument of another placement": lambda: run(lambda y: add(y), renamed(computed())),
    "computed argument of a function": lambda: mr.function(lambda a: strategy.reduce("sum", a))(computed()),
    "computed and assigned": lambda: assigned(computed()),
    "alone": lambda: alone(),
    "shapes of values": lambda: strategy.distribute_values_from_function(
        lambda context: np.ones((2,) * (1 + context.replica_id_in_sync_group))
    ),
    "eager": lambda: eager(),
    "another thread": lambda: in_a_thread(lambda: run(add, x)),
    "read on_read alone": lambda: in_a_step(lambda: counters[0].value),
    "assign mirrored alone": lambda: in_a_step(lambda: frozen.assign(frozen.value * 2)),
    "flipped bit": lambda: flipped_bit(),
    "batch of the chief": lambda: one_batch_more(),
    "other data later": lambda: read(np.arange(400_000.0).reshape(-1, 4) + np.arange(400_000).reshape(-1, 4) // 200 * worker),
    "shorter data of the chief": lambda: read(np.zeros((90 + 10 * is_last, 4))),
    "evaluation of the chief": lambda: [run(add, x), next(iter(numbers())) if strategy.is_chief else None],
}


def computed() -> jax.Array:
    """Return an array on all workers, computed otherwise on each."""
    return frozen.value * (1.0 + worker)


def closed_over(value: jax.Array) -> Any:
    return run(lambda x: add(x + value), x)


def closed_over_by_a_function(value: jax.Array) -> Any:
    return mr.function(lambda x: strategy.reduce("sum", strategy.run(lambda x: x, args=(x,))) + value)(x)


def renamed(value: Any) -> Any:
    mesh = value.sharding.mesh
    return jax.device_put(jnp.stack([value]), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None)))


def assigned(value: jax.Array) -> None:
    try:
        frozen.assign(value)
        strategy.barrier("what differs is seen by now")
    finally:
        frozen.assign(3.0)


def alone() -> None:
    """Do on the chief what reaches no other worker: show, read and compute, and use strategies of its own."""
    dataset = strategy.distribute_dataset(strategy.make_numpy_dataset(np.arange(8)).batch(4))
    iterator = iter(dataset)
    next(iterator)
    if strategy.is_chief:
        shown = f"{frozen!r} {frozen} {counters} {key} {x!r} {uneven} {one} {strategy} {strategy.cluster} {dataset}"
        print(shown, strategy.explain(), len(dataset), iterator.get_state(), dataset.describe())
        iter(dataset).close()
        read = [frozen.value, frozen.numpy(), float(frozen), np.asarray(frozen), frozen.shape, jax.device_get(frozen.value)]
        read += [float(one), x.values, jax.tree.map(lambda a: a * 2, x), uneven.shapes]
        read += [strategy.local_results(value) for value in (x, uneven, frozen, counters[0], key)]
        read += [frozen + 1, jnp.mean(frozen.value), frozen.value + jnp.ones(2), frozen.value + np.ones(2)]
        read += [jax.jit(lambda w, data: data * w)(frozen.value, np.ones((3, 2), np.float32))]
        read += [mr.MirroredStrategy().run(lambda: mr.get_replica_context().all_reduce("sum", 1)), mr.Variable(1.0) + 1]
        read += [mr.function(lambda a: a + 1)(np.ones(2))]
        assert len(jax.block_until_ready(jax.tree.leaves(read))) > len(read) - 5
        print("DID ALL", flush=True)
    iterator.close()


def combined() -> None:
    ways = (mr.ReductionToOneDevice(accumulation_fn=lambda rows: rows[0]), mr.HierarchicalCopyAllReduce())
    other = mr.MultiWorkerMirroredStrategy(cross_device_ops=ways[is_last])
    other.run(lambda: mr.get_replica_context().all_reduce("sum", jnp.ones(())))


def make_variable(value: Any, name: str | None = None) -> None:
    with strategy.scope():
        mr.Variable(value, name=name)


def numbers_in_turn() -> None:
    """Close over numbers that all workers have seen, one of them at another time."""
    for factor in (1.0, 2.0, 1.0 + is_last, 2.0 - is_last):
        run(lambda x, factor=factor: average(x * factor), x)
    sys.exit()


def in_another_order() -> None:
    for function in (add, average, *((add, average) if is_last else (average, add))):
        run(function, x)


def known_programs() -> None:
    """Run programs that all workers know, in another order on one of them."""
    equal_copies.MAX_COST = 1.0  # compare every 20 steps
    programs = [add, average]
    for _ in range(500):
        for function in programs:
            run(function, x)
        if is_last:
            programs = [average, add]


def other_settings() -> None:
    jax.config.update("jax_threefry_partitionable", is_last)
    try:
        run(average, x)
    finally:
        jax.config.update("jax_threefry_partitionable", True)


def other_variables() -> None:
    own = [frozen, variable][is_last]
    own.assign(5.0)
    strategy.reduce("sum", own)
    strategy.barrier("the end")


def flipped_bit() -> None:
    """Change one bit of one device's memory, as a broken device does."""
    equal_copies.MAX_COST = 1.0  # compare every 20 steps
    for number in range(20_000):
        if number == 70 and is_last:
            flip(variable)
        strategy.run(lambda: variable.assign_add(1.0))


def numbers() -> Any:
    return strategy.distribute_dataset(strategy.make_numpy_dataset(np.arange(8192.0)).batch(4))


def read(batches: np.ndarray) -> None:
    for batch in strategy.distribute_dataset(list(batches), mr.InputOptions(auto_shard_policy="data")):
        run(lambda batch: add(batch.sum()), batch)


def one_batch_more() -> None:
    """Train, and take one batch more on the chief."""
    equal_copies.MAX_COST = 1.0  # compare every 20 steps
    iterator = iter(numbers())
    if strategy.is_chief:
        next(iterator)
    for _ in range(10):
        strategy.run(
            lambda batch: variable.assign_add(mr.get_replica_context().all_reduce("sum", batch.sum())), args=(next(iterator),)
        )


def in_a_thread(act: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


def eager() -> None:
    with mr.eager():
        run(add, x)


one = run(lambda x: mr.get_replica_context().all_reduce("sum", x.sum()), x)
for name in sys.argv[2:]:
    try:
        mistakes[name]()
        if len(sys.argv) > 3:
            strategy.barrier("what differs is seen by now")
    except Exception as error:
        if len(sys.argv) == 3:
            raise
        print(f"REFUSED {name}: {type(error).__name__}:", " ".join(str(error).split()), flush=True)
if len(sys.argv) > 3:
    in_a_thread(lambda: [strategy.barrier("hand over"), run(add, x)])
    strategy.barrier("and back")
    make_variable(0.0)  # its number is another one, because the chief has made a variable for itself
    for _ in range(3):
        run(add, x)
result = np.asarray(strategy.reduce("sum", x))
print("RESULT", result, variable.numpy(), frozen.numpy(), flush=True)
