"""The mirror proof is sound, accepts what people write, and refuses what would diverge or hang, with its reason."""

import re

import jax
import jax.numpy as jnp
import jax.scipy.sparse.linalg
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from strategies import all_reduce, strategy_of, variable

import mirrored as mr
from mirrored._jax import primitives, tracing
from mirrored._jax.marks import Purpose
from mirrored._program import advice, proof
from mirrored._program.program import collectives_in
from mirrored._program.proof import SAME, Sameness, varying
from mirrored._replicas.collectives import ReplicaAxis
from mirrored._typing import REPLICA_AXIS as AXIS

pytestmark = pytest.mark.usefixtures("in_numpy")

SIZE = 4
R = 3
MATRIX = np.eye(SIZE, dtype="float32") * 3 + 0.5
VECTOR = np.linspace(0.1, 1, SIZE, dtype="float32")
HERE = re.escape(__file__)


@pytest.fixture(autouse=True, scope="module", params=[True, False], ids=["advised", "unadvised"])
def is_advised(request):
    """Run each test with the advice, and without any: nothing that the proof shows or refuses may rest on it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in () if request.param else ("join", "either", "chosen", "backward", "operation", "combined"):
            patch.setattr(advice, name, lambda *_: advice.NOTHING)
        if not request.param:
            judged = (Purpose.ASSIGN, Purpose.STATE)  # by the proof
            patch.setattr(advice, "marked", lambda note, *_: (advice.NOTHING, note.purpose in judged))
        yield request.param


def psum(x):
    return jax.lax.psum(x, AXIS)


def prove(function):
    """Prove a function of a mirrored and a per-replica vector; its results are flattened."""
    axis = ReplicaAxis(R)
    closed = tracing.trace(lambda m, v: jax.tree.leaves(function(m, v)), (VECTOR, VECTOR), axis, function)
    return closed, proof.prove(tracing.lowered(closed, axis).jaxpr, [SAME, varying("the argument `v`")])


def real_copies(array):
    return {np.asarray(shard.data).tobytes() for shard in array.addressable_shards}


def wrongly_mirrored(results):
    """Return which results of a step are mirrored although their copies differ."""
    mirrored = ((i, result) for i, result in enumerate(results) if not isinstance(result, mr.PerReplica))
    return [i for i, result in mirrored if len(real_copies(result)) > 1]


def own_vectors(strategy):
    own_rows = np.random.default_rng(0).normal(size=(R, SIZE)).astype("float32")
    return strategy.distribute_values_from_function(lambda ctx: own_rows[ctx.replica_id_in_sync_group])


# -- sound: random programs, run for real


def trips(a):
    return (jnp.abs(jnp.sum(a)) * 10).astype(jnp.int32) % 3


def numbered_rows(a):
    return a * (1.0 + jnp.arange(jax.lax.axis_size(AXIS)))[:, None]


def ring():
    return [(i, (i + 1) % jax.lax.axis_size(AXIS)) for i in range(jax.lax.axis_size(AXIS))]


def groups():
    return [[0], list(range(1, jax.lax.axis_size(AXIS)))]


def bits_of(a):
    return jax.lax.bitcast_convert_type(jax.lax.stop_gradient(a), jnp.uint32)


def host_copy(a):
    shape = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    return jax.pure_callback(np.copy, shape, jax.lax.stop_gradient(a), vmap_method="broadcast_all")


#: Operations on two vectors.
LEAVES = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "where": lambda a, b: jnp.where(a > b, a, b),
    "matmul": lambda a, b: jnp.outer(a, b) @ a,
    "sort": lambda a, b: jnp.sort(a),
    "gather": lambda a, b: a[jnp.argsort(b)],
    "scatter": lambda a, b: a.at[(b > 0).astype(jnp.int32)].add(b),
    "qr": lambda a, b: jnp.linalg.qr(jnp.outer(a, b) + jnp.eye(SIZE))[0][0],
    "cg": lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: x * (1 + a * a), b, maxiter=2)[0],
    "cg_psum": lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: x * (1 + a * a) + psum(x), b, maxiter=2)[0],
    "log2": lambda a, b: jnp.log2(1 + jnp.abs(a)),
    "tanh": lambda a, b: jnp.tanh(a),  # its derivative is a primitive of its own since jax 0.11.2
    "polyval": lambda a, b: jnp.polyval(a, b),
    "searchsorted": lambda a, b: jnp.searchsorted(jnp.sort(a), b).astype(jnp.float32),
    "nonzero": lambda a, b: jnp.nonzero(a > b, size=SIZE)[0].astype(jnp.float32),
    "psum": lambda a, b: psum(a),
    "pmean": lambda a, b: jax.lax.pmean(a, AXIS),
    "pmax": lambda a, b: jax.lax.pmax(jax.lax.stop_gradient(a), AXIS),
    "all_gather": lambda a, b: jax.lax.all_gather(a, AXIS)[-1],
    "psum_groups": lambda a, b: jax.lax.psum(a, AXIS, axis_index_groups=groups()),
    "ppermute": lambda a, b: jax.lax.ppermute(a, AXIS, ring()),
    "psum_scatter": lambda a, b: jax.lax.psum_scatter(numbered_rows(a), AXIS),
    "all_to_all": lambda a, b: jax.lax.all_to_all(numbered_rows(a), AXIS, 0, 0)[-1],
    "axis_index": lambda a, b: a + jax.lax.axis_index(AXIS),
    "random": lambda a, b: jax.random.normal(jax.random.wrap_key_data(bits_of(a)[:2]), (SIZE,)),
    "random_folded": lambda a, b: jax.random.normal(jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(AXIS)), (SIZE,)),
    "random_bits": lambda a, b: jax.lax.rng_bit_generator(bits_of(a), (SIZE,))[1].astype(jnp.float32) / 2.0**32,
    "callback": lambda a, b: host_copy(a),
}


def scan(a, b, values, f, g):
    carry, rows = jax.lax.scan(lambda c, x: (f(*values, x, c), g(*values, c, x)), a, jnp.stack([b, a]))
    return carry + 2 * rows[0] + rows[1]


def scan_that_varies_late(a, b, values, f, g):
    return jax.lax.scan(lambda c, _: ((c[1], f(*values, *c)), None), (a, b), None, length=2)[0][0]


def while_trips(a, b, values, f, g):
    return jax.lax.while_loop(lambda c: c[0] < trips(a), lambda c: (c[0] + 1, f(*values, c[1])), (0, b))[1]


def while_value(a, b, values, f, g):
    def again(c):
        return (c[0] < 2) & (jnp.sum(g(*values, c[1])) < jnp.sum(a))

    return jax.lax.while_loop(again, lambda c: (c[0] + 1, f(*values, c[1])), (0, b))[1]


def with_custom_jvp(a, b, values, f, g):
    h = jax.custom_jvp(f)
    h.defjvp(lambda primals, tangents: (f(*primals), 2 * tangents[-1] + g(*primals)))
    return h(*values, a)


def with_custom_vjp(a, b, values, f, g):
    h = jax.custom_vjp(f)
    h.defvjp(
        lambda *inputs: (f(*inputs), inputs),
        lambda inputs, cotangent: (*(jnp.zeros_like(x) for x in inputs[:-1]), g(*inputs, cotangent)),
    )
    return h(*values, a)


#: Operations that run two programs `f` and `g` on the values so far and their own.
COMPOUNDS = {
    "scan": scan,
    "scan_that_varies_late": scan_that_varies_late,
    "fori": lambda a, b, values, f, g: jax.lax.fori_loop(0, 2, lambda i, c: f(*values, c), a),
    "while_trips": while_trips,
    "while_value": while_value,
    "cond": lambda a, b, values, f, g: jax.lax.cond(jnp.sum(a) < jnp.sum(b), f, g, *values),
    "switch": lambda a, b, values, f, g: jax.lax.switch(trips(a), [f, g, lambda *_: b], *values),
    "vmap": lambda a, b, values, f, g: jax.vmap(lambda x: f(*values, x))(jnp.stack([a, b])).sum(0),
    "grad": lambda a, b, values, f, g: jax.grad(lambda x: f(*values, x).sum())(a),
    "jvp": lambda a, b, values, f, g: jax.jvp(lambda x: f(*values, x), (a,), (b,))[1],
    "jit": lambda a, b, values, f, g: jax.jit(f)(*values),
    "remat": lambda a, b, values, f, g: jax.checkpoint(f)(*values),
    "custom_jvp": with_custom_jvp,
    "custom_vjp": with_custom_vjp,
}
#: What JAX cannot differentiate in that direction.
NOT_INSIDE = {"grad": {"while_trips", "while_value"}, "jvp": {"custom_vjp"}}


def run_program(program, values, leaves):
    """Append the result of each instruction to the values; `sin` keeps them small."""
    values = list(values)
    for instruction in program:
        values.append(jnp.sin(run_instruction(instruction, values, leaves)))
    return values


def run_instruction(instruction, values, leaves):
    name, i, j, *blocks = instruction
    a, b = values[i % len(values)], values[j % len(values)]
    if name in leaves:
        return leaves[name](a, b)
    f, g = ((lambda *inner, block=block: run_program(block, inner, leaves)[-1]) for block in blocks)
    return COMPOUNDS[name](a, b, values, f, g)


POSITIONS = st.integers(0, 9)


@st.composite
def instructions(draw, depth, leaf_names, without=frozenset()):
    names = sorted({*leaf_names, *(COMPOUNDS if depth else ())} - without)
    name = draw(st.sampled_from(names))
    i, j = draw(POSITIONS), draw(POSITIONS)
    if name in leaf_names:
        return name, i, j
    inside = st.lists(instructions(depth - 1, leaf_names, without | NOT_INSIDE.get(name, set())), min_size=1, max_size=2)
    return name, i, j, draw(inside), draw(inside)


STATEMENTS = ("assign", "assign_reduced", "assign_averaged", "assign_sometimes", "assign_in_a_loop", "add_to_local", "swap")


def run_statement(name, target, other, averaged, local, value):
    if name == "assign":
        target.assign(value)
    elif name == "assign_reduced":
        target.assign(mr.get_replica_context().all_reduce("mean", value))
    elif name == "assign_averaged":
        averaged.assign_sub(value)
    elif name == "assign_sometimes":
        mr.cond(jnp.sum(value) > 0, lambda: target.assign(other * value), lambda: other.assign(target))
    elif name == "assign_in_a_loop":
        mr.fori_loop(0, 3, lambda i, carry: (target.assign(other), other.assign(carry), value)[2], target.value)
    elif name == "add_to_local":
        local.assign_add(value)
    else:
        first, second = target.value, other.value
        target.assign(second)
        other.assign(first)


@pytest.mark.filterwarnings("ignore:.*has been compiled:mirrored.RecompilationWarning")
def test_a_random_step_runs_and_stays_mirrored_or_is_refused(strategy3):
    strategy = strategy3
    w, u = variable(VECTOR, strategy, name="w"), variable(-VECTOR, strategy, name="u")
    averaged = variable(VECTOR, strategy, name="averaged", aggregation="mean")
    local = variable(VECTOR, strategy, name="local", synchronization="on_read", aggregation="sum")
    variables = [w, u, averaged, local]
    leaves = LEAVES | {f"read_{variable.name}": lambda a, b, v=variable: a * v.value for variable in variables}
    statements = st.tuples(st.sampled_from(STATEMENTS), POSITIONS, POSITIONS)
    outcomes = []

    @settings(max_examples=30, derandomize=True, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(st.one_of(instructions(2, frozenset(leaves)), statements), min_size=2, max_size=6))
    def check(program):
        def step(m, v):
            values = [m, v]
            for name, i, j, *blocks in program:
                if name in STATEMENTS:
                    run_statement(name, *((w, u), (u, w))[i % 2], averaged, local, values[j % len(values)])
                else:
                    values = run_program([(name, i, j, *blocks)], values, leaves)
            return values

        before = [real_copies(variable._array) for variable in variables]
        try:
            results = strategy.run(step, args=(VECTOR, own_vectors(strategy)))
        except (mr.ReplicasDivergeError, mr.CollectiveHangError) as refusal:
            assert [real_copies(variable._array) for variable in variables] == before
            outcomes.append(type(refusal))
            return
        assert wrongly_mirrored([*results, w._array, u._array, averaged._array]) == []
        outcomes.append(None)

    check()
    assert outcomes.count(None) > 10 and mr.ReplicasDivergeError in outcomes


@pytest.mark.by_xla
def test_the_soundness_test_notices_a_wrong_proof(monkeypatch):
    for owner, name, wrong, program in [
        (primitives, "MAKE_SAME", primitives.MAKE_SAME | {"ppermute"}, lambda m, v: jax.lax.ppermute(v, AXIS, ring())),
        (primitives, "PURE", primitives.PURE | {"rng_uniform"}, lambda m, v: jax.lax.rng_uniform(0.0, 1.0, (SIZE,))),
        (proof, "join", lambda states: list(states)[-1], lambda m, v: jax.lax.cond(v[0] > 0, lambda: m, lambda: -m)),
    ]:
        run = lambda s, program=program: s.run(lambda m, v: [program(m, v)], args=(VECTOR, own_vectors(s)))  # noqa: E731
        assert wrongly_mirrored(run(strategy_of(R))) == []
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            assert wrongly_mirrored(run(strategy_of(R))) == [0]


# -- complete: what people write


KEPT = {
    "sum_of_varying": lambda m, v: m - 0.1 * psum(v),
    "gathered": lambda m, v: jax.lax.all_gather(v, AXIS, tiled=True),
    "max_and_min": lambda m, v: (jax.lax.pmax(v, AXIS), jax.lax.pmin(v, AXIS)),
    "positional_sum_of_a_vmap": lambda m, v: jax.vmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(m),
    "vmap_over_a_mesh_collective": lambda m, v: jax.vmap(lambda x: jax.lax.psum(x, (AXIS, "i")), axis_name="i")(v),
    "scan": lambda m, v: jax.lax.scan(lambda c, x: (c + psum(v[0]) * x, c), m[0], m),
    "fori_with_traced_bound": lambda m, v: jax.lax.fori_loop(0, m[0].astype(int), lambda i, c: c + psum(v), m),
    "while_on_a_reduced_value": lambda m, v: jax.lax.while_loop(lambda c: c < psum(v[0]), lambda c: c + psum(v[1]), m[0]),
    "cond_on_a_reduced_value": lambda m, v: jax.lax.cond(psum(v[0]) > 0, lambda: psum(v), lambda: m),
    "switch": lambda m, v: jax.lax.switch(m[0].astype(int), [lambda: m, lambda: psum(v)]),
    "remat": lambda m, v: jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum())(m),
    "checkpoint_name": lambda m, v: checkpoint_name(m, "saved"),
    "composite": lambda m, v: jax.lax.composite(jnp.sin, "mine.sin")(m),
    "platform_dependent": lambda m, v: jax.lax.platform_dependent(m, cpu=jnp.sin, default=jnp.cos),
    "linear_call": lambda m, v: jax.custom_derivatives.linear_call(lambda r, x: r * x, lambda r, y: r * y, m, m),
    "random_with_a_common_key": lambda m, v: (
        jax.random.normal(jax.random.key(0), (3,)),
        jax.random.gamma(jax.random.PRNGKey(1), 2.0),
        jax.random.bernoulli(jax.random.split(jax.random.key(2, impl="rbg"))[0]),
        jax.random.permutation(jax.random.key(3), m),
    ),
    "sorting": lambda m, v: (jnp.argsort(m), jax.lax.top_k(m, 2), jnp.median(m), jnp.unique(m, size=3), jnp.searchsorted(m, 0.5)),
    "indexing": lambda m, v: (m.at[0].set(1.0), m.at[jnp.array([0, 0])].add(m[1]), m[jnp.array([2, 1])], m.at[1].multiply(2.0)),
    "windows": lambda m, v: (
        jax.lax.reduce_window(m, 0.0, lambda a, b: a + 2 * b, (2,), (1,), "SAME"),
        jax.lax.reduce(m, np.float32(1), lambda a, b: a * b + 1, (0,)),
        jnp.convolve(m, m),
        jnp.cumsum(m),
        jax.lax.associative_scan(jnp.multiply, m),
    ),
    "special_functions": lambda m, v: (
        jax.scipy.special.gammainc(m, m),
        jax.scipy.special.gammaincc(m, m),
        jax.scipy.special.betainc(m, m, m),
        jax.scipy.special.erfinv(m),
    ),
    "cholesky": lambda m, v: jnp.linalg.cholesky(MATRIX + psum(jnp.outer(v, v))),
    "qr": lambda m, v: jnp.linalg.qr(MATRIX * m),
    "eigh": lambda m, v: jnp.linalg.eigh(psum(jnp.outer(v, v))),
    "eig": lambda m, v: jnp.linalg.eig(MATRIX * m),
    "svd": lambda m, v: jnp.linalg.svd(MATRIX * m),
    "solve": lambda m, v: jnp.linalg.solve(MATRIX, psum(v)),
    "gradient_of_solve": lambda m, v: jax.grad(lambda x: jnp.linalg.solve(MATRIX, x).sum())(m),
    "gradient_of_expm": lambda m, v: jax.grad(lambda x: jax.scipy.linalg.expm(MATRIX * x).sum())(m),
    "cg": lambda m, v: jax.scipy.sparse.linalg.cg(lambda x: MATRIX @ x, m)[0],
    "cg_with_a_collective_inside": lambda m, v: jax.scipy.sparse.linalg.cg(lambda x: psum(v @ v * x), m, maxiter=3)[0],
    "debug_print": lambda m, v: (jax.debug.print("{v}", v=v), m)[1],
    "without elements": lambda m, v: jax.lax.empty((0,), jnp.float32) + jnp.linspace(m[0], m[1], 0),
}  # fmt: skip


def test_mirrored_values_stay_mirrored():
    assert [name for name, function in KEPT.items() if not all(state.is_mirrored for state in prove(function)[1].outputs)] == []


LOST = {
    "the_argument": (lambda m, v: m + v, "the argument `v`"),
    "without_elements": (lambda m, v: v[:0], "the argument `v`"),  # a result is a PerReplica for any number of rows
    "half_of_a_tuple": (lambda m, v: jax.lax.cond(True, lambda: v, lambda: m), "the argument `v`"),
    "axis_index": (lambda m, v: m * jax.lax.axis_index(AXIS), "replica's own number"),
    "groups": (lambda m, v: jax.lax.psum(v, AXIS, axis_index_groups=[[0, 1], [2]]), "`psum` .* its own part"),
    "ppermute": (lambda m, v: jax.lax.ppermute(m, AXIS, [(0, 1)]), "`ppermute` .* its own part"),
    "psum_scatter": (lambda m, v: jax.lax.psum_scatter(jnp.ones((3, 2)), AXIS), "`reduce_scatter` .* its own part"),
    "all_to_all": (lambda m, v: jax.lax.all_to_all(jnp.ones((3, 2)), AXIS, 0, 0), "`all_to_all` .* its own part"),
    "gradient_of_a_sum": (lambda m, v: jax.grad(lambda x: psum((x * v).sum()))(m), "the argument `v`"),
    "vmap_named_like_the_axis": (lambda m, v: jax.vmap(lambda x: jax.lax.psum(x, AXIS), axis_name=AXIS)(v), "argument `v`"),
    "scan_from_the_second_round": (
        lambda m, v: jax.lax.scan(lambda c, _: ((c[1], v[0]), None), (m[0], m[1]), None, length=3)[0][0], "argument `v`"
    ),
    "scan_ys": (lambda m, v: jax.lax.scan(lambda c, x: (c, x), m, v[:, None])[1], "the argument `v`"),
    "while_with_a_varying_trip_count": (
        lambda m, v: jax.lax.while_loop(lambda c: c[0] < v[0], lambda c: (c[0] + 1, 2 * c[1]), (m[0], m))[1], "argument `v`"
    ),
    "cond_with_a_varying_predicate": (lambda m, v: jax.lax.cond(v[0] > 0, lambda: m, lambda: 2 * m), "the argument `v`"),
    "random_with_an_own_key": (
        lambda m, v: jax.random.normal(jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(AXIS))), "own number"
    ),
    "rng_uniform": (lambda m, v: jax.lax.rng_uniform(0.0, 1.0, (2,)), "`rng_uniform`"),
    "pure_callback": (lambda m, v: jax.pure_callback(np.copy, jax.ShapeDtypeStruct(m.shape, m.dtype), m), "`pure_callback`"),
    "io_callback": (lambda m, v: jax.experimental.io_callback(np.copy, jax.ShapeDtypeStruct(m.shape, m.dtype), m), "`io_call"),
    "ffi": (lambda m, v: jax.ffi.ffi_call("mine", jax.ShapeDtypeStruct(m.shape, m.dtype))(m), "`ffi_call`"),
    "ref": (lambda m, v: jax.new_ref(m)[...], "`new_ref`"),
    "uninitialised": (lambda m, v: jax.lax.empty((2,), jnp.float32), "`empty`"),
    "linear_solve": (lambda m, v: jnp.linalg.solve(MATRIX, v), "the argument `v`"),
    "reduce_with_an_own_function": (
        lambda m, v: jax.lax.reduce(m, np.float32(0), lambda a, b: a + b * jax.lax.axis_index(AXIS), (0,)), "`reduce`"
    ),
}  # fmt: skip


def test_what_may_differ_is_varying_and_says_why():
    for name, (function, origin) in LOST.items():
        state = prove(function)[1].outputs[0]
        assert state.sameness is Sameness.VARYING, name
        assert re.search(origin, state.origin), (name, state.origin)
        assert "argument" in state.origin or re.search(rf" at {HERE}:\d+", state.origin), (name, state.origin)


def test_custom_partitioning_and_pallas_are_varying():
    from jax.experimental import pallas as pl
    from jax.experimental.custom_partitioning import custom_partitioning

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    split = custom_partitioning(lambda x: x)
    split.def_partition(infer_sharding_from_operands=lambda *_: None, partition=lambda *_: None, sharding_rule="i -> i")
    called = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((SIZE,), jnp.float32), interpret=True)
    for function, name in ((split, "custom_partitioning"), (called, "pallas_call")):
        assert f"`{name}`" in prove(lambda m, v, f=function: f(m))[1].outputs[0].origin


def test_custom_vmap_is_entered():
    for rule, is_mirrored in ((lambda x: psum(2 * x), True), (lambda x: 3 * x, False)):
        function = jax.custom_batching.custom_vmap(rule)
        function.def_vmap(lambda size, batched, x, f=function: (f(x), batched[0]))
        assert prove(lambda m, v, f=function: f(v))[1].outputs[0].is_mirrored is is_mirrored


# -- never a hang


@jax.custom_vjp
def summed_both_ways(x):
    return psum(x)


@jax.custom_vjp
def summed_backwards(x):
    return x


summed_both_ways.defvjp(lambda x: (psum(x), None), lambda _, ct: (psum(ct),))
summed_backwards.defvjp(lambda x: (x, None), lambda _, ct: (psum(ct),))


def maybe(v, function, otherwise):
    return jax.lax.cond(v[0] > 0, function, lambda: otherwise)


while_loop, own_cg = jax.lax.while_loop, lambda matrix, side: jax.scipy.sparse.linalg.cg(matrix, side, maxiter=3)[0]
HANGS = {
    "cond": lambda m, v: maybe(v, lambda: psum(m), m),
    "the replica's number": lambda m, v: jax.lax.cond(jax.lax.axis_index(AXIS) == 0, lambda: psum(m), lambda: m),
    "all_gather": lambda m, v: maybe(v, lambda: jax.lax.all_gather(m, AXIS)[0], m),
    "pmax": lambda m, v: maybe(v, lambda: jax.lax.pmax(m, AXIS), m),
    "ppermute": lambda m, v: maybe(v, lambda: jax.lax.ppermute(m, AXIS, [(0, 1)]), m),
    "pbroadcast": lambda m, v: maybe(v, lambda: jax.lax.pbroadcast(m, (AXIS,), 0), m),
    "reduce_scatter": lambda m, v: maybe(v, lambda: jax.lax.psum_scatter(jnp.ones(3), AXIS), m[0]),
    "groups": lambda m, v: maybe(v, lambda: jax.lax.psum(m, AXIS, axis_index_groups=[[0, 1, 2]]), m),
    "both branches": lambda m, v: jax.lax.cond(v[0] > 0, lambda: psum(m), lambda: psum(2 * m)),
    "switch": lambda m, v: jax.lax.switch(v[0].astype(int), [lambda: psum(m), lambda: m, lambda: -m]),
    "while body": lambda m, v: while_loop(lambda c: c < v[0], lambda c: psum(c) + 1, m[0]),
    "while condition": lambda m, v: while_loop(lambda c: psum(c) < v[0], lambda c: c + 1, m[0]),
    "varies late": lambda m, v: while_loop(lambda c: c[0] < 9, lambda c: (c[1], psum(c[1]) + v[0]), (m[0], m[1])),
    "fori with a varying bound": lambda m, v: jax.lax.fori_loop(0, v[0].astype(int), lambda i, c: psum(c), m),
    "vmapped while": lambda m, v: jax.vmap(lambda x: while_loop(lambda c: c < x, lambda c: psum(c) + 1, 0.0))(v),
    "scan in cond": lambda m, v: maybe(v, lambda: jax.lax.scan(lambda c, _: (psum(c), None), m, None, length=2)[0], m),
    "cond in cond": lambda m, v: maybe(v, lambda: jax.lax.cond(m[0] > 0, lambda: jax.jit(psum)(m), lambda: m), m),
    "while in cond": lambda m, v: maybe(v, lambda: while_loop(lambda c: c[0] < 2, psum, m), m),
    "predicate that varies late": lambda m, v: jax.lax.scan(
        lambda c, _: ((c[1], v[0], jax.lax.cond(c[0] > 0, lambda: psum(c[2]), lambda: c[2])), None), (m[0], m[1], m), None, 3
    ),
    "gradient of a cond": lambda m, v: jax.grad(lambda x: jax.lax.cond(v[0] > 0, psum, lambda y: y, x).sum())(m),
    "remat": lambda m, v: maybe(v, lambda: jax.checkpoint(psum)(m), m),
    "custom_vjp": lambda m, v: maybe(v, lambda: summed_both_ways(m), m),
    "its backward": lambda m, v: jax.grad(lambda x: jax.lax.cond(v[0] > 0, summed_backwards, lambda y: y, x).sum())(m),
    "cg for a varying side": lambda m, v: own_cg(lambda x: psum(MATRIX @ x), v),
    "cg with a varying matrix": lambda m, v: own_cg(lambda x: v @ v * psum(x), m),
}  # fmt: skip


def test_a_collective_that_some_replicas_may_skip_is_refused():
    accepted = []
    for name, function in HANGS.items():
        collective = name if name in ("all_gather", "pmax", "ppermute", "pbroadcast", "reduce_scatter") else "psum"
        try:
            prove(function)
            accepted.append(name)
        except mr.CollectiveHangError as error:
            assert re.search(rf"the collective `{collective}` at {HERE}:\d+ runs under", str(error)), (name, error)
    assert accepted == []


def test_a_collective_inside_an_unknown_construct_is_refused():
    def function(m, v):
        return jax.lax.reduce(m, np.float32(0), lambda a, b: psum(a) + b, (0,))

    with pytest.raises(mr.CollectiveHangError, match=r"runs inside `reduce`, and the proof does not know whether all replicas"):
        prove(function)


def test_the_hang_message_names_the_input_and_a_way_out_that_runs(strategy3, per_replica):
    x = per_replica(strategy3, 0.0, 1.0, 2.0)

    def step(batch):
        total = lambda: mr.get_replica_context().all_reduce("sum", batch["x"])  # noqa: E731
        return jax.lax.cond(batch["x"] > 0, total, lambda: batch["x"])

    line = step.__code__.co_firstlineno + 1
    expected = rf"`psum` at {HERE}:{line} runs under .* it depends on the argument `batch\['x'\]`.* jnp.where"
    for _ in range(2):  # a refusal is not cached
        with pytest.raises(mr.CollectiveHangError, match=expected):
            strategy3.run(step, args=({"x": x},))

    def way_out(x):
        total = mr.get_replica_context().all_reduce("sum", x)
        agreed = jax.lax.cond(total > 0, lambda: mr.get_replica_context().all_reduce("sum", 2 * x), lambda: x)
        return jnp.where(x > 0, total, x), agreed

    results = strategy3.local_results(strategy3.run(way_out, args=(x,)))
    assert [tuple(map(float, own)) for own in results] == [(0.0, 6.0), (3.0, 6.0), (3.0, 6.0)]


# -- refusals name everything; whole steps run in tests/parity/programs.py


REFUSED = {
    "argument": (lambda x, u, local: x[0]["rows"][1], r"the argument `data\[0\]\['rows'\]`, of which each replica has its own"),
    "replica_number": (lambda x, u, local: u + mr.get_replica_context().replica_id_in_sync_group, "the replica's own number"),
    "own_key": (lambda x, u, local: jax.random.normal(mr.get_replica_context().rng(0), (SIZE,)), r"ctx\.rng"),
    "sync_on_read": (lambda x, u, local: u + local, "the sync-on-read variable 'local', which has one value per replica"),
    "own_gradient": (lambda x, u, local: jax.grad(lambda w: jnp.sum(w * x[0]["rows"][0]))(u.value), "the argument"),
}  # fmt: skip


def test_an_assignment_that_may_diverge_is_refused(strategy3):
    w, u = variable(VECTOR, strategy3, name="w"), variable(VECTOR, strategy3, name="u")
    local = variable(VECTOR, strategy3, name="local", synchronization="on_read", aggregation="sum")
    rows = strategy3.distribute_values_from_function(lambda ctx: np.ones((2, SIZE), "float32"))

    def step(data, make):
        w.assign(make(data, u, local))

    line = step.__code__.co_firstlineno + 1
    for make, origin in REFUSED.values():
        for _ in range(2):  # a refusal is not cached
            with pytest.raises(
                mr.ReplicasDivergeError, match=rf"(?s)at {HERE}:{line} may differ .* depends on .*{origin}"
            ) as caught:
                strategy3.run(step, args=([{"rows": rows}], make))
    words = "variable 'w' is mirrored", "all_reduce('mean', value)", "aggregation='mean'", "synchronization='on_read'"
    assert all(each in str(caught.value) for each in words)
    assert w.numpy().tobytes() == VECTOR.tobytes()
    combined = lambda data: [w.assign(all_reduce("mean", make(data, u, local))) for make, _ in REFUSED.values()] and None  # noqa: E731
    strategy3.run(combined, args=([{"rows": rows}],))
    strategy3.assert_mirrored()


def test_refusals_find_the_variable_and_the_line(strategy3, per_replica):
    w, u = variable(VECTOR, strategy3, name="w"), variable(VECTOR, strategy3, name="u")
    local = variable(VECTOR, strategy3, name="local", synchronization="on_read")

    def assign_add(*, x):
        w.assign_add(x)

    def overwritten_later(x):
        w.assign(x)
        w.assign(0 * u)

    def swapped(x):
        before = local.value
        local.assign(w)
        w.assign(before)

    def in_a_loop(x):
        def body(carry, _):
            w.assign(u)
            u.assign(carry)
            return x, None

        mr.scan(body, jnp.zeros(SIZE), None, length=3)

    for step, name, offset, origin in [
        (assign_add, "w", 1, "the argument `x`"),
        (overwritten_later, "w", 1, "the argument `x`"),
        (swapped, "w", 3, "the sync-on-read variable 'local'"),
        (in_a_loop, "w", 2, "the argument `x`"),
    ]:
        line = step.__code__.co_firstlineno + offset
        with pytest.raises(mr.ReplicasDivergeError, match=rf"variable '{name}' .* at {HERE}:{line} .* depends on {origin}"):
            strategy3.run(step, kwargs={"x": per_replica(strategy3, VECTOR, VECTOR, VECTOR)})
    assert w.numpy().tobytes() == u.numpy().tobytes() == VECTOR.tobytes()


def test_a_part_of_a_result_may_be_mirrored():
    _, findings = prove(lambda m, v: (m, v, psum(v), psum(m)))
    assert [state.sameness.name for state in findings.outputs] == ["SAME", "VARYING", "REDUCED", "SAME"]


def test_collectives_are_listed_with_their_bytes_and_place():
    def function(m, v):
        m = m + psum(v)
        m, _ = jax.lax.scan(lambda c, _: (c + jax.lax.all_gather(v, AXIS)[0], None), m, None, length=3)
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: jax.lax.pmax(c[:2], AXIS), m[:2])

    found = list(collectives_in(tracing.lowered(prove(function)[0], ReplicaAxis(R)).jaxpr))
    expected = [("psum", 16, False), ("all_gather", 16, True), ("pmax", 8, True)]
    assert [(one.name, one.num_bytes, one.in_loop) for one in found] == expected
    assert all(re.fullmatch(rf"{HERE}:\d+", one.where) for one in found)
