"""Loops, conditions and calls that compute of rows and of what does not depend on them: the latter stays one for all replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._program.uneven import apart

W = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)


def layer(carry, w):
    """A layer whose weight is divided by its largest singular value, which is found by a step of the power iteration."""
    x, u, n = carry
    v = w @ u / jnp.linalg.norm(w @ u)
    u = w.T @ v / jnp.linalg.norm(w.T @ v)
    return (jnp.tanh(x @ w / (v @ w @ u)), u, n + 1), (x.sum(), u)


def scanned(x, u, n):
    (x, u, n), (_, all_u) = jax.lax.scan(layer, (x, u, n), jnp.asarray(W), reverse=True)
    return x, u, n + jnp.int32(all_u.shape[0])


def scanned_and_differentiated(x, u, n):
    def loss(w):
        (y, *state), _ = jax.lax.scan(jax.checkpoint(layer), (x, u, n), w)
        return jnp.sum(y), state

    gradient, (u, n) = jax.grad(loss, has_aux=True)(jnp.asarray(W))
    return x * gradient.sum(), u, n


def repeated(x, u, n):
    """The condition does not depend on the rows."""
    step = lambda carry: layer(carry, jnp.asarray(W)[carry[2] % 3])[0]  # noqa: E731
    return jax.lax.while_loop(lambda carry: carry[2] < n + 2, step, (x, u, n))


def nested(x, u, n):
    def outer(i, carry):
        return jax.lax.fori_loop(0, 2, lambda j, own: (own[0] * 2, own[1] + i, own[2] + j), carry)

    return jax.lax.fori_loop(0, 3, outer, (x, u, n))


def a_round_later(x, u, n):
    """What is carried is first the same for all, and then depends on rows."""
    step = lambda i, own: (own[0] * 2, own[1] + 1, own[2] + i, own[0].sum(), *own[3:5])  # noqa: E731
    return jax.lax.fori_loop(0, 3, step, (x, u, n, *jnp.zeros(3)))[:3]


def nested_with_own_totals(x, u, n):
    """What is carried beside rows begins with a constant, and rows are handed in that are not used, or for their number only."""

    def outer(carry, _):
        inner = lambda own, row: ((own[0] + 1, own[1] + own[2].sum(), own[2], own[3] + x.shape[0]), row * own[0])  # noqa: E731
        (n, total, x_, _), stacked = jax.lax.scan(inner, (carry[2], 0.0, carry[0], 0), jnp.arange(2.0))
        return (x_ * 2 + 0 * total, carry[1] + stacked.sum(), n), jnp.zeros_like(x_)

    return jax.lax.scan(outer, (x, u, n), jnp.zeros((3, *x.shape)))[0]


def differentiated_under_a_condition(x, u, n):
    """Branches of a gradient fill what the other one keeps, with zeros of as many rows."""

    def loss(w):
        y, new = jax.lax.cond(n > 1, lambda w: (x @ w, n + 1), lambda w: (jnp.tanh(jnp.tanh(x @ w) @ w), n + 2), w)
        return jnp.sum(y), new

    gradient, n = jax.grad(loss, has_aux=True)(jnp.asarray(W[0]))
    return x * gradient.sum(), u * 2, n


def under_a_condition(x, u, n):
    return jax.lax.cond(n > 0, lambda x, u, n: (x * 2, u + 1, n + 1), lambda x, u, n: (x, u * 2, n + 2), x, u, n)


@jax.custom_jvp
def doubled(x, u, n):
    return 2 * x, u / 2, n + 1


doubled.defjvp(lambda primals, tangents: (doubled(*primals), (2 * tangents[0], tangents[1] / 2, tangents[2])))


def loop_with_effects(x, u, n):
    def one(i, own):
        jax.debug.callback(lambda total: None, own[0].sum())
        y = jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), own[0])
        return y * 2, own[1] + 1, own[2] + i

    return jax.lax.fori_loop(0, 3, one, (x, u, n))


def calls_and_loops_of_one_result(x, u, n):
    """Rows are handed in, and nothing is computed of them."""
    n, _ = jax.lax.scan(lambda n, _: (n + 0 * jnp.int32(len(jnp.tanh(x)) > 9) + 1, None), n, None, length=3)
    return x, jax.lax.cond(n > 0, lambda x, u: u + 1, lambda x, u: u * 2, x, u), n


def in_64_bits(x, u, n):
    with jax.enable_x64(True):

        def one(own, _):
            x, small, large = own
            more, _ = jax.lax.scan(lambda more, _: (more + 2**33, x), jnp.int64(5), None, length=2)
            return (x * 2, small + 1e-12, large + more), None

        (x, small, large), _ = jax.lax.scan(one, (x, jnp.float64(1), jnp.int64(0)), None, length=3)
        total = mr.get_replica_context().all_reduce("mean", small)
        return x, u + ((total - 1) * 1e12).astype("float32").round(2), n + (large // 2**33).astype("int32")


def after_a_loop_with_a_collective(x, u, n):
    """What comes out of a loop over rows with a collective inside is asked one by one whether it depends on rows."""
    total = lambda v: mr.get_replica_context().all_reduce("mean", v)  # noqa: E731
    (x, t), _ = jax.lax.scan(lambda own, i: ((own[0] * 1.1, own[1] + total(i)), None), (x, u), jnp.arange(3.0))
    x, t = jax.lax.cond(n > 0, lambda x, t: (x * 2, t + total(t)), lambda x, t: (x, t), x, t)
    return jax.lax.fori_loop(0, 2, lambda i, own: (own[0] * 2, own[1] + t, own[2] + 1), (x, u, n))


@pytest.mark.parametrize(
    "compute",
    [
        scanned,
        scanned_and_differentiated,
        repeated,
        nested,
        a_round_later,
        under_a_condition,
        doubled,
        nested_with_own_totals,
        differentiated_under_a_condition,
        loop_with_effects,
        calls_and_loops_of_one_result,
        in_64_bits,
        after_a_loop_with_a_collective,
    ],
)
def test_what_is_computed_beside_rows_may_be_assigned(strategy3, compute):
    with strategy3.scope():
        u, n = mr.Variable(np.ones(4, "float32"), name="u"), mr.Variable(1, name="n")
    expected = jnp.ones(4), jnp.int32(1)

    def step(x):
        y, new_u, new_n = compute(x, u.value, n.value)
        u.assign(new_u)
        n.assign(new_n)
        return mr.get_replica_context().all_reduce("sum", y.sum(axis=0) * 0 + 1), y

    for num_rows in (7, 6, 2):  # 3, 2 and 2 rows; 2 rows each; 1, 1 and none
        x = X[:num_rows]
        for batch in strategy3.distribute_dataset([x]):
            _, y = strategy3.run(step, args=(batch,))
        whole, *expected = compute(jnp.asarray(x), *expected)
        if "differentiated" not in compute.__name__:  # whose gradient is that of the own rows
            np.testing.assert_allclose(strategy3.gather(y, axis=0), whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(u.numpy(), expected[0], rtol=1e-5)
        assert int(n) == int(expected[1])
    strategy3.assert_mirrored()


def test_a_condition_of_rows_decides_how_often_all_is_done(strategy3):
    def step(x):
        return jax.lax.while_loop(lambda carry: carry[0].max() < 9, lambda carry: (carry[0] * 2, carry[1] + 1), (x, 0))[1]

    parts = (np.array([3.0, 1.0]), np.array([5.0, 4.0]), np.array([1.0]))
    x = strategy3.distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group].astype("float32"))
    assert list(map(int, strategy3.local_results(strategy3.run(step, args=(x,))))) == [2, 1, 4]


def test_a_loop_over_rows_counts_for_all_and_for_each_replica(strategy3):
    def step(x):
        number = lambda: mr.get_replica_context().replica_id_in_sync_group  # noqa: E731
        return jax.lax.fori_loop(0, 2, lambda i, own: (own[0] * 2, own[1] + 1, own[2] + number()), (x, 0, 0))[1:]

    [batch] = strategy3.distribute_dataset([X])
    rounds, numbers = strategy3.run(step, args=(batch,))
    assert int(rounds) == 2  # one array, as of a batch that the replicas divide
    assert list(map(int, strategy3.local_results(numbers))) == [0, 2, 4]


def test_what_differs_beside_it_does_not_keep_a_counter_from_being_assigned(strategy3):
    with strategy3.scope():
        rows = mr.Variable(0, name="rows", synchronization="on_read", aggregation="sum")
        n = mr.Variable(0, name="n")

    def one(i, x):
        rows.assign_add(x.shape[0])
        n.assign_add(1)
        return jnp.tanh(x)

    for batch in strategy3.distribute_dataset([X]):
        strategy3.run(lambda x: mr.fori_loop(0, 3, one, x), args=(batch,))
    assert (int(rows), int(n)) == (3 * len(X), 3)


def test_a_loop_over_rows_may_close_over_a_mirrored_array(strategy3):
    two = strategy3.run(lambda: jnp.float32(2.0))
    with strategy3.scope():
        n = mr.Variable(0.0, name="n")

    def step(x):
        body = lambda i, own: (jnp.where(two > 0, own[0] * two, own[0]), own[1] + jax.nn.relu(two))  # noqa: E731
        y, total = jax.lax.fori_loop(0, 3, body, (x, n.value))
        n.assign(total)
        return y

    for batch in strategy3.distribute_dataset([X[:6], X]):
        y = strategy3.gather(strategy3.run(step, args=(batch,)), axis=0)
    np.testing.assert_allclose(y, 8 * X, rtol=1e-6)
    assert float(n) == 12


def test_a_loop_over_rows_assigns_in_each_round(strategy3):
    """What `mr.scan`, `mr.fori_loop` and `mr.cond` assign beside rows is judged once, where all replicas do it."""
    with strategy3.scope():
        u, n = mr.Variable(np.ones(4, "float32"), name="u"), mr.Variable(0, name="n")

    def one(x, w):
        (x, new, _), _ = layer((x, u.value, 0), w)
        u.assign(new)
        return x, mr.cond(n.value < 3, lambda: n.assign_add(2), lambda: n.assign_add(1)) and None

    def step(x):
        x, _ = mr.scan(one, x, jnp.asarray(W))
        return mr.fori_loop(0, 2, lambda i, x: one(x, jnp.asarray(W)[i])[0], x)

    for batch in strategy3.distribute_dataset([X]):
        y = strategy3.gather(strategy3.run(step, args=(batch,)), axis=0)
    x, expected = jnp.asarray(X), jnp.ones(4)
    for k in (0, 1, 2, 0, 1):
        (x, expected, _), _ = layer((x, expected, 0), W[k])
    np.testing.assert_allclose(u.numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-6)
    assert int(n) == 7
    strategy3.assert_mirrored()


def test_what_depends_on_the_own_number_of_rows_is_refused_as_before(strategy3):
    with strategy3.scope():
        n = mr.Variable(1.0, name="n")
    bodies = {
        "the number of rows": lambda i, carry: (carry[0] * 2, carry[1] + carry[0].shape[0]),
        "the replica": lambda i, carry: (carry[0] * 2, carry[1] + mr.get_replica_context().replica_id_in_sync_group),
        "rows": lambda i, carry: (carry[0] * 2, carry[1] + carry[0].sum()),
        "rows, a round later": lambda i, carry: (carry[0] * 2, carry[1] + carry[2], carry[0].sum()),
    }
    [batch] = strategy3.distribute_dataset([X])
    for name, body in bodies.items():

        def step(x, body=body, size=3 if "later" in name else 2):
            n.assign(jax.lax.fori_loop(0, 2, body, (x, n.value, jnp.float32(0))[:size])[1])

        def in_each_round(x, body=body):
            def one(i, carry):
                n.assign(body(i, (carry[0], n.value, carry[0].sum()))[1])
                return (carry[0] * 2,)

            mr.fori_loop(0, 2, one, (x,))

        for wrong in (step, in_each_round):
            with pytest.raises(mr.ReplicasDivergeError, match="variable 'n' is mirrored"):
                strategy3.run(wrong, args=(batch,)), pytest.fail(name)
        assert float(n) == 1


def test_a_value_that_differs_is_refused_also_where_a_later_assignment_overwrites_it(strategy3):
    with strategy3.scope():
        v = mr.Variable(0.0, name="v")
    [batch] = strategy3.distribute_dataset([X])

    def after_the_loop(x):
        def one(i, y):
            v.assign(v.value + x.shape[0])
            return x * v.value

        y = mr.fori_loop(0, 2, one, x)
        v.assign(0.0)
        return y

    def in_each_round(x):
        def one(i, y):
            for value in (jnp.float32(x.shape[0]), 0.0):
                y = x * v.value
                v.assign(value)
            return y

        return mr.fori_loop(0, 2, one, x)

    for wrong in (after_the_loop, in_each_round):
        with pytest.raises(mr.ReplicasDivergeError, match="variable 'v' is mirrored"):
            strategy3.run(wrong, args=(batch,)), pytest.fail(wrong.__name__)


@jax.custom_vjp
def rounded(x, w):
    return jnp.round(x * w), jnp.round(w * 3)


rounded.defvjp(lambda x, w: (rounded(x, w), (x, w)), lambda kept, given: (given[0] * kept[1], given[1] * 3))


def test_a_derivative_of_ones_own_is_not_lost_through_run(strategy3):
    def derivative(x):
        batch = next(iter(strategy3.distribute_dataset([x])))
        return jax.grad(lambda w: strategy3.run(lambda x, w: rounded(x, w)[1], args=(batch, w)))(jnp.float32(1.3))

    assert float(derivative(X[:6])) == 3
    with pytest.raises(
        mr.UnevenReplicasError, match=r"differentiates through strategy\.run a function with a derivative of its own"
    ):
        derivative(X)


def test_values_that_need_one_another_share_a_loop():
    """A loop for each would compute all of them again, as often as an optimizer's state has leaves."""
    body = lambda i, own: (own[0] * 2, own[1] + own[2], own[2] + own[3], own[3] + own[1], own[4] + 1)  # noqa: E731
    closed = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, body, (x, 0.0, 1.0, 2.0, 0)))(X)
    [loop] = [equation for equation in closed.jaxpr.eqns if equation.primitive.name in ("scan", "while")]
    sizes = sorted(len(positions) for positions, _ in apart.groups(loop))
    assert sizes[-2:] == [1, 3]
