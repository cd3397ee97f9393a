"""What does a step cost whose batch the replicas do not divide, next to a full one, once both are compiled?

A full batch has 64 rows a replica; the uneven one has one row less in all. `normalized` reduces statistics of
each layer over the replicas, forwards and backwards, so its program is cut at each of these collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Contender, Row, interleave, parse, print_table, show_seconds

import mirrored as mr

#: An uneven step may cost this much more than a full one.
GOAL = 1.5
ROWS_PER_REPLICA, WIDTH = 64, 512


def main() -> None:
    options = parse(__doc__, replicas=2, rounds=40, turn=0.1)
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(options.replicas)])
    rows = []
    for name in ("plain", "normalized"):
        step = make_step(strategy, name == "normalized")
        full = contender("full", strategy, step, ROWS_PER_REPLICA * options.replicas)
        uneven = contender("uneven", strategy, step, ROWS_PER_REPLICA * options.replicas - 1)
        first = [seconds(c) for c in (full, uneven)]
        times = interleave([full, uneven], rounds, turn)
        rows.append(Row(f"{name}: full step", show_seconds(times.median("full"))))
        rows.append(Row(f"{name}: uneven step", show_seconds(times.median("uneven")), times.ratios("uneven", "full"), GOAL))
        rows.append(Row(f"{name}: compiling the uneven step", show_seconds(first[1]), [first[1] / first[0]]))
    print_table(f"MLP 256-{WIDTH}-{WIDTH}-10, SGD, {options.replicas} replicas, {rounds} rounds; ratio to the full step", rows)


def make_step(strategy: mr.Strategy, is_normalized: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
    rng = np.random.default_rng(0)
    with strategy.scope():
        shapes = [(256, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)]
        weights = [mr.Variable((rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)) for shape in shapes]
        optimizer = mr.Optimizer(optax.sgd(0.01), weights)

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            h = x
            for weight in weights[:-1]:
                h = h @ weight.value
                h = jax.nn.relu(normalize(h) if is_normalized else h)
            return optax.softmax_cross_entropy_with_integer_labels(h @ weights[-1].value, y)

        value, gradients = mr.value_and_grad(loss, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return value

    return step


def normalize(h: jax.Array) -> jax.Array:
    sums = jnp.sum(h, axis=0), jnp.sum(h * h, axis=0), jnp.float32(h.shape[0])
    total, squares, rows = mr.get_replica_context().all_reduce("sum", sums)
    mean = total / rows
    return (h - mean) * jax.lax.rsqrt(squares / rows - mean**2 + 1e-3)


def contender(name: str, strategy: mr.Strategy, step: Callable[..., jax.Array], num_rows: int) -> Contender:
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal((num_rows, 256), np.float32), rng.integers(0, 10, num_rows, np.int32)
    [batch] = strategy.distribute_dataset(strategy.make_numpy_dataset(arrays).batch(num_rows))

    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            loss = strategy.run(step, args=batch)
        return float(strategy.reduce("sum", loss))

    return Contender(name, run)


def seconds(contender: Contender) -> float:
    start = time.perf_counter()
    contender.run(1)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
