"""What does dropout by rows cost: a step beside the same one in plain JAX, and beside keys that are folded by replica?

The losses of plain JAX and of the step are compared before anything is timed: with keys by rows they are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from _harness import Contender, Row, check_losses, interleave, parse, print_table, show_seconds
from _workloads import LEARNING_RATE, WORKLOADS

import mirrored as mr

WORKLOAD = WORKLOADS["W2"]
GOAL = 1.02


def losses_of(params: dict[str, jax.Array], key: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    for i in range(2):
        x = jax.nn.relu(x @ params[f"w{i}"] + params[f"b{i}"])
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape), 2 * x, 0)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w2"] + params["b2"], y)


def plain() -> Contender:
    tx, params = optax.adam(LEARNING_RATE), jax.tree.map(jnp.asarray, WORKLOAD.parameters())
    state, batches = [params, tx.init(params)], enumerate(itertools.cycle(WORKLOAD.batches()))

    @jax.jit
    def step(params: dict[str, jax.Array], state: optax.OptState, key: jax.Array, x: jax.Array, y: jax.Array) -> tuple:
        loss, gradients = jax.value_and_grad(lambda params: losses_of(params, key, x, y).mean())(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def run(num_steps: int) -> float:
        for number, batch in itertools.islice(batches, num_steps):
            *state[:], loss = step(*state, jax.random.key(number), *batch)
        return float(loss)

    return Contender("plain JAX", run)


def mirrored(name: str, num_replicas: int, own: Callable[[mr.ReplicaContext, jax.Array], jax.Array]) -> Contender:
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        params = {name: mr.Variable(array, name=name) for name, array in WORKLOAD.parameters().items()}
        optimizer = mr.Optimizer(optax.adam(LEARNING_RATE), params)

    def step(key: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        key = own(mr.get_replica_context(), key)
        return optimizer.minimize(lambda: losses_of({name: v.value for name, v in params.items()}, key, x, y))

    batches = enumerate(itertools.cycle(list(strategy.distribute_dataset(WORKLOAD.batches()))))

    def run(num_steps: int) -> float:
        for number, batch in itertools.islice(batches, num_steps):
            losses = strategy.run(step, args=(jax.random.key(number), *batch))
        return sum(map(float, losses.values))

    return Contender(name, run)


def main() -> None:
    options = parse(__doc__, rounds=40, turn=0.2)
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    mr.MirroredStrategy(["cpu:0", "cpu:1"])  # starts the backend with so many devices
    by_rows = lambda ctx, key: ctx.rng(key)  # noqa: E731
    folded = lambda ctx, key: ctx.rng(key, by_rows=False)  # noqa: E731
    alone = [plain(), mirrored("by rows, R = 1", 1, by_rows), mirrored("folded, R = 1", 1, folded)]
    both = [mirrored("folded, R = 2", 2, folded), mirrored("by rows, R = 2", 2, by_rows)]
    check_losses([*alone, both[1]], num_steps=3, tolerance=1e-3)
    both[0].run(3)
    for contenders, goals in ((alone, {"by rows, R = 1": GOAL}), (both, {"by rows, R = 2": GOAL})):
        times, base = interleave(contenders, rounds, turn), contenders[0].name
        rows = [
            Row(c.name, show_seconds(times.median(c.name)), times.ratios(c.name, base), goals.get(c.name)) for c in contenders
        ]
        print_table(f"MLP 784-1024-1024-10 with dropout, batch 256, Adam, {rounds} rounds; ratio to {base}", rows)


if __name__ == "__main__":
    main()
