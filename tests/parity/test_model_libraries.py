"""A model of Flax NNX, Linen or Equinox trains on any number of replicas, with any batch, to the weights of one device."""

import difflib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import mirrored as mr

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
#: What one learns with in the examples makes much of rounding where a gradient is zero; with this weights can be compared.
TX = optax.sgd(0.1, momentum=0.9)
SIZES = [10] * 18 + [7, 3]  # the last has fewer rows than replicas; none is divided by three or four


def digits(axis: int) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.expand_dims(data.images.astype(np.float32) / 16, axis), data.target


def total(tree: Any) -> Any:
    return mr.get_replica_context().all_reduce("sum", tree)


def cross_entropy(logits: jax.Array, batch: dict[str, Any]) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return mr.losses.compute_average_loss(losses) if mr.has_strategy() else losses.mean()


def nnx_weights(strategy: mr.Strategy | None) -> list[np.ndarray]:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.conv = nnx.Conv(1, 4, (3, 3), use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.out = nnx.Linear(4 * 64, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(nnx.relu(self.norm(self.conv(x))).reshape(-1, 4 * 64))

    def step(model: Any, optimizer: Any, batch: dict[str, Any]) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch["image"]), batch))(model)
        loss, grads = total((loss, grads)) if strategy else (loss, grads)
        optimizer.update(model, grads)
        return loss

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    run = nnx.jit(step) if strategy is None else lambda *args: strategy.run(step, args=args)
    for batch in batches(strategy, -1):
        run(model, optimizer, batch)
    return jax.tree.leaves(nnx.as_pure(nnx.state(model, (nnx.Param, nnx.BatchStat))))


def linen_weights(strategy: mr.Strategy | None) -> list[np.ndarray]:
    import flax.linen as nn
    from flax.training import train_state

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
            x = nn.Conv(4, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            return nn.Dense(10)(x.reshape(-1, 4 * 64))

    class TrainState(train_state.TrainState):
        batch_stats: Any

    def step(state: Any, batch: dict[str, Any]) -> Any:
        def loss_of(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
            return cross_entropy(logits, batch), new

        grads, new = jax.grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=total(grads) if strategy else grads, batch_stats=new["batch_stats"])

    variables = Net().init(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32), train=False)
    state = TrainState.create(apply_fn=Net().apply, tx=TX, **variables)
    if strategy is None:
        for batch in batches(None, -1):
            state = jax.jit(step)(state, batch)
        return jax.tree.leaves((state.params, state.batch_stats))
    with strategy.scope():
        kept = mr.Variable(state.replace(step=jax.numpy.asarray(0)), name="state")
    for batch in batches(strategy, -1):
        strategy.run(lambda batch: kept.assign(step(kept.value, batch)) and None, args=(batch,))
    strategy.assert_mirrored()
    return jax.tree.leaves((kept.value.params, kept.value.batch_stats))


def equinox_weights(strategy: mr.Strategy | None) -> list[np.ndarray]:
    import equinox as eqx

    class Net(eqx.Module):
        conv: eqx.nn.Conv2d
        norm: eqx.nn.BatchNorm
        out: eqx.nn.Linear

        def __init__(self, key: jax.Array) -> None:
            first, second = jax.random.split(key)
            self.conv = eqx.nn.Conv2d(1, 4, 3, padding=1, use_bias=False, key=first)
            self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
            self.out = eqx.nn.Linear(4 * 64, 10, key=second)

        def __call__(self, x: jax.Array, state: Any) -> Any:
            x, state = self.norm(self.conv(x), state)
            return self.out(jax.nn.relu(x).reshape(-1)), state

    def loss_of(model: Any, state: Any, batch: dict[str, Any]) -> Any:
        logits, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch["image"], state)
        return cross_entropy(logits, batch), state

    def step(model: Any, state: Any, opt_state: Any, batch: dict[str, Any]) -> Any:
        grads, state = eqx.filter_grad(loss_of, has_aux=True)(model, state, batch)
        updates, opt_state = TX.update(total(grads) if strategy else grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state

    kept = (*eqx.nn.make_with_state(Net)(jax.random.key(0)), None)
    kept = (*kept[:2], TX.init(eqx.filter(kept[0], eqx.is_inexact_array)))
    run = eqx.filter_jit(step) if strategy is None else lambda *args: strategy.run(step, args=args)
    for batch in batches(strategy, 1):
        kept = run(*kept, batch)
    return jax.tree.leaves(eqx.filter(kept[:2], eqx.is_array))


def batches(strategy: mr.Strategy | None, axis: int) -> Iterator[Any]:
    images, labels = digits(axis)
    starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    own = [{"image": images[s : s + n], "label": labels[s : s + n]} for s, n in zip(starts, SIZES, strict=True)]
    if axis == 1:  # under jax.vmap, as Equinox has it, a replica without rows is refused
        own = [batch for batch in own if len(batch["label"]) >= 8]
    yield from own if strategy is None else strategy.distribute_dataset(own)


LIBRARIES = {"nnx": nnx_weights, "linen": linen_weights, "equinox": equinox_weights}


@functools.cache
def alone(library: str) -> list[np.ndarray]:
    return LIBRARIES[library](None)


@pytest.mark.slow
@pytest.mark.parametrize(("library", "num_replicas"), [("nnx", 3), ("nnx", 8), ("linen", 2), ("linen", 8), ("equinox", 5)])
def test_weights_are_those_of_one_device(library: str, num_replicas: int) -> None:
    pytest.importorskip("equinox" if library == "equinox" else "flax")
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    for ours, one in zip(LIBRARIES[library](strategy), alone(library), strict=True):
        np.testing.assert_allclose(ours, one, atol=1e-5)


def run_example(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return capsys.readouterr().out.split("\n")


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_example_is_its_single_device_twin_with_five_lines_changed(library: str) -> None:
    ours, alone = EXAMPLES / f"{library}_digits.py", EXAMPLES / "single_device" / f"{library}_digits.py"
    bodies = [path.read_text().split('"""\n', 1)[1].splitlines() for path in (alone, ours)]
    new = [line[2:] for line in difflib.ndiff(*bodies) if line.startswith("+ ")]
    assert len([line for line in new if line.strip() and line != "import mirrored as mr"]) == 5
    assert len(ours.read_text().splitlines()) <= 120


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_an_example_learns_what_its_twin_learns(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    ours, alone = (run_example(path / f"{library}_digits.py", capsys) for path in (EXAMPLES, EXAMPLES / "single_device"))
    assert ours[-2] == alone[-2] and "of 360 held-out images right" in ours[-2]
