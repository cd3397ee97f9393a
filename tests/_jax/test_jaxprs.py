"""How programs are read: loops by their shapes, calls by what they call, in every tried version of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from programs import VECTOR, equations, only

from mirrored._jax import jaxprs, primitives
from mirrored._typing import REPLICA_AXIS as AXIS

FIVE = np.ones(5, "float32")
scan = jax.lax.scan


def avals(atoms):
    return [(v.aval.shape, v.aval.dtype) for v in atoms]


SCANS = {
    "constants, carry and rows": (lambda x, y: scan(lambda c, row: (c + y.sum(), 2 * row), x[1], x), 1, 1, 1),
    "rows only": (lambda x, y: scan(lambda c, row: (c, 2 * row), None, x), 0, 0, 1),
    "no rows": (lambda x, y: scan(lambda c, _: (c * y[0], None), x, None, length=3), 1, 1, 0),
    "rows given and not taken": (lambda x, y: scan(lambda c, _: (c + 1, c), x, None, length=5), 0, 1, 0),
    "no round": (lambda x, y: scan(lambda c, row: (c + row, c), y[0], x[:0]), 0, 1, 1),
    "a carry as long as the rows": (lambda x, y: scan(lambda c, row: (c * row, c), x, x), 0, 1, 1),
    "rows of matrices": (lambda x, y: scan(lambda c, m: (c @ m, m), jnp.eye(2), jnp.ones((4, 2, 2))), 0, 1, 1),
    "keys": (lambda x, y: scan(lambda k, _: (jax.random.split(k)[0], k), jax.random.key(0), None, length=2), 0, 1, 0),
    "several of each": (
        lambda x, y: scan(
            lambda c, rows: ((c[0] + y[0] * x[0], c[1] * rows[0]), (rows[1], c[0], rows[0])), (x, y[0]), (x, FIVE[:3])
        ),
        2, 2, 2,
    ),
    "a fori_loop": (lambda x, y: jax.lax.fori_loop(0, 3, lambda i, c: c + y[0], x), 1, 2, 0),
    "a map": (lambda x, y: jax.lax.map(lambda row: row * y[0], x), 1, 0, 1),
    "backwards": (lambda x, y: scan(lambda c, row: (c * row, c), x[0], x, reverse=True), 0, 1, 1),
}  # fmt: skip


def check_scan(equation, name):
    [body] = [closed.jaxpr for closed in jaxprs.inner_jaxprs(equation)]
    num_consts, num_carry = jaxprs.scan_of(equation)
    fixed = num_consts + num_carry
    assert num_consts >= 0 and avals(equation.invars[:fixed]) == avals(body.invars[:fixed]), name
    assert avals(equation.outvars[:num_carry]) == avals(body.outvars[:num_carry]) == avals(body.invars[num_consts:fixed]), name
    for outer, inner in zip(equation.invars[fixed:], body.invars[fixed:], strict=True):
        assert outer.aval.shape == (equation.params["length"], *inner.aval.shape), name
    return num_consts, num_carry, len(equation.invars) - fixed


def test_a_scan_has_constants_carry_and_rows_in_this_order():
    for name, (function, num_consts, num_carry, num_rows) in SCANS.items():
        found_consts, *found = check_scan(only("scan", function, VECTOR, FIVE), name)
        assert found == [num_carry, num_rows], name
        assert found_consts >= num_consts, "what the body closes over; JAX may add to it"


def test_the_parts_of_a_scan_that_jax_has_transformed_are_found():
    """JAX moves operands to other places then, and adds residuals."""

    def function(w, xs):
        return scan(lambda c, x: (jnp.sin(c * w) + x, c * x), w, xs)[0].sum()

    transformed = {
        "grad": jax.grad(function, (0, 1)),
        "vmap": jax.vmap(function, (0, None)),
        "jvp": lambda w, xs: jax.jvp(function, (w, xs), (w, xs)),
        "remat": jax.grad(jax.checkpoint(function), (0, 1)),
        "linearize": lambda w, xs: jax.linearize(functools.partial(function, w), xs)[1](xs),
    }
    for name, one in transformed.items():
        found = [e for e in equations(one, VECTOR, FIVE) if e.primitive.name == "scan"]
        assert found, name
        for equation in found:
            check_scan(equation, name)


def test_while_has_the_constants_of_its_condition_then_of_its_body_then_the_carry():
    def function(x, y):
        return jax.lax.while_loop(lambda c: c < x[0], lambda c: c + y.sum() * x[1], 0.0)

    equation = only("while", function, VECTOR, FIVE)
    assert jaxprs.while_of(equation) == (1, 2)
    cond, body = (part.closed.jaxpr for part in jaxprs.parts_of(equation)[0])
    assert [v.aval.shape for v in cond.invars] == [(3,), ()]
    assert sorted(v.aval.shape for v in body.invars) == [(), (3,), (5,)] and body.invars[2].aval.shape == ()
    assert [v.aval.dtype for v in cond.outvars] == [jnp.bool_]


def test_cond_has_its_index_first_and_branches_of_the_other_operands():
    for num_branches in (2, 3):
        branches = [lambda x, i=i: x * i for i in range(num_branches)]
        equation = only("cond", lambda x, branches=branches: jax.lax.switch(x[0].astype(int), branches, x))
        assert [v.aval.shape for v in equation.invars] == [(), (3,)]
        assert [len(branch.jaxpr.invars) for branch in equation.params["branches"]] == [1] * num_branches


def test_a_linear_solve_runs_the_solver_on_its_constants_and_the_right_side():
    matrices = [np.full((n, n), 1.0, "float32") for n in (1, 2, 3)]

    def function(x):
        a, b, c = (jnp.asarray(m) * x[0] for m in matrices)
        return jax.lax.custom_linear_solve(
            lambda v: v * a.sum(), x, solve=lambda _, v: v * b.sum(), transpose_solve=lambda _, v: v * c.sum()
        )

    equation = only("custom_linear_solve", function)
    solver, operands = jaxprs.solver_of(equation)
    given = [equation.invars[k].aval.shape for k in operands]
    assert [v.aval.shape for v in solver.invars] == given == [(2, 2), (3,)]


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


def test_generic_reductions_have_their_function_as_a_jaxpr():
    reduced = only("reduce", lambda x: jax.lax.reduce(x, np.float32(0), lambda a, b: a + 2 * b, (0,)))
    window = only("reduce_window", lambda x: jax.lax.reduce_window(x, 0.0, lambda a, b: a + 2 * b, (2,), (1,), "SAME"))
    assert all(len(list(jaxprs.inner_jaxprs(equation))) == 1 for equation in (reduced, window))


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
