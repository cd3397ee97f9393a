"""Collectives of several traces are paired by the user's line, dtype and shape, in order; else the step is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _program.uneven.rows import STRATEGIES, ctx, data, split, strategy_of, total

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

STRATEGY = STRATEGIES[2]


def changed_lines(x):
    if x.shape[0] > 1:
        a = ctx().all_reduce("sum", jnp.sum(x))
        b = ctx().all_reduce("sum", 100 * jnp.sum(x))
    else:
        b = ctx().all_reduce("sum", 100 * jnp.sum(x))
        a = ctx().all_reduce("sum", jnp.sum(x))
    return a, b


def changed_names(x):
    """A helper for each, in another order."""
    first, second = (lambda x: total(jnp.sum(x))), (lambda x: ctx().all_reduce("sum", jnp.sum(jnp.sin(x))))
    return [function(x) for function in ((first, second) if x.shape[0] > 1 else (second, first))]


@pytest.mark.parametrize("step", [changed_lines, changed_names], ids=lambda step: step.__name__)
def test_collectives_that_change_places_are_refused(step):
    STRATEGY.run(step, args=(split(STRATEGY, [1, 1, 1, 1]),))
    message = r"different orders, or in different places.*shape \(2,\) reach .*py:\d+, the replicas .*call ctx\.all_reduce"
    with pytest.raises(mr.UnevenReplicasError, match=message):
        STRATEGY.run(step, args=(split(STRATEGY, [1, 1, 1]),))


def under_an_if(x):
    """Two paths of the code, with one collective of each shape."""
    if x.shape[0] == 0:
        return ctx().all_reduce("sum", jnp.zeros(())), ctx().all_reduce("sum", jnp.zeros(3))
    return ctx().all_reduce("sum", jnp.sum(x)), ctx().all_reduce("sum", jnp.full(3, jnp.mean(x)))


def of_other_shapes_in_a_helper(x):
    """A sum of four numbers is none of two, whatever goes into it."""
    values = [jnp.sum(x), jnp.tanh(jnp.exp(jnp.sum(x)))][:: 1 if x.shape[0] > 1 else -1]
    return [total(value * jnp.ones(size)) for value, size in zip(values, (2, 4), strict=True)]


def of_other_shapes(parts):
    values = [(np.sum(p), np.tanh(np.exp(np.sum(p))))[:: 1 if len(p) > 1 else -1] for p in parts]
    return [np.full(size, sum(row)) for size, row in zip((2, 4), zip(*values, strict=True), strict=True)]


def in_a_helper(x):
    """Layers that are alike, each with the own number of rows in what it sums."""
    return [total(factor * jnp.sum(x) / (1 + x.shape[0])) for factor in (1, 2, 3)]


def a_shortcut_in_a_helper(x):
    """A helper that does something simpler where there are no rows."""
    mean = lambda value: jnp.mean(value) if value.size else jnp.zeros(())  # noqa: E731
    return [total(mean(f(x))) for f in (jnp.sin, jnp.cos, lambda x: x)]


def mean_or_0(part):
    return np.mean(part) if len(part) else 0.0


RIGHT = {
    under_an_if: lambda parts: (sum(map(np.sum, parts)), np.full(3, sum(map(mean_or_0, parts)))),
    of_other_shapes_in_a_helper: of_other_shapes,
    in_a_helper: lambda parts: [sum(factor * np.sum(p) / (1 + len(p)) for p in parts) for factor in (1, 2, 3)],
    a_shortcut_in_a_helper: lambda parts: [sum(mean_or_0(f(p)) for p in parts) for f in (np.sin, np.cos, np.copy)],
}


@pytest.mark.parametrize("rows", [[1, 2, 4], [1]], ids=str)
def test_collectives_in_one_order_are_taken(rows):
    parts = np.array_split(np.asarray(rows, np.float32), 2)
    for step, expected in RIGHT.items():
        results = STRATEGY.run(step, args=(split(STRATEGY, rows),))
        for result, value in zip(results, expected(parts), strict=True):
            np.testing.assert_allclose(result, value, rtol=1e-5)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_replica_without_rows_takes_no_gradient_of_a_mean_over_its_own_rows(num_replicas):
    """With losses that see the rows of all replicas the message names the loss that has one."""
    strategy, x = STRATEGIES[num_replicas], data(max(1, num_replicas - 1))

    def gradient_of(word):
        def loss(w, x):
            everyone = ctx().all_gather(jnp.tanh(x * w), axis=0)
            return word(jnp.mean((x[:, None] * w - everyone) ** 2, axis=(1, 2)))

        return lambda x: total(jax.grad(loss)(jnp.float32(0.5), x))

    def own_mean(losses):
        return mr.losses.mean_over_own_rows(losses.mean())

    one = strategy_of(1).run(gradient_of(own_mean), args=(split(STRATEGIES[1], x),))
    kept = strategy.run(gradient_of(mr.losses.compute_average_loss), args=(split(strategy, x),))
    np.testing.assert_allclose(kept, one, rtol=1e-5)
    if num_replicas == 1:
        return
    message = r"no gradient of mr\.losses\.mean_over_own_rows, at .*py:\d+, .*write mr\.losses\.compute_average_loss\(per_ex"
    with pytest.raises(mr.UnevenReplicasError, match=message):
        strategy.run(gradient_of(own_mean), args=(split(strategy, x),))
    no_collective = lambda x: total(jax.grad(lambda w: own_mean((x * w).sum(1)))(2.0))  # noqa: E731
    np.testing.assert_allclose(strategy.run(no_collective, args=(split(strategy, x),)), x.sum(1).mean(), rtol=1e-5)
