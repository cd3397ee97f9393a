"""mr.function: a cross-replica function with all its runs and reductions is one program."""

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import numbers, strategy_of, variable

import mirrored as mr
from mirrored._program import dispatch
from mirrored._transforms import function

pytestmark = [pytest.mark.usefixtures("in_numpy"), pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")]

ELSEWHERE = mr.MirroredStrategy(["cpu:6", "cpu:7"])


def test_runs_reductions_gathers_and_variables_are_one_program(strategy3):
    total, x, traces = variable(0.0, strategy3), numbers(strategy3, 1), []
    seen = variable(0, strategy3, synchronization="on_read", aggregation="sum")
    mean = variable(0.0, strategy3, synchronization="on_read", aggregation="mean")

    def step(x):
        traces.append("step")
        seen.assign_add(1)
        mean.assign(x)
        return x * 2

    @mr.function
    def train(x, label):
        traces.append("function")
        doubled = strategy3.run(step, args=(x,))
        total.assign_add(strategy3.reduce("sum", doubled))
        shifted = strategy3.run(lambda x: x + total, args=(doubled,))
        seen.assign_add(100)
        before = mean.value
        mean.assign(10.0)
        joined = strategy3.gather(strategy3.run(lambda x: x[None], args=(strategy3.run(step, args=(shifted,)),)), axis=0)
        return {"shifted": shifted, "joined": joined, "seen": seen.value, "mean": before, "rest": (label, total, 3)}

    for call in (1, 2, 3):
        result = train(x, "text")
        shifted = [2 + 12 * call, 4 + 12 * call, 6 + 12 * call]
        assert [float(value) for value in result["shifted"].values] == shifted and float(total) == 12 * call
        assert result["joined"].tolist() == [2 * value for value in shifted]
        assert int(result["seen"]) == int(seen) == call * (2 * 3 + 100)
        assert float(result["mean"]) == 2.0 and result["rest"] == ("text", total, 3)
        assert result["rest"][1] is total
    assert traces == ["function", "step"]
    strategy3.assert_mirrored()


@pytest.mark.by_xla
def test_what_a_function_returns_stays_and_its_constants_are_held_once(strategy2):
    big, v = jnp.arange(1000.0), variable(np.zeros(2, np.float32), strategy2)

    @mr.function
    def bump():
        """Add one."""
        return v.assign_add(jnp.ones(2)).value, big.sum()

    assert (bump.__name__, bump.__doc__) == ("bump", "Add one.")
    first, total = bump()
    for _ in range(4):
        bump()
    assert first.tolist() == [1.0, 1.0] and float(total) == 499500.0, "no view of the variable"
    program = next(reversed(list(function._outside.programs)))
    assert (1000,) in [constant.shape for constant in program.constants], "an argument of the program, not compiled into it"


def test_it_runs_where_its_values_are(strategy2):
    x, v = jax.device_put(jnp.ones(2), jax.devices()[5]), variable(np.zeros(2, np.float32), strategy2)
    assert mr.function(lambda x: v.assign(x) + 0)(x).devices() == set(strategy2.devices), "where the variable is"
    assert mr.function(lambda x: x + 1)(jnp.float32(1)).devices() == {jax.devices()[0]}, "else on the default device"
    assert (mr.function(lambda: 3)(), mr.function(lambda: None)()) == (3, None)
    stacked = mr.PerReplica(jnp.arange(2.0))  # on one device only, as `jax.tree.map` may leave it
    with strategy2.scope():
        assert float(mr.function(lambda x: strategy2.reduce("sum", x))(stacked)) == 1.0
    x = numbers(strategy2, 1)
    closed = mr.function(lambda: strategy2.reduce("sum", x) + v)
    assert closed().tolist() == [4.0, 4.0]


def test_one_function_works_for_several_strategies(strategy2, strategy3):
    @mr.function
    def double(x):
        return mr.get_strategy().run(lambda x: x * 2, args=(x,))

    @mr.function
    def same(x):
        return x

    for _ in range(2):
        for strategy in (strategy2, strategy3, ELSEWHERE):
            x = numbers(strategy, 1)
            with strategy.scope():
                doubled = double(x)
            assert [float(value) for value in doubled.values] == [2.0 * (i + 1) for i in range(strategy.num_replicas_in_sync)]
            assert [value.devices() for value in same(x).values] == [{device} for device in strategy.devices]
    count = mr.function(lambda: mr.get_strategy().num_replicas_in_sync)
    for num_replicas in (1, 2, 3, 1):  # each may get the address of the one before, which is dead
        strategy = strategy_of(num_replicas)
        with strategy.scope():
            assert count() == num_replicas
        del strategy


def test_two_strategies_in_one_function_are_refused(strategy2):
    x, y, v = numbers(strategy2, 1), numbers(ELSEWHERE, 1), variable(1.0, ELSEWHERE)
    double = lambda x: x * 2  # noqa: E731

    runs_here = mr.function(lambda x: strategy2.run(double, args=(x,)))
    runs_here(x)
    message = r"an mr\.function uses two strategies: .*write one mr\.function for each"
    for wrong, expected in (
        (lambda: runs_here(y), message),
        (lambda: mr.function(lambda x, y: (strategy2.run(double, args=(x,)), ELSEWHERE.run(double, args=(y,))))(x, y), message),
        (lambda: mr.function(lambda x: strategy2.reduce("sum", x) + v)(x), message),
        (mr.function(lambda: strategy2.run(lambda: v.value)), r"lives on 2 replicas \(cpu:6, cpu:7\)"),
    ):
        with pytest.raises(mr.StrategyMismatchError, match=expected):
            wrong()


def test_a_factory_of_functions_may_be_used_often_and_one_function_compiled_again_and_again_is_reported(strategy2):
    def made():
        v = variable(0.0, strategy2)

        @mr.function
        def step(x):
            v.assign_add(1.0)
            return x

        return step

    steps = [made() for _ in range(10)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", mr.RecompilationWarning)
        for step in steps:
            step("1")
    with pytest.warns(mr.RecompilationWarning, match=r"step has been compiled 9 times; .* argument `x` changed from '8' to '9'"):
        for i in range(1, 10):
            steps[0](str(i))


def test_a_function_in_a_loop_is_known_by_a_few_looks_and_is_another_with_what_it_reads(strategy2, strategy3, monkeypatch):
    asked, real = [], dispatch.key_of
    monkeypatch.setattr(dispatch, "key_of", lambda *given: [asked.append(given), real(*given)][1])
    settings, total, x = types.SimpleNamespace(scale=2.0), variable(0.0, strategy2), numbers(strategy2, 1)

    @mr.function
    def train(x):
        total.assign_add(strategy2.reduce("sum", strategy2.run(lambda x: x * settings.scale, args=(x,))))
        return total.value

    @mr.function
    def count():
        return jnp.float32(mr.get_strategy().num_replicas_in_sync)

    assert [float(train(x)) for _ in range(3)] == [6, 12, 18]
    asked.clear()
    assert float(train(x)) == 24 and not asked
    settings.scale = 4.0
    assert [float(train(x)) for _ in range(4)] == [36, 48, 60, 72]
    for strategy in (strategy2, strategy3):
        with strategy.scope():
            assert [float(count()) for _ in range(4)] == [strategy.num_replicas_in_sync] * 4


#: A transformation of JAX around a function of k, and what it makes of `factor * k`; eager ones compile each operation.
AROUND = {
    "vmap": lambda f: (jax.vmap(f)(jnp.arange(3.0)), jnp.arange(3)),
    "grad": lambda f: (jax.grad(f)(3.0), 1),
    "jit of vmap of grad": lambda f: (jax.jit(jax.vmap(jax.grad(f)))(jnp.arange(3.0)), jnp.ones(3)),
    "grad of checkpoint": lambda f: (jax.jit(jax.grad(jax.checkpoint(f)))(3.0), 1),
    "jacfwd": lambda f: (jax.jit(jax.jacfwd(lambda ks: f(ks[0]) + 2 * f(ks[1])))(jnp.arange(2.0)), jnp.array([1, 2])),
}


@pytest.mark.parametrize("how", AROUND)
def test_jaxs_transformations_go_around_each_verb(strategy2, how):
    [batch] = strategy2.distribute_dataset([np.arange(6, dtype="float32")])
    run = lambda k: strategy2.run(lambda x, k: x * k, args=(batch, k))  # noqa: E731
    summed = mr.function(lambda k: strategy2.reduce("sum", run(k), axis=0))

    def verbs(k):
        all_reduced = strategy2.run(lambda x: mr.get_replica_context().all_reduce("sum", x.sum()) * k, args=(batch,))
        return all_reduced + 10 * summed(k) + 100 * mr.function(lambda: strategy2.gather(run(k), axis=0).sum())()

    found, expected = AROUND[how](verbs)
    np.testing.assert_allclose(found, 15 * 111 * expected, rtol=1e-6)
