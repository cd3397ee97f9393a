"""A mark says what a value is for, survives every transformation, and costs nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from mirrored._jax.marks import Mark, Purpose, mark, mark_p

NOTE = Mark(Purpose.GRADIENT, "w", "here.py:1")
VECTOR = np.linspace(0.1, 1, 4, dtype="float32")


def test_a_mark_is_the_identity_and_leaves_no_trace_in_the_compiled_program():
    for value in (1.5, np.int32(3), True, np.zeros((2, 0), "float16"), np.ones(3, "complex64"), jax.random.key(0)):
        array = jnp.asarray(value)
        for marked in (mark(array, NOTE), jax.jit(lambda x: mark(x, NOTE))(array)):
            assert marked.dtype == array.dtype and marked.shape == array.shape and (marked == array).all()
    program = lambda wrap: jax.jit(lambda x: wrap(jnp.sin(wrap(x)))).lower(VECTOR).as_text()  # noqa: E731
    assert program(lambda x: mark(x, NOTE)) == program(lambda x: x)


def test_a_mark_does_not_change_derivatives_or_batches():
    square = VECTOR[:, None] - 2 * VECTOR
    transforms = {
        "grad": lambda f: jax.grad(lambda x: f(x).sum())(VECTOR),
        "jvp": lambda f: jax.jvp(f, (VECTOR,), (2 * VECTOR,))[1],
        "vjp": lambda f: jax.vjp(f, VECTOR)[1](VECTOR)[0],
        "linearize": lambda f: jax.linearize(f, VECTOR)[1](VECTOR),
        "jacobian": lambda f: jax.jacobian(f)(VECTOR),
        "vmap of columns": lambda f: jax.vmap(f, 1, 1)(square),
        "map": lambda f: jax.lax.map(f, VECTOR),
        "remat": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum())(VECTOR),
        "of an integer": lambda f: jax.grad(lambda x: x * mark(jnp.int32(3), NOTE) * f(x))(2.0),
    }
    for name, transform in transforms.items():
        marked = transform(lambda x: mark(jnp.sin(mark(x, NOTE)), NOTE))
        np.testing.assert_allclose(marked, transform(jnp.sin), rtol=1e-6, err_msg=name)


def test_notes_are_values_and_their_text_is_the_same_on_all_workers():
    """JAX caches equations by their parameters; files have other paths on other workers."""
    assert len({Mark(Purpose.GRADIENT, "w", "here.py:1"), NOTE, Mark(Purpose.ASSIGN, "w", "here.py:1")}) == 2
    jaxpr = jax.make_jaxpr(lambda x: mark(x, NOTE))(VECTOR).jaxpr
    assert [(equation.primitive, equation.params) for equation in jaxpr.eqns] == [(mark_p, {"note": NOTE})]
    assert str(NOTE) == "GRADIENT" and "here.py" not in str(jaxpr)
