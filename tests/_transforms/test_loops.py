"""mr.scan, mr.fori_loop and mr.cond: variables go through them, in every context."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import slow

import mirrored as mr

pytestmark = pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")


def variable(strategy, value, **kwargs):
    with strategy.scope():
        return mr.Variable(value, **kwargs)


def numbered(strategy):
    return strategy.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group + 1))


def numbered_rows(strategy, count):
    rows = np.arange(count, dtype=np.float32)
    return strategy.distribute_values_from_function(lambda ctx: rows + ctx.replica_id_in_sync_group)


def eagerly(fn):
    with mr.eager():
        return fn()


CONTEXTS = {
    "outside": lambda strategy, fn: fn(),
    "in mr.function": lambda strategy, fn: mr.function(fn)(),
    "in a step": lambda strategy, fn: strategy.run(fn),
    "in a step in mr.function": lambda strategy, fn: mr.function(lambda: strategy.run(fn))(),
    "in merge_call": lambda strategy, fn: strategy.run(lambda: mr.get_replica_context().merge_call(lambda _: fn())),
    "eager, in a step": lambda strategy, fn: eagerly(lambda: strategy.run(fn)),
    "in mr.scan": lambda strategy, fn: jax.tree.map(lambda y: y[0], mr.scan(lambda c, _: (c, fn()), None, length=1)[1]),
    "in mr.cond": lambda strategy, fn: mr.cond(jnp.bool_(True), fn, fn),
}


@pytest.mark.parametrize(
    "context", ["in a step", "in mr.scan", *slow(*(c for c in CONTEXTS if c not in ("in a step", "in mr.scan")))]
)
def test_variables_are_read_and_written_in_every_context(context, strategy2):
    w, factor, unused = variable(strategy2, 1.0), variable(strategy2, 2.0), variable(strategy2, 5.0)

    def loops():
        def scan_body(carry, x):
            w.assign(w * x * factor)
            return carry + x, w.value

        def loop_body(i, carry):
            w.assign_add(1.0)
            return carry + i

        total, history = mr.scan(scan_body, 0.0, np.array([2.0, 3.0], np.float32))
        count = mr.fori_loop(0, 3, loop_body, 0)
        chosen = mr.cond(w > 20, lambda x: (w.assign_sub(20.0), x)[1], lambda x: x + 1, 10.0)
        return total, history, count, chosen

    for start in (1.0, 2.0):
        w.assign(start)
        total, history, count, chosen = CONTEXTS[context](strategy2, loops)
        assert (float(total), history.tolist(), int(count)) == (5.0, [4 * start, 24 * start], 3)
        assert (float(w), float(chosen)) == (24 * start + 3 - 20, 10.0)
    assert (float(factor), float(unused)) == (2.0, 5.0)
    strategy2.assert_mirrored()


@pytest.mark.parametrize("context", ["outside", "in mr.function"])
def test_steps_in_a_scan_take_per_replica_rows_carries_and_results(strategy3, context):
    w, x, rows = variable(strategy3, 0.0), numbered(strategy3), numbered_rows(strategy3, 4)
    seen = variable(strategy3, 0, synchronization="on_read", aggregation="sum")

    def step(carry, row):
        seen.assign_add(1)
        w.assign_add(mr.get_replica_context().all_reduce("sum", row))
        return carry + row, row * 2

    def loop():
        return mr.scan(lambda carry, row: strategy3.run(step, args=(carry, row)), x, rows)

    carry, doubled = CONTEXTS[context](strategy3, loop)
    own = np.arange(4, dtype=np.float32)[None] + np.arange(3)[:, None]
    assert [float(value) for value in carry.values] == (np.arange(3) + 1 + own.sum(axis=1)).tolist()
    assert [value.tolist() for value in doubled.values] == (2 * own).tolist()
    assert (float(w), int(seen)) == (own.sum(), 4 * 3)
    strategy3.assert_mirrored()


def test_in_a_step_the_carry_and_sync_on_read_variables_may_differ(strategy3):
    seen = variable(strategy3, 0.0, synchronization="on_read", aggregation="sum")

    def step(x, rows):
        def body(carry, row):
            seen.assign_add(row)
            return carry + row, carry

        return mr.scan(body, x, rows)

    carry, before = strategy3.run(step, args=(numbered(strategy3), numbered_rows(strategy3, 3)))
    assert [float(value) for value in carry.values] == [1 + 3, 2 + 6, 3 + 9]
    assert [value.tolist() for value in before.values] == [[1, 1, 2], [2, 3, 5], [3, 5, 8]]
    assert [float(value) for value in strategy3.local_results(seen)] == [3.0, 6.0, 9.0]


DIVERGING = [
    lambda w, rows: mr.scan(lambda c, row: (c, w.assign(row).value), None, rows)[0],
    lambda w, rows: mr.fori_loop(0, 2, lambda i, c: (w.assign(rows[i]), c)[1], None),
    lambda w, rows: mr.cond(rows[0] > 0, lambda: w.assign(1.0), lambda: w.assign(2.0)),
    lambda w, rows: mr.cond(rows[0] > 0, lambda: w.assign(1.0), lambda: None),
    lambda w, rows: mr.cond(True, lambda: w.assign(rows[0]), lambda: None),
    lambda w, rows: mr.scan(lambda c, row: (row, w.assign(c).value), 0.0, rows)[1] * 0,
]


def test_copies_that_would_differ_are_refused_inside_them_too(strategy3):
    w, rows = variable(strategy3, 1.0, name="w"), numbered_rows(strategy3, 2)
    for loop in DIVERGING:
        with pytest.raises(mr.ReplicasDivergeError, match=r"'w' is mirrored.*test_loops\.py:\d+ .*the argument `rows`"):
            strategy3.run(lambda rows, loop=loop: loop(w, rows), args=(rows,))
    assert float(w) == 1.0


def test_collectives_in_them(strategy3):
    w, rows = variable(strategy3, 0.0, aggregation="sum"), numbered_rows(strategy3, 2)

    def step(rows):
        mr.scan(lambda c, row: (c, w.assign_add(row).value), None, rows)
        mean = mr.get_replica_context().all_reduce("mean", rows[0])
        return mr.cond(mean > 0, lambda: w.assign_add(mean).value, lambda: w.value)

    assert float(strategy3.run(step, args=(rows,))) == (0 + 1 + 2) + (1 + 2 + 3) + 3 * 1
    with pytest.raises(mr.CollectiveHangError, match="condition or loop that may differ by replica"):
        strategy3.run(lambda rows: mr.cond(rows[0] > 0, lambda: w.assign_add(rows[0]).value, lambda: w.value), args=(rows,))


def test_they_nest(strategy2):
    w = variable(strategy2, 0.0)

    def inner(carry, _):
        w.assign_add(1.0)
        return carry, None

    def outer(carry, _):
        mr.scan(inner, None, length=3)
        mr.fori_loop(0, 2, lambda i, c: mr.cond(i > 0, lambda: (w.assign_add(10.0), c)[1], lambda: c), 0)
        return carry, w.value

    for run in (lambda: mr.scan(outer, None, length=2), lambda: strategy2.run(lambda: mr.scan(outer, None, length=2))):
        w.assign(0.0)
        assert run()[1].tolist() == [13.0, 26.0]


def test_numbers_and_array_bounds_do_not_compile_again():
    traces = []

    def body(i, carry):
        traces.append(None)
        return carry + i

    assert [int(mr.fori_loop(jnp.int32(0), jnp.int32(n), body, start)) for n, start in ((2, 0), (3, 1), (4, 2))] == [1, 4, 8]
    in_a_trace = len(traces)
    assert int(mr.fori_loop(0, 3, body, 0)) == 3
    assert len(traces) == 2 * in_a_trace


def test_many_different_loops_are_no_recompilation():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(10):
            names = {}
            exec(f"def scan_body(c, x): return c + x * {k}, None\ndef loop_body(i, c): return c + {k}", names)
            assert float(mr.scan(names["scan_body"], 0.0, jnp.ones(2))[0]) == 2 * k
            assert int(mr.fori_loop(0, 2, names["loop_body"], 0)) == 2 * k


def test_a_bound_that_is_a_variable(strategy2):
    steps = variable(strategy2, 3)
    assert int(strategy2.run(lambda: mr.fori_loop(0, steps.value, lambda i, c: c + 1, 0))) == 3
    assert int(mr.fori_loop(0, steps, lambda i, c: c + 1, 0)) == 3


def test_carries_and_rows_of_every_kind(strategy2):
    w, rows = variable(strategy2, np.ones(3, np.float32)), variable(strategy2, np.arange(4, dtype=np.float32))
    carry, ys = mr.scan(lambda c, x: ({"a": c["a"] * 2, "n": c["n"] + 1}, (c["n"], x["r"])), {"a": w, "n": 0}, {"r": rows})
    assert (carry["a"].tolist(), int(carry["n"]), ys[0].tolist(), ys[1].tolist()) == ([16.0] * 3, 4, [0, 1, 2, 3], [0, 1, 2, 3])
    assert w.numpy().tolist() == [1.0] * 3  # the carry started from its value, the variable was not written
    assert mr.scan(lambda c, x: (c, x), 0.0, jnp.ones((0, 2)))[1].shape == (0, 2)
    assert float(mr.scan(lambda c, _: (c + 1, None), 0.0, length=0)[0]) == 0.0
    assert int(mr.fori_loop(3, 1, lambda i, c: c + 1, 0)) == 0


def test_cond_takes_the_branch_that_the_condition_says_and_keeps_the_rest(strategy2):
    a, b = variable(strategy2, 1.0), variable(strategy2, 2.0)

    @mr.function
    def choose(is_first):
        return mr.cond(is_first, lambda: a.assign_add(10.0).value, lambda: b.assign_add(100.0).value)

    assert [float(choose(jnp.bool_(flag))) for flag in (True, False, False)] == [11.0, 102.0, 202.0]
    assert (float(a), float(b)) == (11.0, 202.0)


def test_cond_in_a_step_may_differ_by_replica_for_what_is_not_mirrored(strategy3):
    own = variable(strategy3, 0.0, synchronization="on_read", aggregation="sum")

    def step(x):
        return mr.cond(x > 1.5, lambda: own.assign(x).value, lambda: jnp.float32(-1))

    result = strategy3.run(step, args=(numbered(strategy3),))
    assert [float(value) for value in result.values] == [-1.0, 2.0, 3.0]
    assert [float(value) for value in strategy3.local_results(own)] == [0.0, 2.0, 3.0]
