"""How long programs are kept: as long as what they were made for, and no model lives for its program's sake."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import slow

import mirrored as mr
from mirrored._program import cache
from mirrored._transforms import function
from mirrored._variables import variable as _variable

ROWS = np.ones((6, 4), np.float32)


def weights(strategy: mr.Strategy) -> mr.Variable:
    with strategy.scope():
        return mr.Variable(np.ones((4, 2)))


def adding_to(read: Callable[[], mr.Variable]) -> Callable[[], None]:
    def step() -> None:
        read().assign_add(jnp.ones((4, 2)))

    return step


def closure(strategy: mr.Strategy) -> tuple[Any, Callable[[], Any]]:
    w = weights(strategy)
    with strategy.scope():
        optimizer = mr.Optimizer(optax.adam(0.1), [w])

    def step(x: Any) -> Any:
        value, gradients = mr.value_and_grad(lambda: jnp.mean(jnp.matmul(x, w)), [w])()
        optimizer.apply_gradients(gradients, aggregate="mean")
        return value

    datasets = [strategy.distribute_dataset(strategy.make_numpy_dataset(ROWS[:n]).batch(n)) for n in (5, 6)]
    return w, lambda: [strategy.run(step, args=(x,)) for batches in datasets for x in batches]


def method(strategy: mr.Strategy) -> tuple[Any, Callable[[], Any]]:
    class Trainer:
        def __init__(self) -> None:
            self.parameters = {"w": weights(strategy)}

        def step(self) -> None:
            self.parameters["w"].assign_add(jnp.ones((4, 2)))

        def train(self) -> None:
            strategy.run(self.step)

    trainer = Trainer()
    return trainer.parameters["w"], trainer.train


def argument(strategy: mr.Strategy) -> tuple[Any, Callable[[], Any]]:
    w = weights(strategy)

    def step(v: mr.Variable) -> mr.Variable:
        return v.assign_add(jnp.ones((4, 2)))

    return w, lambda: strategy.run(step, args=(w,)) is w


def compiled(strategy: mr.Strategy) -> tuple[Any, Callable[[], Any]]:
    w = weights(strategy)
    step = adding_to(lambda: w)

    @mr.function
    def train() -> Any:
        strategy.run(step)
        return w.value

    return w, train


def loop(strategy: mr.Strategy) -> tuple[Any, Callable[[], Any]]:
    w = weights(strategy)

    def body(carry: Any, x: Any) -> Any:
        w.assign_add(jnp.ones((4, 2)))
        return carry, None

    return w, lambda: mr.scan(body, 0.0, length=2)


def in_a_dict(strategy: mr.Strategy) -> tuple[Any, Callable[[], Any]]:
    parameters = {"w": weights(strategy)}
    return parameters["w"], lambda: strategy.run(lambda: adding_to(lambda: next(iter(parameters.values())))())


def in_a_tuple_of_a_function(strategy: mr.Strategy) -> tuple[Any, Callable[[], Any]]:
    parameters = (weights(strategy),)
    return parameters[0], mr.function(lambda: strategy.run(lambda: adding_to(lambda: parameters[0])()))


@pytest.mark.parametrize("make", [argument, *slow(closure, loop, method, compiled, in_a_dict, in_a_tuple_of_a_function)])
def test_a_model_that_is_dropped_takes_its_programs_with_it(make: Any, strategy2: mr.MirroredStrategy) -> None:
    dropped, counts = [], []
    for _ in range(3):
        w, run = make(strategy2)
        for _ in range(2):
            run()
        dropped.append(weakref.ref(w))
        del w, run
        gc.collect()
        counts.append(len(list(strategy2._steps.programs)))
    is_late = make is in_a_dict  # which cannot say when it ends: it goes when the next program is made
    assert [reference() is None for reference in dropped] == [True, True, not is_late]
    assert len(set(counts)) == 1 and counts[0] <= (2 if is_late else 1)
    strategy2.run(lambda: 1.0)
    gc.collect()
    assert dropped[-1]() is None


def test_strategies_that_are_dropped_leave_nothing() -> None:
    def live() -> tuple[int, int, int]:
        gc.collect()
        return len(cache._all), len(_variable._live), len(list(function._programs))

    def use() -> None:
        strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
        for make in (argument, compiled):
            make(strategy)[1]()

    use()
    before = live()
    for _ in range(4):
        use()
    assert live() == before


def test_functions_made_anew_for_each_step_share_a_program_while_what_they_close_over_lives(
    strategy2: mr.MirroredStrategy,
) -> None:
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


@pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")
def test_another_object_at_the_place_of_one_that_has_ended_is_another_program(strategy2: mr.MirroredStrategy) -> None:
    """The key knows a closed-over object by its address, which the next one may have."""

    class Config:
        def __init__(self, factor: float) -> None:
            self.factor = factor

    def result(box: Any, factor_of: Callable[[Any], float]) -> float:
        return float(strategy2.run(lambda: jnp.float32(factor_of(box))))

    for make, factor_of in ((Config, lambda c: c.factor), (lambda f: [f], lambda c: c[0]), (lambda f: {0: f}, lambda c: c[0])):
        assert [result(make(float(number)), factor_of) for number in range(20)] == list(range(20))


@dataclasses.dataclass(unsafe_hash=True)
class Changing:
    factor: float


def test_a_program_goes_whose_key_has_another_hash_by_now(
    strategy2: mr.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key has an argument that compares by what it holds, and that changes in place."""
    monkeypatch.setattr(cache, "MAX_PROGRAMS", 2)
    argument = Changing(1.0)
    step = lambda c, x: x * c.factor  # noqa: E731
    assert float(strategy2.run(step, args=(argument, 1.0))) == 1
    argument.factor = 2.0
    for number in range(4):
        assert float(strategy2.run(lambda x, n=float(number): x + n, args=(1.0,))) == 1 + number
    assert float(strategy2.run(step, args=(argument, 1.0))) == 2
