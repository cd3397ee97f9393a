"""How long programs are kept: as long as what they were made for, and no model lives for its program's sake."""

import dataclasses
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import nightly
from strategies import variable

import mirrored as mr
from mirrored._program import cache
from mirrored._transforms import function
from mirrored._variables import variable as _variable

pytestmark = pytest.mark.usefixtures("in_numpy")


def weights(strategy):
    return variable(np.ones((4, 2)), strategy)


def add(w):
    return w.assign_add(jnp.ones((4, 2)))


def method(strategy, w):
    class Trainer:
        parameters = {"w": w}  # noqa: RUF012

        def step(self):
            return [add(self.parameters["w"])][:0]

        def train(self):
            strategy.run(self.step)

    return Trainer().train


#: Each makes a function that trains a variable.
WAYS = {
    "argument": lambda s, w: lambda: s.run(add, args=(w,)) is w,
    "method": method,
    "function": lambda s, w: mr.function(lambda: [s.run(lambda: [add(w)][:0]), w.value][1]),
    "dict": lambda s, w: (lambda held: lambda: s.run(lambda: [add(next(iter(held.values())))][:0]))({"w": w}),
}


@pytest.mark.parametrize("way", ["argument", "method", *nightly(*sorted(WAYS.keys() - {"argument", "method"}))])
def test_a_model_that_is_dropped_takes_its_programs_with_it(way, strategy2):
    dropped, counts = [], []
    for _ in range(3):
        w = weights(strategy2)
        run = WAYS[way](strategy2, w)
        for _ in range(4):  # the third takes the fast path
            run()
        dropped.append(weakref.ref(w))
        del w, run
        gc.collect()
        assert way == "dict" or not strategy2._steps.programs.fast_paths
        counts.append(len(list(strategy2._steps.programs)))
    is_late = way == "dict"  # which has no weak references: it goes when the next program is made
    assert [reference() is None for reference in dropped] == [True, True, not is_late]
    assert len(set(counts)) == 1 and counts[0] <= (2 if is_late else 1)
    strategy2.run(lambda: 1.0)
    gc.collect()
    assert dropped[-1]() is None


def test_strategies_that_are_dropped_leave_nothing():
    def live():
        gc.collect()
        return len(cache._all), len(_variable._live), len(list(function._outside.programs)), len(function._in_scope)

    def use():
        strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
        for way in ("argument", "function"):
            WAYS[way](strategy, weights(strategy))()
        with strategy.scope():
            WAYS["function"](strategy, weights(strategy))()

    use()
    before = live()
    for _ in range(4):
        use()
    assert live() == before


@pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")
def test_of_many_programs_those_least_recently_called_go_first(strategy2, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(cache, "MAX_FORGOTTEN", 3)
    monkeypatch.setattr(cache, "MAX_PROGRAMS", 6)
    monkeypatch.setattr(cache.time, "monotonic", lambda: now)

    def sizes_after(*called):
        for size in called:
            strategy2.run(lambda x: x.sum(), args=(np.ones(size),))
        return sorted(p.lifted.closed.in_avals[0].shape[-1] for p in strategy2._steps.programs)

    assert sizes_after(1, 2, 3, 4, 5) == [1, 2, 3, 4, 5]  # all were called lately
    assert sizes_after(6, 1, 7, 8) == [1, 4, 5, 6, 7, 8]
    now += cache.LATELY_SECONDS + 1
    assert sizes_after(8, 9) == [7, 8, 9]  # three stay however long ago they were called
    assert sizes_after(10, 11) == [8, 9, 10, 11]  # 8 was called lately, as the last one


@pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")
def test_another_object_at_the_place_of_one_that_has_ended_is_another_program(strategy2):
    """The key knows a closed-over object by its address, which the next one may have."""

    class Config:
        def __init__(self, factor):
            self.factor = factor

    def results(box, factor_of):
        step = lambda: jnp.float32(factor_of(box))  # noqa: E731
        return [float(strategy2.run(step)) for _ in range(3)]  # the third takes the fast path

    boxes = ((Config, lambda c: c.factor), (lambda f: [f], lambda c: c[0]), (lambda f: {0: f}, lambda c: c[0]), (float, float))
    for make, factor_of in boxes:
        assert [results(make(float(number)), factor_of) for number in range(8)] == [[number] * 3 for number in range(8)]


class Metadata:
    """What a library keeps in the structure of a tree; it cannot be compared once `is_alive` is over, as when a process ends."""

    is_alive = True

    def __hash__(self):
        assert Metadata.is_alive
        return 1

    def __eq__(self, other):
        assert Metadata.is_alive
        return self is other


@dataclasses.dataclass
class Module:
    array: Any
    metadata: Metadata


jax.tree_util.register_dataclass(Module, ["array"], ["metadata"])


def test_functions_made_anew_share_a_program_while_what_they_close_over_lives(strategy2):
    w, parameters = weights(strategy2), {"w": weights(strategy2)}
    traces = []
    for turn in range(3):
        strategy2.run(lambda: (traces.append("w"), w.assign_add(jnp.ones((4, 2))))[:0])
        strategy2.run(lambda: (traces.append("dict"), parameters["w"].assign_add(jnp.ones((4, 2))))[:0])
        mr.scan(lambda carry, x: (carry + w[0, 0], None), 0.0, length=2)
        gc.collect()
        if not turn:
            first = len(traces)
    assert len(traces) == first
    assert w.numpy()[0, 0] == parameters["w"].numpy()[0, 0] == 4


def test_a_program_goes_without_a_look_at_what_its_key_holds(strategy2, monkeypatch):
    """Nothing of another library is called while garbage is collected; warnings of its errors are errors here."""
    variables = [weights(strategy2) for _ in range(3)]
    for w in variables:
        strategy2.run(lambda module, w=w: module.array @ w.value, args=(Module(np.ones(4, np.float32), Metadata()),))
    assert len(list(strategy2._steps.programs)) == 3
    monkeypatch.setattr(Metadata, "is_alive", False)
    del variables, w
    gc.collect()
    assert not list(strategy2._steps.programs)
