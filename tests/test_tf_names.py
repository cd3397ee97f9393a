"""Names of TensorFlow's work, or say what to write; what they say to write exists."""

import copy
import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import variable

import mirrored as mr
from mirrored import _tf_names

STRATEGY = mr.MirroredStrategy(["cpu:0", "cpu:1"])
VARIABLE = variable(np.ones((3, 2), np.float32), STRATEGY, name="v")
OPTIMIZER = mr.Optimizer(optax.sgd(0.1), [VARIABLE])
OWNERS = {
    "mirrored": mr,
    "mr.Strategy": STRATEGY,
    "mr.Variable": VARIABLE,
    "mr.Optimizer": OPTIMIZER,
    "mr.ReplicaContext": mr.get_replica_context(),
    "mr.data.NumpyDataset": STRATEGY.make_numpy_dataset(np.arange(4)).batch(2),
}
OWNERS["mr.data.DistributedDataset"] = STRATEGY.distribute_dataset(OWNERS["mr.data.NumpyDataset"])
OWNERS["mr.data.DistributedIterator"] = iter(OWNERS["mr.data.DistributedDataset"])


@pytest.mark.parametrize("owner", OWNERS)
def test_a_name_that_makes_no_sense_here_says_what_to_write(owner: str) -> None:
    for name, sentence in _tf_names.INSTEAD[owner].items():
        if name == "testing":  # which is there when somebody has imported it
            continue
        with pytest.raises(AttributeError) as caught:
            getattr(OWNERS[owner], name)
        assert str(caught.value) == f"{owner} has no attribute {name!r}. {sentence}", name
        assert not hasattr(OWNERS[owner], name) and getattr(OWNERS[owner], name, 5) == 5
    with pytest.raises(AttributeError, match=rf"^{owner} has no attribute 'nonsense'$"):
        OWNERS[owner].nonsense


def test_an_argument_of_tensorflows_says_what_to_write_and_the_others_work() -> None:
    for name, sentence in _tf_names.INSTEAD["mr.InputOptions"].items():
        with pytest.raises(TypeError, match=re.escape(f"mr.InputOptions has no argument {name!r}. {sentence}")):
            mr.InputOptions(**{name: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch'"):
        mr.InputOptions(batch=3)
    assert list(inspect.signature(mr.InputOptions).parameters) == ["drop_remainder", "prefetch", "auto_shard_policy"]
    assert dataclasses.replace(mr.InputOptions(), prefetch=0) == copy.deepcopy(mr.InputOptions(prefetch=0))


def test_the_names_that_are_said_to_be_written_exist() -> None:
    """Each `x.name` in a sentence, of what is known under this name in the sentences."""
    known = {
        "mr": mr, "strategy": STRATEGY, "variable": VARIABLE, "optimizer": OPTIMIZER, "ctx": mr.get_replica_context(), "jnp": jnp,
        "jax": jax, "np": np, "optax": optax, "iterator": OWNERS["mr.data.DistributedIterator"],
    }  # fmt: skip
    said = {
        (owner, name)
        for sentences in _tf_names.INSTEAD.values()
        for sentence in sentences.values()
        for owner, name in re.findall(r"\b(\w+)\.(\w+)", sentence)
        if owner in known
    }
    assert len(said) > 30 and [(owner, name) for owner, name in said if not hasattr(known[owner], name)] == []


def test_any_other_experimental_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"'experimental_prefetch'\. Names have no `experimental_` here"):
        STRATEGY.experimental_prefetch


def test_in_a_step_they_say_it_too() -> None:
    for step, message in (
        (lambda: STRATEGY.extended, "strategy.devices for extended.worker_devices"),
        (lambda: VARIABLE.sparse_read([0]), r"Write variable\[indices\]"),
        (lambda: mr.get_replica_context().devices, r"Write ctx\.strategy\.devices"),
        (lambda: mr.RunOptions(), "strategy.run takes no options"),
    ):
        with pytest.raises(AttributeError, match=message):
            STRATEGY.run(step)
    with pytest.raises(ImportError):
        exec("from mirrored import RunOptions")


def test_the_mesh_is_jaxs_own(strategy3: mr.MirroredStrategy) -> None:
    mesh = strategy3.mesh
    assert isinstance(mesh, jax.sharding.Mesh) and mesh.axis_names == ("replica",)
    assert tuple(mesh.devices.flat) == strategy3.devices
    rows = jax.device_put(np.arange(6.0), jax.NamedSharding(mesh, jax.P("replica")))
    total = jax.shard_map(lambda x: jax.lax.psum(x.sum(), "replica"), mesh=mesh, in_specs=jax.P("replica"), out_specs=jax.P())(
        rows
    )
    assert float(total) == 15
    with pytest.raises(AttributeError):
        strategy3.mesh = mesh
