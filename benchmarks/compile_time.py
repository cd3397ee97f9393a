"""Does the time to trace and compile a step grow with the number of replicas?

The first `strategy.run` of a 40-layer MLP with Adam, with JAX's caches cleared before each, in turns for each R.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Row, Times, parse, print_table, show_seconds

import mirrored as mr

REPLICAS = (1, 2, 4, 8)
#: Eight replicas may take this much longer than one.
GOAL = 1.3
#: How often the user's function is traced for one program: once to discover its variables, once to compile it.
MAX_TRACES = 2
WIDTH = 64
#: Examples for each replica, whatever R is: XLA compiles a product with one row in another way than one with eight.
ROWS = 8


def main() -> None:
    options = parse(__doc__, layers=40, rounds=9)
    num_layers, num_rounds = (2, 2) if options.quick else (options.layers, options.rounds)
    mr.MirroredStrategy([f"cpu:{i}" for i in range(max(REPLICAS))])  # starts the backend with so many devices
    first_step(num_layers, 1)  # what a process does once
    seconds: dict[str, list[float]] = {f"R={r}": [] for r in REPLICAS}
    traces: list[float] = []
    for position in range(num_rounds):
        start = position % len(REPLICAS)
        for num_replicas in (*REPLICAS[start:], *REPLICAS[:start]):
            elapsed, num_traces = first_step(num_layers, num_replicas)
            seconds[f"R={num_replicas}"].append(elapsed)
            traces.append(num_traces)
    times = Times(seconds)
    rows = [
        Row(name, show_seconds(times.median(name)), times.ratios(name, "R=1"), GOAL if name == "R=8" else None)
        for name in seconds
    ]
    rows.append(Row("traces of the user's function", f"{max(traces):.0f}", traces, MAX_TRACES, "traces"))
    print_table(f"first step of a {num_layers}-layer MLP, {num_rounds} rounds; ratio to R=1", rows)


def first_step(num_layers: int, num_replicas: int) -> tuple[float, int]:
    """Return the seconds that the first step takes, and how often the user's function was traced."""
    jax.clear_caches()
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    rng = np.random.default_rng(0)
    with strategy.scope():
        weights = [mr.Variable(rng.standard_normal((WIDTH, WIDTH)) / 8, dtype=jnp.float32) for _ in range(num_layers)]
        biases = [mr.Variable(np.zeros(WIDTH, np.float32)) for _ in range(num_layers)]
        optimizer = mr.Optimizer(optax.adam(1e-3), [weights, biases])
    [x] = strategy.distribute_dataset([np.ones((ROWS * num_replicas, WIDTH), np.float32)])
    num_traces = 0

    def step(x: jax.Array) -> jax.Array:
        nonlocal num_traces
        num_traces += 1

        def loss() -> jax.Array:
            h = x
            for w, b in zip(weights, biases, strict=True):
                h = jnp.tanh(h @ w + b)
            return mr.losses.compute_average_loss(jnp.sum(h**2, axis=1))

        value, gradients = mr.value_and_grad(loss, [weights, biases])()
        optimizer.apply_gradients(gradients)
        return value

    start = time.perf_counter()
    jax.block_until_ready(strategy.run(step, args=(x,)))
    return time.perf_counter() - start, num_traces


if __name__ == "__main__":
    main()
