"""Collectives written inside one replica: all_reduce, all_gather, merge_call; in loops, conditions and nested jit."""

import collections
import dataclasses
import math

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest
from named import named

import mirrored as mr
from mirrored._replicas import collectives as _collectives


def replica():
    return mr.get_replica_context()


def number():
    """This replica's number plus one, a float that differs by replica."""
    return replica().replica_id_in_sync_group + 1.0


def triangle(strategy):
    """The sum of `number()` over the replicas."""
    return sum(range(1, strategy.num_replicas_in_sync + 1))


def collectives(strategy, step):
    """Run a step and return the names of the collectives in its program, in order."""
    before = [id(program) for program in strategy._steps.programs]
    strategy.run(step)
    [program] = [program for program in strategy._steps.programs if id(program) not in before]
    return [collective.name for collective in program.findings.collectives]


# -- all_reduce


@pytest.mark.parametrize("op", ["sum", "MEAN", mr.ReduceOp.SUM, mr.ReduceOp.MEAN], ids=named)
def test_all_reduce_gives_all_replicas_the_same(strategy, op):
    result = strategy.run(lambda: replica().all_reduce(op, number()))
    is_mean = str(op).upper().endswith("MEAN")
    assert not isinstance(result, mr.PerReplica)
    assert result == triangle(strategy) / (strategy.num_replicas_in_sync if is_mean else 1)


Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    a: object
    b: object


def mixed_tree():
    """Everything that may be reduced, in every kind of nest."""
    n = number()
    return {
        "float": n,
        "int": (n.astype(jnp.int32), [n.astype(jnp.int8)]),
        "half": Point(n.astype(jnp.float16), n.astype(jnp.bfloat16)),
        "matrix": Pair(jnp.full((2, 3), n), jnp.zeros((0, 4))),
        "complex": n * 1j,
        "bool": n > 1,
        "numpy": np.float32([1, 2]),
        "python": [1, 2.0, True],
        "none": None,
        "nothing": (),
    }


def test_a_mixed_tree_is_reduced_leaf_by_leaf_and_keeps_its_structure_and_dtypes(strategy3):
    total = strategy3.run(lambda: replica().all_reduce("sum", mixed_tree()))
    assert total["float"] == 6 and total["float"].dtype == np.float32
    assert total["int"][0].tolist() == 6 and [x.dtype for x in (total["int"][0], total["int"][1][0])] == [np.int32, np.int8]
    assert isinstance(total["half"], Point) and [x.dtype for x in total["half"]] == [jnp.float16, jnp.bfloat16]
    assert isinstance(total["matrix"], Pair) and total["matrix"].a.tolist() == [[6] * 3] * 2 and total["matrix"].b.shape == (0, 4)
    assert total["complex"] == 6j and total["bool"] == 2 and total["numpy"].tolist() == [3, 6]
    assert [x.tolist() for x in total["python"]] == [3, 6, 3] and total["none"] is None and total["nothing"] == ()


def test_a_mean_of_a_mixed_tree_is_fractional(strategy3):
    mean = strategy3.run(lambda: replica().all_reduce("mean", mixed_tree()))
    assert mean["int"][0] == 2.0 and mean["int"][0].dtype == np.float32 and mean["int"][1][0].dtype == np.float32
    assert mean["half"].x.dtype == jnp.float16 and mean["bool"] == np.float32(2 / 3) and mean["python"][2] == 1.0


def float_tree():
    return {"a": [number(), jnp.full((2, 3), number())], "b": (jnp.zeros((0, 4)), 2.0, np.float32([1, 2]), None)}


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_whole_tree_travels_in_one_collective(strategy2, op):
    assert collectives(strategy2, lambda: replica().all_reduce(op, float_tree())) == ["psum"]


def test_without_packing_it_is_one_collective_for_each_leaf(strategy2):
    leaf_by_leaf = lambda: jax.tree.map(lambda leaf: replica().all_reduce("sum", leaf), float_tree())  # noqa: E731
    assert collectives(strategy2, leaf_by_leaf) == ["psum"] * 5


def test_a_mixed_tree_travels_in_one_collective_for_each_dtype_that_is_added(strategy2):
    """XLA has no all-reduce of several dtypes; complex numbers are pairs of float32, and a MEAN adds all up in float32."""
    dtypes_of_sums = ["float32", "int32", "int8", "float16", "bfloat16"]
    assert collectives(strategy2, lambda: replica().all_reduce("sum", mixed_tree())) == ["psum"] * len(dtypes_of_sums)
    num_buffers = math.ceil(len(jax.tree.leaves(mixed_tree())) / _collectives.MAX_ARRAYS_PER_PACK)
    assert collectives(strategy2, lambda: replica().all_reduce("mean", mixed_tree())) == ["psum"] * num_buffers


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_complex_constants_are_added_up(strategy3, op):
    """XLA on CPU ends the process when it is asked to do it in one complex all-reduce."""
    total = strategy3.run(lambda: replica().all_reduce(op, jnp.full(20_000, 1 - 2j)))
    assert total.dtype == jnp.complex64 and np.all(total == (3 if op == "sum" else 1) * (1 - 2j))


def test_small_arrays_of_one_dtype_are_packed_and_large_ones_travel_as_they_are():
    large = np.ones(_collectives.PACK_BELOW_BYTES // 4, np.float32)
    tree = [np.ones((2, 3), np.float32), large, np.ones(4, np.int32), np.float32(1), np.ones(5, np.int32)]
    step = lambda: _collectives.all_reduce(mr.ReduceOp.SUM, tree, _collectives.ReplicaAxis(2))  # noqa: E731
    jaxpr = jax.make_jaxpr(step, axis_env=[("replica", 2)])()
    operands = [equation.invars[0].aval for equation in jaxpr.eqns if equation.primitive.name == "psum"]
    assert [(aval.shape, str(aval.dtype)) for aval in operands] == [((7,), "float32"), (large.shape, "float32"), ((9,), "int32")]


def test_the_compiled_program_has_one_all_reduce_for_each_dtype(strategy2):
    large = np.ones(_collectives.PACK_BELOW_BYTES // 4, np.float32)
    strategy2.run(lambda: replica().all_reduce("sum", [large * number(), number(), jnp.int32(number()), 2, large * number()]))
    [program] = strategy2._steps.programs
    text = program.compiled.lower([], [], [], program.constants).compile().as_text()
    assert text.count(" all-reduce(") == 2


def test_many_small_arrays_fill_several_buffers_of_one_all_reduce(strategy2):
    count = 5 * _collectives.MAX_ARRAYS_PER_PACK + 1
    results = strategy2.run(lambda: replica().all_reduce("sum", [jnp.full((2, 2), i) * number() for i in range(count)]))
    [program] = strategy2._steps.programs
    assert [c.name for c in program.findings.collectives] == ["psum"] * 6
    text = program.compiled.lower([], [], [], program.constants).compile().as_text()
    assert text.count(" all-reduce(") == 1
    assert [float(result[0, 0]) for result in results] == [3.0 * i for i in range(count)]


def test_packing_changes_no_value(strategy3):
    large = np.arange(_collectives.PACK_BELOW_BYTES // 4, dtype=np.float32)
    tree = [np.arange(6, dtype=np.float32).reshape(2, 3), large, np.float32(5), np.arange(3)]
    packed = strategy3.run(
        lambda: replica().all_reduce("sum", jax.tree.map(lambda x: x * replica().replica_id_in_sync_group, tree))
    )
    for result, leaf in zip(packed, tree, strict=True):
        np.testing.assert_array_equal(np.asarray(result), 3 * leaf)


def test_a_mean_of_half_precision_is_added_in_single_precision(strategy):
    result = strategy.run(lambda: replica().all_reduce("mean", jnp.float16(60000)))
    assert result == 60000 and result.dtype == jnp.float16


def test_an_empty_tree_needs_no_collective(strategy2):
    assert collectives(strategy2, lambda: replica().all_reduce("sum", {"a": None, "b": []})) == []


@pytest.mark.parametrize(
    "leaf", ["a", b"a", object(), np.array(["a"]), np.array([None]), np.array(["2020"], "M8[D]"), {1, 2}], ids=named
)
def test_a_leaf_that_is_no_number_is_refused(strategy2, leaf):
    with pytest.raises(TypeError, match=r"all_reduce got .*; expected arrays or numbers, in any nest"):
        strategy2.run(lambda: replica().all_reduce("sum", [1.0, leaf]))


def test_a_random_key_is_refused_by_all_reduce_and_taken_by_all_gather(strategy2):
    with pytest.raises(TypeError, match=r"key<fry> cannot be added over the replicas.*ctx\.all_gather"):
        strategy2.run(lambda: replica().all_reduce("sum", jax.random.key(0)))
    keys = strategy2.run(lambda: replica().all_gather(replica().rng(0)[None], axis=0))
    expected = [jax.random.fold_in(jax.random.key(0), i) for i in range(2)]
    np.testing.assert_array_equal(jax.random.key_data(keys), [jax.random.key_data(key) for key in expected])


@pytest.mark.parametrize("op, error", [("min", ValueError), (3, TypeError), (None, TypeError)])
def test_an_unknown_operation_is_refused(strategy2, op, error):
    with pytest.raises(error, match=r"reduce_op is .*; expected one of 'sum', 'mean'"):
        strategy2.run(lambda: replica().all_reduce(op, 1.0))


def test_a_per_replica_value_from_outside_is_refused_with_the_ways_out(strategy2, per_replica):
    x = per_replica(strategy2, 1.0, 2.0)
    with pytest.raises(mr.PerReplicaError, match=r"or compute inside strategy\.run"):
        strategy2.run(lambda: replica().all_reduce("sum", x))
    assert strategy2.run(lambda x: replica().all_reduce("sum", x), args=(x,)) == 3


def test_a_variable_is_reduced_by_its_value(strategy3):
    with strategy3.scope():
        w, seen = mr.Variable(2.0), mr.Variable(0.0, synchronization="on_read", aggregation="mean")

    def step():
        seen.assign(number())
        return replica().all_reduce("sum", [w, seen])

    assert [float(x) for x in strategy3.run(step)] == [6, 6]


# -- all_gather


def test_all_gather_concatenates_in_replica_order_along_any_axis(strategy):
    def step():
        x = jnp.stack([number(), 10 * number()])[None]  # shape [1, 2]
        return [replica().all_gather(x, axis=axis) for axis in (0, 1, -1, -2)]

    rows = np.float32([[i, 10 * i] for i in range(1, strategy.num_replicas_in_sync + 1)])
    for result, expected in zip(strategy.run(step), [rows, rows.reshape(1, -1), rows.reshape(1, -1), rows], strict=True):
        assert not isinstance(result, mr.PerReplica)
        np.testing.assert_array_equal(np.asarray(result), expected)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "complex64", "float16"])
def test_all_gather_takes_nests_of_any_dtype(strategy3, dtype):
    def step():
        x = jnp.atleast_1d(number() - 1).astype(dtype)
        return replica().all_gather({"a": [x], "b": np.ones((1, 2), dtype), "none": None}, axis=0)

    result = strategy3.run(step)
    assert result["a"][0].dtype == dtype and result["b"].shape == (3, 2) and result["none"] is None
    np.testing.assert_array_equal(np.asarray(result["a"][0]), np.arange(3).astype(dtype))


@pytest.mark.parametrize(
    "value, axis, error, message",
    [
        (1.0, 0, ValueError, r"all_gather: axis=0 for a value of rank 0 on each replica; it is a scalar.*x\[None\]"),
        (np.ones(2), 1, ValueError, "axis=1 for a value of rank 1 on each replica; its only axis is 0"),
        (np.ones((2, 2)), -3, ValueError, "axis=-3 for a value of rank 2 on each replica; its axes are 0 to 1"),
        (np.ones(2), 0.5, TypeError, "axis is 0.5 of type float; expected an int, for example axis=0"),
        (np.ones(2), True, TypeError, "axis is True of type bool; expected an int"),
        (np.ones(2), None, TypeError, "axis is None of type NoneType; expected an int"),
        ("rows", 0, TypeError, "all_gather got 'rows' of type str; expected arrays or numbers"),
    ],
)
def test_all_gather_refuses_what_it_cannot_join(strategy2, value, axis, error, message):
    with pytest.raises(error, match=message):
        strategy2.run(lambda: replica().all_gather(value, axis))


# -- strategy.reduce in a step


def test_reduce_in_a_step_is_all_reduce(strategy):
    assert strategy.run(lambda: strategy.reduce("sum", number())) == triangle(strategy)
    assert (
        strategy.run(lambda: strategy.reduce("mean", {"g": number()}, axis=None))["g"]
        == triangle(strategy) / strategy.num_replicas_in_sync
    )


def test_reduce_in_a_step_takes_axes_and_a_tree_in_one_collective(strategy3):
    def step():
        rows = jnp.full((2, 3), number())
        return strategy3.reduce("mean", [rows, rows.astype(jnp.int32)], axis=(0, -1)), strategy3.reduce("sum", rows, axis=1)

    (mean, int_mean), total = strategy3.run(step)
    assert mean == 2 and int_mean == 2.0 and int_mean.dtype == np.float32 and total.tolist() == [18, 18]
    assert collectives(strategy3, lambda: strategy3.reduce("mean", float_tree())) == ["psum"]


def test_the_third_example_of_seed_003_works_as_its_author_meant(strategy3, per_replica):
    with strategy3.scope():
        w = mr.Variable(np.ones(1, np.float32))

    def step(data):
        gradients = jax.grad(lambda value: jnp.sum(value * data))(w.value)
        w.assign_sub(strategy3.reduce(mr.ReduceOp.MEAN, gradients, axis=None))

    strategy3.run(step, args=(per_replica(strategy3, [1.0], [2.0], [6.0]),))
    assert w.numpy().tolist() == [-2.0]
    strategy3.assert_mirrored()


def test_reduce_in_a_step_refuses_bad_input_in_the_same_words(strategy2):
    with pytest.raises(ValueError, match=r"strategy\.reduce: axis=1 for a value of rank 1 .*its only axis is 0"):
        strategy2.run(lambda: strategy2.reduce("sum", jnp.ones(3), axis=1))
    with pytest.raises(TypeError, match=r"strategy\.reduce got 'a' of type str"):
        strategy2.run(lambda: strategy2.reduce("sum", "a"))


def test_reduce_of_another_strategy_in_a_step_is_refused(strategy2, strategy3):
    with pytest.raises(mr.StrategyMismatchError, match=r"reduce of .*3 replicas.* was called in the scope of .*2 replicas"):
        strategy2.run(lambda: strategy3.reduce("sum", 1.0))


# -- gradients


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_the_gradient_of_all_reduce_is_all_reduce_of_the_gradient(strategy, op):
    def step():
        def loss(x):
            return number() * replica().all_reduce(op, x * x)

        return jax.grad(loss)(number())

    scale = strategy.num_replicas_in_sync if op == "mean" else 1
    gradients = [float(value) for value in strategy.run(step).values]
    assert gradients == [2 * i * triangle(strategy) / scale for i in range(1, strategy.num_replicas_in_sync + 1)]


def test_the_gradient_of_a_packed_tree_is_that_of_its_leaves(strategy3):
    def gradient_of(reduce):
        def loss(tree):
            reduced = reduce(tree)
            return number() * (jnp.sum(reduced["a"] ** 2) + reduced["b"] ** 3)

        return jax.grad(loss)({"a": jnp.arange(3.0) * number(), "b": number()})

    packed = strategy3.run(lambda: gradient_of(lambda tree: replica().all_reduce("sum", tree)))
    single = strategy3.run(lambda: gradient_of(lambda tree: jax.tree.map(lambda x: replica().all_reduce("sum", x), tree)))
    for one, other in zip(jax.tree.leaves(packed), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other))


def test_the_gradient_of_all_gather_is_this_replicas_slice_of_the_sum(strategy):
    def step():
        def loss(x):
            return jnp.sum(number() * replica().all_gather(x * x, axis=0))

        return jax.grad(loss)(jnp.atleast_1d(number()))

    gradients = [float(value[0]) for value in strategy.run(step).values]
    assert gradients == [2 * i * triangle(strategy) for i in range(1, strategy.num_replicas_in_sync + 1)]


def test_without_a_collective_gradients_are_local(strategy3):
    result = strategy3.run(lambda: jax.grad(lambda x: number() * x**2)(1.0))
    assert [float(value) for value in result.values] == [2, 4, 6]


# -- in loops, conditions and nested jit


def _in_scan():
    return jax.lax.scan(lambda total, _: (total + replica().all_reduce("sum", number()), None), 0.0, None, length=3)[0]


def _in_fori_loop():
    return jax.lax.fori_loop(0, 3, lambda _, total: total + replica().all_reduce("sum", number()), 0.0)


def _in_while_loop():
    def body(state):
        i, total = state
        return i + 1, total + replica().all_reduce("sum", number())

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, 0.0))[1]


def _in_nested_jit():
    return 3 * jax.jit(jax.jit(lambda x: replica().all_reduce("sum", x)))(number())


def _in_cond():
    positive = replica().all_reduce("sum", number()) > 0
    return jax.lax.cond(positive, lambda: 3 * replica().all_reduce("sum", number()), lambda: 0.0)


def _in_switch_in_scan():
    def body(total, i):
        branches = [lambda: replica().all_reduce("sum", number()), lambda: replica().all_gather(number()[None], 0).sum()]
        return total + jax.lax.switch(i % 2, branches), None

    return jax.lax.scan(body, 0.0, jnp.arange(3))[0]


def _in_checkpoint():
    return 3 * jax.checkpoint(lambda x: replica().all_reduce("sum", x))(number())


def _in_vmap():
    return jax.vmap(lambda x: replica().all_reduce("sum", x * number()))(jnp.ones(3)).sum()


def _of_reduce_in_scan():
    return jax.lax.scan(lambda c, _: (c + mr.get_strategy().reduce("sum", number()), None), 0.0, None, length=3)[0]


PLACES = [
    _in_scan,
    _in_fori_loop,
    _in_while_loop,
    _in_nested_jit,
    _in_cond,
    _in_switch_in_scan,
    _in_checkpoint,
    _in_vmap,
    _of_reduce_in_scan,
]


@pytest.mark.parametrize("step", PLACES, ids=lambda step: step.__name__)
def test_collectives_work_in_every_kind_of_control_flow(strategy3, step):
    result = strategy3.run(step)
    assert not isinstance(result, mr.PerReplica) and result == 18


@pytest.mark.parametrize("step", [_in_scan, _in_cond, _in_nested_jit], ids=lambda step: step.__name__)
def test_collectives_in_control_flow_work_eagerly(strategy2, step):
    with mr.eager():
        assert strategy2.run(step) == 9


def test_a_collective_that_only_some_replicas_would_reach_is_refused(strategy3):
    def step():
        return jax.lax.cond(number() > 1, lambda: replica().all_reduce("sum", 1.0), lambda: 0.0)

    with pytest.raises(mr.CollectiveHangError, match=r"`psum` at .*test_collectives\.py:\d+ runs under a condition"):
        strategy3.run(step)


# -- merge_call


def test_merge_call_sees_all_replicas_and_may_reduce_gather_and_look(strategy3):
    def merge(strategy, x, scale, *, power):
        assert mr.in_cross_replica_context() and mr.get_replica_context() is None and mr.get_strategy() is strategy is strategy3
        assert isinstance(x, mr.PerReplica) and x.shape == (1,) and (scale, power) == (10, "two")
        return {
            "sum": strategy.reduce("sum", x),
            "mean": strategy.reduce("mean", x, axis=0),
            "gathered": strategy.gather(x, axis=0),
            "second": strategy.local_results(x)[1],
            "literal": strategy.reduce("sum", 2.0),
        }

    def step():
        result = replica().merge_call(merge, args=(number()[None], 10), kwargs={"power": "two"})
        assert mr.get_replica_context() is not None
        return result

    result = strategy3.run(step)
    assert not any(
        isinstance(leaf, mr.PerReplica) for leaf in jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, mr.PerReplica))
    )
    assert {name: value.tolist() for name, value in result.items()} == {
        "sum": [6], "mean": 2, "gathered": [1, 2, 3], "second": [2], "literal": 6,
    }  # fmt: skip


def test_merge_call_hands_each_replica_its_own_part_of_per_replica_results(strategy3):
    def merge(strategy, tree):
        tens = strategy.run(lambda x: 10 * x, args=(tree["x"],))
        return {"own": tree["x"], "nested": [tens, {"flag": tree["flag"]}], "same": 7, "none": None}

    def step():
        return replica().merge_call(merge, args=({"x": number(), "flag": number() > 1},))

    result = strategy3.run(step)
    assert result["same"] == 7 and result["none"] is None
    assert [float(x) for x in result["own"].values] == [1, 2, 3]
    assert [float(x) for x in result["nested"][0].values] == [10, 20, 30]
    assert [bool(x) for x in result["nested"][1]["flag"].values] == [False, True, True]


def test_merge_call_calls_its_function_once_per_trace_and_not_per_replica(strategy3):
    calls = []
    strategy3.run(lambda: replica().merge_call(lambda strategy: calls.append(1)))
    two = len(calls)
    strategy3.run(lambda: replica().merge_call(lambda strategy: calls.append(1)))
    assert two <= 2 and len(calls) <= 2 * two


def test_merge_call_reads_and_writes_variables(strategy3):
    with strategy3.scope():
        w = mr.Variable(1.0)
        seen = mr.Variable(0.0, synchronization="on_read", aggregation="sum")

    def merge(strategy, variable, x):
        variable.assign(variable + strategy.reduce("sum", x))
        seen.assign(9.0)
        return variable.assign_add(1.0)

    def step():
        returned = replica().merge_call(merge, args=(w, number()))
        assert returned is w
        return w.value, seen.value

    value, parts = strategy3.run(step)
    assert value == w.numpy() == 8 and seen.numpy() == 9
    assert [float(x) for x in parts.values] == [3, 3, 3]
    strategy3.assert_mirrored()


def test_merge_call_may_run_a_step_that_uses_variables_and_collectives(strategy3):
    with strategy3.scope():
        w = mr.Variable(0.0, aggregation="mean")

    def inner(x):
        w.assign_add(x)
        return replica().all_reduce("sum", x) + replica().replica_id_in_sync_group

    result = strategy3.run(lambda: replica().merge_call(lambda s, x: s.run(inner, args=(x,)), args=(number(),)))
    assert [float(x) for x in result.values] == [6, 7, 8] and w.numpy() == 2


def test_merge_call_works_in_loops_eagerly_and_outside_every_strategy(strategy2):
    def total():
        return replica().merge_call(lambda strategy, x: strategy.reduce("sum", x), args=(number(),))

    scanned = strategy2.run(lambda: jax.lax.scan(lambda c, _: (c + total(), None), 0.0, None, length=2)[0])
    with mr.eager():
        eager = strategy2.run(total)
    assert (scanned, eager, total()) == (6, 3, 1)


def test_an_assignment_in_merge_call_that_would_diverge_is_refused(strategy3):
    with strategy3.scope():
        w = mr.Variable(0.0, name="w")

    def step():
        replica().merge_call(lambda strategy, x: w.assign(x), args=(number(),))

    with pytest.raises(mr.ReplicasDivergeError, match=r"assign to variable 'w' was given a PerReplica.*strategy\.reduce\('mean'"):
        strategy3.run(step)
    assert w.numpy() == 0


def test_an_exception_in_merge_call_reaches_the_user(strategy2):
    def merge(strategy):
        raise KeyError("in merge")

    with pytest.raises(KeyError, match="in merge"):
        strategy2.run(lambda: replica().merge_call(merge))


def test_the_outer_context_is_of_no_use_in_merge_call(strategy2):
    def step():
        ctx = replica()
        return ctx.merge_call(lambda strategy: ctx.all_reduce("sum", 1.0))

    with pytest.raises(mr.ContextError, match=r"all_reduce of the replica context of .* outside the step"):
        strategy2.run(step)


def test_an_uneven_result_of_merge_call_is_refused(strategy2, per_replica):
    x = per_replica(strategy2, np.ones(1), np.ones(2))
    with pytest.raises(mr.UnevenReplicasError, match=r"different shapes \(\(1,\), \(2,\)\) cannot be handed to the replicas"):
        strategy2.run(lambda: replica().merge_call(lambda strategy: x))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3,), r"merge_call got 3; expected a function"),
        ((len, 5), r"args of merge_call is int; expected a tuple or list.*args=\(x,\)"),
        ((len, jnp.ones(2)), "args of merge_call is .*; expected a tuple or list"),
        ((len, (), [1]), r"kwargs of merge_call is \[1\]; expected a dict"),
    ],
)
def test_merge_call_refuses_bad_arguments(strategy2, arguments, message):
    with pytest.raises(TypeError, match=message):
        strategy2.run(lambda: replica().merge_call(*arguments))


def test_outside_every_strategy_merge_call_may_run_a_step_too():
    def inner(x):
        return replica().all_reduce("sum", x) + replica().replica_id_in_sync_group

    result = replica().merge_call(lambda strategy, x: strategy.run(inner, args=(x,)), args=(jnp.float32(3),))
    assert result == 3


def test_a_mirrored_value_of_another_strategy_may_enter_a_traced_reduction(strategy2, strategy3):
    of_three = strategy3.reduce("sum", np.float32([1]))
    assert mr.function(lambda: strategy2.reduce("sum", of_three))().tolist() == [6]
    assert strategy2.run(lambda: replica().merge_call(lambda strategy: strategy.reduce("sum", of_three))).tolist() == [6]
    assert strategy2.run(lambda: strategy2.reduce("sum", of_three)).tolist() == [6]


# -- rng


def _uniform(key):
    return jax.random.uniform(replica().rng(key))


@pytest.mark.parametrize(
    "key", [3, np.int64(3), jnp.int32(3), jax.random.key(3), jax.random.PRNGKey(3)], ids=lambda key: type(key).__name__
)
def test_rng_is_different_on_each_replica_and_the_same_in_every_run(strategy3, key):
    expected = [float(jax.random.uniform(jax.random.fold_in(jax.random.key(3), i))) for i in range(3)]
    for _ in range(2):
        assert [float(x) for x in strategy3.run(lambda: _uniform(key)).values] == expected
    with mr.eager():
        assert [float(x) for x in strategy3.run(lambda: _uniform(key)).values] == expected
    assert float(_uniform(key)) == expected[0]


def test_without_rng_all_replicas_draw_the_same(strategy3):
    result = strategy3.run(lambda: jax.random.uniform(jax.random.key(3)))
    assert not isinstance(result, mr.PerReplica)


def test_rng_takes_a_key_that_is_a_variable_or_traced(strategy3):
    with strategy3.scope():
        key = mr.Variable(jax.random.key(3))
    keys = [lambda: key, lambda: key.value, lambda: jax.lax.fori_loop(0, 3, lambda i, n: n + 1, 0)]
    drawn = [[float(x) for x in strategy3.run(lambda make=make: _uniform(make())).values] for make in keys]
    assert drawn[0] == drawn[1] == drawn[2] and len(set(drawn[0])) == 3


@pytest.mark.parametrize("key", ["seed", 1.5, None, np.float32(1), jnp.ones(2)], ids=named)
def test_rng_refuses_what_is_no_key(strategy2, key):
    with pytest.raises(TypeError, match=r"rng got .*; expected a key from jax\.random\.key\(seed\), or an int"):
        strategy2.run(lambda: replica().rng(key))


# -- a context out of its place


@pytest.mark.parametrize(
    "use",
    [
        lambda ctx: ctx.all_reduce("sum", 1.0),
        lambda ctx: ctx.all_gather(np.ones(1), axis=0),
        lambda ctx: ctx.merge_call(lambda strategy: 1),
        lambda ctx: ctx.replica_id_in_sync_group,
        lambda ctx: ctx.rng(0),
    ],
    ids=["all_reduce", "all_gather", "merge_call", "replica_id_in_sync_group", "rng"],
)
def test_a_context_is_of_no_use_outside_its_step(strategy2, strategy3, use):
    kept = []
    strategy2.run(lambda: kept.append(replica()))
    message = r"of the replica context of mr\.MirroredStrategy\(2 replicas .* outside the step .*mr\.get_replica_context\(\)"
    with pytest.raises(mr.ContextError, match=message):
        use(kept[0])
    with pytest.raises(mr.ContextError, match=message):
        strategy3.run(lambda: use(kept[0]))
    outside = replica()
    use(outside)
    with pytest.raises(mr.ContextError, match=r"of the replica context of mr\.DefaultStrategy\(1 replica "):
        strategy2.run(lambda: use(outside))


def test_the_default_context_is_one_replica():
    ctx = replica()
    assert ctx.num_replicas_in_sync == 1 and ctx.replica_id_in_sync_group == 0
    assert ctx.all_reduce("sum", [2, 3.0])[1] == 3.0 and ctx.all_gather(np.arange(3), axis=0).tolist() == [0, 1, 2]
    assert ctx.merge_call(lambda strategy, x: strategy.reduce("sum", x), args=(jnp.float32(4),)) == 4


def test_the_first_replicas_value_arrives_bit_by_bit(strategy2: mr.Strategy) -> None:
    kinds = [jnp.float32(-0.0), jnp.bfloat16(-0.0), jnp.float32(-1e-44), jnp.complex64(complex(-0.0, -0.0)), jnp.int32(5)]
    for strategy in (strategy2, mr.MirroredStrategy(["cpu:0"])):  # with one replica, a complex number once ended the process
        with strategy.scope():
            variables = [mr.Variable(jnp.ones_like(kind), aggregation="only_first_replica") for kind in kinds]
        strategy.run(lambda variables=variables: [v.assign(kind) for v, kind in zip(variables, kinds, strict=True)] and None)
        assert [v.numpy().tobytes() for v in variables] == [np.asarray(kind).tobytes() for kind in kinds]


def test_the_gradient_of_the_first_replicas_value_is_that_of_its_value(strategy2: mr.Strategy) -> None:
    def step() -> jax.Array:
        ctx = mr.get_replica_context()
        axis = _collectives.ReplicaAxis(2)
        first = lambda x: _collectives.aggregate(mr.VariableAggregation.ONLY_FIRST_REPLICA, x, axis)  # noqa: E731
        return jax.grad(lambda x: 3 * first(x * (1.0 + ctx.replica_id_in_sync_group)))(2.0)

    assert [float(g) for g in strategy2.local_results(strategy2.run(step))] == [6.0, 0.0]


def test_a_sparse_array_is_refused(strategy2: mr.Strategy) -> None:
    sparse = jax.experimental.sparse.BCOO.fromdense(jnp.eye(2))
    with pytest.raises(TypeError, match=r"all_reduce got a BCOO, whose indices .* x\.todense\(\)"):
        strategy2.run(lambda: mr.get_replica_context().all_reduce("sum", {"a": sparse}))
