"""A mean by rows of gradients is that of one device, also when they have come through layers that normalize over the replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr

RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 3)).astype(np.float32)
PARAMS = {"a": RNG.normal(size=(3, 4)).astype(np.float32), "b": RNG.normal(size=(4, 4)).astype(np.float32)}


def of_replicas(value):
    """On one device there is no axis of replicas."""
    return jax.lax.pmean(value, "replica") if mr.has_strategy() else value


def flax(x):
    both = of_replicas(jnp.stack([x.mean(0), (x * x).mean(0)]))
    return (x - both[0]) * jax.lax.rsqrt(both[1] - both[0] ** 2 + 0.1)


def sums(x):
    total = jnp.concatenate([x.sum(0), (x * x).sum(0), jnp.ones(1) * x.shape[0]])
    total = jax.lax.psum(total, "replica") if mr.has_strategy() else total
    center = total[:4] / total[8]
    return (x - center) * jax.lax.rsqrt(total[4:8] / total[8] - center**2 + 0.1)


def equinox(x):
    def of_row(row):
        axes = ("row", "replica") if mr.has_strategy() else "row"
        center = jax.lax.pmean(row, axes)
        return (row - center) * jax.lax.rsqrt(jax.lax.pmean((row - center) ** 2, axes) + 0.1)

    return jax.vmap(of_row, axis_name="row")(x)


def net(normalize, params, x):
    return normalize(jnp.tanh(normalize(x @ params["a"]) @ params["b"]))


def loss(normalize, params, x):
    weight_decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return jnp.mean(jnp.sum(net(normalize, params, x)[:, :2] ** 3, axis=-1)) + 0.1 * weight_decay


def scanned(params, x):
    def layer(x, w):
        return jnp.tanh(flax(x) @ w), None

    return jnp.mean(jax.lax.scan(layer, x @ params["a"], jnp.stack([params["b"]] * 2))[0] ** 3)


LOSSES = {
    "plain": lambda p, x: loss(flax, p, x),
    "sums": lambda p, x: loss(sums, p, x),
    "under vmap": lambda p, x: loss(equinox, p, x),
    "normalized in jit": lambda p, x: loss(jax.jit(flax), p, x),
    "in jit": lambda p, x: jax.jit(lambda p, x: loss(flax, p, x))(p, x),
    "checkpointed": lambda p, x: jax.checkpoint(lambda p, x: loss(flax, p, x))(p, x),
    "scanned": scanned,
}


def run(step, strategy, rows):
    parts = np.array_split(X[:rows], strategy.num_replicas_in_sync)
    return strategy.run(
        step, args=(PARAMS, strategy.distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group]))
    )


def by_rows(tree):
    return mr.get_replica_context().all_reduce("mean", tree, by_rows=True)


def assert_equal(ours, alone):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


SLOW = ("scanned", "in jit", "sums", "under vmap", "normalized in jit", "checkpointed")
CASES = [pytest.param(name, 10, marks=[pytest.mark.slow] * (name in SLOW)) for name in LOSSES]
CASES += [
    pytest.param(name, rows, marks=pytest.mark.slow) for name in LOSSES for rows in (3, 4) if (name, rows) != ("under vmap", 3)
]


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_loss_and_gradients_are_those_of_one_device(name, rows):
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    gradient = jax.value_and_grad(LOSSES[name])
    step = jax.jit(lambda p, x: by_rows(gradient(p, x)))
    assert_equal(run(step, strategy, rows), gradient(PARAMS, X[:rows]))


@pytest.mark.slow
def test_a_loss_that_has_its_weights_goes_beside_one_that_gets_them(strategy2):
    def step(params, x):
        losses = lambda p: jnp.sum(net(flax, p, x) ** 3, axis=-1)  # noqa: E731
        weighed = jax.grad(lambda p: mr.losses.compute_average_loss(losses(p)))(params)
        mean = jax.grad(lambda p: jnp.mean(losses(p)))(params)
        return mr.get_replica_context().all_reduce("sum", weighed), by_rows(mean)

    summed, averaged = run(step, strategy2, 7)
    assert_equal(summed, averaged)


def test_an_optimizer_that_averages_does_so_by_rows(strategy2):
    import optax

    with strategy2.scope():
        params = {name: mr.Variable(value) for name, value in PARAMS.items()}
        optimizer = mr.Optimizer(optax.sgd(1.0), params)

    def step(x):
        optimizer.apply_gradients(mr.grad(lambda: loss(flax, params, x), params)(), aggregate="mean")

    rows = [X[:4], X[4:7]]
    strategy2.run(step, args=(strategy2.distribute_values_from_function(lambda c: rows[c.replica_id_in_sync_group]),))
    gradient = jax.grad(LOSSES["plain"])(PARAMS, X[:7])
    assert_equal({k: PARAMS[k] - params[k].numpy() for k in PARAMS}, gradient)


@jax.custom_vjp
def by_hand(x):
    return flax(x)


by_hand.defvjp(lambda x: (flax(x), x), lambda x, g: (g * jax.lax.rsqrt(of_replicas((x * x).mean(0))),))


def used_twice(params, x):
    gradients = jax.grad(LOSSES["plain"])(params, x)
    return by_rows(gradients), mr.get_replica_context().all_reduce("sum", jnp.sum(gradients["a"] ** 2))


REFUSED = {
    "used in another way besides": used_twice,
    "returned besides": lambda p, x: (by_rows(g := jax.grad(LOSSES["plain"])(p, x)), g),
    "of a gradient": lambda p, x: by_rows(
        jax.grad(lambda p: jnp.sum(jax.grad(lambda x: jnp.mean(net(flax, p, x) ** 3))(x) ** 2))(p)
    ),
    "by hand": lambda p, x: by_rows(jax.grad(lambda p: jnp.mean(by_hand(x @ p["a"]) ** 3))(p)),
    "gathered": lambda p, x: by_rows(
        jax.grad(lambda p: jnp.mean((x @ p["a"]) ** 2) + jnp.sum(jax.lax.all_gather(p["b"], "replica")))(p)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_the_weights_are_not_known_the_line_to_write_is_said(strategy2, name):
    with pytest.raises(mr.UnevenReplicasError, match=r"test_crossings.*compute_average_loss\(per_example_loss\) instead"):
        run(REFUSED[name], strategy2, 7)


def test_a_replica_without_rows_that_has_a_part_in_the_gradient_is_refused(strategy2):
    def step(params, x):
        return by_rows(jax.grad(lambda p: jnp.mean((x @ p["a"]) ** 2) + jnp.sum(jax.lax.psum(p["b"] ** 2, "replica")))(params))

    gradient = jax.grad(lambda p: jnp.mean((X[:7] @ p["a"]) ** 2) + 2 * jnp.sum(p["b"] ** 2))
    assert_equal(run(step, strategy2, 7), gradient(PARAMS))
    with pytest.raises(mr.UnevenReplicasError, match="cannot be told how much each replica weighs"):
        run(step, strategy2, 1)
