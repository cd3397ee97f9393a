"""A mean over the replicas is the mean over all rows, or is refused; a replica without rows does not count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import slow

import mirrored as mr

STRATEGIES = {r: mr.MirroredStrategy([f"cpu:{i}" for i in range(r)]) for r in (1, 2, 8)}
COLUMNS = 3
X = np.random.default_rng(0).normal(size=(5, 2, COLUMNS)).astype(np.float32)


def split(strategy, rows):
    parts = np.array_split(np.asarray(rows, np.float32), strategy.num_replicas_in_sync)
    return strategy.distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group])


def mean(value):
    return mr.get_replica_context().all_reduce("mean", value)


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


STATISTICS = [in_one_mean, in_two_means, by_a_name_of_vmap, in_a_loop]


def simple(x):
    half = x.astype(jnp.bfloat16)
    return {
        "mean": mean(x.mean()),
        "of a comparison": mean(jnp.mean(x > 0)),
        "with a penalty": mean(2 * jnp.sum(x**2) / x.shape[0] + jnp.sum(jnp.ones(3) ** 2)),
        "of two axes in turn": pmean(x.mean(0).mean(0)),
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

        (_, state), gradient = jax.value_and_grad(jax.jit(loss), has_aux=True)(jnp.full(3, 0.7))
        results[stats.__name__] = state, mr.get_replica_context().all_reduce("sum", gradient)
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


def test_what_does_not_depend_on_the_rows_has_a_plain_mean():
    """Also one value for each replica; and what is divided by hand is what is written."""
    strategy = STRATEGIES[2]

    def step(x):
        ctx = mr.get_replica_context()
        return mean(ctx.replica_id_in_sync_group), ctx.all_reduce("sum", x.mean() / 2), ctx.all_reduce("sum", x.sum()) / 2

    np.testing.assert_allclose(strategy.run(step, args=(split(strategy, [0, 1, 2]),)), [0.5, 1.25, 1.5])


def used_elsewhere(x):
    def loss(w):
        own = jnp.mean(x * w)
        return jnp.sum(x) * mean(own) + own**2

    return jax.grad(loss)(1.0)


def carried(x):
    return jax.lax.fori_loop(0, 2, lambda i, c: (mean(c[1]), jnp.mean(x)), (0.0, 0.0))[0]


REFUSED = {
    "a sum": lambda x: mean(jnp.sum(x)),
    "a number of rows": lambda x: mean(x.shape[0]),
    "a root of a mean": lambda x: mean(jnp.sqrt(jnp.mean(x**2))),
    "a largest value": lambda x: pmean(jnp.max(x, initial=0)),
    "a mean of chosen rows": lambda x: pmean(jnp.mean(x, where=x > 0)),
    "an estimate of a variance": lambda x: mean(jnp.var(x, ddof=1)),
    "divided by another number": lambda x: mean(jnp.sum(x) / (x.shape[0] + 1)),
    "a gradient": lambda x: mean(jax.grad(lambda w: jnp.mean((x * w - 1) ** 2))(1.0)),
    "another mean beside it": lambda x: mean(jnp.mean(x) + jnp.mean(x[:1])),
    "a mean that a gradient goes through twice": used_elsewhere,
    "a carried mean": carried,
    "for some rows only": lambda x: mean(jnp.mean(x) if x.shape[0] > 1 else jnp.float32(0)),
}


def test_a_mean_of_anything_else_that_depends_on_the_rows_is_refused():
    strategy = STRATEGIES[2]
    message = (
        r"mean over the replicas, at .*test_means\.py:\d+.*reduce\('mean', values, axis=0\).*value / ctx\.num_replicas_in_sync"
    )
    for name, wrong in REFUSED.items():
        strategy.run(wrong, args=(split(strategy, [0, 1, 2, 5]),))
        with pytest.raises(mr.UnevenReplicasError, match=message):
            print(name, strategy.run(wrong, args=(split(strategy, [0, 1, 2]),)))
