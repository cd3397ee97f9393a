"""A step that is called in a loop is known by a few looks, and is another one as soon as anything in its key is."""

import functools
import gc
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._program import steps

SCALE: Any = 2.0


def rows(strategy: mr.Strategy, *shape: int) -> Any:
    return strategy.distribute_values_from_function(lambda ctx: np.full(shape, 1.0 + ctx.replica_id_in_sync_group, np.float32))


def total(strategy: mr.Strategy, result: Any) -> float:
    return float(jnp.sum(strategy.reduce("sum", result)))


@pytest.fixture
def strategy() -> mr.Strategy:
    return mr.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions of the calls whose whole key was asked for."""
    asked: list[Any] = []
    real = steps.key_of

    def key_of(function: Any, *rest: Any) -> Any:
        asked.append(function)
        return real(function, *rest)

    monkeypatch.setattr(steps, "key_of", key_of)
    return asked


def warmed(strategy: mr.Strategy, step: Callable[..., Any], *args: Any) -> Any:
    """Call a step until its fast path is there."""
    for _ in range(3):
        result = strategy.run(step, args=args)
    return result


BATCHES = {
    "none": lambda x: (),
    "several": lambda x: (x, x),
    "dict": lambda x: ({"b": x, "a": x},),
    "tuple": lambda x: ((x, x),),
    "list": lambda x: ([x, x],),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_step_in_a_loop_is_known_without_its_key(kind: str, strategy: mr.Strategy, keys: list[Any]) -> None:
    args = BATCHES[kind](rows(strategy, 3))

    def step(*arguments: Any) -> Any:
        leaves = jax.tree.leaves(arguments)
        return sum(place * jnp.sum(leaf) for place, leaf in enumerate(leaves, 1)) if leaves else jnp.zeros(())

    expected = total(strategy, strategy.run(step, args=args))
    warmed(strategy, step, *args)
    keys.clear()
    assert total(strategy, strategy.run(step, args=args)) == expected and not keys


def test_a_function_made_anew_is_the_same_step_while_it_closes_over_the_same(strategy: mr.Strategy, keys: list[Any]) -> None:
    x, factors = rows(strategy, 3), (2.0, 3.0)

    def made(factor: Any) -> Callable[[Any], Any]:
        return lambda x: jnp.sum(x) * factor

    for factor in factors:
        warmed(strategy, made(factor), x)
        keys.clear()
        assert total(strategy, strategy.run(made(factor), args=(x,))) == 9 * factor and not keys


class Scaled:
    factor = 2.0

    def step(self, x: Any) -> Any:
        return jnp.sum(x) * self.factor

    __call__ = step


OF_A_CLASS = {
    "method": lambda t: t.step,
    "partial": lambda t: functools.partial(Scaled.step, t),
    "callable": lambda t: t,
    "default": lambda t: lambda x, t=t: t.step(x) * t.factor / t.factor,
}


@pytest.mark.parametrize("kind", OF_A_CLASS)
def test_methods_bound_arguments_and_defaults_are_known_without_a_key_and_what_they_name_is_seen(
    kind: str, strategy: mr.Strategy, keys: list[Any]
) -> None:
    x, scaled = rows(strategy, 3), Scaled()
    make = OF_A_CLASS[kind]
    for factor in (2.0, 3.0, 2.0):
        scaled.factor = factor
        assert total(strategy, warmed(strategy, make(scaled), x)) == 9 * factor
        keys.clear()
        assert total(strategy, strategy.run(make(scaled), args=(x,))) == 9 * factor and not keys


def test_what_a_step_reads_may_change_at_any_time(strategy: mr.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    x, inside = rows(strategy, 3), 3.0

    def helper(y: Any) -> Any:
        return y * inside

    def step(x: Any) -> Any:
        return helper(jnp.sum(x)) * SCALE

    assert total(strategy, warmed(strategy, step, x)) == 54.0
    monkeypatch.setitem(globals(), "SCALE", 4.0)  # a global
    assert total(strategy, warmed(strategy, step, x)) == 108.0
    inside = 5.0  # what a function closes over that the step closes over
    assert total(strategy, warmed(strategy, step, x)) == 180.0
    other = types.FunctionType(step.__code__, {**globals(), "SCALE": 1.0}, "step", None, step.__closure__)  # another module
    assert total(strategy, strategy.run(other, args=(x,))) == 45.0
    monkeypatch.delitem(globals(), "SCALE")
    with pytest.raises(NameError, match="SCALE"):
        strategy.run(step, args=(x,))


def test_a_function_gets_defaults_or_becomes_a_method(strategy: mr.Strategy) -> None:
    x, offset = rows(strategy, 3), jnp.ones(3)

    def added(*values: Any, scale: Any = None) -> Any:
        return sum(jnp.sum(value) for value in values) * (1.0 if scale is None else scale)

    def plain(*values: Any) -> Any:
        return sum(jnp.sum(value) for value in values)

    def outer(x: Any) -> Any:
        return inner(x)

    inner = plain
    for step in (plain, outer):
        assert total(strategy, warmed(strategy, step, x)) == 9
    assert total(strategy, warmed(strategy, plain, x)) == 9
    assert total(strategy, strategy.run(types.MethodType(plain, offset), args=(x,))) == 15
    assert total(strategy, warmed(strategy, outer, x)) == 9
    inner = types.MethodType(plain, offset)
    assert total(strategy, strategy.run(outer, args=(x,))) == 15
    added.__kwdefaults__ = None
    with pytest.raises(TypeError, match="scale"):
        strategy.run(added, args=(x,))
    for scale in (2.0, 3.0):
        added.__kwdefaults__ = {"scale": scale}
        assert total(strategy, warmed(strategy, added, x)) == 9 * scale


def test_a_function_that_is_closed_over_twice_may_become_two(strategy: mr.Strategy) -> None:
    x = rows(strategy, 3)

    def made(factor: float) -> Callable[[Any], Any]:
        return lambda y: jnp.sum(y) * factor

    first = second = made(1.0)

    def step(x: Any) -> Any:
        return first(x) + 10 * second(x)

    assert total(strategy, warmed(strategy, step, x)) == 99
    second = made(2.0)
    assert total(strategy, warmed(strategy, step, x)) == 189


def test_what_is_read_may_be_another_object_each_time(strategy: mr.Strategy) -> None:
    x = rows(strategy, 3)

    class Model:
        values = (1.0, 2.0)

        @property
        def scale(self) -> Any:
            return [float(value) for value in self.values]

    model = Model()

    def step(x: Any) -> Any:
        return jnp.sum(x) * sum(model.scale)

    assert total(strategy, warmed(strategy, step, x)) == 27
    model.values = (3.0, 4.0)
    assert total(strategy, warmed(strategy, step, x)) == 27, "a property that is made anew is what the object is"
    assert strategy._steps.programs.fast_path is not None


def test_a_step_that_is_compiled_by_jax_or_calls_itself_is_known(strategy: mr.Strategy) -> None:
    x, factor = rows(strategy, 3), 2.0

    @jax.jit
    def step(x: Any) -> Any:
        return jnp.sum(x) * factor

    def deep(x: Any, depth: int) -> Any:
        return deep(x, depth - 1) * factor if depth else jnp.sum(x)

    assert total(strategy, warmed(strategy, step, x)) == 18
    assert total(strategy, warmed(strategy, lambda x: deep(x, 2), x)) == 36
    factor = 3.0
    assert total(strategy, warmed(strategy, lambda x: deep(x, 2), x)) == 81


def test_numbers_that_come_and_go_are_not_taken_for_each_other(strategy: mr.Strategy) -> None:
    x = rows(strategy, 3)

    def made(factor: Any) -> Callable[[Any], Any]:
        return lambda x: jnp.sum(x) * factor

    for number in range(7):  # each ends before the next begins, and may leave it its place in memory
        factor = float(number)
        found = [total(strategy, strategy.run(made(factor), args=(x,))) for _ in range(3)]
        assert found == [9 * number] * 3
        del factor


def test_arguments_of_another_kind_are_another_step(strategy: mr.Strategy) -> None:
    def step(x: Any, **more: Any) -> Any:
        return jnp.sum(x) * (10 if more else 1) * x.shape[0]

    def plain(x: Any) -> Any:
        return jnp.sum(x["a"] - 2 * x["b"] if isinstance(x, dict) else x[0] if isinstance(x, tuple | list) else x)

    x = rows(strategy, 3)
    assert total(strategy, warmed(strategy, plain, x)) == 9
    assert total(strategy, strategy.run(plain, args=(rows(strategy, 4),))) == 12
    assert total(strategy, strategy.run(plain, args=(np.ones(3, np.float32),))) == 6
    zeros = strategy.distribute_values_from_function(lambda ctx: np.zeros(3, np.float32))
    assert total(strategy, warmed(strategy, plain, {"b": zeros, "a": x})) == 9
    assert total(strategy, strategy.run(plain, args=({"a": zeros, "b": x},))) == -18
    assert total(strategy, strategy.run(plain, args=({"a": x, "b": zeros},))) == 9
    with pytest.raises(KeyError, match="b"):
        strategy.run(plain, args=({"a": x, "c": zeros},))
    assert total(strategy, strategy.run(plain, args=(x,))) == 9
    assert total(strategy, warmed(strategy, plain, (x, x))) == 9
    assert total(strategy, strategy.run(plain, args=([x, x],))) == 9
    assert total(strategy, strategy.run(plain, args=((x,),))) == 9
    uneven = strategy.distribute_values_from_function(lambda ctx: np.ones(3 - ctx.replica_id_in_sync_group, np.float32))
    assert total(strategy, warmed(strategy, plain, x)) == 9 and total(strategy, strategy.run(plain, args=(uneven,))) == 5
    assert total(strategy, warmed(strategy, plain, uneven)) == 5, "padded, its arrays have the shape of x"
    assert total(strategy, strategy.run(plain, args=(x,))) == 9
    assert total(strategy, warmed(strategy, step, x)) == 27 and total(strategy, strategy.run(step, (x,), {"y": 1})) == 270
    assert total(strategy, strategy.run(step, args=(rows(strategy, 4),))) == 48


def test_a_fast_path_ends_with_its_program(strategy: mr.Strategy) -> None:
    x = rows(strategy, 3)

    def train(value: float) -> weakref.ref[Any]:
        with strategy.scope():
            w = mr.Variable(value)

        def step(x: Any) -> Any:
            return jnp.sum(x) * w

        assert total(strategy, warmed(strategy, step, x)) == 9 * value
        return weakref.ref(w)

    for value in (1.0, 2.0):
        ended = train(value)
        gc.collect()
        assert ended() is None and strategy._steps.programs.fast_path is None


def test_threads_take_each_their_own_step(strategy: mr.Strategy) -> None:
    x, wrong = rows(strategy, 3), []

    def work(factor: float) -> None:
        def step(x: Any) -> Any:
            return jnp.sum(x) * factor

        for _ in range(20):
            if (found := total(strategy, strategy.run(step, args=(x,)))) != 9 * factor:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in (1.0, 2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
