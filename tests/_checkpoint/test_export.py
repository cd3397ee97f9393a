"""What variables hold goes out as plain arrays, without copies, and in again."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr
from mirrored import testing

pytestmark = pytest.mark.usefixtures("in_numpy")


def addresses(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.by_xla
def test_arrays_are_those_of_the_variables_and_stay_when_these_change(strategy2):
    with strategy2.scope():
        layer = mr.Variable({"b": np.zeros(2, np.float32), "name": "out"})
        params = {"w": mr.Variable(np.ones((3, 2), np.float32)), "layers": [layer]}
    first, second = mr.export(params), mr.export(params)
    assert addresses(first["w"]) == addresses(second["w"]) and first["w"].sharding.is_fully_replicated
    assert first["layers"][0]["name"] == "out"
    strategy2.run(lambda: [params["w"].assign(params["w"] * 2)])
    np.testing.assert_array_equal(first["w"], np.ones((3, 2)))
    np.testing.assert_array_equal(mr.export(params["w"]), np.full((3, 2), 2))
    params["w"].assign(first["w"])
    layer.assign(jax.tree.map(lambda leaf: leaf, first["layers"][0]))
    testing.assert_equal_copies(params["w"])


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
    rows = np.arange(7, dtype=np.float32).reshape(7, 1)
    batches = iter(strategy2.distribute_dataset([rows[:4], rows[4:]]))
    np.testing.assert_array_equal(mr.export(next(batches)), rows[:4].reshape(2, 2, 1))
    with pytest.raises(mr.UnevenReplicasError, match=r"strategy.gather\(value, axis=0\)"):
        mr.export(next(batches))


def test_a_nest_of_variables_and_an_optimizer_take_their_arrays_back(strategy2):
    with strategy2.scope():
        variables = {"w": mr.Variable(np.ones(2, np.float32)), "layers": [mr.Variable(0.0)]}
        optimizer = mr.Optimizer(optax.adam(0.1), variables)
    for exported, nest in ((variables, variables), (optimizer, optimizer.state)):
        arrays = jax.tree.map(lambda array: array + 1, mr.export(exported))
        jax.tree.map(lambda array, variable: variable.assign(array), arrays, nest)
        assert jax.tree.all(jax.tree.map(np.array_equal, mr.export(exported), arrays))


def test_models_of_nnx_and_keras(strategy2):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    out = mr.export({"model": model})
    assert out["model"]["['kernel']"] is model.kernel.get_value()
    keras = pytest.importorskip("keras")
    with strategy2.scope():
        layer = keras.layers.Dense(2, name="exported")  # a name of its own: else it counts all layers of the process
        layer.build((None, 3))
    arrays = {path: array + 1 for path, array in mr.export(layer).items()}
    layer.set_weights([arrays[weight.path] for weight in layer.weights])
    assert arrays["exported/kernel"].shape == (3, 2) and np.array_equal(layer.kernel, arrays["exported/kernel"])
    del layer
    gc.collect()
