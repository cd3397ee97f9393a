"""Lifting: a step becomes a pure function. No stale value, no leaked tracer, nothing lost when it stops halfway."""

import gc
import re
import signal
import time

import ctrl_c
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr
from mirrored._jax import jaxprs
from mirrored._program import lift
from mirrored._replicas.frames import Frame
from mirrored._transforms import function

pytestmark = pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")

STRATEGY = mr.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
TEN = np.float32(10)


def variable(value, strategy=STRATEGY, **kwargs):
    with strategy.scope():
        return mr.Variable(value, **kwargs)


# -- inner caches: functions that JAX traces once and remembers

w = variable(1.0, name="w")  # at module level, where everybody's helper functions live


@jax.jit
def jitted(x):
    return x * w


@jax.checkpoint
def rematerialised(x):
    return x * w


@jax.custom_jvp
def with_jvp(x):
    return x * w


with_jvp.defjvp(lambda primals, tangents: (primals[0] * w, tangents[0] * w))


@jax.custom_vjp
def with_vjp(x):
    return x * w


with_vjp.defvjp(lambda x: (x * w, None), lambda _, g: (g * w,))


def times_w(x):
    return x * w


def times_w_too(x):
    return x * w


def scan_body(carry, _):
    return carry * w, None


def loop_body(i, carry):
    return carry * w


def while_body(state):
    return state[0] + 1, state[1] * w


def less_than_one(state):
    return state[0] < 1


jitted_twice = jax.jit(lambda x: jitted(x) + 0)
jitted_gradient = jax.jit(jax.grad(lambda x: jitted(x) * x / 2))
vmapped = jax.vmap(times_w)

READERS = {
    "jit": jitted,
    "jit of jit": jitted_twice,
    "checkpoint": rematerialised,
    "jit of checkpoint": jax.jit(jax.checkpoint(times_w)),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "jit of custom_vjp": jax.jit(with_vjp),
    "scan": lambda x: jax.lax.scan(scan_body, x, jnp.zeros(1))[0],
    "fori_loop": lambda x: jax.lax.fori_loop(0, 1, loop_body, x),
    "while_loop": lambda x: jax.lax.while_loop(less_than_one, while_body, (0, x))[1],
    "cond": lambda x: jax.lax.cond(x > 0, times_w, times_w_too, x),
    "switch": lambda x: jax.lax.switch(jnp.int32(0), [times_w, times_w_too], x),
    "map": lambda x: jax.lax.map(times_w, x[None])[0],
    "vmap": lambda x: vmapped(x[None])[0],
    "grad": lambda x: jax.grad(lambda x: x * x * w / 2)(x),
    "grad of jit": lambda x: jax.value_and_grad(jitted)(x)[0],
    "jit of grad": jitted_gradient,
    "jvp": lambda x: jax.jvp(jitted, (x,), (x,))[1],
    "linearize": lambda x: jax.linearize(jitted, x)[0],
    "mr.scan": lambda x: mr.scan(scan_body, x, length=1)[0],
    "mr.fori_loop": lambda x: mr.fori_loop(0, 1, loop_body, x),
    "mr.cond": lambda x: mr.cond(x > 0, times_w, times_w_too, x),
    "mr.value_and_grad": lambda x: mr.value_and_grad(lambda: jitted(x), w)()[0],
    "mr.grad": lambda x: mr.grad(lambda: jitted_twice(x), w)() * w,
}


def read_write_read(x, names):
    """For each reader: what it reads before, between and after two writes."""
    seen = {}
    for name in names:
        read = READERS[name]
        w.assign(3.0)
        before = read(x)
        w.assign(w + 1)
        between = read(x)
        w.assign(w * 2)
        seen[name] = (before, between, read(x))
    return seen


def read_only(x):
    return {name: read(x) for name, read in READERS.items()}


@pytest.mark.slow
def test_a_helper_that_reads_a_variable_sees_its_value_of_the_moment():
    compiled, names = mr.function(read_write_read), tuple(READERS)
    for seen in (STRATEGY.run(read_write_read, args=(TEN, names)), compiled(TEN, names), compiled(TEN, names)):
        assert [name for name in names if tuple(map(float, seen[name])) != (30.0, 40.0, 80.0)] == []
    with mr.eager():
        for _ in range(2):
            seen = STRATEGY.run(read_write_read, args=(TEN, ("jit", "mr.value_and_grad")))
            assert {tuple(map(float, values)) for values in seen.values()} == {(30.0, 40.0, 80.0)}


def test_a_helper_that_reads_a_variable_sees_changes_between_steps():
    for value in (4.0, 5.0):
        w.assign(value)
        assert {name: float(x) for name, x in STRATEGY.run(read_only, args=(TEN,)).items()} == dict.fromkeys(READERS, 10 * value)


def test_such_a_helper_works_in_mr_value_and_grad_outside_of_everything():
    u = variable(2.0)

    @jax.jit
    def helper(x):
        return x * u * w

    for value in (3.0, 5.0):
        u.assign(value)
        w.assign(1.0)
        loss, gradient = mr.value_and_grad(lambda: helper(10.0), w)()
        assert (float(loss), float(gradient)) == (10 * value, 10 * value)


# -- transformations that do not know about variables

BAKING = {
    "jit": lambda: jax.jit(lambda x: x * w)(1.0),
    "jit, numpy()": lambda: jax.jit(lambda x: x * w.numpy())(1.0),
    "jit, float": lambda: jax.jit(lambda x: x * float(w))(1.0),
    "jit, index": lambda: jax.jit(lambda x: x * w[...])(1.0),
    "jit of a helper": lambda: jitted(1.0),
    "scan": lambda: jax.lax.scan(scan_body, 1.0, jnp.zeros(2)),
    "fori_loop": lambda: jax.lax.fori_loop(0, 2, loop_body, 1.0),
    "cond": lambda: jax.lax.cond(True, times_w, times_w, 1.0),
    "eval_shape": lambda: jax.eval_shape(times_w, 1.0),
    "make_jaxpr": lambda: jax.make_jaxpr(times_w)(1.0),
    "jit of mr.scan": lambda: jax.jit(lambda x: mr.scan(scan_body, x, length=1)[0])(1.0),
    "jit of mr.fori_loop": lambda: jax.jit(lambda x: mr.fori_loop(0, 1, loop_body, x))(1.0),
    "jit of mr.cond": lambda: jax.jit(lambda x: mr.cond(x > 0, times_w, times_w_too, x))(1.0),
    "jit of mr.grad": lambda: jax.jit(lambda x: mr.grad(lambda: x * w, w)())(1.0),
    "jit of mr.function": lambda: jax.jit(mr.function(times_w))(1.0),
    "jit of run": lambda: jax.jit(lambda x: STRATEGY.run(times_w, args=(x,)))(1.0),
}
LEAKING = {
    "jit": lambda: jax.jit(lambda x: w.assign(x).value)(2.0),
    "vmap": lambda: jax.vmap(lambda x: w.assign(x).value)(jnp.ones(2)),
    "grad": lambda: jax.grad(lambda x: w.assign(x).value)(2.0),
    "scan": lambda: jax.lax.scan(lambda c, x: (w.assign(x).value, None), 1.0, jnp.ones(2)),
    "cond": lambda: jax.lax.cond(True, lambda: w.assign(2.0).value, lambda: jnp.float32(0)),
    "jit of mr.scan": lambda: jax.jit(lambda x: mr.scan(lambda c, _: (w.assign(c).value, None), x, length=1)[0])(2.0),
}


def test_a_read_that_would_be_baked_in_says_what_to_use():
    for name, read in BAKING.items():
        with pytest.raises(mr.ContextError, match=r"'w' was read at .*test_lift\.py:\d+ .*mr\.function instead of jax\.jit"):
            read(), pytest.fail(name)


def test_a_write_that_would_leak_says_what_to_use():
    w.assign(1.0)
    for name, write in LEAKING.items():
        with pytest.raises(mr.ContextError, match=r"'w' was (written|read) at .*test_lift\.py:\d+ .*mr\.scan instead"):
            write(), pytest.fail(name)
    assert float(w) == 1.0


def test_reads_that_bake_nothing_in_work():
    w.assign(3.0)
    assert jax.vmap(lambda x: w * x)(jnp.ones(2)).tolist() == [3.0, 3.0]
    assert float(jax.grad(lambda x: w * x)(1.0)) == 3.0
    assert float(jax.jit(lambda value: value * 2)(w)) == 6.0
    assert float(jax.grad(lambda value: value**2)(w)) == 6.0
    assert jax.jit(lambda x: x.reshape(w.shape))(jnp.ones(())) == 1.0


WRITES_IN_A_STEP = {
    "jit": lambda x: jax.jit(lambda x: w.assign(x).value)(x),
    "vmap": lambda x: jax.vmap(lambda x: w.assign(x).value)(jnp.ones(2)),
    "grad": lambda x: jax.grad(lambda x: w.assign(x).value)(x),
    "cond": lambda x: jax.lax.cond(x > 0, lambda: w.assign(2.0).value, lambda: x),
    "scan": lambda x: jax.lax.scan(lambda c, x: (w.assign(x).value, None), x, jnp.ones(2)),
    "while_loop": lambda x: jax.lax.while_loop(lambda c: c < 1, lambda c: w.assign(c) + 1, x),
    "checkpoint": lambda x: jax.checkpoint(lambda x: w.assign(x).value)(x),
}


def test_a_write_under_a_transformation_inside_a_step_is_refused():
    w.assign(1.0)
    for name, write in WRITES_IN_A_STEP.items():
        for compiled in (lambda fn: STRATEGY.run(fn, args=(TEN,)), lambda fn: mr.function(fn)(TEN)):
            with pytest.raises(mr.ContextError, match=r"'w' was written at .*inside the step.*mr\.scan"):
                compiled(write), pytest.fail(name)
    assert float(w) == 1.0


MAKERS = [lambda x: mr.Variable(x), lambda x: mr.Variable(1.0), lambda x: mr.Optimizer(optax.sgd(1.0), [w])]
TRACES = [
    lambda make: STRATEGY.run(make, args=(TEN,)),
    lambda make: mr.function(make)(TEN),
    lambda make: mr.scan(lambda c, x: (make(x), None), None, jnp.ones(2)),
    lambda make: jax.jit(lambda x: make(x) and None)(TEN),
]


def test_state_is_not_made_inside_a_trace():
    for make in MAKERS:
        for trace in TRACES:
            with pytest.raises(mr.ContextError, match=r"created inside a step|read at .*jit"):
                trace(make)
    for transform in (jax.grad, lambda fn: lambda x: jax.vmap(fn)(x[None])):
        with pytest.raises(mr.ContextError, match=r"created inside a step or another traced function"):
            transform(lambda x: mr.Variable(x, name="v").value)(jnp.float32(1))


# -- the trace


def lifted_of(step):
    return lift.trace(lambda _: step(), [], Frame(None, None), lambda v: v.shape, step).lifted()


def test_a_variable_that_is_read_inside_a_loop_a_derivative_or_a_checkpoint_is_an_operand_of_the_step():
    a, b, c, d = (variable(float(i)) for i in range(4))

    @jax.jit
    def scanned(x):
        return jax.lax.scan(lambda carry, _: (carry + a, carry * b), x, None, length=2)

    def step():
        inner = jax.checkpoint(lambda x: jnp.sum(x * c) + scanned(x)[0])
        gradient = jax.vmap(jax.grad(inner))(jnp.ones(3))
        return jax.lax.cond(gradient[0] > 0, lambda: d + 1.0, lambda: a + 0.0), gradient

    lifted = lifted_of(step)
    assert set(lifted.read_only) == {a, b, c, d} and lifted.written == ()
    names = {equation.primitive.name for equation in jaxprs.all_equations(lifted.closed.jaxpr)}
    assert not any("operand" in name for name in names) and len(lifted.closed.jaxpr.invars) == 4
    assert STRATEGY.run(step)[0] == 4.0 and STRATEGY.run(step)[1].tolist() == [3.0] * 3


def test_an_assignment_from_anywhere_does_not_compile_again(strategy2):
    v, count = variable(np.zeros(4, np.float32), strategy2), variable(0, strategy2, synchronization="on_read", aggregation="sum")

    def step(x):
        count.assign_add(1)
        return v.assign_add(x).value

    compiled, x = mr.function(step), np.ones(4, np.float32)
    elsewhere = jax.device_put(jnp.ones(4), jax.devices()[5])
    for value in (x, jnp.ones(4), elsewhere, v.value, strategy2.run(step, args=(x,)), compiled(x), np.ones(4), [1] * 4):
        v.assign(value)
        count.assign(3)
        strategy2.run(step, args=(x,))
        compiled(x)
    [program] = strategy2._steps.programs
    assert program.compiled._cache_size() == 1
    assert next(reversed(list(function._programs))).compiled._cache_size() == 1


def test_variables_are_read_and_written_in_their_right_roles():
    a, b, unused = (variable(float(i)) for i in range(3))

    def step():
        a.assign(a + b)
        return unused.shape

    lifted = lifted_of(step)
    assert (lifted.written, lifted.read_only, lifted.variables) == ((a,), (b,), (a, b))
    assert lifted.write_lines[0].endswith(f"test_lift.py:{step.__code__.co_firstlineno + 1}")
    assert len(lifted.closed.jaxpr.invars) == 2


def test_what_a_step_does_only_when_it_runs_eagerly_is_an_error():
    nothing, read, write = (lambda: jnp.float32(0)), (lambda: w.value), (lambda: w.assign(5.0).value)
    for first, second in ((nothing, read), (nothing, write), (read, write)):
        ways = iter((first, second))
        w.assign(1.0)
        with pytest.raises(mr.ContextError, match=r"'w' was used when .*, but not when it was traced.*do the same"), mr.eager():
            STRATEGY.run(lambda ways=ways: next(ways)())
        assert float(w) == 1.0


def test_a_closed_over_numpy_array_is_of_the_moment_of_the_trace_on_every_replica():
    memory = np.empty(4 * (1 << 20) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    mine = memory[start : start + 4 * (1 << 20)].view(np.float32)  # aligned, so that JAX would not copy it
    mine[:] = 1

    def step():
        return jnp.asarray(mine) + 0

    compiled = mr.function(step)
    assert (float(STRATEGY.run(step)[0]), float(compiled()[0])) == (1.0, 1.0)
    mine[:] = 2
    assert (float(STRATEGY.run(step)[0]), float(compiled()[0])) == (1.0, 1.0)


def test_nothing_traced_stays_behind():
    v = variable(1.0)

    def step(x):
        v.assign(x * w + v)
        return mr.value_and_grad(lambda: v * x, v)()

    with jax.checking_leaks():
        w.assign(2.0)
        assert [float(x) for x in STRATEGY.run(step, args=(TEN,))] == [210.0, 10.0]
    assert not isinstance(v._array, jax.core.Tracer)


# -- exceptions


class MyError(Exception):
    pass


CALLS = {
    "run": STRATEGY.run,
    "eager run": lambda fn: _eagerly(fn),
    "mr.function": lambda fn: mr.function(fn)(),
    "run in mr.function": lambda fn: mr.function(lambda: STRATEGY.run(fn))(),
    "mr.scan": lambda fn: mr.scan(lambda c, _: (fn(), None), None, length=2),
    "mr.scan in a step": lambda fn: STRATEGY.run(lambda: mr.scan(lambda c, _: (fn(), None), None, length=2)),
    "mr.cond": lambda fn: mr.cond(True, fn, fn),
    "mr.value_and_grad": lambda fn: mr.value_and_grad(fn, w)(),
    "merge_call": lambda fn: STRATEGY.run(lambda: mr.get_replica_context().merge_call(lambda _: fn())),
}


def _eagerly(fn):
    with mr.eager():
        return STRATEGY.run(fn)


def test_an_exception_comes_through_as_it_is_and_changes_nothing():
    w.assign(1.0)
    for call in CALLS.values():
        mine = MyError("mine")

        def step(mine=mine):
            w.assign(w + 1)
            raise mine

        with pytest.raises(MyError) as caught:
            call(step)
        assert caught.value is mine and mine.__cause__ is None and caught.traceback[-1].name == "step"
        assert float(w) == 1.0
        assert mr.get_replica_context() is not None  # the context is the default one again
    assert float(STRATEGY.run(lambda: w.value)) == 1.0


# -- Ctrl-C


def many_variables(strategy, count):
    """Variables, all of the same value, and two ways to add one to each."""
    made = [variable(np.zeros(4, np.float32), strategy) for _ in range(count)]

    def step():
        for v in made:
            v.assign_add(jnp.ones(4))

    compiled = mr.function(step)
    strategy.run(step)
    compiled()
    return made, (lambda: strategy.run(step), compiled)


def values_of(made):
    return {float(v[0]) for v in made}


def test_ctrl_c_in_a_loop_of_steps_loses_no_variable(strategy2):
    made, ways = many_variables(strategy2, 50)
    armed = []

    def interrupt(*_):
        if armed:  # once for each time: a second one would end all tests
            armed.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)  # SIGALRM is the time limit of the test
    delays = np.random.default_rng(0).uniform(0.0005, 0.005, 20)
    gc.disable()  # jax is called by it, and an exception that a signal raises there is lost
    try:
        for number, delay in enumerate(delays):
            with pytest.raises(KeyboardInterrupt):
                armed.append(number)
                signal.setitimer(signal.ITIMER_VIRTUAL, delay)
                deadline = time.monotonic() + 30
                while time.monotonic() < deadline:
                    ways[number % 2]()
            assert len(values_of(made)) == 1
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_ctrl_c_after_any_call_in_a_step_loses_no_variable():
    made, ways = many_variables(STRATEGY, 3)

    def check():
        assert len(values_of(made)) == 1

    for way in ways:
        assert ctrl_c.after_each_call(way, check) > 30


# -- the text by which workers compare their programs


def described(step, **of_variable) -> str:
    """The text of a step's program; it is given a new variable of a new strategy."""
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    v = variable(np.ones(3, of_variable.pop("dtype", "float32")), strategy, **of_variable)
    strategy.run(lambda: step(v))
    [program] = strategy._steps.programs
    return program.lifted.describe().replace(f"'{v._spec.number}: ", "'")


def test_a_program_is_described_by_what_it_computes_and_of_which_variables():
    def write(v):
        v.assign(jax.nn.relu(v.value) * 2)

    def write_otherwise(v):
        v.assign(jax.nn.relu(v.value) * 3)

    def only_read(v):
        return jax.lax.reduce(v.value, np.float32(0), lambda a, b: a + b, (0,))

    on_read = {"synchronization": "on_read", "aggregation": "sum"}
    same = described(write, name="a")
    assert described(write, name="another") == same, "names do not count"
    assert not re.search("0x[0-9a-f]{6}", same + described(only_read)), "addresses are others in every process"
    others = [
        described(only_read),
        described(only_read, **on_read),
        described(write_otherwise),
        described(write, dtype="float16"),
    ]
    assert len({same, *others}) == 5


def test_a_program_is_described_by_which_of_equal_variables_it_uses():
    pair = [variable(np.ones(3), STRATEGY) for _ in range(2)]
    texts = []
    for used in pair:
        texts.append(lifted_of(lambda used=used: [used.assign_add(jnp.ones(3)), None][1]).describe())
    assert texts[0] != texts[1]
    assert texts[0].replace(f"'{pair[0]._spec.number}: ", f"'{pair[1]._spec.number}: ") == texts[1]


def test_a_program_is_described_by_the_arrays_that_inner_functions_close_over():
    def step_with(table):
        inner = jax.jit(lambda x: x * table)
        return lambda v: v.assign(jax.lax.cond(v.value[0] > 0, inner, lambda x: x, v.value))

    same = described(step_with(np.arange(3.0)))
    assert described(step_with(np.arange(3.0))) == described(step_with(jnp.arange(3.0))) == same
    assert described(step_with(np.array([0.0, 1.0, 2.5]))) != same


def test_a_program_is_described_by_settings_that_change_its_numbers():
    def step(v):
        return v.value @ v.value

    same = described(step)
    with jax.default_matmul_precision("highest"):
        assert described(step) != same
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        assert described(step) != same
