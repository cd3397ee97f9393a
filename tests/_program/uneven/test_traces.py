"""Results, verbs and collectives of uneven steps have the true rows; a step that makes no sense there is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _program.uneven.rows import STRATEGIES, ctx, data, run, split, total
from strategies import variable

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")


def global_mean(x):
    all_rows, count = ctx().all_reduce("sum", (jnp.sum(x, axis=0), jnp.asarray(x.shape[0], jnp.float32)))
    return all_rows / count


# -- results, verbs and collectives


def test_merge_call_gets_the_true_rows_and_first_replica_aggregation_works():
    x = data(5)
    first = variable(0.0, STRATEGIES[3], aggregation="only_first_replica")

    def merge(strategy, x, total):
        assert x.shapes == ((2, 4), (2, 4), (1, 4)) and total.shapes == ((),) * 3
        return strategy.reduce("mean", x, axis=0), strategy.gather(x, axis=0), strategy.reduce("sum", total)

    def step(x):
        first.assign(jnp.sum(x))
        return ctx().merge_call(merge, args=(x, jnp.sum(x)))

    mean, rows, all_rows = run(STRATEGIES[3], step, x)
    np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(rows, x)
    np.testing.assert_allclose((all_rows, first.value), (x.sum(), x[:2].sum()), rtol=1e-5)


def test_a_jitted_helper_with_collectives_is_cut_like_the_rest():
    @jax.jit
    def normalized(x, scale):
        return (x - global_mean(x)) * scale, scale + 1

    scale = variable(2.0, STRATEGIES[3])

    def step(x):
        out, new = normalized(x, scale.value)
        scale.assign(new)  # mirrored: computed from a mirrored value inside a function that also takes rows
        return out

    x = data(5)
    np.testing.assert_allclose(run(STRATEGIES[3], step, x), (x - x.mean(axis=0)) * 2, rtol=1e-4, atol=1e-6)
    assert float(scale.value) == 3.0


def test_rows_of_two_arguments_may_differ():
    strategy = STRATEGIES[3]
    many = strategy.distribute_values_from_function(lambda ctx: np.ones(ctx.replica_id_in_sync_group, np.float32))
    few = strategy.distribute_values_from_function(lambda ctx: np.ones(2 - ctx.replica_id_in_sync_group, np.float32))
    result = strategy.run(lambda a, b: jnp.outer(a, b), args=(many, few))
    assert result.shapes == ((0, 2), (1, 1), (2, 0))


# -- what is refused


def test_a_value_that_depends_on_a_replicas_own_rows_is_refused_in_uneven_steps_only():
    strategy = STRATEGIES[3]
    v = variable(np.zeros(4, np.float32), strategy, name="v")

    def wrong(x):
        v.assign(total(jnp.sum(x, axis=0)) / x.shape[0])

    strategy.run(wrong, args=(split(strategy, data(6)),))
    before = np.asarray(v.value)
    message = r"variable 'v' is mirrored.*own number of rows, such as x\.shape\[0\].*`x` has shapes \(3, 4\), \(2, 4\)"
    with pytest.raises(mr.ReplicasDivergeError, match=message):
        strategy.run(wrong, args=(split(strategy, data(7)),))
    with pytest.raises(mr.ReplicasDivergeError, match=r"variable 'v' is mirrored.*own number of rows"):
        assign = lambda x: mr.cond(jnp.asarray(x.shape[0]) > 2, lambda: v.assign(jnp.zeros(4)), lambda: None)  # noqa: E731
        strategy.run(assign, args=(split(strategy, data(7)),))
    np.testing.assert_array_equal(v.value, before)
    strategy.run(lambda x: v.assign(global_mean(x)), args=(split(strategy, data(7)),))
    np.testing.assert_allclose(v.value, data(7).mean(axis=0), rtol=1e-5)


def other_order(x):
    way = slice(None, None, 1 if x.shape[0] > 2 else -1)
    return [do() for do in [lambda: total(jnp.sum(x)), lambda: ctx().all_gather(jnp.ones(2), axis=0).sum()][way]]


REFUSED = {
    "the rows themselves are summed": (
        lambda x: total(x),
        r"whose `x` has shape \(3, 4\) reach `psum` of float32\[3, 4\] at .*py:\d+.*\(2, 4\) reach `psum` of float32\[2, 4\]",
    ),
    "a collective more": (
        lambda x: total(jnp.sum(x)) if x.shape[0] > 2 else jnp.sum(x),
        r"reach `psum` of float32\[\] at .*py:\d+, the replicas .* reach no further one",
    ),
    "another order": (other_order, r"reach `psum` of .*, the replicas .* reach `all_gather` of"),
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
        lambda x: mr.losses.compute_average_loss(x[:, 0]) if x.shape[0] > 2 else jnp.sum(x),
        r"has shape \(2, 4\) reach 0 operations that depend on all replicas' sizes .* reach 1",
    ),
}


def test_steps_that_uneven_replicas_cannot_take_together_are_refused():
    strategy = STRATEGIES[3]
    for step, message in REFUSED.values():
        strategy.run(step, args=(split(strategy, data(9)),))  # right with equal rows
        with pytest.raises(mr.UnevenReplicasError, match=message):
            strategy.run(step, args=(split(strategy, data(7)),))


@pytest.mark.parametrize("num_rows", [8, 2])
def test_types_of_results_depend_neither_on_the_batch_nor_on_the_number_of_replicas(num_rows):
    def step(x):
        one_each = jnp.asarray(x.shape[0]) + 0 * ctx().replica_id_in_sync_group
        return {
            "all": total(x.shape[0]),
            "each": one_each,
            "rows": x,
            "sum": jnp.sum(x),
            "same": jnp.ones(2),
            "constant": np.ones(2),
        }

    for strategy in (STRATEGIES[1], STRATEGIES[3]):
        results = strategy.run(step, args=(split(strategy, data(num_rows)),))
        own = {name: results.pop(name) for name in ("each", "rows", "sum")}
        assert all(
            [value.devices() for value in result.values] == [{device} for device in strategy.devices] for result in own.values()
        )
        assert sorted(results) == ["all", "constant", "same"]
        for result in results.values():
            assert isinstance(result, jax.Array) and result.is_fully_replicated and result.devices() == set(strategy.devices)
        assert int(results["all"]) == int(strategy.reduce("sum", own["each"])) == num_rows


def test_errors_are_what_they_are_and_only_one_that_another_number_of_rows_does_not_have_is_about_rows():
    strategy, x = STRATEGIES[3], split(STRATEGIES[3], data(7))
    v = variable(0.0, strategy, name="v")
    with pytest.raises(mr.ReplicasDivergeError, match=r"depends on the argument `x`, of which each replica has its own"):
        strategy.run(lambda x: v.assign(jnp.sum(x)), args=(x,))
    with pytest.raises(mr.OneProgramError, match="needed the value of something that differs by replica"):
        strategy.run(lambda x: x if ctx().replica_id_in_sync_group == 0 else -x, args=(x,))
    for is_about_rows, step in {True: lambda x: x.reshape(3, 4), False: lambda x: x @ jnp.ones(5)}.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            strategy.run(step, args=(x,))
        assert ("does not divide evenly" in "".join(caught.value.__notes__)) is is_about_rows
