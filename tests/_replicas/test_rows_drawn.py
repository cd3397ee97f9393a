"""A replica draws for its rows what one device draws for them, and nothing else is the same on two replicas by accident."""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import nightly
from strategies import ctx, made, strategy_of

import mirrored as mr
from mirrored._replicas.collectives import ReplicaAxis
from mirrored._replicas.rows_drawn import key_of

KEY, D = jax.random.key(5), 6


@functools.cache
def first_bits() -> np.ndarray:
    return np.asarray(jax.random.bits(KEY, (24,)))


def of_one_device(shape: tuple[int, ...]) -> np.ndarray:
    """Return what one device draws: each element of a draw depends on the key and on its own number only."""
    return first_bits()[: math.prod(shape)].reshape(shape)


def layers(key: jax.Array, n: int) -> jax.Array:
    """Draw in a scan over layers, in a gradient of what is computed again."""
    h = jnp.ones((n, D))
    layer = jax.checkpoint(lambda h, k: (h * jnp.where(jax.random.bernoulli(k, 0.5, h.shape), 2.0, 1.0), None))
    return jax.grad(lambda h: (jax.lax.scan(layer, h, jax.random.split(key, 3))[0] ** 2).sum())(h)


#: Draws for `n` rows that are parts of one device's draw.
BY_ROWS: dict[str, Callable[[Any, int], Any]] = {
    "mask": lambda key, n: jax.random.bernoulli(key, 0.5, (n, D)),
    "numbers of 16 bits": lambda key, n: jax.random.normal(key, (n, 2, D), jnp.bfloat16),
    "several of a row": lambda key, n: jax.random.bits(jax.random.split(key)[1], (n * 3,)).reshape(n, 3),
    "layers": layers,
    "mapped over layers": lambda key, n: jax.vmap(lambda k: jax.random.bits(k, (n, D)), out_axes=1)(jax.random.split(key, 2)),
}


def draws(key: jax.Array, n: int) -> dict[str, Any]:
    return {name: draw(key, n) for name, draw in BY_ROWS.items()}


ALONE = jax.jit(
    lambda n: (
        draws(KEY, n)
        | dict.fromkeys(("row keys", "row keys of one"), jax.vmap(lambda k: jax.random.bits(k, (D,)))(jax.random.split(KEY, n)))
    ),
    static_argnums=0,
)


def in_step(x: jax.Array) -> dict[str, Any]:
    own = ctx().rng(KEY)
    keys = jnp.stack([ctx().row_keys(key, len(x)) for key in (own, KEY)])
    of_rows = jax.vmap(jax.vmap(lambda k: jax.random.bits(k, (D,))))(keys)
    return draws(own, len(x)) | dict(zip(("row keys", "row keys of one"), of_rows, strict=True))


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
    def keys(lengths: tuple[tuple[int, ...], ...]) -> jax.Array:
        is_uneven = any(len(set(own)) > 1 for own in lengths)
        axis = ReplicaAxis(3, lengths=lengths, sizes=cast("Any", object()) if is_uneven else None)
        return jax.vmap(lambda index: key_of(KEY, axis, index, None))(jnp.arange(3))

    def draw_all() -> dict[tuple[int, ...], jax.Array]:
        """Draw each shape once, for all lengths."""
        of_all = jnp.stack([keys(lengths) for lengths, _ in OTHERS])
        shapes = {(1, 1, 5), *(shape for _, own in OTHERS for shape in own)}
        return {shape: jax.vmap(jax.vmap(functools.partial(jax.random.bits, shape=shape)))(of_all) for shape in shapes}

    drawn_all = {shape: np.asarray(drawn) for shape, drawn in jax.jit(draw_all)().items()}
    for k, (lengths, shapes) in enumerate(OTHERS):
        for shape in {(1, 1, 5), *shapes}:
            drawn, first = drawn_all[shape][k], of_one_device(shape)
            assert drawn[0].tolist() == first.tolist(), (lengths, shape)
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

    bits = {n: of_one_device((n, 2)).tolist() for n in (1, 3, 7, 8, 12)}
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
            made(strategy3.run, function, (x,))
    steps, others = ([line for line in strategy3.explain().splitlines() if f".{name}:" in line] for name in ("step", "silent"))
    assert len(steps) == len(others) == 2
    assert all(
        "; draws of random numbers: 2 by rows, 1 other on each replica, 1 the same on all replicas" in line for line in steps
    )
    assert not any("random numbers" in line for line in others)
