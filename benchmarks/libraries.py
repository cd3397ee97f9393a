"""What does a step of a model of another library cost, next to the same library by hand with `jit(shard_map)` and donated state?

An MLP of eight layers and Adam in Flax NNX, Linen and Equinox, as their examples train it, and with the state in a `mr.Variable`;
Keras' `fit` next to Keras' own `keras.distribution.DataParallel`; plain JAX in bfloat16, and with gradients of four parts of
a batch added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Contender, parse
from _library_ways import ADAM, Step, by_hand, compare, cross_entropy, keras, keras_fits, nnx_steps, with_mirrored
from flax import nnx
from flax.training.train_state import TrainState

import mirrored as mr

WIDTH, DEPTH, BATCH = 256, 8, 64
#: To the library by hand.
GOALS = {"NNX": 1.05, "Linen": 1.05, "Equinox": 1.05, "Keras fit": 0.95, "bfloat16": 1.03, "four parts": 1.03}


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
            title = f"{name}: an MLP of {DEPTH} layers of {WIDTH}, Adam, batches of {BATCH}, R = {num_replicas}"
            compare(title, make(strategy), GOALS[name], rounds, turn, tolerance=5e-2 if name == "bfloat16" else 1e-3)


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(BATCH, WIDTH)).astype(np.float32), rng.integers(0, 10, BATCH).astype(np.int32)


def all_ways(strategy: mr.Strategy, step: Step, state: Any) -> list[Contender]:
    hand = by_hand(step, state, batch(), strategy.num_replicas_in_sync)
    return [hand, *with_mirrored(strategy, step, state, batch())]


class NNXNet(nnx.Module):  # noqa: D101
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(DEPTH - 1)])
        self.out = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        return self.out(x)


def with_nnx(strategy: mr.Strategy) -> list[Contender]:
    return nnx_steps(strategy, lambda axis_name: NNXNet(nnx.Rngs(0)), batch())


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

    return all_ways(strategy, step, TrainState.create(apply_fn=net.apply, params=params, tx=ADAM))


def with_equinox(strategy: mr.Strategy) -> list[Contender]:
    arrays, static = eqx.partition(eqx.nn.MLP(WIDTH, 10, WIDTH, DEPTH - 1, key=jax.random.key(0)), eqx.is_inexact_array)

    def step(state: Any, batch: Any, total: Any, share: Any) -> tuple[Any, jax.Array]:
        (arrays, moments), (x, y) = state, batch
        loss_fn = lambda arrays: share(cross_entropy(jax.vmap(eqx.combine(arrays, static))(x), y))  # noqa: E731
        loss, gradients = total(jax.value_and_grad(loss_fn)(arrays))
        updates, moments = ADAM.update(gradients, moments)
        return (eqx.apply_updates(arrays, updates), moments), loss

    return all_ways(strategy, step, (arrays, ADAM.init(arrays)))


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
    def make_model() -> Any:
        hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH - 1)]
        return keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(10)])

    return keras_fits(strategy, make_model, batch(), num_batches=16)


MODELS: dict[str, Callable[[mr.Strategy], list[Contender]]] = {
    "NNX": with_nnx,
    "Linen": with_linen,
    "Equinox": with_equinox,
    "Keras fit": with_keras,
    "bfloat16": lambda strategy: all_ways(strategy, *plain_step(jnp.bfloat16, 1)),
    "four parts": lambda strategy: all_ways(strategy, *plain_step(jnp.float32, 4)),
}

if __name__ == "__main__":
    main()
