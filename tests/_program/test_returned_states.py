"""A train state that comes back different on each replica is a warning with the line to write; everything else is silent."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
TX = optax.adam(0.1)
X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def gradients(params, x):
    return jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)


def forgotten(params, state, x):
    updates, state = TX.update(gradients(params, x), state)
    return optax.apply_updates(params, updates), state


def combined(params, state, x):
    grads = mr.get_replica_context().all_reduce("mean", gradients(params, x), by_rows=True)
    updates, state = TX.update(grads, state)
    return optax.apply_updates(params, updates), state


def batch(strategy, rows):
    return next(iter(strategy.distribute_dataset([X[:rows]])))


@pytest.mark.parametrize("step", [forgotten, jax.jit(forgotten)], ids=["plain", "jit"])
@pytest.mark.parametrize("rows", [6, pytest.param(5, marks=pytest.mark.slow)])
def test_a_forgotten_all_reduce_is_said_once_at_the_users_line(strategy2, step, rows):
    state = TX.init(PARAMS)
    with pytest.warns(
        mr.ReplicasDivergeWarning, match=r"2 arrays .* returns it with 2 that differ by replica: .*`x`.*by_rows=True"
    ) as seen:
        params, state = strategy2.run(step, args=(PARAMS, state, batch(strategy2, rows)))
    assert len(seen) == 1 and seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy2.run(step, args=(params, state, batch(strategy2, rows)))


def test_what_is_meant_so_is_silent(strategy2):
    own = strategy2.distribute_values_from_function(lambda ctx: PARAMS)
    state = TX.init(PARAMS)
    state_of_each = strategy2.distribute_values_from_function(lambda ctx: state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy2.run(combined, args=(PARAMS, state, batch(strategy2, 6)))
        strategy2.run(forgotten, args=(own, state_of_each, batch(strategy2, 6)))
        strategy2.run(gradients, args=(PARAMS, batch(strategy2, 6)))
        strategy2.run(jax.jit(gradients), args=(PARAMS, batch(strategy2, 6)))
        strategy2.run(lambda p, x: jax.tree.map(lambda leaf: leaf * x.sum(), p), args=(PARAMS, batch(strategy2, 6)))
        mr.MirroredStrategy(["cpu:0"]).run(forgotten, args=(PARAMS, state, X))
