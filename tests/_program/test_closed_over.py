"""Steps may close over arrays of strategies, and compute with them whatever JAX can."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored import testing


def merged(one, x):
    def merge(strategy, rows):
        return strategy.reduce("sum", rows) + jax.nn.relu(one)

    return mr.get_replica_context().merge_call(merge, args=(x.sum(0),))


USES = {
    "a jitted function": lambda x, one: jax.nn.relu(one) * x,
    "in an inner closure": lambda x, one: jax.jit(lambda y: jax.nn.relu(one) * y)(x) * x,
    "together with an argument": lambda x, one: jax.jit(jnp.multiply)(x, one) + x,
    "where": lambda x, one: x + jnp.where(one > 0, one, 0),
    "a sorted one": lambda x, one: jnp.sort(one) + jnp.zeros_like(one) + x,
    "a gradient": lambda x, one: jax.grad(lambda w: jnp.sum(jax.nn.silu(w * one) * x))(one) + x,
    "a checkpoint": lambda x, one: jax.checkpoint(lambda y: jax.nn.relu(y * one))(x),
    "vmap": lambda x, one: jax.vmap(lambda row: jax.nn.relu(row * one))(x),
    "scan": lambda x, one: jax.lax.scan(lambda c, y: (jax.nn.relu(c * one + y), c), one, jnp.ones((3, 2)))[0] + x,
    "cond": lambda x, one: jax.lax.cond(x.sum() > 0, lambda: jax.nn.relu(one), lambda: x.sum(0)) + x,
    "while": lambda x, one: jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c + jax.nn.relu(one), x.sum(0) + one) + x,
    "a collective": lambda x, one: mr.get_replica_context().all_reduce("sum", jax.nn.relu(x.sum(0) * one)) + x,
    "merge_call": lambda x, one: merged(one, x) + x,
}


@pytest.mark.slow
def test_a_step_computes_with_an_array_that_it_closes_over(strategy3) -> None:
    values = np.array([3.0, -1.0], np.float32)
    of_this = strategy3.run(lambda v: v, args=(values,))
    of_another = mr.MirroredStrategy(["cpu:4", "cpu:5"]).run(lambda v: v, args=(values,))
    on_one_device = jax.device_put(values, jax.devices()[2])
    for sizes, one, names in (
        ((2, 2, 2), of_this, tuple(USES)),
        ((2, 2, 2), of_another, ("a jitted function",)),
        ((2, 2, 2), on_one_device, ("a jitted function",)),
        ((1, 3, 0), of_this, ("a gradient", "a collective", "merge_call")),
        ((1, 3, 0), of_another, ("a jitted function",)),
    ):
        rows = [np.arange(2 * size, dtype=np.float32).reshape(size, 2) for size in sizes]
        x = strategy3.distribute_values_from_function(lambda c, rows=rows: rows[c.replica_id_in_sync_group])
        uses = lambda x, one, names=names: {name: USES[name](x, one) for name in names}  # noqa: E731
        closing = lambda x, one=one, uses=uses: uses(x, one)  # noqa: E731
        expected = strategy3.run(uses, args=(x, values))
        for found in (strategy3.run(closing, args=(x,)), mr.function(lambda x, c=closing: strategy3.run(c, args=(x,)))(x)):
            for name in names:
                for own, wanted in zip(found[name].values, expected[name].values, strict=True):
                    np.testing.assert_allclose(own, wanted, rtol=1e-6, err_msg=name)


def test_what_is_computed_of_a_closed_over_array_is_still_known_to_be_the_same(strategy3) -> None:
    one = strategy3.reduce("sum", np.float32(1))
    with strategy3.scope():
        v = mr.Variable(0.0)
    strategy3.run(lambda: v.assign(jax.nn.relu(one) * 2))
    assert float(v) == 6.0


class Layer:
    def __init__(self, w: Any) -> None:
        self.w, self.other, self.result = w, 0, None

    def step(self, x: Any) -> Any:
        return jnp.sum(x * self.w)


ONE = np.ones(2, np.float32)


def test_what_was_not_read_of_an_object_may_change_and_compiles_nothing(strategy2) -> None:
    layer = Layer(jnp.asarray(ONE))
    strategy2.run(layer.step, args=(ONE,))
    with testing.assert_compiles(0):
        for count in range(3):
            layer.other, layer.new = count, jnp.ones(count)
            layer.result = strategy2.run(layer.step, args=(ONE,))


def test_an_object_that_a_step_only_counts_with_or_that_holds_itself_is_no_obstacle(strategy2) -> None:
    layer = Layer(jnp.asarray(ONE))
    layer.other, layer.itself = 0, layer

    def step(x: Any) -> Any:
        layer.other += 1
        return jnp.sum(x * layer.w)

    with testing.assert_compiles(1):
        for _ in range(3):
            strategy2.run(step, args=(ONE,))
    del layer.w
    with pytest.raises(AttributeError, match="no attribute 'w'"):
        strategy2.run(step, args=(ONE,))
