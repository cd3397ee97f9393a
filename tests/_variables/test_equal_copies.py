"""Copies that differ are found on the devices, and named."""

import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flips import flip

import mirrored as mr
from mirrored._variables import equal_copies
from mirrored._variables import variable as _variable
from mirrored._workers import joint_programs

pytestmark = pytest.mark.usefixtures("in_numpy")


class FakeMesh(SimpleNamespace):
    """Two workers with two devices each, which are not there."""

    num_replicas, per_device, is_alone = 4, 1, False
    devices = tuple(SimpleNamespace(process_index=i // 2, device_kind="cpu") for i in range(4))
    local_devices = devices[:2]
    __hash__ = object.__hash__


@pytest.fixture(autouse=True)
def _no_copy_stays_changed():
    """Other tests compare all variables that are still alive."""
    yield
    for variable in list(_variable._live):
        if not variable._spec.is_on_read:
            variable.assign(_variable.local_arrays(variable, variable._array)[0][1])


def made(strategy: mr.Strategy, *names: str, value: object = 1.0) -> list[mr.Variable]:
    with strategy.scope():
        return [mr.Variable(np.full(20, value, np.float32), name=name) for name in names]


def differ(name: str, replica: int | str, other: str = ""):
    return pytest.raises(
        mr.ReplicasDivergeError, match=rf"copies of variable '{name}' differ: replicas \[{replica}\] from re.*{other}"
    )


def test_one_flipped_bit_is_found_and_named(strategy3, strategy2) -> None:
    good, bad = made(strategy3, "good", "bad")
    with strategy3.scope():
        seen = mr.Variable(0.0, synchronization="on_read", aggregation="sum")
    strategy3.run(lambda: [seen.assign(mr.get_replica_context().replica_id_in_sync_group)][1:])  # copies that may differ
    for replica, bit in ((0, 0), (1, 31), (2, 7)):
        strategy3.assert_mirrored()
        flip(bad, replica, word=13, bit=bit)
        strategy2.assert_mirrored()  # looks at its own variables only
        with differ("bad", replica):
            strategy3.assert_mirrored()
        bad.assign(good.value)
    flip(bad, 1)
    flip(bad, 2, bit=1)
    with differ("bad", "1, 2", "plica 0"):
        strategy3.assert_mirrored()
    [two] = made(strategy2, "two")
    flip(two, 1)
    with differ("two", 1, "plica 0"):  # of two that differ the second is named
        strategy2.assert_mirrored()


def train(strategy: mr.Strategy, as_function: bool = False):
    weights, count = made(strategy, "weights", "count")

    def step() -> None:
        weights.assign(weights.value * 0.5)
        count.assign_add(jnp.ones(20))

    return weights, mr.function(lambda: strategy.run(step)) if as_function else lambda: strategy.run(step)


def watch_of(strategy: mr.Strategy) -> equal_copies.Watch:
    [watch] = [program.watch for program in strategy._steps.programs]
    return watch


both_ways = pytest.mark.parametrize("as_function", [False, True])


@both_ways
@pytest.mark.by_xla
def test_copies_that_differ_are_found_at_each_run_until_they_are_mended(strategy3, as_function: bool) -> None:
    weights, step = train(strategy3, as_function)
    for _ in range(19):
        step()
    good = weights._array
    flip(weights, 2, word=17, bit=3)
    for _ in range(2):
        with differ("weights", 2, "plica 0"):
            step()
    weights._array = good
    step()


def test_all_mirrored_variables_that_a_program_reads_or_writes_are_watched(strategy2) -> None:
    first, second, frozen = made(strategy2, "first", "second", "frozen")
    with strategy2.scope():
        seen = mr.Variable(0, name="seen", synchronization="on_read", aggregation="sum")

    def step() -> jax.Array:
        for variable in (first, second):
            variable.assign(variable.value + frozen)
        seen.assign_add(1)
        return frozen.value * 2

    strategy2.run(step)
    for variable in (first, second, frozen):
        good = variable._array
        flip(variable, 1)
        with differ(variable.name, 1):
            watch_of(strategy2).compare()
        variable._array = good
    assert seen.numpy() == 2
    evaluate = mr.function(lambda: frozen.value * 2)
    for _ in range(19):
        evaluate()
    flip(frozen, 1)
    with differ("frozen", 1):
        evaluate()


def test_with_one_replica_and_without_variables_nothing_is_watched(strategy2) -> None:
    one = mr.MirroredStrategy(["cpu:0"])
    _, step = train(one)
    step()
    strategy2.run(lambda: 1 * np.ones(2))
    assert [program.watch for program in (*one._steps.programs, *strategy2._steps.programs)] == [None, None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """Make a run take 1 ms and a comparison what the test says, in seconds; return that, and when there were comparisons."""
    made = SimpleNamespace(now=100.0, cost=0.005, looked=[], run=0.001)

    def compare(mesh: object, variables: object, every: int) -> int:
        made.now += made.cost
        made.looked.append((made.count, every))
        return every

    def run_until(watch: equal_copies.Watch, count: int) -> list[tuple[int, int]]:
        made.looked = []
        for made.count in range(watch.count + 1, count + 1):
            made.now += made.run
            watch.count = made.count
            if watch.count >= watch.next:
                watch.compare()
        return made.looked

    made.run_until = run_until
    monkeypatch.setattr(equal_copies, "check", compare)
    monkeypatch.setattr(equal_copies, "_watches", weakref.WeakSet())  # without those of other tests
    monkeypatch.setattr(equal_copies.time, "perf_counter", lambda: made.now)
    return made


def test_copies_are_compared_so_seldom_that_it_costs_one_percent_and_every_twenty_long_runs(strategy2, clock) -> None:
    watch, of_long = (equal_copies.Watch(strategy2._mesh, []) for _ in range(2))
    assert [count for count, _ in clock.run_until(watch, 500)] == [20, 40, 60], "two comparisons are measured"
    assert {every for _, every in clock.run_until(watch, 20_000)} == {500}, "5 ms in 500 runs of 1 ms"
    clock.run = 1.0
    assert [count for count, _ in clock.run_until(of_long, 100)] == [20, 40, 60, 80, 100]


@pytest.mark.parametrize("slow", [0, 1, 5])
def test_one_slow_comparison_puts_nothing_off(strategy2, clock, slow: int) -> None:
    watch = equal_copies.Watch(strategy2._mesh, [])
    intervals = []
    for number in range(10):
        clock.cost = 1000.0 if number == slow else 0.005  # the machine slept
        [(_, every)] = clock.run_until(watch, watch.next)
        intervals.append(every)
    assert intervals == pytest.approx([20, 20] + [500] * 8, abs=1)


def test_programs_that_run_in_turns_share_one_percent(strategy2, clock) -> None:
    costs = (0.001, 0.02, 0.1)
    early, *turns = [equal_copies.Watch(strategy2._mesh, []) for _ in range(1 + len(costs))]
    clock.run_until(early, 30)  # and does not run any more
    spent, begun = 0.0, 0.0
    for count in range(1, 30_000):
        if count == 10_000:
            spent, begun = 0.0, clock.now
        for watch, clock.cost in zip(turns, costs, strict=True):
            spent += len(clock.run_until(watch, count)) * clock.cost
    assert spent / (clock.now - begun) == pytest.approx(0.01, rel=0.15)


def test_threads_that_run_one_program_do_not_all_compare(strategy2, monkeypatch) -> None:
    watch = equal_copies.Watch(strategy2._mesh, [])
    watch.count, compared = watch.next, []

    def compare(mesh: object, variables: object, every: int) -> int:
        compared.append(watch.count < watch.next)  # what another thread asks meanwhile
        return every

    monkeypatch.setattr(equal_copies, "check", compare)
    watch.compare()
    assert compared == [True] and watch.next == 40


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch):
    """Let other workers come to the comparison: one of two answers to what this one says first, and to its checksums."""

    def come(first: Callable[..., list[Any]], sums: Callable[..., list[Any]] = lambda *own: list(own)) -> list[Any]:
        said: list[Any] = []

        def exchange(mesh: Any, own: Any) -> list[Any]:
            said.append(own)
            return [own, first(*own) if len(said) == 1 else sums(*own)]

        monkeypatch.setattr(equal_copies, "_exchange", exchange)
        return said

    return come


def test_all_workers_compare_as_seldom_as_the_chief_needs_it(strategy2, monkeypatch: pytest.MonkeyPatch) -> None:
    wishes: list[int] = []
    monkeypatch.setattr(equal_copies, "check", lambda mesh, variables, every: wishes.append(every) or 70)
    _, step = train(strategy2)
    for _ in range(20):
        step()
    watch = watch_of(strategy2)
    assert watch.every == 70 and watch.next == 90
    monkeypatch.undo()
    monkeypatch.setattr(joint_programs, "exchange", lambda name, value: [value, value])
    monkeypatch.setattr(joint_programs, "of_chief", lambda name, value: value + 50)
    assert (equal_copies.check(FakeMesh(), [], 20), equal_copies.check(FakeMesh(), [])) == (70, 0)


def test_a_variable_that_another_worker_has_forgotten_is_left_out_and_the_others_are_compared(strategy2, others) -> None:
    pair = made(strategy2, "forgotten", "kept")
    said = others(lambda history, digest: [history, digest])
    equal_copies.check(strategy2._mesh, pair)
    [[_, digest]] = said
    assert len(digest) == 32, "one digest tells of equal copies"
    said = others(
        lambda history, digest: [history, "other"],
        lambda sums, words: [[entry for entry in sums if entry[0] != pair[0]._spec.number], words],
    )
    equal_copies.check(strategy2._mesh, pair)
    assert len(said) == 2
    others(
        lambda history, digest: [history, "other"],
        lambda sums, words: [[[number, [0 for _ in own]] for number, own in sums[1:]], words],
    )
    with pytest.raises(mr.ReplicasDivergeError, match=r"'kept' differ: replicas \[2, 3\] \(worker 1\) from replica 0"):
        equal_copies.check(FakeMesh(), pair)


@pytest.mark.parametrize(("copies", "words", "why"), [
    ((0, 0), ["avx9"], "Programs may compute other last bits where machines differ from worker 0's: worker 1 with avx9. Use"),
    ((0, 1), ["avx9"], "They were changed behind the library's back"),
    ((0, 0), [], "They were changed behind the library's back"),
])  # fmt: skip
def test_copies_that_differ_by_worker_only_are_blamed_on_machines_that_differ(
    strategy2, others, copies: tuple[int, int], words: list[str], why: str
) -> None:
    others(
        lambda history, digest: [history, "other"],
        lambda sums, own: [[[number, list(copies)] for number, _ in sums], sorted([*own, *words])],
    )
    with pytest.raises(mr.ReplicasDivergeError, match=re.escape(why)):
        equal_copies.check(FakeMesh(), made(strategy2, "w"))


def test_workers_that_did_other_things_are_told(strategy2, others, monkeypatch: pytest.MonkeyPatch) -> None:
    others(lambda history, digest: [[str(int(history[0]) + 1), *history[1:]], digest])
    with pytest.raises(mr.ProgramMismatchError, match="different numbers of batches"):
        equal_copies.check(strategy2._mesh, made(strategy2, "one"))
    trails = ['[[1, 1, 0, "train", ""]]', '[[1, 2, 0, "evaluate", ""]]']
    monkeypatch.setattr(
        equal_copies, "_exchange", lambda mesh, own: trails if isinstance(own, str) else [own, [[own[0][0], "other"], *own[1:]]]
    )
    with pytest.raises(mr.ProgramMismatchError, match=r"different orders.*worker 1: evaluate"):
        equal_copies.check(strategy2._mesh, [])
