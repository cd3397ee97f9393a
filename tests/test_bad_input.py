"""Bad input, everywhere: one clear error each, and the world as it was before the call.

The table has a row for every public function and method; a new one without rows fails here.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr
from mirrored.data import NumpyDataset

ONES = np.ones(2, "float32")
WORDS = np.array(["a", "b"])


@dataclasses.dataclass
class World:
    """Everything that a call may touch: three strategies, their variables, values, an optimizer, datasets."""

    two: mr.MirroredStrategy
    three: mr.MirroredStrategy
    elsewhere: mr.MirroredStrategy
    w: mr.Variable
    counts: mr.Variable
    mean: mr.Variable
    seen: mr.Variable
    private: mr.Variable
    of_three: mr.Variable
    optimizer: mr.Optimizer
    rows: NumpyDataset
    distributed: mr.data.DistributedDataset
    x: mr.PerReplica
    scalars: mr.PerReplica
    uneven: mr.PerReplica
    x_of_three: mr.PerReplica
    x_elsewhere: mr.PerReplica
    checkpoint: mr.Checkpoint

    def in_step(self, function: Callable[[], Any]) -> Any:
        return self.two.run(function)

    def in_scope_of_three(self, function: Callable[[], Any]) -> Any:
        with self.three.scope():
            return function()

    def in_context(self, function: Callable[[mr.ReplicaContext], Any]) -> Any:
        return self.two.run(lambda: function(mr.get_replica_context()))

    def state(self) -> Any:
        variables = [value for value in vars(self).values() if isinstance(value, mr.Variable)] + self.optimizer._state
        return (
            [(variable.name, np.asarray(variable._array).tolist()) for variable in variables],
            (self.rows, list(self.rows._passes)),
            np.asarray(self.x._array).tolist(),
            mr.has_strategy(),
        )


def values(strategy: mr.Strategy, make: Callable[[int], Any]) -> mr.PerReplica:
    return strategy.distribute_values_from_function(lambda ctx: make(ctx.replica_id_in_sync_group))


def preempted(world: World, step: Any) -> None:
    with mr.PreemptionHandler(world.checkpoint) as preemption:
        preemption.after_step(step)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
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
    rows = two.make_numpy_dataset(np.arange(8)).shuffle(seed=0)
    yield World(
        two, three, elsewhere, w, counts, mean, seen, private, of_three, optimizer, rows,
        distributed=two.distribute_dataset([np.arange(4)]),
        x=values(two, lambda i: ONES * i),
        scalars=values(two, np.float32),
        uneven=values(two, lambda i: np.ones(1 + i, "float32")),
        x_of_three=values(three, lambda i: ONES * i),
        x_elsewhere=values(elsewhere, lambda i: ONES * i),
        checkpoint=mr.Checkpoint(tmp_path_factory.mktemp("saved"), w=w, optimizer=optimizer),
    )  # fmt: skip


Row = tuple[Callable[[World], Any], type[Exception], str]

NO_NUMBERS = r" of type {}; expected arrays or numbers, in any nest"
FROM_ANOTHER = r"it comes from another strategy"
TRACED = r"under a JAX transformation"
NOT_IN_A_STEP = r"was called inside a step that strategy\.run is running"


def combining(verb: str, call: Callable[[World, Any], Any]) -> list[Row]:
    """Rows for a verb that combines the leaves of a tree over the replicas."""
    return [
        (lambda world: call(world, "a"), TypeError, rf"{verb} got 'a'" + NO_NUMBERS.format("str")),
        (lambda world: call(world, {"a": [world.x, "b"]}), TypeError, rf"{verb} got 'b'" + NO_NUMBERS.format("str")),
        (lambda world: call(world, object()), TypeError, NO_NUMBERS.format("object")),
        (lambda world: call(world, len), TypeError, NO_NUMBERS.format("builtin_function_or_method")),
        (lambda world: call(world, {1}), TypeError, NO_NUMBERS.format("set")),
        (lambda world: call(world, WORDS), TypeError, NO_NUMBERS.format("ndarray")),
        (lambda world: call(world, np.array([None])), TypeError, NO_NUMBERS.format("ndarray")),
        (lambda world: call(world, np.zeros(2, [("a", int)])), TypeError, NO_NUMBERS.format("ndarray")),
        (lambda world: call(world, np.zeros(2, "M8[s]")), TypeError, NO_NUMBERS.format("ndarray")),
    ]


def mixing(verb: str, call: Callable[[World, Any], Any]) -> list[Row]:
    """Rows for a verb that is given what belongs to another strategy, or is called in its scope."""
    return [
        (
            lambda world: call(world, world.x_of_three),
            mr.StrategyMismatchError,
            rf"{verb} got a PerReplica of 3 .*{FROM_ANOTHER}",
        ),
        (
            lambda world: call(world, [world.x_elsewhere]),
            mr.StrategyMismatchError,
            rf"lie on \['cpu:2', 'cpu:3'\].*{FROM_ANOTHER}",
        ),
        (lambda world: call(world, {"a": world.of_three}), mr.StrategyMismatchError, rf"{verb} got variable 'of_three'"),
        (
            lambda world: world.in_scope_of_three(lambda: call(world, 1.0)),
            mr.StrategyMismatchError,
            rf"{verb} of .* was called in the scope of .*3 replicas",
        ),
    ]


def axes(verb: str, call: Callable[[World, Any], Any]) -> list[Row]:
    return [
        (lambda world: call(world, 5), ValueError, rf"{verb}: axis=5 for a value of rank 1 on each replica; its only axis is 0"),
        (lambda world: call(world, -2), ValueError, rf"{verb}: axis=-2 for a value of rank 1"),
        (lambda world: call(world, "0"), TypeError, rf"{verb}: axis is '0' of type str; expected an int, for example axis=0"),
        (lambda world: call(world, 1.5), TypeError, rf"{verb}: axis is 1\.5 of type float"),
        (lambda world: call(world, True), TypeError, rf"{verb}: axis is True of type bool"),
    ]


def operations(call: Callable[[World, Any], Any]) -> list[Row]:
    expected = r"expected one of 'sum', 'mean' or a member of mr\.ReduceOp, for example mr\.ReduceOp\.SUM"
    return [
        (lambda world: call(world, "max"), ValueError, rf"reduce_op is 'max'; {expected}"),
        (lambda world: call(world, ""), ValueError, rf"reduce_op is ''; {expected}"),
        (lambda world: call(world, None), TypeError, rf"reduce_op is None; {expected}"),
        (lambda world: call(world, 3), TypeError, rf"reduce_op is 3; {expected}"),
        (lambda world: call(world, mr.VariableAggregation.SUM), TypeError, rf"; {expected}"),
        (lambda world: call(world, world.x), TypeError, r"reduce_op is PerReplica"),
    ]


def running(call: Callable[..., Any]) -> list[Row]:
    return [
        (
            lambda world: call(world, 3),
            TypeError,
            r"strategy\.run got 3; expected a function, not called: strategy\.run\(step, args=\(x,\)\)",
        ),
        (lambda world: call(world, None), TypeError, r"strategy\.run got None"),
        (lambda world: call(world, abs, world.x), TypeError, r"args of strategy\.run is PerReplica; .* with the comma"),
        (lambda world: call(world, abs, ONES), TypeError, r"args of strategy\.run is ndarray"),
        (lambda world: call(world, abs, "ab"), TypeError, r"args of strategy\.run is str"),
        (lambda world: call(world, abs, {"x": 1}), TypeError, r"args of strategy\.run is dict"),
        (lambda world: call(world, abs, (), [1]), TypeError, r"kwargs of strategy\.run is \[1\]; expected a dict"),
        (lambda world: call(world, abs, (), {1: 2}), TypeError, r"kwargs of strategy\.run is \{1: 2\}"),
        (lambda world: call(world, lambda x: x), TypeError, r"missing 1 required positional argument: 'x'"),
        (lambda world: call(world, lambda: 1, (), {"y": 1}), TypeError, r"unexpected keyword argument 'y'"),
        (lambda world: call(world, abs, (WORDS,)), TypeError, r"is a numpy array of dtype <U1, which no device can hold"),
        (lambda world: call(world, abs, (np.zeros(2, [("a", int)]),)), TypeError, r"which no device can hold"),
        (lambda world: call(world, lambda x: x, (world.x_of_three,)), mr.StrategyMismatchError, rf"`x` .* of 3 .*{FROM_ANOTHER}"),
        (lambda world: call(world, lambda x: x, ([world.x_elsewhere],)), mr.StrategyMismatchError, rf"`x\[0\]` .*{FROM_ANOTHER}"),
        (lambda world: call(world, lambda x: x.shape[0], (world.uneven,)), mr.UnevenReplicasError, r"return different things"),
        (
            lambda world: call(world, lambda: world.of_three + 1),
            mr.StrategyMismatchError,
            r"variable 'of_three' lives on 3 replicas",
        ),
        (
            lambda world: call(world, lambda: world.of_three.assign(ONES)),
            mr.StrategyMismatchError,
            r"variable 'of_three' lives on",
        ),
        (lambda world: call(world, lambda: world.x), TypeError, r"the step returned a PerReplica"),
        (lambda world: call(world, lambda: world.x + 1), mr.PerReplicaError, r"PerReplica does not support `\+`"),
        (lambda world: world.in_step(lambda: call(world, lambda: 1)), mr.ContextError, NOT_IN_A_STEP),
        (lambda world: world.in_scope_of_three(lambda: call(world, lambda: 1)), mr.StrategyMismatchError, r"run of .*scope of"),
    ]


def assigning(method: str) -> list[Row]:
    def call(variable: mr.Variable, value: Any) -> Any:
        return getattr(variable, method)(value)

    what = rf"{method} to variable 'w' "
    return [
        (lambda world: call(world.w, None), TypeError, what + r"is None of type NoneType; expected an array or a number"),
        (lambda world: call(world.w, "a"), TypeError, what + r"is 'a' of type str"),
        (lambda world: call(world.w, object()), TypeError, what + r"is <object object"),
        (lambda world: call(world.w, {"a": 1}), TypeError, what + r"is \{'a': 1\} of type dict"),
        (lambda world: call(world.w, WORDS), TypeError, what + r"is array\(\['a', 'b'\]"),
        (lambda world: call(world.w, np.ones(3)), ValueError, what + r"of shape \(2,\) was given a value of shape \(3,\)"),
        (lambda world: call(world.w, 1.0), ValueError, what + r"of shape \(2,\) was given a value of shape \(\)"),
        (
            lambda world: call(world.w, np.ones(2, "complex64")),
            TypeError,
            what + r"of dtype float32 .* complex64, which would lose",
        ),
        (lambda world: call(world.counts, np.ones(2)), TypeError, r"'counts' of dtype int32 was given a value of dtype float32"),
        (lambda world: call(world.w, world.x), mr.ReplicasDivergeError, what + r".* Reduce it first: variable\." + method),
        (lambda world: call(world.mean, world.x_of_three), mr.StrategyMismatchError, FROM_ANOTHER),
        (lambda world: call(world.mean, world.x_elsewhere), mr.StrategyMismatchError, FROM_ANOTHER),
        (lambda world: call(world.mean, world.uneven), mr.UnevenReplicasError, r"given a PerReplica with shapes \(1,\), \(2,\)"),
        (lambda world: call(world.mean, world.scalars), ValueError, r"was given a PerReplica with shapes \(\), \(\)"),
        (lambda world: call(world.w, world.private), ValueError, r"variable 'private' has one value per replica"),
        (lambda world: call(world.private, ONES), ValueError, rf"{method} to variable 'private' outside a step"),
        (lambda world: call(world.seen, np.ones(3)), ValueError, rf"{method} to variable 'seen' of shape \(2,\)"),
        (lambda world: world.in_step(lambda: call(world.w, np.ones(3))), ValueError, what + r"of shape \(2,\)"),
        (lambda world: world.in_step(lambda: call(world.w, "a")), TypeError, what + r"is 'a'"),
        (
            lambda world: world.in_step(lambda: call(world.mean, world.x)),
            mr.PerReplicaError,
            r"inside a step was given a PerReplica",
        ),
        (lambda world: world.two.run(lambda x: [call(world.w, x)], (world.x,)), mr.ReplicasDivergeError, r"argument `x`"),
        (
            lambda world: world.three.run(lambda: call(world.w, ONES)),
            mr.StrategyMismatchError,
            r"variable 'w' lives on 2 replicas",
        ),
        (lambda world: jax.jit(lambda x: call(world.w, x).value)(ONES), mr.ContextError, TRACED),
        (lambda world: jax.vmap(lambda x: call(world.w, x).value)(np.ones((3, 2))), mr.ContextError, TRACED),
        (
            lambda world: world.in_step(lambda: jax.lax.fori_loop(0, 2, lambda i, c: (call(world.w, ONES), c)[1], 0)),
            mr.ContextError,
            TRACED,
        ),
    ]


def differentiating(name: str) -> list[Row]:
    make = getattr(mr, name)
    return [
        (lambda world: make(3, world.w), TypeError, r"got 3; expected a function that returns a loss"),
        (lambda world: make(world.w, lambda: 1.0), TypeError, r"expected a function that returns a loss"),
        (lambda world: make(lambda: 1.0, []), TypeError, r"got no variables; expected at least one"),
        (lambda world: make(lambda: 1.0, None), TypeError, r"got no variables"),
        (lambda world: make(lambda: 1.0, [ONES]), TypeError, r"got array.* among its variables; .* use jax\.value_and_grad"),
        (lambda world: make(lambda: 1.0, ["w"]), TypeError, r"got 'w' of type str among its variables"),
        (lambda world: make(lambda: 1.0, world.x), TypeError, r"among its variables"),
        (
            lambda world: make(lambda: 1.0, world.counts),
            TypeError,
            r"'counts' has dtype int32, and only floating point variables",
        ),
        (lambda world: make(lambda: 1.0, [world.w, world.w])(), ValueError, r"'w' is listed twice"),
        (lambda world: make(lambda: world.w.value, world.w)(), TypeError, r"the loss has shape \(2,\); expected one number"),
        (lambda world: make(lambda: 1, world.w)(), TypeError, r"the loss has dtype int32; expected a floating point number"),
        (lambda world: make(lambda: None, world.w)(), TypeError, r"the function returned None; expected a scalar loss"),
        (lambda world: make(lambda: "a", world.w)(), TypeError, r"the function returned 'a'"),
        (lambda world: make(lambda: (1.0, 2), world.w)(), TypeError, r"the function returned a tuple; pass has_aux=True"),
        (lambda world: make(lambda: 1.0, world.w, has_aux=True)(), TypeError, r"must return \(loss, aux\)"),
        (lambda world: make(lambda: 1.0, world.private)(), mr.ContextError, r"variable 'private' is sync-on-read"),
        (lambda world: make(lambda x: jnp.sum(world.w * x), world.w)(), TypeError, r"missing 1 required positional argument"),
        (
            lambda world: world.in_step(lambda: make(lambda: jnp.sum(world.of_three), world.of_three)()),
            mr.StrategyMismatchError,
            r"variable 'of_three' lives on 3 replicas",
        ),
        (lambda world: jax.jit(lambda: make(lambda: jnp.sum(world.w), world.w)())(), mr.ContextError, TRACED),
    ]


def dataset(call: Callable[[World, Any], Any]) -> list[Row]:
    return [
        (lambda world: call(world, 3), TypeError, r"got 3 of type int; expected an iterable of global batches"),
        (lambda world: call(world, None), TypeError, r"got None of type NoneType"),
        (lambda world: call(world, "train"), TypeError, r"got 'train'; expected an iterable of global batches"),
        (lambda world: call(world, ONES), TypeError, r"got ndarray, one set of arrays; .*make_numpy_dataset"),
        (lambda world: call(world, {"x": ONES}), TypeError, r"got dict, one set of arrays"),
        (lambda world: call(world, (ONES, ONES)), TypeError, r"got tuple, one set of arrays"),
        (lambda world: call(world, world.x), TypeError, r"got PerReplica, one set of arrays"),
        (lambda world: call(world, iter([ONES])), TypeError, r"an iterator that can be used only once"),
        (lambda world: call(world, world.rows), ValueError, r"the dataset has rows, not batches"),
        (lambda world: call(world, world.distributed), TypeError, r"the dataset is distributed already"),
        (lambda world: next(iter(call(world, [WORDS]))), TypeError, r"which no device can hold"),
        (lambda world: next(iter(call(world, [world.x]))), TypeError, r"the dataset yielded a PerReplica"),
        (lambda world: next(iter(call(world, [1, 2]))), ValueError, r"the dataset yielded a scalar"),
        (lambda world: world.in_step(lambda: call(world, [ONES])), mr.ContextError, NOT_IN_A_STEP),
        (lambda world: world.in_scope_of_three(lambda: call(world, [ONES])), mr.StrategyMismatchError, r"distribute_dataset of"),
    ]


def function_of_datasets(call: Callable[[World, Any], Any]) -> list[Row]:
    return [
        (lambda world: call(world, 3), TypeError, r"dataset_fn is 3; expected a function of a mr\.InputContext"),
        (lambda world: call(world, lambda: []), TypeError, r"takes 0 positional arguments but 1 was given"),
        (lambda world: call(world, lambda context: ONES), TypeError, r"distribute_datasets_from_function got ndarray, one set"),
        (lambda world: call(world, lambda context: iter([])), TypeError, r"an iterator that can be used only once"),
        (lambda world: call(world, lambda context: world.rows), ValueError, r"the dataset has rows, not batches"),
        (lambda world: next(iter(call(world, lambda context: [WORDS]))), TypeError, r"which no device can hold"),
        (lambda world: world.in_step(lambda: call(world, lambda context: [])), mr.ContextError, NOT_IN_A_STEP),
    ]


def host_values(call: Callable[[World, Any], Any]) -> list[Row]:
    return [
        (lambda world: call(world, 3), TypeError, r"value_fn is 3; expected a function of a mr\.ValueContext"),
        (
            lambda world: call(world, lambda ctx: "a"),
            TypeError,
            r"distribute_values_from_function got 'a'" + NO_NUMBERS.format("str"),
        ),
        (lambda world: call(world, lambda ctx: WORDS), TypeError, NO_NUMBERS.format("ndarray")),
        (lambda world: call(world, lambda ctx: world.x), mr.PerReplicaError, r"PerReplica does not support"),
        (lambda world: call(world, lambda: 1), TypeError, r"takes 0 positional arguments but 1 was given"),
        (
            lambda world: call(world, lambda ctx: np.ones((1,) * (1 + ctx.replica_id_in_sync_group))),
            ValueError,
            r"arrays of different ranks, shapes \(1,\), \(1, 1\); expected one rank for all replicas",
        ),
        (
            lambda world: call(world, lambda ctx: np.ones(1, ["int32", "float32"][ctx.replica_id_in_sync_group])),
            TypeError,
            r"value_fn returned different dtypes: float32, int32",
        ),
        (
            lambda world: call(world, lambda ctx: [1] * (1 + ctx.replica_id_in_sync_group)),
            ValueError,
            r"value_fn returned the structure .* for replica 0 and .* for replica 1",
        ),
        (lambda world: world.in_step(lambda: call(world, lambda ctx: 1)), mr.ContextError, NOT_IN_A_STEP),
        (lambda world: world.in_scope_of_three(lambda: call(world, lambda ctx: 1)), mr.StrategyMismatchError, r"in the scope of"),
    ]


def numpy_rows(call: Callable[[World, Any], Any]) -> list[Row]:
    return [
        (lambda world: call(world, None), TypeError, r"the dataset None holds no array"),
        (lambda world: call(world, {}), TypeError, r"the dataset \{\} holds no array"),
        (lambda world: call(world, 3), ValueError, r"the array is a scalar"),
        (lambda world: call(world, WORDS), TypeError, r"has dtype <U1, which no device can hold"),
        (lambda world: call(world, {"x": object()}), (TypeError, ValueError), r"\['x'\] (has dtype object|is a scalar)"),
        (lambda world: call(world, (np.ones(2), np.ones(3))), ValueError, r"different numbers of rows"),
        (lambda world: call(world, [np.ones(2), np.ones(3)]), ValueError, r"elements have different shapes"),
        (lambda world: call(world, world.x), mr.PerReplicaError, r"PerReplica does not support"),
    ]


def local(call: Callable[[World, Any], Any]) -> list[Row]:
    return [
        *mixing("local_results", call),
        (lambda world: world.in_step(lambda: call(world, world.w)), mr.ContextError, NOT_IN_A_STEP),
    ]


def integers(method: str, name: str, at_least: int) -> list[Row]:
    def call(world: World, value: Any) -> Any:
        return getattr(world.rows, method)(value)

    return [
        (lambda world: call(world, 1.5), TypeError, rf"{name} is 1\.5; expected an int"),
        (lambda world: call(world, "2"), TypeError, rf"{name} is '2'; expected an int"),
        (lambda world: call(world, None), TypeError, rf"{name} is None; expected an int"),
        (lambda world: call(world, True), TypeError, rf"{name} is True; expected an int"),
        (lambda world: call(world, at_least - 1), ValueError, rf"{name} is {at_least - 1}; expected at least {at_least}"),
    ]


def not_in_a_step(call: Callable[[World], Any]) -> list[Row]:
    return [
        (
            lambda world: world.in_step(lambda: call(world)),
            mr.ContextError,
            r"inside a step or an mr\.function, which is traced once",
        ),
        (lambda world: mr.function(lambda: call(world))(), mr.ContextError, r"inside a step or an mr\.function"),
    ]


def devices(make: Callable[[Any], Any]) -> list[Row]:
    return [
        (lambda world: make([]), mr.DeviceError, r"devices is empty, and a strategy needs at least one"),
        (lambda world: make("cpu:0"), TypeError, r"expected a list, for example devices=\['cpu:0'\]"),
        (lambda world: make(3), TypeError, r"devices is 3 of type int; expected a list"),
        (lambda world: make({"cpu:0"}), TypeError, r"devices is .* of type set; expected a list"),
        (lambda world: make([None]), TypeError, r"devices contains None of type NoneType"),
        (lambda world: make(["cpu:zero"]), mr.DeviceError, r"devices contains 'cpu:zero'; expected the form"),
        (lambda world: make(["cpu:99"]), mr.DeviceError, r"devices contains 'cpu:99', but this process has 8 cpu devices"),
        (lambda world: make(["tpu:0"]), mr.DeviceError, r"devices contains 'tpu:0', but this process has 0 tpu devices"),
        (lambda world: make(["cpu:0", "/CPU:0"]), mr.DeviceError, r"twice, as 'cpu:0' and '/CPU:0'"),
    ]


def loop(call: Callable[..., Any], verb: str) -> list[Row]:
    return [
        (lambda world: call(3), TypeError, rf"{verb} got 3 as its body; expected a function"),
        (lambda world: call(None), TypeError, rf"{verb} got None as its body"),
    ]


def same(carry: Any, x: Any) -> Any:
    return carry, x


def average(*arguments: Any) -> Callable[[World], Any]:
    return lambda world: world.in_step(lambda: mr.losses.compute_average_loss(*arguments))


def made(*arguments: Any, **named: Any) -> Callable[[World], Any]:
    return lambda world: mr.Variable(*arguments, **{"name": "v", **named})


BAD_INPUT: dict[str, list[Row]] = {
    # strategies
    "MirroredStrategy": [
        *devices(mr.MirroredStrategy),
        (
            lambda world: mr.MirroredStrategy(["cpu:0"], cross_device_ops="ring"),
            ValueError,
            r"cross_device_ops is 'ring'; expected None",
        ),
        (lambda world: mr.MirroredStrategy(["cpu:0"], cross_device_ops=ONES), ValueError, r"cross_device_ops is array"),
        (lambda world: mr.MirroredStrategy(["cpu:0"], "auto"), TypeError, r"positional argument"),
    ],
    "OneDeviceStrategy": [
        (lambda world: mr.OneDeviceStrategy(["cpu:0"]), TypeError, r"device is \['cpu:0'\]; expected one device"),
        (lambda world: mr.OneDeviceStrategy(0), TypeError, r"device is 0; expected one device"),
        (lambda world: mr.OneDeviceStrategy("cpu"), mr.DeviceError, r"devices contains 'cpu'; expected the form"),
        (lambda world: mr.OneDeviceStrategy("gpu:0"), mr.DeviceError, r"this process has 0 gpu devices"),
    ],
    "Strategy.scope": [
        (
            lambda world: world.in_step(world.two.scope().__enter__),
            mr.ContextError,
            r"strategy\.scope\(\) was entered inside a step",
        ),
        (
            lambda world: world.in_scope_of_three(world.two.scope().__enter__),
            mr.StrategyMismatchError,
            r"Scopes of different strategies",
        ),
    ],
    "Strategy.run": running(lambda world, *arguments: world.two.run(*arguments)),
    "Strategy.experimental_run_v2": running(lambda world, *arguments: world.two.experimental_run_v2(*arguments)),
    "Strategy.reduce": [
        *operations(lambda world, op: world.two.reduce(op, world.x)),
        *combining(r"strategy\.reduce", lambda world, value: world.two.reduce("sum", value)),
        *mixing("reduce", lambda world, value: world.two.reduce("sum", value)),
        *axes("reduce", lambda world, axis: world.two.reduce("sum", world.x, axis)),
        (lambda world: world.two.reduce("sum", world.x, (0, 5)), ValueError, r"reduce: axis=5"),
        (lambda world: world.two.reduce("sum", world.scalars, 0), ValueError, r"it is a scalar and has no axes"),
        (
            lambda world: world.two.reduce("mean", world.uneven),
            mr.UnevenReplicasError,
            r"\(1,\), \(2,\)\. Name the axis .* axis=0",
        ),
        (lambda world: world.two.reduce("sum", jax.random.key(0)), TypeError, r"cannot be added over the replicas"),
        (lambda world: world.in_step(lambda: world.two.reduce("max", 1.0)), ValueError, r"reduce_op is 'max'"),
        (
            lambda world: world.in_step(lambda: world.two.reduce("sum", world.x)),
            mr.PerReplicaError,
            r"PerReplica does not support",
        ),
        (lambda world: world.in_step(lambda: world.three.reduce("sum", 1.0)), mr.StrategyMismatchError, r"reduce of .*scope of"),
    ],
    "Strategy.gather": [
        *combining(r"strategy\.gather", lambda world, value: world.two.gather(value, 0)),
        *mixing("gather", lambda world, value: world.two.gather(value, 0)),
        *axes("gather", lambda world, axis: world.two.gather(world.x, axis)),
        (lambda world: world.two.gather(world.x, None), TypeError, r"gather: axis is None"),
        (lambda world: world.two.gather(world.x, (0,)), TypeError, r"gather: axis is \(0,\) of type tuple"),
        (lambda world: world.two.gather(1.0, 0), ValueError, r"it is a scalar and has no axes"),
        (
            lambda world: world.in_step(lambda: world.two.gather(ONES, 0)),
            mr.ContextError,
            NOT_IN_A_STEP + r".*all_gather\(value, axis\)",
        ),
    ],
    "Strategy.local_results": local(lambda world, value: world.two.local_results(value)),
    "Strategy.experimental_local_results": local(lambda world, value: world.two.experimental_local_results(value)),
    "Strategy.distribute_dataset": [
        *dataset(lambda world, source: world.two.distribute_dataset(source)),
        (lambda world: world.two.distribute_dataset([ONES], 2), TypeError, r"options is 2; expected mr\.InputOptions"),
    ],
    "Strategy.experimental_distribute_dataset": dataset(lambda world, source: world.two.experimental_distribute_dataset(source)),
    "Strategy.distribute_datasets_from_function": [
        *function_of_datasets(lambda world, make: world.two.distribute_datasets_from_function(make)),
        (
            lambda world: world.two.distribute_datasets_from_function(list, mr.InputOptions(auto_shard_policy="data")),
            ValueError,
            r"dataset_fn shares the records out by itself",
        ),
    ],
    "Strategy.experimental_distribute_datasets_from_function": function_of_datasets(
        lambda world, make: world.two.experimental_distribute_datasets_from_function(make)
    ),
    "Strategy.make_numpy_dataset": numpy_rows(lambda world, arrays: world.two.make_numpy_dataset(arrays)),
    "Strategy.experimental_make_numpy_dataset": numpy_rows(lambda world, rows: world.two.experimental_make_numpy_dataset(rows)),
    "Strategy.distribute_values_from_function": host_values(lambda world, fn: world.two.distribute_values_from_function(fn)),
    "Strategy.experimental_distribute_values_from_function": host_values(
        lambda world, fn: world.two.experimental_distribute_values_from_function(fn)
    ),
    "Strategy.barrier": [
        (lambda world: world.two.barrier(3), TypeError, r"barrier: name is 3; expected a non-empty string"),
        (lambda world: world.two.barrier(""), TypeError, r"barrier: name is ''"),
        *not_in_a_step(lambda world: world.two.barrier("here")),
    ],
    "Strategy.assert_mirrored": not_in_a_step(lambda world: world.two.assert_mirrored()),
    # in a step
    "ReplicaContext.all_reduce": [
        *operations(lambda world, op: world.in_context(lambda ctx: ctx.all_reduce(op, 1.0)))[:-1],
        *combining("all_reduce", lambda world, value: world.in_context(lambda ctx: ctx.all_reduce("sum", value)))[:1],
        (lambda world: world.in_context(lambda ctx: ctx.all_reduce("sum", [WORDS])), TypeError, NO_NUMBERS.format("ndarray")),
        (lambda world: world.in_context(lambda ctx: ctx.all_reduce("sum", world.x)), mr.PerReplicaError, r"PerReplica does not"),
        (
            lambda world: world.in_context(lambda ctx: ctx.all_reduce("sum", world.of_three)),
            mr.StrategyMismatchError,
            r"'of_three'",
        ),
        (lambda world: world.in_context(lambda ctx: ctx.all_reduce("sum", jax.random.key(0))), TypeError, r"cannot be added"),
    ],
    "ReplicaContext.all_gather": [
        *axes("all_gather", lambda world, axis: world.in_context(lambda ctx: ctx.all_gather(ONES, axis))),
        (lambda world: world.in_context(lambda ctx: ctx.all_gather(1.0, 0)), ValueError, r"it is a scalar and has no axes"),
        (lambda world: world.in_context(lambda ctx: ctx.all_gather("a", 0)), TypeError, NO_NUMBERS.format("str")),
        (lambda world: world.in_context(lambda ctx: ctx.all_gather(world.x, 0)), mr.PerReplicaError, r"PerReplica does not"),
    ],
    "ReplicaContext.merge_call": [
        (lambda world: world.in_context(lambda ctx: ctx.merge_call(3)), TypeError, r"merge_call got 3; expected a function"),
        (
            lambda world: world.in_context(lambda ctx: ctx.merge_call(max, ONES)),
            TypeError,
            r"args of merge_call is ndarray; .*comma",
        ),
        (lambda world: world.in_context(lambda ctx: ctx.merge_call(max, (), [1])), TypeError, r"kwargs of merge_call is \[1\]"),
        (lambda world: world.in_context(lambda ctx: ctx.merge_call(lambda: 1)), TypeError, r"takes 0 positional arguments but 1"),
    ],
    "ReplicaContext.rng": [
        (
            lambda world: world.in_context(lambda ctx: ctx.rng("a")),
            TypeError,
            r"rng got 'a'; expected a key from jax\.random\.key",
        ),
        (lambda world: world.in_context(lambda ctx: ctx.rng(1.5)), TypeError, r"rng got 1\.5"),
        (lambda world: world.in_context(lambda ctx: ctx.rng(None)), TypeError, r"rng got None"),
        (lambda world: world.in_context(lambda ctx: ctx.rng(world.x)), mr.PerReplicaError, r"PerReplica does not support"),
    ],
    # variables
    "Variable": [
        (made(None), TypeError, r"the initial value of variable 'v' is None of type NoneType; expected an array or a number"),
        (made("a"), TypeError, r"the initial value of variable 'v' is 'a' of type str"),
        (made(object()), TypeError, r"is <object object"),
        (made({"a": 1}), TypeError, r"is \{'a': 1\} of type dict"),
        (made([[1], [1, 2]]), TypeError, r"is \[\[1\], \[1, 2\]\]"),
        (made(WORDS), TypeError, r"is array\(\['a', 'b'\]"),
        (made(lambda: "a"), TypeError, r"is 'a' of type str"),
        (made(lambda x: 1.0), TypeError, r"missing 1 required positional argument: 'x'"),
        (made(2**40), TypeError, r"is 1099511627776, which the dtype int32 cannot hold"),
        (made(1.5, dtype="int32"), TypeError, r"is 1\.5, which the dtype int32 cannot hold\. Round it, or use another dtype"),
        (made(1.0, dtype="number"), TypeError, r"number"),
        (made(1.0, name=3), TypeError, r"name is 3; expected a non-empty string"),
        (made(1.0, name=""), TypeError, r"name is ''"),
        (
            made(1.0, synchronization="sometimes"),
            ValueError,
            r"synchronization is 'sometimes'; expected one of 'auto', .*'on_read'",
        ),
        (made(1.0, synchronization=None), TypeError, r"synchronization is None"),
        (made(1.0, synchronization="none"), ValueError, r"synchronization NONE is not supported\. Use 'on_write'"),
        (made(1.0, aggregation="max"), ValueError, r"aggregation is 'max'; expected one of 'none', 'sum', 'mean'"),
        (made(1.0, aggregation=mr.ReduceOp.SUM), TypeError, r"aggregation is <ReduceOp\.SUM"),
        (made(1, aggregation="mean"), ValueError, r"variable 'v' has dtype int32 and aggregation MEAN"),
        (
            lambda world: mr.Variable(world.x, name="v"),
            mr.PerReplicaError,
            r"the initial value is a PerReplica, one value per replica",
        ),
        (lambda world: world.in_step(lambda: mr.Variable(1.0, name="v")), mr.ContextError, r"'v' was created inside a step"),
        (lambda world: mr.function(lambda: mr.Variable(1.0))(), mr.ContextError, r"was created inside a step or another traced"),
        (
            lambda world: jax.jit(lambda x: mr.Variable(x).value)(1.0),
            mr.ContextError,
            r"was created inside a step or another traced",
        ),
    ],
    "Variable.assign": assigning("assign"),
    "Variable.assign_add": assigning("assign_add"),
    "Variable.assign_sub": assigning("assign_sub"),
    "Variable.value": [
        (lambda world: jax.jit(lambda: world.w.value)(), mr.ContextError, r"variable 'w' was read .*" + TRACED),
        (lambda world: world.private.value, ValueError, r"variable 'private' has one value per replica and aggregation NONE"),
        (lambda world: world.three.run(lambda: world.w.value), mr.StrategyMismatchError, r"variable 'w' lives on 2 replicas"),
    ],
    "Variable.numpy": [
        (lambda world: jax.jit(lambda: jnp.asarray(world.w.numpy()))(), mr.ContextError, r"variable 'w' was read .*" + TRACED),
        (lambda world: world.private.numpy(), ValueError, r"variable 'private' has one value per replica and aggregation NONE"),
    ],
    # values
    "PerReplica": [
        (lambda world: world.x + 1, mr.PerReplicaError, r"PerReplica does not support `\+` .* strategy\.reduce\('mean', x\)"),
        (lambda world: np.asarray(world.x), mr.PerReplicaError, r"conversion to a numpy array .* strategy\.gather\(x, axis=0\)"),
        (lambda world: jnp.sum(world.x), mr.PerReplicaError, r"use as one array .* strategy\.local_results\(x\)"),
        (lambda world: float(world.scalars), mr.PerReplicaError, r"`float\(\)`"),
        (lambda world: bool(world.scalars), mr.PerReplicaError, r"`bool\(\)`"),
        (lambda world: len(world.x), mr.PerReplicaError, r"`len\(\)`"),
        (lambda world: list(world.x), mr.PerReplicaError, r"iteration"),
        (lambda world: world.x[0], mr.PerReplicaError, r"indexing"),
    ],
    # programs
    "function": [
        (lambda world: mr.function(3), TypeError, r"mr\.function got 3; expected a function: @mr\.function above"),
        (lambda world: mr.function(lambda x: x)(WORDS), TypeError, r"the argument `x` is a numpy array of dtype <U1"),
        (lambda world: mr.function(lambda x: x)(), TypeError, r"missing 1 required positional argument: 'x'"),
        (
            lambda world: mr.function(
                lambda: (world.two.run(lambda: world.w + 1), world.three.run(lambda: world.of_three + 1))
            )(),
            mr.StrategyMismatchError,
            r"an mr\.function uses two strategies",
        ),
        (
            lambda world: mr.function(lambda x: world.two.reduce("sum", x))(world.x_of_three),
            mr.StrategyMismatchError,
            FROM_ANOTHER,
        ),
    ],
    "scan": [
        *loop(lambda body: mr.scan(body, 0.0, ONES), r"mr\.scan"),
        (
            lambda world: mr.scan(lambda carry, x: carry, 0.0, ONES),
            TypeError,
            r"returned an array; expected a pair \(new carry, y\)",
        ),
        (lambda world: mr.scan(same, "a", ONES), TypeError, r"the carry of mr\.scan got 'a'"),
        (lambda world: mr.scan(same, 0.0, "ab"), TypeError, r"xs of mr\.scan got 'ab'"),
        (lambda world: mr.scan(same, 0.0, 1.0), ValueError, r"xs of mr\.scan holds a scalar"),
        (lambda world: mr.scan(same, 0.0, (np.ones(2), np.ones(3))), ValueError, r"different leading axis sizes: 2, 3"),
        (lambda world: mr.scan(same, 0.0), ValueError, r"no values to scan over"),
        (lambda world: mr.scan(same, 0.0, None, -1), TypeError, r"mr\.scan got length=-1; expected an int, 0 or more"),
        (lambda world: mr.scan(same, 0.0, None, "2"), TypeError, r"mr\.scan got length='2'"),
        (lambda world: mr.scan(same, 0.0, ONES, 3), ValueError, r"`length` argument of 3 which disagrees"),
        (
            lambda world: mr.scan(same, 0.0, world.uneven),
            mr.UnevenReplicasError,
            r"a PerReplica with different shapes, \(1,\), \(2,\)",
        ),
        (lambda world: mr.scan(lambda carry, x: (np.ones(3), x), 0.0, ONES), TypeError, r"must have equal types"),
    ],
    "fori_loop": [
        *loop(lambda body: mr.fori_loop(0, 3, body, 0.0), r"mr\.fori_loop"),
        (lambda world: mr.fori_loop(0.5, 3, max, 0.0), TypeError, r"mr\.fori_loop got the bounds 0\.5 and 3; expected two ints"),
        (lambda world: mr.fori_loop(0, "3", max, 0.0), TypeError, r"got the bounds 0 and '3'"),
        (lambda world: mr.fori_loop(0, ONES, max, 0.0), TypeError, r"expected two ints"),
        (lambda world: mr.fori_loop(0, 3, lambda i, carry: carry, "a"), TypeError, r"the carry of mr\.fori_loop got 'a'"),
        (lambda world: mr.fori_loop(0, 3, lambda i, carry: np.ones(3), 0.0), TypeError, r"must have equal types"),
    ],
    "cond": [
        (lambda world: mr.cond(True, 3, lambda: 1), TypeError, r"mr\.cond got 3"),
        (lambda world: mr.cond(True, lambda: 1, None), TypeError, r"mr\.cond got None"),
        (lambda world: mr.cond("a", lambda: 1, lambda: 2), TypeError, r"[Pp]red must be a scalar"),
        (lambda world: mr.cond(ONES, lambda: 1, lambda: 2), TypeError, r"[Pp]red must be a scalar"),
        (lambda world: mr.cond(world.scalars, lambda: 1, lambda: 2), mr.PerReplicaError, r"PerReplica does not support"),
        (lambda world: mr.cond(True, lambda x: 1, lambda x: 2, "a"), TypeError, r"the operands of mr\.cond got 'a'"),
        (lambda world: mr.cond(True, lambda: 1, lambda: 2.5), TypeError, r"must have equal output types"),
        (lambda world: mr.cond(True, lambda: (1,), lambda: 1), TypeError, r"same pytree structure"),
    ],
    "grad": differentiating("grad"),
    "value_and_grad": differentiating("value_and_grad"),
    # training
    "Optimizer": [
        (lambda world: mr.Optimizer(3, [world.w]), TypeError, r"tx is 3; expected an optax transformation, for example"),
        (lambda world: mr.Optimizer(optax.adam, [world.w]), TypeError, r"tx is <function adam"),
        (lambda world: mr.Optimizer(optax.sgd(0.1), []), TypeError, r"mr\.Optimizer got no variables"),
        (lambda world: mr.Optimizer(optax.sgd(0.1), None), TypeError, r"mr\.Optimizer got no variables"),
        (lambda world: mr.Optimizer(optax.sgd(0.1), [ONES]), TypeError, r"got array.* among its variables"),
        (lambda world: mr.Optimizer(optax.sgd(0.1), [world.counts]), TypeError, r"'counts' has dtype int32; only floating"),
        (lambda world: mr.Optimizer(optax.sgd(0.1), [world.seen]), ValueError, r"variable 'seen' is sync-on-read"),
        (lambda world: mr.Optimizer(optax.sgd(0.1), [world.w, world.w]), ValueError, r"'w' is listed twice"),
        (
            lambda world: mr.Optimizer(optax.sgd(0.1), [world.w, world.of_three]),
            mr.StrategyMismatchError,
            r"'w' and 'of_three' belong to different strategies",
        ),
        (
            lambda world: world.in_step(lambda: mr.Optimizer(optax.sgd(0.1), [world.w])),
            mr.ContextError,
            r"was created inside a step",
        ),
    ],
    "Optimizer.apply_gradients": [
        (lambda world: world.optimizer.apply_gradients(None), ValueError, r"got gradients of structure .*; expected .*zip\("),
        (lambda world: world.optimizer.apply_gradients([]), ValueError, r"got gradients of structure"),
        (lambda world: world.optimizer.apply_gradients({"w": ONES}), ValueError, r"got gradients of structure"),
        (lambda world: world.optimizer.apply_gradients([ONES, ONES]), ValueError, r"got gradients of structure"),
        (
            lambda world: world.optimizer.apply_gradients([None]),
            ValueError,
            r"got no gradient for any variable: every one is None",
        ),
        (
            lambda world: world.optimizer.apply_gradients(["a"]),
            TypeError,
            r"the gradient of variable 'w' is 'a'; expected an array",
        ),
        (lambda world: world.optimizer.apply_gradients([object()]), TypeError, r"the gradient of variable 'w' is <object"),
        (lambda world: world.optimizer.apply_gradients([np.ones(3)]), ValueError, r"'w' has shape \(3,\); expected \(2,\)"),
        (lambda world: world.optimizer.apply_gradients([1.0]), ValueError, r"'w' has shape \(\); expected \(2,\)"),
        (
            lambda world: world.optimizer.apply_gradients([np.ones(2, "complex64")]),
            TypeError,
            r"has dtype complex64; expected float32",
        ),
        (lambda world: world.optimizer.apply_gradients([world.x_of_three]), mr.StrategyMismatchError, FROM_ANOTHER),
        (lambda world: world.optimizer.apply_gradients([world.x_elsewhere]), mr.StrategyMismatchError, FROM_ANOTHER),
        (lambda world: world.optimizer.apply_gradients([world.scalars]), ValueError, r"'w' has shape \(\); expected \(2,\)"),
        (
            lambda world: world.optimizer.apply_gradients([world.x], aggregate=False),
            mr.PerReplicaError,
            r"got a PerReplica as the",
        ),
        (
            lambda world: world.optimizer.apply_gradients(zip([ONES], [world.of_three], strict=True)),
            ValueError,
            r"'of_three' in zip",
        ),
        (lambda world: world.optimizer.apply_gradients(zip([ONES], [3], strict=True)), TypeError, r"expected pairs, as of zip"),
        (
            lambda world: world.optimizer.apply_gradients(zip([ONES] * 2, [world.w] * 2, strict=True)),
            ValueError,
            r"variable 'w' is twice in zip",
        ),
        (
            lambda world: world.three.run(lambda: world.optimizer.apply_gradients([ONES])),
            mr.StrategyMismatchError,
            r"'w' lives on 2",
        ),
        (lambda world: jax.jit(lambda: world.optimizer.apply_gradients([ONES]))(), mr.ContextError, TRACED),
        (
            lambda world: world.two.run(lambda x: world.optimizer.apply_gradients([x], aggregate=False), (world.x,)),
            mr.ReplicasDivergeError,
            r"variable .* is mirrored, but the value assigned to it",
        ),
        (
            lambda world: world.two.run(lambda x: world.optimizer.apply_gradients([jax.lax.psum(x, "replica")]), (world.x,)),
            mr.FactorOfReplicasError,
            r"has already been combined over the replicas",
        ),
    ],
    "losses.compute_average_loss": [
        (lambda world: mr.losses.compute_average_loss(ONES), mr.ContextError, r"was called outside a step"),
        (average(1.0), ValueError, r"compute_average_loss got a scalar; expected one loss per example"),
        (average("a"), TypeError, r"per_example_loss is 'a' of type str; expected an array of numbers"),
        (average(None), TypeError, r"per_example_loss is None"),
        (average(np.ones(2, "complex64")), TypeError, r"per_example_loss has dtype complex64; expected real numbers"),
        (average(ONES, np.ones(3)), ValueError, r"sample_weight has shape \(3,\), per_example_loss has shape \(2,\)"),
        (average(ONES, "a"), TypeError, r"sample_weight is 'a'"),
        (average(ONES, None, 0), ValueError, r"global_batch_size is 0; expected the whole number of examples"),
        (average(ONES, None, 2.5), ValueError, r"global_batch_size is 2\.5"),
        (average(ONES, None, True), ValueError, r"global_batch_size is True"),
        (average(ONES, None, "4"), ValueError, r"global_batch_size is '4'"),
        (average(ONES, None, ONES), ValueError, r"global_batch_size is array"),
        (
            lambda world: world.in_step(lambda: mr.losses.compute_average_loss(world.x)),
            mr.PerReplicaError,
            r"PerReplica does not support",
        ),
    ],
    "losses.scale_regularization_loss": [
        (lambda world: mr.losses.scale_regularization_loss(1.0), mr.ContextError, r"was called outside a step"),
        (lambda world: world.in_step(lambda: mr.losses.scale_regularization_loss("a")), TypeError, r"regularization_loss is 'a'"),
        (
            lambda world: world.in_step(lambda: mr.losses.scale_regularization_loss(None)),
            TypeError,
            r"regularization_loss is None",
        ),
        (
            lambda world: world.in_step(lambda: mr.losses.scale_regularization_loss(world.x)),
            mr.PerReplicaError,
            r"PerReplica does not support",
        ),
    ],
    # datasets
    "InputOptions": [
        (lambda world: mr.InputOptions(prefetch=-1), ValueError, r"prefetch is -1; expected 0 or more batches"),
        (lambda world: mr.InputOptions(prefetch=1.5), TypeError, r"prefetch is 1\.5; expected an int"),
        (lambda world: mr.InputOptions(drop_remainder=1), TypeError, r"drop_remainder is 1; expected True or False"),
        (lambda world: mr.InputOptions(batch=3), TypeError, r"unexpected keyword argument 'batch'"),
        (lambda world: mr.InputOptions(auto_shard_policy="files"), ValueError, r"auto_shard_policy is 'files'; expected one of"),
        (lambda world: mr.InputOptions(auto_shard_policy=None), TypeError, r"auto_shard_policy is None; expected one of"),
    ],
    "InputContext.get_per_replica_batch_size": [
        (lambda world: mr.InputContext(1, 0, 2).get_per_replica_batch_size(3), ValueError, r"3 is not divisible by the 2"),
        (lambda world: mr.InputContext().get_per_replica_batch_size(0), ValueError, r"global_batch_size is 0; expected at"),
        (lambda world: mr.InputContext().get_per_replica_batch_size("4"), TypeError, r"global_batch_size is '4'; expected"),
    ],
    "data.DistributedIterator.set_state": [
        (lambda world: iter(world.distributed).set_state(3), TypeError, r"state is 3; expected what get_state\(\)"),
        (
            lambda world: iter(world.distributed).set_state(
                {"version": 1, "policy": "DATA", "worker": None, "source": {"next": 7}}
            ),
            ValueError,
            r"the state does not fit list: ValueError: batch 7 of 1",
        ),
    ],
    "data.NumpyDataset": [
        (lambda world: NumpyDataset(None), TypeError, r"the dataset None holds no array"),
        (lambda world: NumpyDataset(3), TypeError, r"the array is 3 of type int; expected a numpy array whose first axis counts"),
        (lambda world: NumpyDataset({"x": [1, 2]}), TypeError, r"\['x'\]\[0\] is 1 of type int; expected a numpy array"),
        (lambda world: NumpyDataset(np.float32(1)), TypeError, r"expected a numpy array"),
        (lambda world: NumpyDataset(np.array(1.0)), ValueError, r"the array is a scalar"),
        (lambda world: NumpyDataset(world.x), TypeError, r"of type PerReplica; expected a numpy array"),
        (lambda world: NumpyDataset(WORDS), TypeError, r"has dtype <U1, which no device can hold"),
        (lambda world: NumpyDataset(ONES, batch_size=0), ValueError, r"batch_size is 0; expected at least 1"),
    ],
    "data.NumpyDataset.batch": [
        *integers("batch", "batch_size", at_least=1),
        (lambda world: world.rows.batch(2, "no"), TypeError, r"drop_remainder is 'no'; expected True or False"),
        (lambda world: world.rows.batch(2).batch(2), ValueError, r"the dataset is batched already, by 2"),
    ],
    "data.NumpyDataset.shuffle": integers("shuffle", "seed", at_least=0),
    "data.NumpyDataset.repeat": integers("repeat", "num_epochs", at_least=1),
    # files; more rows are in test_tfrecord.py and test_example.py
    "data.tfrecord_dataset": [
        (lambda world: mr.data.tfrecord_dataset(3), TypeError, r"files is 3 of type int; expected a path, a pattern"),
        (lambda world: mr.data.tfrecord_dataset([]), ValueError, r"files is empty; expected at least one path"),
        (lambda world: mr.data.tfrecord_dataset("missing"), FileNotFoundError, r"there is no file 'missing'"),
        (lambda world: mr.data.tfrecord_dataset("missing-*"), FileNotFoundError, r"no file matches 'missing-\*'"),
        (lambda world: mr.data.tfrecord_dataset(["."]), IsADirectoryError, r"'\.' is a directory; name its files"),
        (lambda world: mr.data.tfrecord_dataset(__file__, "LZ4"), ValueError, r"compression is 'LZ4'; expected None, 'GZIP'"),
        (lambda world: mr.data.tfrecord_dataset(__file__, None, "1"), ValueError, r"max_record_bytes is '1'; expected a number"),
        (
            lambda world: list(mr.data.tfrecord_dataset(__file__)),
            mr.data.TFRecordError,
            r"test_bad_input\.py: record 0, at byte 0: its length is damaged",
        ),
    ],
    "data.write_tfrecords": [
        (lambda world: mr.data.write_tfrecords("out", b"a"), TypeError, r"records is bytes; expected an iterable of bytes"),
        (lambda world: mr.data.write_tfrecords("out", ["a"]), TypeError, r"record 0 is 'a' of type str; expected bytes"),
        (lambda world: mr.data.write_tfrecords("out", [], "LZ4"), ValueError, r"compression is 'LZ4'"),
        (lambda world: mr.data.write_tfrecords("no folder/out", []), FileNotFoundError, r"No such file"),
    ],
    "data.parse_example": [
        (lambda world: mr.data.parse_example("a", {}), TypeError, r"records is str; expected bytes or a list of bytes"),
        (lambda world: mr.data.parse_example([1], {}), TypeError, r"record 0 of the batch is 1 of type int"),
        (lambda world: mr.data.parse_example(b"", None), TypeError, r"spec is NoneType; expected a dict"),
        (lambda world: mr.data.parse_example(b"", {"x": int}), TypeError, r"spec has 'x': <class 'int'>"),
        (lambda world: mr.data.parse_example(b"\xff", {}), ValueError, r"the record is no tf\.train\.Example"),
        (
            lambda world: mr.data.parse_example(b"", {"x": mr.data.FixedLenFeature((), np.int64)}),
            ValueError,
            r"feature 'x': the record does not have it, and it has no default",
        ),
    ],
    "data.make_example": [
        (lambda world: mr.data.make_example([1]), TypeError, r"features is list; expected a dict"),
        (lambda world: mr.data.make_example({"x": "a"}), TypeError, r"feature 'x' is 'a' of type str; expected bytes, ints or"),
        (lambda world: mr.data.make_example({"x": 2**63}), ValueError, r"feature 'x' has the value 9223372036854775808"),
        (lambda world: mr.data.make_example({"x": world.x}), mr.PerReplicaError, r"PerReplica does not support"),
    ],
    "data.FixedLenFeature": [
        (lambda world: mr.data.FixedLenFeature(2, np.int64), TypeError, r"shape is 2; expected a tuple of ints"),
        (lambda world: mr.data.FixedLenFeature((), str), TypeError, r"dtype is <class 'str'>; expected bytes, np\.float32"),
        (lambda world: mr.data.FixedLenFeature((), np.uint8, 256), TypeError, r"default_value is 256; expected np\.uint8"),
        (lambda world: mr.data.FixedLenFeature((2,), np.uint8, ONES[:0]), ValueError, r"expected a value of shape \(2,\)"),
    ],
    "data.VarLenFeature": [
        (lambda world: mr.data.VarLenFeature(np.float64), TypeError, r"dtype is <class 'numpy\.float64'>; expected bytes"),
        (lambda world: mr.data.VarLenFeature(None), TypeError, r"dtype is None"),
    ],
    "CommunicationOptions": [
        (lambda world: mr.CommunicationOptions(implementation="gloo"), ValueError, r"implementation is 'gloo'; expected one of"),
        (lambda world: mr.CommunicationOptions(bytes_per_pack=-1), ValueError, r"bytes_per_pack is -1; expected 0 or more"),
        (lambda world: mr.CommunicationOptions(timeout_seconds=0), ValueError, r"timeout_seconds is 0; expected 1 to"),
    ],
    "MultiWorkerMirroredStrategy": [
        (lambda world: mr.MultiWorkerMirroredStrategy("10.0.0.1:22"), mr.ClusterConfigError, r"cluster= is .*; give a resolver"),
        (lambda world: mr.MultiWorkerMirroredStrategy(communication_options=3), TypeError, r"communication_options is 3; expec"),
    ],
    "ClusterResolver": [(lambda world: mr.ClusterResolver(), TypeError, r"abstract class ClusterResolver")],
    "ClusterSpec": [
        (lambda world: mr.ClusterSpec.of([]), mr.ClusterConfigError, r"cluster is a list of 0; it names the workers"),
        (lambda world: mr.ClusterSpec.of({"ps": ["a:1"]}), mr.ClusterConfigError, r"parameter servers are not supported"),
    ],
    "ClusterSpec.job": [(lambda world: mr.ClusterSpec().job([]), TypeError, r"unhashable")],
    "SimpleClusterResolver": [
        (
            lambda world: mr.SimpleClusterResolver({"worker": ["a"]}, "worker", 0),
            mr.ClusterConfigError,
            r"'a', which has no port",
        ),
    ],
    "SlurmClusterResolver": [
        (
            lambda world: mr.SlurmClusterResolver(environment={}).cluster(),
            mr.ClusterConfigError,
            r"SLURM_STEP_NUM_TASKS is unset",
        ),
    ],
    "KubernetesClusterResolver": [
        (lambda world: mr.KubernetesClusterResolver(environment={}).cluster(), mr.ClusterConfigError, r"start it as a job"),
    ],
    "TFConfigClusterResolver": [
        (lambda world: mr.TFConfigClusterResolver(environment={"TF_CONFIG": "{"}).cluster(), ValueError, r"it is not JSON"),
    ],
    "Checkpoint": [
        (lambda world: mr.Checkpoint(3, w=world.w), TypeError, r"directory is 3; expected a path"),
        (lambda world: mr.Checkpoint("unused", **{"../w": [1]}), ValueError, r"the name '\.\./w' will not do"),
        (lambda world: mr.Checkpoint("unused"), TypeError, r"got nothing to save"),
        (lambda world: mr.Checkpoint("unused", max_to_keep=0, w=world.w), ValueError, r"max_to_keep is 0; expected at least 1"),
    ],
    "Checkpoint.restore_latest": [
        (lambda world: world.checkpoint.restore_latest(partial="w"), TypeError, r"partial is 'w'; expected True or False"),
    ],
    "Checkpoint.save": [
        (lambda world: world.checkpoint.save("1"), TypeError, r"checkpoint\.save: step is '1'; expected an int"),
        (lambda world: world.checkpoint.save(-1), TypeError, r"checkpoint\.save: step is -1; expected an int"),
        (lambda world: world.in_step(lambda: world.checkpoint.save(1)), mr.ContextError, r"inside a step"),
    ],
    "PreemptionHandler": [(lambda world: mr.PreemptionHandler(3), TypeError, r"checkpoint is 3; expected a mr\.Checkpoint")],
    "PreemptionHandler.after_step": [
        (lambda world: preempted(world, "1"), TypeError, r"preemption\.after_step: step is '1'; expected an int"),
    ],
}

#: What takes nothing from the user, apart from where it is called.
WITHOUT_INPUT = {
    "Checkpoint.close", "Checkpoint.steps", "Checkpoint.wait", "ClusterResolver.cluster",
    "ClusterResolver.cluster_spec", "ClusterSpec.as_dict", "KubernetesClusterResolver.cluster", "PreemptionHandler.close",
    "SimpleClusterResolver.cluster", "SlurmClusterResolver.cluster", "TFConfigClusterResolver.cluster",
    "eager", "get_replica_context", "get_strategy", "has_strategy", "in_cross_replica_context", "Strategy.explain",
    "data.DistributedDataset.describe", "data.DistributedIterator.close", "data.DistributedIterator.get_state",
}  # fmt: skip
#: Not made by users: strategies, contexts and datasets make them.
NOT_MADE_BY_USERS = {
    "Strategy", "ReplicaContext", "PerReplica", "ValueContext", "InputContext", "data.DistributedDataset",
    "data.DistributedIterator",
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
    return not name.startswith("_") and inspect.isfunction(inspect.unwrap(value) if callable(value) else value)


def test_the_table_has_every_public_function_and_method() -> None:
    expected = public_callables() - WITHOUT_INPUT - NOT_MADE_BY_USERS
    assert expected - set(BAD_INPUT) == set()
    assert all(BAD_INPUT.values())


def test_what_is_said_to_take_no_input_takes_none() -> None:
    for name in WITHOUT_INPUT:
        value: Any = mr
        for part in name.split("."):
            value = getattr(value, part)
        assert [p for p in inspect.signature(value).parameters if p != "self"] == []


ROWS = [pytest.param(*row, id=f"{name}-{number}") for name, rows in BAD_INPUT.items() for number, row in enumerate(rows)]


@pytest.mark.filterwarnings("ignore:strategy.experimental_:DeprecationWarning")
@pytest.mark.parametrize(("call", "error", "message"), ROWS)
def test_bad_input_is_one_clear_error_and_changes_nothing(
    call: Callable[[World], Any], error: type[Exception], message: str, world: World
) -> None:
    before = world.state()
    with pytest.raises(error, match=message) as caught:
        call(world)
    is_alone = caught.value.__context__ is None or caught.value.__suppress_context__
    assert is_alone or caught.value.__cause__ is not None, "a second error while handling the first"
    assert world.state() == before


def test_the_world_works(world: World) -> None:
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
