"""BatchNorm layers of Linen and Equinox see the rows of all replicas in a step, and are as they were outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("in_numpy")

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
X[4:] += 3


def halves(strategy):
    return strategy.distribute_values_from_function(lambda ctx: X[4 * ctx.replica_id_in_sync_group :][:4])


def test_a_linen_layer_in_a_jit_has_the_statistics_of_all_rows_in_steps_only(strategy2):
    nn = pytest.importorskip("flax.linen")
    net = nn.BatchNorm(use_running_average=False)
    variables = net.init(jax.random.key(0), X)
    jitted = jax.jit(lambda x: net.apply(variables, x, mutable="batch_stats"))
    alone, stats = jitted(X)
    for _ in range(2):
        ours, new = strategy2.run(jitted, args=(halves(strategy2),))
        np.testing.assert_allclose(strategy2.gather(ours, axis=0), alone, atol=1e-5)
        np.testing.assert_allclose(new["batch_stats"]["var"], stats["batch_stats"]["var"], atol=1e-5)
        np.testing.assert_allclose(jitted(X)[0], alone)


def test_a_linen_layer_with_an_axis_name_is_left_alone(strategy2):
    nn = pytest.importorskip("flax.linen")
    net = nn.BatchNorm(use_running_average=False, axis_name="one", use_bias=False, use_scale=False)
    apply = jax.vmap(lambda x: net.apply({}, x, mutable="batch_stats")[0], axis_name="one")
    ours = strategy2.run(lambda x: apply(x[None])[0], args=(halves(strategy2),))
    np.testing.assert_allclose(strategy2.gather(ours, axis=0)[4:], apply(X[None, 4:])[0], atol=1e-5)


def test_an_equinox_layer_normalizes_over_the_replicas_besides(strategy2):
    eqx = pytest.importorskip("equinox")
    for axis_name in (("batch",), ("batch", "replica")):
        layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name, mode="batch")
        call = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        ours, new = strategy2.run(lambda x, call=call, state=state: call(x, state), args=(halves(strategy2),))
        if "replica" not in axis_name:
            alone, old = call(jnp.asarray(X), state)
            np.testing.assert_allclose(strategy2.gather(ours, axis=0), alone, atol=1e-5)
            np.testing.assert_allclose(jax.tree.leaves(new)[1], jax.tree.leaves(old)[1], atol=1e-5)
        assert layer.axis_name == axis_name
