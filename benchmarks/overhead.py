"""How much Python of our own does a warm `strategy.run` cost?

The processor time of the calling thread until the call returns, less that of the same program written by hand that takes and
returns the same number of arrays. Nothing else is in flight meanwhile, and waiting takes no processor time. Other programs make
both slower, through the caches, so each round compares the smallest times of many calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Row, parse, print_table, show_seconds
from jax.sharding import NamedSharding, PartitionSpec

import mirrored as mr

#: Number of variables -> microseconds of own Python per `run`, and per `run` with a `reduce` of its result.
GOALS = {2: (10.0, 14.0), 200: (60.0, None)}


#: Calls in a row before the other has its turn, and turns in a round.
CALLS, TURNS = 8, 30


def main() -> None:
    options = parse(__doc__, replicas=2, rounds=12, variables="2,200")
    rounds = 2 if options.quick else options.rounds
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(options.replicas)])
    rows = [row for number in options.variables.split(",") for row in measure(strategy, int(number), rounds)]
    print_table(f"a warm strategy.run, {options.replicas} replicas, {rounds} rounds; figure: ours less by hand", rows)


def measure(strategy: mr.Strategy, num_variables: int, num_rounds: int) -> list[Row]:
    """Compare a step that writes so many variables with the same by hand."""
    ours, by_hand = with_mirrored(strategy, num_variables), written_by_hand(strategy, num_variables)
    reduced = with_mirrored(strategy, num_variables, reduces=True)
    first = [seconds_of(call) for call in (ours, by_hand)]
    in_turns = lambda: (reduced(), ours())[1]  # noqa: E731
    smallest_of_round(ours, reduced, in_turns, by_hand)
    rounds = [smallest_of_round(ours, reduced, in_turns, by_hand) for _ in range(num_rounds)]
    medians = [show_seconds(statistics.median(column)) for column in zip(*rounds, strict=True)]
    own, own_with_reduce, own_in_turns = zip(*[[(each - hand) * 1e6 for each in others] for *others, hand in rounds], strict=True)
    goals = GOALS.get(num_variables, (None, None))
    return [
        Row(f"{num_variables} variables: mirrored, by hand", f"{medians[0]}, {medians[3]}", own, goals[0], "us"),
        Row(f"{num_variables} variables, and a reduce", f"{medians[1]}, {medians[3]}", own_with_reduce, goals[1], "us"),
        Row(f"{num_variables} variables, in turns with another step", f"{medians[2]}, {medians[3]}", own_in_turns, None, "us"),
        Row(
            f"{num_variables} variables, first step: mirrored, by hand",
            ", ".join(map(show_seconds, first)),
            [first[0] / first[1]],
        ),
    ]


def seconds_of(call: Callable[[], float]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def smallest_of_round(*calls: Callable[[], float]) -> list[float]:
    smallest = dict.fromkeys(calls, float("inf"))
    for turn in range(TURNS):
        for call in calls if turn % 2 else reversed(calls):  # who goes first has an advantage
            smallest[call] = min(smallest[call], *(call() for _ in range(CALLS)))
    return list(smallest.values())


def with_mirrored(strategy: mr.Strategy, num_variables: int, reduces: bool = False) -> Callable[[], float]:
    with strategy.scope():
        variables = [mr.Variable(np.zeros(8, np.float32), name=f"v{i}") for i in range(num_variables)]
    [x] = strategy.distribute_dataset([np.ones((8, 4), np.float32)])

    def step(x: jax.Array) -> jax.Array:
        total = mr.get_replica_context().all_reduce("sum", jnp.sum(x))
        for variable in variables:
            variable.assign(variable.value + total)
        return jnp.sum(x)

    def call() -> float:
        start = time.thread_time()
        result = strategy.run(step, args=(x,))
        if reduces:
            result = strategy.reduce("sum", result)
        seconds = time.thread_time() - start
        wait_for(strategy, result)
        return seconds

    return call


def written_by_hand(strategy: mr.Strategy, num_variables: int) -> Callable[[], float]:
    mesh = jax.sharding.Mesh(np.array(strategy.devices), ("data",))
    mirrored, split = PartitionSpec(), PartitionSpec("data")

    def step(values: list[jax.Array], x: jax.Array) -> Any:
        own = jnp.sum(x)
        total = jax.lax.psum(own, "data")
        beside = [total, total / mesh.size, jnp.zeros((), jnp.int32)] if mesh.size > 1 else [total]  # as our program has
        return [value + total for value in values], own[None], beside

    specs = {"in_specs": (mirrored, split), "out_specs": (mirrored, split, mirrored)}
    mapped = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    compiled = jax.jit(mapped, donate_argnums=0)
    values = [jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, mirrored)) for _ in range(num_variables)]
    x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, split))

    def call() -> float:
        nonlocal values
        start = time.thread_time()
        values, *results = compiled(values, x)
        seconds = time.thread_time() - start
        wait_for(strategy, (values, results))
        return seconds

    return call


def wait_for(strategy: mr.Strategy, arrays: Any) -> None:
    """Wait in the same way for both, because what runs between two calls empties the processor's caches."""
    jax.block_until_ready(arrays)
    strategy.barrier("end of the step")


if __name__ == "__main__":
    main()
