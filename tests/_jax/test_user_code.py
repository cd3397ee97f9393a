"""Messages name the user's line."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest
from programs import VECTOR, equations, only

from mirrored._jax import user_code
from mirrored._program import proof
from mirrored._typing import REPLICA_AXIS as AXIS


def test_an_equation_knows_its_line():
    def function(x):
        y = jnp.sin(x)
        return jax.jit(lambda z: jax.lax.scan(lambda c, _: (jax.lax.psum(c, AXIS), None), z, None, length=2)[0])(y)

    first = function.__code__.co_firstlineno
    lines = {e.primitive.name: user_code.equation_line(e) for e in equations(function)}
    assert lines == {name: f"{__file__}:{first + n}" for name, n in {"sin": 1, "jit": 2, "scan": 2, "psum": 2}.items()}


def test_an_equation_whose_line_jax_has_lost_has_none_and_the_pass_takes_the_one_around():
    @jax.custom_vjp
    def backwards(x):
        return x

    backwards.defvjp(lambda x: (x, None), lambda _, ct: (jax.lax.psum(ct, AXIS),))
    for around in (lambda f, x, y: jax.lax.cond(x[0] > 0, f, jnp.sin, y), lambda f, x, y: jax.checkpoint(f)(y)):

        def function(x, around=around):
            return jax.grad(lambda y: around(backwards, x, y).sum())(x)

        assert user_code.equation_line(only("psum", function)) is None
        jaxpr = jax.make_jaxpr(function, axis_env=[(AXIS, 3)])(VECTOR).jaxpr
        [collective] = proof.prove(jaxpr, [proof.SAME]).collectives
        assert collective.where == f"{__file__}:{around.__code__.co_firstlineno}"


def test_the_users_line_is_the_innermost_that_is_neither_ours_nor_jaxs():
    here = inspect.currentframe().f_lineno
    assert user_code.user_line() == f"{__file__}:{here + 1}"
    lines = []
    jax.jit(lambda x: (lines.append(user_code.user_line()), x)[1])(1.0)
    jax.tree.map(lambda x: lines.append(user_code.user_line()), [1])
    assert lines == [f"{__file__}:{here + 3}", f"{__file__}:{here + 4}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.tree.map(lambda x: warnings.warn("from inside", UserWarning, stacklevel=user_code.user_stacklevel()), [1])
    assert (caught[0].filename, caught[0].lineno) == (__file__, here + 8)


def test_the_raising_line_is_the_innermost_of_the_users():
    def fails(x):
        return bool(x)

    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        jax.jit(fails)(1.0)
    assert user_code.raising_line(caught.value) == f"{__file__}:{fails.__code__.co_firstlineno + 1}"
    assert user_code.raising_line(ValueError("never raised")) == "<unknown>"
