"""Uneven steps: the numbers of one device for any number of rows, and a clear no where there is no sensible answer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import slow

import mirrored as mr

STRATEGIES = {r: mr.MirroredStrategy([f"cpu:{i}" for i in range(r)]) for r in (1, 3, 4)}


def split(strategy, rows):
    """Divide rows by the split rule: the first replicas get one more."""
    parts = np.array_split(rows, strategy.num_replicas_in_sync)
    return strategy.distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group])


def data(num_rows, num_columns=4):
    rng = np.random.default_rng(num_rows)
    x = rng.normal(size=(num_rows, num_columns)).astype(np.float32)
    return x, np.sin(x.sum(axis=1))


class Model:
    """A layer normalized over the global batch, as in synchronized batch normalization, with running statistics."""

    def __init__(self, strategy):
        with strategy.scope():
            self.w = mr.Variable(np.linspace(-1, 1, 4, dtype=np.float32), name="w")
            self.b = mr.Variable(np.float32(0.5), name="b")
            self.running = mr.Variable(np.zeros(4, np.float32), name="running")
            self.rows_seen = mr.Variable(0, name="rows_seen")
            self.optimizer = mr.Optimizer(optax.adam(0.1), [self.w, self.b])

    def step(self, x, y):
        ctx = mr.get_replica_context()

        def loss():
            mean = global_mean(ctx, x)
            variance = global_mean(ctx, (x - mean) ** 2)
            self.running.assign(0.9 * self.running + 0.1 * mean)
            hidden = jnp.tanh((x - mean) * jax.lax.rsqrt(variance + 1e-3) * self.w)
            return mr.losses.compute_average_loss((hidden.sum(axis=1) + self.b - y) ** 2)

        value, gradients = mr.value_and_grad(loss, [self.w, self.b])()
        self.optimizer.apply_gradients(zip(gradients, [self.w, self.b], strict=True))
        self.rows_seen.assign_add(ctx.all_reduce("sum", x.shape[0]))
        return value

    def values(self):
        return [np.asarray(v.value) for v in (self.w, self.b, self.running, self.rows_seen)]


def global_mean(ctx, x):
    total, rows = ctx.all_reduce("sum", (jnp.sum(x, axis=0), jnp.asarray(x.shape[0], jnp.float32)))
    return total / rows


def trained(strategy, x, y, num_steps=2):
    model = Model(strategy)
    for _ in range(num_steps):
        loss = strategy.run(model.step, args=(split(strategy, x), split(strategy, y)))
    strategy.assert_mirrored()
    return [*model.values(), np.asarray(strategy.reduce("sum", loss))]


@pytest.mark.parametrize("num_rows", [2, *slow(7)])
def test_training_on_any_number_of_rows_equals_one_device(num_rows):
    x, y = data(num_rows)
    one = trained(STRATEGIES[1], x, y)
    many = trained(STRATEGIES[3], x, y)
    for a, b in zip(one, many, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


# -- results, verbs and collectives


def test_results_have_the_true_rows_and_verbs_count_them():
    strategy = STRATEGIES[4]
    x, _ = data(6)
    result = strategy.run(lambda x: {"double": 2 * x, "same": x, "total": jnp.sum(x)}, args=(split(strategy, x),))
    assert result["double"].shapes == ((2, 4), (2, 4), (1, 4), (1, 4))
    assert result["total"].shapes == ((),) * 4
    np.testing.assert_array_equal(strategy.gather(result["double"], axis=0), 2 * x)
    np.testing.assert_allclose(strategy.reduce("mean", result["same"], axis=0), x.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(strategy.reduce("sum", result["total"]), x.sum(), rtol=1e-6)


def test_results_are_inputs_of_the_next_step():
    strategy = STRATEGIES[3]
    x, _ = data(4)
    half = strategy.run(lambda x: x[:, :2], args=(split(strategy, x),))
    again = strategy.run(lambda x, h: (x[:, :2] - h).sum(), args=(split(strategy, x), half))
    assert [float(v) for v in strategy.local_results(again)] == [0.0, 0.0, 0.0]


def test_collectives_count_and_join_the_rows_of_all_replicas_and_gradients_pass_through():
    strategy, x = STRATEGIES[3], data(7)[0]

    def step(x):
        ctx = mr.get_replica_context()

        def loss(x):
            others = ctx.all_gather(x, axis=0)
            assert others.shape[0] == 7
            return jnp.sum(jnp.tanh(x @ others.T)) / 49

        own_keys = jax.random.split(ctx.rng(0), x.shape[0])
        joined = ctx.all_gather(x, axis=0), ctx.all_gather(x.T, axis=1).T, ctx.all_gather(x.repeat(3, axis=0), axis=0)[::3]
        mean, keys = mr.get_strategy().reduce("mean", x, axis=0), ctx.all_gather(own_keys, axis=0)
        return joined, jax.grad(loss)(x), mean, mr.losses.compute_average_loss(x), keys.shape[0]

    joined, gradient, mean, loss, num_keys = strategy.run(step, args=(split(strategy, x),))
    assert num_keys == 7
    np.testing.assert_array_equal(joined, [x, x, x])
    np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(strategy.reduce("sum", loss), x.sum() / 7, rtol=1e-5)
    expected = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x.T)) / 49)(x)
    np.testing.assert_allclose(strategy.gather(gradient, axis=0), expected, rtol=1e-4, atol=1e-6)


def test_random_keys_on_read_variables_and_dropout_masks_cross_the_collectives():
    """Each is the same program for all replicas, or is carried from one part of it to the next."""
    strategy, x = STRATEGIES[3], data(7)[0]
    with strategy.scope():
        count = mr.Variable(0, synchronization="on_read", aggregation="sum")
        key = mr.Variable(jax.random.key(0))

    def step(x):
        ctx = mr.get_replica_context()
        own, new = jax.random.split(key.value)
        key.assign(new)
        keys = jax.random.split(ctx.rng(own), x.shape[0])  # of a shape that differs, used after the collective
        mask = jax.random.bernoulli(ctx.rng(own), 0.5, x.shape)
        mean = global_mean(ctx, x)
        count.assign_add(x.shape[0])
        noise = (jax.random.key_data(keys)[:, :1] % 100).astype("float32")
        return jnp.where(mask, x - mean, 0.0) + noise, noise, mask

    out, noise, mask = (strategy.gather(r, axis=0) for r in strategy.run(step, args=(split(strategy, x),)))
    assert len(np.unique(noise)) > 4
    np.testing.assert_allclose(out, np.where(mask, x - x.mean(axis=0), 0) + noise, rtol=1e-4, atol=1e-5)
    assert int(count.value) == 7
    strategy.assert_mirrored()


def test_merge_call_gets_the_true_rows_and_first_replica_aggregation_works():
    strategy, x = STRATEGIES[3], data(5)[0]
    with strategy.scope():
        first = mr.Variable(0.0, aggregation="only_first_replica")

    def merge(strategy, x, total):
        assert x.shapes == ((2, 4), (2, 4), (1, 4)) and total.shapes == ((),) * 3
        return strategy.reduce("mean", x, axis=0), strategy.gather(x, axis=0), strategy.reduce("sum", total)

    def step(x):
        first.assign(jnp.sum(x))
        return mr.get_replica_context().merge_call(merge, args=(x, jnp.sum(x)))

    mean, rows, total = strategy.run(step, args=(split(strategy, x),))
    np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(rows, x)
    np.testing.assert_allclose((total, first.value), (x.sum(), x[:2].sum()), rtol=1e-5)


def test_a_collective_in_a_loop_that_does_not_depend_on_the_rows_is_shared():
    strategy, x = STRATEGIES[3], data(5)[0]

    def step(x):
        ctx, total = mr.get_replica_context(), jnp.sum(x, axis=0)
        return jax.lax.fori_loop(0, 3, lambda i, t: ctx.all_reduce("sum", t) / 3, total)

    for value in strategy.local_results(strategy.run(step, args=(split(strategy, x),))):
        np.testing.assert_allclose(value, x.sum(axis=0) / 3, rtol=1e-5)


def test_a_jitted_helper_with_collectives_is_cut_like_the_rest():
    strategy, x = STRATEGIES[3], data(5)[0]

    @jax.jit
    def normalized(x, scale):
        return (x - global_mean(mr.get_replica_context(), x)) * scale, scale + 1

    with strategy.scope():
        scale = mr.Variable(2.0)

    def step(x):
        out, new = normalized(x, scale.value)
        scale.assign(new)  # mirrored: computed from a mirrored value inside a function that also takes rows
        return out

    out = strategy.run(step, args=(split(strategy, x),))
    np.testing.assert_allclose(strategy.gather(out, axis=0), (x - x.mean(axis=0)) * 2, rtol=1e-4, atol=1e-6)
    assert float(scale.value) == 3.0


def test_any_sizes_on_any_replicas_work_also_in_mr_function():
    strategy = STRATEGIES[4]
    average = lambda x: strategy.reduce("sum", strategy.run(mr.losses.compute_average_loss, args=(x,)))  # noqa: E731
    for sizes in ((5, 3, 0, 0), (0, 0, 1, 4), (1, 2, 3, 4)):
        rows = [np.full((n, 2), i + 1.0, np.float32) for i, n in enumerate(sizes)]
        x = strategy.distribute_values_from_function(lambda ctx, rows=rows: rows[ctx.replica_id_in_sync_group])
        for compiled in (average, mr.function(average)):
            np.testing.assert_allclose(compiled(x), np.concatenate(rows).sum() / sum(sizes), rtol=1e-6)


def test_rows_of_two_arguments_may_differ():
    strategy = STRATEGIES[3]
    many = strategy.distribute_values_from_function(lambda ctx: np.ones(ctx.replica_id_in_sync_group, np.float32))
    few = strategy.distribute_values_from_function(lambda ctx: np.ones(2 - ctx.replica_id_in_sync_group, np.float32))
    result = strategy.run(lambda a, b: jnp.outer(a, b), args=(many, few))
    assert result.shapes == ((0, 2), (1, 1), (2, 0))


# -- what is refused


def test_a_value_that_depends_on_a_replicas_own_rows_is_refused_in_uneven_steps_only():
    strategy = STRATEGIES[3]
    with strategy.scope():
        v = mr.Variable(np.zeros(4, np.float32), name="v")

    def wrong(x):
        v.assign(mr.get_replica_context().all_reduce("sum", jnp.sum(x, axis=0)) / x.shape[0])

    strategy.run(wrong, args=(split(strategy, data(6)[0]),))
    before = np.asarray(v.value)
    message = r"variable 'v' is mirrored.*own number of rows, such as x\.shape\[0\].*`x` has shapes \(3, 4\), \(2, 4\)"
    with pytest.raises(mr.ReplicasDivergeError, match=message):
        strategy.run(wrong, args=(split(strategy, data(7)[0]),))
    np.testing.assert_array_equal(v.value, before)

    def right(x):
        total, rows = mr.get_replica_context().all_reduce("sum", (jnp.sum(x, axis=0), x.shape[0]))
        v.assign(total / rows)

    strategy.run(right, args=(split(strategy, data(7)[0]),))
    np.testing.assert_allclose(v.value, data(7)[0].mean(axis=0), rtol=1e-5)


def only_many(x):
    return mr.get_replica_context().all_reduce("sum", jnp.sum(x)) if x.shape[0] > 2 else jnp.sum(x)


def other_order(x):
    ctx = mr.get_replica_context()
    a, b = ("sum", "first") if x.shape[0] > 2 else ("first", "sum")
    return [ctx.all_reduce("sum", jnp.sum(x)) if way == "sum" else ctx.all_gather(jnp.ones(2), axis=0).sum() for way in (a, b)]


def loop_over_rows(x):
    ctx = mr.get_replica_context()
    return jax.lax.scan(lambda c, row: (ctx.all_reduce("sum", c + row), None), jnp.zeros(4), x)[0]


REFUSED = {
    "the rows themselves are summed": (
        lambda x: mr.get_replica_context().all_reduce("sum", x),
        r"whose `x` has shape \(3, 4\) reach `psum` of float32\[3, 4\] at .*py:\d+.*\(2, 4\) reach `psum` of float32\[2, 4\]",
    ),
    "a collective more": (
        only_many,
        r"reach `psum` of float32\[\] at .*py:\d+, the replicas .* reach no further one",
    ),
    "another order": (other_order, r"reach `psum` of .*, the replicas .* reach `all_gather` of"),
    "a loop over the rows": (loop_over_rows, r"reach a collective inside `scan` of .*drop_remainder=True"),
    "another structure": (
        lambda x: {"a": 1} if x.shape[0] > 2 else {"b": 1},
        r"return \{'a': 1\}, the replicas .* return \{'b': 1\}.*ctx.all_reduce\('sum', x.shape\[0\]\)",
    ),
    "a number": (lambda x: x.shape[0], r"return 3, the replicas .* return 2"),
    "a number as an array": (
        lambda x: {"n": jnp.float32(x.shape[0])},
        r"the result\['n'\] of the step .*`x` has shapes \(3, 4\), \(2, 4\).*one array of a batch that divides",
    ),
    "a sum divided by the own rows": (
        lambda x: jax.lax.psum(jnp.sum(x), "replica") / x.shape[0],
        r"the result of the step depends on a replica's own number of rows.* is ctx\.all_reduce\('sum', x\.shape\[0\]\)",
    ),
    "a mask": (lambda x: (x, jnp.ones(x.shape[0])), r"the result\[1\] of .*value \+ 0 \* ctx\.replica_id_in_sync_group"),
    "another rank": (lambda x: x if x.shape[0] > 2 else x[0], r"another rank or dtype .* float32\[3, 4\], .* float32\[4\]"),
    "other questions": (
        lambda x: mr.losses.compute_average_loss(x) if x.shape[0] > 2 else jnp.sum(x),
        r"has shape \(2, 4\) reach 0 operations that depend on all replicas' sizes .* reach 1",
    ),
}


def test_steps_that_uneven_replicas_cannot_take_together_are_refused():
    strategy = STRATEGIES[3]
    for step, message in REFUSED.values():
        strategy.run(step, args=(split(strategy, data(9)[0]),))  # right with equal rows
        with pytest.raises(mr.UnevenReplicasError, match=message):
            strategy.run(step, args=(split(strategy, data(7)[0]),))


@pytest.mark.parametrize("num_rows", [8, 7, 2])
def test_types_of_results_depend_neither_on_the_batch_nor_on_the_number_of_replicas(num_rows):
    def step(x):
        ctx = mr.get_replica_context()
        one_each = jnp.asarray(x.shape[0]) + 0 * ctx.replica_id_in_sync_group
        return {"all": ctx.all_reduce("sum", x.shape[0]), "each": one_each, "rows": x, "sum": jnp.sum(x), "same": jnp.ones(2)}

    for strategy in STRATEGIES.values():
        results = strategy.run(step, args=(split(strategy, data(num_rows)[0]),))
        assert [name for name, value in sorted(results.items()) if isinstance(value, mr.PerReplica)] == ["each", "rows", "sum"]
        assert int(results["all"]) == int(strategy.reduce("sum", results["each"])) == num_rows


def test_an_error_in_the_step_says_which_replicas_it_is_about():
    strategy = STRATEGIES[3]
    with pytest.raises(ValueError, match="zero-size") as error:
        strategy.run(lambda x: jnp.max(x), args=(split(strategy, data(2)[0]),))
    assert "Replica 2 has no rows of this batch: `x` has shape (0, 4) there" in "".join(error.value.__notes__)


def test_other_errors_of_steps_are_what_they_are():
    strategy, x = STRATEGIES[3], split(STRATEGIES[3], data(7)[0])
    with strategy.scope():
        v = mr.Variable(0.0, name="v")
    with pytest.raises(mr.ReplicasDivergeError, match=r"depends on the argument `x`, of which each replica has its own"):
        strategy.run(lambda x: v.assign(jnp.sum(x)), args=(x,))
    with pytest.raises(mr.OneProgramError, match="needed the value of something that differs by replica"):
        strategy.run(lambda x: x if mr.get_replica_context().replica_id_in_sync_group == 0 else -x, args=(x,))


# -- operations on rows that follow one another: one device is the oracle

ROWWISE = [
    lambda ctx, x, w: jnp.tanh(x),
    lambda ctx, x, w: x - global_mean(ctx, x),
    lambda ctx, x, w: x * jax.lax.rsqrt(global_mean(ctx, x * x) + 0.1),
    lambda ctx, x, w: jax.nn.softmax(x @ ctx.all_gather(x, axis=0).T) @ ctx.all_gather(x, axis=0),
    lambda ctx, x, w: jax.checkpoint(lambda x: jnp.tanh(x @ w))(jax.nn.relu(x)),
]


@pytest.mark.slow
def test_gradients_through_operations_of_all_kinds_equal_one_device():
    def run(strategy):
        with strategy.scope():
            w, seen = mr.Variable(0.3 * np.eye(4, dtype=np.float32) + 0.1), mr.Variable(np.zeros(4, np.float32))
            optimizer = mr.Optimizer(optax.sgd(0.5), [w])

        def step(x):
            ctx = mr.get_replica_context()

            def loss():
                h = x @ w.value
                for operation in ROWWISE:
                    h = operation(ctx, h, w.value)
                return mr.losses.compute_average_loss(h * h), h

            (value, h), [gradient] = mr.value_and_grad(loss, [w], has_aux=True)()
            seen.assign(global_mean(ctx, h))
            optimizer.apply_gradients([(gradient, w)])
            return value, h

        value, h = strategy.run(step, args=(split(strategy, data(7)[0]),))
        strategy.assert_mirrored()
        return [w.value, seen.value, strategy.reduce("sum", value), strategy.gather(h, axis=0)]

    for many, one in zip(run(STRATEGIES[3]), run(STRATEGIES[1]), strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-3, atol=1e-4)


def test_only_an_error_that_another_number_of_rows_does_not_have_is_said_to_be_about_rows(strategy3: mr.Strategy) -> None:
    [batch] = strategy3.distribute_dataset([np.ones((7, 2), np.float32)])
    wrong = {True: lambda x: x.reshape(3, 2), False: lambda x: x @ jnp.ones(5)}
    for is_about_rows, step in wrong.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            strategy3.run(step, args=(batch,))
        assert ("does not divide evenly" in "".join(caught.value.__notes__)) is is_about_rows
