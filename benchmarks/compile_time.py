"""Does the work to trace and compile a step grow with the number of replicas?

The first call of a training step of a 40-layer MLP with Adam, with JAX's caches cleared before it, in turns for each
number of replicas. What counts is the processor time of all threads, XLA's included, so other programs do not matter
much. By hand there is one psum of the gradient tree; XLA compiles that faster than packed gradients.

A second table is about a batch that the replicas do not divide: the same program holds a branch for each number of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Row, Times, parse, print_table, show_seconds
from _jax_contenders import mirrored_step
from _workloads import TOKENS, WORKLOADS, transformer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mirrored as mr

#: Eight replicas may take this much longer than two; one has no collectives, and takes less, by hand too.
GOAL = 1.3
#: The same for an uneven batch, to an even one; of a transformer, on the most replicas.
UNEVEN_GOAL, UNEVEN_LAYERS = 1.5, 12
#: How often the user's function is traced for one program.
MAX_TRACES = 1
#: Examples for each replica, whatever R is: XLA compiles a product with one row in another way than one with eight.
ROWS = 8
WIDTH = 64

Params = tuple[list[Any], list[Any]]


def main() -> None:
    options = parse(__doc__, layers=40, rounds=7, replicas="1,2,8,16", uneven_layers=UNEVEN_LAYERS)
    sizes = [int(number) for number in options.replicas.split(",")]
    num_layers, num_rounds = (2, 1) if options.quick else (options.layers, options.rounds)
    mr.MirroredStrategy([f"cpu:{i}" for i in range(max(sizes))])  # starts the backend with so many devices
    num_traces: list[float] = []
    cases: dict[str, Callable[[], float]] = {}
    for r in sizes:
        cases[f"mirrored, R={r}"] = lambda r=r: with_mirrored(num_layers, r, num_traces)
    for r in sizes:
        cases[f"by hand, R={r}"] = lambda r=r: by_hand(num_layers, r)
    next(iter(cases.values()))()  # what a process does once
    times = in_turns(cases, num_rounds)
    rows = []
    for name in cases:
        with_two_replicas = f"{name.split(',')[0]}, R=2"
        ratios = times.ratios(name, with_two_replicas) if 2 in sizes else ()
        rows.append(Row(name, show_seconds(times.median(name)), ratios, goal_of(name)))
    for r in sizes:
        rows.append(Row(f"mirrored, ratio to by hand, R={r}", "", times.ratios(f"mirrored, R={r}", f"by hand, R={r}")))
    rows.append(Row("traces of the user's function", f"{max(num_traces):.0f}", num_traces, MAX_TRACES, "traces"))
    print_table(f"first step of a {num_layers}-layer MLP, {num_rounds} rounds; processor time, ratio to R=2", rows)
    num_layers, num_replicas = 1 if options.quick else options.uneven_layers, min(max(sizes), 8)
    times = in_turns(with_transformer(num_layers, num_replicas), num_rounds)
    rows = [
        Row("even", show_seconds(times.median("even"))),
        Row("uneven", show_seconds(times.median("uneven")), times.ratios("uneven", "even"), UNEVEN_GOAL),
    ]
    print_table(f"first step of a {num_layers}-layer transformer, R={num_replicas}, {num_rounds} rounds; processor time", rows)


def goal_of(name: str) -> float | None:
    return GOAL if name == "mirrored, R=8" else None


def in_turns(cases: dict[str, Callable[[], float]], num_rounds: int) -> Times:
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for position in range(num_rounds):
        start = position % len(names)
        for name in (*names[start:], *names[:start]):
            jax.clear_caches()
            seconds[name].append(cases[name]())
    return Times(seconds)


def initial_values(num_layers: int) -> Params:
    rng = np.random.default_rng(0)
    weights = [(rng.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32) for _ in range(num_layers)]
    return weights, [np.zeros(WIDTH, np.float32) for _ in range(num_layers)]


def losses(params: Params, x: jax.Array) -> jax.Array:
    for w, b in zip(*params, strict=True):
        x = jnp.tanh(x @ w + b)
    return jnp.sum(x**2, axis=1)


def with_mirrored(num_layers: int, num_replicas: int, num_traces: list[float]) -> float:
    """Return the processor time of the first step; append how often the user's function was traced."""
    strategy = mr.MirroredStrategy(jax.devices()[:num_replicas])
    with strategy.scope():
        variables = jax.tree.map(mr.Variable, initial_values(num_layers))
        optimizer = mr.Optimizer(optax.adam(1e-3), variables)
    [x] = strategy.distribute_dataset([np.ones((ROWS * num_replicas, WIDTH), np.float32)])
    num_traces.append(0)

    def step(x: jax.Array) -> jax.Array:
        num_traces[-1] += 1
        value, gradients = mr.value_and_grad(lambda: losses(variables, x), variables)()
        optimizer.apply_gradients(gradients)
        return value

    start = time.process_time()
    jax.block_until_ready(strategy.run(step, args=(x,)))
    return time.process_time() - start


def with_transformer(num_layers: int, num_replicas: int) -> dict[str, Callable[[], float]]:
    """Return functions that give the processor time of a first step, with an even and with an uneven batch."""
    strategy = mr.MirroredStrategy(jax.devices()[:num_replicas])
    workload = dataclasses.replace(WORKLOADS["W4"], parameters=functools.partial(transformer, num_layers))

    def first_step(num_rows: int) -> float:
        step = mirrored_step(strategy, workload)
        text = np.random.default_rng(0).integers(0, TOKENS, (num_rows, workload.image[0] + 1), np.int32)
        [batch] = strategy.distribute_dataset([(text[:, :-1], text[:, 1:])])
        start = time.process_time()
        jax.block_until_ready(jax.tree.leaves(strategy.run(step, args=batch)))
        return time.process_time() - start

    even = 2 * num_replicas
    return {"even": lambda: first_step(even), "uneven": lambda: first_step(even - 1)}


def by_hand(num_layers: int, num_replicas: int) -> float:
    mesh = Mesh(np.array(jax.devices()[:num_replicas]), ("data",))
    mirrored, split = PartitionSpec(), PartitionSpec("data")
    tx = optax.adam(1e-3)

    def step(params: Params, state: Any, x: jax.Array) -> Any:
        num_examples = ROWS * num_replicas
        value, gradients = jax.value_and_grad(lambda params: jnp.sum(losses(params, x)) / num_examples)(params)
        updates, state = tx.update(jax.lax.psum(gradients, "data"), state, params)
        return optax.apply_updates(params, updates), state, value[None]

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(mirrored, mirrored, split), out_specs=(mirrored, mirrored, split), check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=(0, 1))
    params = jax.device_put(initial_values(num_layers), NamedSharding(mesh, mirrored))
    state = jax.device_put(tx.init(params), NamedSharding(mesh, mirrored))
    x = jax.device_put(np.ones((ROWS * num_replicas, WIDTH), np.float32), NamedSharding(mesh, split))
    start = time.process_time()
    jax.block_until_ready(compiled(params, state, x))
    return time.process_time() - start


if __name__ == "__main__":
    main()
