"""The operations and bytes of compiled programs, which also stands for what JAX does not promise there."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mirrored._jax.costs import costs_of, work_in


def work_of(function, *shapes):
    return work_in(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).jaxpr)


def test_matrix_products_and_convolutions_are_counted() -> None:
    assert work_of(lambda a, b: jnp.tanh(a @ b), (4, 8), (8, 2))[:2] == (2 * 4 * 8 * 2, 0)
    assert work_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (3, 4, 8), (3, 8, 2))[:2] == (3 * 128, 0)
    convolve = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # noqa: E731
    assert work_of(convolve, (2, 8, 8, 3), (3, 3, 3, 5))[:2] == (0, 2 * (2 * 8 * 8 * 5) * 27)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda a: lax.scan(lambda c, _: (c @ a, None), a, None, length=5)[0], 5),
        (lambda a: lax.cond(a[0, 0] > 0, lambda a: a @ a @ a, lambda a: a, a), 2),
        (lambda a: jax.jit(lambda a: jax.checkpoint(lambda a: a @ a)(a))(a), 1),
        (lambda a: lax.while_loop(lambda c: c[0, 0] < 0, lambda c: c @ a, a), 1),
    ],
)
def test_inside_of_loops_and_calls(function, count) -> None:
    assert work_of(function, (4, 4)).dots == count * 2 * 4**3


@pytest.mark.parametrize(
    ("function", "ratio"),
    [
        (lambda a: lax.scan(lambda c, _: (jnp.sin(c), None), a, None, length=5)[0], 5),
        (lambda a: jnp.cos(lax.scan(lambda c, _: (jnp.sin(c), None), a, None, length=5)[0]), 3),
        (lambda a: lax.cond(a[0, 0] > 0, jax.jit(jnp.sin), lambda a: a, a), 1),
        (lambda a: a, 1),
    ],
)
def test_a_loop_makes_its_elements_again_and_again(function, ratio) -> None:
    assert work_of(function, (64, 64)).repeats == pytest.approx(ratio, rel=1e-3)


def test_xla_counts_what_it_has_compiled() -> None:
    compiled = jax.jit(lambda a, b: a @ b).lower(jnp.ones((64, 64)), jnp.ones((64, 64))).compile()
    costs = costs_of(compiled)
    assert costs["flops"] == pytest.approx(2 * 64**3, rel=0.1) and costs["bytes accessed"] >= 3 * 64 * 64 * 4


def test_where_the_compiler_counts_nothing_the_program_is_counted_on_the_host() -> None:
    """It stands for a GPU's compiler without a GPU; it fails loudly when JAX moves what it promises nobody."""
    compiled = jax.jit(lambda a, b: a @ b).lower(jnp.ones((64, 64)), jnp.ones((64, 64))).compile()

    class WithoutCounts:
        runtime_executable = staticmethod(compiled.runtime_executable)

        @staticmethod
        def cost_analysis() -> None:
            return None

    assert costs_of(WithoutCounts())["bytes accessed"] >= 3 * 64 * 64 * 4
