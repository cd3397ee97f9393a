"""Python numbers in Equinox modules are settings: compiled in, while other numbers among the arguments are traced."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mirrored as mr
from mirrored import testing

eqx = pytest.importorskip("equinox")


class Scaled(eqx.Module):
    weight: jax.Array
    power: int

    def __call__(self, x: Any) -> jax.Array:
        return jnp.stack([x * self.weight] * self.power).sum(0)  # Python needs the number


def test_numbers_in_a_module_are_compiled_in_and_others_are_traced(strategy2: mr.Strategy) -> None:
    def step(state: Any, factor: Any) -> Any:
        return state["model"](factor)

    def run(power: int, factor: float) -> float:
        return float(strategy2.run(step, args=({"model": Scaled(jnp.asarray(2.0), power), "count": int(factor)}, factor)))

    with testing.assert_compiles(2):
        assert [run(3, 1.0), run(3, 5.0), run(4, 1.0)] == [6.0, 30.0, 8.0]


def test_a_module_with_numbers_comes_back_from_a_step(strategy2: mr.Strategy) -> None:
    pool = eqx.nn.AvgPool2d(2, 2)

    def step(pool: Any, x: jax.Array) -> Any:
        return pool, mr.get_replica_context().all_reduce("sum", jax.vmap(pool)(x).sum())

    [x] = strategy2.distribute_dataset([jnp.ones((4, 1, 4, 4))])
    with testing.assert_compiles(1):
        for _ in range(2):
            pool, total = strategy2.run(step, args=(pool, x))
    assert float(total) == 16.0
