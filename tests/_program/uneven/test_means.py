"""A mean over the replicas weighs each by its rows, whatever it is the mean of; gradients that come back through one add up."""

import functools
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _program.uneven.rows import STRATEGIES, assert_equals_one_device, run, split, total
from parameters import nightly
from strategies import ctx, in_threads, strategy_of, variable

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

#: A module of a user's that has imported names from `jax.lax`.
OTHER = sys.modules["other_module"] = types.ModuleType("other_module")
exec("from jax.lax import pmean, psum, pmean as plain_mean", vars(OTHER))
exec("mean = lambda x: pmean(x, 'replica')\ntotal = lambda *args: psum(*args)", vars(OTHER))
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(10, 3)).astype(np.float32)
PARAMS = {"a": RNG.normal(size=(3, 4)).astype(np.float32), "b": RNG.normal(size=(4, 4)).astype(np.float32)}


def mean(value, **options):
    return ctx().all_reduce("mean", value, **options)


def pmean(value, axes="replica"):
    return jax.lax.pmean(value, axes)


OF_ANYTHING = {
    "a mean": jnp.mean,
    "of a comparison": lambda x: jnp.mean(x > 0),
    "with a penalty": lambda x: 2 * jnp.sum(x**2) / x.shape[0] + jnp.sum(jnp.ones(3) ** 2),
    "a sum": jnp.sum,
    "a replica's number": lambda x: ctx().replica_id_in_sync_group + 0 * jnp.sum(x),
    "a largest value": lambda x: jnp.max(x, initial=0),
    "a mean of chosen rows": lambda x: jnp.mean(x, where=x > 0),
    "a gradient": lambda x: jax.grad(lambda w: jnp.mean((x * w - 1) ** 2))(1.0),
    "for some rows only": lambda x: jnp.mean(x) if x.shape[0] > 3 else jnp.float32(0),
    "a carried mean": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c + jnp.mean(x), 0.0),
}


def test_whatever_it_is_each_replica_weighs_as_much_as_it_has_rows():
    """Three replicas with 4, 3 and 3 rows; and all alike with `by_rows=False`."""

    def step(x):
        nothing = 0.0 * ctx().replica_id_in_sync_group  # makes one value for each replica of a number of rows
        own = {name: function(x) + nothing for name, function in OF_ANYTHING.items()}
        some = {name: own[name] for name in ("a mean", "a sum")}
        ways = mean(own), mean(some, by_rows=True), pmean(some), OTHER.mean(some), mr.get_strategy().reduce("mean", some)
        return own, ways, mean(some, by_rows=False), mean((x + 1j * x).mean())

    x = np.arange(10.0) - 3
    own, ways, plain, of_complex = STRATEGIES[3].run(step, args=(split(STRATEGIES[3], x),))
    for name in OF_ANYTHING:
        values = [float(value) for value in own[name].values]
        for weighed in (way[name] for way in ways if name in way):
            np.testing.assert_allclose(weighed, np.average(values, weights=[4, 3, 3]), rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(plain.get(name, np.mean(values)), np.mean(values), rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(of_complex, x.mean() * (1 + 1j), rtol=1e-6)


def test_a_mean_under_another_name_than_jaxs_is_jaxs_plain_one():
    """As docs/concepts/uneven-batches.md says: what a name stands for is not guessed."""
    x = split(STRATEGIES[2], [0, 1, 2])
    assert float(STRATEGIES[2].run(lambda x: OTHER.plain_mean(x.mean(), "replica"), args=(x,))) == np.mean([0.5, 2.0])


def test_a_replica_without_rows_has_no_part_in_a_mean():
    strategy = STRATEGIES[3]
    result, plain = strategy.run(lambda x: (mean(1 / jnp.sum(x)), mean(x.size, by_rows=False)), args=(split(strategy, [1, 3]),))
    np.testing.assert_allclose((result, plain), ((1 + 1 / 3) / 2, 2 / 3), rtol=1e-6)


# -- gradients: the weights are in the loss, or come at the end


def flax(x):
    both = pmean(jnp.stack([x.mean(0), (x * x).mean(0)]))
    return (x - both[0]) * jax.lax.rsqrt(both[1] - both[0] ** 2 + 0.1)


def own_sums(x, psum=None):
    sums = (psum or jax.lax.psum)(jnp.concatenate([x.sum(0), (x * x).sum(0), jnp.ones(1) * x.shape[0]]), "replica")
    center = sums[:4] / sums[8]
    return (x - center) * jax.lax.rsqrt(sums[4:8] / sums[8] - center**2 + 0.1)


def equinox(x):
    def of_row(row):
        center = pmean(row, ("row", "replica"))
        return (row - center) * jax.lax.rsqrt(pmean((row - center) ** 2, ("row", "replica")) + 0.1)

    return jax.vmap(of_row, axis_name="row")(x)


def net(normalize, params, x):
    return jnp.tanh(normalize(x @ params["a"])) @ params["b"]


def scanned(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(flax(x) @ w), None), x @ params["a"], jnp.stack([params["b"]] * 2))[0]


NETS = {
    "without collectives": lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"],
    "plain": lambda p, x: net(flax, p, x),
    "sums": lambda p, x: net(own_sums, p, x),
    "sums by an imported name": lambda p, x: net(lambda x: own_sums(x, OTHER.total), p, x),
    "under vmap": lambda p, x: net(equinox, p, x),
    "checkpointed": lambda p, x: jax.checkpoint(lambda p, x: net(flax, p, x))(p, x),
    "scanned": scanned,
    "gathered": lambda p, x: x @ p["a"] + jnp.sum(ctx().all_gather(p["b"], axis=0), axis=0),
}


def losses(name, params, x):
    return jnp.sum(NETS[name](params, x)[:, :2] ** 3, axis=-1)


def gradient_of(name, loss):
    return jax.grad(lambda p, x: loss(losses(name, p, x)))


SOME = ["plain", "under vmap", "checkpointed", "scanned"]
ALL = [name for name in NETS if name != "gathered"]  # which depends on the number of replicas


@pytest.mark.parametrize(("names", "num_rows"), [(SOME, 2), *nightly((ALL, 10))])
def test_losses_that_have_their_weights_have_the_gradients_of_one_device(names, num_rows):
    averages = {name: gradient_of(name, mr.losses.compute_average_loss) for name in names}
    gradients = lambda x: total({name: average(PARAMS, x) for name, average in averages.items()})  # noqa: E731
    assert_equals_one_device(lambda strategy: run(strategy, gradients, ROWS[:num_rows]))


def test_a_mean_of_gradients_is_that_of_one_device_or_is_refused_where_they_came_back_through_a_collective():
    def mean_of(name):
        own = gradient_of(name, jnp.mean)
        return lambda x: mean(own(PARAMS, x))

    steps = {name: mean_of(name) for name in NETS}
    right = steps.pop("without collectives")
    assert_equals_one_device(lambda strategy: run(strategy, right, ROWS))
    run(strategy_of(2), steps["plain"], ROWS)  # exact where all have as many rows
    message = r"the mean over the replicas at .*test_means\.py:\d+ is of gradients that have come back .* at \S+:\d+"
    for name, step in steps.items():
        with pytest.raises(
            mr.UnevenReplicasError, match=message + r".*compute_average_loss\(per_example_loss\).*all_reduce\('sum'"
        ):
            run(STRATEGIES[3], step, ROWS), pytest.fail(name)


def test_gradients_of_gradients_and_parts_of_them_are_refused_too():
    own = gradient_of("plain", jnp.mean)

    def of_a_gradient(p, x):
        inner = lambda p: jax.grad(lambda x: jnp.mean(net(flax, p, x)))(x)  # noqa: E731
        return mean(jax.grad(lambda p: jnp.sum(inner(p) ** 2))(p))

    wrong = {
        "of a gradient": of_a_gradient,
        "a norm": lambda p, x: mean(optax.tree.norm(own(p, x))),
        "in a loop": lambda p, x: jax.lax.fori_loop(0, 2, lambda i, a: mean(own({**p, "a": a}, x)["a"]), p["a"]),
    }
    for name, step in wrong.items():
        with pytest.raises(mr.UnevenReplicasError, match="have come back through a collective"):
            print(name, STRATEGIES[2].run(step, args=(PARAMS, split(STRATEGIES[2], ROWS[:7]))))


# -- the rows of a replica, and the names in `jax.lax`


def test_arguments_that_divide_differently_have_no_one_weight():
    strategy = STRATEGIES[2]
    arguments = split(strategy, np.ones(3)), split(strategy, np.ones(7))
    message = r"the arguments divide differently among the replicas: \(2, 1\), \(4, 3\) rows.*by_rows=False"
    with pytest.raises(mr.UnevenReplicasError, match=message):
        strategy.run(lambda x, y: mean(x.mean()), args=arguments)
    assert float(strategy.run(lambda x, y: mean(float(y.shape[0]), by_rows=False), args=arguments)) == 3.5
    twice = strategy.distribute_values_from_function(lambda ctx: np.ones(4 - 2 * ctx.replica_id_in_sync_group))
    pairs = arguments[0], twice
    assert float(strategy.run(lambda x, y: mean(float(x.shape[0])), args=pairs)) == pytest.approx(5 / 3)


def test_a_batch_that_divides_beside_one_that_does_not_has_another_weight_and_other_values_have_none():
    strategy = STRATEGIES[3]
    batch = lambda rows: next(iter(strategy.distribute_dataset([rows])))  # noqa: E731
    even, odd = batch(np.arange(6.0)), batch(np.arange(5.0))
    same = strategy.run(lambda x: x * 1, args=(even,))  # of no dataset: a state, or noise, which weighs nothing
    step = lambda x, odd: mean(x.mean())  # noqa: E731
    assert float(strategy.run(step, args=(same, odd))) == pytest.approx((2 * 0.5 + 2 * 2.5 + 4.5) / 5)
    with pytest.raises(mr.UnevenReplicasError, match=r"\(2, 2, 1\), \(2, 2, 2\) rows.*drop_remainder"):
        strategy.run(step, args=(even, odd))
    assert float(strategy.run(lambda x, odd: mean(x.mean(), by_rows=False), args=(even, odd))) == 2.5


def test_a_sum_of_python_numbers_by_the_name_in_jax_is_that_of_all_replicas():
    """JAX makes R times the own number of it."""
    strategy = STRATEGIES[3]
    for num_rows in (9, 7, 2):
        step = lambda x: (jax.lax.psum(x.shape[0], "replica") + 0 * x.sum(), jax.lax.psum(1, "replica"))  # noqa: E731
        all_rows, replicas = strategy.run(step, args=(split(strategy, np.ones(num_rows)),))
        assert [int(value) for value in strategy.local_results(all_rows)] == [num_rows] * 3 and replicas == 3


def test_a_mean_over_groups_of_replicas_is_refused():
    strategy = STRATEGIES[4]
    groups = lambda x: jax.lax.pmean(x.mean(), "replica", axis_index_groups=[[0, 1], [2, 3]]) + 0 * x.sum()  # noqa: E731
    strategy.run(groups, args=(split(strategy, np.ones(8)),))
    with pytest.raises(mr.UnevenReplicasError, match=r"test_means\.py:\d+ is over groups of replicas"):
        strategy.run(groups, args=(split(strategy, np.ones(7)),))


def test_names_in_jax_lax_are_put_back_after_errors_and_while_threads_trace():
    names, strategy = ("pmean", "psum", "all_gather"), STRATEGIES[2]
    before = [getattr(jax.lax, name) for name in names]
    inside, results = threading.Barrier(2, timeout=60), {}

    def run(k):
        def step(x):
            if k not in results:
                results[k] = jax.lax.pmean
                inside.wait()  # both are being traced now
            return pmean(x.mean() + k)

        results[k, "mean"] = float(strategy_of(2).run(step, args=(split(strategy, [0, 1, 2]),)))

    in_threads(*(functools.partial(run, k) for k in range(2)))
    assert (results[0, "mean"], results[1, "mean"]) == (1, 2)
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda x: pmean(x / (1 // 0)), args=(split(strategy, [0, 1, 2]),))
    assert before == [getattr(jax.lax, name) for name in names] and OTHER.pmean is before[0]
    np.testing.assert_array_equal(jax.vmap(lambda x: pmean(x, "replica"), axis_name="replica")(jnp.arange(3.0)), [1, 1, 1])


def test_derivatives_that_go_forward_are_those_of_one_device():
    loss = lambda p, x: jnp.mean(losses("plain", p, x))  # noqa: E731
    step = lambda x: mean(jax.jvp(lambda p: loss(p, x), (PARAMS,), (PARAMS,))[1])  # noqa: E731
    assert_equals_one_device(lambda strategy: run(strategy, step, ROWS[:7]), rtol=1e-3)


def test_what_was_combined_or_assigned_since_counts_as_new():
    """A loss that is looked at after an update, and statistics of values that depend on collectives, are no gradients."""

    def outcome(strategy):
        a = variable(PARAMS["a"], strategy)
        optimizer = mr.Optimizer(optax.sgd(0.1), a)

        def step(x):
            each = lambda a: jnp.sum(flax(x @ a)[:, :2] ** 3, axis=-1)  # noqa: E731
            share = lambda a: mr.losses.compute_average_loss(each(a))  # noqa: E731
            optimizer.apply_gradients(mr.grad(lambda: share(a.value), a)())
            later = jax.lax.fori_loop(0, 2, lambda i, a: a - 0.1 * total(jax.grad(share)(a)), a.value)
            return mean(jnp.mean(each(a.value))), mean(jnp.mean(each(later)))

        return run(strategy, step, ROWS[:7])

    assert_equals_one_device(outcome, num_replicas=2, rtol=1e-3)
