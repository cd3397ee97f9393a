"""Copies that differ are found on the devices, and named."""

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._transforms import function
from mirrored._variables import equal_copies
from mirrored._variables import variable as _variable


@pytest.fixture(autouse=True)
def _no_copy_stays_changed():
    """Other tests compare all variables that are still alive."""
    yield
    for variable in list(_variable._live):
        if not variable._spec.is_on_read:
            variable.assign(_variable.local_arrays(variable)[0][1])


def flip(variable: mr.Variable, replica: int, word: int = 0, bit: int = 0) -> None:
    """Flip one bit of one replica's real copy, behind the library's back."""
    array = variable._array
    shards = {shard.device: np.array(shard.data) for shard in array.addressable_shards}
    device = variable._spec.mesh.devices[replica]
    shards[device].view(np.uint32).reshape(-1)[word] ^= np.uint32(1 << bit)
    arrays = [jax.device_put(shards[d], d) for d in variable._spec.mesh.devices]
    variable._array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, arrays)


@pytest.mark.parametrize("replica", [0, 1, 2])
@pytest.mark.parametrize("bit", [0, 31])
def test_one_flipped_bit_is_found_and_named(strategy3, replica: int, bit: int) -> None:
    with strategy3.scope():
        good = mr.Variable(np.ones((4, 5), np.float32), name="good")
        bad = mr.Variable(np.ones((4, 5), np.float32), name="bad")
    strategy3.assert_mirrored()
    flip(bad, replica, word=13, bit=bit)
    with pytest.raises(mr.ReplicasDivergeError, match=rf"copies of variable 'bad' differ: replicas \[{replica}\] from replica"):
        strategy3.assert_mirrored()
    bad.assign(good.value)
    strategy3.assert_mirrored()


def test_of_two_that_differ_the_second_is_named(strategy2) -> None:
    with strategy2.scope():
        variable = mr.Variable(np.zeros(3, np.float32), name="two")
    flip(variable, 1)
    with pytest.raises(mr.ReplicasDivergeError, match=r"'two' differ: replicas \[1\] from replica 0"):
        strategy2.assert_mirrored()


def test_variables_of_one_name_are_not_mixed_up(strategy2) -> None:
    with strategy2.scope():
        pair = [mr.Variable(np.full(2, n, np.float32), name="same") for n in range(2)]
    strategy2.assert_mirrored()
    assert [v._spec.number for v in pair] == sorted(v._spec.number for v in pair)


@pytest.mark.parametrize("kind", ["key", "bool", "int8", "bfloat16"])
def test_every_kind_of_value_is_compared(strategy2, kind: str) -> None:
    first, other = (jax.random.key(1), jax.random.key(2)) if kind == "key" else (jnp.ones(3, kind), jnp.array([1, 1, 0], kind))
    with strategy2.scope():
        variable = mr.Variable(first, name="kept")
    strategy2.assert_mirrored()
    copies = [jax.device_put(value, device) for value, device in zip((first, other), strategy2.devices, strict=True)]
    variable._array = jax.make_array_from_single_device_arrays(first.shape, strategy2._mesh.mirrored, copies)
    with pytest.raises(mr.ReplicasDivergeError, match=r"'kept' differ: replicas \[1\] from replica 0"):
        strategy2.assert_mirrored()


def train(strategy: mr.Strategy, as_function: bool):
    with strategy.scope():
        weights = mr.Variable(np.ones((20, 20), np.float32), name="weights")
        count = mr.Variable(0, name="count")

    def step() -> None:
        weights.assign(weights.value * 0.5)
        count.assign_add(1)

    return weights, mr.function(lambda: strategy.run(step)) if as_function else lambda: strategy.run(step)


@pytest.mark.parametrize("as_function", [False, True])
def test_a_bit_that_flips_during_training_is_found(strategy3, as_function: bool, monkeypatch) -> None:
    monkeypatch.setattr(equal_copies, "MAX_COST", 1.0)  # compare often
    weights, step = train(strategy3, as_function)
    for _ in range(70):
        step()
    flip(weights, 2, word=77, bit=3)
    with pytest.raises(mr.ReplicasDivergeError, match=r"copies of variable 'weights' differ: replicas \[2\] from replica 0"):
        for _ in range(20_000):
            step()


def test_all_mirrored_variables_that_a_step_writes_are_watched(strategy2) -> None:
    with strategy2.scope():
        pair = [mr.Variable(np.zeros(3, np.float32), name=name) for name in ("first", "second")]
        seen = mr.Variable(0, name="seen", synchronization="on_read", aggregation="sum")

    def step() -> None:
        for variable in (*pair, seen):
            variable.assign(variable.value + 1)

    strategy2.run(step)
    [watch] = [program.watch for program in strategy2._steps.programs]
    for variable in pair:
        good = variable._array
        flip(variable, 1)
        with pytest.raises(mr.ReplicasDivergeError, match=rf"copies of variable '{variable.name}' differ: replicas \[1\]"):
            watch.look()
        variable._array = good
    assert seen.numpy() == 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """Make a run take 1 ms and a comparison what the test says, in seconds; return that, and when there were comparisons."""
    made = SimpleNamespace(now=100.0, cost=0.005, looked=[], run=0.001)

    def compare(mesh: Any, variables: Any, every: int) -> int:
        made.now += made.cost
        made.looked.append((made.count, every))
        return every

    def run_until(watch: equal_copies.Watch, count: int) -> list[tuple[int, int]]:
        made.looked = []
        for made.count in range(watch.count + 1, count + 1):
            made.now += made.run
            watch.count = made.count
            if watch.count >= watch.next:
                watch.look()
        return made.looked

    made.run_until = run_until
    monkeypatch.setattr(equal_copies, "check", compare)
    monkeypatch.setattr(equal_copies, "_watches", weakref.WeakSet())  # without those of other tests
    monkeypatch.setattr(equal_copies.time, "perf_counter", lambda: made.now)
    return made


def test_copies_are_compared_so_seldom_that_it_costs_one_percent(strategy2, clock) -> None:
    watch = equal_copies.Watch(strategy2._mesh, [])
    assert [count for count, _ in clock.run_until(watch, 500)] == [20, 40, 60], "two comparisons are measured"
    looked = clock.run_until(watch, 100_000)
    assert {every for _, every in looked} == {500}, "5 ms in 500 runs of 1 ms"


@pytest.mark.parametrize("slow", [0, 1, 2, 5])
def test_one_slow_comparison_puts_nothing_off(strategy2, clock, slow: int) -> None:
    watch = equal_copies.Watch(strategy2._mesh, [])
    intervals = []
    for number in range(10):
        clock.cost = 1000.0 if number == slow else 0.005  # the machine slept
        [(_, every)] = clock.run_until(watch, watch.next)
        intervals.append(every)
    assert intervals == pytest.approx([20, 20] + [500] * 8, abs=1)


@pytest.mark.parametrize("costs", [(0.005, 0.005, 0.005), (0.001, 0.02, 0.1)])
def test_programs_that_run_in_turns_share_one_percent(strategy2, clock, costs: tuple[float, ...]) -> None:
    early, *turns = [equal_copies.Watch(strategy2._mesh, []) for _ in range(1 + len(costs))]
    clock.run_until(early, 30)  # and does not run any more
    spent, begun = 0.0, 0.0
    for count in range(1, 60_000):
        if count == 10_000:
            spent, begun = 0.0, clock.now
        for watch, clock.cost in zip(turns, costs, strict=True):
            spent += len(clock.run_until(watch, count)) * clock.cost
    assert spent / (clock.now - begun) == pytest.approx(0.01, rel=0.15)


def test_threads_that_run_one_program_do_not_all_compare(strategy2, monkeypatch) -> None:
    watch = equal_copies.Watch(strategy2._mesh, [])
    watch.count, compared = watch.next, []

    def compare(mesh: Any, variables: Any, every: int) -> int:
        compared.append(watch.count < watch.next)  # what another thread asks meanwhile
        return every

    monkeypatch.setattr(equal_copies, "check", compare)
    watch.look()
    assert compared == [True] and watch.next == 40


def test_long_runs_are_compared_every_twenty(strategy2, clock) -> None:
    watch = equal_copies.Watch(strategy2._mesh, [])
    clock.run = 1.0
    assert [count for count, _ in clock.run_until(watch, 100)] == [20, 40, 60, 80, 100]


@pytest.mark.parametrize("as_function", [False, True])
def test_copies_that_differ_are_found_at_each_run_until_they_are_mended(strategy2, as_function: bool) -> None:
    weights, step = train(strategy2, as_function)
    for _ in range(19):
        step()
    good = weights._array
    flip(weights, 1)
    for _ in range(2):
        with pytest.raises(mr.ReplicasDivergeError, match="copies of variable 'weights' differ"):
            step()
    weights._array = good
    step()


def test_variables_that_a_program_only_reads_are_watched(strategy2) -> None:
    with strategy2.scope():
        frozen = mr.Variable(np.ones(3, np.float32), name="frozen")
    for evaluate in (lambda: strategy2.run(lambda: frozen.value * 2), mr.function(lambda: frozen.value * 2)):
        for _ in range(19):
            evaluate()
        good = frozen._array
        flip(frozen, 1)
        with pytest.raises(mr.ReplicasDivergeError, match="copies of variable 'frozen' differ"):
            evaluate()
        frozen._array = good


@pytest.mark.parametrize("as_function", [False, True])
def test_with_several_workers_only_runs_in_the_main_thread_count(strategy2, as_function: bool) -> None:
    _, step = train(strategy2, as_function)
    step()
    programs = [next(reversed(list(function._programs)))] if as_function else strategy2._steps.programs
    [watch] = [program.watch for program in programs]
    for is_joint, expected in ((False, 2), (True, 2)):
        watch.is_joint = is_joint
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert watch.count == expected
    step()
    assert watch.count == 3


def test_with_one_replica_and_without_variables_nothing_is_watched(strategy2) -> None:
    one = mr.MirroredStrategy(["cpu:0"])
    train(one, as_function=False)[1]()
    strategy2.run(lambda: 1 * np.ones(2))
    assert [program.watch for program in (*one._steps.programs, *strategy2._steps.programs)] == [None, None]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch):
    """Make what the other workers say, of what this one says."""

    def tell(others: Callable[[Any], list[Any]]) -> None:
        monkeypatch.setattr(equal_copies, "_exchange", lambda mesh, own: [own, *others(own)])

    return tell


def test_all_workers_compare_as_seldom_as_the_one_that_needs_it_most(strategy2, told) -> None:
    told(lambda own: [[own[0], [], own[2] + 50], [own[0], [], 7]])
    _, step = train(strategy2, as_function=False)
    for _ in range(20):
        step()
    [watch] = [program.watch for program in strategy2._steps.programs]
    assert watch.every == 70 and watch.next == 90


def test_a_variable_that_another_worker_has_forgotten_is_left_out_and_the_others_are_compared(strategy2, told) -> None:
    with strategy2.scope():
        pair = [mr.Variable(np.ones(3, np.float32), name=name) for name in ("forgotten", "kept")]
    told(lambda own: [[own[0], [entry for entry in own[1] if entry[0] != pair[0]._spec.number], 0]])
    equal_copies.check(strategy2._mesh, pair)
    told(lambda own: [[own[0], [[number, [0 for _ in sums]] for number, sums in own[1][1:]], 0]])
    mesh = SimpleNamespace(num_replicas=4, is_alone=False, devices=[SimpleNamespace(process_index=i // 2) for i in range(4)])
    with pytest.raises(mr.ReplicasDivergeError, match=r"'kept' differ: replicas \[2, 3\] \(worker 1\) from replica 0"):
        equal_copies.check(mesh, pair)


def test_workers_at_different_batches_are_told(strategy2, told) -> None:
    with strategy2.scope():
        variable = mr.Variable(1.0)
    told(lambda own: [[[str(int(own[0][0]) + 1), *own[0][1:]], own[1], 0]])
    with pytest.raises(mr.ProgramMismatchError, match="different numbers of batches"):
        equal_copies.check(strategy2._mesh, [variable])


def test_workers_that_did_other_things_are_told(strategy2, told) -> None:
    told(lambda own: [[[own[0][0], "other", "evaluate"], own[1], 0]])
    with pytest.raises(mr.ProgramMismatchError, match=r"different orders.*worker 1: evaluate"):
        equal_copies.check(strategy2._mesh, [])
