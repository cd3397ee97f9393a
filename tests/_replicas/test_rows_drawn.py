"""A replica draws for its rows what one device draws for them, and nothing else is the same on two replicas by accident."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import nightly
from strategies import ctx, strategy_of

import mirrored as mr
from mirrored._replicas.collectives import ReplicaAxis
from mirrored._replicas.rows_drawn import key_of

pytestmark = pytest.mark.usefixtures("in_numpy")

KEY, D = jax.random.key(5), 6


def layers(key: jax.Array, n: int) -> jax.Array:
    """Draw in a scan over layers, in a gradient of what is computed again."""
    h = jnp.ones((n, D))
    layer = jax.checkpoint(lambda h, k: (h * jnp.where(jax.random.bernoulli(k, 0.5, h.shape), 2.0, 1.0), None))
    return jax.grad(lambda h: (jax.lax.scan(layer, h, jax.random.split(key, 3))[0] ** 2).sum())(h)


#: Draws for `n` rows that are parts of one device's draw.
BY_ROWS: dict[str, Callable[[Any, int], Any]] = {
    "mask": lambda key, n: jax.random.bernoulli(key, 0.5, (n, D)),
    "numbers of 16 bits": lambda key, n: jax.random.normal(key, (n, 2, D), jnp.bfloat16),
    "several of a row": lambda key, n: jax.random.randint(jax.random.split(key)[1], (n * 3,), 0, 1000).reshape(n, 3),
    "layers": layers,
    "mapped over layers": lambda key, n: jax.vmap(lambda k: jax.random.uniform(k, (n, D)), out_axes=1)(jax.random.split(key, 2)),
}


def draws(key: jax.Array, n: int) -> dict[str, Any]:
    return {name: draw(key, n) for name, draw in BY_ROWS.items()}


ALONE = jax.jit(
    lambda n: (
        draws(KEY, n)
        | dict.fromkeys(("row keys", "row keys of one"), jax.vmap(lambda k: jax.random.normal(k, (D,)))(jax.random.split(KEY, n)))
    ),
    static_argnums=0,
)


def in_step(x: jax.Array) -> dict[str, Any]:
    own = ctx().rng(KEY)
    of_rows = jax.vmap(lambda k: jax.random.normal(k, (D,)))
    made = {f"row keys{name}": of_rows(ctx().row_keys(key, len(x))) for name, key in (("", own), (" of one", KEY))}
    return {**draws(own, len(x)), **made}


WAYS = [(5, 3, None), pytest.param(6, 1, 3, marks=pytest.mark.slow)]
MORE = [(12, 3, None), (5, 8, None), (5, 2, 3), (5, 1, None)]


@pytest.mark.parametrize(("num_rows", "num_devices", "num_replicas"), [*WAYS, *nightly(*MORE)])
def test_rows_draw_what_one_device_draws_for_them(num_rows: int, num_devices: int, num_replicas: int | None) -> None:
    """Of 5 rows on 3 replicas one has one, on 8 replicas three have none."""
    strategy = strategy_of(num_devices) if num_replicas is None else mr.MirroredStrategy(["cpu:0"], num_replicas=num_replicas)
    [x] = strategy.distribute_dataset([np.zeros((num_rows, 2), np.float32)])
    drawn = strategy.gather(strategy.run(in_step, args=(x,)), axis=0)
    for name, value in ALONE(num_rows).items():
        np.testing.assert_array_equal(np.asarray(drawn[name]), np.asarray(value), err_msg=name)


#: The lengths of arguments on three replicas, and shapes that have other numbers on each; one of which the first two axes
#: have length 1 is the same on all, unless it is here.
OTHERS: list[tuple[tuple[tuple[int, ...], ...], list[tuple[int, ...]]]] = [
    (((4, 4, 4),), [(), (1,), (3,), (1, 5), (8, 2)]),
    ((), [(), (3,), (1, 1, 5)]),
    (((4, 3, 3), (8, 6, 6), (5, 5, 5)), [(), (1,), (3, 2), (5,), (12,)]),
    (((3, 1, 0),), [(), (1,), (3,)]),
    (((2, 6, 1),), [(), (1,), (2,), (6,), (1, 1, 5)]),  # a worker's own rows
]


def test_what_is_not_by_rows_differs_by_replica_and_is_one_devices_on_the_first() -> None:
    def draw(shape: tuple[int, ...], lengths: tuple[tuple[int, ...], ...], index: jax.Array) -> jax.Array:
        is_uneven = any(len(set(own)) > 1 for own in lengths)
        axis = ReplicaAxis(3, lengths=lengths, sizes=cast("Any", object()) if is_uneven else None)
        return jax.random.bits(key_of(KEY, axis, index, None), shape).ravel()

    cases = [(lengths, shape) for lengths, shapes in OTHERS for shape in {(1, 1, 5), *shapes}]
    draw_all = lambda index: [draw(shape, lengths, index) for lengths, shape in cases]  # noqa: E731
    expected = jax.jit(lambda: [jax.random.bits(KEY, shape).ravel() for _, shape in cases])()
    for (lengths, shape), drawn, first in zip(cases, jax.jit(jax.vmap(draw_all))(jnp.arange(3)), expected, strict=True):
        assert drawn[0].tolist() == first.tolist(), (lengths, shape)
        shapes = dict(OTHERS)[lengths]
        if shape in shapes:
            assert len(np.unique(drawn)) == drawn.size, (lengths, shape)
        elif all(min(own) > 1 for own in lengths):
            assert drawn.tolist() == [first.tolist()] * 3, (lengths, shape)


def test_a_step_says_its_rows_where_its_arguments_do_not(strategy3: mr.MirroredStrategy) -> None:
    """It draws the batch itself, draws for other rows than its argument has, or is run in a loop or operation by operation."""
    x, y = (strategy3.distribute_dataset([np.zeros((n, 2), np.float32)]) for n in (7, 8))
    [x], [y] = x, y

    def of_two(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tuple(jax.random.bits(ctx().rng(KEY, rows=len(rows)), (len(rows), 2)) for rows in (x, y))

    def without_rows() -> jax.Array:
        return jax.random.bits(ctx().rng(KEY), (4, 2))

    def masked(x: jax.Array) -> list[jax.Array]:
        """Draw as Flax' attention draws a mask for all rows, and for a microbatch of one row, which is never one for all."""
        own, of_one = ctx().rng(KEY), ctx().rng(KEY, rows=1)
        return [
            jax.random.bits(key, shape).reshape(1, 2) for key, shape in ((own, (1, 1, 2)), (own, (1, 2)), (of_one, (1, 1, 2)))
        ]

    bits = {n: np.asarray(jax.random.bits(KEY, (n, 2))).tolist() for n in (1, 3, 7, 8, 12)}
    gathered = lambda result: np.concatenate([np.asarray(value) for value in result.values]).tolist()  # noqa: E731
    assert list(map(gathered, strategy3.run(of_two, args=(x, y)))) == [bits[7], bits[8]]
    assert gathered(strategy3.run(without_rows)) == bits[12]
    [z] = strategy3.distribute_dataset([np.zeros((6, 2), np.float32)])
    of_each = lambda z: jax.vmap(lambda key: ctx().row_keys(key, len(z)))(jax.random.split(KEY, 2))  # noqa: E731
    keys = np.concatenate([np.asarray(jax.random.key_data(value)) for value in strategy3.run(of_each, args=(z,)).values], axis=1)
    expected = jax.vmap(lambda key: jax.random.split(key, 6))(jax.random.split(KEY, 2))
    np.testing.assert_array_equal(keys, jax.random.key_data(expected))
    shared, *of_rows = map(gathered, strategy3.run(masked, args=(z,)))
    assert shared == bits[1] * 3 and of_rows == [bits[3], bits[3]]
    with mr.eager():
        assert gathered(strategy3.run(without_rows)) == bits[12]

    @mr.function
    def loop(z: mr.PerReplica) -> Any:
        draw = lambda key, z: jax.random.bits(ctx().rng(key), z.shape)  # noqa: E731
        return mr.scan(lambda _, key: (None, strategy3.run(draw, args=(key, z))), None, jax.random.split(KEY, 2))[1]

    expected = jax.vmap(lambda key: jax.random.bits(key, (6, 2)))(jax.random.split(KEY, 2))
    np.testing.assert_array_equal(np.concatenate([np.asarray(value) for value in loop(z).values], axis=1), expected)


def test_explain_tells_which_draws_belong_to_rows(strategy3: mr.Strategy) -> None:
    def step(x: jax.Array) -> jax.Array:
        by_rows, own = ctx().rng(KEY), ctx().rng(KEY, by_rows=False)
        layer = lambda x, key: (x + jax.random.normal(key, x.shape), None)  # noqa: E731
        x, _ = jax.lax.scan(layer, x, jax.random.split(by_rows, 2))
        return x * jax.random.bernoulli(by_rows, 0.5, x.shape) + jax.random.uniform(own) + jax.random.uniform(KEY)

    def silent(x: jax.Array) -> jax.Array:
        return x * 2

    for num_rows in (6, 7):
        [x] = strategy3.distribute_dataset([np.zeros((num_rows, 2), np.float32)])
        for function in (step, silent):
            strategy3.run(function, args=(x,))
    steps, others = ([line for line in strategy3.explain().splitlines() if f".{name}:" in line] for name in ("step", "silent"))
    assert len(steps) == len(others) == 2
    assert all(
        "; draws of random numbers: 2 by rows, 1 other on each replica, 1 the same on all replicas" in line for line in steps
    )
    assert not any("random numbers" in line for line in others)
