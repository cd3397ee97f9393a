"""Checkpoints take objects of Flax NNX as they are, and put their arrays back into them."""

import jax
import numpy as np
import optax
import pytest

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

nnx = pytest.importorskip("flax.nnx")


class Net(nnx.Module):
    def __init__(self, width=3):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(2, width, rngs=rngs), nnx.BatchNorm(width, rngs=rngs)])
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.drop(self.layers[1](self.layers[0](x)))


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    if mr.has_strategy():
        loss, grads = mr.get_replica_context().all_reduce("mean", (loss, grads), by_rows=True)
    optimizer.update(model, grads)
    return loss


def made():
    model = Net()
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), nnx.metrics.Average()


def arrays(*objects):
    return [
        np.asarray(jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a)
        for a in jax.tree.leaves(nnx.as_pure(nnx.state(list(objects))))
    ]


def test_training_goes_on_where_it_was_saved(strategy2, tmp_path):
    batches = list(
        strategy2.distribute_dataset([np.random.default_rng(i).normal(size=(4, 2)).astype(np.float32) for i in range(3)])
    )
    objects = made()
    state = {"epoch": 1, "model": objects[0]}
    with mr.Checkpoint(tmp_path, state=state, optimizer=objects[1], metrics=[objects[2]]) as checkpoint:
        strategy2.run(step, args=(*objects[:2], batches[0]))
        objects[2].update(values=np.ones(3, np.float32))
        checkpoint.save(1)
        saved = arrays(*objects)
        strategy2.run(step, args=(*objects[:2], batches[1]))
        after = arrays(*objects)
    new = made()
    kernel = new[0].layers[0].kernel
    restored = {"epoch": 0, "model": new[0]}
    with mr.Checkpoint(tmp_path, state=restored, optimizer=new[1], metrics=[new[2]]) as checkpoint:
        assert checkpoint.restore_latest() == 1
    assert restored["epoch"] == 1 and restored["model"] is new[0] and new[0].layers[0].kernel is kernel
    for a, b in zip(arrays(*new), saved, strict=True):
        np.testing.assert_array_equal(a, b)
    strategy2.run(step, args=(*new[:2], batches[1]))
    for a, b in zip(arrays(*new), after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_of_another_shape_is_refused_by_the_names_of_its_arrays(tmp_path):
    with mr.Checkpoint(tmp_path, model=Net()) as checkpoint:
        checkpoint.save(1)
    with (
        mr.Checkpoint(tmp_path, model=Net(width=4)) as checkpoint,
        pytest.raises(mr.CheckpointError, match=r"model\['layers'\]\[0\]\['kernel'\] is float32\[2, 4\] here"),
    ):
        checkpoint.restore_latest()
