"""The table: programs that people write x ways of running them. The numbers of one device, or the error that is documented."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from parity.programs import PROGRAMS, Batch, Program, batches

import mirrored as mr


class Way(NamedTuple):
    """So many replicas and devices, the global numbers of rows, and how the steps are called."""

    num_replicas: int
    sizes: tuple[int, ...]
    call: Callable[..., tuple[Any, list[Any]]]
    devices: int | None = None
    options: dict[str, Any] | None = None
    shard_state: bool = False

    def strategy(self) -> mr.Strategy:
        devices = [f"cpu:{i}" for i in range(self.devices or self.num_replicas)]
        return mr.MirroredStrategy(devices, **(self.options or {}))


def collected(strategy: mr.Strategy, results: dict[str, Any], axis: int = 0) -> dict[str, Any]:
    """Add up the replicas' shares, and put their rows together."""
    rows = {name: value for name, value in results.items() if name.startswith("rows")}
    sums = {name: value for name, value in results.items() if name not in rows}
    one = lambda leaf: strategy.reduce("sum", leaf) if isinstance(leaf, mr.PerReplica) else leaf  # noqa: E731
    summed = jax.tree.map(one, sums, is_leaf=lambda leaf: isinstance(leaf, mr.PerReplica))
    return {**summed, **{name: strategy.gather(value, axis) for name, value in rows.items()}}


def one_by_one(strategy: mr.Strategy, program: Program, data: list[Batch]) -> tuple[Any, list[Any]]:
    carry, results = program.carry, []
    for batch in strategy.distribute_dataset(data):
        carry, result = strategy.run(program.step, args=(carry, batch))
        results.append(collected(strategy, result))
    return carry, results


def eagerly(strategy: mr.Strategy, program: Program, data: list[Batch]) -> tuple[Any, list[Any]]:
    with mr.eager():
        return one_by_one(strategy, program, data)


def in_a_function(strategy: mr.Strategy, program: Program, data: list[Batch]) -> tuple[Any, list[Any]]:
    @mr.function
    def call(carry: Any, batch: Batch) -> Any:
        carry, result = strategy.run(program.step, args=(carry, batch))
        return carry, collected(strategy, result)

    carry, results = program.carry, []
    for batch in strategy.distribute_dataset(data):
        carry, result = call(carry, batch)
        results.append(result)
    return carry, results


def in_a_scan(strategy: mr.Strategy, program: Program, data: list[Batch]) -> tuple[Any, list[Any]]:
    steps = jax.tree.map(lambda *leaves: np.stack([np.split(leaf, strategy.num_replicas_in_sync) for leaf in leaves], 1), *data)
    steps = strategy.distribute_values_from_function(lambda ctx: jax.tree.map(lambda a: a[ctx.replica_id_in_sync_group], steps))
    carry, results = mr.scan(lambda carry, batch: strategy.run(program.step, args=(carry, batch)), program.carry, steps)
    results = collected(strategy, results, axis=1)
    return carry, [jax.tree.map(lambda leaf, i=i: leaf[i], results) for i in range(len(data))]


VIRTUAL = {"num_replicas": 6}
#: The first batch of an odd way is even.
WAYS = {
    "R1": Way(1, (6, 6), one_by_one),
    "R2": Way(2, (8, 8), one_by_one),
    "R3, odd": Way(3, (6, 4), one_by_one),
    "R8, odd": Way(8, (16, 11), one_by_one),
    "R3, empty": Way(3, (6, 2), one_by_one),
    "R3, sharded, odd": Way(3, (6, 4), one_by_one, shard_state=True),
    "R2, function, odd": Way(2, (8, 5), in_a_function),
    "R2, scan": Way(2, (8, 8), in_a_scan),
    "R2, eager": Way(2, (8, 8), eagerly),
    "R6 on 2, one by one": Way(6, (12, 12), one_by_one, 2, {**VIRTUAL, "schedule": "one_by_one"}),
    "R6 on 2, odd": Way(6, (12, 7), one_by_one, 2, VIRTUAL),
    "R6 on 1, function": Way(6, (12, 12), in_a_function, 1, VIRTUAL),
    "R6 on 2, scan": Way(6, (12, 12), in_a_scan, 2, VIRTUAL),
}


@functools.cache
def by_hand(name: str, sizes: tuple[int, ...], num_replicas: int) -> tuple[Any, Any, list[Any]]:
    """Run a program on one device: its parameters, what it carries, and the results of each step."""
    program = PROGRAMS[name]()

    @jax.jit
    def step(state: Any, batch: Batch, parts: list[Batch]) -> Any:
        state = {**state, "params": dict(state["params"])}
        results = program.plain(state, batch, parts)
        return state, results

    params = jax.tree.map(jax.numpy.asarray, program.params)
    state, results = {"params": params, "state": program.tx.init(params), "carry": program.carry}, []
    for batch in batches(list(sizes)):
        split = {key: np.array_split(rows, num_replicas) for key, rows in batch.items()}
        parts = [{key: rows[i] for key, rows in split.items()} for i in range(num_replicas)]
        state, result = step(state, batch, parts)
        results.append(result)
    return state["params"], state["carry"], results


def assert_same(ours: Any, alone: Any, rtol: float, what: str) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(alone), what
    for (path, own), value in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(own, value, rtol=rtol, atol=rtol / 10, err_msg=what + jax.tree_util.keystr(path))


def check(name: str, way: str) -> None:
    """Run a program in one way, and compare it with the same by hand."""
    num_replicas, sizes, call, *_ = WAYS[way]
    strategy, program = WAYS[way].strategy(), PROGRAMS[name]()
    program.start(strategy, WAYS[way].shard_state)
    refused = [refusal for word, refusal in program.refuses.items() if word in way]
    with pytest.raises(refused[0][0], match=refused[0][1] or None) if refused else contextlib.nullcontext():
        carry, results = call(strategy, program, batches(list(sizes)))
    if not refused:
        params, alone_carry, alone = by_hand(name, sizes, num_replicas)
        assert_same(results, alone, program.rtol, "result of step ")
        assert_same(program.read(), params, program.rtol, "variable ")
        if program.carry is not None:
            assert_same(collected(strategy, {"carry": carry})["carry"], alone_carry, program.rtol, "carried ")
        strategy.assert_mirrored()


def cells() -> list[Any]:
    """Return the table: each step in every way, other models in README's step in every second one.

    The default suite runs each step with an odd batch, and the models in all ways in turn.
    """
    table, turn = [], itertools.cycle(way for way in WAYS if "eager" not in way)  # which takes as long as all others
    for i, (name, program) in enumerate(PROGRAMS.items()):
        ways = [way for way in WAYS if program.has_optimizer or not WAYS[way].shard_state]
        ways = ways if i % 4 == 0 else [way for way in ways if "eager" not in way]
        own = "R3, odd"
        if (program.step, program.share) == (Program.step, Program.share):
            own = next(turn)
            ways = [way for j, way in enumerate(ways) if way == own or not i or (i + j) % 2]
        for way in ways:
            marks = [] if way == own and not program.is_slow else [pytest.mark.slow]
            table.append(pytest.param(name, way, marks=marks))
    return table


@pytest.mark.parametrize(("name", "way"), cells())
def test_the_numbers_are_those_of_one_device(name: str, way: str) -> None:
    check(name, way)
