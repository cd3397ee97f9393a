"""run: what a step is given and gives back, which calls share a program, and what errors leave behind."""

import collections
import contextlib
import dataclasses
import functools
import re
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from strategies import all_reduce, ctx, numbers, values_of, variable

import mirrored as mr
from mirrored import testing
from mirrored._program import recompilations

pytestmark = pytest.mark.usefixtures("in_numpy")

Pair = collections.namedtuple("Pair", "first second")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    image: object
    label: object


@dataclasses.dataclass
class Unregistered:
    image: object


@pytest.fixture
def compilations():
    """Count what JAX traces and compiles, by the last word of its event's name."""
    counts = collections.Counter()

    def count(event, duration, **details):
        counts[event.rsplit("/", 1)[-1]] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    yield counts
    jax.monitoring.unregister_event_duration_listener(count)


# -- arguments


def test_what_a_derivative_outside_names_has_not_been_put_there_by_the_step(strategy2):
    [x] = strategy2.distribute_dataset([np.arange(4, dtype=np.float32)])
    assert float(jax.grad(lambda a: strategy2.reduce("sum", strategy2.run(lambda x: (x * a).sum(), args=(x,))))(2.0)) == 6
    seen = []
    with pytest.warns(UserWarning, match=r"the step has put an array into `seen`.*Return the array"):
        strategy2.run(lambda x: seen.append(x.sum()), args=(x,))


@pytest.mark.filterwarnings("ignore:the step has put an array into `seen`")
def test_each_argument_arrives_as_what_it_is(strategy3):
    seen = {}

    def step(*leaves, **named):
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


@pytest.mark.by_xla
def test_a_host_array_may_be_filled_again_at_once(strategy2):
    w = variable(np.eye(300, dtype="float32"), strategy2)

    def slow():
        w.assign(jax.lax.fori_loop(0, 20, lambda i, y: jnp.tanh(y @ y), w.value))

    def step(x):
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


def test_arrays_come_from_anywhere(strategy3, strategy2):
    array = np.arange(6, dtype="float32")
    on_two = strategy2.distribute_values_from_function(lambda ctx: array[:3])
    placed = {
        "another device": jax.device_put(array, jax.devices()[7]),
        "one of its devices": jax.device_put(array, jax.devices()[1]),
        "another mesh": strategy2.reduce("mean", array),
        "split over another mesh": jax.device_put(array, jax.tree.leaves(on_two)[0].sharding),
        "host": array,
    }
    own = numbers(strategy3)
    for name, given in placed.items():
        for result in (
            strategy3.run(lambda x, own: (x * own, x + 1), args=(given, own)),
            strategy3.run(lambda own, given=given: (given * own, given + 1), args=(own,)),  # closed over
        ):
            assert values_of(result[0])[2] == (array * 2).tolist(), name
            np.testing.assert_array_equal(result[1], array + 1, err_msg=name)


# -- results


def test_structures_are_kept(strategy3):
    static = (3, 2.5, True, "name", len, Pair)

    def step(x):
        return {"pair": Pair(x, None), "list": [Batch(x * 2, "cat"), (), {}], "static": static, "array": np.float32(2)}

    for context in (contextlib.nullcontext(), mr.eager()):
        with context:
            result = strategy3.run(step, args=(numbers(strategy3),))
        assert list(result) == ["array", "list", "pair", "static"]
        assert type(result["pair"]) is Pair and result["pair"].second is None
        assert type(result["list"][0]) is Batch and result["list"][0].label == "cat"
        assert result["list"][1:] == [(), {}]
        assert result["static"] == static
        assert list(map(type, result["static"])) == list(map(type, static)), "numbers come back as they are"
        assert isinstance(result["array"], jax.Array) and result["array"].is_fully_replicated, "and arrays as arrays"
        assert values_of(result["pair"].first) == [0, 1, 2]
        assert values_of(result["list"][0].image) == [0, 2, 4]
    assert strategy3.run(lambda: None) is None


# -- programs


@pytest.mark.by_xla
def test_a_step_is_traced_once_and_compiled_once(strategy3, compilations):
    strategy = strategy3
    w = variable(np.zeros(3, "float32"), strategy)
    seen = variable(0, strategy, synchronization="on_read", aggregation="sum")
    optimizer = mr.Optimizer(optax.adam(0.1), [w])
    rows = strategy.distribute_values_from_function(lambda ctx: np.ones(3, "float32"))
    traced = []

    def step(x):
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


# -- where arguments are, and JAX's settings


@pytest.mark.by_xla
@pytest.mark.parametrize("to_array", [np.asarray, lambda x: jax.device_put(x, jax.devices()[1])])
def test_a_state_that_comes_back_is_compiled_once(to_array):
    def step(state, x):
        return {"w": state["w"] - x, "step": state["step"] + 1}

    for devices, options in ((["cpu:0", "cpu:1"], {}), (["cpu:0"], {}), (["cpu:0"], {"num_replicas": 3})):
        strategy = mr.MirroredStrategy(devices, **options)
        run = lambda state, s=strategy: s.run(step, args=(state, 0.5))  # noqa: E731
        with strategy.scope():
            for compiled in (run, mr.function(run)):
                state = {"w": to_array(np.ones(3, np.float32)), "step": 0}
                with testing.assert_compiles(1):
                    for _ in range(3):
                        state = compiled(state)
                assert state["w"].tolist() == [-0.5] * 3 and int(state["step"]) == 3


def test_a_value_that_is_cut_in_another_way_is_put_in_place_and_one_on_other_devices_is_refused(strategy3):
    strategy = strategy3
    x = strategy.distribute_values_from_function(lambda ctx: np.full((2, 3), ctx.replica_id_in_sync_group, np.float32))
    run = lambda x: strategy.run(lambda x: x.sum(axis=1), args=(x,))  # noqa: E731
    for parts in (PartitionSpec("replica", None, None), PartitionSpec()):
        moved = jax.tree.map(lambda array, parts=parts: jax.device_put(array, NamedSharding(array.sharding.mesh, parts)), x)
        for compiled in (run, mr.function(run)):
            assert values_of(compiled(moved)) == [[3 * i] * 2 for i in range(3)]
    elsewhere = jax.tree.map(lambda array: jax.device_put(array, jax.devices()[5]), x)
    for compiled in (run, mr.function(run)):
        with pytest.raises(mr.StrategyMismatchError, match=r"values lie on \['cpu:5'\], but this strategy has"):
            compiled(elsewhere)


def test_jaxs_settings_are_part_of_a_program(strategy2):
    """Which these are is in tests/_jax/test_tracing.py; the implementation of keys is not among JAX's own."""

    def step(x, y):
        return x + y, jax.random.key_data(jax.random.key(0))

    x, y = (strategy2.distribute_values_from_function(lambda ctx, s=s: np.ones(s, np.float32)) for s in ((2,), (2, 1)))
    run = lambda x, y: strategy2.run(step, args=(x, y))  # noqa: E731
    for compiled in (run, mr.function(run)):
        for _ in range(3):  # the third takes the fast path
            assert compiled(x, y)[1].shape == (2,)
        with jax.default_prng_impl("rbg"):
            assert compiled(x, y)[1].shape == (4,)
        with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="numpy_rank_promotion"):
            compiled(x, y)
        assert compiled(x, y)[1].shape == (2,)


# -- compiled again and again


def recompiled(run, count=10):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(count):
            run(i)
    return caught


def named(x=None, rate=None): ...


SETTINGS = types.SimpleNamespace(lr=0.0)


def of_another_object(i):
    captured = object()
    return lambda: (captured, None)[1], ()


def of_a_setting(i):
    SETTINGS.lr = i / 10
    return lambda x: x * SETTINGS.lr, (np.ones(2),)


def state_of(tx):
    return pytest.importorskip("flax.training.train_state").TrainState.create(apply_fn=None, params=np.ones(2, np.float32), tx=tx)


#: Each makes the i-th call: a function and its arguments; what the warning says of the ninth.
REASONS = [
    (lambda i: (named, (np.ones(2), {"rate": str(i)})),
     r"the argument `rate\['rate'\]` changed from '7' to '8'\. Strings, bools, functions .* as a number or an array"),
    (lambda i: (named, ([np.ones(i + 1)], 0)), r"`x\[0\]` changed from shape \(8,\) float32 to \(9,\) float32\. Give batches"),
    (lambda i: (named, (np.ones((4, i + 1)), 0)), r"from shape \(4, 8\) .* Pad them to a few lengths, .* up to 8 programs"),
    (lambda i: (named, (np.ones(2) if i % 2 else "1", str(i))), r"the argument `x` changed from an array of shape \(2,\) to '1'"),
    (lambda i: (named, ([1] * i, 0)), r"the structure of its arguments changed"),
    (lambda i: (named, ([state_of(optax.sgd(0.1))], 0)), r"an optax transformation in its arguments is another object .*tx=tx"),
    (of_another_object, "captured, which it reads, is another object than before"),
    (of_a_setting, r"SETTINGS\.lr, .* changed from 0\.7 to 0\.8\. What a step reads is compiled into it\. .* as an argument"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REASONS)
def test_recompilation_is_reported_once_with_what_changed(strategy2, make, message):
    def run(i):
        function, args = make(i)
        strategy2.run(function, args=args)

    [warning] = recompiled(run)
    assert (warning.category, warning.filename) == (mr.RecompilationWarning, __file__)
    assert re.search(r"has been compiled 9 times; this time because .*" + message, str(warning.message))


@pytest.mark.by_xla
def test_one_optax_transformation_or_a_rate_in_its_state_compiles_once(strategy2):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    with testing.count_programs() as count:
        for rate in (0.1, 0.2, 0.3):
            state = state_of(tx)
            state.opt_state.hyperparams["learning_rate"] = np.float32(rate)
            strategy2.run(named, args=(state,))
    assert count.count == 1
    nnx = pytest.importorskip("flax.nnx")
    optimizer = lambda: nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)  # noqa: E731
    [warning] = recompiled(lambda i: strategy2.run(named, args=(optimizer(),)))
    assert "an optax transformation in its arguments" in str(warning.message)


def test_a_cross_validation_is_silent(strategy2):
    rows = np.ones((4, 3), np.float32)

    def step(w, x):
        return w.assign_add(all_reduce("sum", x.sum(0)))

    def fold(i):
        model = variable(np.zeros(3, np.float32), strategy2)
        for x in strategy2.distribute_dataset(strategy2.make_numpy_dataset(rows).batch(4)):
            strategy2.run(lambda x: step(model, x), args=(x,))
            strategy2.run(step, args=(model, x))

    assert recompiled(fold) == []


def test_a_few_programs_of_one_function_are_silent(strategy2):
    limit = recompilations.MAX_SILENT_RECOMPILATIONS
    assert recompiled(lambda i: strategy2.run(named, args=(str(i),)), count=limit) == []
    assert recompiled(lambda i: strategy2.run(named, args=(str(i % limit),)), count=3 * limit) == []
    assert len(recompiled(lambda i: strategy2.run(named, args=(str(limit),)), count=1)) == 1


# -- errors: more of them in tests/test_bad_input.py


def test_what_jax_cannot_look_into_is_refused_and_leaves_no_program(strategy2):
    x = numbers(strategy2)
    lost = jax.tree.map(jnp.sum, x)
    assert repr(lost).startswith("PerReplica(")
    unregistered = r"returned a Unregistered, whose field 'image' holds an array, .* @jax.tree_util.register_dataclass"
    held = r"the argument `held` is a Unregistered that holds a PerReplica, .* @jax.tree_util.register_dataclass above the class"
    for step, argument, error, message in (
        (lambda x: Unregistered(x), x, TypeError, unregistered),
        (lambda x: [{"a": Unregistered(x)}], x, TypeError, unregistered),
        (lambda held: held.image * 2, Unregistered(x), TypeError, held),
        (lambda held: held.image.sum(), Unregistered(x), TypeError, held),
        (lambda x: x, lost, mr.PerReplicaError, r"the argument `x` is a PerReplica without replicas: jax\.tree\.map"),
    ):
        for context in (contextlib.nullcontext(), mr.eager()):
            with pytest.raises(error, match=message), context:
                strategy2.run(step, args=(argument,))
    assert not list(strategy2._steps.programs)
    static = Unregistered("no array")
    assert strategy2.run(lambda: static) is static
    same = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    assert values_of(same.run(lambda x: x, args=(x,))) == [0, 1]


# -- eager


def test_uneven_values_are_refused_by_name_in_eager_mode(strategy2):
    uneven = strategy2.distribute_values_from_function(lambda ctx: np.ones(1 + ctx.replica_id_in_sync_group))
    message = r"the argument `x\[0\]` has a different shape on each replica: \(1,\), \(2,\)\. Inside mr\.eager\(\)"
    with pytest.raises(mr.UnevenReplicasError, match=message), mr.eager():
        strategy2.run(lambda x: x, args=([uneven],))
    assert strategy2.run(lambda x: x, args=([uneven],))[0].shapes == ((1,), (2,))


def test_eager_prints_the_value_of_each_replica(strategy2, capsys):
    def step(x):
        print("x is", x)
        mean = all_reduce("mean", x)
        print("mean is", mean)
        return x * mean

    x = strategy2.distribute_values_from_function(lambda ctx: np.float32(40 + 2 * ctx.replica_id_in_sync_group))
    for _ in range(2):
        with mr.eager():
            assert values_of(strategy2.run(step, args=(x,))) == [40 * 41, 42 * 41]
        printed = capsys.readouterr().out
        assert printed.count("x is") == printed.count("mean is") == 1
        assert "40." in printed and "42." in printed and printed.count("41.") == 2
    strategy2.run(step, args=(x,))
    assert capsys.readouterr().out == ""
    with pytest.raises(ZeroDivisionError), mr.eager():
        strategy2.run(lambda: [print("so far"), 1 // 0])
    assert "so far" in capsys.readouterr().out


def test_a_breakpoint_stops_in_the_eager_step_with_values(strategy2, monkeypatch):
    stops = []

    def hook(*args, **kwargs):
        frame = sys._getframe(1)
        stops.append((frame.f_code.co_name, str(frame.f_locals["x"])))

    monkeypatch.setattr(sys, "breakpointhook", hook)

    def step(x):
        breakpoint()
        return x

    with mr.eager():
        strategy2.run(step, args=(numbers(strategy2),))
    [(name, shown)] = stops
    assert name == "step" and "0.0" in shown and "1.0" in shown
    assert sys.breakpointhook is hook


def test_eager_gives_the_results_of_the_compiled_step(strategy3):
    mean = variable(np.zeros(2, "float32"), strategy3, aggregation="mean")
    seen = variable(0, strategy3, synchronization="on_read", aggregation="sum")

    def step(x):
        mean.assign(x + jnp.zeros(2))
        seen.assign_add(2 + ctx().replica_id_in_sync_group)
        return x, all_reduce("sum", x), jax.random.key_data(ctx().rng(3))

    def outcome(context):
        seen.assign(0)
        with context:
            results = strategy3.run(step, args=(numbers(strategy3),))
        return results, mean.value, *strategy3.local_results(seen)

    for compiled, eager in zip(*map(jax.tree.leaves, map(outcome, (contextlib.nullcontext(), mr.eager()))), strict=True):
        assert compiled.sharding.is_equivalent_to(eager.sharding, compiled.ndim)
        np.testing.assert_allclose(eager, compiled, rtol=1e-6)


def returns_a_branch(n):
    return 1 if n > 0 else 2


WRONG_STEPS = [
    lambda w, optimizer, x: w.assign(x),
    lambda w, optimizer, x: returns_a_branch(ctx().replica_id_in_sync_group),
    lambda w, optimizer, x: returns_a_branch(x),
    lambda w, optimizer, x: optimizer.apply_gradients(all_reduce("sum", mr.grad(lambda: w * x, w)())),
    lambda w, optimizer, x: Unregistered(x),
    lambda w, optimizer, x: w.assign(jnp.ones(7)),
    lambda w, optimizer, x: jax.lax.cond(x > 0, lambda: all_reduce("sum", x), lambda: x),
]  # fmt: skip


def test_eager_gives_the_errors_of_the_compiled_step(strategy2):
    w = variable(1.0, strategy2, name="w")
    optimizer = mr.Optimizer(optax.sgd(0.1), w)
    for step in WRONG_STEPS:
        errors = []
        for context in (contextlib.nullcontext(), mr.eager(), mr.eager()):
            with pytest.raises(Exception) as caught, context:
                strategy2.run(functools.partial(step, w, optimizer), args=(numbers(strategy2),))
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1] == errors[2]
    assert float(w) == 1


def test_eager_ends_with_its_block_and_works_in_a_compiled_function(strategy2):
    calls = []

    def step(x):
        calls.append(1)
        return all_reduce("sum", x)

    @mr.function
    def total(x):
        return strategy2.run(step, args=(x,)) * 2

    x = numbers(strategy2)
    for _ in range(2):
        strategy2.run(step, args=(x,))
    assert len(calls) == 1
    with pytest.raises(ZeroDivisionError), mr.eager():
        for _ in range(2):
            strategy2.run(step, args=(x,))
        assert len(calls) == 3
        assert [float(total(x)), float(total(x))] == [2, 2]
        assert len(calls) == 5
        raise ZeroDivisionError
    strategy2.run(step, args=(x,))
    assert len(calls) == 5 and float(total(x)) == 2
