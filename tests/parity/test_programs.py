"""The table: programs that people write x ways of running them. The numbers of one device, or the error that is documented."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from parity.programs import PROGRAMS, Batch, Program, batches
from strategies import divide_small_arrays, jit

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")


class Together:
    """Several programs in one step: each has its place in what is carried, in the results and among the variables."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.programs = {name: PROGRAMS[name]() for name in names}
        self.carry = {name: program.carry for name, program in self.programs.items()}

    def start(self, strategy: mr.Strategy, shard_state: bool) -> None:
        for program in self.programs.values():
            program.start(strategy, shard_state)

    def step(self, carry: dict[str, Any], batch: Batch) -> tuple[Any, dict[str, Any]]:
        made = {name: program.step(carry[name], batch) for name, program in self.programs.items()}
        return {name: new for name, (new, _) in made.items()}, {name: results for name, (_, results) in made.items()}


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


def collected(strategy: mr.Strategy, results: Any, axis: int = 0) -> Any:
    """Add up the replicas' shares, and put their rows together."""

    def of_all(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, mr.PerReplica):
            return leaf
        is_rows = jax.tree_util.keystr(path[1:2]).startswith("['rows")  # the key after the program's name
        return strategy.gather(leaf, axis) if is_rows else strategy.reduce("sum", leaf)

    return jax.tree_util.tree_map_with_path(of_all, results, is_leaf=lambda leaf: isinstance(leaf, mr.PerReplica))


def one_by_one(strategy: mr.Strategy, program: Together, data: list[Batch]) -> tuple[Any, list[Any]]:
    carry, results = program.carry, []
    for batch in strategy.distribute_dataset(data):
        carry, result = strategy.run(program.step, args=(carry, batch))
        results.append(collected(strategy, result))
    return carry, results


def eagerly(strategy: mr.Strategy, program: Together, data: list[Batch]) -> tuple[Any, list[Any]]:
    with mr.eager():
        return one_by_one(strategy, program, data)


def in_a_function(strategy: mr.Strategy, program: Together, data: list[Batch]) -> tuple[Any, list[Any]]:
    @mr.function
    def call(carry: Any, batch: Batch) -> Any:
        carry, result = strategy.run(program.step, args=(carry, batch))
        return carry, collected(strategy, result)

    carry, results = program.carry, []
    for batch in strategy.distribute_dataset(data):
        carry, result = call(carry, batch)
        results.append(result)
    return carry, results


def in_a_scan(strategy: mr.Strategy, program: Together, data: list[Batch]) -> tuple[Any, list[Any]]:
    steps = jax.tree.map(lambda *leaves: np.stack([np.split(leaf, strategy.num_replicas_in_sync) for leaf in leaves], 1), *data)
    steps = strategy.distribute_values_from_function(lambda ctx: jax.tree.map(lambda a: a[ctx.replica_id_in_sync_group], steps))
    carry, results = mr.scan(lambda carry, batch: strategy.run(program.step, args=(carry, batch)), program.carry, steps)
    results = collected(strategy, results, axis=1)
    return carry, [jax.tree.map(lambda leaf, i=i: leaf[i], results) for i in range(len(data))]


VIRTUAL = {"num_replicas": 6}
#: Where the numbers of rows differ, an even batch comes first.
WAYS = {
    "R1": Way(1, (6, 6), one_by_one),
    "R2": Way(2, (8, 8), one_by_one),
    "R3, odd": Way(3, (4, 4), one_by_one),
    "R8, odd": Way(8, (16, 11), one_by_one),
    "R3, empty": Way(3, (2, 2), one_by_one),
    "R3, sharded, odd": Way(3, (4, 4), one_by_one, shard_state=True),
    "R2, function, odd": Way(2, (8, 5), in_a_function),
    "R2, scan": Way(2, (8, 8), in_a_scan),
    "R2, eager": Way(2, (8, 8), eagerly),
    "R6 on 2, one by one": Way(6, (12, 12), one_by_one, 2, {**VIRTUAL, "schedule": "one_by_one"}),
    "R6 on 2, odd": Way(6, (12, 7), one_by_one, 2, VIRTUAL),
    "R6 on 1, function": Way(6, (12, 12), in_a_function, 1, VIRTUAL),
    "R6 on 2, scan": Way(6, (12, 12), in_a_scan, 2, VIRTUAL),
}


@functools.cache
def by_hand(names: tuple[str, ...], sizes: tuple[int, ...], num_replicas: int) -> tuple[Any, Any, list[Any]]:
    """Run programs on one device: their parameters, what they carry, and the results of each step."""
    programs = {name: PROGRAMS[name]() for name in names}

    @jit
    def step(states: Any, batch: Batch, parts: list[Batch]) -> Any:
        states = {name: {**state, "params": dict(state["params"])} for name, state in states.items()}
        results = {name: program.plain(states[name], batch, parts) for name, program in programs.items()}
        return states, results

    def start(program: Program) -> Any:
        params = jax.tree.map(np.asarray, program.params)
        return {"params": params, "state": program.tx.init(params), "carry": program.carry}

    states, results = {name: start(program) for name, program in programs.items()}, []
    for batch in batches(list(sizes)):
        split = {key: np.array_split(rows, num_replicas) for key, rows in batch.items()}
        parts = [{key: rows[i] for key, rows in split.items()} for i in range(num_replicas)]
        states, result = step(states, batch, parts)
        results.append(result)
    return *({name: state[key] for name, state in states.items()} for key in ("params", "carry")), results


def assert_same(ours: Any, alone: Any, rtol: float, what: str) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(alone), what
    for (path, own), value in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(own, value, rtol=rtol, atol=rtol / 10, err_msg=what + jax.tree_util.keystr(path))


def run(names: tuple[str, ...], way: Way) -> tuple[mr.Strategy, dict[str, Program], Any, list[Any]]:
    strategy, program = way.strategy(), Together(names)
    with pytest.MonkeyPatch.context() as patch:
        if way.shard_state:
            divide_small_arrays(patch, 16)
        program.start(strategy, way.shard_state)
        return strategy, program.programs, *way.call(strategy, program, batches(list(way.sizes)))


def check(names: tuple[str, ...], way: str, is_compared: bool = True) -> list[Any]:
    """Run programs in one way, and compare each with the same by hand; those that are refused there run alone.

    Return what they have found. A worker's need not be compared if they have the bits of another worker's, which are.
    """
    known = [(name, *each) for name in names for each in PROGRAMS[name].refuses.items()]
    refused = {name: refusal for name, word, refusal in known if word in way}
    for name, (error, message) in refused.items():
        with pytest.raises(error, match=message):
            run((name,), WAYS[way])
    if not (names := tuple(name for name in names if name not in refused)):
        return []
    strategy, programs, carry, results = run(names, WAYS[way])
    carry = collected(strategy, carry)
    read = {name: program.read() for name, program in programs.items()}
    strategy.assert_mirrored()
    found = [results, read, carry]
    if not is_compared:
        return found
    params, alone_carry, alone = by_hand(names, WAYS[way].sizes, WAYS[way].num_replicas)
    for name, program in programs.items():
        assert_same([result[name] for result in results], [result[name] for result in alone], program.rtol, f"{name}: result ")
        assert_same(read[name], params[name], program.rtol, f"{name}: variable ")
        if program.carry is not None:
            assert_same(carry[name], alone_carry[name], program.rtol, f"{name}: carried ")
    return found


def in_groups(names: list[str], size: int = 7) -> list[tuple[str, ...]]:
    return [tuple(names[i : i + size]) for i in range(0, len(names), size)]


def cells() -> list[Any]:
    """Return the table: each group of steps in every second way, of other models in README's step in every fourth.

    The default suite runs most programs with an odd batch, and README's in some other ways; the slow suite the others with an
    odd batch, and README's in all ways. What is left is of the night.
    """
    default = ("R1", "R3, sharded, odd", "R2, function, odd", "R6 on 2, odd")
    table = [cell(("Readme",), way, "" if way in default else "slow") for way in WAYS]
    kinds = {}
    for name, program in list(PROGRAMS.items())[1:]:
        kinds.setdefault((program.is_slow, 4 if program.is_slow or program.has_readmes_step() else 2), []).append(name)
    for (is_slow, every), names in kinds.items():
        for i, group in enumerate(in_groups(names)):
            ways = [way for j, way in enumerate(WAYS) if way == "R3, odd" or (i + j) % every == 0]
            ways = [way for way in ways if way != "R2, eager"]  # which takes long
            table += [cell(group, way, "nightly" if way != "R3, odd" else "slow" if is_slow else "") for way in ways]
    return [*table, cell(("NormalizedAdvantages", "Clusters", "AggregatedAssignment"), "R2, eager", "nightly")]


def cell(names: tuple[str, ...], way: str, mark: str) -> Any:
    group = names[0] if len(names) == 1 else f"{names[0]}...{names[-1]}"
    return pytest.param(names, way, marks=[getattr(pytest.mark, mark)] if mark else [], id=f"{group}-{way}")


@pytest.mark.parametrize(("names", "way"), cells())
def test_the_numbers_are_those_of_one_device(names: tuple[str, ...], way: str) -> None:
    check(names, way)
