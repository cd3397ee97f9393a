"""reduce, gather and split of values with a replica axis, against numpy: any shapes, any sizes, any number of replicas."""

import math
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from parameters import nightly
from strategies import strategy_of, variable

import mirrored as mr
from mirrored._replicas import cross_replica, reductions
from mirrored.testing import count_programs

pytestmark = pytest.mark.usefixtures("in_numpy")

DTYPES = ["float32", "int32", "uint8", "bool", "float16", "bfloat16", "complex64", "float8_e4m3fn"]
few_examples = hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
)


# -- against numpy


@st.composite
def per_replica_arrays(draw):
    """One small array for each replica, of one rank and dtype; their sizes may differ along one axis, which comes along."""
    num_replicas = draw(st.sampled_from([3, 3, 1]))
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    uneven = st.lists(st.integers(0, 3), min_size=num_replicas, max_size=num_replicas)
    sizes = draw(st.one_of(uneven, st.just([shape[axis]] * num_replicas)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    low = 0 if dtype.kind in "ub" else -1  # so small that sums are exact in every dtype
    return axis, [random.integers(low, 2, [*shape[:axis], size, *shape[axis + 1 :]]).astype(dtype) for size in sizes]


def numpy_reduce(op, arrays, axes):
    """Reduce in double precision, and divide by the true number of elements."""
    wide = np.complex128 if arrays[0].dtype.kind == "c" else np.float64
    total = sum(array.astype(wide).sum(axis=axes) for array in arrays)
    with np.errstate(invalid="ignore"):
        return total if op == "sum" else total / np.float64(sum(math.prod(array.shape[a] for a in axes) for array in arrays))


def dtype_of(op, dtype):
    return jnp.sum(jnp.zeros(1, dtype)).dtype if op == "sum" else np.dtype("float32") if dtype.kind in "biu" else dtype


def check_reduced(result, op, arrays, axes):
    assert result.dtype == dtype_of(op, arrays[0].dtype) and result.is_fully_replicated
    expected = numpy_reduce(op, arrays, axes)
    tolerance = 0 if op == "sum" else 2 * float(jnp.finfo(result.dtype).eps)
    np.testing.assert_allclose(np.asarray(result).astype(expected.dtype), expected, rtol=tolerance)


@few_examples
@hypothesis.given(per_replica_arrays(), st.data())
def test_reduce_and_gather_are_those_of_numpy_with_the_true_number_of_rows(case, data):
    uneven_axis, arrays = case
    rank = arrays[0].ndim
    strategy = strategy_of(len(arrays))
    values = strategy.distribute_values_from_function(lambda ctx: arrays[ctx.replica_id_in_sync_group])
    axes = sorted(data.draw(st.sets(st.integers(0, rank - 1))) | {uneven_axis})
    given = data.draw(st.permutations([data.draw(st.sampled_from([a, a - rank])) for a in axes]))
    for op in ("sum", "mean"):
        check_reduced(strategy.reduce(op, values, given[0] if len(given) == 1 else tuple(given)), op, arrays, tuple(axes))
        if len({array.shape for array in arrays}) == 1:
            check_reduced(strategy.reduce(op, values, data.draw(st.sampled_from([None, ()]))), op, arrays, ())
    result = strategy.gather(values, axis=data.draw(st.sampled_from([uneven_axis, uneven_axis - rank])))
    assert result.dtype == arrays[0].dtype and result.is_fully_replicated
    np.testing.assert_array_equal(np.asarray(result), np.concatenate(arrays, axis=uneven_axis))


# -- uneven sizes


def test_what_would_leave_different_sizes_is_refused_with_all_shapes_and_the_axis(strategy3, per_replica):
    one = per_replica(strategy3, np.ones((4, 3)), np.ones((2, 3)), np.ones((2, 3)))
    two = per_replica(strategy3, np.ones((2, 1, 3)), np.ones((1, 4, 3)), np.ones((0, 2, 3)))
    assert two.shape == (None, None, 3)
    wrong_axis = r"\(4, 3\), \(2, 3\), \(2, 3\)\. Name the axis .*strategy\.reduce\(\.\.\., axis=0\)"
    of_two = r"reduce with axis=0 .*\(2, 1, 3\), \(1, 4, 3\), \(0, 2, 3\).*axis=\(0, 1\)"
    for call, message in (
        *((lambda axis=axis: strategy3.reduce("mean", one, axis), wrong_axis) for axis in (None, (), 1, -1)),
        (lambda: strategy3.gather(one, axis=1), r"gather with axis=1 .*\(4, 3\), \(2, 3\), .*strategy\.gather\(\.\.\., axis=0\)"),
        (lambda: strategy3.reduce("sum", two, axis=0), of_two),
        (lambda: strategy3.gather(two, axis=0), r"gather joins along one axis only; use strategy\.local_results"),
    ):
        with pytest.raises(mr.UnevenReplicasError, match=message):
            call()
    assert strategy3.reduce("mean", one, axis=0).tolist() == [1, 1, 1] and strategy3.gather(one, axis=0).shape == (8, 3)
    assert strategy3.reduce("sum", two, axis=(0, 1)).tolist() == [6, 6, 6] and strategy3.reduce("mean", two, axis=[1, 0, -1]) == 1


def test_the_padding_is_never_seen_whatever_is_in_it_nor_taken_for_data(strategy3, per_replica):
    x = per_replica(strategy3, np.float32([1, 2, 3]), np.float32([4]), np.float32([]))
    for poison in (np.nan, 1e30):
        poisoned = jax.tree.map(lambda stack, poison=poison: jnp.where(stack == 0, poison, stack), x)
        assert strategy3.reduce("sum", poisoned, axis=0) == 10 and strategy3.reduce("mean", poisoned, axis=0) == 2.5
        assert strategy3.gather(poisoned, axis=0).tolist() == [1, 2, 3, 4]
        assert [value.tolist() for value in poisoned.values] == [[1, 2, 3], [4], []]
    mean, joined, again = mr.function(lambda y: (strategy3.reduce("mean", y, axis=0), strategy3.gather(y, axis=0), y))(x)
    assert mean == 2.5 and joined.tolist() == [1, 2, 3, 4] and repr(again) == repr(x)
    rows = np.float32([[np.nan, 1, np.inf]]), np.float32([[1, 1, 1], [2, 2, 2]]), np.zeros((0, 3), np.float32)
    x = per_replica(strategy3, *rows)
    np.testing.assert_equal(np.asarray(strategy3.reduce("sum", x, axis=0)), [np.nan, 4, np.inf])
    np.testing.assert_equal(np.asarray(strategy3.reduce("mean", x, axis=0)), np.float32([np.nan, 4 / 3, np.inf]))
    rows = np.array([-0.0, 1.0, -0.0, -0.0], np.float32)
    [x] = strategy3.distribute_dataset([rows])
    for gathered in (strategy3.gather(x, 0), mr.function(lambda x: strategy3.gather(x, 0))(x)):
        assert np.asarray(gathered).tobytes() == rows.tobytes(), "the sign of zero stays"


# -- dtypes


def test_a_mean_neither_overflows_nor_rounds_to_zero(strategy3, per_replica):
    largest = np.int32(2**31 - 1)
    x = per_replica(strategy3, *[[largest, -largest]] * 3)
    assert strategy3.reduce("mean", x).tolist() == [np.float32(largest), -np.float32(largest)]
    for dtype in ("float16", "bfloat16"):
        expected = np.array(60000).astype(dtype)
        big = per_replica(strategy3, *[np.full(600, 60000).astype(dtype)] * 3)
        in_step = strategy3.run(lambda x: [strategy3.reduce("mean", x, axis=axis) for axis in (None, 0)], args=(big,))
        for mean in (*in_step, strategy3.reduce("mean", big), strategy3.reduce("mean", big, axis=0)):
            assert mean.dtype == dtype and np.all(np.asarray(mean) == expected)
    small = per_replica(strategy3, *[np.float16([6e-8, 2048 + i]) for i in (0, 2, 4)])
    assert strategy3.reduce("mean", small).tolist() == [np.float16(6e-8), np.float16(2050)]
    assert cross_replica.aggregate_stack(jnp.array([[True], [True]]), mr.VariableAggregation.SUM).dtype == jnp.bool_
    half = cross_replica.aggregate_stack(jnp.full((8, 1), 60000, jnp.float16), mr.VariableAggregation.MEAN)
    assert half.dtype == jnp.float16 and half[0] == 60000
    assert reductions.divide(jnp.float32(2.0**33), 2**32, jnp.dtype("float32")) == 2.0, "more than an int32 counts"


def test_gather_takes_random_keys_even_and_uneven_which_cannot_be_added(strategy3):
    for counts in ((2, 2, 2), (0, 1, 2)):
        rows = [jax.random.split(jax.random.key(i), count) for i, count in enumerate(counts)]
        keys = strategy3.distribute_values_from_function(lambda ctx, rows=rows: rows[ctx.replica_id_in_sync_group])
        gathered = strategy3.gather(keys, axis=0)
        np.testing.assert_array_equal(jax.random.key_data(gathered), jax.random.key_data(jnp.concatenate(rows)))
    for op in ("sum", "mean"):
        with pytest.raises(TypeError, match=r"dtype key<fry> cannot be added over the replicas; expected numbers.*strategy\.gat"):
            strategy3.reduce(op, keys, axis=0)


# -- what is the same on each replica; its sum is R times it: parity/test_tf_numbers.py


def test_the_mean_of_a_mirrored_value_is_itself_to_the_bit():
    for dtype in ("float32", "float16", "bfloat16", "complex64"):
        values = np.random.default_rng(0).normal(size=500)
        values = np.concatenate([values, [3e38 if dtype != "float16" else 6e4, -0.0, 1e-30]]).astype(dtype)
        mean = strategy_of(3).reduce("mean", values)
        assert mean.dtype == dtype and np.asarray(mean).tobytes() == values.tobytes()


def test_a_mean_of_integers_rounds_once(strategy3, per_replica):
    rows = np.int32([[2**24 + 1, -(2**31), -7], [1, -(2**31), 0], [1, -(2**31), 0]])
    x = per_replica(strategy3, *rows)
    all_reduced = strategy3.run(lambda x: mr.get_replica_context().all_reduce("mean", x), args=(x,))
    for mean in (all_reduced, strategy3.reduce("mean", x), strategy3.reduce("mean", jnp.asarray(rows), axis=0)):
        np.testing.assert_array_equal(mean, rows.astype(np.float64).mean(0).astype(np.float32))
    uneven = per_replica(strategy3, [2**24 + 1], np.zeros(0, np.int64), [1, 2**24 + 1, 1])
    assert float(strategy3.reduce("mean", uneven, axis=0)) == 2**23 + 1
    assert strategy3.reduce("mean", per_replica(strategy3, *np.uint8([255, 255, 254]))) == np.float32(254 + 2 / 3)
    many = np.full(70_000, 69_999, np.int32)  # more than what is added up as integers
    np.testing.assert_allclose(strategy3.reduce("mean", many, axis=0), 69_999, rtol=1e-6)


# -- sums of integers: those of jnp.sum, or refused


def sum_of(call, *args, **kwargs):
    """Return a sum as an int or list; None where it is refused because it would wrap around."""
    try:
        return np.asarray(call(*args, **kwargs)).tolist()
    except ValueError as error:
        assert re.search(r"does not fit u?int\d+, which holds up to \d+, and would wrap around", str(error))
        return None


@pytest.mark.parametrize("dtype", ["int32", "uint8", *nightly("uint32", "int16", "bool")])
def test_a_sum_of_integers_is_exact_or_refused(strategy3, dtype):
    strategy, num_replicas, random = strategy3, 3, np.random.default_rng(0)
    wide, refused = jnp.sum(jnp.zeros(1, dtype)).dtype, 0
    low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    few = high // num_replicas
    rows = [random.integers(low // k, high // k, (num_replicas, 2), endpoint=True) for k in (1, num_replicas, 2 * num_replicas)]
    rows += [np.array([[low, few]] * num_replicas), np.array([[low // num_replicas, few + 1]] * num_replicas)]
    rows += [np.array([[high, few]] + [[low, few]] * (num_replicas - 1))]
    for row in rows:
        values = strategy.distribute_values_from_function(lambda ctx, row=row: row[ctx.replica_id_in_sync_group].astype(dtype))
        for axis, exact in ((None, row.astype(dtype).astype(np.int64).sum(0)), (0, row.astype(dtype).astype(np.int64).sum())):
            fits = np.all((exact >= np.iinfo(wide).min) & (exact <= np.iinfo(wide).max))
            refused += not fits
            assert sum_of(strategy.reduce, "sum", values, axis) == (exact.tolist() if fits else None), (row, axis)
            if fits:
                result = strategy.reduce("sum", values, axis)
                in_step = strategy.run(lambda x, axis=axis: strategy.reduce("sum", x, axis), args=(values,))
                assert result.dtype == in_step.dtype == wide and np.array_equal(in_step, result)
    assert bool(refused) == (dtype in ("int32", "uint32"))


@pytest.mark.parametrize("dtype", ["int4", *nightly("uint4", "int2")])
def test_sums_of_integers_of_a_few_bits_widen_like_those_of_eight(strategy3, dtype):
    """JAX promotes none of them, so the sum ended with a TypePromotionError."""
    rows = np.array([1, 0, 1, 1, 1, 1]).astype(dtype)
    [x] = strategy3.distribute_dataset([rows])
    total, wide = strategy3.reduce("sum", x, axis=0), jnp.sum(jnp.zeros(1, "uint8" if "u" in dtype else "int8")).dtype
    assert total == 5 and total.dtype == wide and strategy3.reduce("sum", rows[0]) == 3
    assert strategy3.run(lambda x: strategy3.reduce("sum", x), args=(x,)).tolist() == [3, 2]


def test_sums_of_many_rows_of_what_is_mirrored_and_in_a_tree_are_refused_where_they_wrap_around(strategy3, per_replica):
    rows = np.tile(np.int32([2**31 - 1, -(2**31)]), 50_000)
    uneven = per_replica(strategy3, rows, np.int32([5]), np.zeros(0, np.int32))
    assert strategy3.reduce("sum", uneven, axis=0) == 5 - 50_000
    for value, exact in ((715_827_882, 2_147_483_646), (715_827_883, None), (np.int32([-(2**31)]), None), (True, 3)):
        assert sum_of(strategy3.reduce, "sum", value) == exact
    tree = {"a": per_replica(strategy3, 1.5, 2.5, 3.0), "n": per_replica(strategy3, *np.int32([1, 2, 3])), "m": 4}
    assert jax.tree.map(float, strategy3.reduce("sum", tree)) == {"a": 7.0, "n": 6.0, "m": 12.0}
    assert sum_of(strategy3.reduce, "sum", tree | {"m": 2**30}) is None
    assert strategy3.reduce("mean", 2**30) == 2**30
    wrapped = mr.function(lambda: strategy3.reduce("sum", per_replica(strategy3, *np.int32([2**30] * 3))))()
    assert wrapped == 3 * 2**30 - 2**32, "nobody can look inside of a program"


def test_the_sum_of_a_variable_that_its_dtype_does_not_hold_is_refused_and_changes_nothing(strategy3, per_replica):
    seen, small = (variable(np.zeros((), d), strategy3, synchronization="on_read", aggregation="sum") for d in ("int32", "int8"))
    total = variable(7, strategy3, aggregation="sum")
    strategy3.run(lambda: (seen.assign(800_000_000), small.assign(100), None)[2])
    large = per_replica(strategy3, *np.int32([2**30] * 3))
    uses = (
        lambda: int(seen),
        lambda: seen.value,
        seen.numpy,
        lambda: seen.assign_add(1),
        small.numpy,
        lambda: total.assign(large),
    )
    for use in uses:
        with pytest.raises(ValueError, match=r"variable .*: a sum over the replicas does not fit int(32|8), which holds up to"):
            use()
    assert sum(map(int, strategy3.local_results(seen))) == 2_400_000_000, "the way out that the message names"
    assert int(total) == 7 and int(small.assign(100)) == 100 and small.dtype == np.int8
    assert int(total.assign(per_replica(strategy3, *np.int32([1, 2, 3])))) == 6


# -- split: parts whose sum is exact


_split = jax.jit(cross_replica.split_stack, static_argnums=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_the_parts_of_a_split_add_up_exactly_in_any_order(dtype):
    random = np.random.default_rng(0)
    value = np.frombuffer(random.bytes(2000), dtype)  # from the smallest to the largest
    with np.errstate(invalid="ignore"):
        wide = np.abs(value.astype(np.float64))
    value = value[np.isfinite(wide) & (wide > 1.2e-38)]  # subnormals are the first replica's: tests/_variables/test_variable.py
    for num_replicas in (3, 8):
        parts = np.asarray(_split(value, num_replicas))
        assert parts.dtype == dtype and parts.shape == (num_replicas, len(value))
        total, *others = parts[random.permutation(num_replicas)]
        for part in others:
            total = (total + part).astype(dtype)
            assert np.all(np.abs(total.astype(np.float64)) <= np.abs(value.astype(np.float64)))
        np.testing.assert_array_equal(total, value)


def test_a_split_is_as_fair_as_it_can_be_and_keeps_the_extremes():
    fair = {7: [3, 2, 2], -7: [-3, -2, -2], 2: [2, 0, 0], 6.0: [2] * 3, 0.0: [0] * 3, 3 + 9j: [1 + 3j] * 3}
    assert {value: _split(np.asarray(value), 3).tolist() for value in fair} == fair
    value = np.random.default_rng(0).normal(size=100).astype(np.float32)
    np.testing.assert_allclose(_split(value, 8), np.broadcast_to(value / 8, (8, 100)), rtol=1e-5)
    for dtype in ("float32", "float16", "bfloat16"):
        info = ml_dtypes.finfo(dtype)
        value = np.array([np.nan, np.inf, -np.inf, info.max, info.min, info.tiny, -info.tiny], dtype)
        parts = np.asarray(_split(value, 3))
        assert np.all(np.isfinite(parts[1:].astype(np.float32)))
        total = sum(parts[1:], start=parts[0]).astype(dtype)
        np.testing.assert_array_equal(total.astype(np.float32), value.astype(np.float32))
    for wrong in (True, jax.random.key(0)):
        with pytest.raises(TypeError, match="cannot be split into a sum over replicas"):
            cross_replica.split_stack(jnp.asarray(wrong), 2)


# -- aggregation of copies, and programs


@pytest.mark.by_xla
def test_the_first_replicas_value_arrives_bit_by_bit(strategy3):
    """In a step, and outside of one; with one replica, a complex number once ended the process."""
    numbers = np.array([-0.0, 1e-40, 5], np.float32)  # a subnormal
    values = [numbers.astype(jnp.dtype(dtype)) for dtype in ("float32", "bfloat16", "complex64", "int32")] * 2
    for strategy in (strategy3, strategy_of(1)):
        for assign in (lambda call: call(), strategy.run):
            first = [
                variable(np.ones_like(value), strategy, synchronization=synchronization, aggregation="only_first_replica")
                for value, synchronization in zip(values, ["on_write"] * 4 + ["on_read"] * 4, strict=True)
            ]
            assign(lambda first=first: [v.assign(value) for v, value in zip(first, values, strict=True)] and None)
            assert [v.numpy().tobytes() for v in first] == [value.tobytes() for value in values]


def test_an_aggregation_outside_a_step_has_gradients(strategy3):
    of_each = {(s, a): 1 for s in ("on_write", "on_read") for a in ("sum", "only_first_replica")}
    of_each |= {("on_write", "mean"): 1 / 3, ("on_read", "mean"): 1 / 3}
    own = strategy3.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group == 0))
    for wrap, shares in ((mr.function, of_each), (lambda f: f, dict([*of_each.items()][::2]))):
        weights = [variable(np.float32([3, 4]), strategy3) for _ in shares]
        totals = [variable(np.zeros(2, np.float32), strategy3, synchronization=s, aggregation=a) for s, a in shares]

        def loss(weights=weights, totals=totals):  # all copies but the first are zero
            squares = strategy3.run(lambda own: [own * w.value**2 for w in weights], args=(own,))
            return sum(total.assign(square).value.sum() for total, square in zip(totals, squares, strict=True))

        value, gradients = wrap(mr.value_and_grad(loss, weights))()
        np.testing.assert_allclose(value, 25 * sum(shares.values()), rtol=1e-6)
        np.testing.assert_allclose(gradients, [[6 * share, 8 * share] for share in shares.values()], rtol=1e-6)


def test_one_program_serves_all_values_of_one_shape(strategy2, per_replica):
    cross_replica._compile.cache_clear()
    with count_programs() as counted:
        for i in range(4):
            strategy2.reduce("sum", per_replica(strategy2, *np.array([[i, i], [2 * i, 0]], np.float32)))
    assert cross_replica._compile.cache_info().misses == 1 and len(counted.others) == 1


# -- a tree: one program, few buffers, and the bits of its leaves


def is_leaf(value: Any) -> bool:
    return isinstance(value, mr.PerReplica | mr.Variable)


def small_tree(strategy: mr.Strategy, count: int = 12) -> list[mr.PerReplica]:
    return strategy.distribute_values_from_function(
        lambda context: [np.float32([i, -0.0, 0.1 * context.replica_id_in_sync_group]) for i in range(count)]
    )


def test_a_tree_of_small_arrays_is_one_program_and_few_sums(strategy3: mr.Strategy) -> None:
    tree = {"few": small_tree(strategy3), "many": small_tree(strategy3, 1), "int": small_tree(strategy3, 2)}
    tree["int"] = strategy3.run(lambda xs: [x.astype(jnp.int32) for x in xs], args=(tree["int"],))
    with count_programs() as counted:
        total, joined = strategy3.reduce("sum", tree), strategy3.gather(tree, 0)
    assert len(counted.others) == 2, counted.others
    traced = mr.function(lambda tree: strategy3.reduce("sum", tree))(tree)
    jax.tree.map(np.testing.assert_array_equal, traced, total)
    for array, whole, leaf in zip(*map(jax.tree.leaves, (total, joined)), jax.tree.leaves(tree, is_leaf=is_leaf), strict=True):
        values = [np.asarray(value) for value in leaf.values]
        np.testing.assert_array_equal(array, values[0] + values[1] + values[2])
        assert np.asarray(whole).tobytes() == np.concatenate(values).tobytes(), "-0.0 stays"
    task = cross_replica.Task(cross_replica.reduce_stack, (mr.ReduceOp.SUM, (), None, None))
    stacks = jax.tree.leaves(tree)
    placement = strategy3._mesh.mirrored
    program = jax.jit(lambda arrays: cross_replica.compute_all(arrays, [task] * len(stacks), placement), out_shardings=placement)
    text = program.lower(stacks).compile().as_text()
    assert text.count(" all-reduce(") + text.count("all-reduce-start(") <= 2, "one for each dtype"


def test_a_bad_leaf_stops_a_tree_before_anything_runs(strategy2: mr.Strategy) -> None:
    tree = {"x": small_tree(strategy2, 2)}
    with count_programs() as counted, pytest.raises(TypeError, match="'text'"):
        strategy2.reduce("sum", [tree["x"], "text"])
    assert not counted.others and strategy2.reduce("sum", {"nothing": []}) == {"nothing": []}


def test_large_arrays_of_a_tree_travel_alone() -> None:
    shapes: list[tuple[int, ...]] = []
    stacks = [jnp.ones((2, size)) for size in (3, 40_000, 4)]
    assert [x.tolist() for x in cross_replica._move_small(stacks, lambda s: shapes.append(s.shape) or s[0])] == [
        [1] * n for n in (3, 40_000, 4)
    ]
    assert sorted(shapes) == [(2, 7), (2, 40_000)]


def test_a_bad_leaf_stops_a_tree_before_anything_runs_and_keys_are_only_gathered(strategy2: mr.Strategy) -> None:
    keys = strategy2.distribute_values_from_function(lambda context: jax.random.key(context.replica_id_in_sync_group)[None])
    tree = {"keys": keys, "x": small_tree(strategy2, 2)}
    with count_programs() as counted, pytest.raises(TypeError, match="'text'"):
        strategy2.reduce("sum", [tree["x"], "text"])
    assert not counted.others and strategy2.reduce("sum", {"nothing": []}) == {"nothing": []}
    gathered = jax.random.key_data(strategy2.gather(tree, 0)["keys"])
    np.testing.assert_array_equal(gathered, [jax.random.key_data(jax.random.key(i)) for i in range(2)])
    with pytest.raises(TypeError, match="cannot be added"):
        strategy2.reduce("sum", tree)
