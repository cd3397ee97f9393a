"""Loops with collectives in uneven steps: they compute what one device computes, whatever rows their bodies use and carry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _program.uneven.rows import COLUMNS, DEVICES, STRATEGIES, assert_equals_one_device, data, run, split, total
from parameters import nightly
from random_programs import lockstep
from strategies import variable

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

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


RIGHT = [line_search, conjugate_gradients, parts_of_a_batch, loops_in_loops, conditions]


@pytest.mark.parametrize("num_rows", [3, *nightly(7)])
def test_loops_with_collectives_that_use_the_rows_equal_one_device(num_rows):
    x = data(num_rows)
    steps = lambda x, y: {step.__name__: step(x, y) for step in RIGHT}  # noqa: E731
    outcome = lambda strategy: run(strategy, steps, x, np.sin(x.sum(axis=1)))  # noqa: E731
    assert_equals_one_device(outcome, num_replicas=4, rtol=1e-3, atol=1e-4)


def test_loops_and_conditions_of_this_library_assign_in_uneven_steps():
    x = data(2)

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


# -- what needs no rows, beside them in one loop

LAYERS = np.random.default_rng(0).normal(size=(3, COLUMNS, COLUMNS)).astype(np.float32) / 2
KEY = jax.random.key(3)


def key_and_counter(x):
    """Dropout of a key of each layer, as in every large model."""

    def layer(carry, w):
        h, key, n = carry
        key, own = jax.random.split(key)
        return (jnp.tanh(h @ w) * jax.random.bernoulli(own, 0.8, (COLUMNS,)), key, n + 1), (jnp.sum(w**2), h.sum(axis=1))

    (h, key, n), (squares, sums) = jax.lax.scan(layer, (x, KEY, 0), LAYERS)
    return (h, sums.T), (jax.random.key_data(key), n, squares)


def swapped(x):
    """Two states of which each becomes the other: one needs no less than the other, and neither needs the rows."""
    turn = lambda i, own: (jnp.tanh(own[0] * 2), own[2] + 1, own[1] * 3)  # noqa: E731
    h, first, second = jax.lax.fori_loop(0, 3, turn, (x, jnp.float32(1), jnp.float32(2)))
    return h, (first, second)


def fori_loop(x):
    if x.shape[0] > 2:  # a loop that only some replicas have does not come between those that all have
        x = x + jax.lax.fori_loop(0, 2, lambda i, zero: zero * 2, 0.0)
    h, n = jax.lax.fori_loop(0, 3, lambda i, own: (jnp.tanh(own[0] * 2), own[1] + i), (x, jnp.float32(1)))
    return h, jax.lax.fori_loop(0, 2, lambda i, n: jnp.sin(n) * 2, n)


def checkpointed(x):
    return jax.checkpoint(lambda h, n: (jnp.tanh(h @ LAYERS[0]), 2 * n))(x, jnp.float32(1))


def time_of_a_recurrent_net(x):
    cell = lambda carry, x: ((jnp.tanh(carry[0] + x * carry[1]), carry[1] + 1), None)  # noqa: E731
    return jax.lax.scan(cell, (x[:, 0], jnp.float32(0)), x.T)[0]


def nested(x):
    def outer(carry, w):
        own = jax.lax.scan(lambda own, _: ((jnp.tanh(own[0] @ w), own[1] + w.sum()), None), carry, None, length=2)[0]
        return own, own[1]

    (h, n), each = jax.lax.scan(outer, (x, jnp.float32(0)), LAYERS)
    return h, (n, each)


def condition(x):
    return jax.lax.cond(LAYERS.sum() > 0, lambda h, n: (jnp.tanh(h), n + 1), lambda h, n: (h * 2, n - 1), x, jnp.float32(3))


def collectives(x):
    def layer(carry, w):
        h, n = carry
        return (jnp.tanh(h @ w) - total(h.sum(0)) / total(jnp.float32(h.shape[0])), n + 1), None

    return jax.lax.scan(layer, (x, jnp.float32(0)), LAYERS)[0]


def gradients(x, wrap=lambda layer: layer):
    def layer(carry, w):
        h, key, n = carry
        key, own = jax.random.split(key)
        return (jnp.tanh(h @ w) * jax.random.bernoulli(own, 0.8, (COLUMNS,)) + n, key, n + w.mean()), (w**2).sum()

    def share(layers):
        (h, key, n), squares = jax.lax.scan(wrap(layer), (x, KEY, jnp.float32(0)), layers)
        penalty = mr.losses.scale_regularization_loss(squares.sum() + n)
        return mr.losses.compute_average_loss(h.sum(1) ** 2) + penalty, (jax.random.key_data(key), n, squares)

    gradient, states = jax.grad(share, has_aux=True)(LAYERS)
    return x, (total(gradient), states)


def gradients_of_checkpoints(x):
    return gradients(x, jax.checkpoint)


def gradients_with_masks(x):
    """Masks of the rows' shape are made of what the loop carries, and the gradient keeps them."""

    def layer(h, key, n, w):
        key, own = jax.random.split(key)
        is_kept = jnp.broadcast_to(jax.random.bernoulli(own, 0.7, (COLUMNS,)), h.shape)
        return jnp.where(is_kept, jnp.tanh(h @ w), h * n), key, n + 1

    def share(layers):
        own = jax.lax.scan(jax.checkpoint(lambda own, w: (layer(*own, w), None)), (x, KEY, 0), layers)[0]
        own = jax.lax.fori_loop(0, 2, lambda i, own: layer(*own, layers[i]), own)
        own = jax.lax.switch(own[2] - 4, [lambda *own: own, lambda *own: layer(*own, layers[0])], *own)
        of_shape = lambda own, w: ((own[0] * 2, own[1] + w.sum()), jnp.full(x.shape, own[1]))  # noqa: E731
        (_, total), masks = jax.lax.scan(of_shape, (jnp.float32(x.shape[0]), jnp.float32(0)), layers)
        loss = mr.losses.compute_average_loss((own[0] * masks.mean(0)).sum(1) ** 2)
        return loss, (jax.random.key_data(own[1]), own[2], total)

    gradient, states = jax.grad(share, has_aux=True)(LAYERS)
    return x, (total(gradient), states)


@jax.custom_vjp
def own_vjp(x, n):
    return jnp.tanh(x), n * 2


own_vjp.defvjp(lambda x, n: (own_vjp(x, n), x), lambda x, g: (g[0] * (1 - jnp.tanh(x) ** 2), g[1] * 2))


@jax.custom_jvp
def own_jvp(x, n):
    return jnp.sin(x) + n, (n + LAYERS[0].sum(), jnp.int32(3))


@own_jvp.defjvp
def _(primals, tangents):
    (x, n), (dx, dn) = primals, tangents
    return own_jvp(x, n), (jnp.cos(x) * dx + dn, (dn, np.zeros((), jax.dtypes.float0)))


def own_derivatives(x):
    """Calls with derivatives of their own, also in loops, conditions and each other."""

    def layer(carry, w):
        h, n = own_vjp(*carry)
        return (own_jvp(jnp.tanh(h @ w), n)[0], n), own_jvp(h, n)[1]

    h, n = own_vjp(x, jnp.float32(1))
    (h, n), seen = jax.lax.scan(jax.checkpoint(layer), (h, n), LAYERS)
    h, n = jax.lax.cond(n > 0, own_vjp, lambda h, n: (h, n), h, n)
    return h, (n, seen)


def gradients_of_own_derivatives(x):
    def share(w):
        h, states = own_derivatives(x @ w)
        return mr.losses.compute_average_loss(h.sum(1) ** 2), states

    gradient, states = jax.grad(share, has_aux=True)(LAYERS[0])
    return x, (total(gradient), states)


def while_loops(x):
    """The number of rounds is carried, and one round reads what another one leaves: that the rows do not need."""

    def round_of(own):
        h, i, n, last, key = own
        return h * 2 + last, i + 1, n + last, i * 0.5, jax.random.split(key)[0]

    h, i, n, last, key = jax.lax.while_loop(lambda own: own[1] < LAYERS.shape[0], round_of, (x, 0, 1.0, 0.25, KEY))
    return h, (i, n, last, jax.random.key_data(key))


BESIDE_ROWS = [
    key_and_counter, swapped, fori_loop, checkpointed, time_of_a_recurrent_net, nested, condition, collectives, gradients,
    gradients_of_checkpoints, gradients_with_masks, while_loops, own_derivatives, gradients_of_own_derivatives,
]  # fmt: skip


def assigned(strategy, compute, rows):
    """Return the rows that a step computes, and the states that it assigns."""
    states = jax.tree.leaves(compute_on_one(compute)[1])
    variables = [variable(np.zeros(state.shape, state.dtype), strategy) for state in states]

    def step(x):
        rows, states = compute(x)
        for own, state in zip(variables, jax.tree.leaves(states), strict=True):
            own.assign(state)
        return rows

    own = run(strategy, step, rows)
    return own, [own.numpy() for own in variables]


def compute_on_one(compute):
    return jax.eval_shape(lambda x: STRATEGIES[1].run(compute, args=(x,)), jnp.zeros((2, COLUMNS)))


SEVERAL = [mr.MirroredStrategy(DEVICES[:2], num_replicas=4, schedule=schedule) for schedule in ("together", "one_by_one")]


@pytest.mark.parametrize("compute", [*BESIDE_ROWS[:2], *nightly(*BESIDE_ROWS[2:])], ids=lambda compute: compute.__name__)
def test_what_needs_no_rows_beside_them_in_a_loop_may_be_assigned(compute):
    for num_rows, strategies in ((7, (STRATEGIES[2], SEVERAL[1])), (2, (STRATEGIES[3], SEVERAL[0]))):
        expected = assigned(STRATEGIES[1], compute, data(num_rows))
        for strategy in strategies:
            found = assigned(strategy, compute, data(num_rows))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_what_needs_rows_may_not_and_neither_may_what_jax_does_not_take_apart():
    strategy = STRATEGIES[2]
    n = variable(1.0, strategy, name="n")

    @jax.custom_batching.custom_vmap
    def own_vmap(x, n):
        return jnp.tanh(x), n * 2

    own_vmap.def_vmap(lambda size, is_batched, x, n: ((jnp.tanh(x), n * 2), is_batched))
    of_rows = lambda x: jax.lax.scan(lambda own, w: ((own[0] * w, own[1] + own[0].sum()), None), (x, 0.0), LAYERS[:, 0])[0][1]  # noqa: E731
    of_their_number = lambda x: jax.lax.fori_loop(0, 2, lambda i, own: (own[0] * 2, own[1] + x.shape[0]), (x, 0.0))[1]  # noqa: E731
    wrong = {
        "of rows": (of_rows, r"'n' is mirrored.*depends on the argument `x`"),
        "of their number": (of_their_number, r"'n' is mirrored.*a replica's own number of rows"),
        "its own vmap": (
            lambda x: own_vmap(x, n.value)[1],
            r"'n' is mirrored.*test_loops\.py:\d+, such as a call.*outside of it",
        ),
        "its own derivative, of rows": (
            lambda x: own_jvp(n.value, x)[1][0].sum(),
            r"'n' is mirrored.*depends on the argument `x`",
        ),
    }
    for name, (compute, message) in wrong.items():
        with pytest.raises(mr.ReplicasDivergeError, match=message):
            strategy.run(lambda x, compute=compute: n.assign(compute(x)), args=(split(strategy, data(3)),)), pytest.fail(name)
    assert float(n) == 1
    counted = lambda x: jax.lax.fori_loop(0, 2, lambda i, own: (own[0] * 2, own[1] + 1), (x, 0))[1]  # noqa: E731
    for rows in (4, 3):
        assert int(strategy.run(counted, args=(split(strategy, data(rows)),))) == 2  # one value, and no PerReplica


def gradient(function):
    return lockstep.jit(jax.grad(function))(1.0)


def test_a_derivative_of_the_whole_step_is_refused_where_a_call_with_its_own_is_taken_apart():
    strategy = STRATEGIES[2]

    def loss(w, rows, position):
        step = lambda x, w: total(jnp.sum(own_jvp(x, w)[0])) + own_jvp(x, w)[1][0] * position  # noqa: E731
        return strategy.run(step, args=(split(strategy, data(rows)), w))

    assert gradient(lambda w: loss(w, 4, 1.0)) == 4 * COLUMNS + 1
    with pytest.raises(
        mr.UnevenReplicasError, match=r"from outside of it.*test_loops\.py:\d+, which has.*inside of the step.*drop_rem"
    ):
        gradient(lambda w: loss(w, 3, 1.0))
    only_rows = lambda w: strategy.run(  # noqa: E731
        lambda x, w: total(jnp.sum(own_jvp(x, w)[0])), args=(split(strategy, data(3)), w)
    )
    assert gradient(only_rows) == 3 * COLUMNS


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


def test_a_number_of_rows_in_a_loop_is_each_replicas_own():
    strategy, x = STRATEGIES[2], data(3)

    def step(x):
        return jax.lax.fori_loop(0, 2, lambda i, t: total(t) / x.shape[0], jnp.sum(x, axis=0))

    first = x.sum(axis=0)
    second = first / 2 + first
    for value, rows in zip(strategy.local_results(strategy.run(step, args=(split(strategy, x),))), (2, 1), strict=True):
        np.testing.assert_allclose(value, second / rows, rtol=1e-4)


def test_a_step_may_assign_in_each_round_of_a_loop_over_rows():
    strategy, x = STRATEGIES[2], split(STRATEGIES[2], data(3))
    n, v = variable(0, strategy, name="n"), variable(0.0, strategy, name="v")

    def overwritten(x):
        mr.fori_loop(0, 2, lambda i, y: v.assign(v.value + x.shape[0]) * 0 + x, x)
        v.assign(0.0)

    strategy.run(lambda x: mr.fori_loop(0, 3, lambda i, x: (n.assign_add(1), jnp.tanh(x))[1], x), args=(x,))
    with pytest.raises(mr.ReplicasDivergeError, match=r"'v' is mirrored.*own number of rows"):
        strategy.run(overwritten, args=(x,))
    assert int(n) == 3 and float(v) == 0
