"""Uneven steps under attack: random programs against NumPy on each replica, and right programs that once failed."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mirrored as mr

DEVICES = [f"cpu:{i}" for i in range(8)]
STRATEGIES = {r: mr.MirroredStrategy(DEVICES[:r]) for r in (2, 3)}
COLUMNS = 4


def data(num_rows, num_columns=COLUMNS):
    return np.random.default_rng(num_rows).normal(size=(num_rows, num_columns)).astype(np.float32)


def with_nan_padding(rows):
    """Make a PerReplica of arrays of different shapes, with NaN wherever no replica has a value."""
    shapes = tuple(own.shape for own in rows)
    padded = np.full((len(rows), *map(max, zip(*shapes, strict=True))), np.nan, np.float32)
    for i, own in enumerate(rows):
        padded[(i, *map(slice, own.shape))] = own
    return mr.PerReplica(jnp.asarray(padded), shapes if len(set(shapes)) > 1 else None)


def split(strategy, rows):
    return with_nan_padding(np.array_split(rows, strategy.num_replicas_in_sync))


# -- random programs: NumPy runs all replicas side by side
#
# A program keeps two values on each replica: v of shape [4] and rows of shape [n, 4]. Each operation is
# written twice, in JAX for one replica and in NumPy for all, with the rule by which v stays mirrored.


@dataclasses.dataclass
class Simulated:
    """The replicas' values, and whether v and the variable are known to be the same on all of them."""

    v: list
    rows: list
    w: np.ndarray
    is_mirrored: bool = True
    may_assign: bool = True

    @property
    def is_uneven(self):
        return len({len(own) for own in self.rows}) > 1


def local(function):
    """Make a rule for v that concerns one replica alone; its argument is v."""

    def simulate(s):
        s.v = [function(np, v) for v in s.v]

    return lambda ctx, v, rows, w: (function(jnp, v), rows), simulate


def on_rows(function):
    """Make a rule for rows that concerns one replica alone; its arguments are v and rows."""

    def simulate(s):
        s.rows = [function(np, v, rows) for v, rows in zip(s.v, s.rows, strict=True)]

    return lambda ctx, v, rows, w: (v, function(jnp, v, rows)), simulate


def collective(compute, total, is_looped=False):
    """Make a rule that sets v from all replicas; of a loop's result the proof assumes that the loop may run 0 times."""

    def simulate(s):
        new = np.tanh(np.asarray(total(s), np.float32))
        s.v = [new] * len(s.v)
        s.is_mirrored |= not is_looped

    return lambda ctx, v, rows, w: (jnp.tanh(compute(ctx, v, rows)), rows), simulate


def tainting(compute, one, is_tainted=lambda s: True):
    """Make a rule that sets v on each replica, and after which v may differ by replica."""

    def simulate(s):
        s.is_mirrored &= not is_tainted(s)
        s.v = [np.asarray(one(i, v, rows), np.float32) for i, (v, rows) in enumerate(zip(s.v, s.rows, strict=True))]

    return lambda ctx, v, rows, w: (compute(ctx, v, rows), rows), simulate


def assign(ctx, v, rows, w):
    w.assign(v)
    return v, rows


def simulate_assign(s):
    s.may_assign &= s.is_mirrored
    s.w = s.v[0]


def read(ctx, v, rows, w):
    return w.value + 0.5 * v, rows


def simulate_read(s):
    s.v = [s.w + np.float32(0.5) * v for v in s.v]


def total_of_rows(s):
    return sum(np.tanh(rows).sum(axis=0) for rows in s.rows)


def plain_mean(ctx, v):
    """Return the mean over the replicas of a value that may be anything, such as a sum over rows."""
    return ctx.all_reduce("sum", v / ctx.num_replicas_in_sync)


def reduced_in_loop(ctx, v, rows):
    return jax.lax.fori_loop(0, 2, lambda i, t: plain_mean(ctx, t) + 1, v)


def reduced_with_rows_in_loop(ctx, v, rows):
    """The body uses the rows, and carries them."""

    def body(i, carry):
        v, rows = carry
        total = jnp.tanh(ctx.all_reduce("sum", jnp.tanh(rows * v).sum(axis=0)))
        return total, rows - total

    return jax.lax.fori_loop(0, 2, body, (v, rows))[0]


def simulated_loop(s):
    values, all_rows = s.v, s.rows
    for _ in range(2):
        total = np.tanh(sum(np.tanh(rows * v).sum(axis=0) for v, rows in zip(values, all_rows, strict=True)))
        values, all_rows = [total] * len(values), [rows - total for rows in all_rows]
    return values[0]


def reduced_in_cond(ctx, v, rows):
    is_positive = ctx.all_reduce("sum", jnp.asarray(rows.shape[0])) > 5
    return jax.lax.cond(is_positive, lambda t: plain_mean(ctx, t), lambda t: plain_mean(ctx, -t), v)


def simulated_cond(s):
    sign = 1 if sum(map(len, s.rows)) > 5 else -1
    return sign * np.mean(s.v, axis=0)


def center(ctx, v, rows, w):
    total, count = ctx.all_reduce("sum", (jnp.sum(rows, axis=0), jnp.asarray(rows.shape[0], jnp.float32)))
    return v, rows - total / (count + 1)


def simulate_center(s):
    total, count = sum(rows.sum(axis=0) for rows in s.rows), sum(map(len, s.rows))
    s.rows = [rows - total / np.float32(count + 1) for rows in s.rows]


def attend(ctx, v, rows, w):
    others = ctx.all_gather(rows, axis=0)
    return v, jnp.tanh(rows @ others.T @ others / (1 + others.shape[0]))


def simulate_attend(s):
    others = np.concatenate(s.rows)
    s.rows = [np.tanh(rows @ others.T @ others / (1 + len(others))) for rows in s.rows]


ONES = np.linspace(0, 1, COLUMNS, dtype=np.float32)

OPERATIONS = {
    "tanh": local(lambda np, v: np.tanh(v)),
    "constant": local(lambda np, v: v + ONES),
    "roll": local(lambda np, v: np.roll(v, 1)),
    "rank": tainting(
        lambda ctx, v, rows: v + ctx.replica_id_in_sync_group.astype("float32"),
        lambda i, v, rows: v + i,
    ),
    "own count": tainting(
        lambda ctx, v, rows: v / (1 + rows.shape[0]) + 0 * ctx.replica_id_in_sync_group, lambda i, v, rows: v / (1 + len(rows))
    ),
    "own sum": tainting(lambda ctx, v, rows: v + jnp.tanh(rows).sum(axis=0), lambda i, v, rows: v + np.tanh(rows).sum(axis=0)),
    "own constant": tainting(
        lambda ctx, v, rows: v * np.full(COLUMNS, rows.shape[0] - 1, np.float32) + 0 * ctx.replica_id_in_sync_group,
        lambda i, v, rows: v * (len(rows) - 1),
    ),
    "own scan": tainting(
        lambda ctx, v, rows: jax.lax.scan(lambda c, row: (jnp.tanh(c + row), None), v, rows)[0],
        lambda i, v, rows: _scanned(v, rows),
    ),
    "sum of rows": collective(lambda ctx, v, rows: ctx.all_reduce("sum", jnp.tanh(rows).sum(axis=0)), total_of_rows),
    "mean": collective(lambda ctx, v, rows: plain_mean(ctx, v), lambda s: np.mean(s.v, axis=0)),
    "mean of rows": collective(
        lambda ctx, v, rows: ctx.all_reduce("mean", jnp.mean(jnp.concatenate([jnp.tanh(rows), jnp.cos(rows)]), axis=0)),
        lambda s: np.mean(np.concatenate([f(rows) for rows in s.rows for f in (np.tanh, np.cos)]), axis=0),
    ),
    "gathered": collective(
        lambda ctx, v, rows: jnp.sum(ctx.all_gather(v[None], axis=0) ** 2, axis=0), lambda s: np.sum(np.square(s.v), axis=0)
    ),
    "gathered rows": collective(
        lambda ctx, v, rows: jnp.max(ctx.all_gather(rows, axis=0), axis=0, initial=0.0),
        lambda s: np.max(np.concatenate(s.rows), axis=0, initial=0.0),
    ),
    "gathered columns": collective(
        lambda ctx, v, rows: jnp.sum(jnp.sin(ctx.all_gather(rows.T, axis=1)), axis=1),
        lambda s: np.sin(np.concatenate(s.rows)).sum(axis=0),
    ),
    "in a loop": collective(reduced_in_loop, lambda s: np.mean(s.v, axis=0) + 2, is_looped=True),
    "in a loop with rows": collective(reduced_with_rows_in_loop, simulated_loop, is_looped=True),
    "in a cond": collective(reduced_in_cond, simulated_cond),
    "jit": (
        jax.jit(lambda ctx, v, rows, w: (jnp.tanh(plain_mean(ctx, v)), rows), static_argnums=(0, 3)),
        collective(lambda ctx, v, rows: v, lambda s: np.mean(s.v, axis=0))[1],
    ),
    "scaled": on_rows(lambda np, v, rows: np.tanh(rows * v)),
    "fewer": on_rows(lambda np, v, rows: rows[: rows.shape[0] // 2]),
    "rest": on_rows(lambda np, v, rows: rows[1:]),
    "twice": on_rows(lambda np, v, rows: np.concatenate([rows, -rows])),
    "one more": on_rows(lambda np, v, rows: np.concatenate([rows, np.tanh(v)[None]])),
    "sorted": on_rows(lambda np, v, rows: np.sort(rows, axis=0)),
    "numbered": on_rows(lambda np, v, rows: np.tanh(rows + np.arange(rows.shape[0])[:, None].astype("float32"))),
    "skipped": on_rows(lambda np, v, rows: rows if rows.shape[0] < 2 else np.cos(rows)),
    "center": (center, simulate_center),
    "attend": (attend, simulate_attend),
    "assign": (assign, simulate_assign),
    "read": (read, simulate_read),
}


def _scanned(v, rows):
    for row in rows:
        v = np.tanh(v + row)
    return v


def check_random_program(operations, sizes):
    strategy = mr.MirroredStrategy(DEVICES[: len(sizes)])  # new: one step of many programs would warn
    rows = [data(n) + np.float32(i) for i, n in enumerate(sizes)]
    with strategy.scope():
        w = mr.Variable(ONES)
        seen = mr.Variable(0, synchronization="on_read", aggregation="sum")

    def step(v, rows):
        ctx = mr.get_replica_context()
        for name in operations:
            v, rows = OPERATIONS[name][0](ctx, v, rows, w)
        seen.assign_add(rows.shape[0])
        return v, rows

    expected = Simulated([ONES] * len(sizes), rows, ONES)
    for name in operations:
        OPERATIONS[name][1](expected)
    if not expected.may_assign:
        with pytest.raises(mr.ReplicasDivergeError):
            strategy.run(step, args=(ONES, with_nan_padding(rows)))
        np.testing.assert_array_equal(w.value, ONES)
        assert int(seen.value) == 0
        return
    v, out = strategy.run(step, args=(ONES, with_nan_padding(rows)))
    strategy.assert_mirrored()
    assert isinstance(v, mr.PerReplica) is not expected.is_mirrored
    for own, expected_v in zip(strategy.local_results(v), expected.v, strict=False):
        np.testing.assert_allclose(own, expected_v, rtol=2e-3, atol=2e-4)
    for own, expected_rows in zip(out.values, expected.rows, strict=True):
        np.testing.assert_allclose(own, expected_rows, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(w.value, expected.w, rtol=2e-3, atol=2e-4)
    assert int(seen.value) == sum(map(len, expected.rows))


PROGRAMS = st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=2, max_size=9)
SIZES = st.sampled_from([(2, 1), (0, 3), (3, 2, 2), (1, 0, 0), (0, 4, 1), (1, 1, 0), (2, 2, 2), (2, 1, 0, 3, 2, 2, 0, 1)])


@given(operations=PROGRAMS, sizes=SIZES)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_random_programs_compute_what_numpy_computes_and_only_mirrored_values_are_assigned(operations, sizes):
    check_random_program(operations, sizes)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(operations=PROGRAMS, sizes=SIZES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_many_random_programs(operations, sizes):
    """A collective of one line that is used twice may be refused, see docs/LOG.md; what runs is right."""
    try:
        check_random_program(operations, sizes)
    except mr.UnevenReplicasError as refusal:
        assert "collectives of one kind in different orders" in str(refusal), refusal
    except RuntimeWarning as warning:  # of NumPy: no replica has a row left
        assert "Mean of empty slice" in str(warning)


# -- right programs: one device is the oracle


def assert_equals_one_device(make, num_rows):
    """Run what `make` makes on one device and on three."""
    outcomes = []
    for r in (1, 3):
        strategy = mr.MirroredStrategy(DEVICES[:r])
        with strategy.scope():
            run = make(strategy)
        outcomes.append(jax.tree.map(np.asarray, run(split(strategy, data(num_rows)))))
        strategy.assert_mirrored()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *outcomes)


def whole(strategy, tree):
    """Join rows, add up scalars; mirrored values as they are."""

    def join(value):
        if not isinstance(value, mr.PerReplica):
            return value
        return strategy.gather(value, axis=0) if value.ndim else strategy.reduce("sum", value)

    return jax.tree.map(join, tree, is_leaf=lambda leaf: isinstance(leaf, mr.PerReplica))


def ctx():
    return mr.get_replica_context()


def one_row_of_each(x):
    """A replica with one row cannot tell its one row from the one that every replica has."""
    totals = ctx().all_gather(jnp.sum(x, axis=0, keepdims=True), axis=0)
    return totals.reshape(ctx().num_replicas_in_sync, COLUMNS).sum(axis=0)


def halves_of_rows(x):
    """A replica with no rows cannot tell how many halves the others have."""
    halves = ctx().all_gather(x.reshape(x.shape[0] * 2, COLUMNS // 2), axis=0)
    return halves.reshape(ctx().all_gather(x, axis=0).shape)


def own_rows_of_all(x):
    everything = ctx().all_gather(x, axis=0)
    counts = ctx().all_gather(jnp.asarray(x.shape[0])[None], axis=0)
    before = jnp.arange(ctx().num_replicas_in_sync) < ctx().replica_id_in_sync_group
    return jax.lax.dynamic_slice_in_dim(everything, jnp.sum(counts * before), x.shape[0]) - x


def gathered_again_and_again(x):
    """Each size depends on the answer before."""
    rows = ctx().all_gather(jnp.zeros((1, 1)), axis=0)
    for _ in range(5):
        rows = ctx().all_gather(rows[:1], axis=0)[:1]
    return rows


def helper_with_questions(x):
    """The jitted helper sees one shape twice on some replicas, two shapes on others."""

    @jax.jit
    def loss(rows):
        return mr.losses.compute_average_loss(rows)

    return loss(x), loss(ctx().all_gather(x, axis=0)[:2]) * ctx().num_replicas_in_sync


def custom_derivatives(x):
    @jax.custom_vjp
    def normalized(x):
        return x - ctx().all_reduce("sum", jnp.sum(x, axis=0))

    def backward(_, g):
        return (jnp.tanh(g) - ctx().all_reduce("sum", jnp.sum(g, axis=0)),)

    normalized.defvjp(lambda x: (normalized(x), None), backward)

    @jax.custom_jvp
    def doubled(x):
        return 2 * x

    doubled.defjvp(lambda p, t: (doubled(*p), 2 * t[0] + ctx().all_reduce("sum", jnp.sum(t[0], axis=0))))
    return jax.grad(lambda x: jnp.sum(jnp.sin(normalized(x))))(x), jax.jvp(doubled, (x,), (x,))[1]


def transformed_collectives(x):
    remat = jax.checkpoint(lambda x: jnp.tanh(x - ctx().all_reduce("sum", jnp.sum(x, axis=0))))
    by_column = jax.vmap(lambda c: ctx().all_reduce("sum", jnp.sum(c)), in_axes=1)(x)
    return jax.grad(lambda x: jnp.sum(remat(remat(x)) ** 2))(x), by_column


def many_dtypes(x):
    """Each is carried over a collective, padded, and returned."""
    values = (x > 0, (9 * x).astype(jnp.int8), x + 1j * x, x.astype(jnp.bfloat16), x.astype(jnp.float16), x[:, :0], x[:0])
    total = ctx().all_reduce("sum", jnp.sum(x))
    after = [value * (total > -1e6) for value in values]
    return *[a.astype(jnp.complex64) for a in after], ctx().all_gather(after[0], axis=0), ctx().all_gather(after[2], axis=0)


def row_operations(x):
    labels = jnp.argmax(x, axis=1)
    by_label = ctx().all_reduce("sum", jax.ops.segment_sum(x, labels, COLUMNS))
    largest = jax.lax.pmax(jnp.max(x, axis=0, initial=-jnp.inf), "replica")
    first = jnp.zeros(0) if x.shape[0] == 0 else jnp.argsort(x, axis=1)[:, 0].astype(jnp.float32)
    return by_label, largest, first, jax.nn.one_hot(labels, COLUMNS), jnp.take_along_axis(x, labels[:, None], axis=1)


RIGHT = {
    one_row_of_each: 2,
    halves_of_rows: 2,
    own_rows_of_all: 2,
    gathered_again_and_again: 5,
    helper_with_questions: 7,
    custom_derivatives: 2,
    transformed_collectives: 7,
    many_dtypes: 7,
    row_operations: 2,
}


@pytest.mark.parametrize("step", RIGHT, ids=lambda step: step.__name__)
def test_right_steps_equal_one_device(step):
    assert_equals_one_device(lambda strategy: lambda x: whole(strategy, strategy.run(step, args=(x,))), num_rows=RIGHT[step])


def test_arrays_that_a_step_makes_anew_for_each_trace_are_the_same_to_all_replicas():
    table = np.arange(8.0, dtype=np.float32).reshape(2, COLUMNS)
    key = jax.random.key(3)

    def make(strategy):
        v = mr.Variable(np.ones(COLUMNS, np.float32))

        def step(x):
            with jax.ensure_compile_time_eval():
                made, made_key = jnp.sin(jnp.arange(4.0)), jax.random.fold_in(key, 1)
            noise = jax.random.normal(made_key, (COLUMNS,)) + jax.random.normal(key, (COLUMNS,))
            summed = jax.lax.reduce(jnp.asarray(table), jnp.float32(0), lambda a, b: a + b * 1, (0,))
            v.assign(v + made + noise + summed + jnp.array([1, 2, 3, 4]))

        def run(x):
            strategy.run(step, args=(x,))
            return v.value

        return run

    assert_equals_one_device(make, 7)


def test_loops_and_conds_of_this_library_assign_in_uneven_steps():
    def make(strategy):
        mirrored, chosen = mr.Variable(np.zeros(COLUMNS, np.float32)), mr.Variable(np.float32(0))
        own = mr.Variable(np.zeros(COLUMNS, np.float32), synchronization="on_read", aggregation="sum")

        def step(x):
            def over_rows(carry, row):
                own.assign_add(row)
                return carry + row, jnp.sum(row)

            total, sums = mr.scan(over_rows, jnp.zeros(COLUMNS), x)
            total = ctx().all_reduce("sum", total)
            mr.fori_loop(0, 3, lambda i, c: mirrored.assign_add(ctx().all_reduce("mean", total)) * 0, jnp.zeros(COLUMNS))
            mr.fori_loop(0, 3, lambda i, c: (chosen.assign_add(total[0]), c)[1], 0.0)
            mr.cond(total[0] > 0, lambda: chosen.assign(chosen * 2), lambda: chosen.assign(chosen - 1))
            return sums

        return lambda x: (whole(strategy, strategy.run(step, args=(x,))), mirrored.value, own.value, chosen.value)

    assert_equals_one_device(make, 7)


def test_an_assignment_under_a_condition_on_the_rows_is_refused():
    strategy = STRATEGIES[3]
    with strategy.scope():
        v = mr.Variable(np.float32(0), name="v")

    def step(x):
        mr.cond(jnp.asarray(x.shape[0]) > 2, lambda: v.assign(1.0), lambda: None)

    with pytest.raises(mr.ReplicasDivergeError, match=r"variable 'v' is mirrored.*own number of rows"):
        strategy.run(step, args=(split(strategy, data(7)),))


def test_a_loop_around_run_trains_on_uneven_rows_and_other_strategies_may_run_in_between():
    def make(strategy):
        w = mr.Variable(np.ones(COLUMNS, np.float32))
        optimizer = mr.Optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)), [w])

        def step(x):
            value, gradients = mr.value_and_grad(lambda: mr.losses.compute_average_loss(jnp.tanh(x @ w.value)), [w])()
            optimizer.apply_gradients(gradients)
            return value

        def run(x):
            body = lambda carry, _: (carry, strategy.reduce("sum", strategy.run(step, args=(x,))))  # noqa: E731
            _, losses = mr.scan(body, 0.0, None, length=3)
            STRATEGIES[2].run(lambda x: 2 * x, args=(split(STRATEGIES[2], data(5)),))
            return losses, strategy.reduce("sum", strategy.run(step, args=(x,))), w.value

        return run

    assert_equals_one_device(make, 7)


def test_gradients_through_run_are_those_of_one_device():
    def make(strategy):
        def loss(w, x):
            def step(x, w):
                return jnp.sum(jnp.tanh((x - ctx().all_reduce("sum", jnp.sum(x * w, axis=0))) @ w))

            return strategy.reduce("sum", strategy.run(step, args=(x, w)))

        return lambda x: jax.jit(jax.grad(loss))(0.1 * jnp.ones(COLUMNS), x)

    assert_equals_one_device(make, 7)


def test_padding_is_never_seen_along_any_axis():
    strategy = STRATEGIES[3]
    rows = [data(1, 2), data(5, 3), data(0, 4)]

    def step(x):
        def loss(x):
            return jnp.sum(jnp.tanh(x)) + ctx().all_reduce("sum", jnp.sum(x**2))

        return x, x @ x.T, jnp.sum(x, axis=0), jax.grad(loss)(x), ctx().all_reduce("sum", jnp.sum(x))

    results = strategy.run(step, args=(with_nan_padding(rows),))
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(results))
    for own, product in zip(rows, results[1].values, strict=True):
        np.testing.assert_allclose(product, own @ own.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(results[4], sum(own.sum() for own in rows), rtol=1e-4)


def test_objects_that_are_not_arrays_come_back_though_each_trace_makes_its_own():
    strategy = STRATEGIES[3]
    x = split(strategy, data(7))

    def step(x):
        return types.SimpleNamespace(a=1), {1, 2}, slice(1, 2), None, float("nan")

    assert repr(strategy.run(step, args=(x,))) == repr(step(x))
    with pytest.raises(mr.UnevenReplicasError, match=r"return \(0\.0,\), the replicas .* return \(-0\.0,\)"):
        strategy.run(lambda x: (0.0 if x.shape[0] == 3 else -0.0,), args=(x,))


# -- what is kept


def test_a_host_array_that_a_step_closes_over_is_in_the_program_once():
    strategy = mr.MirroredStrategy(DEVICES[:3])
    table = np.ones((COLUMNS, 300), np.float32)
    strategy.run(lambda x: x @ table, args=(split(strategy, data(7)),))
    [program] = strategy._steps.programs
    assert [c.shape for c in program.constants].count(table.shape) == 1


def test_effects_happen_once_for_each_replica_and_in_the_order_of_the_step():
    strategy = STRATEGIES[3]
    seen = []

    def step(x):
        total = ctx().all_reduce("sum", jnp.sum(x, axis=0))
        jax.experimental.io_callback(lambda _: seen.append("after"), None, total)
        jax.experimental.io_callback(lambda x: seen.append(len(x)), None, x)
        return jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + total

    out = strategy.run(step, args=(split(strategy, data(7)),))
    jax.effects_barrier()
    np.testing.assert_allclose(strategy.gather(out, axis=0), 2 * data(7) + data(7).sum(axis=0), rtol=1e-4, atol=1e-5)
    assert sorted(map(str, seen)) == ["2", "2", "3", "after", "after", "after"]
    assert seen[0] == "after"


def test_right_guesses_need_one_trace_of_each_shape():
    strategy = mr.MirroredStrategy(DEVICES[:3])
    traces = []

    def step(x):
        traces.append(len(x))
        return mr.losses.compute_average_loss(ctx().all_gather(x, axis=0)), mr.get_strategy().reduce("mean", x, axis=0)

    for _ in range(2):
        for num_rows in (9, 7, 1):
            strategy.run(step, args=(split(strategy, data(num_rows)),))
    assert traces == [3, 3, 2, *(1, 0) * 2]  # one row may be a row or a number of its own
    traces.clear()
    strategy.run(lambda x: [traces.append(len(x)), ctx().all_gather(x, axis=0)][1], args=(split(strategy, data(4)),))
    assert traces == [2, 1]


# -- what is refused says why


def test_a_step_that_is_never_the_same_is_explained():
    strategy = STRATEGIES[3]
    sizes = iter(range(1, 100))

    def step(x):
        return mr.losses.compute_average_loss(jnp.zeros(next(sizes)) + jnp.sum(x))

    with pytest.raises(mr.UnevenReplicasError, match="must do the same every time it is traced"):
        strategy.run(step, args=(split(strategy, data(7)),))


def test_a_reference_on_both_sides_of_a_collective_is_explained_and_one_on_one_side_works():
    strategy = STRATEGIES[3]

    def both(x):
        reference = jax.new_ref(jnp.sum(x, axis=0))
        reference[...] += ctx().all_reduce("sum", reference[...])
        return reference[...]

    def one(x):
        reference = jax.new_ref(ctx().all_reduce("sum", jnp.sum(x, axis=0)))
        reference[...] += x.shape[0]
        return reference[...]

    with pytest.raises(mr.UnevenReplicasError, match=r"uses a jax\.Ref before and after a collective"):
        strategy.run(both, args=(split(strategy, data(7)),))
    values = strategy.local_results(strategy.run(one, args=(split(strategy, data(7)),)))
    np.testing.assert_allclose(values, [data(7).sum(axis=0) + n for n in (3, 2, 2)], rtol=1e-4)


# -- what must not be taken for the same


def constant_in_a_loop(value):
    return lambda w: jax.lax.fori_loop(0, 2, lambda i, t: t * value, w)


def noisy(key):
    return lambda w: w + jax.random.normal(key, (4,))


DIFFERENT = {
    "signs of zero": (lambda w: w * 0.0, lambda w: w * -0.0),
    "not a number": (lambda w: w + np.nan, lambda w: w + np.inf),
    "parameters": (lambda w: jnp.cumsum(w), lambda w: jnp.cumsum(w[::-1])[::-1]),
    "order of operands": (lambda w: w - jnp.sin(w), lambda w: jnp.sin(w) - w),
    "numbers in a loop": (constant_in_a_loop(2.0), constant_in_a_loop(3.0)),
    "host arrays in a loop": (constant_in_a_loop(np.full(4, 2, "f")), constant_in_a_loop(np.full(4, 3, "f"))),
    "device arrays in a loop": (constant_in_a_loop(jnp.full(4, 2.0)), constant_in_a_loop(jnp.full(4, 3.0))),
    "how often a loop runs": (
        lambda w: jax.lax.fori_loop(0, 2, lambda i, t: jnp.sin(t), w),
        lambda w: jax.lax.fori_loop(0, 3, lambda i, t: jnp.sin(t), w),
    ),
    "what a branch returns": (
        lambda w: jax.lax.cond(w[0] > 0, lambda a, b: a, lambda a, b: b, w, -w),
        lambda w: jax.lax.cond(w[0] > 0, lambda a, b: b, lambda a, b: a, w, -w),
    ),
    "branches": (
        lambda w: jax.lax.cond(w[0] > 0, jnp.sin, jnp.cos, w),
        lambda w: jax.lax.cond(w[0] > 0, jnp.cos, jnp.sin, w),
    ),
    "keys": (lambda w: noisy(jax.random.key(0))(w), lambda w: noisy(jax.random.key(1))(w)),
    "key arrays": (noisy(jax.random.key(0)), noisy(jax.random.key(1))),
    "generators": (lambda w: noisy(jax.random.key(0))(w), lambda w: noisy(jax.random.key(0, impl="rbg"))(w)),
    "which argument of a call": (lambda w: jax.jit(lambda a, b: a)(w, -w), lambda w: jax.jit(lambda a, b: b)(w, -w)),
    "which output": (lambda w: jax.lax.top_k(w, 4)[0], lambda w: jax.lax.top_k(w, 4)[1].astype(jnp.float32)),
    "inside a custom derivative": (jax.nn.relu, jax.nn.silu),
}


def test_a_value_that_is_computed_differently_for_other_rows_is_not_mirrored():
    strategy = STRATEGIES[2]
    w = np.array([0.5, -1, 2, 3], np.float32)

    def step(x, w):
        pairs = DIFFERENT.items()
        own = {name: ((first if x.shape[0] == 2 else second)(w), first(w) * 1) for name, (first, second) in pairs}
        is_here = ctx().replica_id_in_sync_group >= 0  # makes one value for each replica, with the same bits
        return {name: (jnp.where(is_here, different, different), same) for name, (different, same) in own.items()}

    for name, (different, same) in strategy.run(step, args=(split(strategy, data(3)), w)).items():
        assert isinstance(same, jax.Array) and isinstance(different, mr.PerReplica), name
        for value, function in zip(different.values, DIFFERENT[name], strict=True):
            np.testing.assert_array_equal(np.signbit(value), np.signbit(function(w)), err_msg=name)
            np.testing.assert_allclose(value, function(w), rtol=1e-6, err_msg=name)
