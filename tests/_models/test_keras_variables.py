"""Keras variables outside of steps: they are read and written where plain Keras would, but not baked into a `jax.jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr

keras = pytest.importorskip("keras")

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS = np.random.default_rng(0).standard_normal((4, 5, 3)).astype(np.float32)
layers = keras.layers
LAYERS: dict[str, Callable[[], Any]] = {
    "stateful": lambda: layers.SimpleRNN(2, stateful=True),
    "spectral": lambda: layers.SpectralNormalization(layers.Dense(2)),
}


def numbers(layer: Any, strategy: mr.Strategy | None = None) -> list[Any]:
    """Call a layer twice, change its variables, and call it again; a stateful one goes on where it was."""
    own = {"training": True} if isinstance(layer, layers.SpectralNormalization) else {}
    outputs = [np.asarray(layer(ROWS, **own)), np.asarray(layer(ROWS, **own))]
    if strategy is not None:
        strategy.run(lambda: [v.assign(v * 0.5) for v in layer.trainable_variables])
    else:
        for variable in layer.trainable_variables:
            variable.assign(variable * 0.5)
    return [*outputs, np.asarray(layer(ROWS, **own))]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_scans_is_called_outside_of_a_step(name: str, strategy3: mr.Strategy) -> None:
    keras.utils.set_random_seed(0)
    expected = numbers(LAYERS[name]())
    keras.utils.set_random_seed(0)
    with strategy3.scope():
        layer = LAYERS[name]()
        found = numbers(layer)  # in the scope
    np.testing.assert_allclose(found, expected, atol=1e-6)
    keras.utils.set_random_seed(0)
    with strategy3.scope():
        layer = LAYERS[name]()
    np.testing.assert_allclose(numbers(layer, strategy3), expected, atol=1e-6)  # after it, and after a step


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
