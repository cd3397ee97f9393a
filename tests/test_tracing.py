"""What we rely on in jax and jax.extend without a promise. When one of these fails, JAX has moved: read the
assertion, then fix `_tracing.py`, `_marks.py` or `_mirror_proof.py`, and only then this page."""

import gc
import inspect
import os
import subprocess
import sys
import warnings

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import jax.scipy.sparse.linalg
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from mirrored import _mirror_proof, _tracing
from mirrored._collectives import ReplicaAxis
from mirrored._typing import REPLICA_AXIS as AXIS

VECTOR = np.ones(3, "float32")


def equations(function, *arguments):
    """Return the equations of a function of per-replica vectors, also those inside others."""
    closed = jax.make_jaxpr(function, axis_env=[(AXIS, 3)])(*(arguments or (VECTOR,)))
    return list(_mirror_proof._all_equations(closed.jaxpr))


def only(name, function, *arguments):
    [equation] = [equation for equation in equations(function, *arguments) if equation.primitive.name == name]
    return equation


# -- names that the proof reads


def test_every_primitive_that_the_proof_knows_exists():
    """A name that JAX has dropped or changed is a hole: the new one would be refused, or not seen as a collective."""
    existing = {thing.name for thing in gc.get_objects() if isinstance(thing, jex_core.Primitive)}
    known = _mirror_proof._PURE | _mirror_proof._CALLS | _mirror_proof._MAKE_SAME | _mirror_proof._LOCAL
    assert sorted(known - existing) == []
    assert {"scan", "while", "cond", "custom_linear_solve"} <= existing


def test_the_public_primitives_are_all_decided():
    """A new public primitive must be put into a list, or be left out on purpose: here."""
    known = _mirror_proof._PURE | _mirror_proof._CALLS | _mirror_proof._MAKE_SAME | _mirror_proof._LOCAL
    public = {getattr(jex_core.primitives, name).name for name in dir(jex_core.primitives) if name.endswith("_p")}
    entered = {"scan", "while", "cond", "custom_linear_solve"}
    exchanged = {"all_to_all", "ppermute", "ragged_all_to_all"}  # collectives, by their axis
    unknown = {"rng_uniform", "get", "swap", "call", "custom_lin"}  # unlike on each device; refs; never traced
    assert public - known == entered - known | exchanged | unknown


def test_what_scans_call_empty_is_zero_on_every_device():
    """Unlike `empty`, which is memory as it was found: that one may never be in the list of pure primitives."""

    def emptied():
        return jex_core.primitives.empty2_p.bind(dtype=np.dtype("float32"), memory_space=jax.memory.Space.Device)

    assert "stablehlo.constant dense<0.000000e+00> : tensor<f32>" in jax.jit(emptied).lower().as_text()
    assert "empty" not in _mirror_proof._PURE


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
    "psend": (lambda x: jax.lax.psend(x, AXIS, [(0, 1)]), "axis_name"),
    "axis_index": (lambda x: jax.lax.axis_index(AXIS), "axis_name"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_names_its_axis_in_a_parameter(name):
    function, parameter = COLLECTIVES[name]
    equation = only(name, function)
    assert equation.params[parameter] in (AXIS, (AXIS,))
    assert _mirror_proof._axis_names(equation) == (AXIS,)
    assert _mirror_proof._is_collective(equation) == (name != "axis_index")


@pytest.mark.parametrize("name", ["psum", "pmax", "pmin", "all_gather"])
def test_groups_are_in_a_parameter(name):
    collective = {"psum": jax.lax.psum, "pmax": jax.lax.pmax, "pmin": jax.lax.pmin, "all_gather": jax.lax.all_gather}[name]
    assert only(name, lambda x: collective(x, AXIS)).params["axis_index_groups"] is None
    groups = [[0], [1], [2]]
    try:
        equation = only(name, lambda x: collective(x, AXIS, axis_index_groups=groups))
    except NotImplementedError:
        return
    assert equation.params["axis_index_groups"] is not None


def test_a_mean_is_a_sum_and_the_size_of_the_axis_is_a_constant():
    assert [e.primitive.name for e in equations(lambda x: jax.lax.pmean(x, AXIS))] == ["psum", "div"]
    assert [e.primitive.name for e in equations(lambda x: x * jax.lax.axis_size(AXIS))] == ["mul"]


def test_the_axis_of_a_vmap_is_no_name_in_the_jaxpr():
    equation = only("psum", lambda x: jax.vmap(lambda y: jax.lax.psum(y, AXIS), axis_name=AXIS)(x))
    assert equation.params["axes"] == (0,) and not _mirror_proof._is_collective(equation)
    assert only("psum", lambda x: jax.vmap(lambda y: jax.lax.psum(y, (AXIS, "i")), axis_name="i")(x)).params["axes"] == (AXIS, 0)


# -- parameters of what the proof enters


def test_scan_has_constants_carry_and_rows_in_this_order():
    def function(x, y):
        return jax.lax.scan(lambda c, row: (c + y.sum(), 2 * row), x[1], x)

    equation = only("scan", function, VECTOR, np.ones(5, "float32"))
    assert (equation.params["num_consts"], equation.params["num_carry"]) == (1, 1)
    assert isinstance(equation.params["jaxpr"], jex_core.ClosedJaxpr)
    assert [v.aval.shape for v in equation.invars] == [(5,), (), (3,)]
    assert [v.aval.shape for v in equation.params["jaxpr"].jaxpr.invars] == [(5,), (), ()]
    assert [v.aval.shape for v in equation.params["jaxpr"].jaxpr.outvars] == [(), ()]


def test_while_has_the_constants_of_its_condition_then_of_its_body_then_the_carry():
    def function(x, y):
        return jax.lax.while_loop(lambda c: c < x[0], lambda c: c + y.sum(), 0.0)

    equation = only("while", function, VECTOR, np.ones(5, "float32"))
    params = equation.params
    assert (params["cond_nconsts"], params["body_nconsts"]) == (1, 1)
    assert [v.aval.shape for v in equation.invars] == [(3,), (5,), ()]
    assert [v.aval.shape for v in params["cond_jaxpr"].jaxpr.invars] == [(3,), ()]
    assert [v.aval.shape for v in params["body_jaxpr"].jaxpr.invars] == [(5,), ()]
    assert [v.aval.dtype for v in params["cond_jaxpr"].jaxpr.outvars] == [jnp.bool_]


@pytest.mark.parametrize("num_branches", [2, 3])
def test_cond_has_its_index_first_and_branches_of_the_other_operands(num_branches):
    branches = [lambda x, i=i: x * i for i in range(num_branches)]
    equation = only("cond", lambda x: jax.lax.switch(x[0].astype(int), branches, x))
    assert [v.aval.shape for v in equation.invars] == [(), (3,)]
    assert len(equation.params["branches"]) == num_branches
    assert all(
        isinstance(branch, jex_core.ClosedJaxpr) and len(branch.jaxpr.invars) == 1 for branch in equation.params["branches"]
    )


def test_a_linear_solve_runs_the_solver_on_its_constants_and_the_right_side():
    matrices = [np.full((n, n), 1.0, "float32") for n in (1, 2, 3, 4)]

    def function(x):
        use = lambda m, v: v * jnp.asarray(m).sum()  # noqa: E731
        a, b, c = (jnp.asarray(m) * x[0] for m in matrices[:3])
        return jax.lax.custom_linear_solve(
            lambda v: use(a, v), x, solve=lambda _, v: use(b, v), transpose_solve=lambda _, v: use(c, v)
        )

    equation = only("custom_linear_solve", function)
    counts, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    assert tuple(counts) == (counts.matvec, counts.vecmat, counts.solve, counts.transpose_solve)
    start = counts.matvec + counts.vecmat
    given = [*equation.invars[start : start + counts.solve], *equation.invars[sum(counts) :]]
    assert [v.aval.shape for v in jaxprs.solve.jaxpr.invars] == [v.aval.shape for v in given] == [(2, 2), (3,)]


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


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_one_jaxpr_that_takes_its_operands(name):
    equation = next(e for e in equations(CALLS[name]) if e.primitive.name == name)
    inner = _mirror_proof.callee(equation)
    assert inner is not None
    assert [v.aval.shape for v in inner.jaxpr.invars] == [v.aval.shape for v in equation.invars]
    assert [v.aval.shape for v in inner.jaxpr.outvars] == [v.aval.shape for v in equation.outvars]


def test_the_table_of_calls_is_complete():
    """`closed_call` is written only by JAX's own passes."""
    assert set(CALLS) | {"closed_call"} == _mirror_proof._CALLS


def test_generic_reductions_have_their_function_as_a_jaxpr():
    reduced = only("reduce", lambda x: jax.lax.reduce(x, np.float32(0), lambda a, b: a + 2 * b, (0,)))
    window = only("reduce_window", lambda x: jax.lax.reduce_window(x, 0.0, lambda a, b: a + 2 * b, (2,), (1,), "SAME"))
    assert all(len(list(_mirror_proof.inner_jaxprs(equation))) == 1 for equation in (reduced, window))


def test_literals_and_constants_are_told_apart():
    captured = jnp.arange(3.0)
    closed = jax.make_jaxpr(lambda x: 2.0 * x + captured)(VECTOR)
    assert isinstance(closed.jaxpr.eqns[0].invars[0], _tracing.Literal)
    assert len(closed.jaxpr.constvars) == len(closed.consts) == 1
    assert closed.consts[0] is captured


# -- traces


def test_the_trace_state_is_equal_within_a_trace_and_different_in_another():
    states = {}

    def note(name):
        states[name] = (_tracing.trace_state(), _tracing.trace_state())

    def body(x):
        note("jit")
        jax.jit(lambda y: (note("inner jit"), y)[1])(x)
        jax.lax.scan(lambda c, _: (note("scan"), (c, None))[1], x, None, length=2)
        jax.lax.cond(True, lambda: (note("cond"), x)[1], lambda: x)
        jax.vmap(lambda y: (note("vmap"), y)[1])(x)
        jax.grad(lambda y: (note("grad"), y.sum())[1])(x)
        states["after"] = states["jit"][0] == _tracing.trace_state()
        return x

    note("outside")
    jax.jit(body)(VECTOR)
    assert states.pop("after") and states["outside"][0] == _tracing.trace_state()
    assert all(first == second for first, second in states.values())
    names = list(states)
    assert all(states[a][0] != states[b][0] for i, a in enumerate(names) for b in names[:i])


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda f: f, False),
        (lambda f: jax.jit(f), True),
        (lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0], True),
        (lambda f: lambda x: jax.lax.cond(x[0] > 0, f, f, x), True),
        (lambda f: lambda x: jax.lax.while_loop(lambda c: c[0] < 0, f, x), True),
        (lambda f: lambda x: jax.eval_shape(f, x), True),
        (lambda f: lambda x: jax.make_jaxpr(f)(x), True),
        (lambda f: jax.checkpoint(f), True),
        (lambda f: jax.vmap(f), False),
        (lambda f: jax.grad(lambda x: f(x).sum()), False),
        (lambda f: jax.jit(jax.vmap(f)), True),
        (lambda f: jax.jit(jax.grad(lambda x: f(x).sum())), True),
    ],
    ids=["eager", "jit", "scan", "cond", "while", "eval_shape", "make_jaxpr", "remat", "vmap", "grad", "jit_vmap", "jit_grad"],
)
def test_staging_means_that_operations_are_recorded(transform, expected):
    seen = []
    transform(lambda x: (seen.append(_tracing.is_staging()), x * 1.0)[1])(VECTOR)
    assert set(seen) == {expected}


def test_inner_caches_are_shared_without_and_apart_with_a_token():
    traced = []

    @jax.jit
    def inner(x):
        traced.append(1)
        return x * 2

    def outer(x):
        return inner(x)

    jax.make_jaxpr(outer)(VECTOR), jax.make_jaxpr(outer)(VECTOR)
    assert len(traced) == 1, "JAX has stopped to cache inner traces: separate_caches is no longer needed"
    with _tracing.separate_caches() as renew:
        jax.make_jaxpr(outer)(VECTOR)
        assert len(traced) == 2
        jax.make_jaxpr(outer)(VECTOR)
        assert len(traced) == 2
        renew()
        jax.make_jaxpr(outer)(VECTOR)
        assert len(traced) == 3
    jax.make_jaxpr(outer)(VECTOR)
    assert len(traced) == 3, "leaving the block restores the caches"


@pytest.mark.parametrize("construct", ["scan", "cond", "while", "remat", "custom_jvp"])
def test_a_body_that_reads_something_that_changes_is_traced_again(construct):
    """What a cached body would do instead: keep the tracer of a dead trace."""
    box = {}

    def body(c):
        return c + box["value"]

    custom = jax.custom_jvp(body)
    custom.defjvp(lambda primals, tangents: (body(*primals), tangents[0]))
    run = {
        "scan": lambda x: jax.lax.scan(scan_body, x, None, length=2)[0],
        "cond": lambda x: jax.lax.cond(x[0] > 0, body, body, x),
        "while": lambda x: jax.lax.while_loop(is_small, body, x),
        "remat": lambda x: jax.checkpoint(body)(x),
        "custom_jvp": custom,
    }[construct]
    scan_body = lambda c, _: (body(c), None)  # noqa: E731
    is_small = lambda c: c[0] < 2  # noqa: E731

    def outer(x):
        with _tracing.separate_caches() as renew:
            box["value"] = x
            first = run(x)
            box["value"] = 2 * x
            renew()
            return first, run(x)

    first, second = jax.jit(outer)(VECTOR)
    again_first, _ = jax.jit(lambda x: outer(x))(VECTOR)
    assert (np.asarray(second) > np.asarray(first)).all() and (again_first == first).all()


def test_trace_binds_the_axis_and_speaks_of_the_users_function():
    def users_step(x):
        return jax.lax.psum(x, AXIS)

    def wrapper(x):
        return users_step(x)

    closed = _tracing.trace(wrapper, (VECTOR,), ReplicaAxis(3), users_step)
    assert [e.primitive.name for e in closed.jaxpr.eqns] == ["psum"]
    with pytest.raises(NameError, match="unbound axis name"):
        _tracing.trace(lambda x: users_step(x), (VECTOR,), None, users_step)
    with pytest.raises(jax.errors.TracerBoolConversionError, match="function users_step at"):
        _tracing.trace(lambda x: 1 if x[0] else 2, (VECTOR,), None, users_step)


def test_a_traced_function_is_evaluated_with_other_constants():
    captured = jnp.arange(3.0)
    closed = jax.make_jaxpr(lambda x: x + captured)(VECTOR)
    [result] = _tracing.evaluate(closed, [captured * 10], [VECTOR])
    assert result.tolist() == [1.0, 11.0, 21.0]


def test_meshes_are_found_at_any_depth():
    mesh = jax.sharding.Mesh(jax.devices()[:3], (AXIS,))
    spec = jax.sharding.PartitionSpec(AXIS)
    mapped = jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    closed = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (jax.jit(mapped)(c), None), x, None, length=2)[0])(VECTOR)
    assert set(_tracing.meshes_in(closed.jaxpr)) == {mesh}
    assert list(_tracing.meshes_in(jax.make_jaxpr(jnp.sin)(VECTOR).jaxpr)) == []


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bool_, jnp.bfloat16, jax.random.key(0).dtype], ids=str)
def test_a_placeholder_has_shape_and_dtype(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = _tracing.placeholder((2, 0), dtype)
    assert value.shape == (2, 0) and value.dtype == dtype


def test_importing_inside_a_trace_does_not_confuse_staging():
    """`_CLEAN` is taken at import; it is only a shortcut."""
    program = (
        "import jax\n"
        "def f(x):\n"
        "    from mirrored import _tracing\n"
        "    assert _tracing._CLEAN == _tracing.trace_state()\n"
        "    return x\n"
        "jax.jit(f)(1.0)\n"
        "from mirrored import _tracing\n"
        "assert not _tracing.is_staging()\n"
        "jax.jit(lambda x: [x, setattr(f, 'seen', _tracing.is_staging())][0])(2.0)\n"
        "assert f.seen\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=100)


# -- lines


def test_an_equation_knows_its_line():
    def function(x):
        y = jnp.sin(x)
        return jax.jit(lambda z: jax.lax.scan(lambda c, _: (jax.lax.psum(c, AXIS), None), z, None, length=2)[0])(y)

    first = function.__code__.co_firstlineno
    lines = {e.primitive.name: _tracing.equation_line(e) for e in equations(function)}
    assert lines == {name: f"{__file__}:{first + n}" for name, n in {"sin": 1, "jit": 2, "scan": 2, "psum": 2}.items()}


@pytest.mark.parametrize(
    "around", [lambda f, x, y: jax.lax.cond(x[0] > 0, f, jnp.sin, y), lambda f, x, y: jax.checkpoint(f)(y)], ids=["cond", "remat"]
)
def test_an_equation_whose_line_jax_has_lost_has_none_and_the_pass_takes_the_one_around(around):
    @jax.custom_vjp
    def backwards(x):
        return x

    backwards.defvjp(lambda x: (x, None), lambda _, ct: (jax.lax.psum(ct, AXIS),))

    def function(x):
        return jax.grad(lambda y: around(backwards, x, y).sum())(x)

    assert _tracing.equation_line(only("psum", function)) is None
    jaxpr = jax.make_jaxpr(function, axis_env=[(AXIS, 3)])(VECTOR).jaxpr
    [collective] = _mirror_proof.prove(jaxpr, [_mirror_proof.SAME]).collectives
    assert collective.where == f"{__file__}:{around.__code__.co_firstlineno}"


def test_the_users_line_is_the_innermost_that_is_neither_ours_nor_jaxs():
    here = inspect.currentframe().f_lineno
    assert _tracing.user_line() == f"{__file__}:{here + 1}"
    lines = []
    jax.jit(lambda x: (lines.append(_tracing.user_line()), x)[1])(1.0)
    jax.tree.map(lambda x: lines.append(_tracing.user_line()), [1])
    assert lines == [f"{__file__}:{here + 3}", f"{__file__}:{here + 4}"]


def test_a_warning_points_at_the_users_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        here = inspect.currentframe().f_lineno
        jax.tree.map(lambda x: warnings.warn("from inside", UserWarning, stacklevel=_tracing.user_stacklevel()), [1])
    assert (caught[0].filename, caught[0].lineno) == (__file__, here + 1)


def test_the_raising_line_is_the_innermost_of_the_users():
    def fails(x):
        return bool(x)

    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        jax.jit(fails)(1.0)
    assert _tracing.raising_line(caught.value) == f"{__file__}:{fails.__code__.co_firstlineno + 1}"
    assert _tracing.raising_line(ValueError("never raised")) == "<unknown>"


def test_names_for_checkpoints_are_an_operation_of_their_own():
    """Its parameter `name` may be the name of the axis."""
    equation = only("name", lambda x: checkpoint_name(x, AXIS))
    assert equation.params["name"] == AXIS and not _mirror_proof._is_collective(equation)
