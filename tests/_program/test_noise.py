"""Noise that is the same on all replicas and meets their rows is said; other random numbers of a common key are not."""

import re
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import nightly
from strategies import ctx, made, strategy_of, variable

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

X = np.ones((6, 4), np.float32)
LINEN, EQUINOX = nn.Dropout(0.5, deterministic=False), eqx.nn.Dropout(0.5)


def gradient(key, x):
    loss = lambda w: jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x * w), 0), axis=1)  # noqa: E731
    return ctx().all_reduce("sum", jax.grad(lambda w: mr.losses.compute_average_loss(loss(w)))(jnp.ones(4)))


#: Noise for each row. All are right with the replica's own key.
FOR_ROWS = {
    "dropout": lambda key, x: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0),
    "added": lambda key, x: x + jax.random.normal(key, x.shape),
    "one number for each row": lambda key, x: x * jnp.sqrt(jax.random.uniform(key, (len(x),)))[:, None],
    "a column": lambda key, x: jax.random.uniform(key, (len(x), 1)) * x,
    "tokens": lambda key, x: jnp.where(jax.random.uniform(key, x.shape) < 0.15, 0, x.astype(int)),
    "categorical": lambda key, x: jax.random.categorical(key, x),
    "what a net makes of noise": lambda key, x: x + jax.nn.relu(jax.random.normal(key, (len(x), 2)) @ jnp.ones((2, 4))),
    "several of a row": lambda key, x: x.sum(1) * jax.random.normal(key, (len(x), 5)).sum(1),
    "transposed": lambda key, x: x + jax.random.normal(key, (4, len(x))).T,
    "Linen": lambda key, x: LINEN.apply({}, x, rngs={"dropout": key}),
    "Equinox": lambda key, x: jax.vmap(lambda row, key: EQUINOX(row, key=key))(x, jax.random.split(key, len(x))),
    "in a scan": lambda key, x: jax.lax.scan(
        lambda x, key: (x * jax.random.uniform(key, x.shape), None), x, jax.random.split(key, 3)
    )[0],
    "under a gradient, checkpointed": jax.checkpoint(gradient),
}  # fmt: skip
#: What is the same for all rows on one device, too.
FOR_ALL = {
    "one number": lambda key, x: x * jax.random.uniform(key),
    "features": lambda key, x: x * jax.random.bernoulli(key, 0.5, (4,)),
    "weights": lambda key, x: x @ (jnp.ones((4, 6)) + jax.random.normal(key, (4, 6))),
    "initial parameters": lambda key, x: nn.Dense(3).init_with_output(key, x)[0],
    "one mask for all rows": lambda key, x: jax.vmap(lambda row: EQUINOX(row, key=key))(x),
    "an order": lambda key, x: jax.random.permutation(key, x),
    "noise of a combined gradient": lambda key, x: ctx().all_reduce("mean", x.mean(0)) + jax.random.normal(key, (4,)),
    "noise of an own gradient": lambda key, x: ctx().all_reduce(
        "mean", jax.grad(lambda w: jnp.tanh(x @ w).mean())(jnp.ones(4)) + jax.random.normal(key, (4,))
    ),
    "a number for each round": lambda key, x: jax.lax.scan(lambda x, n: (x * n, None), x, jax.random.uniform(key, (6,)))[0],
}  # fmt: skip


def said_by(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught if not issubclass(warning.category, mr.RecompilationWarning)]


@pytest.mark.parametrize("num_replicas", [2, *nightly(1)])
def test_equal_noise_on_the_rows_of_all_replicas_is_said(num_replicas):
    strategy = strategy_of(num_replicas)
    [even], [odd] = (strategy.distribute_dataset([rows]) for rows in (X, X[:5]))
    even, odd = (jax.random.key(0), even), (jax.random.PRNGKey(0), odd)
    for position, (name, step) in enumerate(FOR_ROWS.items()):
        for args in (even, odd)[: 1 + (position % 4 == 0)]:
            [message] = said_by(lambda step=step, args=args: made(strategy.run, step, args))
            assert "rng(key)" in message, name
    right = lambda key, x: [  # noqa: E731
        *(step(ctx().rng(key), x) for step in FOR_ROWS.values()),
        *(step(key, x) for step in FOR_ALL.values()),
    ]
    for args in (even, odd):
        assert said_by(lambda args=args: made(strategy.run, right, args)) == []


def test_the_message_has_the_lines_and_two_ways_out(strategy2):
    key = variable(jax.random.key_data(jax.random.key(0)), strategy2)

    def step(x):
        noise = jax.random.normal(key.value, x.shape)
        return x + noise

    [batch] = strategy2.distribute_dataset([X])
    line, file = step.__code__.co_firstlineno, re.escape(__file__)
    [message] = said_by(lambda: strategy2.run(step, args=(batch,)))
    assert re.search(rf"drawn at {file}:{line + 1} are the same .* at {file}:{line + 2} they are combined", message)
    noise = jax.random.normal(jax.random.key(0), (3, 4))
    assert said_by(lambda: strategy2.run(lambda x, noise: x + noise, args=(batch, noise))) == []
    a, b = strategy2.local_results(strategy2.run(lambda x: x + jax.random.normal(ctx().rng(key.value), x.shape), args=(batch,)))
    assert not np.array_equal(a, b)
