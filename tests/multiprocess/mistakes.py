"""A worker of a job whose workers do not do the same: arguments are the limit of time, and the mistakes, one after the other."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
x = strategy.distribute_values_from_function(lambda context: np.ones(3, np.float32))


own = jnp.full(3, float(worker))
table = np.arange(3.0, dtype=np.float32) + worker


def add(x: Any) -> Any:
    return mr.get_replica_context().all_reduce("sum", x)


def twice(x: Any) -> Any:
    return add(x * 2.0)


def average(x: Any) -> Any:
    return mr.get_replica_context().all_reduce("mean", x)


@jax.jit
def scaled(x: Any) -> Any:
    return x * own


@jax.jit
def scanned(x: Any) -> Any:
    return jax.lax.scan(lambda total, row: (total + row, None), x, table)[0]


def run(function: Callable[..., Any], *args: Any) -> Any:
    return strategy.run(function, args=args)


def part(what: Callable[[], Any]) -> None:
    for number in range(10):
        if number == 5 and is_last:
            what()
        run(add, x)


def in_a_step(what: Callable[[], Any]) -> None:
    """Let the others run a program that all know while the chief does something else."""
    run(add, x)
    if strategy.is_chief:
        what()
    run(add, x)


def fail() -> None:
    raise ValueError("the data is gone")


mistakes: dict[str, Callable[[], Any]] = {
    "argument": lambda: run(add, np.full(3, float(worker), np.float32)),
    "closed-over array": lambda: run(lambda: add(own)),
    "array in an inner jit": lambda: run(lambda x: add(scaled(x)), x),
    "numpy table in an inner jit": lambda: run(lambda x: add(scanned(x)), x),
    "settings": lambda: [jax.config.update("jax_threefry_partitionable", is_last), run(average, x)],
    "another variable": lambda: run(lambda: [frozen, variable][is_last].assign_add(1.0)),
    "another variable read": lambda: run(lambda x: add(x * [frozen, variable][is_last].value), x),
    "another variable assigned": lambda: [[frozen, variable][is_last].assign(5.0), run(add, x)],
    "another variable reduced": lambda: [strategy.reduce("sum", [frozen, variable][is_last]), run(add, x)],
    "another variable aggregated": lambda: [np.asarray(counters[is_last].value), run(add, x)],
    "order of known programs": lambda: known_programs(),
    "order before a barrier": lambda: (
        [run(f, x) for f in (add, average, *((add, average) if is_last else (average, add)))] + [strategy.barrier("the end")]
    ),
    "order before the end": lambda: (
        [run(f, x) for f in (add, average, *((add, average) if is_last else (average, add)))] + [sys.exit()]
    ),
    "a step alone before the end": lambda: [count(), is_last and count(), sys.exit()],
    "argument of the last step": lambda: [run(add, np.full(3, float(worker), np.float32)), sys.exit()],
    "a number that changes": lambda: numbers_in_turn(),
    "a number assigned alone": lambda: assigned_alone(),
    "reduced number": lambda: strategy.reduce("sum", float(worker)),
    "shape of a variable": lambda: make_variable(np.zeros(5 + is_last, np.float32)),
    "kind of an argument": lambda: [run(add, np.ones(3, np.float32)), run(twice, x if is_last else np.ones(3, np.float32))],
    "python number": lambda: run(lambda x: x * (worker + 1.0), x),
    "extra program": lambda: [run(average, x) if is_last else None, run(add, x)],
    "order": lambda: [run(f, x) for f in ((add, average) if is_last else (average, add))],
    "shape": lambda: run(add, np.ones(7 + is_last, np.float32)),
    "dtype": lambda: run(add, np.ones(9, np.int32 if is_last else np.float32)),
    "operation": lambda: run((lambda x: average(x)) if is_last else (lambda x: add(x)), x),
    "more steps": lambda: [run(add, x) for _ in range(10 + 5 * is_last)] + [strategy.reduce("sum", x)],
    "one ends": lambda: part(sys.exit),
    "one fails": lambda: part(fail),
    "shapes of values": lambda: strategy.distribute_values_from_function(
        lambda context: np.ones((2,) * (1 + context.replica_id_in_sync_group))
    ),
    "eager": lambda: eager(),
    "read on_read alone": lambda: in_a_step(lambda: counters[0].value),
    "assign mirrored alone": lambda: in_a_step(lambda: frozen.assign(frozen.value * 2)),
    "flipped bit": lambda: flipped_bit(variable, lambda: variable.assign_add(1.0)),
    "flipped bit of a frozen variable": lambda: flipped_bit(frozen, lambda: add(frozen.value)),
    "batch of the chief": lambda: batches(10, lambda number: number == 0),
    "later batch of the chief": lambda: batches(1000, lambda number: number == 60),
    "other data": lambda: read(np.random.default_rng(worker).permutation(64).reshape(16, 4)),
    "other data later": lambda: read(np.arange(400_000.0).reshape(-1, 4) + np.arange(400_000).reshape(-1, 4) // 200 * worker),
    "shorter data": lambda: read(np.arange(400.0).reshape(-1, 4)[: 100 - 10 * is_last]),
    "shorter data of the chief": lambda: read(np.zeros((90 + 10 * is_last, 4))),
    "shorter data without sums": lambda: read(np.zeros((100 - 10 * is_last, 4)), lambda batch: batch + 1),
    "evaluation of the chief": lambda: [run(add, x), next(iter(numbers())) if strategy.is_chief else None],
    "barriers": lambda: strategy.barrier(f"after the work of {worker}"),
}


def make_variable(value: Any) -> None:
    with strategy.scope():
        mr.Variable(value)


def count() -> None:
    strategy.run(lambda: variable.assign_add(1.0))


def numbers_in_turn() -> None:
    """Close over numbers that all workers have seen, one of them at another time."""
    for factor in (1.0, 2.0, 1.0 + is_last, 2.0 - is_last):
        run(lambda x, factor=factor: average(x * factor), x)
    sys.exit()


def assigned_alone() -> None:
    """Let one worker wait for the others to take the chief's number, and them for it in a step."""
    for number in range(10):
        if number in (0, 5) and (is_last or not number):
            frozen.assign(float(number))
        run(add, x)


def known_programs() -> None:
    """Run programs that all workers know, in another order on one of them."""
    equal_copies.MAX_COST = 1.0  # compare every 20 steps
    programs = [add, average]
    for _ in range(500):
        for function in programs:
            run(function, x)
        if is_last:
            programs = [average, add]


def flipped_bit(variable: mr.Variable, step: Callable[[], Any]) -> None:
    """Change one bit of one device's memory, as a broken device does."""
    equal_copies.MAX_COST = 1.0  # compare every 20 steps
    for number in range(20_000):
        if number == 70 and is_last:
            array = variable._array
            copies = [np.array(shard.data) for shard in array.addressable_shards]
            copies[-1].view(np.uint32)[...] ^= np.uint32(1 << 7)
            devices = [shard.device for shard in array.addressable_shards]
            parts = [jax.device_put(copy, device) for copy, device in zip(copies, devices, strict=True)]
            variable._array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
        strategy.run(step)


def numbers() -> Any:
    return strategy.distribute_dataset(strategy.make_numpy_dataset(np.arange(8192.0)).batch(4))


def read(batches: np.ndarray, step: Callable[..., Any] = lambda batch: add(batch.sum())) -> None:
    for batch in strategy.distribute_dataset(list(batches), mr.InputOptions(auto_shard_policy="data")):
        run(step, batch)


def batches(count: int, is_odd: Callable[[int], bool]) -> None:
    """Train, and take one batch more on the chief."""
    equal_copies.MAX_COST = 1.0  # compare every 20 steps
    iterator = iter(numbers())
    for number in range(count):
        if is_odd(number) and strategy.is_chief:
            next(iterator)
        strategy.run(
            lambda batch: variable.assign_add(mr.get_replica_context().all_reduce("sum", batch.sum())), args=(next(iterator),)
        )


def eager() -> None:
    with mr.eager():
        run(add, x)


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
    for _ in range(3):
        run(add, x)
result = np.asarray(strategy.reduce("sum", x))
print("RESULT", result, variable.numpy(), frozen.numpy(), flush=True)
