"""The ways in which `libraries.py` and `models.py` train a model of another library."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from _harness import Contender, Row, check_losses, interleave, print_table, show_seconds
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mirrored as mr

ADAM = optax.adam(1e-3)

#: A global batch: the examples and their labels.
Rows = tuple[np.ndarray, np.ndarray]
#: `(state, batch, sum over replicas, this replica's share of losses) -> (state, loss)`.
Step = Callable[[Any, Any, Callable[[Any], Any], Callable[[jax.Array], jax.Array]], tuple[Any, jax.Array]]


def compare(
    title: str, contenders: list[Contender], goal: float | None, rounds: int, turn: float, tolerance: float = 1e-3
) -> None:
    """Print the table of contenders that compute the same losses; the first one is the reference."""
    check_losses(contenders, num_steps=2, tolerance=tolerance)
    times = interleave(contenders, rounds, turn)
    reference = contenders[0].name
    rows = [
        Row(c.name, show_seconds(times.median(c.name)), times.ratios(c.name, reference), goal if c.name == "mirrored" else None)
        for c in contenders
    ]
    print_table(f"{title}, {rounds} rounds; ratio to {reference}", rows)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def by_hand(step: Step, state: Any, rows: Rows, num_replicas: int) -> Contender:
    mesh = Mesh(np.array(jax.devices()[:num_replicas]), ("data",))
    everywhere, split = PartitionSpec(), PartitionSpec("data")

    def replica_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        return step(state, batch, lambda tree: jax.lax.psum(tree, "data"), lambda losses: jnp.sum(losses) / len(rows[0]))

    mapped = jax.shard_map(
        replica_step, mesh=mesh, in_specs=(everywhere, split), out_specs=(everywhere, everywhere), check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=0)
    held = jax.device_put(jax.tree.map(np.asarray, state), NamedSharding(mesh, everywhere))
    placed = jax.device_put(rows, NamedSharding(mesh, split))

    def run(num_steps: int) -> float:
        nonlocal held
        for _ in range(num_steps):
            held, loss = compiled(held, placed)
        return float(loss)

    return Contender("by hand", run)


def add_up(tree: Any) -> Any:
    return mr.get_replica_context().all_reduce("sum", tree)


def as_argument(strategy: mr.Strategy, step: Step, state: Any, rows: Rows) -> Contender:
    """The state is an argument that comes back, and is donated."""
    [batch] = strategy.distribute_dataset([rows])
    held = state
    whole = jax.jit(lambda state, batch: step(state, batch, add_up, mr.losses.compute_average_loss), donate_argnums=0)

    def run(num_steps: int) -> float:
        nonlocal held
        for _ in range(num_steps):
            held, loss = strategy.run(whole, args=(held, batch))
        return float(loss)

    return Contender("mirrored", run)


def in_variable(strategy: mr.Strategy, step: Step, state: Any, rows: Rows) -> Contender:
    """The state is a variable: its arrays are donated."""
    [batch] = strategy.distribute_dataset([rows])
    with strategy.scope():
        held = mr.Variable(jax.tree.map(jnp.copy, state))

    def train(batch: Any) -> jax.Array:
        new, loss = step(held.value, batch, add_up, mr.losses.compute_average_loss)
        held.assign(new)
        return loss

    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            loss = strategy.run(train, args=(batch,))
        return float(loss)

    return Contender("mirrored, in a mr.Variable", run)


def with_mirrored(strategy: mr.Strategy, step: Step, state: Any, rows: Rows) -> list[Contender]:
    return [as_argument(strategy, step, state, rows), in_variable(strategy, step, state, rows)]


def nnx_steps(strategy: mr.Strategy, make: Callable[[str | None], nnx.Module], rows: Rows) -> list[Contender]:
    """Steps of a Flax NNX model, which `make` makes for an axis of the replicas: by hand with its state, and as an object."""

    def update(net: Any, optimizer: Any, batch: Any, total: Any, share: Any) -> jax.Array:
        x, y = batch
        loss, gradients = total(nnx.value_and_grad(lambda net: share(cross_entropy(net(x), y)))(net))
        optimizer.update(net, gradients)
        return loss

    def made(axis_name: str | None) -> tuple[Any, Any]:
        net = make(axis_name)
        return net, nnx.Optimizer(net, ADAM, wrt=nnx.Param)

    graph, state = nnx.split(made("data"))

    def step(state: Any, batch: Any, total: Any, share: Any) -> tuple[Any, jax.Array]:
        both = nnx.merge(graph, state)
        loss = update(*both, batch, total, share)
        return nnx.state(both), loss

    net, optimizer = made(None)
    [batch] = strategy.distribute_dataset([rows])
    train = nnx.jit(
        lambda net, optimizer, batch: update(net, optimizer, batch, add_up, mr.losses.compute_average_loss), donate_argnums=(0, 1)
    )

    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            loss = strategy.run(train, args=(net, optimizer, batch))
        return float(loss)

    alone = [] if strategy.num_replicas_in_sync > 1 else [with_nnx_jit(*made(None), rows, update)]
    return [by_hand(step, state, rows, strategy.num_replicas_in_sync), *alone, Contender("mirrored", run)]


def with_nnx_jit(net: Any, optimizer: Any, rows: Rows, update: Callable[..., jax.Array]) -> Contender:
    """The library's own way for one device, which takes objects, as `mirrored` does."""
    batch = jax.device_put(rows)
    train = nnx.jit(lambda net, optimizer, batch: update(net, optimizer, batch, lambda tree: tree, jnp.mean))

    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            loss = train(net, optimizer, batch)
        return float(loss)

    return Contender("nnx.jit", run)


def keras_fits(strategy: mr.Strategy, make_model: Callable[[], Any], rows: Rows, num_batches: int) -> list[Contender]:
    """Epochs of Keras' `fit`, in the scope of Keras' own DataParallel (of none, for one replica), and in ours."""
    x, y = (np.concatenate([array] * num_batches) for array in rows)
    devices = [f"cpu:{i}" for i in range(strategy.num_replicas_in_sync)]
    own_name, own_scope = "Keras alone", contextlib.nullcontext
    if len(devices) > 1:
        own_name = "keras.distribution.DataParallel"
        own_scope = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False).scope

    def fitting(name: str, scope: Callable[[], Any]) -> Contender:
        keras.utils.set_random_seed(0)
        with scope():
            model = make_model()
            model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

        def run(num_epochs: int) -> float:
            with scope():
                history = model.fit(x, y, batch_size=len(rows[0]), epochs=num_epochs, shuffle=False, verbose=0)
            return float(history.history["loss"][-1])

        return Contender(name, run)

    return [fitting(own_name, own_scope), fitting("mirrored", strategy.scope)]
