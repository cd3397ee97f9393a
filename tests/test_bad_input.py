"""Bad input, everywhere: one clear error each, and the world as it was before the call.

The table has rows for every public function and method; a new one without rows fails here.
"""

import builtins
import inspect
import re
import traceback
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr
from mirrored.data import NumpyDataset

ONES = np.ones(2, "float32")
WORDS = np.array(["a", "b"])


def values(strategy: mr.Strategy, make: Any) -> mr.PerReplica:
    return strategy.distribute_values_from_function(lambda ctx: make(ctx.replica_id_in_sync_group))


def preempted(checkpoint: mr.Checkpoint, step: Any) -> None:
    with mr.PreemptionHandler(checkpoint) as preemption:
        preemption.after_step(step)


#: What the rows may name, besides what is in the world.
NAMES = {"mr": mr, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "NumpyDataset": NumpyDataset, "__file__": __file__}
NAMES |= {
    "MASKED": np.ma.array(ONES, mask=[0, 1]),
    "SPARSE": jax.experimental.sparse.BCOO((ONES, np.eye(2, dtype="int32")), shape=(2, 2)),
}
NAMES |= {"REF": jax.new_ref(jnp.asarray(ONES)), "SHAPE": jax.ShapeDtypeStruct((2,), jnp.float32)}
NAMES |= {"KEYS": jax.random.wrap_key_data(np.zeros((2, 4), "uint32"), impl="rbg")}
NAMES |= {"FOUR": [f"cpu:{i}" for i in range(4)], "ONES": ONES, "WORDS": WORDS, "values": values, "preempted": preempted}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[types.SimpleNamespace]:
    """Everything that a row may name: three strategies, their variables, values, an optimizer, datasets."""
    two, three = (mr.MirroredStrategy([f"cpu:{i}" for i in range(count)]) for count in (2, 3))
    elsewhere = mr.MirroredStrategy(["cpu:2", "cpu:3"])
    with two.scope():
        w = mr.Variable(ONES, name="w")
        counts = mr.Variable(np.ones(2, "int32"), name="counts")
        mean = mr.Variable(ONES, name="mean", aggregation="mean")
        seen = mr.Variable(ONES, name="seen", synchronization="on_read", aggregation="sum")
        private = mr.Variable(ONES, name="private", synchronization="on_read")
        optimizer = mr.Optimizer(optax.adam(0.1), [w])
    with three.scope():
        of_three = mr.Variable(ONES, name="of_three")

    def in_three(function: Any) -> Any:
        with three.scope():
            return function()

    rows = two.make_numpy_dataset(np.arange(8)).shuffle(seed=0)
    distributed = two.distribute_dataset([np.arange(4)])
    step, x, scalars = two.run, values(two, lambda i: ONES * i), values(two, np.float32)
    uneven, x_of_three = values(two, lambda i: np.ones(1 + i, "float32")), values(three, lambda i: ONES * i)
    x_elsewhere = values(elsewhere, lambda i: ONES * i)
    checkpoint = mr.Checkpoint(tmp_path_factory.mktemp("saved"), w=w, optimizer=optimizer)
    in_context = lambda function: two.run(lambda: function(mr.get_replica_context()))  # noqa: E731
    average = lambda *arguments: two.run(lambda: mr.losses.compute_average_loss(*arguments))  # noqa: E731
    apply = optimizer.apply_gradients
    yield types.SimpleNamespace(**{name: value for name, value in locals().items() if name != "tmp_path_factory"})


def state(world: types.SimpleNamespace) -> Any:
    variables = [value for value in vars(world).values() if isinstance(value, mr.Variable)] + world.optimizer._state
    variables.append(world.optimizer.iterations)
    held = [(variable.name, np.asarray(variable._array).tolist()) for variable in variables]
    return held, (world.rows, list(world.rows._next_epoch)), np.asarray(world.x._array).tolist(), mr.has_strategy()


#: What a word in a row's message stands for.
WORDS_OF = {
    "ANOTHER": r"it comes from another strategy",
    "TRACED": r"under a JAX transformation",
    "NOT_IN_A_STEP": r"was called inside a step that strategy\.run is running",
    "NO_NUMBERS": r"expected arrays or numbers, in any nest",
    "KNOWN_OPS": r"expected one of 'sum', 'mean', 'max', 'min' or a member of mr\.ReduceOp, for example mr\.ReduceOp\.SUM",
    "KEY_LINES": r"the rows .* are numpy arrays\. Write jax\.random\.key_data\(keys\) .*wrap_key_data\(data, impl='rbg'\) in the",
    "NO_MASKS": r"masked array, and no device holds masks\. Write array\.filled\(value\)",
}
#: Below a public name, rows `expression => error: regular expression of its message`. A line that begins with `=>` belongs to the
#: expression above it.
TABLE = r"""
# strategies
MirroredStrategy
    mr.MirroredStrategy([]) => DeviceError: devices is empty, and a strategy needs at least one.* for example devices=\['cpu
    mr.MirroredStrategy("cpu:0") => TypeError: devices is 'cpu:0'; expected a list, for example devices=\['cpu:0'\]
    mr.MirroredStrategy([None]) => TypeError: devices contains None of type NoneType; expected strings such as 'gpu:0'
    mr.MirroredStrategy({"cpu:0": 1}) => TypeError: of type dict; expected a list .* in replica order
    mr.MirroredStrategy(["cpu:"]) => DeviceError: expected the form 'gpu:0', '/gpu:0', 'GPU:0', 'tpu:1' or 'cpu:3'
    mr.MirroredStrategy(["npu:0"]) => DeviceError: expected the form
    mr.MirroredStrategy(["gpu:0"]) => DeviceError: has 0 gpu devices \(none\)\. It has cpu:0, .* Leave devices out
    mr.MirroredStrategy(["cpu:1024"]) => DeviceError: at most 1024 virtual CPU devices are made
    mr.MirroredStrategy([jax.devices()[1], "cpu:0", "/CPU:1"])
        => DeviceError: names .* twice, as .* and '/CPU:1'\. Each replica needs its own
    mr.MirroredStrategy(["cpu:0"], cross_device_ops="ring") => ValueError: cross_device_ops is 'ring'; expected None
    mr.MirroredStrategy(["cpu:0"], cross_device_ops=mr.NcclAllReduce) => TypeError: is the class .* Write .*NcclAllReduce\(\)
    mr.MirroredStrategy(["cpu:0"], cross_device_ops=mr.NcclAllReduce()) => ValueError: connects GPUs, but the devices are
    mr.MirroredStrategy(FOUR, num_replicas=6) => DeviceError: is 6 for 4 devices; .* Write num_replicas=4, .* with 3 of them
    mr.MirroredStrategy(FOUR, num_replicas=2) => DeviceError: expected a multiple of 4.* Write num_replicas=4
    mr.MirroredStrategy(FOUR, num_replicas="8") => TypeError: expected an int
    mr.MirroredStrategy(FOUR, num_replicas=8, schedule="later") => ValueError: schedule is 'later'; expected 'together'
NcclAllReduce
    mr.NcclAllReduce(-1) => ValueError: num_packs is -1; expected 0 or more packs
HierarchicalCopyAllReduce
    mr.HierarchicalCopyAllReduce(num_packs=-2) => ValueError: num_packs is -2; expected 0 or more packs
ReductionToOneDevice
    mr.ReductionToOneDevice(accumulation_fn="max") => TypeError: accumulation_fn is 'max'; expected a function of a list
OneDeviceStrategy
    mr.OneDeviceStrategy(["cpu:0"]) => TypeError: device is \['cpu:0'\]; expected one device, for example 'gpu:0'
profile
    mr.profile(3).__enter__() => TypeError: mr\.profile got 3; expected a folder to write into
    step(lambda: mr.profile("p").__enter__()) => ContextError: mr\.profile was called inside a step
progress
    mr.progress(3) => TypeError: mr\.progress got 3; expected the batches of a loop: for batch in mr\.progress\(dataset\)
    mr.progress([], total="4") => TypeError: total is '4'; expected how many batches
    mr.progress([], description=3) => TypeError: description is 3; expected a str
report
    mr.report(3) => TypeError: mr\.report got 3; expected a strategy: mr\.report\(strategy, 'run\.html'\)
    mr.report(two, 3) => TypeError: path is 3; expected the file to write
    mr.report(two, ".") => IsADirectoryError: '\.' is a folder; write the name of a file: 'run\.html'
    step(lambda: mr.report(two)) => ContextError: mr\.report was called inside a step
Strategy.scope
    step(two.scope().__enter__) => ContextError: strategy\.scope\(\) was entered inside a step
    in_three(two.scope().__enter__) => StrategyMismatchError: Scopes of different strategies
Strategy.run
    step(3) => TypeError: strategy\.run got 3; expected a function, not called: strategy\.run\(step, args=\(x,\)\)
    step(abs, x) => TypeError: args of strategy\.run is PerReplica; .* with the comma
    step(abs, (), [1]) => TypeError: kwargs of strategy\.run is \[1\]; expected a dict
    step(abs, (WORDS,)) => TypeError: is a numpy array of dtype <U1, which no device can hold
    step(abs, (MASKED,)) => TypeError: NO_MASKS
    step(abs, (np.array([1, 2**33]),)) => ValueError: the argument `x` holds int64 values from 1 to 8589934592, .*jax_enable_x64
    step(lambda x: x, (x_of_three,)) => StrategyMismatchError: `x` .* of 3 .*ANOTHER
    step(lambda x: x, ([x_elsewhere],)) => StrategyMismatchError: `x\[0\]` .*ANOTHER
    step(lambda x: x.shape[0], (uneven,)) => UnevenReplicasError: return different things
    step(lambda: x) => TypeError: the step returned a PerReplica
    step(lambda x: x, (REF,)) => TypeError: the argument `x` is a jax\.Ref, .*v = mr\.Variable\(ref\[\.\.\.\]\)
    step(lambda: REF[...]) => TypeError: closes over a jax\.Ref
    step(lambda: {"r": jax.new_ref(jnp.ones(2))}) => TypeError: the step returned a jax\.Ref, .*return ref\[\.\.\.\]
    step(lambda x: w.assign(x), (SHAPE,)) => TypeError: `x` is a jax\.ShapeDtypeStruct, .*jnp\.zeros.*jax\.eval_shape\(lambda x:
    jax.vmap(lambda x: step(lambda y: y, (x,)))(x) => PerReplicaError: the argument `y` is a PerReplica whose array has
    jax.vmap(lambda k: step(lambda: w.assign(ONES * k)))(ONES) => ContextError: variable 'w' was written .*TRACED
    step(lambda: x + 1) => PerReplicaError: PerReplica does not support `\+`
    step(lambda: step(lambda: 1)) => ContextError: NOT_IN_A_STEP
    in_three(lambda: step(lambda: 1)) => StrategyMismatchError: ^run of .*2 replicas.* in the scope of .*3 replicas
Strategy.reduce
    in_three(lambda: two.reduce("sum", 1.0)) => StrategyMismatchError: ^reduce of .*2 replicas.* in the scope of .*3 replicas
    two.reduce("median", x) => ValueError: reduce_op is 'median'; KNOWN_OPS
    two.reduce(3, x) => TypeError: reduce_op is 3.*; KNOWN_OPS
    two.reduce("sum", {"a": [x, "b"]}) => TypeError: strategy\.reduce got 'b' of type str; NO_NUMBERS
    two.reduce("sum", SPARSE) => TypeError: got a BCOO, whose indices .* x\.todense\(\)
    two.reduce("sum", MASKED) => TypeError: NO_MASKS
    two.reduce("sum", np.array([2**40])) => ValueError: strategy\.reduce holds int64 values from .* as int32, which would wrap
    two.reduce("sum", x_of_three) => StrategyMismatchError: reduce got a PerReplica of 3 .*ANOTHER
    two.reduce("sum", {"a": of_three}) => StrategyMismatchError: reduce got variable 'of_three'
    step(lambda: two.reduce("sum", x)) => PerReplicaError: strategy\.run\(step, args=\(x,\)\)
    step(lambda: two.reduce("sum", jnp.ones(3), axis=1)) => ValueError: strategy\.reduce: axis=1 for a value of rank 1
Strategy.gather
    in_three(lambda: two.gather(ONES, 0)) => StrategyMismatchError: ^gather of .*2 replicas.* in the scope of .*3 replicas
    two.gather([x, "b"], 0) => TypeError: strategy\.gather got 'b' of type str; NO_NUMBERS
    step(lambda: two.gather(ONES, 0)) => ContextError: NOT_IN_A_STEP.*all_gather\(value, axis\)
Strategy.local_results
    in_three(lambda: two.local_results(1.0)) => StrategyMismatchError: ^local_results of .*2 replicas.* in the scope of .*3 r
    two.local_results(x_of_three) => StrategyMismatchError: local_results got a PerReplica of 3 .*ANOTHER
    step(lambda: two.local_results(w)) => ContextError: NOT_IN_A_STEP
Strategy.distribute_dataset
    in_three(lambda: two.distribute_dataset([ONES])) => StrategyMismatchError: ^distribute_dataset of .*2 .* in the scope of .*3
    two.distribute_dataset(3) => TypeError: got 3 of type int; expected an iterable of global batches
    two.distribute_dataset(ONES) => TypeError: got ndarray, one set of arrays; .*make_numpy_dataset
    two.distribute_dataset(zip([ONES])) => TypeError: got <zip object .*, an iterator that can be used only once; a second epoch
    two.distribute_dataset(rows) => ValueError: the dataset has rows, not batches
    two.distribute_dataset(distributed) => TypeError: the dataset is distributed already
    two.distribute_dataset([ONES], 2) => TypeError: options is 2; expected mr\.InputOptions
    next(iter(two.distribute_dataset([WORDS]))) => TypeError: which no device can hold
    next(iter(two.distribute_dataset([{"k": KEYS}]))) => TypeError: the dataset yielded at \['k'\] random keys, and KEY_LINES
    next(iter(two.distribute_dataset([x]))) => TypeError: the dataset yielded a PerReplica
    next(iter(two.distribute_dataset([1, 2]))) => ValueError: the dataset yielded a scalar; .* of a list of examples strategy\.mak
    next(iter(two.distribute_dataset([[ONES, [0, 1]]]))) => ValueError: a list of numbers at \[1\]; .* of it, np\.array\(numbers\)
    next(iter(two.distribute_dataset([(ONES, 3)]))) => ValueError: a scalar at \[1\]; .* one value for all rows, write np\.full\(n
    next(iter(two.distribute_dataset([(1.0, 3)]))) => ValueError: a scalar at \[0\]; .* is a single example, batch the dataset f
    step(lambda: two.distribute_dataset([ONES])) => ContextError: NOT_IN_A_STEP
Strategy.distribute_datasets_from_function
    two.distribute_datasets_from_function(3) => TypeError: dataset_fn is 3; expected a function of a mr\.InputContext
    two.distribute_datasets_from_function(lambda c: ONES) => TypeError: distribute_datasets_from_function got ndarray, one set
    two.distribute_datasets_from_function(list, mr.InputOptions(auto_shard_policy="data"))
        => ValueError: dataset_fn shares the records out by itself
    step(lambda: two.distribute_datasets_from_function(lambda c: [])) => ContextError: NOT_IN_A_STEP
Strategy.make_numpy_dataset
    two.make_numpy_dataset(None) => TypeError: got None, which holds no array
    two.make_numpy_dataset((ONES, np.float32(1))) => ValueError: a scalar at \[1\]; expected arrays whose first axis counts rows
    two.make_numpy_dataset({"x": MASKED}) => TypeError: \['x'\] is a NO_MASKS
    two.make_numpy_dataset({"k": KEYS}) => TypeError: \['k'\] holds random keys, and KEY_LINES
    two.make_numpy_dataset({"x": [[1, 2], [3]]}) => ValueError: \['x'\] is a list whose elements have different shapes
    two.make_numpy_dataset(WORDS) => TypeError: has dtype <U1, which no device can hold
    two.make_numpy_dataset((np.ones(2), np.ones(3))) => ValueError: different numbers of rows
Strategy.distribute_values_from_function
    two.distribute_values_from_function(3) => TypeError: value_fn is 3; expected a function of a mr\.ValueContext
    jax.vmap(lambda k: two.reduce("sum", values(two, lambda i: k)))(ONES) => ContextError: an array that JAX traces, .*\(x,\)\)
    values(two, lambda i: "a") => TypeError: distribute_values_from_function got 'a' of type str; NO_NUMBERS
    values(two, lambda i: MASKED) => TypeError: NO_MASKS
    values(two, lambda i: np.ones((1,) * (1 + i)))
        => ValueError: arrays of different ranks, shapes \(1,\), \(1, 1\); expected one rank for all replicas
    values(two, lambda i: np.ones(1, ["int32", "float32"][i])) => TypeError: returned different dtypes: float32, int32
    values(two, lambda i: [1] * (1 + i)) => ValueError: value_fn returned the structure .* for replica 0 and .* for replica 1
    step(lambda: values(two, lambda i: 1)) => ContextError: NOT_IN_A_STEP
Strategy.barrier
    two.barrier(3) => TypeError: barrier: name is 3; expected a non-empty string
    step(lambda: two.barrier("here")) => ContextError: inside a step or an mr\.function, which is traced once
Strategy.assert_mirrored
    step(lambda: two.assert_mirrored()) => ContextError: inside a step or an mr\.function, which is traced once
# in a step
ReplicaContext.all_reduce
    in_context(lambda ctx: ctx.all_reduce("sum", [WORDS])) => TypeError: all_reduce got .* of type ndarray; NO_NUMBERS
    in_context(lambda ctx: ctx.all_reduce("sum", of_three)) => StrategyMismatchError: 'of_three'
    in_context(lambda ctx: ctx.all_reduce("sum", jax.random.key(0)))
        => TypeError: key<fry> cannot be added over the replicas.*ctx\.all_gather
ReplicaContext.all_gather
    in_context(lambda ctx: ctx.all_gather(ONES, 1)) => ValueError: all_gather: axis=1 for a value of rank 1 on each replica
    in_context(lambda ctx: ctx.all_gather(1.0, 0)) => ValueError: it is a scalar and has no axes.*x\[None\]
    in_context(lambda ctx: ctx.all_gather("a", 0)) => TypeError: all_gather got 'a' of type str; NO_NUMBERS
ReplicaContext.merge_call
    in_context(lambda ctx: ctx.merge_call(3)) => TypeError: merge_call got 3; expected a function
    in_context(lambda ctx: ctx.merge_call(max, ONES)) => TypeError: args of merge_call is ndarray; .*args=\(x,\).*comma
    in_context(lambda ctx: ctx.merge_call(max, (), [1])) => TypeError: kwargs of merge_call is \[1\]; expected a dict
ReplicaContext.rng
    in_context(lambda ctx: ctx.rng("a")) => TypeError: rng got 'a'; expected a key from jax\.random\.key\(seed\), or an int
    in_context(lambda ctx: ctx.rng(0, rows=2.0)) => TypeError: number of rows is 2\.0; expected an int .*x\.shape\[0\]
ReplicaContext.row_keys
    in_context(lambda ctx: ctx.row_keys(0, -1)) => TypeError: number of rows is -1; expected an int
    in_context(lambda ctx: ctx.row_keys(jax.random.split(jax.random.key(0), 3), 2)) => TypeError: \(3,\); expected one.*jax\.vmap
# variables
Variable
    mr.Variable(None, name="v") => TypeError: value of variable 'v' is None of type NoneType; expected an array or a num
    mr.Variable("a", name="v") => TypeError: the initial value of variable 'v' is 'a' of type str
    mr.Variable({"a": 1}) => TypeError: there is no array in .*mr\.Variable\(jax\.tree\.map\(jnp\.asarray, tree\)\)
    mr.Variable(2**40) => TypeError: is 1099511627776, which the dtype int32 cannot hold
    mr.Variable(1.5, dtype="int32") => TypeError: is 1\.5, which the dtype int32 cannot hold\. Round it, or use another dtype
    mr.Variable(1.0, name=3) => TypeError: name is 3; expected a non-empty string
    mr.Variable(1.0, synchronization="sometimes") => ValueError: is 'sometimes'; expected one of 'auto', .*'on_read'
    mr.Variable(1.0, synchronization="none") => ValueError: synchronization NONE is not supported\. Use 'on_write'
    mr.Variable(1.0, aggregation="last") => ValueError: aggregation is 'last'; expected one of 'none', 'sum', 'mean'
    mr.Variable(1, name="v", aggregation="mean") => ValueError: 'v' has dtype int32 and aggregation MEAN.*dtype='float32'
    mr.Variable(x) => PerReplicaError: the initial value is a PerReplica, one value per replica
    step(lambda: mr.Variable(1.0, name="v")) => ContextError: 'v' was created inside a step
    jax.vmap(lambda x: mr.Variable(x).value)(ONES) => ContextError: was created inside a step or another traced
    jax.jit(lambda: mr.Variable(1.0).shape)() => ContextError: was created inside a step or another traced
Variable.assign
    w.assign(None) => TypeError: assign to variable 'w' is None of type NoneType; expected an array or a number
    w.assign(MASKED) => TypeError: NO_MASKS
    w.assign(np.ones(3)) => ValueError: assign to variable 'w' of shape \(2,\) was given a value of shape \(3,\)
    w.assign(np.ones(2, "complex64")) => TypeError: of dtype float32 .* complex64, which would lose
    counts.assign(np.ones(2)) => TypeError: 'counts' of dtype int32 was given a value of dtype float32
    w.assign(x) => ReplicasDivergeError: 'w' .* Reduce it first: variable\.assign
    mean.assign(x_elsewhere) => StrategyMismatchError: ANOTHER
    mean.assign(uneven) => UnevenReplicasError: given a PerReplica with shapes \(1,\), \(2,\)
    mean.assign(scalars) => ValueError: was given a PerReplica with shapes \(\), \(\)
    w.assign(private) => ValueError: variable 'private' has one value per replica
    private.assign(ONES) => ValueError: assign to variable 'private' outside a step
    step(lambda: mean.assign(x)) => PerReplicaError: inside a step was given a PerReplica.*strategy\.run\(fn, args=\.\.\.\)
    step(lambda x: [w.assign(x)], (x,)) => ReplicasDivergeError: argument `x`
    three.run(lambda: w.assign(ONES)) => StrategyMismatchError: variable 'w' lives on 2 replicas
    jax.jit(lambda x: w.assign(x).value)(ONES) => ContextError: variable 'w' was written .*TRACED
    step(lambda: jax.lax.fori_loop(0, 2, lambda i, c: (w.assign(ONES), c)[1], 0)) => ContextError: TRACED
    step(lambda: jax.lax.while_loop(lambda c: c < 2, lambda c: (w.assign(ONES), c)[1], 0)) => ContextError: as from jax\.lax\.wh
Variable.assign_add
    w.assign_add(np.ones(3)) => ValueError: assign_add to variable 'w' of shape \(2,\)
Variable.assign_sub
    w.assign_sub("a") => TypeError: assign_sub to variable 'w' is 'a' of type str
Variable.value
    jax.jit(lambda: w.value)() => ContextError: variable 'w' was read .*TRACED
    private.value => ValueError: variable 'private' has one value per replica and aggregation NONE
    three.run(lambda: w.value) => StrategyMismatchError: variable 'w' lives on 2 replicas
Variable.read_value
    jax.jit(lambda: w.read_value())() => ContextError: variable 'w' was read .*TRACED
Variable.scatter_update
    w.scatter_update([2], 1.0) => ValueError: indices go from 2 to 2; expected 0 to 1
    w.scatter_max(x, 1.0) => PerReplicaError: was given a PerReplica\. Pass it to a step
    w.scatter_add([0], "a") => TypeError: scatter_add to variable 'w' is .*'a'
    jax.jit(lambda x: w.scatter_add([0], x).value)(1.0) => ContextError: TRACED
    private.scatter_add([0], 1.0) => ValueError: variable 'private' has one value per replica|outside a step
VariableTree
    mr.Variable({"a": "b"}, name="v") => TypeError: variable 'v': there is no array in
VariableTree.assign
    mr.Variable({"a": ONES}, name="v").assign(ONES) => ValueError: v\.assign got a tree of structure
    mr.Variable({"a": ONES, "n": 1}, name="v").assign({"a": ONES, "n": 2}) => ValueError: got \['n'\] = 2, which was 1 .*step=jnp
VariableTree.numpy
    jax.jit(lambda: mr.Variable({"a": w}).numpy())() => ContextError: variable 'w' was read
Variable.numpy
    jax.jit(lambda: jnp.asarray(w.numpy()))() => ContextError: variable 'w' was read .*TRACED
# programs
function
    mr.function(3) => TypeError: mr\.function got 3; expected a function: @mr\.function above
    mr.function(lambda: (step(lambda: w + 1), three.run(lambda: of_three + 1)))()
        => StrategyMismatchError: an mr\.function uses two strategies
    mr.function(lambda x: two.reduce("sum", x))(x_of_three) => StrategyMismatchError: ANOTHER
    mr.function(lambda r: r[...])(REF) => TypeError: the argument `r` is a jax\.Ref
    mr.function(lambda: jax.vmap(lambda k: step(jnp.multiply, (x, k)))(ONES))()
        => PerReplicaError: the function returned a PerReplica whose
    jax.vmap(mr.function(lambda k: w.assign(ONES * k)))(ONES) => ContextError: variable 'w' was written .*TRACED
scan
    mr.scan(3, 0.0, ONES) => TypeError: mr\.scan got 3 as its body; expected a function
    mr.scan(lambda carry, x: carry, 0.0, ONES) => TypeError: returned an array; expected a pair \(new carry, y\)
    mr.scan(lambda c, x: (c, "s"), 0.0, ONES) => TypeError: the y of mr\.scan's body got 's\'
    mr.scan(lambda c, x: (c, REF[...]), 0.0, ONES) => TypeError: closes over a jax\.Ref
    mr.scan(lambda c, x: (c, x), "a", ONES) => TypeError: the carry of mr\.scan got 'a'
    mr.scan(lambda c, x: (c, x), 0.0, "ab") => TypeError: xs of mr\.scan got 'ab'
    mr.scan(lambda c, x: (c, x), 0.0, [1.0, 2.0]) => ValueError: scalar.*jnp\.asarray\(\[1\.0, 2\.0\]\)
    mr.scan(lambda c, x: (c, x), 0.0, (np.ones(2), np.ones(3))) => ValueError: different leading axis sizes: 2, 3
    mr.scan(lambda c, x: (c, x), 0.0, None, -1) => TypeError: mr\.scan got length=-1; expected an int, 0 or more
    mr.scan(lambda c, x: (c, x), 0.0, uneven) => UnevenReplicasError: xs of mr\.scan.*\(1,\), \(2,\), whose .* differ.*in the step
fori_loop
    mr.fori_loop(0, 3, None, 0.0) => TypeError: mr\.fori_loop got None as its body
    mr.fori_loop(0.5, 3, max, 0.0) => TypeError: mr\.fori_loop got the bounds 0\.5 and 3; expected two ints
    mr.fori_loop(0, 3, lambda i, carry: carry, "a") => TypeError: the carry of mr\.fori_loop got 'a'
cond
    mr.cond(True, 3, lambda: 1) => TypeError: mr\.cond got 3
    mr.cond(scalars, lambda: 1, lambda: 2) => PerReplicaError: PerReplica does not support
    mr.cond(True, lambda x: 1, lambda x: 2, "a") => TypeError: the operands of mr\.cond got 'a'
grad
    mr.grad(w, lambda: 1.0) => TypeError: expected a function that returns a loss
    mr.grad(lambda: [w.value], w)() => TypeError: the function returned \[.*\]; expected a loss, one for each example or one
    mr.grad(lambda: w[0] * 1j, w)() => TypeError: dtype complex64; expected a floating
    jax.jit(lambda: mr.grad(lambda: jnp.sum(w), w)())() => ContextError: TRACED
value_and_grad
    mr.value_and_grad(3, w) => TypeError: got 3; expected a function that returns a loss
    mr.value_and_grad(lambda: 1.0, None) => TypeError: got no variables
    mr.value_and_grad(lambda: 1.0, [ONES]) => TypeError: got array.* among its variables; .* use jax\.value_and_grad
    mr.value_and_grad(lambda: 1.0, counts) => TypeError: 'counts' has dtype int32; only floating point variables
    mr.value_and_grad(lambda: 1, w)() => TypeError: the loss has dtype int32; expected a floating point number
    mr.value_and_grad(lambda: (1.0, 2), w)() => TypeError: the function returned a tuple; pass has_aux=True
    mr.value_and_grad(lambda: 1.0, w, has_aux=True)() => TypeError: must return \(loss, aux\)
    mr.value_and_grad(lambda: 1.0, private)() => ContextError: variable 'private' is sync-on-read: outside a step
    step(lambda: mr.value_and_grad(lambda: jnp.sum(of_three), of_three)()) => StrategyMismatchError: 'of_three' lives on 3
# training
Optimizer
    mr.Optimizer(optax.adam, [w]) => TypeError: tx is <function adam
    mr.Optimizer(optax.sgd(0.1), [seen]) => ValueError: variable 'seen' is sync-on-read
    mr.Optimizer(optax.sgd(0.1), [w], aggregate="max") => ValueError: aggregate is 'max'; expected one of 'sum', 'mean'
    mr.Optimizer(optax.sgd(0.1), [w], aggregate=1) => TypeError: aggregate is 1.*; expected one of 'sum', 'mean'
    mr.Optimizer(optax.sgd(0.1), [w, w]) => ValueError: 'w' is listed twice
    mr.Optimizer(optax.sgd(0.1), [w, of_three]) => StrategyMismatchError: 'w' and 'of_three' belong to different strategies
    step(lambda: mr.Optimizer(optax.sgd(0.1), [w])) => ContextError: was created inside a step.*next to the variables
Optimizer.minimize
    optimizer.minimize(3.0) => TypeError: minimize got an object of type float as its loss; .*minimize\(lambda: loss_of
    optimizer.minimize(lambda: w[0], [ONES]) => TypeError: of type ArrayImpl|of type ndarray
    optimizer.minimize(lambda: mean[0], [mean]) => ValueError: is not one that this optimizer was made for
    step(lambda: optimizer.minimize(w[0])) => TypeError: of type \w+ as its loss; .*minimize\(lambda: loss_of
Optimizer.apply_gradients
    apply([ONES], aggregate="average") => ValueError: aggregate is 'average'
    apply(None) => ValueError: got gradients of structure .*; expected .*zip\(
    apply([None]) => ValueError: got no gradient for any variable: every one is None
    apply(["a"]) => TypeError: the gradient of variable 'w' is 'a'; expected an array
    apply([np.ones(3)]) => ValueError: 'w' has shape \(3,\); expected \(2,\)
    apply([np.ones(2, "complex64")]) => TypeError: has dtype complex64; expected float32
    apply([x_of_three]) => StrategyMismatchError: ANOTHER
    apply([uneven]) => ValueError: 'w' has shape \(None,\)
    apply([x], aggregate=False) => PerReplicaError: aggregate=False.*PerReplica as the gradient of 'w'.*strategy\.reduce
    apply(zip([ONES], [of_three], strict=True)) => ValueError: 'of_three' in zip.*not one that this optimizer.*\('w'\)
    apply(zip([ONES], [3], strict=True)) => TypeError: expected pairs, as of zip
    apply(zip([], [], strict=True)) => TypeError: an iterator of \[\]; expected pairs
    apply(zip([ONES] * 2, [w] * 2, strict=True)) => ValueError: variable 'w' is twice in zip
    three.run(lambda: apply([ONES])) => StrategyMismatchError: 'w' lives on 2
    step(lambda: apply([x])) => PerReplicaError: strategy\.run\(step, args
    jax.jit(lambda: apply([ONES]))() => ContextError: TRACED
    step(lambda x: apply([x], aggregate=False), (x,)) => ReplicasDivergeError: is mirrored, but the value assigned to it
    step(lambda x: apply([jax.lax.psum(x, "replica")]), (x,)) => FactorOfReplicasError: has already been combined over the
losses.compute_average_loss
    mr.losses.compute_average_loss(ONES) => ContextError: was called outside a step
    average(1.0) => ValueError: compute_average_loss got a scalar; expected one loss per example
    average("a") => TypeError: per_example_loss is 'a' of type str; expected an array of numbers
    average(np.ones(2, "complex64")) => TypeError: per_example_loss has dtype complex64; expected real numbers
    average(ONES, np.ones(3)) => ValueError: sample_weight has shape \(3,\), per_example_loss has shape \(2,\)
    average(ONES, np.ones((2, 1))) => ValueError: sample_weight has shape \(2, 1\), per_example_loss has shape \(2,\)
    average(ONES, None, 0) => ValueError: global_batch_size is 0; expected the whole number of examples
    average(ONES, None, True) => ValueError: global_batch_size is True; expected the whole number of examples
losses.weighted_mean
    mr.losses.weighted_mean(ONES, ONES) => ContextError: weighted_mean was called outside a step
    step(lambda: mr.losses.weighted_mean(ONES, np.ones(3))) => ValueError: weights has shape \(3,\), losses has shape \(2,\)
losses.mean_over_own_rows
    mr.losses.mean_over_own_rows(1.0) => ContextError: mean_over_own_rows was called outside a step
    step(lambda: mr.losses.mean_over_own_rows(ONES)) => ValueError: got shape \(2,\); expected a scalar.*needs no word
losses.already_divided
    mr.losses.already_divided(1.0) => ContextError: already_divided was called outside a step
    step(lambda: mr.losses.already_divided(ONES)) => ValueError: got shape \(2,\); expected a scalar.*needs no word
    step(lambda: mr.losses.already_divided("a")) => TypeError: the loss given to already_divided is 'a'
losses.as_share
    mr.losses.as_share(1.0) => ContextError: as_share was called outside a step
    step(lambda: mr.losses.as_share({"a": "b"})) => TypeError: a value given to as_share is 'b'
losses.scale_regularization_loss
    mr.losses.scale_regularization_loss(1.0) => ContextError: was called outside a step
    step(lambda: mr.losses.scale_regularization_loss("a")) => TypeError: regularization_loss is 'a'
losses.global_loss
    mr.losses.global_loss(1.0) => TypeError: global_loss got 1\.0; expected a function.*average_loss\(per_example_loss\(w\)\)
    mr.losses.global_loss(jnp.sum)(ONES) => ContextError: global_loss was called outside a step
    step(lambda: mr.losses.global_loss(lambda w: w)(ONES)) => TypeError: returned shape \(2,\); expected a scalar
    step(lambda: mr.losses.global_loss(lambda w: "a")(ONES)) => TypeError: the function given to global_loss is 'a'
export
    mr.export(values(two, lambda i: np.ones(1 + i))) => UnevenReplicasError: got a PerReplica with the shapes
    jax.jit(lambda: mr.export(w))() => ContextError: TRACED
# datasets
InputOptions
    mr.InputOptions(True) => TypeError: positional
    setattr(mr.InputOptions(), 'prefetch', 3) => AttributeError: cannot assign to field 'prefetch'
    mr.InputOptions(prefetch=-1) => ValueError: prefetch is -1; expected 0 or more batches
    mr.InputOptions(drop_remainder=1) => TypeError: drop_remainder is 1; expected True or False
    mr.InputOptions(auto_shard_policy="files") => ValueError: auto_shard_policy is 'files'; expected one of
InputContext.get_per_replica_batch_size
    mr.InputContext(1, 0, 2).get_per_replica_batch_size(3) => ValueError: 3 is not divisible by the 2
    mr.InputContext().get_per_replica_batch_size(0) => ValueError: global_batch_size is 0; expected at
data.DistributedDataset.take
    distributed.take(-1) => ValueError: take got -1; expected at least 0
data.DistributedDataset.repeat
    distributed.repeat(0) => ValueError: repeat got 0; expected at least 1, the number of passes, or None
data.DistributedDataset.map
    distributed.map(None) => TypeError: map got None; expected a function of a batch
data.NumpyDataset.take
    rows.take("2") => TypeError: count is '2'; expected an int
    rows.take(3) => ValueError: take was called after shuffle, repeat or map\. Take rows first
data.NumpyDataset.map
    rows.map(3) => TypeError: map got 3; expected a function of a batch
data.DistributedIterator.set_state
    iter(distributed).set_state(3) => TypeError: state is 3; expected what get_state\(\)
    iter(distributed).set_state({"version": 1, "policy": "DATA", "worker": None, "source": {"next": 7}})
        => ValueError: the state does not fit list: ValueError: batch 7 of 1
data.NumpyDataset
    NumpyDataset({"x": [1, 2]}) => TypeError: \['x'\]\[0\] is 1 of type int; expected a numpy array
    NumpyDataset(ONES, batch_size=0) => ValueError: batch_size is 0; expected at least 1
    len(NumpyDataset(ONES)) => ValueError: the dataset has rows, not batches\. .*\.batch\(global_batch_size\)
data.NumpyDataset.batch
    rows.batch(0) => ValueError: batch_size is 0; expected at least 1
    rows.batch(2, "no") => TypeError: drop_remainder is 'no'; expected True or False
    rows.batch(2).batch(2) => ValueError: the dataset is batched already, by 2
data.NumpyDataset.shuffle
    rows.shuffle(seed=-1) => ValueError: seed is -1; expected at least 0
    rows.shuffle() => TypeError: shuffle got seed=None; expected a seed by its name, and no more: \.shuffle\(seed=0\)
    rows.shuffle(1000) => TypeError: shuffle got buffer_size=1000, seed=None; .* as in tf\.data with a buffer_size
data.NumpyDataset.repeat
    rows.repeat(0) => ValueError: num_epochs is 0; expected at least 1
# files
data.tfrecord_dataset
    mr.data.tfrecord_dataset(3) => TypeError: files is 3 of type int; expected a path, a pattern
    mr.data.tfrecord_dataset([]) => ValueError: files is empty; expected at least one path
    mr.data.tfrecord_dataset("missing") => FileNotFoundError: there is no file 'missing'
    mr.data.tfrecord_dataset(["missing-*"]) => FileNotFoundError: expand a pattern with sorted\(glob\.glob\(pattern\)\)
    mr.data.tfrecord_dataset(".") => IsADirectoryError: '\.' is a directory; name its files: '\./\*\.tfrecord'
    mr.data.tfrecord_dataset({"a"}) => TypeError: of type set; .* in the order in which they are to be read
    mr.data.tfrecord_dataset([3]) => TypeError: files contains 3 of type int; expected paths
    mr.data.tfrecord_dataset(__file__).batch(0) => ValueError: batch_size is 0; expected an int
    mr.data.tfrecord_dataset("missing-*") => FileNotFoundError: no file matches 'missing-\*'
    mr.data.tfrecord_dataset(__file__, "LZ4") => ValueError: compression is 'LZ4'; expected None, 'GZIP'
    mr.data.tfrecord_dataset(__file__, None, "1") => ValueError: max_record_bytes is '1'; expected a number
    list(mr.data.tfrecord_dataset(__file__)) => data.TFRecordError: put\.py: record 0, at byte 0: its length is damaged
data.write_tfrecords
    mr.data.write_tfrecords("out", b"a") => TypeError: records is bytes; expected an iterable of bytes
    mr.data.write_tfrecords("out", ["a"]) => TypeError: record 0 is 'a' of type str; expected bytes
    mr.data.write_tfrecords("out", [], "LZ4") => ValueError: compression is 'LZ4'
    mr.data.write_tfrecords("no folder/out", []) => FileNotFoundError: No such file
data.parse_example
    mr.data.parse_example("a", {}) => TypeError: records is str; expected bytes or a list of bytes
    mr.data.parse_example([1], {}) => TypeError: record 0 of the batch is 1 of type int
    mr.data.parse_example(WORDS, {}) => TypeError: is ndarray; .* a shuffle, write \.batch\(n, batch_fn=list\)
    mr.data.parse_example(b"", {3: int}) => TypeError: spec has 3
    mr.data.parse_example(b"", None) => TypeError: spec is NoneType; expected a dict
    mr.data.parse_example(b"", {"x": int}) => TypeError: spec has 'x': <class 'int'>
    mr.data.parse_example(b"\xff", {}) => ValueError: the record is no tf\.train\.Example
    mr.data.parse_example(b"", {"x": mr.data.FixedLenFeature((), np.int64)})
        => ValueError: feature 'x': the record does not have it, and it has no default
data.make_example
    mr.data.make_example([1]) => TypeError: features is list; expected a dict
    mr.data.make_example({"x": "a"}) => TypeError: feature 'x' is 'a' of type str; expected bytes, ints or
    mr.data.make_example({1: 2}) => TypeError: features has the key 1; expected a string
    mr.data.make_example({"x": []}) => TypeError: feature 'x' is \[\] .* np\.zeros\(0, np\.float32\) for an empty list
    mr.data.make_example({"x": [b"a", "b"]}) => TypeError: feature 'x' is .* text\.encode\(\)
    mr.data.make_example({"x": np.array([b"a\0"])}) => TypeError: feature 'x' is array
    mr.data.make_example({"x": 1e300}) => ValueError: feature 'x' has values that float32 cannot hold
    mr.data.make_example({"x": 2**63}) => ValueError: feature 'x' has the value 9223372036854775808
data.FixedLenFeature
    mr.data.FixedLenFeature(2, np.int64) => TypeError: shape is 2; expected a tuple of ints
    mr.data.FixedLenFeature((), np.float32, b"a") => TypeError: default_value is b'a'; expected np\.float32
    mr.data.FixedLenFeature((2,), np.uint8, ONES[:0]) => ValueError: expected a value of shape \(2,\)
data.VarLenFeature
    mr.data.VarLenFeature(np.float64) => TypeError: dtype is <class 'numpy\.float64'>; expected bytes
# workers and checkpoints
CommunicationOptions
    mr.CommunicationOptions(implementation="gloo") => ValueError: implementation is 'gloo'; expected one of 'auto', 'ring'
    mr.CommunicationOptions(bytes_per_pack=-1) => ValueError: bytes_per_pack is -1; expected 0 or more
    mr.CommunicationOptions(timeout_seconds=0) => ValueError: timeout_seconds is 0; expected 1 to 604800 seconds
    mr.CommunicationOptions(timeout_seconds="60") => TypeError: timeout_seconds is '60'; expected seconds
MultiWorkerMirroredStrategy
    mr.MultiWorkerMirroredStrategy("10.0.0.1:22") => ClusterConfigError: cluster= is .*; give a resolver
    mr.MultiWorkerMirroredStrategy(communication_options=3) => TypeError: communication_options is 3; expec
    mr.MultiWorkerMirroredStrategy(cross_device_ops="nccl") => ValueError: cross_device_ops is 'nccl'; expected None
ClusterResolver
    mr.ClusterResolver() => TypeError: abstract class ClusterResolver
ClusterSpec
    mr.ClusterSpec.of([]) => ClusterConfigError: cluster is a list of 0; it names the workers
    mr.ClusterSpec.of({"ps": ["a:1"]}) => ClusterConfigError: parameter servers are not supported
ClusterSpec.job
    mr.ClusterSpec().job([]) => TypeError: unhashable
SimpleClusterResolver
    mr.SimpleClusterResolver({"worker": ["a"]}, "worker", 0) => ClusterConfigError: 'a', which has no port
SlurmClusterResolver
    mr.SlurmClusterResolver(environment={}).cluster() => ClusterConfigError: SLURM_STEP_NUM_TASKS is unset
KubernetesClusterResolver
    mr.KubernetesClusterResolver(environment={}).cluster() => ClusterConfigError: start it as a job
TFConfigClusterResolver
    mr.TFConfigClusterResolver(environment={"TF_CONFIG": "{"}).cluster() => ValueError: it is not JSON
Checkpoint
    mr.Checkpoint(3, w=w) => TypeError: directory is 3; expected a path
    mr.Checkpoint(directory="x", w=w) => TypeError: directory is ''; expected a path as the first argument, without a name
    mr.Checkpoint("unused", **{"../w": [1]}) => ValueError: the name '\.\./w' will not do
    mr.Checkpoint("unused") => TypeError: got nothing to save
    mr.Checkpoint("unused", max_to_keep=0, w=w) => ValueError: max_to_keep is 0; expected 1 or more
Checkpoint.restore_latest
    checkpoint.restore_latest(partial="w") => TypeError: partial is 'w'; expected True or False
Checkpoint.save
    checkpoint.save(-1) => TypeError: checkpoint\.save: step is -1; expected an int
    step(lambda: checkpoint.save(1)) => ContextError: inside a step
plan
    mr.plan(3) => TypeError: mr\.plan got 3; expected a strategy
    mr.plan(two) => PlanError: whose devices are here and run its steps.*mr\.topology
topology
    mr.topology(256) => TypeError: mr\.topology got 256; expected a name
    mr.topology("v5e") => PlanError: does not know 'v5e'; expected such as 'v5e:
PreemptionHandler
    mr.PreemptionHandler(3) => TypeError: checkpoint is 3; expected a mr\.Checkpoint
PreemptionHandler.after_step
    preempted(checkpoint, "1") => TypeError: preemption\.after_step: step is '1'; expected an int
"""
BLOCKS = re.split(r"\n(?! )", TABLE.replace("\n        =>", " =>").strip())
BAD_INPUT = {name: [row.strip() for row in rows] for name, *rows in map(str.splitlines, BLOCKS) if rows}

#: What takes nothing from the user, apart from where it is called.
WITHOUT_INPUT = {
    "Checkpoint.close", "Checkpoint.steps", "Checkpoint.wait", "ClusterResolver.cluster",
    "ClusterResolver.cluster_spec", "ClusterSpec.as_dict", "KubernetesClusterResolver.cluster", "PreemptionHandler.close",
    "SimpleClusterResolver.cluster", "SlurmClusterResolver.cluster", "TFConfigClusterResolver.cluster",
    "eager", "get_replica_context", "get_strategy", "has_strategy", "in_cross_replica_context", "Strategy.explain",
    "Variable.read_value", "data.DistributedDataset.describe", "data.DistributedIterator.close",
    "data.DistributedIterator.get_state", "Plan.as_dict",
}  # fmt: skip
#: Not made by users: strategies, contexts and datasets make them.
NOT_MADE_BY_USERS = {
    "Strategy", "ReplicaContext", "PerReplica", "Plan",
    "Plan.efficiency", "Plan.estimate", "Plan.fits", "ValueContext", "InputContext", "data.DistributedDataset",
    "data.DistributedIterator", "data.PerReplicaSpec",
}  # fmt: skip


def public_callables() -> set[str]:
    """The names of all public functions, classes and methods; those of a base class under its name."""
    found = set()
    for prefix, module in (("", mr), ("losses.", mr.losses), ("data.", mr.data)):
        for name, value in vars(module).items():
            is_ours = getattr(value, "__module__", "").startswith("mirrored")
            if name.startswith("_") or not is_ours or isinstance(value, types.ModuleType):
                continue
            if inspect.isfunction(value):
                found.add(prefix + name)
            elif inspect.isclass(value) and not issubclass(value, Exception) and not hasattr(value, "__members__"):
                found.add(prefix + name)
                found |= {f"{prefix}{name}.{method}" for method, f in vars(value).items() if _is_public_function(method, f)}
    return {name for name in found if name not in {"losses.ContextError"}}


def _is_public_function(name: str, value: Any) -> bool:
    # TensorFlow's old names call the others: test_strategy.py.
    return not name.startswith(("_", "experimental_")) and inspect.isfunction(inspect.unwrap(value) if callable(value) else value)


def test_the_table_has_every_public_function_and_method_that_takes_something() -> None:
    assert public_callables() - WITHOUT_INPUT - NOT_MADE_BY_USERS - set(BAD_INPUT) == set()
    for name in WITHOUT_INPUT:
        value: Any = mr
        for part in name.split("."):
            value = getattr(value, part)
        assert [p for p in inspect.signature(value).parameters if p != "self"] == []


def rows_of(name: str) -> Iterator[tuple[str, tuple[type[Exception], ...], str]]:
    """Yield the expression, error and message of each row."""
    for row in BAD_INPUT[name]:
        expression, _, expected = row.partition(" => ")
        errors, _, message = expected.partition(": ")
        for short, words in WORDS_OF.items():
            message = message.replace(short, words)
        kinds = [
            getattr(builtins, kind, None) or getattr(mr.data if "." in kind else mr, kind.removeprefix("data."))
            for kind in errors.split("|")
        ]
        yield expression, tuple(kinds), message


#: Whose errors show a few of our lines: what is read often, and what needs no JAX.
SHOWS_MORE = {
    "Variable.value", "data.tfrecord_dataset", "data.parse_example", "data.make_example", "ClusterSpec",
    "SlurmClusterResolver", "KubernetesClusterResolver", "TFConfigClusterResolver",
}  # fmt: skip


def lines_of_libraries(error: BaseException) -> list[str]:
    """The lines of ours and of JAX's in a traceback."""
    summaries = traceback.extract_tb(error.__traceback__)
    return [line.filename for line in summaries if re.search("/(mirrored|jax)/", line.filename)]


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_clear_error_and_changes_nothing(name: str, world: types.SimpleNamespace) -> None:
    before = state(world)
    for expression, errors, message in rows_of(name):
        with pytest.raises(errors, match=f"(?s){message}") as caught:
            eval(expression, NAMES | vars(world))
            pytest.fail(f"{expression} was accepted")
        is_alone = caught.value.__context__ is None or caught.value.__suppress_context__
        assert is_alone or caught.value.__cause__ is not None, f"a second error while handling the first: {expression}"
        assert state(world) == before, expression
        assert name in SHOWS_MORE or re.search("jax|jnp", expression) or len(lines_of_libraries(caught.value)) <= 3, expression


def test_the_world_works(world: types.SimpleNamespace) -> None:
    """The right program passes, on the same objects, after all the wrong ones."""

    def step(x: Any) -> Any:
        loss, gradients = mr.value_and_grad(lambda: mr.losses.compute_average_loss((world.w - x) ** 2), [world.w])()
        world.optimizer.apply_gradients(gradients)
        world.seen.assign_add(ONES)
        world.mean.assign(x)
        return loss

    loss = world.two.run(step, args=(world.x,))
    assert float(world.two.reduce("sum", loss)) == pytest.approx(0.5)
    assert world.seen.numpy().tolist() == [4, 4]
    assert world.mean.numpy().tolist() == [0.5, 0.5]
    assert sorted(np.concatenate(list(world.rows.batch(3))).tolist()) == list(range(8))
    world.two.assert_mirrored()
