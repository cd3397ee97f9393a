"""Python numbers among the arguments are traced: a changing one compiles nothing, and one that Python needs is named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored import testing

TRACED = {
    "product": (lambda x, n: x * n, [0.1, 0.2, 0.3]),
    "schedule": (lambda x, n: x * (0.1 * 0.9**n), [1, 2, 3]),
    "key": (lambda x, n: x * jax.random.uniform(jax.random.fold_in(jax.random.key(0), n)), [0, 1, 2]),
    "index": (lambda x, n: x[n], [0, 1, 2]),
    "complex": (lambda x, n: x * n, [1j, 2j, 3j]),
}
NEEDED = {
    "if": lambda x, n: x if n > 1 else -x,
    "range": lambda x, n: sum((x * i for i in range(n)), x),
    "shape": lambda x, n: jnp.broadcast_to(x, (n, 3)),
    "static under jit": jax.jit(lambda x, n: x * n, static_argnames="n"),
    "length": lambda x, n: jax.lax.scan(lambda c, _: (c, None), x, None, length=n)[0],
}


def rows(strategy, *sizes):
    return strategy.distribute_values_from_function(
        lambda ctx: np.linspace(0.1, 1, sizes[ctx.replica_id_in_sync_group], dtype=np.float32)
    )


def test_a_number_that_changes_compiles_nothing_and_has_the_type_that_it_has_under_jit(strategy3):
    strategy, x = strategy3, rows(strategy3, 3, 2, 3)

    def step(x, numbers):
        return {name: compute(x, numbers[name]) for name, (compute, _) in TRACED.items()}

    rounds = [{name: values[i] for name, (_, values) in TRACED.items()} for i in range(3)]
    with testing.assert_compiles(1):
        found = [strategy.run(step, args=(x, numbers)) for numbers in rounds]
    for numbers, results in zip(rounds, found, strict=True):
        for replica, given in enumerate(x.values):
            for name, expected in jax.jit(step)(given, numbers).items():
                own = strategy.local_results(results[name])[replica]
                assert (own.dtype, own.shape) == (expected.dtype, expected.shape), name
                np.testing.assert_allclose(np.asarray(own, np.complex64), np.asarray(expected, np.complex64), rtol=1e-6)


@pytest.mark.parametrize("name", NEEDED)
def test_a_number_that_python_needs_is_named_with_the_line_to_write(name, strategy2):
    x, step = rows(strategy2, 3, 3), NEEDED[name]
    function = mr.function(lambda x, n: strategy2.run(step, args=(x, n)))
    for run in (lambda: strategy2.run(step, args=(x, 2)), lambda: function(x, 2)):
        with pytest.raises(mr.OneProgramError, match=r"the value of `n`, at .*functools.partial\(step, n=(2|\.\.\.)\)") as error:
            run()
        assert __file__.rpartition("/")[2] in str(error.value)
    bound = functools.partial(step, n=2)
    with testing.assert_compiles(1):
        first, second = (strategy2.run(bound, args=(x,)) for _ in range(2))
    np.testing.assert_array_equal(first.values[0], second.values[0])


def test_a_number_that_an_array_decides_with_is_not_blamed_alone(strategy2):
    with pytest.raises(mr.OneProgramError, match="the value of an array"):
        strategy2.run(lambda x, n: x if x.sum() > n else -x, args=(rows(strategy2, 3, 3), 2))


def test_an_integer_that_jax_would_wrap_around_is_refused_by_name(strategy2):
    x, add = rows(strategy2, 3, 3), lambda x, n: x + n
    for value in (2**31, 2**40, -(2**70)):
        with pytest.raises((ValueError, OverflowError), match="`n`"):
            strategy2.run(add, args=(x, value))
    assert float(strategy2.run(add, args=(x, 2**31 - 1)).values[0][0]) == 2.0**31
    with jax.enable_x64(True):
        assert strategy2.run(lambda n: n + 1, args=(2**40,)) == 2**40 + 1


def test_numbers_that_are_equal_are_not_taken_for_each_other(strategy2):
    step = lambda n: 1 / (n * jnp.ones(()))  # noqa: E731
    for number in (0.0, -0.0, 0, 0.0, 1, 1.0, True, 1):
        for _ in range(3):
            found, expected = strategy2.run(step, args=(number,)), jax.jit(step)(number)
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == expected.dtype
    add = lambda n: n + 1  # noqa: E731
    narrow = strategy2.run(add, args=(0.1,))
    with jax.enable_x64(True):
        assert (narrow.dtype, float(strategy2.run(add, args=(0.1,)))) == (np.float32, 1.1)
