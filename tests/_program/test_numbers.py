"""A Python number that changes becomes an argument of the program, where its bits stay the same."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import slow

import mirrored as mr
from mirrored import testing

#: Each with the values that it gets in turn.
PASSED: dict[str, tuple[Callable[[Any, Any], Any], list[Any]]] = {
    "product": (lambda x, n: x * n, [0.1, 0.2, 0.3]),
    "division": (lambda x, n: x / n - n / x, [0.1, 0.2, 0.3]),
    "of integers": (lambda x, n: x + (n + 1) % 3 + (n // 2), [0, 1, 2, 3]),
    "key": (lambda x, n: x * jax.random.uniform(jax.random.fold_in(jax.random.key(0), n)), [0, 1, 2]),
    "choice": (lambda x, n: jnp.where(n > 1, x, -x) + jax.lax.cond(n < 1, lambda: x * n, lambda: -x), [0, 1, 2]),
    "index": (lambda x, n: x[n] + jax.lax.scan(lambda c, row: (c + row * n, None), 0.0, x)[0], [0, 1, 2]),
    "factor of a loss": (lambda x, n: jax.grad(lambda w: jnp.sum(w * x) * n)(x), [0.1, 0.2, 0.3]),
    "in the program": (lambda x, n: x * (jnp.float32(n) / 10), [1, 2, 3]),
    "of two kinds": (lambda x, n: x * n, [1, 2, 3, 1, 2]),
}
#: Python needs the number, or computes with it.
COMPILED_IN: dict[str, tuple[Callable[[Any, Any], Any], list[Any]]] = {
    "if": (lambda x, n: x if n > 1 else -x, [0, 1, 2]),
    "range": (lambda x, n: sum((x * i for i in range(n)), x), [1, 2, 3]),
    "schedule": (lambda x, n: x * (0.1 * 0.9**n), [1, 2, 3]),
    "double precision": (lambda x, n: x * (n / 10), [1, 2, 3]),
    "power": (lambda x, n: x**n, [1, 2, 3]),
    "narrow": (lambda x, n: x.astype(jnp.bfloat16) * n, [0.1, 0.2, 0.3]),
    "key of a dict": (lambda x, n: x * {0: 1.0, 1: 2.0, 2: 3.0}[n], [0, 1, 2]),
    "shape": (lambda x, n: jnp.broadcast_to(x, (n, 3)), [1, 2, 3]),
    "flag": (lambda x, n: x if n else -x, [True, False]),
}


def rows(strategy: mr.Strategy, *sizes: int) -> Any:
    return strategy.distribute_values_from_function(
        lambda ctx: np.linspace(0.1, 1, sizes[ctx.replica_id_in_sync_group], dtype=np.float32)
    )


def bits(result: Any) -> list[bytes]:
    return [np.asarray(own).tobytes() for own in result.values]


@pytest.mark.parametrize("sizes", [*slow(((3, 3),)), (3, 2, 4)], ids=["even", "uneven"])
def test_a_number_that_changes_is_passed_where_the_bits_stay_the_same(sizes: tuple[int, ...]) -> None:
    strategies = [mr.MirroredStrategy([f"cpu:{i}" for i in range(len(sizes))]) for _ in range(4)]
    names = ("product",) if len(sizes) > 2 else PASSED | COMPILED_IN
    for name in names:
        step, values = (PASSED | COMPILED_IN)[name]
        with testing.count_programs() as programs:
            found = [bits(strategies[0].run(step, args=(rows(strategies[0], *sizes), value))) for value in values]
        assert programs.count == (2 if name in PASSED else len(values)), (name, programs.describe())
        if name in PASSED:
            assert "from now on it is passed" in programs.reasons[1]
        for value, own, fresh in zip(values[1:3], found[1:3], strategies[1:], strict=False):
            assert bits(fresh.run(step, args=(rows(fresh, *sizes), value))) == own, (name, value)


class TrainState(NamedTuple):
    step: Any
    w: Any


def test_a_state_that_counts_its_steps_is_two_programs(strategy2: mr.Strategy) -> None:
    state = TrainState(0, np.ones(2, np.float32))

    def step(state: TrainState, rate: float, name: str) -> TrainState:
        return TrainState(state.step + 1, state.w - rate)

    with testing.count_programs() as programs:
        for k in range(5):
            state = strategy2.run(step, args=(state,), kwargs={"rate": 0.5 * k, "name": "sgd"})
    assert programs.count <= 3 and int(state.step) == 5 and state.w.tolist() == [-4, -4]
    with testing.assert_compiles(0):
        assert strategy2.run(step, args=(TrainState(7, state.w), 1.5, "sgd")[:1], kwargs={"rate": 1.5, "name": "sgd"}).step == 8


def test_only_the_number_that_may_be_is_passed(strategy2: mr.Strategy) -> None:
    x = rows(strategy2, 3, 3)
    step = lambda x, scale, count: sum((x * scale for _ in range(count)), x)  # noqa: E731
    with testing.count_programs() as programs:
        for k in range(4):
            strategy2.run(step, args=(x, 0.1 * k, 1 + k % 2))
    assert programs.count == 3, programs.describe()  # the first, and one for each count


def test_a_number_that_jax_cannot_hold_and_an_error_of_the_step_are_as_before(strategy2: mr.Strategy) -> None:
    x = rows(strategy2, 3, 3)
    add = lambda x, n: x + n % 7  # noqa: E731
    for value in (1, 2, 2**40):
        [own, _] = strategy2.run(add, args=(x, value)).values
        np.testing.assert_allclose(own, np.linspace(0.1, 1, 3) + value % 7, rtol=1e-6)

    def fails(x: Any, n: int) -> Any:
        if n == 2:
            raise KeyError("the user's")
        return x * n

    strategy2.run(fails, args=(x, 1))
    with pytest.raises(KeyError, match="the user's"):
        strategy2.run(fails, args=(x, 2))
