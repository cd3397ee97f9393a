"""How programs are read: loops by their shapes, calls by what they call, in every tried version of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from programs import VECTOR, equations, only

from mirrored._jax import jaxprs, primitives
from mirrored._typing import REPLICA_AXIS as AXIS

scan = jax.lax.scan


def avals(atoms):
    return [(v.aval.shape, v.aval.dtype) for v in atoms]


@jax.custom_jvp
def with_own_jvp(x):
    return 2 * x


@jax.custom_vjp
def with_own_vjp(x):
    return 2 * x


@jax.custom_batching.custom_vmap
def with_own_vmap(x):
    return 2 * x


with_own_jvp.defjvp(lambda primals, tangents: (with_own_jvp(*primals), tangents[0]))
with_own_vmap.def_vmap(lambda size, batched, x: (with_own_vmap(x), batched[0]))
with_own_vjp.defvjp(lambda x: (2 * x, None), lambda _, ct: (ct,))
remat_of_vjp = jax.custom_vjp(lambda x: 2 * x)
remat_of_vjp.defvjp(lambda x: (2 * x, None), lambda _, ct: (ct,), optimize_remat=True)

CALLS = {
    "jit": lambda x: jax.jit(lambda y: 2 * y)(x),
    "remat2": lambda x: jax.checkpoint(lambda y: 2 * y)(x),
    "custom_jvp_call": with_own_jvp,
    "custom_vjp_call": with_own_vjp,
    "custom_vmap_call": with_own_vmap,
    "composite": lambda x: jax.lax.composite(lambda y: 2 * y, "mine.double")(x),
    "linear_call": lambda x: jax.custom_derivatives.linear_call(lambda r, y: r * y, lambda r, y: r * y, x, x),
    "remat_opt": lambda x: jax.linearize(remat_of_vjp, x)[0],
}


def test_a_call_has_one_jaxpr_that_takes_its_operands_and_the_table_is_complete():
    for name, function in CALLS.items():
        equation = next(e for e in equations(function) if e.primitive.name == name)
        inner = jaxprs.callee(equation)
        assert inner is not None, name
        assert avals(inner.jaxpr.invars) == avals(equation.invars) and avals(inner.jaxpr.outvars) == avals(equation.outvars), name
    # `closed_call`, and `eval_jaxpr` since jax 0.11.1, are written only by JAX's own passes.
    assert set(CALLS) | {"closed_call", "eval_jaxpr"} == primitives.CALLS
    assert jaxprs.callee(only("scan", lambda x: scan(lambda c, _: (c, None), x, None, length=2))) is None


def test_literals_and_constants_are_told_apart_and_those_of_functions_inside_are_found():
    captured = jnp.arange(3.0)
    closed = jax.make_jaxpr(lambda x: 2.0 * x + captured)(VECTOR)
    assert isinstance(closed.jaxpr.eqns[0].invars[0], jaxprs.Literal)
    assert len(closed.jaxpr.constvars) == len(closed.consts) == 1 and closed.consts[0] is captured
    around = jax.make_jaxpr(lambda x: jax.jit(lambda y: jax.jit(lambda z: z + captured)(y))(x))(VECTOR)
    assert [np.asarray(constant).tolist() for constant in jaxprs.inner_constants(around.jaxpr)] == [[0, 1, 2]]


def test_meshes_are_found_at_any_depth():
    mesh, other = (jax.sharding.Mesh(jax.devices()[:n], (AXIS,)) for n in (3, 2))
    spec = jax.sharding.PartitionSpec(AXIS)
    mapped = jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    placed = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(other, jax.sharding.PartitionSpec()))
    for function, expected in ((jax.jit(mapped), {mesh}), (placed, {other}), (jnp.sin, set())):
        closed = jax.make_jaxpr(lambda x, f=function: scan(lambda c, _: (f(c), None), x, None, length=2)[0])(VECTOR)
        assert set(jaxprs.meshes_in(closed.jaxpr)) == expected


def test_what_an_equation_depends_on_and_sends():
    # The parameter `name` of this operation may be the name of the axis.
    named = only("name", lambda x: checkpoint_name(x, AXIS))
    assert named.params["name"] == AXIS and not jaxprs.is_collective(named)
    summed = only("psum", lambda x: jax.lax.psum(x, AXIS))
    assert jaxprs.num_bytes(summed) == 3 * 4 and not jaxprs.is_function_of_operands(summed)
    solved = lambda x: jax.lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: total(b), symmetric=True)  # noqa: E731
    total = lambda x: jax.lax.psum(x, AXIS)  # noqa: E731
    for function, is_pure in ((lambda x: x + jax.lax.axis_index(AXIS), True), (total, False), (solved, False)):
        around = only("jit", lambda x, f=function: jax.jit(f)(x))
        assert jaxprs.is_function_of_operands(around) is is_pure is not jaxprs.has_collective(around)
