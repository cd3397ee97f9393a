"""Each name in the tables is a primitive of this version of JAX, and each public primitive of JAX is in a table."""

import contextlib
import itertools
import sys
import warnings

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import jax.scipy.sparse.linalg
import numpy as np
from programs import VECTOR, equations, only

from mirrored._jax import jaxprs, primitives
from mirrored._typing import REPLICA_AXIS as AXIS

KNOWN = primitives.PURE | primitives.CALLS | primitives.CONTROL_FLOW | primitives.MAKE_SAME | primitives.LOCAL
#: Names of the tables that JAX itself makes no primitives of any more, and we do.
GONE = ["closed_call"]


def test_every_primitive_that_the_proof_knows_exists():
    """A name that JAX has dropped or changed is a hole: the new one would be refused, or not seen as a collective."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "jax"]
    things = itertools.chain.from_iterable(vars(module).values() for module in modules)
    existing = {thing.name for thing in things if isinstance(thing, jex_core.Primitive)}
    assert sorted(KNOWN - existing) == GONE, "JAX has dropped a primitive"


def test_what_is_computed_by_place_gives_for_a_part_what_it_gives_for_the_whole():
    assert primitives.ELEMENTWISE <= primitives.PURE
    whole, other = np.linspace(0.1, 0.9, 6, dtype=np.float32), np.linspace(0.9, 0.1, 6, dtype=np.float32)
    for function in (jnp.arctan2, jnp.maximum, lambda x, y: jnp.where(x > y, x, y), lambda x, y: jnp.clip(x, y, 0.7)):
        names = {equation.primitive.name for equation in equations(function, whole, other)}
        assert names <= primitives.ELEMENTWISE | primitives.CALLS, names
        np.testing.assert_array_equal(function(whole, other)[2:4], function(whole[2:4], other[2:4]))


def test_nothing_is_inside_of_simple_equations():
    simple = primitives.SIMPLE - {"mirrored_mark"}
    assert simple <= primitives.PURE and simple.isdisjoint(primitives.CALLS | primitives.CONTROL_FLOW | primitives.LOCAL)
    others = {
        "reduce": lambda x: jax.lax.reduce(x, 1.0, lambda a, b: a * b + 1, (0,)),
        "reduce_window": lambda x: jax.lax.reduce_window(x, 1.0, lambda a, b: a * b + 1, (2,), (1,), "SAME"),
        "scatter-add": lambda x: x.at[0].add(1),
        "custom_linear_solve": lambda x: jax.lax.custom_linear_solve(lambda y: 2 * y, x, lambda _, y: y / 2, symmetric=True),
        "sort": jnp.sort,
        "cumsum": jnp.cumsum,
        "dot_general": lambda x: x @ x,
    }
    for name, function in others.items():
        has_jaxpr = bool(jaxprs.inner_jaxprs(only(name, function)))
        assert has_jaxpr == (name not in primitives.SIMPLE), name


def test_the_public_primitives_are_all_decided():
    """A new public primitive must be put into a list, or be left out on purpose: here."""
    public = {getattr(jex_core.primitives, name).name for name in dir(jex_core.primitives) if name.endswith("_p")}
    exchanged = {"all_to_all", "ppermute", "ragged_all_to_all"}  # collectives, by their axis
    unknown = {"rng_uniform", "get", "swap", "call", "custom_lin"}  # unlike on each device; refs; never traced
    assert sorted(public - KNOWN - exchanged - unknown) == [], "JAX has new primitives: decide about each"


def test_the_calls_that_jax_itself_writes_are_entered():
    """`explain` and uneven steps look through what JAX wraps a program in when it is evaluated again."""
    closed = jax.make_jaxpr(lambda x: 2 * jnp.sin(x))(VECTOR)
    wrapped = jax.make_jaxpr(jex_core.jaxpr_as_fun(closed))(VECTOR)
    [again] = jex_core.jaxpr_as_fun(wrapped)(VECTOR)
    assert {e.primitive.name for e in wrapped.eqns if list(jaxprs.inner_jaxprs(e))} <= primitives.INLINE_CALLS
    np.testing.assert_allclose(again, 2 * np.sin(VECTOR), rtol=1e-6)


def test_what_scans_call_empty_is_zero_on_every_device():
    """Unlike `empty`, which is memory as it was found: that one may never be in the list of pure primitives."""

    def emptied():
        return jex_core.primitives.empty2_p.bind(dtype=np.dtype("float32"), memory_space=jax.memory.Space.Device)

    assert "stablehlo.constant dense<0.000000e+00> : tensor<f32>" in jax.jit(emptied).lower().as_text()
    assert "empty" not in primitives.PURE


def send(x, axis_name, permutation):
    """Call what JAX has deprecated, where it is still there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return jax.lax.psend(x, axis_name, permutation)


COLLECTIVES = {
    "psum": (lambda x: jax.lax.psum(x, AXIS), "axes"),
    "pmax": (lambda x: jax.lax.pmax(x, AXIS), "axes"),
    "pmin": (lambda x: jax.lax.pmin(x, AXIS), "axes"),
    "all_gather": (lambda x: jax.lax.all_gather(x, AXIS), "axis_name"),
    "reduce_scatter": (lambda x: jax.lax.psum_scatter(x, AXIS), "axis_name"),
    "all_to_all": (lambda x: jax.lax.all_to_all(x, AXIS, 0, 0), "axis_name"),
    "ppermute": (lambda x: jax.lax.ppermute(x, AXIS, [(0, 1)]), "axis_name"),
    "pbroadcast": (lambda x: jax.lax.pbroadcast(x, (AXIS,), 0), "axis_name"),
    "ragged_all_to_all": (lambda x: jax.lax.ragged_all_to_all(x, x, *[np.ones(3, "int32")] * 4, axis_name=AXIS), "axis_name"),
    "psend": (lambda x: send(x, AXIS, [(0, 1)]), "axis_name"),
    "axis_index": (lambda x: jax.lax.axis_index(AXIS), "axis_name"),
}


def test_a_collective_names_its_axis_in_a_parameter():
    for name, (function, parameter) in COLLECTIVES.items():
        equation = only(name, function)
        assert equation.params[parameter] in (AXIS, (AXIS,)), name
        assert jaxprs.axis_names(equation) == (AXIS,), name
        assert jaxprs.is_collective(equation) == (name != "axis_index"), name


def test_groups_are_in_a_parameter():
    for collective in (jax.lax.psum, jax.lax.pmax, jax.lax.pmin, jax.lax.all_gather):
        name = collective.__name__
        assert not jaxprs.is_over_groups(only(name, lambda x, f=collective: f(x, AXIS)))
        with contextlib.suppress(NotImplementedError):
            equation = only(name, lambda x, f=collective: f(x, AXIS, axis_index_groups=[[0], [1], [2]]))
            assert jaxprs.is_over_groups(equation)


def test_the_axis_of_a_vmap_is_no_name_in_the_jaxpr():
    equation = only("psum", lambda x: jax.vmap(lambda y: jax.lax.psum(y, AXIS), axis_name=AXIS)(x))
    assert equation.params["axes"] == (0,) and not jaxprs.is_collective(equation)
    assert only("psum", lambda x: jax.vmap(lambda y: jax.lax.psum(y, (AXIS, "i")), axis_name="i")(x)).params["axes"] == (AXIS, 0)
