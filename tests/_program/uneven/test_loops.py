"""Loops with collectives in uneven steps: they compute what one device computes, whatever rows their bodies use and carry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _program.uneven.rows import COLUMNS, STRATEGIES, assert_equals_one_device, data, run, split, total
from parameters import slow
from strategies import variable

import mirrored as mr

W = np.linspace(0.5, 1, COLUMNS, dtype=np.float32)


def loss(w, x, y):
    """This replica's part of the mean of squares over all rows."""
    return mr.losses.compute_average_loss((jnp.tanh(x @ w) - y) ** 2)


def line_search(x, y):
    """The condition has a collective, too, and the number of rounds depends on all rows."""
    gradient = total(jax.grad(loss)(W, x, y))
    enough = total(loss(W, x, y))

    def is_too_long(rate):
        return total(loss(W - rate * gradient, x, y)) > enough - 0.3 * rate * jnp.sum(gradient**2)

    rate = jax.lax.while_loop(is_too_long, lambda rate: rate / 2, jnp.float32(64.0))
    return rate, W - rate * gradient


def conjugate_gradients(x, y):
    """A linear solve of JAX around collectives, also in a loop."""

    def solved(right):
        return jax.scipy.sparse.linalg.cg(lambda w: total(x.T @ (x @ w)) + w, right, tol=1e-6)[0]

    right = total(x.T @ y)
    return solved(right), jax.lax.fori_loop(0, 2, lambda i, right: solved(right), right)


def rows_that_are_carried(x, y):
    """What is carried has the rows' shape, and so has what is collected in each round."""

    def body(carry, scale):
        h, mean = carry
        mean = total(jnp.sum(h, axis=0)) / total(jnp.float32(h.shape[0]))
        h = jnp.tanh(h - scale * mean)
        return (h, mean), (jnp.sum(h, axis=1), mean)

    (h, mean), (sums, means) = jax.lax.scan(body, (x, jnp.zeros(COLUMNS)), jnp.arange(3.0))
    return h, mean, sums.T, means


def parts_of_a_batch(x, y):
    """Each round takes other columns of this replica's rows."""
    parts = jnp.moveaxis(x.reshape(x.shape[0], 2, 2), 1, 0)
    w, used = jax.lax.scan(lambda w, part: (w + total(jnp.tanh(part * w).sum(axis=0)), part), jnp.ones(2), parts, reverse=True)
    return w, jnp.moveaxis(used, 0, 1)


def loops_in_loops(x, y):
    def outer(i, w):
        def inner(state):
            k, v = state
            return k + 1, v + 0.1 * total(jnp.sum(jnp.tanh(x * v * w), axis=0))

        return jax.lax.while_loop(lambda state: state[0] < i + 1, inner, (jnp.zeros_like(i), w))[1]

    return jax.lax.fori_loop(0, 3, outer, jnp.asarray(W))


def conditions(x, y):
    """Both branches use the rows and reach other replicas; one returns rows."""

    def much(w):
        return x * total(jnp.sum(x * w, axis=0)), w

    def little(w):
        return x - total(jnp.float32(x.shape[0])), w - total(jnp.sum(x, axis=0))

    is_much = total(jnp.sum(x)) > 0
    return jax.lax.cond(is_much, much, little, W), jax.lax.cond(is_much, little, much, W)


def gradients_through_loops(x, y):
    """JAX turns the loop round: what it saved in each round has the rows' shape."""

    def run(x):
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h + total(jnp.sum(h, axis=0))), None), x, None, length=3)
        return jnp.sum(h**2) / total(jnp.float32(x.shape[0]))

    return jax.grad(run)(x)


RIGHT = [
    line_search, conjugate_gradients, rows_that_are_carried, parts_of_a_batch, loops_in_loops, conditions,
    gradients_through_loops,
]  # fmt: skip


@pytest.mark.parametrize("num_rows", [3, *slow(7)])
def test_loops_with_collectives_that_use_the_rows_equal_one_device(num_rows):
    x = data(num_rows)
    steps = lambda x, y: {step.__name__: step(x, y) for step in RIGHT}  # noqa: E731
    outcome = lambda strategy: run(strategy, steps, x, np.sin(x.sum(axis=1)))  # noqa: E731
    assert_equals_one_device(outcome, num_replicas=4, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_rows", [2, *slow(7)])
def test_loops_and_conditions_of_this_library_assign_in_uneven_steps(num_rows):
    x = data(num_rows)

    def outcome(strategy):
        w, chosen = variable(W, strategy), variable(np.float32(0), strategy)
        own = variable(np.zeros(COLUMNS, np.float32), strategy, synchronization="on_read", aggregation="sum")

        def over_rows(carry, row):
            own.assign_add(row)
            return carry + row, jnp.sum(row)

        def step(x, y):
            def descend(carry, rate):
                w.assign_sub(rate * total(jax.grad(loss)(w.value, x, y)))
                return carry, total(loss(w.value, x, y))

            own_total, sums = mr.scan(over_rows, jnp.zeros(COLUMNS), x)
            rows_total = total(own_total)
            mr.fori_loop(0, 2, lambda i, c: w.assign_add(0.01 * total(jnp.sum(x, axis=0))) * 0 + c, jnp.zeros(COLUMNS))
            mr.fori_loop(0, 3, lambda i, c: (chosen.assign_add(rows_total[0]), c)[1], 0.0)
            mr.cond(rows_total[0] > 0, lambda: chosen.assign(chosen * 2), lambda: chosen.assign(chosen - 1))
            return sums, mr.scan(descend, 0.0, jnp.array([0.5, 0.25, 0.1]))[1]

        return run(strategy, step, x, np.sin(x.sum(axis=1))), w.value, own.value, chosen.value

    assert_equals_one_device(outcome)


def test_a_number_of_rows_in_a_loop_is_each_replicas_own():
    strategy, x = STRATEGIES[2], data(3)

    def step(x):
        return jax.lax.fori_loop(0, 2, lambda i, t: total(t) / x.shape[0], jnp.sum(x, axis=0))

    first = x.sum(axis=0)
    second = first / 2 + first
    for value, rows in zip(strategy.local_results(strategy.run(step, args=(split(strategy, x),))), (2, 1), strict=True):
        np.testing.assert_allclose(value, second / rows, rtol=1e-4)


def test_copies_cannot_diverge_in_a_loop():
    strategy, x = STRATEGIES[2], split(STRATEGIES[2], data(3))
    v = variable(W, strategy, name="v")

    def assigns(x):
        mr.fori_loop(0, 2, lambda i, c: v.assign(total(jnp.sum(x, axis=0)) / x.shape[0]) * 0 + c, jnp.zeros(COLUMNS))

    def goes_on(x):
        again = lambda t: jnp.sum(t) < x.shape[0]  # noqa: E731
        return jax.lax.while_loop(again, lambda t: t + total(jnp.sum(x, axis=0)) ** 2 + 1, jnp.zeros(COLUMNS))

    with pytest.raises(mr.ReplicasDivergeError, match=r"variable 'v' is mirrored.*own number of rows"):
        strategy.run(assigns, args=(x,))
    with pytest.raises(mr.CollectiveHangError, match=r"own number of rows"):
        strategy.run(goes_on, args=(x,))


def over_rows(x):
    return jax.lax.scan(lambda c, row: (total(c + row), None), jnp.zeros(COLUMNS), x)[0]


def one_more_round(x):
    return jax.lax.fori_loop(0, 3 if x.shape[0] > 1 else 2, lambda i, c: total(c), jnp.zeros(COLUMNS))


def another_order_inside(x):
    def body(i, c):
        of_sin, of_tanh = lambda: jax.lax.psum(jnp.sum(jnp.sin(c) * x), "replica"), lambda: total(jnp.sum(jnp.tanh(c) * x))
        if x.shape[0] > 1:
            return c + of_sin() + 2 * of_tanh()
        return c + 2 * of_tanh() + of_sin()

    return jax.lax.fori_loop(0, 2, body, jnp.zeros(COLUMNS))


def test_loops_that_uneven_replicas_cannot_take_together_are_refused():
    strategy, messages = STRATEGIES[2], {
        over_rows: r"reach a collective inside `scan` of .*number of rounds.*over something else than the rows.*drop_remainder",
        one_more_round: r"reach a collective inside `scan` of .*test_loops.*reach a collective inside `scan` of",
        another_order_inside: r"different orders, or in different places.*reach `psum` of float32\[\] at .*test_loops",
    }  # fmt: skip
    for step, message in messages.items():
        strategy.run(step, args=(split(strategy, data(4)),))
        with pytest.raises(mr.UnevenReplicasError, match=message):
            strategy.run(step, args=(split(strategy, data(3)),))


def layer(carry, w):
    """A layer with a counter beside the rows."""
    x, n = carry
    return (jnp.tanh(x * w), n + 1), x.sum()


BESIDE_ROWS = {
    "fori_loop": lambda x, n: jax.lax.fori_loop(0, 3, lambda i, own: (own[0] * 2, own[1] + i), (x, n)),
    "while_loop": lambda x, n: jax.lax.while_loop(lambda own: own[1] < 3, lambda own: (own[0] * 2, own[1] + 1), (x, n)),
    "cond": lambda x, n: jax.lax.cond(n > 0, lambda x, n: (x, n + 1), lambda x, n: (x * 2, n + 2), x, n),
    "and then": lambda x, n: (lambda own: (own[0], jnp.sin(own[1]) * 2))(jax.lax.scan(layer, (x, n), jnp.ones((3, COLUMNS)))[0]),
}


@pytest.mark.parametrize("name", BESIDE_ROWS)
def test_what_a_loop_carries_beside_rows_may_not_be_assigned_and_two_loops_may(name):
    strategy, x, compute = STRATEGIES[2], split(STRATEGIES[2], data(3)), BESIDE_ROWS[name]
    n = variable(1.0, strategy, name="n")

    def one_loop(x):
        n.assign(compute(x, n.value)[1])

    def two_loops(x):
        n.assign(compute(jnp.zeros((2, COLUMNS)), n.value)[1])
        return compute(x, n.value)[0]

    strategy.run(one_loop, args=(split(strategy, data(4)),))
    before, message = float(n), r"variable 'n' is mirrored.*computes of rows, as that at .*test_loops\.py:\d+.*Write two loops"
    with pytest.raises(mr.ReplicasDivergeError, match=message):
        strategy.run(one_loop, args=(x,))
    assert float(n) == before
    strategy.run(two_loops, args=(x,))
    strategy.assert_mirrored()
    assert float(n) == float(compute(jnp.zeros((2, COLUMNS)), jnp.float32(before))[1])


def test_a_counter_in_the_loop_of_a_step_may_be_assigned_in_each_round_where_no_rows_are_carried():
    strategy, x = STRATEGIES[2], split(STRATEGIES[2], data(3))
    n, v = variable(0, strategy, name="n"), variable(0.0, strategy, name="v")

    def right(x):
        mr.fori_loop(0, 3, lambda i, c: n.assign_add(1) * 0 + c, 0)
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x), x)

    def wrong(x):
        return mr.fori_loop(0, 3, lambda i, x: n.assign_add(1) * 0 + jnp.tanh(x), x)

    def overwritten(x):
        mr.fori_loop(0, 2, lambda i, y: v.assign(v.value + x.shape[0]) * 0 + x, x)
        v.assign(0.0)

    strategy.run(right, args=(x,))
    for step, message in ((wrong, r"'n' is mirrored.*Write two loops"), (overwritten, r"'v' is mirrored.*own number of rows")):
        with pytest.raises(mr.ReplicasDivergeError, match=message):
            strategy.run(step, args=(x,))
    assert int(n) == 3 and float(v) == 0


def test_what_a_loop_counts_beside_rows_is_no_result_for_all_replicas():
    strategy = STRATEGIES[2]
    loop = lambda x: jax.lax.fori_loop(0, 2, lambda i, own: (own[0] * 2, own[1] + 1), (x, 0))[1]  # noqa: E731
    assert int(strategy.run(loop, args=(split(strategy, data(4)),))) == 2
    with pytest.raises(mr.UnevenReplicasError, match=r"result of the step depends on .*Write two loops.*one array of a batch"):
        strategy.run(loop, args=(split(strategy, data(3)),))


def test_a_condition_of_rows_decides_how_often_all_is_done():
    step = lambda x: jax.lax.while_loop(lambda own: own[0].max() < 9, lambda own: (own[0] * 2, own[1] + 1), (x, 0))[1]  # noqa: E731
    result = STRATEGIES[3].run(step, args=(split(STRATEGIES[3], [3, 1, 5, 4, 1]),))
    assert list(map(int, result.values)) == [2, 1, 4]


def test_numbers_of_64_bits_in_an_uneven_step():
    n = variable(0, STRATEGIES[2], name="n")

    def step(x):
        with jax.enable_x64(True):
            large, _ = jax.lax.scan(lambda large, _: (large + 2**33, None), jnp.int64(5), None, length=2)
            own = large + x.shape[0]
            n.assign((large // 2**33).astype("int32"))
            replicas = total(jnp.float32(1))
            return x * (replicas.astype("int64") * own // 2**34).astype("float32")

    np.testing.assert_allclose(run(STRATEGIES[2], step, data(3)), 2 * data(3))
    assert int(n) == 2
