"""What variables hold goes out as plain arrays, without copies, and in again."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mirrored as mr
from mirrored import testing


@pytest.fixture
def params(strategy2):
    with strategy2.scope():
        return {
            "w": mr.Variable(np.ones((3, 2), np.float32)),
            "layers": [mr.Variable({"b": np.zeros(2, np.float32), "name": "out"})],
        }


def addresses(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_arrays_are_those_of_the_variables_and_stay_when_these_change(strategy2, params):
    first, second = mr.export(params), mr.export(params)
    assert addresses(first["w"]) == addresses(second["w"]) and first["w"].sharding.is_fully_replicated
    assert first["layers"][0]["name"] == "out"
    strategy2.run(lambda: [params["w"].assign(params["w"] * 2)])
    np.testing.assert_array_equal(first["w"], np.ones((3, 2)))
    np.testing.assert_array_equal(mr.export(params["w"]), np.full((3, 2), 2))
    params["w"].assign(first["w"])
    params["layers"][0].assign(jax.tree.map(lambda leaf: leaf, first["layers"][0]))
    testing.assert_equal_copies(params["w"])


def test_a_step_by_hand_goes_on_with_them_beside_ours(strategy2, params):
    x = np.arange(12, dtype=np.float32).reshape(4, 3)

    def loss(arrays, x):
        return jnp.mean((x @ arrays["w"] + arrays["layers"][0]["b"]) ** 2)

    def by_hand(arrays, x):
        grads = jax.grad(lambda w: loss({**arrays, "w": w}, x[0]))(arrays["w"])
        return jax.lax.pmean(grads, "replica")

    batch = mr.export(next(iter(strategy2.distribute_dataset([x]))))
    arrays = jax.tree.map(jnp.asarray, {"w": mr.export(params["w"]), "layers": [{"b": mr.export(params["layers"][0])["b"]}]})
    step = jax.jit(jax.shard_map(by_hand, mesh=strategy2.mesh, in_specs=(P(), P("replica")), out_specs=P(), check_vma=False))
    alone = jax.grad(lambda w: loss({**arrays, "w": w}, x))(np.ones((3, 2), np.float32))
    np.testing.assert_allclose(step(arrays, batch), alone, rtol=1e-6)
    assert jax.vmap(lambda w: w.sum())(arrays["w"]).shape == (3,)


def test_optimizers_sync_on_read_variables_keys_and_everything_else(strategy2):
    with strategy2.scope():
        w = mr.Variable(np.ones(2, np.float32))
        optimizer = mr.Optimizer(optax.adam(0.1), [w])
        count = mr.Variable(0, synchronization="on_read", aggregation="sum")
        key = mr.Variable(jax.random.key(1))
    strategy2.run(lambda: [count.assign_add(1)])
    out = mr.export({"o": optimizer, "count": count, "key": key, "n": 3, "none": None, "array": np.ones(1)})
    assert jax.tree.structure(out["o"]) == jax.tree.structure(optax.adam(0.1).init([np.ones(2)]))
    assert int(out["count"]) == 2 and out["n"] == 3 and out["none"] is None
    assert jnp.array_equal(jax.random.key_data(out["key"]), jax.random.key_data(jax.random.key(1)))
    batches = iter(strategy2.distribute_dataset([np.ones((3, 1), np.float32)]))
    with pytest.raises(mr.UnevenReplicasError, match=r"strategy.gather\(value, axis=0\)"):
        mr.export(next(batches))


def test_models_of_nnx_and_keras(strategy2):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    out = mr.export({"model": model})
    assert out["model"]["['kernel']"] is model.kernel.get_value()
    keras = pytest.importorskip("keras")
    with strategy2.scope():
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
    assert mr.export(layer)["dense/kernel"].shape == (3, 2)
    del layer
    gc.collect()
