"""A worker that records what it finds in variables of all kinds: any number of workers with as many replicas has the same.

Argument: a folder. What must be one value in spite of it differs by worker here: initial values, and what is assigned outside of
a step.
"""

import itertools
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mirrored as mr

strategy = mr.MultiWorkerMirroredStrategy()
R, W = strategy.num_replicas_in_sync, strategy.num_workers
worker = int(not strategy.is_chief) and strategy.cluster.worker_index
first_own = worker * (R // W)
FLOATS, OTHERS = ["float32", "bfloat16", "complex64"], ["int32", "int8", "bool", "uint8", "key"]
AGGREGATIONS = ["sum", "mean", "only_first_replica"]
#: The numbers of rows of all replicas: uneven, and with an empty one.
SIZES = [(3 * replica + 1) % 4 for replica in range(R)]
KINDS = ["numpy", "jax", "committed", "last device"]
found: dict[str, np.ndarray] = {}


def array_of(dtype: str, shape: Sequence[int], seed: int = 0) -> Any:
    """Make an array on this worker: numpy, or a key of jax."""
    if dtype == "key":
        return jax.random.split(jax.random.key(seed), tuple(shape)) if shape else jax.random.key(seed)
    rng = np.random.default_rng(seed)
    values = rng.normal(size=tuple(shape)) * 4
    if dtype == "complex64":
        values = values + 1j * rng.normal(size=tuple(shape))
    if dtype in ("uint8", "bool"):
        values = np.abs(values)
    return np.asarray(values.astype(jnp.dtype(dtype)) if dtype != "bool" else values > 2)


def host(dtype: str, shape: Sequence[int], kind: str, seed: int = 0) -> Any:
    """Make a value of this worker alone, of one of KINDS."""
    array = array_of(dtype, shape, seed)
    if kind == "numpy":
        return array
    return jnp.asarray(array) if kind == "jax" else jax.device_put(array, jax.local_devices()[0 if kind == "committed" else -1])


def by_replica(dtype: str, sizes: Sequence[int], *more: int) -> mr.PerReplica:
    def values(context: mr.ValueContext) -> Any:
        replica = context.replica_id_in_sync_group
        return array_of(dtype, (sizes[replica], *more), replica)

    return strategy.distribute_values_from_function(values)


def as_numpy(value: Any) -> np.ndarray:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).astype(np.float32) if value.dtype == jnp.bfloat16 else np.asarray(value)


def record(name: str, value: Any) -> None:
    """Keep a nest of results: each replica's own values apart, by its number."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: isinstance(x, mr.PerReplica | mr.Variable))
    for path, leaf in leaves:
        key = f"{name}{jax.tree_util.keystr(path)}"
        assert key not in found, key
        if isinstance(leaf, mr.PerReplica):
            for place, row in enumerate(leaf.values):
                found[f"{key} {leaf.dtype} @{first_own + place}"] = as_numpy(row)
        else:
            array = leaf.value if isinstance(leaf, mr.Variable) else jnp.asarray(leaf)
            found[f"{key} {array.dtype}"] = as_numpy(array)


def record_the_chief_s_values() -> None:
    """To the bit, those of worker 0 win."""
    bits = np.array([-0.0, np.nan, np.inf, 1e-45], np.float32)
    with strategy.scope():
        tricky = [mr.Variable(value) for value in (bits, np.array([True, worker == 0]), np.array([-0.0 - 1j]) * (1 + worker))]
        own = mr.Variable(lambda: np.float32(worker))
    assert tricky[0].numpy().tobytes() == bits.tobytes() and float(own) == 0.0
    record("tricky", [jax.lax.bitcast_convert_type(tricky[0].value, jnp.uint32), tricky[1:], own])
    own.assign(np.float32(20 + worker))
    record("the chief's", own)


def record_variables() -> None:
    kinds = itertools.cycle(KINDS)
    rows = by_replica("float32", SIZES, 2)
    cases = [*itertools.product(FLOATS[:1], ["none", *AGGREGATIONS]), *zip(FLOATS[1:], AGGREGATIONS, strict=False)]
    cases += itertools.product(OTHERS, ["none"])
    for (dtype, aggregation), shape in zip(cases, itertools.cycle([(2,), (), (2, 3)]), strict=False):
        name = f"variable {dtype} {aggregation} "
        own = [host(dtype, shape, next(kinds), seed=worker + number) for number in range(5)]
        with strategy.scope():
            v = mr.Variable(own[0], aggregation=aggregation)
            made = mr.Variable(lambda own=own: own[1])
        record(name + "created", [v, made])
        sources: dict[str, Any] = {"host": lambda own=own: own[2], "variable": lambda made=made: made}
        sources["run"] = lambda v=v: strategy.run(lambda: v.value)
        if dtype == "float32":
            sources["computed"] = lambda v=v: v.value * 0.5 + 1
            sources["mirrored"] = lambda v=v: jnp.broadcast_to(strategy.reduce("sum", rows, axis=0).sum(), v.shape)
        if aggregation != "none" and shape:
            sources["replicas"] = lambda shape=shape, dtype=dtype: by_replica(dtype, [shape[0]] * R, *shape[1:])
        for source, make in sources.items():
            can_add = source == "host" and jnp.issubdtype(v.dtype, np.number)
            for verb in ("assign", "assign_add", "assign_sub") if can_add else ("assign",):
                getattr(v, verb)(make())
                record(f"{name}{verb} {source}", v)
        if dtype == "float32":
            record(name + "in a step", strategy.run(lambda x, v=v: x.sum() + v.value.sum(), args=(rows,)))


def record_steps() -> None:
    """Write variables of all kinds in steps, functions, and in the middle of a step."""
    rows = by_replica("float32", SIZES, 2)
    with strategy.scope():
        v = [mr.Variable(np.float32(1 + worker), aggregation=a) for a in ("none", *AGGREGATIONS)]

    def write(x: Any) -> None:
        context = mr.get_replica_context()
        v[0].assign_add(context.all_reduce("sum", x.sum()))
        for variable in v[1:]:
            own = context.replica_id_in_sync_group * 1.0
            variable.assign_add(own if variable.aggregation is mr.VariableAggregation.MEAN else x.sum() + own)
        context.merge_call(lambda strategy, y: v[0].assign(v[0] * 0.5 + strategy.reduce("mean", y)), args=(x.sum(),))

    taken = [variable.value for variable in v] if worker else None  # only some workers copy
    for _ in range(3):
        strategy.run(write, args=(rows,))
    record("written", v)
    del taken
    for aggregation, dtype in (("none", "int32"), ("sum", "int32"), ("mean", "float32"), ("only_first_replica", "float32")):
        with strategy.scope():
            counter = mr.Variable(array_of(dtype, (2,), worker), synchronization="on_read", aggregation=aggregation)
        record_on_read(aggregation, counter)


def record_on_read(aggregation: str, v: mr.Variable) -> None:
    is_read = aggregation != "none"

    def step() -> Any:
        v.assign_add(jnp.full(2, mr.get_replica_context().replica_id_in_sync_group).astype(v.dtype))
        return v.value

    @mr.function
    def whole() -> Any:
        own = strategy.run(step)
        return (own, v.value) if is_read else own

    for number in range(2):
        record(f"on read {aggregation} {number}", [strategy.run(step), strategy.gather(v, 0), strategy.reduce("sum", v)])
        with strategy.scope():
            record(f"on read {aggregation} {number} in a function", whole())
        if is_read:
            merged = strategy.run(lambda: mr.get_replica_context().merge_call(lambda strategy: v.value * 1))
            getattr(v, ["assign", "assign_add"][number])(array_of(v.dtype.name, (2,), worker))
            record(f"on read {aggregation} {number} outside", [merged, v])


warnings.simplefilter("error")
warnings.simplefilter("ignore", mr.RecompilationWarning)
record_the_chief_s_values()
record_variables()
record_steps()
strategy.assert_mirrored()
np.savez(Path(sys.argv[1]) / f"{W}x{R // W}-{worker}.npz", **found)
strategy.barrier("end")
