"""A strategy's verbs from outside a step: what they take, what they refuse, and that strategies do not disturb one another."""

import collections
import copy
import pickle
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import ctx, in_threads, strategy_of, variable

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

Point = collections.namedtuple("Point", "x y")


def number():
    return mr.get_replica_context().replica_id_in_sync_group + 1.0


def test_verbs_work_on_every_leaf_of_a_nest(strategy3, per_replica):
    values = per_replica(strategy3, [1, 2.0], [2, 4.0], [3, 6.0])
    tree = {"a": values, "b": [Point(values, 3.0), (), None]}
    total = strategy3.reduce("sum", tree)
    assert total["a"].tolist() == [6, 12] and total["b"][0].x.tolist() == [6, 12] and total["b"][0].y == 9
    assert isinstance(total["b"][0], Point) and total["b"][1:] == [(), None]
    assert strategy3.reduce("mean", {"a": tree["a"], "b": np.ones(2)}, axis=0) == {"a": 3, "b": 1}
    joined = strategy3.gather([tree["a"], {"mirrored": np.ones(1)}], axis=0)
    assert joined[0].tolist() == [1, 2, 2, 4, 3, 6] and joined[1]["mirrored"].tolist() == [1, 1, 1]
    for result in (total["a"], total["b"][0].y, *jax.tree.leaves(joined)):
        assert isinstance(result, jax.Array) and result.is_fully_replicated
        assert [shard.device for shard in result.addressable_shards] == list(strategy3.devices)
    results = strategy3.local_results(tree)
    assert isinstance(results, tuple) and [result["a"].tolist() for result in results] == [[1, 2], [2, 4], [3, 6]]
    assert isinstance(results[2]["b"][0], Point) and results[2]["b"][0].y == 3.0 and results[2]["b"][1:] == [(), None]
    together = jnp.concatenate([result["a"] for result in results])
    assert together.devices() == {strategy3.devices[0]}, "where they can be combined"
    for value in (7, "text", None, np.ones(2), [1, 2], {"a": (3,)}):
        [result] = strategy3.local_results(value)
        assert result is value


@pytest.mark.by_xla
def test_local_results_of_variables_are_their_copies(strategy3):
    w, seen = variable(2.0, strategy3), variable(0.0, strategy3, synchronization="on_read", aggregation="sum")
    strategy3.run(lambda: seen.assign(number()))
    results, pairs = strategy3.local_results(w), strategy3.local_results((w, seen))
    strategy3.run(lambda: (w.assign_add(7.0), seen.assign_add(7.0)))  # they stay what they are
    assert [float(x) for x in results] == [2, 2, 2]
    assert [tuple(map(float, pair)) for pair in pairs] == [(2, 1), (2, 2), (2, 3)]


@pytest.mark.parametrize("verb", ["reduce", "gather", "local_results", "run"])
def test_a_per_replica_that_tree_map_has_changed_is_refused(strategy3, per_replica, verb):
    odd = per_replica(strategy3, *map(np.ones, (1, 2, 3)))
    use = {
        "reduce": lambda x: strategy3.reduce("sum", x, axis=0),
        "gather": lambda x: strategy3.gather(x, axis=0),
        "local_results": strategy3.local_results,
        "run": lambda x: strategy3.run(lambda x: x, args=(x,)),
    }[verb]
    for change in (lambda a: a[:, :1], lambda a: a[:, None]):
        with pytest.raises(mr.PerReplicaError, match=r"does not hold the replicas' shapes \(1,\), \(2,\), .*strategy\.run"):
            use(jax.tree.map(change, odd))
    with pytest.raises(mr.PerReplicaError, match=r"a PerReplica without replicas: jax\.tree\.map\(jnp\.sum"):
        use(jax.tree.map(jnp.sum, odd))
    if verb != "run":
        with pytest.raises(mr.PerReplicaError, match=rf"{verb} got the array of all replicas .* strategy\.{verb}\(.*nest"):
            jax.tree.map(use, odd)
    doubled = jax.tree.map(lambda a: a * 2, odd)
    assert [value.tolist() for value in doubled.values] == [[2], [2, 2], [2, 2, 2]]
    use(doubled)


def test_strategies_of_different_sizes_take_turns():
    """TensorFlow breaks all collectives of the process at the first turn."""
    pairs = [(strategy, variable(0.0, strategy, aggregation="sum")) for strategy in map(strategy_of, (2, 1, 3))]

    def step(own_sum, x):
        own_sum.assign_add(number())
        return mr.get_replica_context().all_reduce("sum", x * number()), number()[None]

    for turn in range(1, 3):
        for strategy, own_sum in pairs:
            numbers = list(range(1, strategy.num_replicas_in_sync + 1))
            total, own = strategy.run(step, args=(own_sum, np.float32(turn)))
            assert total == own_sum.numpy() == turn * sum(numbers) and strategy.gather(own, axis=0).tolist() == numbers
            assert strategy.reduce("mean", own)[0] == sum(numbers) / len(numbers)


def test_a_mirrored_value_of_one_strategy_may_be_given_to_another(strategy2, strategy3):
    three = strategy3.reduce("sum", np.ones(2, np.float32))
    assert strategy2.reduce("sum", three).tolist() == [6, 6]
    assert strategy2.gather(three, axis=0).tolist() == [3] * 4
    assert strategy2.run(lambda x: x + 1, args=(three,)).tolist() == [4, 4]
    assert mr.get_strategy().reduce("mean", three).tolist() == [3, 3]
    assert mr.function(lambda: strategy2.reduce("sum", three))().tolist() == [6, 6]
    merge = lambda: mr.get_replica_context().merge_call(lambda s: s.reduce("sum", three))  # noqa: E731
    assert [x.tolist() for x in strategy2.run(lambda: [merge(), strategy2.reduce("sum", three)])] == [[6, 6]] * 2


def test_the_function_is_called_once_for_each_replica_in_order_and_may_return_every_kind_of_leaf(strategy2):
    calls = []

    def value_fn(ctx):
        calls.append(ctx)
        return {
            "python": (1, 2.0, True, 3j),
            "numpy": [np.float16(1), np.ones(2)],
            "jax": Point(jnp.ones(2, jnp.bfloat16), None),
            "key": jax.random.key(ctx.replica_id_in_sync_group),
        }

    tree = strategy2.distribute_values_from_function(value_fn)
    assert calls == [mr.ValueContext(i, 2) for i in range(2)]
    dtypes = [str(x.dtype) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, mr.PerReplica))]
    assert dtypes == ["bfloat16", "key<fry>", "float16", "float32", "int32", "float32", "bool", "complex64"]
    drawn = strategy2.run(jax.random.uniform, args=(tree["key"],))
    assert [float(x) for x in drawn.values] == [float(jax.random.uniform(jax.random.key(i))) for i in range(2)]


def test_a_name_of_tensorflow_warns_at_the_users_line(strategy2):
    with pytest.warns(DeprecationWarning, match=r"experimental_local_results is called strategy\.local_results") as caught:
        assert strategy2.experimental_local_results(7) == (7,)
    assert caught[0].filename == __file__


def test_explain_says_what_the_programs_communicate_and_how_data_is_split(strategy2):
    w = variable(np.zeros(256, np.float32), strategy2)
    seen = variable(0, strategy2)

    def train_step(x, scale):
        ctx = mr.get_replica_context()
        w.assign(ctx.all_reduce("sum", w * x * scale))
        jax.lax.scan(lambda c, _: (c + ctx.all_gather(x[None], 0).sum(), None), 0.0, None, length=3)
        return seen.value

    def quiet(x):
        return x

    batches = strategy2.distribute_dataset([np.ones(2, np.float32)] * 2)
    for batch in batches:
        strategy2.run(train_step, args=(batch, 2.0))
        strategy2.run(quiet, args=(batch,))
    assert mr.OneDeviceStrategy("cpu:0").explain() == "OneDeviceStrategy: 1 replica (cpu:0)"
    text = strategy2.explain()
    assert text.startswith("MirroredStrategy: 2 replicas (cpu:0, cpu:1)\n")
    [line] = [line for line in text.splitlines() if "train_step" in line]
    assert re.search(r"1 variable written, 1 only read; 1 all-reduce of 1\.0 KiB, 1 all-gather in a loop of 4 B$", line)
    [line] = [line for line in text.splitlines() if "quiet" in line]
    assert line.endswith("no communication")
    assert len([line for line in text.splitlines() if line.startswith("dataset ")]) == 1


def test_a_copy_of_a_strategy_is_the_strategy_and_pickling_says_what_to_do(strategy2):
    settings = {"strategy": strategy2, "rate": [0.1]}
    assert copy.deepcopy(settings)["strategy"] is strategy2 and copy.copy(strategy2) is strategy2
    with pytest.raises(
        TypeError, match=r"2 replicas \(cpu:0, cpu:1\)\) cannot be pickled: its devices are those of this process"
    ):
        pickle.dumps(settings)


def test_barrier_waits_for_what_was_dispatched(strategy3):
    w = variable(np.ones((200, 200), np.float32), strategy3)
    strategy3.run(lambda: w.assign(w @ w.value))
    strategy3.barrier("after the step")
    assert w._array.is_ready()


def test_a_scope_may_be_entered_again_and_inside_itself(strategy2):
    scope, other = strategy2.scope(), mr.OneDeviceStrategy("cpu:0").scope()
    for _ in range(2):
        with scope as entered:
            with scope:
                assert mr.get_strategy() is strategy2 is entered
            with pytest.raises(mr.StrategyMismatchError), other:
                pass
            assert mr.get_strategy() is strategy2
        assert not mr.has_strategy()
    with other:
        assert mr.get_strategy().num_replicas_in_sync == 1
    inside = threading.Barrier(3, timeout=60)
    entered_by_a_thread = scope(lambda: [inside.wait(), mr.get_strategy()][1])
    assert in_threads(*[entered_by_a_thread] * 3) == [strategy2] * 3


@pytest.mark.by_xla
def test_a_function_of_values_may_use_its_memory_again(strategy2):
    buffer = np.zeros(2)

    def value(context):
        buffer[:] = context.replica_id_in_sync_group
        return buffer

    assert [v.tolist() for v in strategy2.distribute_values_from_function(value).values] == [[0, 0], [1, 1]]


def test_inside_jaxs_own_mesh_no_program_starts_and_nothing_has_changed(strategy3):
    strategy, x = strategy3, np.arange(7, dtype=np.float32)
    w = variable(0.0, strategy)
    [batch] = strategy.distribute_dataset([x])

    def step(batch):
        return w.assign_add(ctx().all_reduce("sum", batch.sum()))

    calls = {
        "run": lambda: strategy.run(step, args=(batch,)),
        "reduce": lambda: strategy.reduce("sum", batch, axis=0),
        "gather": lambda: strategy.gather(batch, axis=0),
        "local_results": lambda: strategy.local_results(batch),
        "function": lambda: mr.function(lambda: w.assign_add(1.0))(),
        "scan": lambda: mr.scan(lambda carry, _: (w.assign_add(carry), None), 0.0, length=2),
    }
    for mesh in (jax.make_mesh((1,), ("data",)), strategy.mesh):
        for call in calls.values():
            with jax.set_mesh(mesh), pytest.raises(mr.ContextError, match=r"inside jax\.set_mesh\(...\) of the axes"):
                call()
        strategy.run(step, args=(batch,))
        with jax.set_mesh(mesh), pytest.raises(mr.ContextError, match="set_mesh"):
            strategy.run(step, args=(batch,))  # also when it has a program
    for call in calls.values():
        with jax.ensure_compile_time_eval(), pytest.raises(mr.ContextError, match=r"inside jax\.ensure_compile_time_eval\(\)"):
            call()
    assert float(w) == 2 * x.sum() and float(strategy.reduce("sum", batch, axis=0)) == x.sum()
