"""mr.scan, mr.fori_loop and mr.cond: variables go through them, in every context."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import nightly
from strategies import TWO, all_reduce, numbers, strategy_of, values_of, variable

import mirrored as mr

pytestmark = [pytest.mark.usefixtures("in_numpy"), pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")]


CONTEXTS = {
    "outside": lambda strategy, fn: fn(),
    "in mr.function": lambda strategy, fn: mr.function(fn)(),
    "in a step": lambda strategy, fn: strategy.run(fn),
    "in a step in mr.function": lambda strategy, fn: mr.function(lambda: strategy.run(fn))(),
    "in merge_call": lambda strategy, fn: strategy.run(lambda: mr.get_replica_context().merge_call(lambda _: fn())),
    "eager, in a step": lambda strategy, fn: mr.eager()(lambda: strategy.run(fn))(),
    "in mr.scan": lambda strategy, fn: jax.tree.map(lambda y: y[0], mr.scan(lambda c, _: (c, fn()), None, length=1)[1]),
    "in mr.cond": lambda strategy, fn: mr.cond(jnp.bool_(True), fn, fn),
}


@pytest.mark.parametrize(
    "context", ["in a step", "in mr.scan", *nightly(*(c for c in CONTEXTS if c not in ("in a step", "in mr.scan")))]
)
def test_variables_are_read_and_written_in_every_context(context, strategy2):
    w, factor, unused = variable(1.0, strategy2), variable(2.0, strategy2), variable(5.0, strategy2)

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
    w, x, rows = variable(0.0, strategy3), numbers(strategy3, 1), numbers(strategy3, range(4))
    seen = variable(0, strategy3, synchronization="on_read", aggregation="sum")

    def step(carry, row):
        seen.assign_add(1)
        w.assign_add(all_reduce("sum", row))
        return carry + row, row * 2

    def loop():
        return mr.scan(lambda carry, row: strategy3.run(step, args=(carry, row)), x, rows)

    carry, doubled = CONTEXTS[context](strategy3, loop)
    own = np.arange(4, dtype=np.float32)[None] + np.arange(3)[:, None]
    assert values_of(carry) == (np.arange(3) + 1 + own.sum(axis=1)).tolist() and values_of(doubled) == (2 * own).tolist()
    assert (float(w), int(seen)) == (own.sum(), 4 * 3)
    strategy3.assert_mirrored()


DIVERGING = [
    lambda w, rows: mr.scan(lambda c, row: (c, w.assign(row).value), None, rows)[0],
    lambda w, rows: mr.fori_loop(0, 2, lambda i, c: (w.assign(rows[i]), c)[1], None),
    lambda w, rows: mr.cond(rows[0] > 0, lambda: w.assign(1.0), lambda: w.assign(2.0)),
    lambda w, rows: mr.cond(rows[0] > 0, lambda: w.assign(1.0), lambda: None),
    lambda w, rows: [mr.cond(rows[0] > 0, lambda: w.assign(1.0), lambda: None), w.assign(2.0)][2:],
    lambda w, rows: mr.cond(True, lambda: w.assign(rows[0]), lambda: None),
    lambda w, rows: mr.scan(lambda c, row: (row, w.assign(c).value), 0.0, rows)[1] * 0,
]


def test_copies_that_would_differ_are_refused_inside_them_too(strategy3):
    w, rows = variable(1.0, strategy3, name="w"), numbers(strategy3, range(2))
    for loop in DIVERGING:
        with pytest.raises(mr.ReplicasDivergeError, match=r"'w' is mirrored.*test_loops\.py:\d+ .*the argument `rows`"):
            strategy3.run(lambda rows, loop=loop: loop(w, rows), args=(rows,))
    assert float(w) == 1.0
    total = variable(0.0, strategy3, aggregation="sum")
    with pytest.raises(mr.CollectiveHangError, match="condition or loop that may differ by replica"):
        strategy3.run(
            lambda x: mr.cond(x > 0, lambda: total.assign_add(x).value, lambda: total.value), args=(numbers(strategy3, 1),)
        )


def test_what_is_not_mirrored_may_differ_and_collectives_are_reached_by_all(strategy3):
    seen = variable(0.0, strategy3, synchronization="on_read", aggregation="sum")
    total = variable(0.0, strategy3, aggregation="sum")

    def step(x, rows):
        def body(carry, row):
            seen.assign_add(row)
            total.assign_add(row)
            return carry + row, carry

        mean = all_reduce("mean", x)
        added = mr.cond(mean > 0, lambda: total.assign_add(mean).value, lambda: total.value)
        return *mr.scan(body, x, rows), mr.cond(x > 1.5, lambda: seen.assign_add(x).value, lambda: jnp.float32(-1)), added

    carry, before, chosen, added = strategy3.run(step, args=(numbers(strategy3, 1), numbers(strategy3, range(3))))
    assert values_of(carry) == [1 + 3, 2 + 6, 3 + 9] and values_of(before) == [[1, 1, 2], [2, 3, 5], [3, 5, 8]]
    assert values_of(chosen) == [-1, 6 + 2, 9 + 3] == [-1, *map(float, strategy3.local_results(seen)[1:])]
    assert float(added) == 3 * 2 and float(total) == 3 * 2 + (3 + 6 + 9)


def test_bounds_may_be_arrays_and_variables_and_do_not_compile_again(strategy2):
    traces, steps = [], variable(3, strategy2)

    def body(i, carry):
        traces.append(None)
        return carry + i

    assert [int(mr.fori_loop(jnp.int32(0), jnp.int32(n), body, start)) for n, start in ((2, 0), (3, 1), (4, 2))] == [1, 4, 8]
    in_a_trace = len(traces)
    assert int(mr.fori_loop(0, 3, body, 0)) == 3
    assert len(traces) == 2 * in_a_trace
    assert int(strategy2.run(lambda: mr.fori_loop(0, steps.value, body, 0))) == int(mr.fori_loop(0, steps, body, 0)) == 3


def test_cond_takes_the_branch_that_the_condition_says_and_keeps_the_rest(strategy2):
    a, b = variable(1.0, strategy2), variable(2.0, strategy2)

    @mr.function
    def choose(is_first):
        return mr.cond(is_first, lambda: a.assign_add(10.0).value, lambda: b.assign_add(100.0).value)

    assert [float(choose(jnp.bool_(flag))) for flag in (True, False, False)] == [11.0, 102.0, 202.0]
    assert (float(a), float(b)) == (11.0, 202.0)


def test_what_is_collected_of_an_uneven_batch_has_no_padding(strategy2):
    [batch] = strategy2.distribute_dataset([np.array([1.0, 2.0, 3.0], np.float32)])

    def samples(batch):
        return mr.scan(lambda c, k: (c, strategy2.run(lambda x: x * 10 + k, args=(batch,))), 0.0, jnp.arange(2.0))[1]

    for make in (samples, mr.function(samples)):
        collected = make(batch)
        assert collected.shapes == ((2, 2), (2, 1))
        assert strategy2.gather(collected, axis=1).tolist() == [[10, 20, 30], [11, 21, 31]]
        assert float(strategy2.reduce("mean", collected, axis=(0, 1))) == 20.5


@pytest.mark.parametrize(
    "strategy", [strategy_of(1), TWO, strategy_of(3), strategy_of(1, num_replicas=3)], ids=["R1", "R2", "R3", "R3 on one device"]
)
def test_stacked_odd_batches_train_in_one_loop(strategy):
    """Each iteration's step is an uneven one; only the number of iterations is the same for all replicas."""
    rows = np.arange(14, dtype=np.float32).reshape(7, 2) / 10
    [batch] = strategy.distribute_dataset([rows])
    stacked = strategy.run(lambda x: jnp.stack([x, 2 * x, x - 1]), args=(batch,))
    w = variable(np.ones(2, np.float32), strategy)
    optimizer = mr.Optimizer(optax.sgd(0.1), w)

    def step(x):
        loss, gradient = mr.value_and_grad(lambda: (x @ w.value) ** 2, w)()
        optimizer.apply_gradients(gradient)
        return all_reduce("sum", loss), x[:, 0]

    def many(stacked):
        return mr.scan(lambda carry, x: (carry, strategy.run(step, args=(x,))), None, stacked)[1]

    expected, losses = np.ones(2, np.float32), []
    for make in (many, mr.function(many)):
        found, first = make(stacked)
        del losses[:]
        for x in (rows, 2 * rows, rows - 1):
            losses.append(np.mean((x @ expected) ** 2))
            expected = expected - 0.1 * (2 * x.T @ (x @ expected)) / 7
        np.testing.assert_allclose(found, losses, 1e-5)
        np.testing.assert_allclose(w.numpy(), expected, 1e-4)
        assert strategy.gather(first, axis=1).tolist() == [x[:, 0].tolist() for x in (rows, 2 * rows, rows - 1)]


def test_loops_of_no_round_give_what_they_were_given():
    assert float(mr.scan(lambda c, _: (c + 1, None), 0.0, length=0)[0]) == int(mr.fori_loop(3, 1, lambda i, c: c + 1, 0)) == 0
