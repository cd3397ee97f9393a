"""Keras variables outside of steps: they are read and written where plain Keras would, but not baked into a `jax.jit`."""

import jax
import jax.numpy as jnp
import pytest

import mirrored as mr

keras = pytest.importorskip("keras")

pytestmark = [
    pytest.mark.usefixtures("in_numpy"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def test_what_is_traced_for_one_call_sees_the_value_of_this_moment(strategy3: mr.Strategy) -> None:
    with strategy3.scope():
        variable, total = keras.Variable(1.0), keras.metrics.Sum()
    ways = {
        "scan": lambda: jax.lax.scan(lambda c, x: (c + variable * x, None), jnp.float32(0), jnp.ones(1))[0],
        "cond": lambda: keras.ops.cond(jnp.asarray(True), lambda: variable + 0, lambda: variable * 0),
        "while": lambda: jax.lax.while_loop(lambda c: c < 0.5, lambda c: c + variable, jnp.float32(0)),
        "checkpoint": lambda: jax.checkpoint(lambda x: x * variable)(1.0),
        "a gradient": lambda: jax.grad(lambda y: jax.lax.scan(lambda c, x: (c + variable * y, c), 0.0, jnp.ones(1))[0])(2.0),
        "a metric": lambda: jax.lax.map(lambda x: x + total.variables[0].value, jnp.zeros(1))[0],
    }
    for value in (1.0, 5.0):
        variable.assign(value)
        total.reset_state()
        total.update_state(value)
        assert {name: float(way()) for name, way in ways.items()} == dict.fromkeys(ways, value)


def test_what_is_kept_is_refused(strategy3: mr.Strategy) -> None:
    with strategy3.scope():
        variable = keras.Variable(1.0)
    read = lambda x: x * variable  # noqa: E731
    kept = {
        "jit": jax.jit(read),
        "a scan in a jit": jax.jit(lambda x: jax.lax.map(read, x[None])),
        "a jit in a scan": lambda x: jax.lax.map(jax.jit(read), x[None]),
        "make_jaxpr": jax.make_jaxpr(read),
    }
    for way in kept.values():
        with pytest.raises(mr.ContextError, match=r"'variable.*' was read at .*test_keras_variables.* under a JAX transf"):
            way(jnp.float32(1))
    with pytest.raises(mr.ContextError, match=r"'variable.*' was written"):
        jax.lax.map(lambda x: variable.assign(x).value, jnp.ones(1))
    assert float(variable.value) == 1.0
