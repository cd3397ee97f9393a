"""The one walk through programs: it computes what they compute, enters what it is told to, and settles loops."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrored._jax import interpreter
from mirrored._jax.interpreter import Analysis, Evaluation


def everything(x: jax.Array, n: jax.Array) -> Any:
    """Call, loop, choose and solve; JAX moves operands of a scan that it transforms, and adds residuals."""
    total, rows = jax.lax.scan(lambda c, row: (c * 0.5 + row, jnp.sin(c)), jnp.zeros(3), x, reverse=True, unroll=2)
    _, grown = jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * x.sum() / n), (0, total))
    chosen = jax.lax.switch(n, [lambda a: a, lambda a: -a, jax.jit(lambda a: a * 2)], grown)
    remat = jax.checkpoint(jnp.tanh)(chosen)
    solved = jax.lax.custom_linear_solve(lambda v: 2 * v, remat, lambda _, b: b / 2, symmetric=True)

    def last(w: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, row: (jnp.sin(c * w) + row, c * row), w, rows)[0].sum()

    mapped = jax.vmap(last, (0, None))(x, x)
    return rows, solved, mapped, *jax.grad(last, (0, 1))(x[0], x), jax.grad(jax.checkpoint(last))(x[0], x)


class Entering(Evaluation):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def enters(self, equation: Any, values: list[Any]) -> bool:
        self.names.add(equation.primitive.name)
        return True


def test_it_computes_what_the_program_computes_whatever_it_enters() -> None:
    n, x = 2, np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    closed, walk = jax.make_jaxpr(everything)(x, n), Entering()
    ways = (lambda *values: walk.run_closed(closed, values), lambda *values: interpreter.evaluate(closed, closed.consts, values))
    expected = jax.jit(everything)(x, n)
    for way in ways:
        for ours, own in zip(jax.jit(way)(x, n), expected, strict=True):
            np.testing.assert_allclose(ours, own, rtol=1e-6)
    assert {"sin", "scan", "while", "cond", "neg", "custom_linear_solve", "tanh", "mul"} <= walk.names


class Depends(Analysis[frozenset[int]]):
    """Of which arguments a value is computed."""

    def join(self, values: Sequence[frozenset[int]]) -> frozenset[int]:
        return frozenset().union(*values)


def depends(function: Any, *arguments: Any) -> list[set[int]]:
    closed = jax.make_jaxpr(function)(*arguments)
    return list(map(set, Depends().run_closed(closed, [frozenset({i}) for i in range(len(arguments))])))


def test_a_property_travels_through_loops_until_it_is_settled_and_through_what_decides() -> None:
    def handed_on(a: Any, b: Any, c: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, v: (v[1], v[2], v[2]), (a, b, c))  # c reaches the first after two rounds

    assert depends(handed_on, 1.0, 2.0, 3.0) == [{0, 1, 2}, {1, 2}, {2}]
    shifted = lambda a, b, rows: jax.lax.scan(lambda v, row: ((v[1], row), v[0]), (a, b), rows)  # noqa: E731
    assert depends(shifted, 1.0, 2.0, np.ones(4, np.float32)) == [{0, 1, 2}, {1, 2}, {0, 1, 2}]
    assert depends(lambda a, b, c: jax.lax.while_loop(lambda v: v[0] < c, lambda v: (v[0] + 1, b), (a, b)), 1, 2, 3) == [
        {0, 2},
        {0, 1, 2},
    ]
    assert depends(lambda a, b, c: jax.lax.cond(a > 0, lambda: b, lambda: c), 1.0, 2.0, 3.0) == [{0, 1, 2}]
    solve = lambda a, b, c: jax.lax.custom_linear_solve(lambda v: v * a, b, lambda _, v: v * c, symmetric=True)  # noqa: E731
    assert depends(solve, 1.0, 2.0, 3.0) == [{1, 2}], "the other functions are for derivatives"
    assert depends(jax.jit(lambda a, b: (jnp.exp(b), a)), 1.0, 2.0) == [{1}, {0}]
