"""A step that is called in a loop is known by a few looks, and is another one as soon as anything in its key is."""

import functools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import in_threads

import mirrored as mr
from mirrored._program import dispatch
from mirrored._program.cache import MAX_FAST_PATHS

pytestmark = pytest.mark.usefixtures("in_numpy")


def rows(strategy2, *shape, scale=1.0):
    return strategy2.distribute_values_from_function(
        lambda ctx: np.full(shape, scale * (1 + ctx.replica_id_in_sync_group), np.float32)
    )


@pytest.fixture
def x(strategy2):
    return rows(strategy2, 3)


@pytest.fixture
def total(strategy2):
    """Run a step, and add its results up."""

    def run(step, *args, **kwargs):
        return float(jnp.sum(strategy2.reduce("sum", strategy2.run(step, args, kwargs))))

    return run


@pytest.fixture
def warm(total):
    """Run a step until its fast path is there, and once more."""

    def run(step, *args):
        return [total(step, *args) for _ in range(4)][-1]

    return run


BATCHES = {
    "none": lambda x: (),
    "several": lambda x: (x, x),
    "dict": lambda x: ({"b": x, "a": x},),
    "tuple": lambda x: ((x, x),),
    "list": lambda x: ([x, x],),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_step_in_a_loop_is_known_without_its_key(kind, total, warm, x, monkeypatch):
    def step(*arguments):
        leaves = jax.tree.leaves(arguments)
        return sum(place * jnp.sum(leaf) for place, leaf in enumerate(leaves, 1)) if leaves else jnp.zeros(())

    args = BATCHES[kind](x)
    expected = total(step, *args)
    assert warm(step, *args) == expected
    monkeypatch.delattr(dispatch, "key_of")
    assert total(step, *args) == expected


def test_steps_that_take_turns_are_known_too(total, x, monkeypatch):
    """As those of a generator and a discriminator, of two models by one factory, or a function that is made anew in each turn."""

    def times(factor):
        return lambda x: factor * jnp.sum(x)

    def plain(x):
        return jnp.sum(x)

    doubled, tripled = times(2), times(3)
    for _ in range(3):
        assert [total(step, x) for step in (plain, doubled, tripled)] == [9, 18, 27]
    monkeypatch.delattr(dispatch, "key_of")
    for _ in range(2):
        assert [total(step, x) for step in (tripled, plain, doubled)] == [27, 9, 18]
    assert total(times(3), x) == 27, "its code is that of the last one which had to be looked up"


def test_fast_paths_do_not_pile_up(total, x, strategy2):
    kept = [lambda x: jnp.sum(x) for _ in range(MAX_FAST_PATHS)]
    for step in [jnp.sum, *kept]:
        assert total(step, x) == total(step, x) == 9
    assert 0 < len(strategy2._steps.programs.fast_paths) <= MAX_FAST_PATHS + 2


def test_a_function_gets_defaults_or_becomes_a_method(total, warm, x):
    offset = jnp.ones(3)

    def added(*values, scale=None):
        return sum(jnp.sum(value) for value in values) * (1.0 if scale is None else scale)

    def plain(*values):
        return sum(jnp.sum(value) for value in values)

    def outer(x):
        return inner(x)

    inner = plain
    assert [warm(step, x) for step in (plain, outer, plain)] == [9, 9, 9]
    assert total(types.MethodType(plain, offset), x) == 15
    assert warm(outer, x) == 9
    inner = types.MethodType(plain, offset)
    assert total(outer, x) == 15
    added.__kwdefaults__ = None
    with pytest.raises(TypeError, match="scale"):
        total(added, x)
    for scale in (2.0, 3.0):
        added.__kwdefaults__ = {"scale": scale}
        assert warm(added, x) == 9 * scale


def test_a_function_that_is_closed_over_twice_may_become_two(warm, x):
    def made(factor):
        return lambda y: jnp.sum(y) * factor

    first = second = made(1.0)

    def step(x):
        return first(x) + 10 * second(x)

    assert warm(step, x) == 99
    second = made(2.0)
    assert warm(step, x) == 189


def test_arguments_of_another_kind_are_another_step(strategy2, total, warm, x):
    def step(x, **named):
        return jnp.sum(x) * (10 if named else 1) * x.shape[0]

    def plain(x):
        return jnp.sum(x["a"] - 2 * x["b"] if isinstance(x, dict) else x[0] if isinstance(x, tuple | list) else x)

    zeros = rows(strategy2, 3, scale=0.0)
    assert warm(plain, x) == 9
    assert total(plain, rows(strategy2, 4)) == 12
    assert total(plain, np.ones(3, np.float32)) == 6
    assert warm(plain, {"b": zeros, "a": x}) == 9
    assert total(plain, {"a": zeros, "b": x}) == -18
    assert total(plain, {"a": x, "b": zeros}) == 9
    with pytest.raises(KeyError, match="b"):
        total(plain, {"a": x, "c": zeros})
    assert total(plain, x) == warm(plain, (x, x)) == total(plain, [x, x]) == total(plain, (x,)) == 9
    uneven = strategy2.distribute_values_from_function(lambda ctx: np.ones(3 - ctx.replica_id_in_sync_group, np.float32))
    more = lambda x: jnp.sum(x + 1)  # noqa: E731
    assert (warm(more, x), total(more, uneven)) == (15, 10)
    assert (warm(more, uneven), total(more, x)) == (10, 15), "padded, its arrays have the shape of x"
    assert (warm(step, x), total(step, x, y=1), total(step, rows(strategy2, 4))) == (27, 270, 48)


def test_threads_share_a_step_and_take_each_their_own(strategy2, total, x):
    wrong, start = [], threading.Barrier(3)

    def work(factor):
        def own(x):
            return jnp.sum(x) * factor

        start.wait()  # all three make the program of the shared step
        for _ in range(20):
            for step, expected in ((jnp.sum, 9), (own, 9 * factor)):
                if (found := total(step, x)) != expected:
                    wrong.append(found)

    in_threads(*(functools.partial(work, factor) for factor in (1.0, 2.0, 3.0)))
    assert not wrong and len(list(strategy2._steps.programs)) == 4


def test_values_of_other_devices_are_refused_by_a_step_that_has_run(strategy2, total, x):
    other = rows(mr.MirroredStrategy(["cpu:2", "cpu:3"]), 3)
    step = lambda x: x * 2  # noqa: E731
    assert total(step, x) == 18
    for _ in range(2):
        with pytest.raises(mr.StrategyMismatchError, match=r"`x` is a PerReplica whose values lie on \['"):
            total(step, other)
