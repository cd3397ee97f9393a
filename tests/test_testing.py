"""`mirrored.testing`: for each claim a program that passes, and one that fails with the message."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import in_threads, variable

import mirrored as mr
from mirrored import testing

pytestmark = pytest.mark.usefixtures("in_numpy")

ROWS = np.arange(10, dtype="int32")
X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")


def double(x: Any) -> Any:
    return x * 2


@pytest.mark.by_xla
def test_programs_are_counted_whichever_way_they_are_compiled(strategy2: mr.Strategy, per_replica: Callable[..., Any]) -> None:
    @mr.function
    def whole(x: Any) -> Any:
        return strategy2.reduce("sum", strategy2.run(double, args=(x,)))

    x = np.ones(3, "float32")
    with testing.count_programs() as outer, testing.count_programs() as programs:
        strategy2.run(double, args=(x,))
        strategy2.run(double, args=(x + 1,))
        assert programs.count == 1
        strategy2.run(double, args=(per_replica(strategy2, x, x),))
        whole(x)  # one program, with the step in it
        with mr.eager():
            strategy2.run(double, args=(np.ones(7, "float32"),))
        mr.MirroredStrategy(["cpu:0"]).run(double, args=(x,))
    strategy2.run(double, args=(np.ones(5),))  # after the block
    assert programs.names == ["double", "double", whole.__qualname__, "double"] == outer.names
    assert "changed from shape (3,) float32 to (3,) float32 on each replica. Pass values of one kind" in programs.reasons[1]
    assert [bool(reason) for reason in programs.reasons] == [False, True, False, False]
    assert programs.others


@pytest.mark.by_xla
def test_a_program_that_jax_compiles_again_counts_again(strategy2: mr.Strategy) -> None:
    with testing.count_programs() as programs:
        x = strategy2.run(lambda: jnp.ones(3))
        strategy2.run(double, args=(np.ones(3, "float32"),))
        strategy2.run(double, args=(x,))
        jax.clear_caches()
        strategy2.run(double, args=(x,))
    assert programs.names[1:] == ["double", "double"]
    assert "the same program again, because jax.clear_caches()" in programs.describe()


@pytest.mark.by_xla
def test_what_is_compiled_while_a_program_runs_is_not_the_program(strategy2: mr.Strategy) -> None:
    v = variable(np.zeros(11), strategy2)
    step = functools.partial(v.assign_add, np.ones(11))
    _, _ = strategy2.run(step), v.value  # an array that somebody has is copied before it is overwritten
    with testing.assert_compiles(0) as programs:
        strategy2.run(step)
    assert programs.others == ["_copy"]


@pytest.mark.by_xla
def test_assert_compiles_fails_with_the_reasons(strategy2: mr.Strategy) -> None:
    def run(*rates: str) -> None:
        for rate in rates:
            strategy2.run(lambda x, rate: x * float(rate), args=(np.ones(2), rate))

    with testing.assert_compiles(2):
        run("0.1", "0.1", "0.2")
    twice = r"^2 programs .* expected 1:\n  1\. .*<lambda>.*\n  2\. .*`rate` changed from '0\.3' to '0\.4'\."
    for rates, message in (
        (("0.3", "0.4"), twice),
        (("0.4",), r"0 programs were compiled .* expected 1\. What was compiled before"),
    ):
        with pytest.raises(AssertionError, match=message), testing.assert_compiles(1):
            run(*rates)
    with pytest.raises(OSError, match="of the block"), testing.assert_compiles(1):
        raise OSError("of the block")
    for count, error in ((1.0, TypeError), (True, TypeError), (-1, ValueError)):
        with pytest.raises(error, match="count is"), testing.assert_compiles(count):  # type: ignore[arg-type]
            pass


@pytest.mark.by_xla
def test_programs_of_all_threads_are_counted(strategy2: mr.Strategy) -> None:
    with testing.assert_compiles(2):
        in_threads(*(lambda size=size: strategy2.run(double, args=(np.ones(size),)) for size in (20, 21)))


@pytest.mark.by_xla
def test_copies_are_those_of_the_devices_and_stay(strategy3: mr.Strategy) -> None:
    v = variable(np.zeros(2, "float32"), strategy3, name="v")
    own = variable(0, strategy3, name="own", synchronization="on_read", aggregation="sum")
    key = variable(jax.random.key(3), strategy3, name="key")

    def step() -> Any:
        own.assign(mr.get_replica_context().replica_id_in_sync_group)
        return v.assign_add(jnp.ones(2)) * 3

    before = testing.copies(v)
    result = strategy3.run(step)
    assert [(replica, copy.tolist()) for replica, copy in before.items()] == [(i, [0.0, 0.0]) for i in range(3)]
    assert [copy.tolist() for copy in testing.copies(result).values()] == [[3.0, 3.0]] * 3
    assert {replica: int(copy) for replica, copy in testing.copies(own).items()} == {0: 0, 1: 1, 2: 2}
    assert [copy.tolist() for copy in testing.copies(key).values()] == [[0, 3]] * 3
    for equal in (strategy3, v, {"v": v, "more": [result, key]}):
        testing.assert_equal_copies(equal)
    values, mesh = strategy3.distribute_values_from_function(lambda _: 1.0), result.sharding.mesh
    divided = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("replica"))
    for value, error, message in (
        (own, ValueError, "variable 'own' is a sync-on-read variable"), ([], ValueError, "nothing would be compared"),
        (mr.MirroredStrategy(["cpu:7"]), ValueError, "nothing would be compared"), (values, TypeError, "strategy.local_results"),
        ({"x": 3}, TypeError, "got 3 of type int"), (jax.device_put(np.ones(3), divided), ValueError, "divided among"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            testing.assert_equal_copies(value)
    with pytest.raises(mr.ContextError, match="inside a step"):
        strategy3.run(lambda: testing.copies(v))


def test_copies_that_differ_are_named(strategy2: mr.Strategy) -> None:
    v = variable(np.zeros(3, "float32"), strategy2, name="v")
    parts = [jax.device_put(np.array([0, 0, value], "float32"), d) for value, d in zip((0, 0.5), strategy2.devices, strict=True)]
    broken = v._array = jax.make_array_from_single_device_arrays((3,), v.value.sharding, parts)
    match = r"variable 'v' differ: replica 1 from replica 0, in 1 of 3 elements, most at \[2\]: 0\.5 and 0\.0, a difference of 0"
    for value in (v, strategy2):
        with pytest.raises(AssertionError, match=match):
            testing.assert_equal_copies(value)
    with pytest.raises(AssertionError, match=r"the array at \['x'\] differ"):
        testing.assert_equal_copies({"x": broken})


def test_each_row_reaches_one_replica() -> None:
    found = testing.input_of_workers(lambda: [{"x": ROWS[:7]}, {"x": ROWS[7:]}], num_workers=3, replicas_per_worker=2)
    rows = [[rows["x"].tolist() for rows in step] for step in found.steps]
    assert rows == [[[0, 1], [2], [3], [4], [5], [6]], [[7], [8], [9], [], [], []]]
    found.assert_each_row_once([{"x": ROWS}])
    match = r"1 rows are missing, and 1 come too often .*\nmissing:\n.* 3\ntoo often:\n.* 4 in step 0, replica 3"
    with pytest.raises(AssertionError, match=match):
        found.assert_each_row_once([{"x": np.where(ROWS == 4, 3, ROWS)}])
    [step] = testing.input_of_workers(lambda: [ROWS], num_workers=1, replicas_per_worker=3).steps
    assert [rows.tolist() for rows in step] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_rows_that_each_worker_reads_or_nobody_are_found() -> None:
    read = functools.partial(testing.input_of_workers, num_workers=4)
    with pytest.raises(AssertionError, match=r"0 rows are missing, and 30 come too often .* \(OFF: each of the 4 workers"):
        read(lambda: [ROWS], options=mr.InputOptions(auto_shard_policy="off")).assert_each_row_once([ROWS])
    read(lambda context: [ROWS[context.input_pipeline_id :: 4]], from_function=True).assert_each_row_once([ROWS])
    with pytest.raises(AssertionError, match="10 rows are missing, and 0 come"):
        read(lambda _: [ROWS[:0]], from_function=True).assert_each_row_once([ROWS])
    for left_out in ({"options": mr.InputOptions(drop_remainder=True)}, {"max_steps": 1}):
        found = read(lambda: [ROWS[:7], ROWS[7:]], **left_out)
        found.assert_each_row_once([ROWS])  # rows may be missing, but not come twice
        assert sum(len(rows) for step in found.steps for rows in step) in (4, 7)
        with pytest.raises(AssertionError, match="0 rows are missing, and 4 come"):
            found.assert_each_row_once([ROWS[4:]])


def test_an_error_of_one_worker_ends_all() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            yield ROWS
            raise OSError("no such disk")

    random, file = np.random.default_rng(0), mr.InputOptions(auto_shard_policy="file")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (Broken, {}, "no such disk"), (lambda: [random.permutation(8)], {}, "worker 0 and worker 1 hold different records"),
        ([ROWS], {}, "make_dataset is"), (lambda: ROWS, {}, "got ndarray"), (lambda: [ROWS], {"num_workers": 0}, "1 or more"),
        (lambda: [ROWS], {"max_steps": 1.0}, "expected an int"), (lambda: [ROWS], {"options": "off"}, "mr.InputOptions"),
        (lambda _: [ROWS], {"from_function": True, "options": file}, "Leave it out"),
    ]  # fmt: skip
    for make_dataset, arguments, message in wrong:
        with pytest.raises((TypeError, ValueError, OSError), match=message):
            testing.input_of_workers(make_dataset, **{"num_workers": 2, **arguments})


def train(strategy: mr.Strategy, batches: Any, loss_of: Any = mr.losses.compute_average_loss, scale: Any = lambda s: 1.0) -> Any:
    w, b = variable(np.full(3, 0.1, "float32"), strategy, name="w"), variable(0.0, strategy)
    optimizer = mr.Optimizer(optax.sgd(0.1), [w, b])

    def step(x: Any) -> Any:
        loss, gradients = mr.value_and_grad(lambda: loss_of((jnp.matmul(x, w) + b - 1) ** 2), [w, b])()
        optimizer.apply_gradients(jax.tree.map(lambda g: g * scale(strategy), gradients))
        return loss

    return [strategy.reduce("sum", strategy.run(step, args=(x,))) for x in strategy.distribute_dataset(batches)]


def test_a_right_training_is_the_same_on_any_number_of_replicas() -> None:
    testing.assert_same_on_any_replicas(train, [X[:5]])
    where = lambda strategy: strategy.reduce("mean", strategy.run(lambda: jnp.ones(()))).devices() and 1  # noqa: E731
    testing.assert_same_on_any_replicas(where, num_replicas=(2, 1), devices=jax.devices()[5:])


@pytest.mark.filterwarnings("ignore::mirrored.FactorOfReplicasWarning")
def test_a_wrong_training_is_not() -> None:
    average, random = mr.losses.compute_average_loss, np.random.default_rng(0)
    only_variables = (
        r"replica:\n  variable 'w' differs by .* in 3 of 3 elements, most at \[.*\n  variable number 1 without a name"
    )
    wrong: list[tuple[Any, tuple[Any, ...], str]] = [
        (train, ([X[:4]], jnp.mean), r"(?s)2 replicas than with 1 replica:.*result\[0\] differs .* 2 times.*mean_over_own_rows"),
        (train, ([X], average, lambda s: s.num_replicas_in_sync), only_variables),
        (lambda s: random.normal(), (), r"(?s)gives other numbers each time; twice with 1 replica:.*fixed seeds"),
        (lambda s: [1] * s.num_replicas_in_sync, (), r"the result\[1\] is only there with 2 replicas"),
        (lambda s: s.num_replicas_in_sync, (), r"the result differs by 1: 2 with 2 replicas, 1 with 1 replica"),
    ]
    for function, args, message in wrong:
        with pytest.raises(AssertionError, match=message):
            testing.assert_same_on_any_replicas(function, *args, num_replicas=(1, 2))
    testing.assert_same_on_any_replicas(train, [X], average, lambda s: s.num_replicas_in_sync, num_replicas=(1, 2), atol=1.0)


def test_what_cannot_be_compared_is_said(strategy2: mr.Strategy) -> None:
    def one(strategy: mr.Strategy, *args: Any) -> int:
        if len(args) == 2:
            raise OSError(strategy.num_replicas_in_sync)
        return 1

    for function, args, options, error, message in (
        (3, (), {}, TypeError, "train is 3"), (lambda s: None, (), {}, ValueError, "there is nothing to compare"),
        (lambda s: "x", (), {}, TypeError, "is 'x'; expected arrays"), (one, (), {"num_replicas": 2}, ValueError, "two or more"),
        (one, (), {"num_replicas": (1, 1)}, ValueError, "two or more"), (one, (), {"ignore": "w"}, TypeError, "list of"),
        (one, (), {}, ValueError, "has run no step"), (one, (), {"ignore": ["w"]}, ValueError, "has \\['w'\\]"),
        (one, (), {"rtol": "x"}, ValueError, "rtol is 'x'"), (one, (), {"devices": "cpu:0"}, TypeError, "expected a list"),
        (one, (iter([X]),), {}, TypeError, "used only once"), (one, (), {"devices": ["cpu:0"]}, ValueError, "only 1"),
        (lambda s: s.run(lambda: mr.get_replica_context().replica_id_in_sync_group), (), {}, TypeError, "is a PerReplica"),
        (one, (), {"num_replicas": (1, 99)}, mr.DeviceError, "JAX_NUM_CPU_DEVICES"), (one, (1, 2), {}, OSError, "1"),
    ):  # fmt: skip
        with pytest.raises(error, match=message) as caught:
            testing.assert_same_on_any_replicas(function, *args, **options)
        assert error is not OSError or "with 1 replica," in caught.value.__notes__[0]
    with strategy2.scope(), pytest.raises(mr.ContextError, match="Call it outside"):
        testing.assert_same_on_any_replicas(train, [X])


def test_variables_without_one_value_and_ignored_ones_are_left_out() -> None:
    def counts(s: mr.Strategy) -> Any:
        v = variable(0.0, s, name="v", aggregation="sum")
        own = variable(0, s, name="own", synchronization="on_read")
        s.run(lambda: [v.assign_add(1.0), own.assign_add(1)])
        return {"key": jax.random.key(0), "half": jnp.ones(2, jnp.bfloat16), "none": None}

    testing.assert_same_on_any_replicas(counts, num_replicas=(1, 2), ignore=["v"])
    with pytest.raises(AssertionError, match=r"variable 'v' differs by 1: 2\.0 with 2 replicas, 1\.0 with 1 replica; 2 times"):
        testing.assert_same_on_any_replicas(counts, num_replicas=(1, 2))
