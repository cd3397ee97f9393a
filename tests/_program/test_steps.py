"""run: what a step is given and gives back, which calls share a program, and what errors leave behind."""

import collections
import contextlib
import dataclasses
import functools
import gc
import re
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr
from mirrored import testing
from mirrored._program import cache

Pair = collections.namedtuple("Pair", "first second")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    image: Any
    label: Any


@dataclasses.dataclass
class Unregistered:
    image: Any


def replica_numbers(strategy: mr.Strategy) -> mr.PerReplica:
    return strategy.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group))


def num_programs(strategy: mr.Strategy) -> int:
    return len(list(strategy._steps.programs))


def values_of(result: mr.PerReplica) -> list[Any]:
    return [value.tolist() for value in result.values]


@pytest.fixture
def compilations() -> Iterator[collections.Counter[str]]:
    """Count what JAX traces and compiles, by the last word of its event's name."""
    counts: collections.Counter[str] = collections.Counter()

    def count(event: str, duration: float, **details: Any) -> None:
        counts[event.rsplit("/", 1)[-1]] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    yield counts
    jax.monitoring.unregister_event_duration_listener(count)


# -- arguments


@pytest.mark.filterwarnings("ignore:the step has put an array into `seen`")
def test_each_argument_arrives_as_what_it_is(strategy3: mr.MirroredStrategy) -> None:
    seen: dict[str, Any] = {}

    def step(*leaves: Any, **named: Any) -> Any:
        seen.update(named, leaves=leaves)
        return leaves[0] * 1, leaves[1].sum()

    rows = strategy3.distribute_values_from_function(lambda ctx: np.full((2, 3), ctx.replica_id_in_sync_group, "float32"))
    own, whole = strategy3.run(
        step,
        args=(rows, np.ones((4, 5)), jnp.ones(6), np.float64(1), 2.5, 2, True, "relu", None, len),
        kwargs={"nested": {"rows": [rows], "flag": False, "none": None}},
    )
    *arrays, number, flag, text, none, function = seen["leaves"]
    assert [a.shape for a in arrays] == [(2, 3), (4, 5), (6,), (), ()]
    assert all(isinstance(a, jax.core.Tracer) and a.dtype == "float32" for a in arrays)
    assert isinstance(number, jax.core.Tracer) and number.dtype == "int32" and number.weak_type and arrays[-1].weak_type
    assert [flag, text, none, function] == [True, "relu", None, len]
    assert seen["nested"]["rows"][0].shape == (2, 3)
    assert (seen["nested"]["flag"], seen["nested"]["none"]) == (False, None)
    assert [value.sum() for value in own.values] == [0, 6, 12], "a PerReplica is this replica's slice"
    assert int(whole) == 20, "an array is whole"


def test_arguments_by_position_and_by_name_and_static_ones_that_choose(strategy2: mr.MirroredStrategy) -> None:
    def step(x: Any, y: Any = 10.0, *, scale: Any = 1.0, name: str = "sum", function: Any = jnp.asarray) -> Any:
        return function({"sum": x + y, "product": x * y}[name]) * scale

    x = np.float32(2)
    run = functools.partial(strategy2.run, step)
    assert float(run(args=(x,))) == 12
    assert float(run(args=[x, np.float32(3)])) == 5
    assert float(run(kwargs={"x": x, "scale": np.float32(2)})) == 24
    assert float(run(args=(x,), kwargs={"y": 8.0, "scale": 3.0, "name": "product", "function": jnp.sqrt})) == 12
    with pytest.raises(KeyError, match="third"):
        run(args=(x,), kwargs={"name": "third"})


def test_arguments_stay_valid(strategy2: mr.MirroredStrategy) -> None:
    with strategy2.scope():
        w = mr.Variable(np.zeros(2, "float32"))
    per_replica, mirrored, on_host = replica_numbers(strategy2), jnp.ones(2), np.ones(2, "float32")

    def step(a: Any, b: Any, c: Any) -> None:
        w.assign(w + mr.get_replica_context().all_reduce("sum", a) + b + c)

    for _ in range(3):
        strategy2.run(step, args=(per_replica, mirrored, on_host))
    assert values_of(per_replica) == [0, 1]
    np.testing.assert_array_equal(mirrored, on_host)
    np.testing.assert_array_equal(w.numpy(), [9, 9])


def test_a_host_array_may_be_filled_again_at_once(strategy2: mr.MirroredStrategy) -> None:
    with strategy2.scope():
        w = mr.Variable(np.eye(300, dtype="float32"))

    def slow() -> None:
        w.assign(jax.lax.fori_loop(0, 20, lambda i, y: jnp.tanh(y @ y), w.value))

    def step(x: Any) -> Any:
        return strategy2.run(lambda x: x + w[0, 0] * 0, args=(x,))

    memory = np.zeros(4096 + 64, "uint8")
    start = -memory.ctypes.data % 64  # so aligned, the CPU's device may use it in place
    array = memory[start : start + 4096].view("float32")
    for compiled in (step, mr.function(step)):
        array[:] = 0
        strategy2.run(slow)
        compiled(array).block_until_ready()
        strategy2.run(slow)
        result = compiled(array)
        array[:] = 5
        assert not result.any()


def test_arrays_come_from_anywhere(strategy3: mr.MirroredStrategy, strategy2: mr.MirroredStrategy) -> None:
    array = np.arange(6, dtype="float32")
    on_two = strategy2.distribute_values_from_function(lambda ctx: array[:3])
    placed = {
        "another device": jax.device_put(array, jax.devices()[7]),
        "one of its devices": jax.device_put(array, jax.devices()[1]),
        "another mesh": strategy2.reduce("mean", array),
        "split over another mesh": jax.device_put(array, jax.tree.leaves(on_two)[0].sharding),
        "host": array,
    }
    own = replica_numbers(strategy3)
    for name, given in placed.items():
        for result in (
            strategy3.run(lambda x, own: (x * own, x + 1), args=(given, own)),
            strategy3.run(lambda own, given=given: (given * own, given + 1), args=(own,)),  # closed over
        ):
            assert values_of(result[0])[2] == (array * 2).tolist(), name
            np.testing.assert_array_equal(result[1], array + 1, err_msg=name)


# -- results


def test_structures_are_kept(strategy3: mr.MirroredStrategy) -> None:
    static = (3, 2.5, True, "name", len, Pair)

    def step(x: jax.Array) -> Any:
        return {"pair": Pair(x, None), "list": [Batch(x * 2, "cat"), (), {}], "static": static, "array": np.float32(2)}

    result = strategy3.run(step, args=(replica_numbers(strategy3),))
    assert list(result) == ["array", "list", "pair", "static"]
    assert type(result["pair"]) is Pair and result["pair"].second is None
    assert type(result["list"][0]) is Batch and result["list"][0].label == "cat"
    assert result["list"][1:] == [(), {}]
    assert result["static"] == static
    assert list(map(type, result["static"])) == list(map(type, static)), "numbers come back as they are"
    assert isinstance(result["array"], jax.Array), "and arrays as arrays"
    assert values_of(result["pair"].first) == [0, 1, 2]
    assert values_of(result["list"][0].image) == [0, 2, 4]
    assert strategy3.run(lambda: None) is None


RESULTS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a per-replica argument": (lambda x: x, False),
    "computed from it": (lambda x: jnp.sin(x) + 1, False),
    "the replica's number": (lambda x: mr.get_replica_context().replica_id_in_sync_group, False),
    "its random numbers": (lambda x: jax.random.uniform(mr.get_replica_context().rng(0)), False),
    "a loop over it": (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2, x), False),
    "what only depends on its shape": (lambda x: jnp.zeros(x.shape), True),
    "an all-reduced value": (lambda x: mr.get_replica_context().all_reduce("mean", x), True),
    "a gathered value": (lambda x: mr.get_replica_context().all_gather(x[None], axis=0), True),
    "a constant": (lambda x: jnp.ones(2), True),
    "a numpy constant": (lambda x: np.ones(2), True),
    "random numbers of a shared key": (lambda x: jax.random.uniform(jax.random.key(0)), True),
    "a loop over a reduced value": (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2, jax.lax.psum(x, "replica")), True),
}


def test_what_is_mirrored_does_not_depend_on_the_number_of_replicas(strategy: mr.MirroredStrategy) -> None:
    results = strategy.run(lambda x: {n: f(x) for n, (f, _) in RESULTS.items()}, args=(replica_numbers(strategy),))
    for name, (_, is_mirrored) in RESULTS.items():
        result = results[name]
        if is_mirrored:
            assert isinstance(result, jax.Array) and result.is_fully_replicated, name
            assert result.sharding.device_set == set(strategy.devices), name
        else:
            assert isinstance(result, mr.PerReplica) and result.num_replicas == strategy.num_replicas_in_sync, name
            assert [next(iter(value.devices())) for value in result.values] == list(strategy.devices), name


def test_a_class_that_jax_cannot_look_into(strategy2: mr.MirroredStrategy) -> None:
    message = r"returned a Unregistered, whose field 'image' holds an array, .* @jax.tree_util.register_dataclass"
    for nest in (lambda x: x, lambda x: [{"a": x}]):
        with pytest.raises(TypeError, match=message):
            strategy2.run(lambda x, nest=nest: nest(Unregistered(x)), args=(replica_numbers(strategy2),))
    assert num_programs(strategy2) == 0
    static = Unregistered("no array")
    assert strategy2.run(lambda: static) is static


def test_a_per_replica_taken_from_outside_is_no_result(strategy2: mr.MirroredStrategy) -> None:
    x = replica_numbers(strategy2)
    with pytest.raises(TypeError, match=r"returned a PerReplica, .* Pass the PerReplica to the step in strategy.run\(fn, args="):
        strategy2.run(lambda: x)
    assert values_of(strategy2.run(lambda x: x, args=(x,))) == [0, 1]


# -- programs


def test_a_step_is_traced_once_and_compiled_once(strategy3: mr.MirroredStrategy, compilations: collections.Counter[str]) -> None:
    strategy = strategy3
    with strategy.scope():
        w = mr.Variable(np.zeros(3, "float32"))
        seen = mr.Variable(0, synchronization="on_read", aggregation="sum")
        optimizer = mr.Optimizer(optax.adam(0.1), [w])
    rows = strategy.distribute_values_from_function(lambda ctx: np.ones(3, "float32"))
    traced = []

    def step(x: jax.Array) -> jax.Array:
        traced.append(1)
        loss, gradients = mr.value_and_grad(lambda: (w - x) ** 2, [w])()
        optimizer.apply_gradients(gradients)
        seen.assign_add(1)
        return loss

    compilations.clear()
    strategy.run(step, args=(rows,))
    assert len(traced) == 1
    first = dict(compilations)
    assert first["backend_compile_duration"] <= 2  # the program, and the copy of values that are shared
    for _ in range(5):
        strategy.run(step, args=(rows,))
    assert len(traced) == 1
    assert dict(compilations) == first


def test_work_of_the_first_call_does_not_depend_on_the_number_of_replicas(compilations: collections.Counter[str]) -> None:
    counts = []
    for devices in (1, 3, 8):
        strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(devices)])
        rows = replica_numbers(strategy)
        compilations.clear()
        strategy.run(lambda x: mr.get_replica_context().all_reduce("sum", x) * x, args=(rows,))
        counts.append({name: compilations[name] for name in ("jaxpr_trace_duration", "backend_compile_duration")})
    assert counts == [{"jaxpr_trace_duration": 1, "backend_compile_duration": 1}] * 3


def test_what_a_function_captures_is_seen_when_it_changes(strategy2: mr.MirroredStrategy) -> None:
    x = replica_numbers(strategy2)
    factor: Any = 1.0

    def step(y: Any) -> Any:
        return y * factor

    results = []
    factors = [1.0, 3.0, jnp.ones(1) * 5, np.ones(1) * 7, 1.0]
    for factor in factors:  # noqa: B007
        results.append(np.asarray(strategy2.run(step, args=(x,)).values[1]).reshape(()).item())
    assert results == [1, 3, 5, 7, 1]
    assert num_programs(strategy2) == 4


def test_of_many_programs_those_that_nobody_calls_any_more_go(strategy2, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(cache, "MAX_FORGOTTEN", 3)
    monkeypatch.setattr(cache.time, "monotonic", lambda: now)

    def step(x):
        return x.sum()

    def shapes():
        return sorted(p.lifted.closed.in_avals[0].shape[-1] for p in strategy2._steps.programs)

    for size in (1, 2, 3, 4, 5):
        strategy2.run(step, args=(np.ones(size),))
    assert shapes() == [1, 2, 3, 4, 5]  # all were called lately
    now += cache.LATELY_SECONDS + 1
    strategy2.run(step, args=(np.ones(2),))
    strategy2.run(step, args=(np.ones(6),))
    assert shapes() == [2, 5, 6]  # three stay however long ago they were called


def test_the_program_least_recently_used_goes_first(strategy2: mr.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(cache, "MAX_FORGOTTEN", 3)
    traced: list[str] = []

    def step(size: str) -> Any:
        traced.append(size)
        return size

    for size in "12314":  # 2 is now the oldest
        assert strategy2.run(step, args=(size,)) == size
    assert num_programs(strategy2) == 3
    traced.clear()
    assert [strategy2.run(step, args=(size,)) for size in "134"] == list("134")
    assert traced == []
    assert strategy2.run(step, args=("2",)) == "2"
    assert traced == ["2"]


def test_a_program_that_is_gone_holds_nothing(strategy2: mr.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_PROGRAMS", 1)
    monkeypatch.setattr(cache, "MAX_FORGOTTEN", 1)

    class Captured:
        value = 1.0

    def run_one() -> weakref.ref[Captured]:
        captured = Captured()
        strategy2.run(lambda: captured.value)
        return weakref.ref(captured)

    kept = [run_one() for _ in range(4)]
    gc.collect()
    assert [reference() is None for reference in kept] == [True, True, True, True]


def test_threads_share_a_program(strategy2: mr.MirroredStrategy) -> None:
    x = replica_numbers(strategy2)
    results: list[list[Any]] = []

    def loop() -> None:
        for _ in range(10):
            results.append(values_of(strategy2.run(lambda y: y + 1, args=(x,))))

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1, 2]] * 40
    assert num_programs(strategy2) == 1


# -- where arguments are, and JAX's settings


STATES: dict[str, Callable[[], Any]] = {
    "numpy": lambda: {"w": np.ones(3, np.float32), "step": 0},
    "jax": lambda: {"w": jnp.ones(3), "step": jnp.asarray(0)},
    "one device": lambda: {"w": jax.device_put(np.ones(3, np.float32), jax.devices()[1]), "step": 0},
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_comes_back_is_compiled_once(name: str) -> None:
    def step(state: Any, x: Any) -> Any:
        return {"w": state["w"] - x, "step": state["step"] + 1}

    for strategy in (
        mr.MirroredStrategy(["cpu:0", "cpu:1"]), mr.MirroredStrategy(["cpu:0"]), mr.MirroredStrategy(["cpu:0"], num_replicas=3),
    ):  # fmt: skip
        with strategy.scope():
            function = mr.function(lambda state, s=strategy: s.run(step, args=(state, 0.5)))
        for run in (lambda state, s=strategy: s.run(step, args=(state, 0.5)), function):
            state = STATES[name]()
            with testing.assert_compiles(1), strategy.scope():
                for _ in range(3):
                    state = run(state)
            assert state["w"].tolist() == [-0.5] * 3 and int(state["step"]) == 3


def test_jaxs_settings_are_part_of_a_program(strategy2: mr.Strategy) -> None:
    def step(x: Any) -> Any:
        return {"wide": jnp.asarray(1.0) * 1, "key": jax.random.key_data(jax.random.key(0)), "noise": noise(x)}

    def noise(x: Any) -> Any:
        return jax.random.uniform(jax.random.key(0), (4,)) + x

    x = np.float32(0)
    function = mr.function(lambda x: strategy2.run(step, args=(x,)))
    for run in (lambda x: strategy2.run(step, args=(x,)), function):
        before = run(x)
        with jax.enable_x64(True):
            assert run(x)["wide"].dtype == np.float64
        with jax.default_prng_impl("rbg"):
            assert run(x)["key"].shape == (4,)
        with jax.threefry_partitionable(False):
            np.testing.assert_array_equal(run(x)["noise"], noise(x))
        for _ in range(3):
            again = run(x)
        assert (again["wide"].dtype, again["key"].shape) == (np.float32, (2,))
        np.testing.assert_array_equal(again["noise"], before["noise"])
    ranks = lambda x, y: x + y  # noqa: E731
    x, y = (strategy2.distribute_values_from_function(lambda ctx, s=s: np.ones(s, np.float32)) for s in ((2,), (2, 1)))
    for _ in range(3):
        strategy2.run(ranks, args=(x, y))
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="numpy_rank_promotion"):
        strategy2.run(ranks, args=(x, y))


# -- compiled again and again


def recompiled(run: Callable[[int], Any], count: int = 12) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(count):
            run(i)
    return caught


def named(x: Any = None, rate: Any = None) -> None: ...


REASONS = [
    (
        lambda i: (np.ones(2), {"rate": str(i)}),
        r"the argument `rate\['rate'\]` changed from '7' to '8'\. Strings, bools, functions",
    ),
    (lambda i: (np.ones(2), f"name{i}"), r"the argument `rate` changed from 'name7' to 'name8'\. .* as a number or an array"),
    (lambda i: ([np.ones(i + 1)], 0), r"`x\[0\]` changed from shape \(8,\) float32 to \(9,\) float32\. Give batches one shape"),
    (lambda i: (np.ones(2) if i % 2 else "1", str(i)), r"the argument `x` changed from an array of shape \(2,\) to '1'"),
    (lambda i: ([1] * i, 0), r"the structure of its arguments changed"),
]


def test_recompilation_is_reported_once_with_the_arguments_name() -> None:
    for arguments, message in REASONS:
        strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
        [warning] = recompiled(lambda i, a=arguments, s=strategy: s.run(named, args=a(i)), count=10)
        assert (warning.category, warning.filename) == (mr.RecompilationWarning, __file__)
        assert re.match(r"named has been compiled 9 times; this time because .*" + message, str(warning.message))


def test_recompilation_for_what_is_captured_is_reported(strategy2: mr.MirroredStrategy) -> None:
    def run(i: int) -> None:
        captured = object()
        strategy2.run(lambda: (captured, None)[1])

    [warning] = recompiled(run)
    assert "captured, which it reads, is another object than before" in str(warning.message)


def test_a_number_that_it_closes_over_is_named_with_what_it_was_and_is(strategy2: mr.Strategy) -> None:
    settings = types.SimpleNamespace(lr=0.0)
    x = strategy2.distribute_values_from_function(lambda ctx: np.ones(2, np.float32))

    def step(x: Any) -> Any:
        return x * settings.lr

    def run(i: int) -> None:
        settings.lr = i / 10
        strategy2.run(step, args=(x,))

    [warning] = recompiled(run)
    assert re.search(
        r"step has been compiled 9 times; .* settings\.lr, .* changed from 0\.7 to 0\.8\. .* argument", str(warning.message)
    )
    assert "drop_remainder" not in str(warning.message)


def test_a_cross_validation_is_silent(strategy2: mr.Strategy) -> None:
    rows = np.ones((5, 3), np.float32)

    def step(w: Any, x: Any) -> Any:
        return w.assign_add(mr.get_replica_context().all_reduce("sum", x.sum(0)))

    def fold(i: int) -> None:
        with strategy2.scope():
            model = mr.Variable(np.zeros(3, np.float32))
        for x in strategy2.distribute_dataset(strategy2.make_numpy_dataset(rows).batch(4)):
            strategy2.run(lambda x: step(model, x), args=(x,))
            strategy2.run(step, args=(model, x))

    assert recompiled(fold) == []


def test_a_few_programs_of_one_function_are_silent(strategy2: mr.MirroredStrategy) -> None:
    limit = cache.MAX_SILENT_RECOMPILATIONS
    assert recompiled(lambda i: strategy2.run(named, args=(str(i),)), count=limit) == []
    assert recompiled(lambda i: strategy2.run(named, args=(str(i % limit),)), count=3 * limit) == []
    assert len(recompiled(lambda i: strategy2.run(named, args=(str(limit),)), count=1)) == 1


# -- errors


class StepError(Exception):
    """A user's own exception."""


def test_an_exception_comes_through_unchanged(strategy2: mr.MirroredStrategy) -> None:
    """In other ways of calling a function: test_lift."""
    error = StepError("in the step")
    with strategy2.scope():
        w, seen = mr.Variable(np.ones(2)), mr.Variable(0, synchronization="on_read", aggregation="sum")
    taken = w.value

    def fail(x: Any) -> Any:
        raise error

    for place in (
        fail,
        lambda x: jax.lax.fori_loop(0, 3, lambda i, y: fail(y), x),
        lambda x: jax.jit(fail)(x),
        lambda x: jax.grad(fail)(x),
        lambda x: mr.get_replica_context().merge_call(lambda strategy, y: fail(y), args=(x,)),
    ):

        def step(x: Any, place: Any = place) -> Any:
            w.assign(w * 2)
            seen.assign_add(1)
            return place(x)

        for context in (contextlib.nullcontext(), mr.eager()):
            with pytest.raises(StepError) as caught, context:
                strategy2.run(step, args=(replica_numbers(strategy2),))
            assert caught.value is error and error.args == ("in the step",) and error.__cause__ is None
            last = traceback.extract_tb(error.__traceback__)[-1]
            assert (last.filename, last.line) == (__file__, "raise error")
    assert (w.numpy().tolist(), taken.tolist(), int(seen)) == ([1, 1], [1, 1], 0)
    assert num_programs(strategy2) == 0
    assert mr.get_replica_context().num_replicas_in_sync == 1


def test_an_error_of_jax_shows_the_users_line(strategy2: mr.MirroredStrategy) -> None:
    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        strategy2.run(lambda: jnp.ones(3) + jnp.ones(4))
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files.count(__file__) == 2  # the call of run, and the line of the step


def test_a_step_in_a_step_is_refused(strategy2: mr.MirroredStrategy, strategy3: mr.MirroredStrategy) -> None:
    for inner in (strategy2, strategy3):
        for context in (contextlib.nullcontext(), mr.eager()):
            with pytest.raises(mr.ContextError, match=r"strategy\.run was called inside a step .* Call the function"), context:
                strategy2.run(lambda inner=inner: inner.run(lambda: 1))


def test_values_of_another_strategy_are_refused(strategy2: mr.MirroredStrategy, strategy3: mr.MirroredStrategy) -> None:
    with pytest.raises(mr.StrategyMismatchError, match=r"the argument `x\['a'\]` is a PerReplica of 2 replicas, but .* has 3"):
        strategy3.run(lambda x: x, args=({"a": replica_numbers(strategy2)},))
    elsewhere = mr.MirroredStrategy(["cpu:2", "cpu:3"])
    with pytest.raises(mr.StrategyMismatchError, match=r"`x` is a PerReplica whose values lie on \['cpu:0', 'cpu:1'\]"):
        elsewhere.run(lambda x: x, args=(replica_numbers(strategy2),))
    same = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    assert values_of(same.run(lambda x: x, args=(replica_numbers(strategy2),))) == [0, 1]


def test_uneven_values_are_refused_by_name_in_eager_mode(strategy2: mr.MirroredStrategy) -> None:
    uneven = strategy2.distribute_values_from_function(lambda ctx: np.ones(1 + ctx.replica_id_in_sync_group))
    message = r"the argument `x\[0\]` has a different shape on each replica: \(1,\), \(2,\)\. Inside mr\.eager\(\)"
    with pytest.raises(mr.UnevenReplicasError, match=message), mr.eager():
        strategy2.run(lambda x: x, args=([uneven],))
    assert strategy2.run(lambda x: x, args=([uneven],))[0].shapes == ((1,), (2,))


# -- eager


def test_eager_prints_the_value_of_each_replica(strategy2: mr.MirroredStrategy, capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: Any) -> Any:
        print("x is", x)
        mean = mr.get_replica_context().all_reduce("mean", x)
        print("mean is", mean)
        return x * mean

    x = strategy2.distribute_values_from_function(lambda ctx: np.float32(40 + 2 * ctx.replica_id_in_sync_group))
    with mr.eager():
        first = strategy2.run(step, args=(x,))
        printed = capsys.readouterr().out
        strategy2.run(step, args=(x,))
    assert printed == capsys.readouterr().out
    assert printed.count("x is") == printed.count("mean is") == 1
    assert "40." in printed and "42." in printed and printed.count("41.") == 2
    assert values_of(first) == [40 * 41, 42 * 41]
    strategy2.run(step, args=(x,))
    assert capsys.readouterr().out == ""


def test_eager_shows_what_was_printed_before_an_error(strategy2: mr.MirroredStrategy, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), mr.eager():
        strategy2.run(lambda: [print("so far"), 1 // 0])
    assert "so far" in capsys.readouterr().out


def test_a_breakpoint_stops_in_the_eager_step_with_values(
    strategy2: mr.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[tuple[str, str]] = []

    def hook(*args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        stops.append((frame.f_code.co_name, str(frame.f_locals["x"])))

    monkeypatch.setattr(sys, "breakpointhook", hook)

    def step(x: Any) -> Any:
        breakpoint()
        return x

    with mr.eager():
        strategy2.run(step, args=(replica_numbers(strategy2),))
    [(name, shown)] = stops
    assert name == "step"
    assert "0.0" in shown and "1.0" in shown
    assert sys.breakpointhook is hook


def training_step(strategy: mr.Strategy) -> tuple[Callable[..., Any], list[mr.Variable]]:
    with strategy.scope():
        w, mean = mr.Variable(np.ones(2, "float32")), mr.Variable(np.zeros(2, "float32"), aggregation="mean")
        seen = mr.Variable(0, synchronization="on_read", aggregation="sum")
        optimizer = mr.Optimizer(optax.sgd(0.1), [w])

    def step(x: Any, scale: Any, name: str) -> Any:
        loss, gradients = mr.value_and_grad(lambda: (w - x) ** 2 * scale, [w])()
        optimizer.apply_gradients(gradients)
        mean.assign(jnp.full(2, x))
        seen.assign_add(2)
        total = mr.get_replica_context().all_reduce("sum", loss)
        return {"loss": loss, "total": Pair(total, name), "w": w.value, "drawn": mr.get_replica_context().rng(3)}

    return step, [w, mean, seen]


def test_eager_gives_the_results_of_the_compiled_step(strategy3: mr.MirroredStrategy) -> None:
    results, states = [], []
    for context in (contextlib.nullcontext(), mr.eager()):
        step, variables = training_step(strategy3)
        with context:
            results.append(strategy3.run(step, args=(replica_numbers(strategy3), np.float32(0.5), "name")))
        states.append([variable.numpy() for variable in variables])
        strategy3.assert_mirrored()
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    for compiled, eager in zip(*map(jax.tree.leaves, results), strict=True):
        if isinstance(compiled, jax.Array) and jnp.issubdtype(compiled.dtype, jax.dtypes.prng_key):
            compiled, eager = jax.random.key_data(compiled), jax.random.key_data(eager)
        if isinstance(compiled, jax.Array):
            assert compiled.sharding.is_equivalent_to(eager.sharding, compiled.ndim)
            np.testing.assert_allclose(eager, compiled, rtol=1e-6)
        else:
            assert eager == compiled
    for compiled, eager in zip(*states, strict=True):
        np.testing.assert_allclose(eager, compiled, rtol=1e-6)


def returns_a_branch(n: Any) -> int:
    return 1 if n > 0 else 2


WRONG_STEPS = [
    lambda w, optimizer, x: w.assign(x),
    lambda w, optimizer, x: returns_a_branch(mr.get_replica_context().replica_id_in_sync_group),
    lambda w, optimizer, x: returns_a_branch(x),
    lambda w, optimizer, x: optimizer.apply_gradients(
        mr.get_replica_context().all_reduce("sum", mr.grad(lambda: w * x, w)())
    ),
    lambda w, optimizer, x: Unregistered(x),
    lambda w, optimizer, x: w.assign(jnp.ones(7)),
    lambda w, optimizer, x: jax.lax.cond(x > 0, lambda: mr.get_replica_context().all_reduce("sum", x), lambda: x),
]  # fmt: skip


def test_eager_gives_the_errors_of_the_compiled_step(strategy2: mr.MirroredStrategy) -> None:
    with strategy2.scope():
        w = mr.Variable(1.0, name="w")
        optimizer = mr.Optimizer(optax.sgd(0.1), w)
    for step in WRONG_STEPS:
        errors = []
        for context in (contextlib.nullcontext(), mr.eager(), mr.eager()):
            with pytest.raises(Exception) as caught, context:
                strategy2.run(functools.partial(step, w, optimizer), args=(replica_numbers(strategy2),))
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1] == errors[2]
    assert float(w) == 1


def test_eager_ends_with_its_block(strategy2: mr.MirroredStrategy) -> None:
    calls: list[int] = []

    def step() -> None:
        calls.append(1)

    strategy2.run(step)
    strategy2.run(step)
    assert len(calls) == 1
    with pytest.raises(StepError), mr.eager():
        strategy2.run(step)
        strategy2.run(step)
        assert len(calls) == 3
        raise StepError
    strategy2.run(step)
    assert len(calls) == 3


def test_eager_in_a_compiled_function(strategy2: mr.MirroredStrategy) -> None:
    calls: list[int] = []

    def step(x: Any) -> Any:
        calls.append(1)
        return mr.get_replica_context().all_reduce("sum", x)

    @mr.function
    def total(x: Any) -> Any:
        return strategy2.run(step, args=(x,)) * 2

    x = replica_numbers(strategy2)
    with mr.eager():
        assert [float(total(x)), float(total(x))] == [2, 2]
    assert len(calls) == 3  # the proof, then one call for each
    assert float(total(x)) == 2


def test_a_per_replica_that_has_lost_its_replicas_is_refused(strategy2: mr.Strategy) -> None:
    x = strategy2.distribute_values_from_function(lambda ctx: np.ones(2))
    lost = jax.tree.map(jnp.sum, x)
    assert repr(lost).startswith("PerReplica(")
    with pytest.raises(mr.PerReplicaError, match=r"the argument `x` is a PerReplica without replicas: jax\.tree\.map"):
        strategy2.run(lambda x: x, args=(lost,))
