"""An optimizer's state that comes back different on each replica is a warning with the line to write; other states are not."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def gradients(params: Any, x: Any) -> Any:
    return jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)


def forgotten(tx: Any) -> Any:
    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(gradients(params, x), state)
        return optax.apply_updates(params, updates), state

    return step


def combined(tx: Any) -> Any:
    def step(params: Any, state: Any, carry: Any, x: Any) -> Any:
        grads = mr.get_replica_context().all_reduce("mean", gradients(params, x), by_rows=True)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, carry + x.sum()

    return step


def batch(strategy: mr.Strategy, rows: int = 6) -> Any:
    return next(iter(strategy.distribute_dataset([X[:rows]])))


class TrainState(NamedTuple):
    params: Any
    opt: Any


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize("rows", [6, pytest.param(5, marks=pytest.mark.slow)])
def test_a_forgotten_all_reduce_is_said_once_at_the_users_line(strategy2: mr.Strategy, tx: Any, rows: int) -> None:
    params, state = PARAMS, tx.init(PARAMS)
    with pytest.warns(
        mr.ReplicasDivergeWarning, match=r"such as `params\['b'\]`, have come back .*all_reduce\('mean', grads\)"
    ) as seen:
        for _ in range(4):
            params, state = strategy2.run(forgotten(tx), args=(params, state, batch(strategy2, rows)))
    assert len(seen) == 1 and seen[0].filename == __file__


def test_one_state_of_both_and_one_beside_a_logged_loss_are_found(strategy2: mr.Strategy) -> None:
    tx = optax.adam(0.1)

    def step(state: TrainState, x: Any) -> Any:
        new = TrainState(*forgotten(tx)(*state, x))
        return new, mr.get_replica_context().all_reduce("mean", x.mean())

    state = TrainState(PARAMS, tx.init(PARAMS))
    with pytest.warns(mr.ReplicasDivergeWarning, match=r"`state\.opt\[0\]\.mu\['b'\]`"):
        for _ in range(3):
            state, _ = strategy2.run(step, args=(state, batch(strategy2)))


def test_what_is_meant_so_is_silent(strategy2: mr.Strategy) -> None:
    tx, x = optax.adam(0.1), batch(strategy2)
    state = tx.init(PARAMS)
    own, state_of_each = (strategy2.distribute_values_from_function(lambda ctx, t=t: t) for t in (PARAMS, state))
    with strategy2.scope():
        w = mr.Variable(np.ones((3, 2), np.float32))
        optimizer = mr.Optimizer(optax.sgd(0.1), w)

    def carries(hidden: Any, sums: Any, running: Any, x: Any) -> Any:
        """Train a model, and carry an LSTM's state, sums of an epoch, and a running loss."""

        def loss() -> Any:
            h = jnp.tanh(hidden + x @ w)
            return mr.losses.compute_average_loss(jnp.sum(h**2, axis=-1)), h

        (value, hidden_now), grads = mr.value_and_grad(loss, w, has_aux=True)()
        optimizer.apply_gradients(grads)
        return hidden_now, {"loss": sums["loss"] + value, "count": sums["count"] + len(x)}, 0.9 * running + 0.1 * value

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given: Any = (PARAMS, state, 0.0)
        for _ in range(3):
            given = strategy2.run(combined(tx), args=(*given, x))
            own, state_of_each = strategy2.run(forgotten(tx), args=(own, state_of_each, x))
        carried: Any = (np.zeros((3, 2), np.float32), {"loss": 0.0, "count": 0}, 0.0)
        for _ in range(3):
            carried = strategy2.run(carries, args=(*carried, x))
        alone = mr.MirroredStrategy(["cpu:0"])
        params = PARAMS
        for _ in range(3):
            params, state = alone.run(forgotten(tx), args=(params, state, X))
