"""A mean over the replicas is recognized by where JAX made its equations, also after JAX has transformed them."""

import jax
import jax.numpy as jnp

from mirrored._jax import jaxprs, means


def pmean(x):
    """Have the name of JAX's function."""
    return x - jax.lax.psum(x, "replica") / 2


def inside(function, x):
    closed = jax.make_jaxpr(function, axis_env=[("replica", 2)])(x)
    names = [e.primitive.name for e in jaxprs.all_equations(closed.jaxpr) if means.is_of_mean(e)]
    return [name for name in names if name in ("psum", "div")]


def test_the_equations_of_a_mean_are_known_in_gradients_loops_and_calls():
    def loss(x):
        return jnp.sum(jnp.tanh(x - jax.lax.pmean(x, "replica")))

    x, forward, both = jnp.ones(3), ["psum", "div"], ["psum", "div", "div", "psum"]
    assert inside(loss, x) == forward
    for function in (jax.grad(loss), jax.grad(jax.jit(loss)), jax.jit(jax.grad(loss)), jax.grad(jax.checkpoint(loss))):
        assert inside(function, x)[-4:] == both
    assert inside(lambda x: jax.lax.fori_loop(0, 2, lambda i, x: jax.lax.pmean(x, "replica"), x), x) == forward


def test_a_sum_divided_by_hand_is_none():
    assert inside(pmean, jnp.ones(3)) == []
