"""A mark says what a value is for, survives every transformation, and costs nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._jax.marks import Mark, Purpose, mark, mark_p
from mirrored._program import proof
from mirrored._program.proof import SAME, Sameness, varying
from mirrored._typing import REPLICA_AXIS as AXIS

NOTE = Mark(Purpose.GRADIENT, "w", "here.py:1")
VECTOR = np.linspace(0.1, 1, 4, dtype="float32")


def prove(function):
    """Prove a function of a mirrored and a per-replica vector."""
    jaxpr = jax.make_jaxpr(function, axis_env=[(AXIS, 3)])(VECTOR, VECTOR).jaxpr
    return proof.prove(jaxpr, [SAME, varying("v")])


def marks_of(function):
    return [(note.name, state.sameness.name) for note, state in prove(function).marks]


def noted(name, purpose=Purpose.GRADIENT):
    return Mark(purpose, name, "here.py:1")


@pytest.mark.parametrize(
    "value", [1.5, np.int32(3), True, np.zeros((2, 0), "float16"), np.ones(3, "complex64"), jax.random.key(0)], ids=repr
)
def test_a_mark_is_the_identity(value):
    array = jnp.asarray(value)
    for marked in (mark(array, NOTE), jax.jit(lambda x: mark(x, NOTE))(array)):
        assert marked.dtype == array.dtype and marked.shape == array.shape
        assert (marked == array).all()


def test_a_mark_leaves_no_trace_in_the_compiled_program():
    def program(wrap):
        def f(x):
            return wrap(jnp.sin(wrap(x)))

        return jax.jit(f).lower(VECTOR).as_text()

    assert program(lambda x: mark(x, NOTE)) == program(lambda x: x)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: lambda x: jax.jvp(f, (x,), (2 * x,))[1],
        lambda f: lambda x: jax.vjp(f, x)[1](x)[0],
        lambda f: lambda x: jax.linearize(f, x)[1](x),
        jax.jacobian,
        jax.vmap,
        lambda f: lambda x: jax.lax.map(f, x),
        lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    ],
    ids=["grad", "jvp", "vjp", "linearize", "jacobian", "vmap", "map", "remat"],
)
def test_a_mark_does_not_change_derivatives_or_batches(transform):
    marked = transform(lambda x: mark(jnp.sin(mark(x, NOTE)), NOTE))(VECTOR)
    assert marked.tolist() == transform(jnp.sin)(VECTOR).tolist()


def test_derivatives_of_integers_are_allowed():
    assert jax.grad(lambda x: x * mark(jnp.int32(3), NOTE))(2.0) == 3.0


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda m, v: mark(v, noted("a")) + mark(m, noted("b")), [("a", "VARYING"), ("b", "SAME")]),
        (lambda m, v: mark(jax.lax.psum(v, AXIS), noted("a")), [("a", "REDUCED")]),
        (lambda m, v: jax.jit(lambda x: mark(x, noted("a")))(v), [("a", "VARYING")]),
        (lambda m, v: jax.vmap(lambda x: mark(x, noted("a")))(v), [("a", "VARYING")]),
        (lambda m, v: jax.grad(lambda x: mark((x * v).sum(), noted("a")))(m), [("a", "VARYING")]),
        (lambda m, v: jax.lax.cond(m[0] > 0, lambda: mark(v, noted("a")), lambda: m), [("a", "VARYING")]),
        (lambda m, v: jax.lax.scan(lambda c, _: (v, mark(c, noted("a"))), m, None, length=2), [("a", "VARYING")]),
        (lambda m, v: jax.lax.scan(lambda c, _: (2 * c, mark(c, noted("a"))), m, None, length=2), [("a", "SAME")]),
        (lambda m, v: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: mark(c, noted("a")) + v, m), [("a", "VARYING")]),
        (lambda m, v: jax.lax.fori_loop(0, 2, lambda i, c: mark(c, noted("a")), m), [("a", "SAME")]),
        (lambda m, v: jax.checkpoint(lambda x: mark(x, noted("a")))(v), [("a", "VARYING")]),
    ],
    ids=["plain", "reduced", "jit", "vmap", "grad", "cond", "scan_late", "scan", "while", "fori", "remat"],
)  # fmt: skip
def test_the_proof_sees_each_mark_once_with_the_state_of_its_value(function, expected):
    assert marks_of(function) == expected


@pytest.mark.parametrize("purpose", Purpose)
def test_an_assigned_value_starts_afresh_if_it_is_mirrored(purpose):
    """Two updates in one step are judged like one in each of two steps."""
    findings = prove(lambda m, v: (mark(jax.lax.psum(v, AXIS), noted("w", purpose)), mark(v, noted("w", purpose))))
    expected = {Purpose.ASSIGN: Sameness.SAME, Purpose.ROWS: Sameness.VARYING}.get(purpose, Sameness.REDUCED)
    assert [state.sameness for state in findings.outputs] == [expected, Sameness.VARYING]


def test_notes_are_values():
    """JAX caches equations by their parameters."""
    assert len({noted("w"), noted("w"), noted("w", Purpose.ASSIGN)}) == 2
    jaxpr = jax.make_jaxpr(lambda x: mark(x, NOTE))(VECTOR).jaxpr
    assert [(equation.primitive, equation.params) for equation in jaxpr.eqns] == [(mark_p, {"note": NOTE})]


def test_only_unaggregated_mirrored_variables_mark_what_is_assigned(strategy3, per_replica):
    with strategy3.scope():
        mirrored = mr.Variable(0.0, name="mirrored")
        mean = mr.Variable(0.0, name="mean", aggregation="mean")
        local = mr.Variable(0.0, name="local", synchronization="on_read", aggregation="sum")

    def step(x):
        mirrored.assign(1.0)
        mean.assign(x)
        local.assign(x)

    strategy3.run(step, args=(per_replica(strategy3, 1.0, 2.0, 3.0),))
    [program] = strategy3._steps.programs
    assert [(note.purpose, note.name) for note, _ in program.findings.marks] == [(Purpose.ASSIGN, "mirrored")]
