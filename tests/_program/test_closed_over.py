"""Steps may close over arrays of strategies, and compute with them whatever JAX can."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import slow
from strategies import variable

import mirrored as mr


def merged(one, x):
    def merge(strategy, rows):
        return strategy.reduce("sum", rows) + jax.nn.relu(one)

    return mr.get_replica_context().merge_call(merge, args=(x.sum(0),))


#: Since jax 0.12 `searchsorted` is a primitive of which the jaxpr shows no more than the name.
SEARCHES = {
    "a search": lambda x, one: x * jnp.searchsorted(one, x),
    "a search in itself": lambda x, one: jnp.searchsorted(one, one) + x,
    "a search in an inner closure": lambda x, one: jax.jit(lambda: jnp.searchsorted(one, one))() + x,
    "the gradient of a search": lambda x, one: jax.grad(lambda y: (y * jnp.searchsorted(one, y)).sum())(x),
    "a search in a scan": lambda x, one: jax.lax.scan(lambda c, y: (c + jnp.searchsorted(one, y), y), x, one)[0],
}
USES = SEARCHES | {
    "a jitted function": lambda x, one: jax.nn.relu(one) * x,
    "in an inner closure": lambda x, one: jax.jit(lambda y: jax.nn.relu(one) * y)(x) * x,
    "together with an argument": lambda x, one: jax.jit(jnp.multiply)(x, one) + x,
    "where": lambda x, one: x + jnp.where(one > 0, one, 0),
    "a sorted one": lambda x, one: jnp.sort(one) + jnp.zeros_like(one) + x,
    "a gradient": lambda x, one: jax.grad(lambda w: jnp.sum(jax.nn.silu(w * one) * x))(one) + x,
    "a jacobian": lambda x, one: jax.vmap(jax.jacfwd(lambda row: jnp.sin(row) * one))(x),
    "a checkpoint": lambda x, one: jax.checkpoint(lambda y: jax.nn.relu(y * one))(x),
    "vmap": lambda x, one: jax.vmap(lambda row: jax.nn.relu(row * one))(x),
    "scan": lambda x, one: jax.lax.scan(lambda c, y: (jax.nn.relu(c * one + y), c), one, jnp.ones((3, 2)))[0] + x,
    "cond": lambda x, one: jax.lax.cond(x.sum() > 0, lambda: jax.nn.relu(one), lambda: x.sum(0)) + x,
    "while": lambda x, one: jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c + jax.nn.relu(one), x.sum(0) + one) + x,
    "a collective": lambda x, one: mr.get_replica_context().all_reduce("sum", jax.nn.relu(x.sum(0) * one)) + x,
    "merge_call": lambda x, one: merged(one, x) + x,
}
EVEN, UNEVEN, FEW = (2, 2, 2), (1, 3, 0), ("a jitted function", "a search", "a jacobian")
CASES = [
    ("of this", EVEN, tuple(SEARCHES)), ("of another", EVEN, FEW), ("of a variable", EVEN, FEW),
    *slow(
        ("of this", EVEN, tuple(USES)), ("on one device", EVEN, FEW), ("of another", UNEVEN, ("a jitted function",)),
        ("of this", UNEVEN, ("a gradient", "a collective", "merge_call")),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "sizes", "names"), CASES, ids=str)
def test_a_step_computes_with_an_array_that_it_closes_over(strategy3, owner, sizes, names):
    values = np.array([-1.0, 3.0], np.float32)
    w = variable(values, strategy3)
    one = {
        "of this": lambda: strategy3.run(lambda v: v, args=(values,)),
        "of another": lambda: mr.MirroredStrategy(["cpu:4", "cpu:5"]).run(lambda v: v, args=(values,)),
        "on one device": lambda: jax.device_put(values, jax.devices()[2]),
        "of a variable": lambda: w.value,
    }[owner]()
    rows = [np.arange(2 * size, dtype=np.float32).reshape(size, 2) for size in sizes]
    x = strategy3.distribute_values_from_function(lambda c: rows[c.replica_id_in_sync_group])
    uses = lambda x, one: {name: USES[name](x, one) for name in names}  # noqa: E731
    closing = lambda x: uses(x, one)  # noqa: E731
    expected = strategy3.run(uses, args=(x, values))
    for found in (strategy3.run(closing, args=(x,)), mr.function(lambda x: strategy3.run(closing, args=(x,)))(x)):
        for name in names:
            for own, wanted in zip(found[name].values, expected[name].values, strict=True):
                np.testing.assert_allclose(own, wanted, rtol=1e-6, err_msg=name)


def test_a_closed_over_array_is_whole_and_the_same_on_every_replica(strategy3):
    """Also one that lies in pieces on the strategy's own devices, under an inner jit."""
    of_each = strategy3.distribute_values_from_function(lambda _: 0.0)._array.sharding
    one, pieces = strategy3.reduce("sum", np.float32(1)), jax.device_put(np.arange(3.0, dtype="float32"), of_each)
    v = variable(np.zeros(3, "float32"), strategy3)
    strategy3.run(lambda: v.assign(jax.jit(lambda: pieces * 2)() + jax.nn.relu(one)))
    strategy3.assert_mirrored()
    assert v.numpy().tolist() == [3.0, 5.0, 7.0]
