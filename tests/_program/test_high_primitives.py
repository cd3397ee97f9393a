"""Steps with `searchsorted`, since jax 0.12 a primitive of which the jaxpr shows no more than the name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr


@pytest.fixture
def x(strategy3):
    return strategy3.distribute_values_from_function(lambda c: np.arange(4, dtype="float32") + c.replica_id_in_sync_group)


def scaled(a):
    return a * jnp.searchsorted(jnp.arange(4.0), a).astype("float32")


by_vjp, by_jvp = jax.custom_vjp(scaled), jax.custom_jvp(scaled)
by_vjp.defvjp(lambda a: (by_vjp(a), None), lambda _, g: (100 * g,))
by_jvp.defjvp(lambda primals, tangents: (by_jvp(*primals), 100 * tangents[0]))


def test_a_derivative_of_ones_own_is_kept_through_run(strategy3):
    for function in (by_vjp, by_jvp, jax.jit(by_vjp)):

        def total(q, function=function):
            return strategy3.reduce("sum", strategy3.run(lambda q: function(q).sum(), args=(q,)))

        gradient = mr.function(lambda q, total=total: jax.grad(total)(q))(jnp.arange(4.0))
        assert gradient.tolist() == [300.0] * 4


def test_beside_a_reference(strategy3, x):
    with strategy3.scope():
        w = mr.Variable(np.arange(4, dtype="float32"), name="w")

    def step(a):
        def work(ref):
            ref[...] = ref[...] + jnp.searchsorted(w.value, ref[...])
            return ref[...]

        refs = [jax.new_ref(a) for _ in range(3)]
        in_a_scan = jax.lax.scan(lambda c, _: (work(refs[1]), None), a, None, length=1)[0]
        return jax.jit(lambda: work(refs[0]))(), in_a_scan, jax.lax.cond(True, lambda: work(refs[2]), lambda: a)

    expected = [v + np.searchsorted(np.arange(4.0), v) for v in (np.arange(4.0) + r for r in range(3))]
    for result in strategy3.run(step, args=(x,)):
        np.testing.assert_array_equal(np.stack(result.values), expected)


def test_in_64_bits(strategy3, x):
    def step(a):
        with jax.enable_x64(True):
            q = a.astype("float64") / 3
            return jnp.searchsorted(q, q), q * 3

    places, back = strategy3.run(step, args=(x,))
    assert [own.tolist() for own in strategy3.local_results(places)] == [[0, 1, 2, 3]] * 3
    assert back.dtype == "float64"
