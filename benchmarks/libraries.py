"""What does a step of a model of another library cost, next to the same library by hand with `jit(shard_map)` and donated state?

An MLP of eight layers and Adam in Flax NNX, Linen and Equinox, as their examples train it, and with the state in a `mr.Variable`;
Keras' `fit` next to Keras' own `keras.distribution.DataParallel`; plain JAX in bfloat16, and with gradients of four parts of
a batch added up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from _harness import Contender, Row, check_losses, interleave, parse, print_table, show_seconds
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mirrored as mr

WIDTH, DEPTH, BATCH = 256, 8, 64
ADAM = optax.adam(1e-3)
#: To the library by hand.
GOALS = {"NNX": 1.05, "Linen": 1.05, "Equinox": 1.05, "Keras fit": 0.95, "bfloat16": 1.03, "four parts": 1.03}

#: `(state, batch, sum over replicas, this replica's share of losses) -> (state, loss)`.
Step = Callable[[Any, Any, Callable[[Any], Any], Callable[[jax.Array], jax.Array]], tuple[Any, jax.Array]]


def main() -> None:
    options = parse(__doc__, replicas="2,8", only="", rounds=20, turn=0.1)
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    sizes = [2] if options.quick else [int(number) for number in options.replicas.split(",")]
    mr.MirroredStrategy([f"cpu:{i}" for i in range(max(sizes))])  # starts the backend with so many devices
    for num_replicas in sizes:
        strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        for name, make in MODELS.items():
            if options.only and name not in options.only.split(","):
                continue
            contenders = make(strategy)
            check_losses(contenders, num_steps=2, tolerance=5e-2 if name == "bfloat16" else 1e-3)
            times = interleave(contenders, rounds, turn)
            rows = []
            for contender in times.seconds:
                goal = GOALS[name] if contender == "mirrored" else None
                rows.append(
                    Row(contender, show_seconds(times.median(contender)), times.ratios(contender, contenders[0].name), goal)
                )
            title = f"{name}: an MLP of {DEPTH} layers of {WIDTH}, Adam, batches of {BATCH}, R = {num_replicas}, {rounds} rounds"
            print_table(f"{title}; ratio to {contenders[0].name}", rows)


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(BATCH, WIDTH)).astype(np.float32), rng.integers(0, 10, BATCH).astype(np.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


# -- by hand and with mirrored


def by_hand(step: Step, state: Any, num_replicas: int) -> Contender:
    mesh = Mesh(np.array(jax.devices()[:num_replicas]), ("data",))
    everywhere, split = PartitionSpec(), PartitionSpec("data")

    def replica_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        return step(state, batch, lambda tree: jax.lax.psum(tree, "data"), lambda losses: jnp.sum(losses) / BATCH)

    mapped = jax.shard_map(
        replica_step, mesh=mesh, in_specs=(everywhere, split), out_specs=(everywhere, everywhere), check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=0)
    held = jax.device_put(jax.tree.map(np.asarray, state), NamedSharding(mesh, everywhere))
    rows = jax.device_put(batch(), NamedSharding(mesh, split))

    def run(num_steps: int) -> float:
        nonlocal held
        for _ in range(num_steps):
            held, loss = compiled(held, rows)
        return float(loss)

    return Contender("by hand", run)


def add_up(tree: Any) -> Any:
    return mr.get_replica_context().all_reduce("sum", tree)


def as_argument(strategy: mr.Strategy, step: Step, state: Any) -> Contender:
    """The state is an argument that comes back."""
    [rows] = strategy.distribute_dataset([batch()])
    held = state
    whole = jax.jit(lambda state, batch: step(state, batch, add_up, mr.losses.compute_average_loss))

    def run(num_steps: int) -> float:
        nonlocal held
        for _ in range(num_steps):
            held, loss = strategy.run(whole, args=(held, rows))
        return float(loss)

    return Contender("mirrored", run)


def in_variable(strategy: mr.Strategy, step: Step, state: Any) -> Contender:
    """The state is a variable: its arrays are donated."""
    [rows] = strategy.distribute_dataset([batch()])
    with strategy.scope():
        held = mr.Variable(jax.tree.map(jnp.copy, state))

    def train(batch: Any) -> jax.Array:
        new, loss = step(held.value, batch, add_up, mr.losses.compute_average_loss)
        held.assign(new)
        return loss

    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            loss = strategy.run(train, args=(rows,))
        return float(loss)

    return Contender("mirrored, in a mr.Variable", run)


def all_three(strategy: mr.Strategy, step: Step, state: Any) -> list[Contender]:
    return [
        by_hand(step, state, strategy.num_replicas_in_sync),
        as_argument(strategy, step, state),
        in_variable(strategy, step, state),
    ]


# -- the libraries


class NNXNet(nnx.Module):  # noqa: D101
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(DEPTH - 1)])
        self.out = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        return self.out(x)


def with_nnx(strategy: mr.Strategy) -> list[Contender]:
    def made() -> tuple[Any, Any]:
        model = NNXNet(nnx.Rngs(0))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    def update(model: Any, optimizer: Any, batch: Any, total: Any, share: Any) -> jax.Array:
        x, y = batch
        loss, gradients = total(nnx.value_and_grad(lambda model: share(cross_entropy(model(x), y)))(model))
        optimizer.update(model, gradients)
        return loss

    graph, state = nnx.split(made())

    def step(state: Any, batch: Any, total: Any, share: Any) -> tuple[Any, jax.Array]:
        both = nnx.merge(graph, state)
        loss = update(*both, batch, total, share)
        return nnx.state(both), loss

    model, optimizer = made()
    [rows] = strategy.distribute_dataset([batch()])
    train = nnx.jit(lambda model, optimizer, batch: update(model, optimizer, batch, add_up, mr.losses.compute_average_loss))

    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            loss = strategy.run(train, args=(model, optimizer, rows))
        return float(loss)

    return [by_hand(step, state, strategy.num_replicas_in_sync), Contender("mirrored", run)]


class LinenNet(nn.Module):  # noqa: D101
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        for _ in range(DEPTH - 1):
            x = nn.relu(nn.Dense(WIDTH)(x))
        return nn.Dense(10)(x)


def with_linen(strategy: mr.Strategy) -> list[Contender]:
    net = LinenNet()
    params = net.init(jax.random.key(0), batch()[0])["params"]

    def step(state: TrainState, batch: Any, total: Any, share: Any) -> tuple[TrainState, jax.Array]:
        x, y = batch
        loss_fn = lambda params: share(cross_entropy(state.apply_fn({"params": params}, x), y))  # noqa: E731
        loss, gradients = total(jax.value_and_grad(loss_fn)(state.params))
        return state.apply_gradients(grads=gradients), loss

    return all_three(strategy, step, TrainState.create(apply_fn=net.apply, params=params, tx=ADAM))


def with_equinox(strategy: mr.Strategy) -> list[Contender]:
    arrays, static = eqx.partition(eqx.nn.MLP(WIDTH, 10, WIDTH, DEPTH - 1, key=jax.random.key(0)), eqx.is_inexact_array)

    def step(state: Any, batch: Any, total: Any, share: Any) -> tuple[Any, jax.Array]:
        (arrays, moments), (x, y) = state, batch
        loss_fn = lambda arrays: share(cross_entropy(jax.vmap(eqx.combine(arrays, static))(x), y))  # noqa: E731
        loss, gradients = total(jax.value_and_grad(loss_fn)(arrays))
        updates, moments = ADAM.update(gradients, moments)
        return (eqx.apply_updates(arrays, updates), moments), loss

    return all_three(strategy, step, (arrays, ADAM.init(arrays)))


def plain_step(dtype: Any, num_parts: int) -> tuple[Step, Any]:
    keys = jax.random.split(jax.random.key(0), DEPTH)
    sizes = [WIDTH] * (DEPTH - 1) + [10]
    params = [jax.random.normal(key, (WIDTH, size)) / np.sqrt(WIDTH) for key, size in zip(keys, sizes, strict=True)]

    def logits(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for w in params[:-1]:
            x = jax.nn.relu(x.astype(dtype) @ w.astype(dtype))
        return x @ params[-1].astype(dtype)

    def step(state: Any, batch: Any, total: Any, share: Any) -> tuple[Any, jax.Array]:
        params, moments = state
        parts = jax.tree.map(lambda rows: rows.reshape(num_parts, -1, *rows.shape[1:]), batch)

        def add(sums: Any, part: Any) -> tuple[Any, None]:
            x, y = part
            losses = lambda params: jnp.sum(cross_entropy(logits(params, x), y)) / BATCH  # noqa: E731
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(losses)(params)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        own, _ = jax.lax.scan(add, zeros, parts)
        loss, gradients = total(own)
        updates, moments = ADAM.update(gradients, moments)
        return (optax.apply_updates(params, updates), moments), loss

    return step, (params, ADAM.init(params))


def with_keras(strategy: mr.Strategy) -> list[Contender]:
    num_replicas = strategy.num_replicas_in_sync
    x, y = (np.concatenate([rows] * 16) for rows in batch())
    own = keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(num_replicas)], auto_shard_dataset=False)

    def fitting(name: str, scope: Callable[[], Any], fit_scope: Callable[[], Any]) -> Contender:
        keras.utils.set_random_seed(0)
        with scope():
            hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH - 1)]
            model = keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(10)])
            model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

        def run(num_epochs: int) -> float:
            with fit_scope():
                history = model.fit(x, y, batch_size=BATCH, epochs=num_epochs, shuffle=False, verbose=0)
            return float(history.history["loss"][-1])

        return Contender(name, run)

    return [fitting("keras.distribution.DataParallel", own.scope, own.scope), fitting("mirrored", strategy.scope, strategy.scope)]


MODELS: dict[str, Callable[[mr.Strategy], list[Contender]]] = {
    "NNX": with_nnx,
    "Linen": with_linen,
    "Equinox": with_equinox,
    "Keras fit": with_keras,
    "bfloat16": lambda strategy: all_three(strategy, *plain_step(jnp.bfloat16, 1)),
    "four parts": lambda strategy: all_three(strategy, *plain_step(jnp.float32, 4)),
}

if __name__ == "__main__":
    main()
