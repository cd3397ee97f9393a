"""What does the loop of the README cost, `run` and then `reduce` of the loss, and what its other forms, next to the loop by hand?

Sixteen steps with the loss of each, over all replicas. The program by hand adds the loss up together with the gradients; "paced"
it waits for eight steps at a time, with sixteen in flight, as mirrored does on CPU devices. Losses are compared before anything
is timed.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Contender, Row, check_losses, interleave, parse, print_table, show_seconds
from _jax_contenders import LOSSES, mirrored_step
from _workloads import LEARNING_RATE, WORKLOADS, Workload
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mirrored as mr

#: Steps in one unit of every contender, and in one dispatch of the scans.
NUM_STEPS = 16
#: To by hand, and to by hand with packed gradients and the same pacing.
GOALS = {"run, then reduce": 1.05, "mr.scan": 0.66}


def main() -> None:
    options = parse(__doc__, replicas="2,8", workloads="W1", rounds=30, turn=0.05)
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    sizes = [int(number) for number in options.replicas.split(",")]
    mr.MirroredStrategy([f"cpu:{i}" for i in range(max(sizes))])  # starts the backend with so many devices
    for workload in (WORKLOADS[name] for name in options.workloads.split(",")):
        for num_replicas in sizes:
            mesh = Mesh(np.array(jax.devices()[:num_replicas]), ("data",))
            strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
            contenders = [*by_hand(workload, mesh), *with_mirrored(workload, strategy)]
            check_losses(contenders, num_steps=2, tolerance=1e-3)
            times = interleave(contenders, rounds, turn)
            rows = []
            for name in times.seconds:
                ratios = times.ratios(name, "by hand")
                rows.append(Row(name, show_seconds(times.median(name) / NUM_STEPS), ratios, GOALS.get(name)))
            ratios = times.ratios("run, then reduce", "by hand, packed, paced")
            rows.append(Row("run, then reduce, ratio to by hand, packed, paced", "", ratios))
            read = times.ratios("run, then reduce, read every 8", "by hand, packed, read every 8")
            rows.append(Row("run, then reduce, read every 8, ratio to by hand, packed, read every 8", "", read))
            rows.append(
                Row("mr.scan, ratio to lax.scan by hand, packed", "", times.ratios("mr.scan", "lax.scan by hand, packed"))
            )
            title = f"{workload.name}: {workload.what}, Adam, R = {num_replicas}, {rounds} rounds; a step, ratio to by hand"
            print_table(title, rows)


def batches_of(workload: Workload) -> list[tuple[np.ndarray, np.ndarray]]:
    batches = workload.batches()
    return [batches[i % len(batches)] for i in range(NUM_STEPS)]


def with_mirrored(workload: Workload, strategy: mr.Strategy) -> list[Contender]:
    batches = list(strategy.distribute_dataset(batches_of(workload)))
    stacked = tuple(np.stack(parts) for parts in zip(*batches_of(workload), strict=True))

    def rows_of(context: Any) -> Any:
        size = workload.batch // strategy.num_replicas_in_sync
        start = context.replica_id_in_sync_group * size
        return tuple(array[:, start : start + size] for array in stacked)

    all_batches = strategy.distribute_values_from_function(rows_of)
    looped, read, reduced, whole, scanned = (mirrored_step(strategy, workload) for _ in range(5))

    def in_step(x: jax.Array, y: jax.Array) -> jax.Array:
        return mr.get_replica_context().all_reduce("sum", reduced(x, y))

    def then_reduce(step: Any, x: Any, y: Any) -> Any:
        return strategy.reduce("sum", strategy.run(step, args=(x, y)))

    function = mr.function(functools.partial(then_reduce, whole))

    def body(carry: Any, batch: Any) -> Any:
        return then_reduce(scanned, *batch), None

    return [
        _looping("run, then reduce", functools.partial(then_reduce, looped), batches),
        _looping("run, then reduce, read every 8", _Read(functools.partial(then_reduce, read)), batches),
        _looping("all-reduced in the step", lambda x, y: strategy.run(in_step, args=(x, y)), batches),
        _looping("mr.function", function, batches),
        _looping("mr.scan", lambda x, y: mr.scan(body, 0.0, (x, y))[0], [all_batches]),
    ]


def _looping(name: str, call: Callable[[Any, Any], Any], batches: list[Any]) -> Contender:
    """Call it for each batch, and wait for the last loss."""

    def run(num: int) -> float:
        for _ in range(num):
            for x, y in batches:
                loss = call(x, y)
        return float(loss)

    return Contender(name, run)


def by_hand(workload: Workload, mesh: Mesh) -> list[Contender]:
    split = NamedSharding(mesh, PartitionSpec("data"))
    batches = [jax.device_put(batch, split) for batch in batches_of(workload)]
    stacked = [np.stack(parts) for parts in zip(*batches_of(workload), strict=True)]
    all_batches = jax.device_put(stacked, NamedSharding(mesh, PartitionSpec(None, "data")))
    return [
        _looping("by hand", _Steps(workload, mesh, is_packed=False), batches),
        _looping("by hand, packed", _Steps(workload, mesh, is_packed=True), batches),
        _looping("by hand, packed, paced", _Paced(_Steps(workload, mesh, is_packed=True)), batches),
        _looping("by hand, packed, read every 8", _Read(_Steps(workload, mesh, is_packed=True)), batches),
        _looping("lax.scan by hand", _Steps(workload, mesh, is_packed=False, is_scan=True), [all_batches]),
        _looping("lax.scan by hand, packed", _Steps(workload, mesh, is_packed=True, is_scan=True), [all_batches]),
    ]


class _Steps:
    """A training step by hand, or a scan of some, with its state: call it with a batch."""

    def __init__(self, workload: Workload, mesh: Mesh, is_packed: bool, is_scan: bool = False) -> None:
        tx, mirrored = optax.adam(LEARNING_RATE), PartitionSpec()
        split = PartitionSpec(None, "data") if is_scan else PartitionSpec("data")

        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, moments = state
            loss = lambda params: jnp.sum(LOSSES[workload.name](params, *batch)) / workload.batch  # noqa: E731
            found = jax.value_and_grad(loss)(params)
            if is_packed:
                flat, unpack = ravel_pytree(found)
                value, gradients = unpack(jax.lax.psum(flat, "data"))
            else:
                value, gradients = jax.lax.psum(found, "data")
            updates, moments = tx.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        def steps(state: Any, batches: Any) -> tuple[Any, jax.Array]:
            state, losses = jax.lax.scan(step, state, batches)
            return state, losses[-1]

        mapped = jax.shard_map(
            steps if is_scan else step, mesh=mesh, in_specs=(mirrored, split), out_specs=(mirrored, mirrored), check_vma=False
        )
        params = workload.parameters()
        self._compiled = jax.jit(mapped, donate_argnums=0)
        self._state = jax.device_put((params, jax.tree.map(np.asarray, tx.init(params))), NamedSharding(mesh, mirrored))

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        self._state, loss = self._compiled(self._state, (x, y))
        return loss


class _Paced:
    """Waits for eight steps at a time, with sixteen in flight."""

    def __init__(self, steps: _Steps) -> None:
        self._steps, self._in_flight = steps, collections.deque[jax.Array]()

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        self._in_flight.append(loss := self._steps(x, y))
        if len(self._in_flight) >= 16:
            for _ in range(8):
                old = self._in_flight.popleft()
            old.block_until_ready()
        return loss


class _Read:
    """Reads the loss of every eighth step, as a progress bar does."""

    def __init__(self, step: Callable[[Any, Any], jax.Array]) -> None:
        self._step, self._num_steps = step, 0

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        loss = self._step(x, y)
        self._num_steps += 1
        if self._num_steps % 8 == 0:
            float(loss)
        return loss


if __name__ == "__main__":
    main()
