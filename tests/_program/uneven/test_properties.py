"""Uneven steps under attack: right programs that once failed, what is kept, and what must not be taken for the same."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _program.uneven.rows import COLUMNS, DEVICES, STRATEGIES, assert_equals_one_device, ctx, data, run, split, with_nan_padding
from random_programs import lockstep

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

# -- right programs: one device is the oracle


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
        return jnp.sum(ctx().all_gather(jnp.sum(rows, axis=1), axis=0))

    return loss(x), loss(ctx().all_gather(x, axis=0)[:2]) / ctx().num_replicas_in_sync


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


def many_dtypes(x):
    """Each is carried over a collective, padded, and returned."""
    values = (x > 0, (9 * x).astype(jnp.int8), x + 1j * x, x.astype(jnp.bfloat16), x.astype(jnp.float16), x[:, :0], x[:0])
    keys = jax.vmap(jax.random.key)((99 * jnp.abs(x[:, 0])).astype(int))
    total = ctx().all_reduce("sum", jnp.sum(x))
    after = [value * (total > -1e6) for value in values]
    after += [jax.vmap(jax.random.uniform)(keys) * (total > -1e6), jax.random.key_data(ctx().all_gather(keys, axis=0))]
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
    gathered_again_and_again: 7,
    helper_with_questions: 7,
    custom_derivatives: 2,
    many_dtypes: 7,
    row_operations: 2,
}


@pytest.mark.parametrize("num_rows", [2, 7])
def test_right_steps_equal_one_device(num_rows):
    steps = [step for step, rows in RIGHT.items() if rows == num_rows]
    all_of_them = lambda x: {step.__name__: step(x) for step in steps}  # noqa: E731
    assert_equals_one_device(lambda strategy: run(strategy, all_of_them, data(num_rows)))


def test_gradients_through_run_are_those_of_one_device():
    def outcome(strategy):

        def loss(w, x):
            def step(x, w):
                return jnp.sum(jnp.tanh((x - ctx().all_reduce("sum", jnp.sum(x * w, axis=0))) @ w))

            return strategy.reduce("sum", strategy.run(step, args=(x, w)))

        return lockstep.jit(jax.grad(loss))(np.full(COLUMNS, 0.1, np.float32), split(strategy, data(7)))

    assert_equals_one_device(outcome)


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


def test_a_program_has_one_switch_for_each_stage_a_host_array_once_and_nothing_that_nobody_needs():
    strategy = mr.MirroredStrategy(DEVICES[:3])
    table = np.ones((COLUMNS, 300), np.float32)

    def step(x):
        jnp.sin(x)
        first, second = ctx().all_reduce("sum", jnp.sum(x @ table)), jax.lax.pmax(jnp.max(x, initial=0), "replica")
        return ctx().all_reduce("sum", jnp.sum(x * first * second))

    strategy.run(step, args=(split(strategy, data(7)),))
    [program] = strategy._steps.programs
    assert [c.shape for c in program.constants].count(table.shape) == 1
    text = str(program.lifted.closed.jaxpr)
    assert text.count("cond[") == 2 and " dot_general[" in text and " sin " not in text  # before and after the first two


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


def made_at_once(seed):
    def add(w):
        with jax.ensure_compile_time_eval():  # each trace makes its own arrays
            made, key = seed * jnp.arange(4.0), jax.random.fold_in(jax.random.key(0), seed)
        return w + made + jax.random.normal(key, (4,))

    return add


def noisy(key):
    return lambda w: w + jax.random.normal(key, (4,))


DIFFERENT = {
    "signs of zero": (lambda w: w * 0.0, lambda w: w * -0.0),
    "parameters": (lambda w: jnp.cumsum(w), lambda w: jnp.cumsum(w[::-1])[::-1]),
    "order of operands": (lambda w: w - jnp.sin(w), lambda w: jnp.sin(w) - w),
    "host arrays": (lambda w: w + np.arange(4, dtype="f") * 2, lambda w: w + np.arange(4, dtype="f") * 3),
    "arrays of each trace": (made_at_once(2), made_at_once(3)),
    "host arrays in a loop": (constant_in_a_loop(np.full(4, 2, "f")), constant_in_a_loop(np.full(4, 3, "f"))),
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
    "key arrays": (noisy(jax.random.key(0)), noisy(jax.random.key(1))),
    "generators": (lambda w: noisy(jax.random.key(0))(w), lambda w: noisy(jax.random.key(0, impl="rbg"))(w)),
    "which output": (lambda w: jax.lax.top_k(w, 4)[0], lambda w: jax.lax.top_k(w, 4)[1].astype(jnp.float32)),
    "inside a custom derivative": (jax.nn.relu, jax.nn.silu),
}


def test_a_value_that_is_computed_differently_for_other_rows_is_not_mirrored():
    strategy = STRATEGIES[2]
    w = np.array([0.5, -1, 2, 3], np.float32)

    def step(x, w):
        pairs = DIFFERENT.items()
        in_order = slice(None, None, 1 if x.shape[0] == 2 else -1)  # what is computed first is no difference
        same = {name: first(w) * 1 for name, (first, _) in list(pairs)[in_order]}
        own = {name: ((first if x.shape[0] == 2 else second)(w), same[name]) for name, (first, second) in pairs}
        is_here = ctx().replica_id_in_sync_group >= 0  # makes one value for each replica, with the same bits
        return {name: (jnp.where(is_here, different, different), same) for name, (different, same) in own.items()}

    for name, (different, same) in strategy.run(step, args=(split(strategy, data(3)), w)).items():
        assert isinstance(same, jax.Array) and isinstance(different, mr.PerReplica), name
        for value, function in zip(different.values, DIFFERENT[name], strict=True):
            expected = lockstep.jit(function)(w)
            np.testing.assert_array_equal(np.signbit(value), np.signbit(expected), err_msg=name)
            np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=name)


def test_right_guesses_need_one_trace_of_each_shape():
    strategy = mr.MirroredStrategy(DEVICES[:3])
    traces = []

    def step(x):
        traces.append(len(x))
        return mr.losses.compute_average_loss(ctx().all_gather(x, axis=0).sum(1)), mr.get_strategy().reduce("mean", x, axis=0)

    for _ in range(2):
        for num_rows in (9, 7, 1):
            strategy.run(step, args=(split(strategy, data(num_rows)),))
    assert traces == [3, 3, 2, *(1, 0) * 2]  # one row may be a row or a number of its own
    traces.clear()
    strategy.run(lambda x: [traces.append(len(x)), ctx().all_gather(x, axis=0)][1], args=(split(strategy, data(4)),))
    assert traces == [2, 1]
