"""Where the time of a loop of steps goes: shares that add up to the whole, of warm steps, of one thread."""

import collections
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mirrored as mr
from mirrored import _process
from mirrored._program import steps
from mirrored._replicas import in_flight
from mirrored._replicas.spent import Spent, waited
from mirrored.data import _iterator


class Clock:
    """A clock that shows one second more each time that somebody looks, and more where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
        self.now = 0.0
        for module in modules:
            monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=self.look))

    def look(self) -> float:
        self.now += 1.0
        return self.now


def double(x):
    return x * 2


def test_the_parts_of_a_loop_add_up_and_a_step_that_is_compiled_begins_it_anew(strategy2, monkeypatch):
    monkeypatch.setattr(_process, "in_flight", collections.deque())  # nothing of other tests is waited for
    clock, x, spent = Clock(monkeypatch, steps), np.ones(3, np.float32), strategy2._steps.spent
    strategy2.run(double, args=(x,))
    assert (spent.num_steps, spent.last) == (0, None)
    for _ in range(3):
        waited.input += 4.0
        clock.now += 10.0
        strategy2.run(double, args=(x,))
    assert (spent.num_steps, spent.wall, spent.input, spent.devices, spent.python) == (2, 24.0, 8.0, 0.0, 2.0)
    strategy2.run(double, args=(np.ones(4, np.float32),))  # compiled
    clock.now += 1000.0
    strategy2.run(double, args=(x,))
    strategy2.run(double, args=(x,))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(strategy2.run, double, (x,)).result()
    assert (spent.num_steps, spent.wall, spent.python) == (3, 26.0, 3.0)


def test_waiting_for_programs_in_flight_is_no_python(strategy2, monkeypatch):
    clock, x, spent = Clock(monkeypatch, steps, in_flight), np.ones(3, np.float32), strategy2._steps.spent
    step = lambda x: mr.get_replica_context().all_reduce("sum", x)  # noqa: E731
    for _ in range(2 * in_flight.MAX_IN_FLIGHT):
        strategy2.run(step, args=(x,))
    assert spent.devices >= 1.0 and spent.python == spent.num_steps * 1.0 + spent.devices  # the clock is looked at twice to wait
    assert spent.wall <= clock.now


def test_waiting_for_a_batch_is_input(strategy2, monkeypatch):
    Clock(monkeypatch, _iterator)
    before = waited.input
    batches = iter(strategy2.distribute_dataset([np.ones(2)] * 3))
    next(batches)
    next(batches)
    assert waited.input == before + 2.0
    batches.close()


def test_nothing_is_said_of_a_few_steps_and_a_line_of_many(strategy2, tmp_path):
    x, spent = np.ones(3, np.float32), strategy2._steps.spent
    for _ in range(12):
        strategy2.run(double, args=(x,))
    assert spent.shares() == {} and "time of" not in strategy2.explain()
    assert "Too few steps" in mr.report(strategy2, tmp_path / "run.html").read_text()
    for _ in range(12):
        strategy2.run(double, args=(x,))
    shares = spent.shares()
    assert sum(shares.values()) == pytest.approx(1.0) and min(shares.values()) >= 0
    [line] = [line for line in strategy2.explain().splitlines() if line.startswith("time of ")]
    assert line.startswith("time of 22 steps, ") and line.endswith("% between the steps")
    page = mr.report(strategy2, tmp_path / "run.html").read_text()
    assert "22 steps of strategy.run" in page and all(name in page for name in shares)
    [words] = Spent(num_steps=20, wall=2.0, input=1.0, devices=0.5, python=0.2).in_words()
    whole = "50% waiting for input, 25% waiting for devices, 10% Python and dispatch, 15% between the steps"
    assert words == f"time of 20 steps, 100 ms each: {whole}"
    words, why = Spent(num_steps=20, wall=2.0, input=0.1, devices=0.0, python=0.2).in_words()
    assert words.endswith(", 85% between the steps") and why.endswith("each result that it reads, as float(loss) does")
