"""Random programs of all verbs, the same on any number of workers: what they computed goes to a file, for comparison.

Arguments: a folder, the first seed, how many seeds. What must be one value in spite of them differs by worker here: initial
values and what is assigned outside a step.
"""

import gc
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored as mr

strategies = [mr.MultiWorkerMirroredStrategy(), mr.MultiWorkerMirroredStrategy()]
R, W = strategies[0].num_replicas_in_sync, strategies[0].num_workers
worker = strategies[0].cluster.worker_index if strategies[0].cluster is not None else 0
first_own = worker * (R // W)
FLOATS, OTHERS = ["float32", "bfloat16", "complex64"], ["int32", "int8", "bool", "uint8", "key"]
AGGREGATIONS = ["sum", "mean", "only_first_replica"]
Op = Callable[["Program"], None]
operations: list[Op] = []


def operation(function: Op) -> Op:
    operations.append(function)
    return function


def array_of(rng: np.random.Generator, dtype: str, shape: Sequence[int]) -> Any:
    """Make an array on this worker: numpy, or a key of jax."""
    if dtype == "key":
        return jax.random.split(jax.random.key(int(rng.integers(1000))), tuple(shape)) if shape else jax.random.key(7)
    values = rng.normal(size=tuple(shape)) * 4
    if dtype == "complex64":
        values = values + 1j * rng.normal(size=tuple(shape))
    if dtype in ("uint8", "bool"):
        values = np.abs(values)
    return np.asarray(values.astype(jnp.dtype(dtype)) if dtype != "bool" else values > 2)


def as_numpy(value: Any) -> np.ndarray:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).astype(np.float32) if value.dtype == jnp.bfloat16 else np.asarray(value)


class Program:
    """One random program: draws from the same numbers on all workers, and records what it computes."""

    def __init__(self, seed: int, found: dict[str, np.ndarray]) -> None:
        self.seed, self.rng, self.found = seed, np.random.default_rng(seed), found
        self.strategy = strategies[int(self.rng.integers(2))]
        self.count = 0
        self.floats: list[Any] = []  # PerReplica values of at least one axis
        self.mirrored: list[Any] = [jnp.float32(3)]  # arrays that are one value
        self.variables: list[mr.Variable] = []

    def run(self) -> None:
        self.make_rows(0)
        for turn in range(5):  # so that four seeds in a row have all operations, and each has different ones
            self.count += 1
            operations[7 * (5 * self.seed + turn) % len(operations)](self)
        self.strategy.assert_mirrored()

    def record(self, name: str, value: Any) -> None:
        """Keep a nest of what the program computed: each replica's own values apart, by its number."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: isinstance(x, mr.PerReplica | mr.Variable))
        for path, leaf in leaves:
            key = f"{self.seed}.{self.count}.{name}{jax.tree_util.keystr(path)}"
            if isinstance(leaf, mr.PerReplica):
                for place, row in enumerate(leaf.values):
                    self.found[f"{key} {leaf.dtype} @{first_own + place}"] = as_numpy(row)
            elif isinstance(leaf, str | bytes):
                self.found[key] = np.array(leaf)
            else:
                array = leaf.value if isinstance(leaf, mr.Variable) else jnp.asarray(leaf)
                self.found[f"{key} {array.dtype}"] = as_numpy(array)

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def sizes(self) -> list[int]:
        """Choose the numbers of rows of all replicas: even, uneven, or with empty ones."""
        kind = self.pick(["even", "even", "uneven", "ends"])
        if kind == "even":
            return [int(self.rng.integers(1, 4))] * R
        if kind == "ends":
            return [2] * (R - 1) + [0]
        sizes = [int(size) for size in self.rng.integers(0, 4, R)]
        return sizes if any(sizes) else [1] * R

    def make(self, dtype: str, sizes: Sequence[int], *more: int) -> mr.PerReplica:
        seed = int(self.rng.integers(10**6))
        return self.strategy.distribute_values_from_function(
            lambda c: array_of(
                np.random.default_rng(seed + c.replica_id_in_sync_group), dtype, (sizes[c.replica_id_in_sync_group], *more)
            )
        )

    def make_rows(self, more: int | None = None) -> mr.PerReplica:
        rows = self.make("float32", self.sizes(), 2)
        self.floats.append(rows)
        self.record("rows", rows)
        return rows

    def host(self, dtype: str, shape: Sequence[int], differs: bool) -> Any:
        """Make a value of this worker alone, of any kind; another one on each worker if it `differs`."""
        seed = int(self.rng.integers(10**6)) + (worker if differs else 0)
        array = array_of(np.random.default_rng(seed), dtype, shape)
        kind = self.pick(["numpy", "jax", "committed", "last device"])
        if kind == "numpy":
            return array
        if kind == "jax":
            return jnp.asarray(array)
        return jax.device_put(array, jax.local_devices()[0 if kind == "committed" else -1])


# -- values and verbs


@operation
def values(p: Program) -> None:
    dtype, sizes = p.pick(FLOATS + OTHERS), p.sizes()
    value = p.make(dtype, sizes, *p.pick([(), (3,), (2, 2)]))
    nest = p.pick([lambda v: v, lambda v: {"a": v, "b": [v, 1.5]}, lambda v: (v, np.arange(3))])(value)
    p.record("values", value)
    p.record("gather", p.strategy.gather(value, 0))
    if value.ndim > 1 and None not in value.shape:
        p.record("gather 1", p.strategy.gather(value, int(p.pick([1, -1]))))
    local = p.strategy.local_results(value)
    assert len(local) == R // W
    for place, own in enumerate(local):
        p.found[f"{p.seed}.{p.count}.local @{first_own + place}"] = as_numpy(own)
    if dtype in ("key", "bool"):
        return
    for op in ("sum", "mean"):
        p.record(f"{op} 0", p.strategy.reduce(op, value, axis=0))
        if value.ndim == 2:
            p.record(f"{op} all", p.strategy.reduce(op, value, axis=p.pick([(0, 1), (-1, 0)])))
        if None not in value.shape:
            p.record(op, p.strategy.reduce(op, nest))


@operation
def plain(p: Program) -> None:
    value = p.host(p.pick(["float32", "int32", "bfloat16"]), p.pick([(), (3,), (2, 2)]), differs=False)
    total = p.strategy.reduce("sum", value)
    p.record("plain", [total, p.strategy.reduce("mean", {"a": value, "b": 2}), p.strategy.reduce("sum", 0.1)])
    if value.ndim:
        p.record("plain gather", p.strategy.gather(value, 0))


@operation
def errors(p: Program) -> None:
    """Wrong programs are refused alike."""
    x = p.pick(p.floats)
    with p.strategy.scope():
        v = mr.Variable(np.zeros(2), name="v")
    mistakes: list[Callable[[], Any]] = [
        lambda: p.strategy.run(lambda x: v.assign(x.sum(0)), args=(x,)),
        lambda: p.strategy.run(lambda x: v.assign(jnp.zeros(3)), args=(x,)),
        lambda: v.assign(np.zeros(3)),
        lambda: v.assign(p.make("float32", [1] * R, 2)),
        lambda: p.strategy.gather(x, 5),
        lambda: p.strategy.reduce("median", x),
        lambda: p.strategy.run(lambda x: 1 / 0, args=(x,)),
        lambda: p.strategy.run(lambda: mr.get_replica_context().replica_id_in_sync_group > 0 and 1),
        lambda: p.strategy.distribute_values_from_function(lambda c: np.zeros((1,) * (c.replica_id_in_sync_group + 1))),
        lambda: p.strategy.distribute_values_from_function(lambda c: [0] * (c.replica_id_in_sync_group + 1)),
    ]
    which = int(p.rng.integers(len(mistakes)))
    try:
        mistakes[which]()
        p.record(f"mistake {which}", "none")
    except Exception as error:
        p.record(f"mistake {which}", type(error).__name__)
    p.record("after", [v])


@operation
def chief_s_values(p: Program) -> None:
    """To the bit, those of worker 0 win."""
    bits = np.array([-0.0, np.nan, np.inf, 1e-45], np.float32) + np.float32(0 * worker)
    with p.strategy.scope():
        tricky = [
            mr.Variable(bits),
            mr.Variable(np.array([True, worker == 0])),
            mr.Variable(np.array([-0.0 - 1j]) * (1 + worker)),
        ]
        own = mr.Variable(lambda: np.float32(worker))
    assert tricky[0].numpy().tobytes() == bits.tobytes() and float(own) == 0.0
    p.record("tricky", [jax.lax.bitcast_convert_type(tricky[0].value, jnp.uint32), tricky[1:], own])
    own.assign(np.float32(20 + worker))
    p.record("assigned", own)


# -- steps


def random_step(p: Program, rows: mr.PerReplica) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Write a step of random parts, and choose its arguments."""
    parts = [str(part) for part in p.rng.choice(list(PARTS), size=int(p.rng.integers(1, 4)))]
    constant = p.host("float32", (2,), differs=False)
    scale = p.pick([np.float32(0.5), jnp.float32(2), 3.0, p.pick(p.mirrored), p.host("float32", (), differs=False)])
    outer = p.pick(p.mirrored)

    def step(x: Any, scale: Any) -> Any:
        context, total = mr.get_replica_context(), jnp.zeros(2)
        for part in parts:
            x, total = PARTS[part](context, x, total, jnp.asarray(scale, jnp.float32).sum(), constant, jnp.sum(outer))
        return {"own": x, "total": context.all_reduce("mean", total), "n": context.all_reduce("sum", x.shape[0])}

    return step, (rows, scale)


def add(c: Any, x: Any, total: Any, scale: Any, constant: Any, outer: Any) -> Any:
    return x + c.replica_id_in_sync_group, total + constant * scale


def reduced(c: Any, x: Any, total: Any, scale: Any, constant: Any, outer: Any) -> Any:
    return x * 0.5, total + c.all_reduce("sum", {"a": x.sum(0), "b": outer})["a"]


def gathered(c: Any, x: Any, total: Any, scale: Any, constant: Any, outer: Any) -> Any:
    return jnp.sin(x), total + c.all_gather(x, 0).sum(0) * scale


def merged(c: Any, x: Any, total: Any, scale: Any, constant: Any, outer: Any) -> Any:
    def merge(strategy: Any, value: Any, whole: Any) -> Any:
        return strategy.reduce("mean", value, axis=0), strategy.gather(whole, 0)[:1, 0], whole

    mean, row, own = c.merge_call(merge, args=(x, total[None]))
    return x, own[0] + mean * 0.25 + row


def looped(c: Any, x: Any, total: Any, scale: Any, constant: Any, outer: Any) -> Any:
    final, each = mr.scan(lambda carry, y: (carry * 0.5 + c.all_reduce("sum", y), carry.sum()), total, jnp.ones((3, 2)) * scale)
    return x, final + each.sum() + mr.fori_loop(0, 2, lambda i, a: a + c.all_reduce("mean", a) + i, final)


def chosen(c: Any, x: Any, total: Any, scale: Any, constant: Any, outer: Any) -> Any:
    whole = c.all_reduce("sum", total)
    return x, mr.cond(whole.sum() > 0, lambda t: t + c.all_reduce("sum", t * 0.1), lambda t: t - 1, whole)


def noisy(c: Any, x: Any, total: Any, scale: Any, constant: Any, outer: Any) -> Any:
    noise = jax.random.uniform(c.rng(jax.random.key(3)), (2,))
    return x + noise, total + c.all_reduce("mean", noise)


PARTS: dict[str, Callable[..., Any]] = {
    "add": add, "reduced": reduced, "gathered": gathered, "merged": merged, "looped": looped, "chosen": chosen, "noisy": noisy,
}  # fmt: skip


@operation
def step(p: Program) -> None:
    step, arguments = random_step(p, p.pick(p.floats))
    results = p.strategy.run(step, args=arguments)
    p.record("run", results)
    assert isinstance(results["total"], jax.Array) and isinstance(results["own"], mr.PerReplica)
    p.mirrored.append(results["total"])
    p.floats.append(results["own"])
    if p.rng.random() < 0.5:  # again: the cached program
        p.record("again", p.strategy.run(step, args=arguments))


@operation
def outside(p: Program) -> None:
    """JAX's own operations on what the strategy has made."""
    one, x = p.pick(p.mirrored), p.pick(p.floats)
    new = p.pick([lambda a: a * 2 + 1, lambda a: jnp.sin(a) + np.float32(1), lambda a: jnp.stack([a, a]).sum(0), jnp.exp2])(
        one * 0.1
    )
    p.mirrored.append(new)
    doubled = jax.tree.map(lambda a: a * 2, x)
    p.record("outside", [new, doubled, p.strategy.reduce("sum", doubled, axis=0)])
    p.floats.append(doubled)


@operation
def statics(p: Program) -> None:
    """Python arguments are compiled in, hashable or not."""
    x = p.pick(p.floats)

    def step(x: Any, how: str, numbers: list[int], table: dict[str, float], function: Any) -> Any:
        return function(x.sum()) * table[how] + sum(numbers)

    for number in range(int(p.rng.integers(1, 4))):
        total = p.strategy.run(step, args=(x, "a", [1, number], {"a": 2.0 + number}, jnp.sin))
        p.record(f"static {number}", p.strategy.reduce("sum", total))


# -- variables


@operation
def create(p: Program) -> None:
    dtype = p.pick(FLOATS + OTHERS)
    shape = p.pick([(2,), (2,), (), (2, 3)])
    aggregation = p.pick(["none", *AGGREGATIONS]) if dtype in FLOATS else "none"
    value = p.host(dtype, shape, differs=True)
    with p.strategy.scope():
        v = mr.Variable(p.pick([value, lambda: value]), name=f"v{p.seed}.{p.count}", aggregation=aggregation)
    p.variables.append(v)
    p.record("created", v)


@operation
def assign(p: Program) -> None:
    if not p.variables:
        return create(p)
    v = p.pick(p.variables)
    source = p.pick(["host", "host", "computed", "run", "variable", "mirrored", "replicas"])
    value: Any = p.host("key" if jnp.issubdtype(v.dtype, jax.dtypes.extended) else v.dtype.name, v.shape, differs=True)
    if source == "computed" and v.dtype == jnp.float32:
        value = v.value * 0.5 + 1
    elif source == "run":
        value = p.strategy.run(lambda: v.value)
    elif source == "variable":
        value = v
    elif source == "mirrored" and v.dtype == jnp.float32:
        value = jnp.broadcast_to(p.pick(p.mirrored).sum(), v.shape)
    elif source == "replicas" and v.aggregation is not mr.VariableAggregation.NONE and v.shape:
        value = p.make(v.dtype.name, [v.shape[0]] * R, *v.shape[1:])
    can_add = jnp.issubdtype(v.dtype, np.number)
    getattr(v, p.pick(["assign", "assign_add", "assign_sub"]) if can_add else "assign")(value)
    p.record(f"assigned {source}", v)
    x = p.pick(p.floats)
    if v.dtype == jnp.float32:
        with_variable = p.strategy.run(lambda x: x.sum() + v.value.sum(), args=(x,))
        p.record("read in a step", with_variable)


@operation
def write_in_step(p: Program) -> None:
    with p.strategy.scope():
        v = [mr.Variable(np.float32(1 + worker), aggregation=a) for a in ("none", *AGGREGATIONS)]
    x, count = p.pick(p.floats), int(p.rng.integers(1, 4))

    def step(x: Any) -> None:
        context = mr.get_replica_context()
        v[0].assign_add(context.all_reduce("sum", x.sum()))
        for variable in v[1:]:
            own = context.replica_id_in_sync_group * 1.0
            variable.assign_add(own if variable.aggregation is mr.VariableAggregation.MEAN else x.sum() + own)
        context.merge_call(lambda strategy, y: v[0].assign(v[0] * 0.5 + strategy.reduce("mean", y)), args=(x.sum(),))

    taken = [variable.value for variable in v] if p.rng.random() < 0.5 or worker else None  # only some workers copy
    for _ in range(count):
        p.strategy.run(step, args=(x,))
    p.record("written", v)
    del taken
    p.variables += v


@operation
def on_read(p: Program) -> None:
    aggregation, dtype = p.pick(["none", *AGGREGATIONS]), p.pick(["float32", "int32"])
    if aggregation == "mean":
        dtype = "float32"
    with p.strategy.scope():
        v = mr.Variable(p.host(dtype, (2,), differs=True), synchronization="on_read", aggregation=aggregation)

    def step() -> Any:
        number = mr.get_replica_context().replica_id_in_sync_group
        v.assign_add(jnp.full(2, number).astype(v.dtype))
        return v.value

    @mr.function
    def whole() -> Any:
        own = p.strategy.run(step)
        return own if aggregation == "none" else (own, v.value)

    def inside() -> Any:
        return mr.get_replica_context().merge_call(lambda strategy: v.value * 1)

    for _ in range(3):
        action = p.pick(["step", "function", "outside", "merge", "gather"])
        if action == "step":
            p.record("on read step", p.strategy.run(step))
        elif action == "function":
            with p.strategy.scope():
                p.record("on read function", whole())
        elif action == "gather":
            p.record("on read gather", [p.strategy.gather(v, 0), p.strategy.reduce("sum", v)])
        elif aggregation != "none" and action == "merge":
            p.record("on read merge", p.strategy.run(inside))
        elif aggregation != "none":
            getattr(v, p.pick(["assign", "assign_add"]))(p.host(dtype, (2,), differs=True))
        p.record("on read", v if aggregation != "none" else p.strategy.run(lambda: v.value))


@operation
def function(p: Program) -> None:
    with p.strategy.scope():
        total = mr.Variable(p.host("float32", (2,), differs=True))
    inner, arguments = random_step(p, p.pick(p.floats))
    constant, turns = p.host("float32", (2,), differs=False), int(p.rng.integers(1, 3))
    scales = p.host("float32", (2,), differs=False)

    def body(x: Any, scales: Any) -> Any:
        for turn in range(turns):
            results = p.strategy.run(inner, args=(x, arguments[1]))
            total.assign_add(results["total"] * scales[turn] + constant)
        return results, p.strategy.reduce("mean", results["own"], axis=0), p.strategy.gather(results["own"], 0), total.value

    with p.strategy.scope():
        compiled = mr.function(body)
        for _ in range(int(p.rng.integers(1, 3))):
            results, *others = compiled(arguments[0], scales)
            p.record("function", [results, others])
    p.floats.append(results["own"])
    p.mirrored.append(results["total"])


@operation
def collected(p: Program) -> None:
    """Garbage goes at other times on other workers."""
    if p.variables:
        p.variables.pop(int(p.rng.integers(len(p.variables))))
    with p.strategy.scope():
        cycle: list[Any] = [mr.Variable(np.zeros(3))]
    cycle.append(cycle)
    del cycle
    if worker % 2:
        gc.collect()
    p.strategy.assert_mirrored()


@operation
def beside(p: Program) -> None:
    """The default strategy, and one of this worker's devices alone."""
    local = mr.MirroredStrategy()
    x = local.distribute_values_from_function(lambda c: np.ones(2, np.float32) + worker)
    with local.scope():
        v = mr.Variable(np.full(2, float(worker)))
    local.run(lambda x: v.assign_add(mr.get_replica_context().all_reduce("mean", x)), args=(x,))
    default = mr.Variable(np.full(2, float(worker)))
    assert v.numpy().tolist() == [1.0 + 2 * worker] * 2 and default.numpy().tolist() == [float(worker)] * 2
    total = mr.function(lambda y: default.assign_add(y).value)(np.ones(2, np.float32))
    assert total.tolist() == [1.0 + worker] * 2
    local.assert_mirrored()
    with p.strategy.scope():
        w = mr.Variable(default)  # the chief's
    p.record("beside", [w, p.strategy.run(lambda x: x.sum(), args=(p.pick(p.floats),))])


# -- training and input


@operation
def train(p: Program) -> None:
    num_rows, batch = int(p.rng.integers(5, 20)), int(p.rng.integers(R, 9))
    data_rng = np.random.default_rng(int(p.rng.integers(10**6)))
    data = {"x": data_rng.normal(size=(num_rows, 3)).astype(np.float32), "y": data_rng.normal(size=num_rows).astype(np.float32)}
    tx = p.pick(
        [optax.adam(0.1), optax.sgd(optax.exponential_decay(0.1, 2, 0.5), 0.9), optax.adamw(optax.cosine_decay_schedule(0.1, 9))]
    )
    with p.strategy.scope():
        w, b = mr.Variable(p.host("float32", (3,), differs=True)), mr.Variable(p.host("float32", (), differs=True))
        optimizer = mr.Optimizer(p.pick([tx, optax.MultiSteps(tx, 2)]), {"w": w, "b": b})
    rows = p.strategy.make_numpy_dataset(data).shuffle(seed=5).batch(batch)
    dropped = p.rng.random() < 0.3
    batches = p.strategy.distribute_dataset(rows, mr.InputOptions(drop_remainder=dropped, prefetch=int(p.rng.integers(3))))

    def step(batch: Any) -> Any:
        def loss() -> Any:
            return mr.losses.compute_average_loss((batch["x"] @ w.value + b.value - batch["y"]) ** 2)

        value, grads = mr.value_and_grad(loss, {"w": w, "b": b})()
        optimizer.apply_gradients(grads)
        return value

    whole = mr.function(lambda batch: p.strategy.reduce("sum", p.strategy.run(step, args=(batch,))))
    stop = int(p.rng.integers(1, 4))
    for epoch in range(2):
        with p.strategy.scope():
            for number, batch in enumerate(batches):
                p.record(
                    f"loss {epoch} {number}",
                    whole(batch) if p.seed % 2 else p.strategy.reduce("sum", p.strategy.run(step, args=(batch,))),
                )
                if number == stop and epoch == 0:
                    break  # and start anew
    p.record("trained", [w, b])


@operation
def two_datasets(p: Program) -> None:
    rows = [np.arange(int(p.rng.integers(1, 12)), dtype=dtype) for dtype in (np.int64, np.float64)]
    kinds = p.pick([lambda r: p.strategy.make_numpy_dataset(r).repeat(2).batch(3), lambda r: [r[:2], r[2:5], r[5:]]])
    one, two = (p.strategy.distribute_dataset(kinds(r), mr.InputOptions(auto_shard_policy="data")) for r in rows)
    for number, (a, b) in enumerate(zip(one, two, strict=False)):
        p.record(f"pair {number}", [a, p.strategy.gather(b, 0)])
    iterator = iter(one)
    next(iterator, None)
    state = iterator.get_state()
    p.record("state", json.dumps(state))  # it holds for any number of workers
    iterator.close()
    again = iter(one)
    again.set_state(state)
    p.record("rest", list(again))


@operation
def shared_out(p: Program) -> None:
    """Every record is used once, whoever reads it: files of uneven sizes, every policy, left early and resumed."""
    sizes = [int(size) for size in p.rng.integers(0, 7, 5)]
    policy, batch = p.pick(["file", "auto", "data", "off", "function"]), int(p.rng.integers(1, 9))
    ends = np.cumsum([0, *sizes])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.tfrecord" for i in range(5)]
        for file, first, last in zip(files, ends, ends[1:], strict=False):
            mr.data.write_tfrecords(file, [np.int32(number).tobytes() for number in range(first, last)])

        def read(paths: Sequence[Path], size: int) -> Any:
            return mr.data.tfrecord_dataset(paths).map(lambda record: np.frombuffer(record, np.int32)[0]).batch(size)

        def of(context: mr.InputContext) -> Any:
            mine = files[context.input_pipeline_id :: context.num_input_pipelines]
            return read(mine, context.get_per_replica_batch_size(batch * R))

        options = mr.InputOptions(auto_shard_policy="auto" if policy == "function" else policy, prefetch=int(p.rng.integers(3)))
        if policy == "function":
            dataset = p.strategy.distribute_datasets_from_function(of, options)
        else:
            dataset = p.strategy.distribute_dataset(read(files, batch), options)
        list(zip(dataset, range(int(p.rng.integers(1, 4))), strict=False))  # a pass that is left early
        iterator = iter(dataset)
        begun = [next(iterator)] if sum(sizes) else []
        state = iterator.get_state()
        iterator.close()
        again = iter(dataset)
        again.set_state(state)
        rows = [np.asarray(p.strategy.gather(rows, 0)) for rows in (*begun, *again)]
    numbers = np.sort(np.concatenate([np.zeros(0, np.int32), *rows]))
    if policy == "off":
        numbers = numbers[::W]
    assert numbers.tolist() == list(range(sum(sizes))), (policy, sizes, numbers)
    p.record(f"shared out {policy}", numbers)


def save(found: dict[str, np.ndarray], folder: str) -> None:
    np.savez(Path(folder) / f"{W}x{R // W}-{worker}.npz", **found)


def main(folder: str, first: int, count: int) -> None:
    found: dict[str, np.ndarray] = {}
    for seed in range(first, first + count):
        program = Program(seed, found)
        try:
            program.run()
        except Exception:
            print(f"SEED {seed} operation {program.count}", flush=True)
            traceback.print_exc()
            raise
    save(found, folder)
    strategies[0].barrier("end")
    print("DONE", len(found), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore", mr.RecompilationWarning)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
