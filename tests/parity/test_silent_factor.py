"""A factor of R in a gradient is said, whoever sums it and whatever updates the parameters; right programs are silent."""

import functools
import os
import warnings

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from parameters import nightly
from strategies import ctx, jit, made, strategy_of, variable

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

X = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
W = np.array([[0.3], [-0.2], [0.1]], np.float32)
TX = optax.sgd(0.1, momentum=0.5)
average, as_share = mr.losses.compute_average_loss, mr.losses.as_share
UNSPOKEN, TWICE, SMALL = "nobody has said how the loss is divided", "already been combined", "R times too small"
OWN = "each has added its own gradients"


def per_row(w, x):
    return ((x @ w)[:, 0] - 1) ** 2


def total(tree, op="sum"):
    return ctx().all_reduce(op, tree)


def by_psum(tree):
    return jax.lax.psum(tree, "replica")


def by_merge(tree):
    return ctx().merge_call(lambda strategy, tree: strategy.reduce("sum", tree), args=(tree,))


#: How a step divides its loss and combines its gradients -> what is said of it; "" of a right one.
WAYS = {
    "share, summed": (average, total, ""),
    "share, psum": (average, by_psum, ""),
    "share, reduce": (average, lambda tree: mr.get_strategy().reduce("sum", tree), ""),
    "share, merged": (average, by_merge, ""),
    "own mean, averaged": (jnp.mean, lambda tree: total(tree, "mean"), ""),
    "own mean, pmean": (jnp.mean, lambda tree: jax.lax.pmean(tree, "replica"), ""),
    "own mean that is said, summed": (lambda losses: mr.losses.mean_over_own_rows(losses.mean()), total, ""),
    "sum that is said, summed": (lambda losses: mr.losses.already_divided(losses.sum() / 7), total, ""),
    "own mean, summed": (jnp.mean, total, UNSPOKEN),
    "own mean, psum": (jnp.mean, by_psum, UNSPOKEN),
    "own mean, merged": (jnp.mean, by_merge, UNSPOKEN),
    "share, summed twice": (average, lambda tree: total(total(tree)), TWICE),
    "share, psum of a mean": (average, lambda tree: by_psum(total(tree, "mean")), TWICE),
    "share, averaged": (average, lambda tree: total(tree, "mean"), SMALL),
    "share, averaged in merge_call": (
        average, lambda tree: ctx().merge_call(lambda strategy, tree: strategy.reduce("mean", tree), args=(tree,)), SMALL
    ),
    "share, not summed": (average, lambda tree: tree, OWN),
}  # fmt: skip


def by_tree_in_a_variable(strategy, batches, loss_of, combine):
    w, state = variable({"w": W}, strategy), variable(TX.init({"w": W}), strategy)

    def step(x):
        _, gradients = combine(jax.value_and_grad(lambda p: loss_of(per_row(p["w"], x)))(w.value))
        updates, new = TX.update(gradients, state.value)
        w.assign(optax.apply_updates(w.value, updates))
        state.assign(new)

    for batch in batches:
        strategy.run(step, args=(batch,))
    return w.value["w"]


def by_nnx(strategy, batches, loss_of, combine):
    model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.asarray(W)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def step(model, optimizer, x):
        _, gradients = combine(nnx.value_and_grad(lambda m: loss_of((m(x)[:, 0] - 1) ** 2))(model))
        optimizer.update(model, gradients)

    for batch in batches:
        strategy.run(step, args=(model, optimizer, batch))
    return model.kernel[...]


def by_linen(strategy, batches, loss_of, combine):
    net = nn.Dense(1, use_bias=False)
    state = train_state.TrainState.create(apply_fn=net.apply, params={"params": {"kernel": jnp.asarray(W)}}, tx=TX)

    def step(state, x):
        _, gradients = combine(jax.value_and_grad(lambda p: loss_of((net.apply(p, x)[:, 0] - 1) ** 2))(state.params))
        return state.apply_gradients(grads=gradients)

    for batch in batches:
        state = strategy.run(step, args=(state, batch))
    return state.params["params"]["kernel"]


def by_equinox(strategy, batches, loss_of, combine):
    model = eqx.nn.Linear(3, 1, use_bias=False, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.weight, model, jnp.asarray(W.T))
    state = TX.init(eqx.filter(model, eqx.is_inexact_array))

    def step(model, state, x):
        _, gradients = combine(eqx.filter_value_and_grad(lambda m: loss_of((jax.vmap(m)(x)[:, 0] - 1) ** 2))(model))
        updates, state = TX.update(gradients, state)
        return eqx.apply_updates(model, updates), state

    for batch in batches:
        model, state = strategy.run(step, args=(model, state, batch))
    return model.weight if isinstance(model.weight, mr.PerReplica) else model.weight.T


def by_optimizer_of_mirrored(strategy, batches, loss_of, combine):
    w = variable(W, strategy)
    optimizer = mr.Optimizer(TX, [w])

    def step(x):
        _, gradients = combine(jax.value_and_grad(lambda w: loss_of(per_row(w, x)))(w.value))
        optimizer.apply_gradients([gradients], aggregate=False)

    for batch in batches:
        strategy.run(step, args=(batch,))
    return w.value


LIBRARIES = {
    function.__name__: function for function in (by_tree_in_a_variable, by_nnx, by_linen, by_equinox, by_optimizer_of_mirrored)
}


def said_by(function):
    """Return what a function returns, or None if mirrored refuses it, and what is said."""
    result = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = function()
        except ValueError as error:
            return None, [str(error)]
    kinds = mr.FactorOfReplicasWarning, mr.ReplicasDivergeWarning
    return result, [str(warning.message) for warning in caught if issubclass(warning.category, kinds)]


@functools.cache
def on_one_device(name):
    strategy = strategy_of(1)
    return np.asarray(LIBRARIES[name](strategy, strategy.distribute_dataset([X[:4], X[:7]]), average, total))


#: What other libraries than the first are tried with: for all of them the same collectives are judged.
SOME = ("share, summed", "own mean, summed", "share, summed twice", "share, not summed")


@pytest.mark.parametrize(("library", "num_replicas"), [*((name, 2) for name in LIBRARIES), *nightly(("by_nnx", 3))])
def test_a_factor_is_said_in_any_library_and_right_steps_are_silent(library, num_replicas):
    """One library is tried with all ways; right steps are run, of the others the programs are made."""
    strategy = strategy_of(num_replicas)
    is_first = library == "by_tree_in_a_variable"
    for name, (loss_of, combine, expected) in WAYS.items() if is_first else [(name, WAYS[name]) for name in SOME]:
        is_run = not expected
        rows = [X[:4], X] if is_run and "that is said" not in name else [X[:6]] if expected else [X]
        batches = strategy.distribute_dataset(rows)
        train = LIBRARIES[library] if is_run else functools.partial(made, LIBRARIES[library])
        found, said = said_by(lambda b=batches, how=loss_of, c=combine, train=train: train(strategy, b, how, c))
        if expected == OWN and library not in ("by_linen", "by_equinox"):  # which return arrays
            expected = "differ by replica"
        assert bool(said) == bool(expected), (name, said)
        assert all(expected in message for message in said), (name, said)
        if len(rows) == 2:
            np.testing.assert_allclose(found, on_one_device(library), rtol=1e-5, err_msg=name)


# -- right programs, which are silent

scan, V = jax.lax.scan, np.float32(0.7)


def body(w, carry, x):
    carry = jnp.tanh(w * x + carry)
    return carry, carry


@jax.custom_vjp
def gradient_is_scaled(x):
    return x


gradient_is_scaled.defvjp(lambda x: (x, x), lambda x, g: (g * (1 + 0 * jnp.mean(x)),))


def slope(w, x):
    """Return the derivative of a small net by each row, as a gradient penalty needs it."""
    return jax.vmap(jax.grad(lambda row: jnp.tanh(w * row).sum()))(x)


#: Losses of rows `[n, 3]`, one for each example.
LOSSES = {
    "the last state of a scan": lambda w, x: scan(functools.partial(body, w), jnp.zeros(len(x)), x.T)[0] ** 2,
    "a counter in the carry": lambda w, x: scan(
        lambda c, xt: ((body(w, c[0], xt)[0], c[1] + 1), c[0]), (jnp.zeros(len(x)), 0), x.T
    )[1].sum(0),
    "a statistic in the carry": lambda w, x: scan(
        lambda c, xt: ((body(w, c[0], xt)[0], 0.9 * c[1] + jnp.mean(c[0])), c[0] * (1 + 0 * c[1])), (jnp.zeros(len(x)), 1.0), x.T
    )[1].sum(0),
    "a scan of checkpoints": lambda w, x: scan(jax.checkpoint(functools.partial(body, w)), jnp.zeros(len(x)), x.T)[1].sum(0),
    "cond in a scan": lambda w, x: scan(
        lambda c, xt: (jax.lax.cond(w > 0, lambda: jnp.tanh(w * xt + c), lambda: c), c), jnp.zeros(len(x)), x.T
    )[1].sum(0),
    "masked": lambda w, x: scan(
        lambda c, xt: (jnp.where(xt > 0, jnp.tanh(w * xt + c), c), None), jnp.zeros(len(x)), x.T
    )[0] ** 2,
    "custom_vjp": lambda w, x: jnp.sin(gradient_is_scaled(w * x)).sum(1),
    "a gradient penalty": lambda w, x: jnp.sin(w * x).sum(1) + (jnp.linalg.norm(slope(w, x), axis=1) - 1) ** 2,
    "jvp in the loss": lambda w, x: jax.jvp(lambda x: jnp.tanh(w * x).sum(1), (x,), (jnp.ones_like(x),))[1],
    "adversarial": lambda w, x: jnp.tanh(w * jax.lax.stop_gradient(
        x + 0.1 * jnp.sign(jax.grad(lambda x: jnp.tanh(w * x).sum())(x)))).sum(1),
    "projected adversarial": lambda w, x: jnp.tanh(w * (x + slope(w, x) / jnp.abs(slope(w, x)).max(1, keepdims=True))).sum(1),
}  # fmt: skip


@pytest.mark.parametrize("num_replicas", [2, *nightly(3)])
def test_right_losses_are_silent_and_their_wrong_sums_are_not(num_replicas):
    """Gradients that are computed in other ways are in test_losses.py."""
    strategy = strategy_of(num_replicas)
    summed = lambda loss, x: total(jax.grad(loss)(V, x))  # noqa: E731
    shares = {name: lambda w, x, loss=loss: average(loss(w, x)) for name, loss in LOSSES.items()}
    every = lambda x: {name: summed(share, x) for name, share in shares.items()}  # noqa: E731
    [batch] = strategy.distribute_dataset([X])
    found, said = said_by(lambda: strategy.run(every, args=(batch,)))
    assert said == []
    of_rows = lambda x: {name: jax.grad(lambda w, loss=loss: loss(w, x).mean())(V) for name, loss in LOSSES.items()}  # noqa: E731
    for name, expected in jit(of_rows)(jnp.asarray(X)).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
    for name in list(LOSSES)[::8]:
        run = lambda step: said_by(lambda: made(strategy.run, step, (batch,)))[1]  # noqa: E731
        [unspoken] = run(lambda x, loss=LOSSES[name]: summed(lambda w, x: jnp.mean(loss(w, x)), x))
        [twice] = run(lambda x, loss=shares[name]: by_psum(summed(loss, x)))
        assert UNSPOKEN in unspoken and TWICE in twice, name


def test_sums_of_other_things_are_silent(strategy2):
    """Of metrics, statistics and counters, of gradients beside own rows, and of what is said to be meant."""
    counted = variable(0.0, strategy2, synchronization="on_read", aggregation="sum")
    [batch] = strategy2.distribute_dataset([X])

    def step(x):
        own = jax.grad(lambda w: jnp.mean(jnp.tanh(w * x)))(V)
        of_rows = jax.grad(lambda x: jnp.mean(jnp.tanh(V * x)))(x)
        each = jax.vmap(jax.grad(lambda w, row: jnp.tanh(w * row).sum()), (None, 0))(V, x)
        clipped = each * jnp.minimum(1.0, 1.0 / jnp.abs(each))
        counted.assign_add(as_share(jnp.sum(jnp.abs(own))))
        noisy = x + 0.1 * jnp.sign(of_rows)
        values = [x.sum(), len(x), (x > 0).sum(), (x + of_rows).sum(), jnp.mean(noisy), jnp.mean(x) * x.shape[0]]
        sums = total([*values, *as_share([own**2, jnp.abs(of_rows).sum(), clipped.sum(), each.sum()])])
        adjoint = jax.linear_transpose(lambda v: x @ v, jnp.zeros(3))(x[:, 0])
        counts = jax.lax.psum(x.sum(), "replica") / jax.lax.psum(x.shape[0], "replica")
        return sums, counts, total(adjoint), total(own, "mean")

    _, said = said_by(lambda: strategy2.run(step, args=(batch,)))
    assert said == []


def test_gradients_that_a_step_returns_are_judged_where_they_are_summed(strategy2):
    [batch] = strategy2.distribute_dataset([X[:6]])
    gradient = lambda loss: strategy2.run(lambda x: jax.grad(lambda w: loss(jnp.tanh(w * x).sum(1)))(V), args=(batch,))  # noqa: E731
    own, share = gradient(jnp.mean), gradient(average)
    for value, op, expected in ((own, "sum", UNSPOKEN), (own, "mean", ""), (share, "sum", ""), (share, "mean", SMALL)):
        _, said = said_by(lambda value=value, op=op: strategy2.reduce(op, {"g": value}))
        assert len(said) == bool(expected) and all(expected in message for message in said), (op, said)
