"""JAX says of each equation whether it carries a gradient back, also in calls, in loops and under `jax.checkpoint`."""

import jax
import jax.numpy as jnp
import pytest

from mirrored._jax import jaxprs
from mirrored._jax.ways import Way, path_of, way_of


def norm(x):
    return x - jax.lax.psum(x, "replica")


def loss(x):
    return jnp.sum(norm(jnp.tanh(x)) ** 3)


def scanned(x):
    return jnp.sum(jax.lax.scan(lambda c, _: (norm(jnp.tanh(c)), None), x, length=2)[0] ** 3)


@jax.custom_vjp
def by_hand(x):
    return norm(x)


by_hand.defvjp(lambda x: (norm(x), x), lambda x, g: (g * jax.lax.psum(x, "replica"),))


def ways(jaxpr, path=""):
    found = []
    for equation in jaxpr.eqns:
        own = path_of(path, equation)
        found += [way_of(own, equation)] if equation.primitive.name == "psum" else []
        for inner in jaxprs.inner_jaxprs(equation):
            found += ways(inner.jaxpr, own)
    return found


FORWARD, BACKWARD, UNCLEAR = Way.FORWARD, Way.BACKWARD, Way.UNCLEAR
FUNCTIONS = {
    "loss": (loss, [FORWARD]),
    "gradient": (jax.grad(loss), [FORWARD, BACKWARD]),
    "vjp": (lambda x: jax.vjp(loss, x)[1](1.0), [FORWARD, BACKWARD]),
    "in jit": (jax.grad(jax.jit(loss)), [FORWARD, BACKWARD]),
    "jitted": (jax.jit(jax.grad(loss)), [FORWARD, BACKWARD]),
    "named": (jax.grad(jax.named_scope("transposed")(loss)), [FORWARD, BACKWARD]),
    "checkpointed": (jax.grad(jax.checkpoint(loss)), [FORWARD, FORWARD, BACKWARD]),
    "scanned": (jax.grad(scanned), [FORWARD, BACKWARD]),
    "by hand": (jax.grad(lambda x: jnp.sum(by_hand(x))), [FORWARD, UNCLEAR]),
    "of a gradient": (jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2)), [FORWARD, UNCLEAR, UNCLEAR, BACKWARD]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_way_of_each_sum_over_the_replicas(name):
    function, expected = FUNCTIONS[name]
    assert ways(jax.make_jaxpr(function, axis_env=[("replica", 2)])(jnp.ones(3)).jaxpr) == expected
