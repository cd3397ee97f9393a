"""Where the time of a loop of steps goes: shares that add up to the whole, of warm steps, of one thread."""

import collections
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import mirrored as mr
from mirrored import _process
from mirrored._program import dispatch
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
    clock, x, spent = Clock(monkeypatch, dispatch), np.ones(3, np.float32), strategy2._steps.spent
    strategy2.run(double, args=(x,))
    assert (len(spent.steps), spent.last, spent.num_compiled) == (0, None, 1)
    for _ in range(3):
        waited.input += 4.0
        clock.now += 10.0
        strategy2.run(double, args=(x,))
    assert list(spent.steps) == [(12.0, 4.0, 0.0, 1.0)] * 2
    strategy2.run(double, args=(np.ones(4, np.float32),))  # compiled
    clock.now += 1000.0
    strategy2.run(double, args=(x,))
    strategy2.run(double, args=(x,))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(strategy2.run, double, (x,)).result()
    assert list(spent.steps)[2:] == [(2.0, 0.0, 0.0, 1.0)] and spent.num_compiled == 2


def test_no_compilation_is_in_the_time_of_steps_whatever_compiles_and_when(strategy2, monkeypatch):
    spent, x = strategy2._steps.spent, np.ones(3, np.float32)
    batches = strategy2.distribute_dataset(strategy2.make_numpy_dataset(np.ones((9, 1), np.float32)).batch(4))
    for batch in batches:  # the odd last batch's program is traced in the first step, and compiled in the third
        strategy2.run(double, args=(batch,))
    assert (spent.num_compiled, len(spent.steps), spent.last) == (2, 0, None) and spent.compiling > 0
    compiled, last = mr.function(double), []
    for step in (compiled, compiled, lambda x: strategy2.run(lambda x: jax.pure_callback(np.copy, x, x), args=(x,))):
        strategy2.run(double, args=(batch,))
        step(x)
        last.append(spent.last)
    assert last[0] is None and last[1] is not None and last[2] is None, "a function's first call is in no step, its second is"
    with pytest.raises(ZeroDivisionError):
        strategy2.run(lambda: 1 / 0)
    assert spent.num_compiled == 3 and spent.last is None, "what failed is in no step, and is no program"


def test_a_step_that_was_slow_once_is_no_steady_step_and_the_last_steps_count():
    spent = Spent(num_compiled=2, compiling=2.4)
    spent.steps.extend([(0.001, 0.0, 0.0, 0.001)] * 2000 + [(1.0, 1.0, 0.0, 0.0)])
    compiled, words = spent.in_words()
    assert compiled == "time of 2 compilations: 2.4 s, which no step below has"
    assert words.startswith("time of the last 1000 steps, 2 s with a median of 1 ms: 50% waiting for input, ")


def test_waiting_for_programs_in_flight_is_no_python(strategy2, monkeypatch):
    clock, x, spent = Clock(monkeypatch, dispatch, in_flight), np.ones(3, np.float32), strategy2._steps.spent
    step = lambda x: mr.get_replica_context().all_reduce("sum", x)  # noqa: E731
    for _ in range(2 * in_flight.MAX_IN_FLIGHT):
        strategy2.run(step, args=(x,))
    _, _, devices, python = map(sum, zip(*spent.steps, strict=True))
    assert devices >= 1.0 and python == len(spent.steps) * 1.0 + devices  # the clock is looked at twice to wait
    assert spent.wall() <= clock.now


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
    assert spent.shares() == {} and "time of the last" not in strategy2.explain()
    assert "Too few steps" in mr.report(strategy2, tmp_path / "run.html").read_text()
    for _ in range(12):
        strategy2.run(double, args=(x,))
    shares = spent.shares()
    assert sum(shares.values()) == pytest.approx(1.0) and min(shares.values()) >= 0
    [line] = [line for line in strategy2.explain().splitlines() if line.startswith("time of the last")]
    assert line.startswith("time of the last 22 steps, ") and line.endswith("% between the steps")
    assert "time of 1 compilation: " in strategy2.explain()
    page = mr.report(strategy2, tmp_path / "run.html").read_text()
    assert (
        "1 compilation of steps: " in page
        and "The last 22 steps of strategy.run" in page
        and all(name in page for name in shares)
    )
    [words] = Spent(steps=collections.deque([(0.1, 0.05, 0.025, 0.01)] * 20)).in_words()
    whole = "50% waiting for input, 25% waiting for devices, 10% Python and dispatch, 15% between the steps"
    assert words == f"time of the last 20 steps, 2 s with a median of 100 ms: {whole}"
    words, why = Spent(steps=collections.deque([(0.1, 0.005, 0.0, 0.01)] * 20)).in_words()
    assert words.endswith(", 85% between the steps") and why.endswith("each result that it reads, as float(loss) does")
