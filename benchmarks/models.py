"""What does a step of a convolutional network with BatchNorm, or of a transformer, cost in Flax NNX, Linen, Equinox and Keras?

Next to the same library by hand with `jit(shard_map)`, donated state and statistics over all replicas; Keras' `fit` next to
Keras' own `keras.distribution.DataParallel`. `libraries.py` asks the same of an MLP, whose steps are shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from _harness import Contender, parse
from _library_ways import ADAM, Rows, Step, by_hand, compare, cross_entropy, keras, keras_fits, nnx_steps, with_mirrored
from flax import nnx
from flax.training.train_state import TrainState

import mirrored as mr

CONVOLUTIONS, TRANSFORMER = "convolutions", "transformer"
#: Images: blocks of a convolution and a BatchNorm. Texts: layers of attention and of a perceptron, each behind a LayerNorm.
CHANNELS, BLOCKS, SIDE = 32, 4, 16
WIDTH, LAYERS, LENGTH, HEADS = 64, 4, 32, 4
BATCH, CLASSES = 64, 10
GOAL = 1.05
KERAS_GOAL = 0.95


def main() -> None:
    global BLOCKS, LAYERS
    options = parse(__doc__, replicas="2,8", only="", rounds=12, turn=0.2)
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    if options.quick:
        BLOCKS = LAYERS = 1  # most of the time is XLA's, to compile
    sizes = [2] if options.quick else [int(number) for number in options.replicas.split(",")]
    mr.MirroredStrategy([f"cpu:{i}" for i in range(max(sizes))])  # starts the backend with so many devices
    for num_replicas in sizes:
        strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        for library, make in LIBRARIES.items():
            for kind in (CONVOLUTIONS, TRANSFORMER):
                if not options.only or library in options.only.split(","):
                    goal = KERAS_GOAL if library == "Keras fit" else GOAL
                    title = f"{library}: {kind}, Adam, batches of {BATCH}, R = {num_replicas}"
                    compare(title, make(kind, strategy), goal, rounds, turn)


def batch(kind: str) -> Rows:
    rng = np.random.default_rng(0)
    shape = (SIDE, SIDE, CHANNELS) if kind == CONVOLUTIONS else (LENGTH, WIDTH)
    return rng.normal(size=(BATCH, *shape)).astype(np.float32), rng.integers(0, CLASSES, BATCH).astype(np.int32)


class NNXConvolutions(nnx.Module):  # noqa: D101
    def __init__(self, axis_name: str | None, rngs: nnx.Rngs) -> None:
        self.convolutions = nnx.List([nnx.Conv(CHANNELS, CHANNELS, (3, 3), rngs=rngs) for _ in range(BLOCKS)])
        self.norms = nnx.List([nnx.BatchNorm(CHANNELS, axis_name=axis_name, rngs=rngs) for _ in range(BLOCKS)])
        self.out = nnx.Linear(CHANNELS, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nnx.relu(norm(convolution(x)))
        return self.out(x.mean((1, 2)))


class NNXLayer(nnx.Module):  # noqa: D101
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.before, self.between = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.widen, self.narrow = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        x = x + self.attention(self.before(x))
        return x + self.narrow(nnx.gelu(self.widen(self.between(x))))


class NNXTransformer(nnx.Module):  # noqa: D101
    def __init__(self, axis_name: str | None, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([NNXLayer(rngs) for _ in range(LAYERS)])
        self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


def with_nnx(kind: str, strategy: mr.Strategy) -> list[Contender]:
    make = {CONVOLUTIONS: NNXConvolutions, TRANSFORMER: NNXTransformer}[kind]
    return nnx_steps(strategy, lambda axis_name: make(axis_name, nnx.Rngs(0)), batch(kind))


class LinenConvolutions(nn.Module):  # noqa: D101
    axis_name: str | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        for _ in range(BLOCKS):
            norm = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)
            x = nn.relu(norm(nn.Conv(CHANNELS, (3, 3))(x)))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class LinenTransformer(nn.Module):  # noqa: D101
    axis_name: str | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        for _ in range(LAYERS):
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(x.mean(1))


class LinenState(TrainState):  # noqa: D101
    statistics: Any


def with_linen(kind: str, strategy: mr.Strategy) -> list[Contender]:
    make = {CONVOLUTIONS: LinenConvolutions, TRANSFORMER: LinenTransformer}[kind]
    variables = make(None).init(jax.random.key(0), batch(kind)[0])

    def state_of(axis_name: str | None) -> LinenState:
        statistics = variables.get("batch_stats", {})
        return LinenState.create(apply_fn=make(axis_name).apply, params=variables["params"], tx=ADAM, statistics=statistics)

    def step(state: LinenState, rows: Any, total: Any, share: Any) -> tuple[LinenState, jax.Array]:
        x, y = rows

        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            logits, changed = state.apply_fn({"params": params, "batch_stats": state.statistics}, x, mutable=["batch_stats"])
            return share(cross_entropy(logits, y)), changed

        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        loss, gradients = total((loss, gradients))
        return state.apply_gradients(grads=gradients, statistics=changed.get("batch_stats", {})), loss

    hand = by_hand(step, state_of("data"), batch(kind), strategy.num_replicas_in_sync)
    return [hand, *with_mirrored(strategy, step, state_of(None), batch(kind))]


class EquinoxConvolutions(eqx.Module):  # noqa: D101
    convolutions: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    out: eqx.nn.Linear

    def __init__(self, axis_name: tuple[str, ...], key: jax.Array) -> None:
        *keys, last = jax.random.split(key, BLOCKS + 1)
        self.convolutions = [eqx.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, key=key) for key in keys]
        self.norms = [eqx.nn.BatchNorm(CHANNELS, axis_name, mode="batch") for _ in keys]
        self.out = eqx.nn.Linear(CHANNELS, CLASSES, key=last)

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:  # noqa: D102
        x = jnp.moveaxis(x, -1, 0)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x, state = norm(convolution(x), state)
            x = jax.nn.relu(x)
        return self.out(x.mean((1, 2))), state


class EquinoxLayer(eqx.Module):  # noqa: D101
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    perceptron: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        one, other = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=one)
        self.perceptron = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=other)

    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        before, between = (jax.vmap(norm) for norm in self.norms)
        normalized = before(x)
        x = x + self.attention(normalized, normalized, normalized)
        return x + jax.vmap(self.perceptron)(between(x))


class EquinoxTransformer(eqx.Module):  # noqa: D101
    layers: list[EquinoxLayer]
    out: eqx.nn.Linear

    def __init__(self, axis_name: tuple[str, ...], key: jax.Array) -> None:
        *keys, last = jax.random.split(key, LAYERS + 1)
        self.layers = [EquinoxLayer(key) for key in keys]
        self.out = eqx.nn.Linear(WIDTH, CLASSES, key=last)

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:  # noqa: D102
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(0)), state


def with_equinox(kind: str, strategy: mr.Strategy) -> list[Contender]:
    def made(axis_name: tuple[str, ...]) -> tuple[Any, Step]:
        make = {CONVOLUTIONS: EquinoxConvolutions, TRANSFORMER: EquinoxTransformer}[kind]
        net, state = eqx.nn.make_with_state(make)(axis_name, jax.random.key(0))
        arrays, static = eqx.partition(net, eqx.is_inexact_array)

        def step(state: Any, rows: Any, total: Any, share: Any) -> tuple[Any, jax.Array]:
            (arrays, moments, statistics), (x, y) = state, rows

            def loss_of(arrays: Any) -> tuple[jax.Array, Any]:
                of_rows = jax.vmap(eqx.combine(arrays, static), in_axes=(0, None), out_axes=(0, None), axis_name="rows")
                logits, changed = of_rows(x, statistics)
                return share(cross_entropy(logits, y)), changed

            (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(arrays)
            loss, gradients = total((loss, gradients))
            updates, moments = ADAM.update(gradients, moments)
            return (eqx.apply_updates(arrays, updates), moments, statistics), loss

        return (arrays, ADAM.init(arrays), state), step

    (state, step), (own_state, own_step) = made(("rows", "data")), made(("rows",))
    hand = by_hand(step, state, batch(kind), strategy.num_replicas_in_sync)
    return [hand, *with_mirrored(strategy, own_step, own_state, batch(kind))]


def keras_layer(x: Any) -> Any:
    normalized = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normalized, normalized)
    wide = keras.layers.Dense(4 * WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
    return x + keras.layers.Dense(WIDTH)(wide)


def with_keras(kind: str, strategy: mr.Strategy) -> list[Contender]:
    def make_model() -> Any:
        inputs = x = keras.Input(batch(kind)[0].shape[1:])
        for _ in range(BLOCKS if kind == CONVOLUTIONS else LAYERS):
            if kind == CONVOLUTIONS:
                x = keras.layers.Conv2D(CHANNELS, 3, padding="same")(x)
                x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
            else:
                x = keras_layer(x)
        pool = keras.layers.GlobalAveragePooling2D() if kind == CONVOLUTIONS else keras.layers.GlobalAveragePooling1D()
        return keras.Model(inputs, keras.layers.Dense(CLASSES)(pool(x)))

    return keras_fits(strategy, make_model, batch(kind), num_batches=4)


LIBRARIES: dict[str, Callable[[str, mr.Strategy], list[Contender]]] = {
    "NNX": with_nnx,
    "Linen": with_linen,
    "Equinox": with_equinox,
    "Keras fit": with_keras,
}

if __name__ == "__main__":
    main()
