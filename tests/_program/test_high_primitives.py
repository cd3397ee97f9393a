"""Steps with `searchsorted`, since jax 0.12 a primitive of which the jaxpr shows no more than the name."""

import jax
import jax.numpy as jnp
import jax.scipy.stats
import numpy as np
import pytest

import mirrored as mr


@pytest.fixture
def x(strategy3: mr.Strategy) -> mr.PerReplica:
    return strategy3.distribute_values_from_function(lambda c: np.arange(4, dtype="float32") + c.replica_id_in_sync_group)


@pytest.fixture
def w(strategy3: mr.Strategy) -> mr.Variable:
    with strategy3.scope():
        return mr.Variable(np.arange(4, dtype="float32"), name="w")


def places(a):
    return jnp.searchsorted(jnp.arange(4.0), a).astype("float32")


@jax.custom_vjp
def scaled(a):
    return a * places(a)


@jax.custom_jvp
def scaled_forward(a):
    return a * places(a)


scaled.defvjp(lambda a: (scaled(a), None), lambda _, g: (100 * g,))
scaled_forward.defjvp(lambda primals, tangents: (scaled_forward(*primals), 100 * tangents[0]))


def test_a_derivative_of_ones_own_is_kept_through_run(strategy3) -> None:
    for function in (scaled, scaled_forward, jax.jit(scaled)):

        def total(q, function=function):
            return strategy3.reduce("sum", strategy3.run(lambda q: function(q).sum(), args=(q,)))

        gradient = mr.function(lambda q, total=total: jax.grad(total)(q))(jnp.arange(4.0))
        assert gradient.tolist() == [300.0] * 4


USES = {
    "beside an argument": lambda c, w, a: a * jnp.searchsorted(c, a),
    "alone": lambda c, w, a: jnp.searchsorted(c, c) + a,
    "beside a variable": lambda c, w, a: jnp.searchsorted(c, a) + w,
    "in an inner closure": lambda c, w, a: jax.jit(lambda: jnp.searchsorted(c, c))() + a,
    "in a gradient": lambda c, w, a: jax.grad(lambda b: (b * jnp.searchsorted(c, b)).sum())(a),
    "in a scan": lambda c, w, a: jax.lax.scan(lambda s, row: (s + jnp.searchsorted(c, row), row), a, c)[0],
}


def test_a_step_searches_in_an_array_that_it_closes_over(strategy3, x, w) -> None:
    values = np.arange(4, dtype="float32")
    of_another_strategy = mr.MirroredStrategy(["cpu:4", "cpu:5"]).run(lambda v: v, args=(values,))

    def uses(a, c):
        return [use(c, w, a) for use in USES.values()]

    expected = strategy3.local_results(strategy3.run(uses, args=(x, values)))
    for c in (w.value, strategy3.reduce("mean", values), of_another_strategy):
        found = strategy3.local_results(strategy3.run(lambda a, c=c: uses(a, c), args=(x,)))
        for own, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(own, wanted, rtol=1e-6)


def test_derivatives_with_an_array_of_a_strategy_of_another_size(strategy3, x) -> None:
    c = mr.MirroredStrategy(["cpu:0", "cpu:1"]).run(lambda v: v, args=(np.arange(4, dtype="float32"),))
    jacobians = strategy3.run(lambda a: jax.jacfwd(lambda b: jnp.sin(b) * c)(a), args=(x,))
    for own, start in zip(jacobians.values, range(3), strict=True):
        np.testing.assert_allclose(own, np.diag(np.cos(np.arange(4.0) + start) * np.arange(4)), rtol=1e-5)


def test_beside_a_reference(strategy3, x, w) -> None:
    def step(a):
        def work(ref):
            ref[...] = ref[...] + jnp.searchsorted(w.value, ref[...])
            return ref[...]

        refs = [jax.new_ref(a) for _ in range(3)]
        in_a_scan = jax.lax.scan(lambda c, _: (work(refs[1]), None), a, None, length=1)[0]
        return jax.jit(lambda: work(refs[0]))(), in_a_scan, jax.lax.cond(True, lambda: work(refs[2]), lambda: a)

    expected = [v + np.searchsorted(np.arange(4.0), v) for v in (np.arange(4.0) + r for r in range(3))]
    for result in strategy3.run(step, args=(x,)):
        for own, wanted in zip(result.values, expected, strict=True):
            np.testing.assert_array_equal(own, wanted)


def test_in_64_bits(strategy3, x) -> None:
    def step(a):
        with jax.enable_x64(True):
            q = a.astype("float64") / 3
            return jnp.searchsorted(q, q), q * 3

    places, back = strategy3.run(step, args=(x,))
    assert [own.tolist() for own in strategy3.local_results(places)] == [[0, 1, 2, 3]] * 3
    assert back.dtype == "float64"


def test_arrays_without_elements_are_the_same_everywhere(strategy3, w, x) -> None:
    """`jnp.empty` is memory as it was found since jax 0.11, and may differ; without elements it cannot."""
    with strategy3.scope():
        none = mr.Variable(np.zeros((0,), "float32"))

    def step():
        none.assign(jnp.linspace(w[0], w[1], 0) + jnp.empty((0,)))
        return jnp.sum(none)

    assert float(strategy3.run(step)) == 0.0
    rows = strategy3.run(lambda a: a[:0], args=(x,))
    assert isinstance(rows, mr.PerReplica), "whether a result is one does not depend on its number of rows"
    if jax.__version_info__ >= (0, 11):
        with pytest.raises(mr.ReplicasDivergeError, match=r"`empty` at "):
            strategy3.run(lambda: w.assign(jax.scipy.stats.rankdata(w.value)))
