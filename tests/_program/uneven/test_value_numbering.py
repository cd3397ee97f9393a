"""What is alike in traces for different numbers of rows, and what must wait for a collective."""

import jax
import jax.numpy as jnp
import numpy as np

from mirrored._jax import tracing
from mirrored._program.uneven import merge, nodes, value_numbering
from mirrored._replicas.collectives import ReplicaAxis


def programs_of(step, *row_counts, columns=2):
    """Trace a step of `(mirrored [columns], rows [n, columns])` for several numbers of rows."""
    shapes = [(jax.ShapeDtypeStruct((columns,), "float32"), jax.ShapeDtypeStruct((n, columns), "float32")) for n in row_counts]
    traces = [tracing.trace(lambda w, x: step(w, x), own, ReplicaAxis(4), step) for own in shapes]
    return [nodes.read_trace(f"the replicas with {n} rows", trace) for n, trace in zip(row_counts, traces, strict=True)]


def compared(step, *row_counts):
    programs = programs_of(step, *row_counts)
    value_numbering.compare(programs, [True, False])
    return programs, programs[0].num_stages


def names(nodes):
    return [node.equation.primitive.name for node in nodes]


def test_what_does_not_depend_on_the_rows_is_shared():
    programs, _ = compared(lambda w, x: (jnp.sin(w) * 2, jnp.cos(x)), 3, 2)
    for program in programs:
        assert names(node for node in program.nodes if not node.is_own) == ["sin", "mul"]
        assert names(node for node in program.nodes if node.is_own) == ["cos"]


def test_a_literal_that_differs_is_not_shared_and_one_that_is_equal_is():
    programs, _ = compared(lambda w, x: (w / x.shape[0], w / 7), 3, 2)
    assert [value.number is not None for value in programs[0].outputs] == [False, True]


def test_constants_are_compared_by_content():
    for make in (lambda n: np.arange(2.0, dtype="float32") * n, lambda n: jnp.arange(2.0) * n):
        programs, _ = compared(lambda w, x, make=make: (w + make(1), w + make(x.shape[0])), 3, 2)
        assert [value.number is not None for value in programs[0].outputs] == [True, False]


def test_one_equation_in_another_order_is_still_the_same():
    def step(w, x):
        first, second = (jnp.sin, jnp.cos) if x.shape[0] == 3 else (jnp.cos, jnp.sin)
        values = {f.__name__: f(w) for f in (first, second)}
        return values["sin"], values["cos"]

    programs, _ = compared(step, 3, 2)
    assert not any(node.is_own for program in programs for node in program.nodes)


INSIDE = [
    lambda f, w: jax.lax.fori_loop(0, 3, lambda i, v: f(v), w),
    lambda f, w: jax.lax.cond(w[0] > 0, f, lambda v: v, w),
    lambda f, w: jax.checkpoint(f)(w),
    lambda f, w: jax.nn.relu(f(w)),
    lambda f, w: jax.jit(lambda v: f(v) + 1)(w),
    lambda f, w: jax.grad(lambda v: f(v).sum())(w),
]


def test_functions_inside_equations_are_compared_too():
    def step(w, x):
        return [(wrap(jnp.sin, w), wrap(lambda v: v * x.shape[0], w)) for wrap in INSIDE]

    programs, _ = compared(lambda w, x: jax.tree.leaves(step(w, x)), 3, 2)
    assert [value.number is not None for value in programs[0].outputs] == [True, False] * len(INSIDE)


def test_collectives_that_need_not_wait_for_each_other_share_a_stage():
    def step(w, x):
        a, b = jax.lax.psum(x.sum(), "replica"), jax.lax.psum(x.max(), "replica")
        return jax.lax.psum((x * a * b).sum(), "replica")

    programs, num_stages = compared(step, 3, 2)
    assert num_stages == 3
    assert [node.stage for node in programs[0].nodes if node.is_collective] == [1, 1, 2]


def test_what_nobody_needs_is_left_out():
    programs, _ = compared(lambda w, x: (jnp.sin(x), jnp.cos(x))[0], 3, 2)
    assert names(merge._live_nodes(programs[0])) == ["sin"]
