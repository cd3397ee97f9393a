"""A mean over the replicas weighs each by its rows, whatever it is the mean of; gradients that come back through one add up."""

import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import slow

import mirrored as mr

#: A module of a user's that has imported names from `jax.lax`.
OTHER = sys.modules["other_module"] = types.ModuleType("other_module")
exec("from jax.lax import pmean, psum, pmean as plain_mean", vars(OTHER))
exec("mean = lambda x: pmean(x, 'replica')\ntotal = lambda *args: psum(*args)", vars(OTHER))
STRATEGIES = {r: mr.MirroredStrategy([f"cpu:{i}" for i in range(r)]) for r in (1, 2, 3, 8)}
COLUMNS = 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 2, COLUMNS)).astype(np.float32)
ROWS = RNG.normal(size=(10, 3)).astype(np.float32)
PARAMS = {"a": RNG.normal(size=(3, 4)).astype(np.float32), "b": RNG.normal(size=(4, 4)).astype(np.float32)}


def split(strategy, rows):
    parts = np.array_split(np.asarray(rows, np.float32), strategy.num_replicas_in_sync)
    return strategy.distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group])


def mean(value, **options):
    return mr.get_replica_context().all_reduce("mean", value, **options)


def total(value):
    return mr.get_replica_context().all_reduce("sum", value)


def pmean(value, axes="replica"):
    return jax.lax.pmean(value, axes)


def normalized(x, stats):
    center, variance = stats(x)
    return (x - center) * jax.lax.rsqrt(variance + 0.1), (center, variance)


def in_one_mean(x):
    """Flax Linen and NNX: the means of values and of their squares together."""
    both = pmean(jnp.stack([x.mean((0, 1)), (x * x).mean((0, 1))]))
    return both[0], both[1] - both[0] ** 2


def in_two_means(x):
    center = mean(x.mean((0, 1)))
    return center, mean(jnp.mean((x - center) ** 2, axis=(0, 1)))


def by_a_name_of_vmap(x):
    """Equinox: means within a row, under a vmap over rows, with both names."""

    def of_row(row):
        center = pmean(jnp.mean(row, axis=0), ("batch", "replica"))
        return center, pmean(jnp.mean((row - center) ** 2, axis=0), ("batch", "replica"))

    return jax.vmap(of_row, axis_name="batch", out_axes=None)(x)


def in_a_loop(x):
    return jax.lax.fori_loop(0, 2, lambda i, c: (pmean((x - c[0]).mean((0, 1))), c[0] * 0 + 1), (jnp.zeros(3), jnp.zeros(3)))


def in_sums(x):
    sums = jax.lax.psum(jnp.concatenate([x.sum((0, 1)), (x * x).sum((0, 1)), jnp.ones(1) * x[..., 0].size]), "replica")
    center = sums[:3] / sums[6]
    return center, sums[3:6] / sums[6] - center**2


STATISTICS = [in_one_mean, in_two_means, by_a_name_of_vmap, in_a_loop, in_sums]


def simple(x):
    half = x.astype(jnp.bfloat16)
    return {
        "mean": mean(x.mean()),
        "said": mean(x.mean(), by_rows=True),
        "of a comparison": mean(jnp.mean(x > 0)),
        "with a penalty": mean(2 * jnp.sum(x**2) / x.shape[0] + jnp.sum(jnp.ones(3) ** 2)),
        "of two axes in turn": pmean(x.mean(0).mean(0)),
        "imported": OTHER.mean(x.mean(0)),
        "in a reduce": mr.get_strategy().reduce("mean", x.mean(0)),
        "tree": mean({"a": x[..., 0].mean(), "b": jnp.float32(2)}),
        "complex": mean((x + 1j * x).mean()),
        "half": mean(half.mean()),
        "no rows": mean(jnp.arange(3)),
    }


def step(x):
    results = {"simple": simple(x)}
    for stats in STATISTICS:

        def loss(w, stats=stats):
            y, state = normalized(jnp.tanh(x * w), stats)
            y, more = jax.checkpoint(lambda y: normalized(y * y, stats))(y)
            return mr.losses.compute_average_loss(jnp.sum(y**3 + jnp.sin(y), axis=(1, 2))), (state, more)

        (value, (_, state)), gradient = jax.value_and_grad(jax.jit(loss), has_aux=True)(jnp.full(3, 0.7))
        results[stats.__name__] = state, total(gradient), total(value)
    return results


@pytest.mark.parametrize("num_replicas", slow(2, 8))
def test_means_and_their_gradients_equal_one_device(num_replicas):
    one, many = (STRATEGIES[r].run(step, args=(split(STRATEGIES[r], X),)) for r in (1, num_replicas))
    for name in one:
        assert_close = lambda a, b, name=name: np.testing.assert_allclose(a, b, rtol=5e-3, atol=1e-4, err_msg=name)  # noqa: E731
        jax.tree.map(assert_close, many[name], one[name])
    assert float(many["simple"]["tree"]["b"]) == 2 and np.array_equal(many["simple"]["no rows"], [0, 1, 2])


def test_the_example_of_the_documentation():
    x = split(STRATEGIES[2], [0, 1, 2])
    assert float(STRATEGIES[2].run(lambda x: mean(x.mean()), args=(x,))) == 1.0


def test_a_variable_with_a_mean_gets_the_mean_of_all_rows():
    with STRATEGIES[8].scope():
        v = mr.Variable(0.0, aggregation="mean")
    STRATEGIES[8].run(lambda x: v.assign(x.mean()), args=(split(STRATEGIES[8], X),))
    np.testing.assert_allclose(v.value, X.mean(), rtol=1e-4, atol=1e-6)


OF_ANYTHING = {
    "a sum": jnp.sum,
    "a number of rows": lambda x: jnp.float32(x.shape[0]),
    "a replica's number": lambda x: mr.get_replica_context().replica_id_in_sync_group + 0 * jnp.sum(x),
    "a root of a mean": lambda x: jnp.sqrt(jnp.mean(x**2)),
    "a largest value": lambda x: jnp.max(x, initial=0),
    "a mean of chosen rows": lambda x: jnp.mean(x, where=x > 0),
    "an estimate of a variance": lambda x: jnp.var(x, ddof=1),
    "a mean over pairs of rows": lambda x: jnp.mean(jnp.abs(x[:, None] - x[None])),
    "a gradient": lambda x: jax.grad(lambda w: jnp.mean((x * w - 1) ** 2))(1.0),
    "for some rows only": lambda x: jnp.mean(x) if x.shape[0] > 3 else jnp.float32(0),
    "a carried mean": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c + jnp.mean(x), 0.0),
}


def test_whatever_it_is_each_replica_weighs_as_much_as_it_has_rows():
    """Three replicas with 4, 3 and 3 rows; and all alike with `by_rows=False`."""
    strategy, x = STRATEGIES[3], np.arange(10.0) - 3

    def step(x):
        nothing = 0.0 * mr.get_replica_context().replica_id_in_sync_group  # makes one value for each replica of a number of rows
        own = {name: function(x) + nothing for name, function in OF_ANYTHING.items()}
        return own, mean(own), pmean(own), mean(own, by_rows=False)

    own, weighed, also, plain = strategy.run(step, args=(split(strategy, x),))
    for name in OF_ANYTHING:
        values = [float(value) for value in strategy.local_results(own[name])]
        np.testing.assert_allclose(weighed[name], np.average(values, weights=[4, 3, 3]), rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(plain[name], np.mean(values), rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(also[name], weighed[name])


def test_a_mean_under_another_name_than_jaxs_is_jaxs_plain_one():
    """As docs/concepts.md says: what a name stands for is not guessed."""
    own, x = [0.5, 2.0], split(STRATEGIES[2], [0, 1, 2])
    by_name, otherwise = STRATEGIES[2].run(
        lambda x: (OTHER.pmean(x.mean(), "replica"), OTHER.plain_mean(x.mean(), "replica")), (x,)
    )
    assert (float(by_name), float(otherwise)) == (np.average(own, weights=[2, 1]), np.mean(own))


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
    return normalize(jnp.tanh(normalize(x @ params["a"]) @ params["b"]))


def scanned(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(flax(x) @ w), None), x @ params["a"], jnp.stack([params["b"]] * 2))[0]


NETS = {
    "without collectives": lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"],
    "plain": lambda p, x: net(flax, p, x),
    "sums": lambda p, x: net(own_sums, p, x),
    "sums by an imported name": lambda p, x: net(lambda x: own_sums(x, OTHER.total), p, x),
    "under vmap": lambda p, x: net(equinox, p, x),
    "normalized in jit": lambda p, x: net(jax.jit(flax), p, x),
    "in jit": lambda p, x: jax.jit(lambda p, x: net(flax, p, x))(p, x),
    "checkpointed": lambda p, x: jax.checkpoint(lambda p, x: net(flax, p, x))(p, x),
    "scanned": scanned,
    "sums of sums": lambda p, x: x @ p["a"] + jax.lax.psum(jax.lax.psum(jnp.sum(p["b"]), "replica"), "replica"),
    "gathered": lambda p, x: x @ p["a"] + jnp.sum(mr.get_replica_context().all_gather(p["b"], axis=0), axis=0),
}


def losses(name, params, x):
    return jnp.sum(NETS[name](params, x)[:, :2] ** 3, axis=-1)


def gradient_of(name, loss):
    return jax.grad(lambda p, x: loss(losses(name, p, x)))


OF_R = ("sums of sums", "gathered")  # which depend on the number of replicas
SLOW = ("scanned", "in jit", "sums by an imported name", "under vmap", "normalized in jit", "checkpointed")
CASES = [pytest.param(name, 10, marks=[pytest.mark.slow] * (name in SLOW)) for name in NETS if name not in OF_R]
CASES += [
    pytest.param(name, rows, marks=[pytest.mark.slow] * ((name, rows) != ("plain", 2)))
    for name in NETS
    for rows in (2, 4)
    if name not in OF_R
]


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_losses_that_have_their_weights_have_the_gradients_of_one_device(name, rows):
    average = gradient_of(name, mr.losses.compute_average_loss)
    run = lambda strategy: strategy.run(lambda p, x: total(average(p, x)), args=(PARAMS, split(strategy, ROWS[:rows])))  # noqa: E731
    many, one = (mr.MirroredStrategy([f"cpu:{i}" for i in range(r)]) for r in (3, 1))  # new: one step of many programs warns
    for ours, alone in zip(jax.tree.leaves(run(many)), jax.tree.leaves(run(one)), strict=True):
        np.testing.assert_allclose(ours, alone, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_a_mean_of_gradients_is_that_of_one_device_or_is_refused_where_they_came_back_through_a_collective(name):
    own = gradient_of(name, jnp.mean)

    def step(params, x):
        return mean(own(params, x))

    run = lambda strategy: strategy.run(step, args=(PARAMS, split(strategy, ROWS)))  # noqa: E731
    if name == "without collectives":
        for ours, alone in zip(jax.tree.leaves(run(STRATEGIES[3])), jax.tree.leaves(run(STRATEGIES[1])), strict=True):
            np.testing.assert_allclose(ours, alone, atol=2e-6)
        return
    two = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    two.run(step, args=(PARAMS, split(two, ROWS)))  # exact where all have as many rows
    message = r"the mean over the replicas at .*test_means\.py:\d+ is of gradients that have come back .* at \S+:\d+"
    with pytest.raises(mr.UnevenReplicasError, match=message + r".*compute_average_loss\(per_example_loss\).*all_reduce\('sum'"):
        run(STRATEGIES[3])


def test_gradients_of_gradients_and_parts_of_them_are_refused_too():
    own = gradient_of("plain", jnp.mean)

    def of_a_gradient(p, x):
        inner = lambda p: jax.grad(lambda x: jnp.mean(net(flax, p, x)))(x)  # noqa: E731
        return mean(jax.grad(lambda p: jnp.sum(inner(p) ** 2))(p))

    wrong = {
        "of a gradient": of_a_gradient,
        "scaled": lambda p, x: mean(jax.tree.map(lambda g: 2 * g, own(p, x))),
        "a norm": lambda p, x: mean(optax.tree.norm(own(p, x))),
        "a round later": lambda p, x: jax.lax.fori_loop(
            0, 2, lambda i, c: (mean(c[1]), own(p, x)["b"]), (total(p["b"]), p["b"] + 0 * jnp.sum(x))
        )[0],
        "in a loop": lambda p, x: jax.lax.fori_loop(0, 2, lambda i, b: mean(own({**p, "b": b}, x)["b"]), p["b"]),
    }
    for name, step in wrong.items():
        with pytest.raises(mr.UnevenReplicasError, match="have come back through a collective"):
            print(name, STRATEGIES[2].run(step, args=(PARAMS, split(STRATEGIES[2], ROWS[:7]))))


def test_derivatives_that_go_forward_are_those_of_one_device():
    loss = lambda p, x: jnp.mean(losses("plain", p, x))  # noqa: E731
    step = lambda p, x: mean(jax.jvp(lambda p: loss(p, x), (p,), (p,))[1])  # noqa: E731
    many, one = (STRATEGIES[r].run(step, args=(PARAMS, split(STRATEGIES[r], ROWS[:7]))) for r in (2, 1))
    np.testing.assert_allclose(many, one, rtol=1e-3)


def test_what_was_combined_or_assigned_since_counts_as_new():
    """A loss that is looked at after an update, and statistics of values that depend on collectives, are no gradients."""

    def run(strategy):
        with strategy.scope():
            params = jax.tree.map(mr.Variable, PARAMS)
            optimizer = mr.Optimizer(optax.sgd(0.1), params)

        def step(x):
            def loss():
                return mr.losses.compute_average_loss(jnp.sum(net(flax, params_of(), x) ** 3, axis=-1))

            params_of = lambda: {name: v.value for name, v in params.items()}  # noqa: E731
            optimizer.apply_gradients(mr.grad(loss, params)())
            after = mean(jnp.mean(losses("plain", params_of(), x)))
            gradient = gradient_of("plain", mr.losses.compute_average_loss)
            descend = lambda p: jax.tree.map(lambda a, g: a - 0.1 * g, p, total(gradient(p, x)))  # noqa: E731
            w = jax.lax.fori_loop(0, 2, lambda i, p: descend(p), params_of())
            return after, mean(jnp.mean(losses("plain", w, x)))

        return strategy.run(step, args=(split(strategy, ROWS[:7]),))

    for many, one in zip(run(STRATEGIES[2]), run(STRATEGIES[1]), strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-3)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_optimizer_that_averages_does_so_by_rows(strategy2, is_sharded):
    with strategy2.scope():
        params = {name: mr.Variable(value) for name, value in PARAMS.items()}
        optimizer = mr.Optimizer(optax.sgd(1.0), params, shard_state=is_sharded)

    def step(name, x):
        loss = lambda: jnp.mean(losses(name, {k: v.value for k, v in params.items()}, x))  # noqa: E731
        optimizer.apply_gradients(mr.grad(loss, params)(), aggregate="mean")

    strategy2.run(step, args=("without collectives", split(strategy2, ROWS[:7])))
    gradient = gradient_of("without collectives", jnp.mean)(PARAMS, ROWS[:7])
    for name, value in PARAMS.items():
        np.testing.assert_allclose(value - params[name].numpy(), gradient[name], atol=2e-6)
    with pytest.raises(mr.UnevenReplicasError, match=r"apply_gradients\(grads, aggregate='sum'\)"):
        strategy2.run(step, args=("plain", split(strategy2, ROWS[:7])))


def test_a_mean_in_the_loss_of_an_optimizer_that_averages(strategy2):
    """It once failed with a `KeyError`."""
    with strategy2.scope():
        w = mr.Variable(np.ones(3, np.float32))
        optimizer = mr.Optimizer(optax.sgd(0.1), [w])

    def step(x, how):
        def loss():
            h = x @ w.value
            own = (h - mean(jnp.mean(h)) - x[:, 0]) ** 2
            return jnp.mean(own) if how == "mean" else mr.losses.compute_average_loss(own)

        optimizer.apply_gradients(mr.grad(loss, [w])(), aggregate=how)

    with pytest.raises(mr.UnevenReplicasError, match="have come back through a collective"):
        strategy2.run(step, args=(split(strategy2, ROWS[:7]), "mean"))
    strategy2.run(step, args=(split(strategy2, ROWS[:7]), "sum"))
    x = ROWS[:7]
    gradient = jax.grad(lambda w: jnp.mean((x @ w - jnp.mean(x @ w) - x[:, 0]) ** 2))(np.ones(3, np.float32))
    np.testing.assert_allclose(w.value, 1 - 0.1 * gradient, rtol=1e-5)


# -- the rows of a replica, and the names in `jax.lax`


def test_arguments_that_divide_differently_have_no_one_weight():
    strategy = STRATEGIES[2]
    arguments = split(strategy, np.ones(3)), split(strategy, np.ones(7))
    message = r"the arguments divide differently among the replicas: \(2, 1\), \(4, 3\) rows.*by_rows=False"
    with pytest.raises(mr.UnevenReplicasError, match=message):
        strategy.run(lambda x, y: mean(x.mean()), args=arguments)
    assert float(strategy.run(lambda x, y: mean(float(y.shape[0]), by_rows=False), args=arguments)) == 3.5
    twice = strategy.distribute_values_from_function(lambda ctx: np.ones(4 - 2 * ctx.replica_id_in_sync_group))
    pairs = split(strategy, np.ones(3)), twice
    assert float(strategy.run(lambda x, y: mean(float(x.shape[0])), args=pairs)) == pytest.approx(5 / 3)


def test_a_sum_of_python_numbers_by_the_name_in_jax_is_that_of_all_replicas():
    """JAX makes R times the own number of it."""
    strategy = STRATEGIES[3]
    for num_rows in (9, 7, 2):
        step = lambda x: (jax.lax.psum(x.shape[0], "replica") + 0 * x.sum(), jax.lax.psum(1, "replica"))  # noqa: E731
        all_rows, replicas = strategy.run(step, args=(split(strategy, np.ones(num_rows)),))
        assert [int(value) for value in strategy.local_results(all_rows)] == [num_rows] * 3 and replicas == 3


def test_a_mean_over_groups_of_replicas_is_refused():
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(4)])
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

        results[k, "mean"] = float(mr.MirroredStrategy(["cpu:0", "cpu:1"]).run(step, args=(split(strategy, [0, 1, 2]),)))

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (results[0, "mean"], results[1, "mean"]) == (1, 2)
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda x: pmean(x / (1 // 0)), args=(split(strategy, [0, 1, 2]),))
    assert before == [getattr(jax.lax, name) for name in names] and OTHER.pmean is before[0]
    np.testing.assert_array_equal(jax.vmap(lambda x: pmean(x, "replica"), axis_name="replica")(jnp.arange(3.0)), [1, 1, 1])
