"""Lifting: a step becomes a pure function. No stale value, no leaked tracer, nothing lost when it stops halfway."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import nightly
from strategies import TWO, variable

import mirrored as mr
from mirrored._program import lift
from mirrored._program.call import take_apart
from mirrored._replicas.frames import Frame
from mirrored._transforms import function

pytestmark = [pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning"), pytest.mark.usefixtures("in_numpy")]

TEN = np.float32(10)


# -- inner caches: functions that JAX traces once and remembers

w = variable(1.0, name="w")  # at module level, where everybody's helper functions live


def times_w(x):
    return x * w


def times_w_too(x):
    return w * x


def less_than_one(state):
    return state[0] < 1


scan_body = lambda carry, _: (carry * w, None)  # noqa: E731
loop_body = lambda i, carry: carry * w  # noqa: E731
while_body = lambda state: (state[0] + 1, state[1] * w)  # noqa: E731
jitted, with_jvp, with_vjp = jax.jit(lambda x: x * w), jax.custom_jvp(lambda x: x * w), jax.custom_vjp(lambda x: x * w)
with_jvp.defjvp(lambda primals, tangents: (primals[0] * w, tangents[0] * w))
with_vjp.defvjp(lambda x: (x * w, None), lambda _, g: (g * w,))
jitted_twice = jax.jit(lambda x: jitted(x) + 0)
jitted_gradient = jax.jit(jax.grad(lambda x: jitted(x) * x / 2))
rematerialised, vmapped = jax.checkpoint(lambda x: x * w), jax.vmap(times_w)

READERS = {
    "jit": jitted,
    "checkpoint": rematerialised,
    "jit of checkpoint": jax.jit(jax.checkpoint(times_w)),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "scan": lambda x: jax.lax.scan(scan_body, x, jnp.zeros(1))[0],
    "fori_loop": lambda x: jax.lax.fori_loop(0, 1, loop_body, x),
    "while_loop": lambda x: jax.lax.while_loop(less_than_one, while_body, (0, x))[1],
    "cond": lambda x: jax.lax.cond(x > 0, times_w, times_w_too, x),
    "switch": lambda x: jax.lax.switch(jnp.int32(0), [times_w, times_w_too], x),
    "vmap": lambda x: vmapped(x[None])[0],
    "grad": lambda x: jax.grad(lambda x: x * x * w / 2)(x),
    "jit of grad": jitted_gradient,
    "jvp": lambda x: jax.jvp(jitted, (x,), (x,))[1],
    "mr.scan": lambda x: mr.scan(scan_body, x, length=1)[0],
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


@pytest.mark.parametrize("names", [("jit",), *nightly((tuple(READERS),))], ids=["jit", "all"])
def test_a_helper_that_reads_a_variable_sees_its_value_of_the_moment(names):
    compiled = mr.function(read_write_read)
    for seen in (TWO.run(read_write_read, args=(TEN, names)), compiled(TEN, names), compiled(TEN, names)):
        assert [name for name in names if tuple(map(float, seen[name])) != (30.0, 40.0, 80.0)] == []
    with mr.eager():  # where what JAX has remembered of the programs may not be used
        seen = TWO.run(read_write_read, args=(TEN, ("jit", "mr.value_and_grad")))
        assert {tuple(map(float, values)) for values in seen.values()} == {(30.0, 40.0, 80.0)}


def test_a_helper_that_reads_a_variable_sees_changes_between_steps():
    for value in (4.0, 5.0):
        w.assign(value)
        assert {name: float(x) for name, x in TWO.run(read_only, args=(TEN,)).items()} == dict.fromkeys(READERS, 10 * value)


# -- transformations that do not know about variables

BAKING = {
    "jit": lambda: jax.jit(lambda x: x * w)(1.0),
    "jit, numpy()": lambda: jax.jit(lambda x: x * w.numpy())(1.0),
    "jit of a helper": lambda: jitted(1.0),
    "scan": lambda: jax.lax.scan(scan_body, 1.0, jnp.zeros(2)),
    "cond": lambda: jax.lax.cond(True, times_w, times_w, 1.0),
    "eval_shape": lambda: jax.eval_shape(times_w, 1.0),
    "make_jaxpr": lambda: jax.make_jaxpr(times_w)(1.0),
    "jit of mr.scan": lambda: jax.jit(lambda x: mr.scan(scan_body, x, length=1)[0])(1.0),
    "jit of mr.cond": lambda: jax.jit(lambda x: mr.cond(x > 0, times_w, times_w_too, x))(1.0),
    "jit of mr.grad": lambda: jax.jit(lambda x: mr.grad(lambda: x * w, w)())(1.0),
    "jit of mr.function": lambda: jax.jit(mr.function(times_w))(1.0),
    "jit of run": lambda: jax.jit(lambda x: TWO.run(times_w, args=(x,)))(1.0),
}
LEAKING = {
    "jit": lambda: jax.jit(lambda x: w.assign(x).value)(2.0),
    "vmap": lambda: jax.vmap(lambda x: w.assign(x).value)(jnp.ones(2)),
    "grad": lambda: jax.grad(lambda x: w.assign(x).value)(2.0),
    "cond": lambda: jax.lax.cond(jnp.float32(1) > 0, lambda: w.assign(2.0).value, lambda: jnp.float32(0)),
    "scan": lambda: jax.lax.scan(lambda c, x: (w.assign(x).value, None), 1.0, jnp.ones(2)),
    "while_loop": lambda: jax.lax.while_loop(lambda c: c < 1, lambda c: w.assign(c) + 1, 0.0),
    "checkpoint": lambda: jax.checkpoint(lambda x: w.assign(x).value)(2.0),
}
HERE = r"at .*test_lift\.py:\d+ "


def test_a_read_that_would_be_baked_in_says_what_to_use():
    for name, read in BAKING.items():
        with pytest.raises(mr.ContextError, match=rf"'w' was read {HERE}.*mr\.function instead of jax\.jit"):
            read(), pytest.fail(name)


def test_a_write_that_would_leak_says_what_to_use():
    w.assign(1.0)
    in_jit = lambda: jax.jit(lambda x: mr.scan(lambda c, _: (w.assign(c).value, None), x, length=1)[0])(2.0)  # noqa: E731
    for name, write in {**LEAKING, "jit of mr.scan": in_jit}.items():
        with pytest.raises(mr.ContextError, match=rf"'w' was (written|read) {HERE}.*mr\.scan instead"):
            write(), pytest.fail(name)
    for name, write in LEAKING.items():
        for compiled in (TWO.run, lambda fn: mr.function(fn)()):
            with pytest.raises(mr.ContextError, match=rf"'w' was written {HERE}.*inside the step.*mr\.scan"):
                compiled(write), pytest.fail(name)
    assert float(w) == 1.0


def test_reads_that_bake_nothing_in_work():
    w.assign(3.0)
    assert jax.vmap(lambda x: w * x)(jnp.ones(2)).tolist() == [3.0, 3.0]
    assert float(jax.grad(lambda x: w * x)(1.0)) == 3.0
    assert float(jax.jit(lambda value: value * 2)(w)) == 6.0
    assert float(jax.grad(lambda value: value**2)(w)) == 6.0
    assert jax.jit(lambda x: x.reshape(w.shape))(jnp.ones(())) == 1.0


# -- the trace


def lifted_of(step):
    return lift.trace(take_apart(step, (), {}), [], Frame(None, None)).lifted()


def test_a_variable_is_an_operand_once_whether_a_step_reads_it_or_writes_it_too():
    read, written, unused = (variable(float(i)) for i in range(3))
    lifted = lifted_of(lambda: [written.assign(jax.jit(lambda: written + read)()), unused.shape][1:])
    assert (lifted.written, lifted.read_only, len(lifted.closed.jaxpr.invars)) == ((written,), (read,), 2)


@pytest.mark.by_xla
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
    assert next(reversed(list(function._outside.programs))).compiled._cache_size() == 1


def test_what_a_step_does_only_when_it_runs_eagerly_is_an_error():
    nothing, read, write = (lambda: jnp.float32(0)), (lambda: w.value), (lambda: w.assign(5.0).value)
    for first, second in ((nothing, read), (nothing, write), (read, write)):
        ways = iter((first, second))
        w.assign(1.0)
        with pytest.raises(mr.ContextError, match=r"'w' was used when .*, but not when it was traced.*do the same"), mr.eager():
            TWO.run(lambda ways=ways: next(ways)())
        assert float(w) == 1.0


def test_a_closed_over_numpy_array_is_of_the_moment_of_the_trace_on_every_replica():
    memory = np.empty(4 * (1 << 20) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    mine = memory[start : start + 4 * (1 << 20)].view(np.float32)  # aligned, so that JAX would not copy it
    mine[:] = 1

    def step():
        return jnp.asarray(mine) + 0

    compiled = mr.function(step)
    assert (float(TWO.run(step)[0]), float(compiled()[0])) == (1.0, 1.0)
    mine[:] = 2
    assert (float(TWO.run(step)[0]), float(compiled()[0])) == (1.0, 1.0)


def test_nothing_traced_stays_behind():
    v = variable(1.0)

    def step(x):
        v.assign(x * w + v)
        return mr.value_and_grad(lambda: v * x, v)()

    with jax.checking_leaks():
        w.assign(2.0)
        assert [float(x) for x in TWO.run(step, args=(TEN,))] == [210.0, 10.0]
    assert not isinstance(v._array, jax.core.Tracer)


# -- exceptions


class MyError(Exception):
    pass


def eagerly(fn):
    with mr.eager():
        return TWO.run(fn)


#: Each calls a function in some way; what follows " in " is a place in a step.
CALLS = {
    "run": TWO.run,
    "eager run": eagerly,
    "mr.function": lambda fn: mr.function(fn)(),
    "run in mr.function": lambda fn: mr.function(lambda: TWO.run(fn))(),
    "mr.scan": lambda fn: mr.scan(lambda c, _: (fn(), None), None, length=2),
    "mr.scan in a step": lambda fn: TWO.run(lambda: mr.scan(lambda c, _: (fn(), None), None, length=2)),
    "mr.cond": lambda fn: mr.cond(True, fn, fn),
    "mr.value_and_grad": lambda fn: mr.value_and_grad(fn, w)(),
    "merge_call": lambda fn: TWO.run(lambda: mr.get_replica_context().merge_call(lambda _: fn())),
    "eager merge_call": lambda fn: eagerly(lambda: mr.get_replica_context().merge_call(lambda _: fn())),
}
#: What JAX traces in a step, where nothing may be written.
PLACES = [
    lambda fn: jax.lax.fori_loop(0, 3, lambda i, y: fn(), TEN),
    lambda fn: jax.jit(fn)(),
    lambda fn: jax.grad(lambda x: fn())(TEN),
]


def test_an_exception_comes_through_as_it_is_and_changes_nothing():
    w.assign(1.0)
    taken, own = w.value, variable(0, synchronization="on_read", aggregation="sum")

    def raise_it(error):
        raise error

    def check(call, step_of):
        mine = MyError("mine")
        with pytest.raises(MyError) as caught:
            call(step_of(mine))
        assert caught.value is mine and mine.args == ("mine",) and mine.__cause__ is None
        assert caught.traceback[-1].name == "raise_it"
        assert (float(w), float(taken), int(own)) == (1.0, 1.0, 0)
        assert mr.get_replica_context().num_replicas_in_sync == 1  # the context is the default one again

    for call in CALLS.values():
        check(call, lambda error: lambda: [w.assign(w + 1), raise_it(error)])
    for call in (TWO.run, eagerly):
        for place in PLACES:
            check(call, lambda error, p=place: lambda: [w.assign(w + 1), own.assign_add(1), p(lambda: raise_it(error))])
    assert float(TWO.run(lambda: w.value)) == 1.0


# -- the text by which workers compare their programs


def described(step, **of_variable):
    """The text of a step's program; it is given a new variable of a new strategy."""
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    v = variable(np.ones(3, of_variable.pop("dtype", "float32")), strategy, **of_variable)
    strategy.run(lambda: step(v))
    [program] = strategy._steps.programs
    return program.lifted.describe().replace(f"'{v._spec.number} ", "'")


def writing(factor):
    return lambda v: v.assign(jax.nn.relu(v.value) * factor)


def reading(v):
    return jax.lax.reduce(v.value, np.float32(0), lambda a, b: a + b, (0,))


def with_table(table):
    inner = jax.jit(lambda x: x * table)
    return lambda v: v.assign(jax.lax.cond(v.value[0] > 0, inner, lambda x: x, v.value))


def test_a_program_is_described_by_what_it_computes_and_of_which_variables():
    same = described(writing(2), name="variable_3")
    assert described(writing(2), name="variable_14") == same, "workers need not count alike what has no name"
    assert not re.search("0x[0-9a-f]{6}", same + described(reading)), "addresses are others in every process"
    on_read = {"synchronization": "on_read", "aggregation": "sum"}
    named = described(writing(2), name="w")
    assert named != same and named.replace("w: ", "variable: ") == same, "a name is the same on all workers, so it is shown"
    others = [described(reading), described(reading, **on_read), described(writing(3)), described(writing(2), dtype="float16")]
    tables = [described(with_table(table)) for table in (np.arange(3.0), jnp.arange(3.0), np.array([0.0, 1.0, 2.5]))]
    assert tables[0] == tables[1] and len({same, *others, *tables}) == 7
    for setting in (
        jax.default_matmul_precision("highest"), jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
    ):  # fmt: skip
        with setting:
            assert described(writing(2)) != same, "settings that change the numbers"
    pair = [variable(np.ones(3)) for _ in range(2)]
    one, other = (lifted_of(lambda v=v: [v.assign_add(jnp.ones(3)), None][1]).describe() for v in pair)
    assert one != other and one.replace(f"'{pair[0]._spec.number} ", f"'{pair[1]._spec.number} ") == other


def test_a_variable_is_read_where_constants_are_computed_at_once(strategy2):
    """The first read makes an operand, which `jax.ensure_compile_time_eval` would compute."""
    v, x = variable(np.float32(3), strategy2), np.arange(4, dtype=np.float32)

    def step(x):
        with jax.ensure_compile_time_eval():
            double, table = v.value * 2, jnp.arange(4.0) * 2
            assert table.tolist() == [0, 2, 4, 6]
        v.assign(double)
        return jax.lax.fori_loop(0, 2, lambda i, c: c + double, x) + table

    for run in (strategy2.run, mr.function(strategy2.run)):
        v.assign(3.0)
        np.testing.assert_array_equal(run(step, args=(x,)), [12, 15, 18, 21])
        assert float(v) == 6
