"""mr.function: a cross-replica function with all its runs and reductions is one program."""

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._transforms import function

pytestmark = pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")

ELSEWHERE = mr.MirroredStrategy(["cpu:6", "cpu:7"])


def variable(strategy, value, **kwargs):
    with strategy.scope():
        return mr.Variable(value, **kwargs)


def numbered(strategy):
    return strategy.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group + 1))


def test_runs_reductions_gathers_and_variables_are_one_program(strategy3):
    strategy, num_replicas = strategy3, 3
    total, x = variable(strategy, 0.0), numbered(strategy)
    seen = variable(strategy, 0, synchronization="on_read", aggregation="sum")
    mean = variable(strategy, 0.0, synchronization="on_read", aggregation="mean")
    traces = {"outer": 0, "step": 0}

    def step(x):
        traces["step"] += 1
        seen.assign_add(1)
        mean.assign(x)
        return x * 2

    def add_total(x):
        return x + total

    @mr.function
    def train(x, label):
        traces["outer"] += 1
        doubled = strategy.run(step, args=(x,))
        total.assign_add(strategy.reduce("sum", doubled))
        shifted = strategy.run(add_total, args=(doubled,))
        seen.assign_add(100)
        mean_before = mean.value
        mean.assign(10.0)
        again = strategy.run(step, args=(shifted,))
        joined = strategy.gather(strategy.run(lambda x: x[None], args=(again,)), axis=0)
        return {"shifted": shifted, "joined": joined, "seen": seen.value, "mean": mean_before, "rest": (label, total, 3)}

    ones = np.arange(1, num_replicas + 1, dtype=np.float32)
    for call in (1, 2, 3):
        result = train(x, "text")
        expected_total = call * 2 * ones.sum()
        assert [float(value) for value in result["shifted"].values] == (2 * ones + expected_total).tolist()
        assert result["joined"].tolist() == (2 * (2 * ones + expected_total)).tolist()
        assert int(result["seen"]) == (call - 1) * (2 * num_replicas + 100) + num_replicas + 100 + num_replicas
        assert float(result["mean"]) == pytest.approx(ones.mean())
        assert result["rest"] == ("text", total, 3)
        assert float(total) == expected_total
        assert int(seen) == call * (2 * num_replicas + 100)
    assert traces == {"outer": 1, "step": 1}
    strategy.assert_mirrored()


def test_arguments_and_results_are_what_run_makes_of_them(strategy2):
    v, x = variable(strategy2, 1.0), numbered(strategy2)
    args, kwargs = mr.function(lambda *args, **kwargs: (args, kwargs))(
        1, np.float64(2), np.arange(3), "s", None, x, jnp.ones(2), v, [{}], b=(True,)
    )
    number, scalar, array, text, none, per_replica, ones, same_variable, nest = args
    assert (number, text, none, nest, kwargs) == (1, "s", None, [{}], {"b": (True,)})
    assert (scalar.dtype, array.tolist(), ones.tolist()) == (np.float32, [0, 1, 2], [1.0, 1.0])
    assert isinstance(per_replica, mr.PerReplica)
    assert same_variable is v


def test_values_of_different_shapes_pass_through_and_are_reduced(strategy3):
    uneven = strategy3.distribute_values_from_function(lambda ctx: np.ones(ctx.replica_id_in_sync_group, np.float32))

    @mr.function
    def totals(x):
        return strategy3.reduce("sum", x, axis=0), strategy3.gather(x, axis=0), x

    total, joined, same = totals(uneven)
    assert (float(total), joined.tolist(), same.shapes) == (3.0, [1.0] * 3, ((0,), (1,), (2,)))


def test_it_closes_over_per_replica_values_and_reads_other_objects_anew(strategy2):
    x, v = numbered(strategy2), variable(strategy2, 1.0)

    @mr.function
    def closed():
        return strategy2.reduce("sum", x) + strategy2.reduce("sum", strategy2.run(lambda x: x * v, args=(x,)))

    assert float(closed()) == 6.0
    v.assign(2.0)
    assert float(closed()) == 9.0


def test_inside_a_step_and_inside_another_it_is_an_ordinary_call(strategy2):
    v, calls = variable(strategy2, 0.0), []

    @mr.function
    def inner(x):
        calls.append(None)
        v.assign_add(1.0)
        return x * 2

    @mr.function
    def outer(x):
        return strategy2.reduce("sum", strategy2.run(inner, args=(x,))) + inner(jnp.float32(1))

    assert float(outer(numbered(strategy2))) == 8.0
    assert float(v) == 2.0
    with mr.eager():
        assert float(inner(jnp.float32(2))) == 4.0
    assert float(v) == 3.0


def test_one_function_works_for_several_strategies(strategy2, strategy3):
    @mr.function
    def double(x):
        return mr.get_strategy().run(lambda x: x * 2, args=(x,))

    @mr.function
    def same(x):
        return x

    for _ in range(2):
        for strategy in (strategy2, strategy3, ELSEWHERE):
            x = numbered(strategy)
            with strategy.scope():
                doubled = double(x)
            assert [float(value) for value in doubled.values] == [2.0 * (i + 1) for i in range(strategy.num_replicas_in_sync)]
            assert [value.devices() for value in same(x).values] == [{device} for device in strategy.devices]


def test_a_new_strategy_with_the_address_of_a_dead_one_gets_its_own_program():
    @mr.function
    def count():
        return mr.get_strategy().num_replicas_in_sync

    for num_replicas in (1, 2, 3, 1):
        strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        with strategy.scope():
            assert count() == num_replicas
        del strategy


def test_two_strategies_in_one_function_are_refused(strategy2):
    x, y, v = numbered(strategy2), numbered(ELSEWHERE), variable(ELSEWHERE, 1.0)
    double = lambda x: x * 2  # noqa: E731

    @mr.function
    def runs_here(x):
        return strategy2.run(double, args=(x,))

    runs_here(x)
    message = r"an mr\.function uses two strategies: .*write one mr\.function for each"
    with pytest.raises(mr.StrategyMismatchError, match=message):
        runs_here(y)
    with pytest.raises(mr.StrategyMismatchError, match=message):
        mr.function(lambda x, y: (strategy2.run(double, args=(x,)), ELSEWHERE.run(double, args=(y,))))(x, y)
    with pytest.raises(mr.StrategyMismatchError, match=message):
        mr.function(lambda x: strategy2.reduce("sum", x) + v)(x)
    with pytest.raises(mr.StrategyMismatchError, match=r"lives on 2 replicas \(cpu:6, cpu:7\)"):
        mr.function(lambda: strategy2.run(lambda: v.value))()


def test_without_anything_of_a_strategy_it_runs_on_the_default_device():
    assert mr.function(lambda x: x + 1)(jnp.float32(1)).devices() == {jax.devices()[0]}
    assert mr.function(lambda: 3)() == 3
    assert mr.function(lambda: None)() is None


def test_an_array_on_other_devices_is_moved(strategy2):
    x = jax.device_put(jnp.ones(2), jax.devices()[5])
    v = variable(strategy2, np.zeros(2, np.float32))
    assert mr.function(lambda x: v.assign(x) + 0)(x).devices() == set(strategy2.devices)


def test_it_keeps_the_name_and_refuses_what_is_no_function():
    def train_step():
        """Train."""

    assert mr.function(train_step).__name__ == "train_step"
    assert mr.function(train_step).__doc__ == "Train."
    with pytest.raises(TypeError, match=r"mr\.function got 3; expected a function: @mr\.function above def"):
        mr.function(3)


def test_a_result_is_no_view_of_a_variable(strategy2):
    v = variable(strategy2, np.zeros(2, np.float32))
    bump = mr.function(lambda: v.assign_add(jnp.ones(2)).value)
    first, before = bump(), None
    before = first.tolist()
    for _ in range(4):
        bump()
    assert first.tolist() == before == [1.0, 1.0]


def test_it_holds_the_programs_constants_once(strategy2):
    """A closed-over array is an argument of the program, not compiled into it."""
    big = jnp.arange(1000.0)
    use = mr.function(lambda: big.sum())
    assert float(use()) == float(use()) == 499500.0
    program = next(reversed(list(function._programs)))
    assert [constant.shape for constant in program.constants] == [(1000,)]


def test_a_factory_of_functions_may_be_used_often_and_one_function_compiled_again_and_again_is_reported(strategy2):
    def made():
        v = variable(strategy2, 0.0)

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


def test_values_that_a_user_stacked_elsewhere_are_taken(strategy2):
    stacked = mr.PerReplica(jnp.arange(2.0))  # on one device only, as `jax.tree.map` may leave it
    with strategy2.scope():
        assert float(mr.function(lambda x: strategy2.reduce("sum", x))(stacked)) == 1.0


def test_a_function_in_a_loop_is_known_by_a_few_looks_and_is_another_with_what_it_reads(strategy2, strategy3, monkeypatch):
    asked, real = [], function.key_of
    monkeypatch.setattr(function, "key_of", lambda *given: [asked.append(given), real(*given)][1])
    settings, total, x = types.SimpleNamespace(scale=2.0), variable(strategy2, 0.0), numbered(strategy2)

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
