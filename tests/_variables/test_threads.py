"""Threads that read and write variables: whole values for readers, turns for writers, and nothing lost when a callback fails."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import in_threads

import mirrored as mr
from mirrored._variables import storage

ROWS = jax.ShapeDtypeStruct((3,), np.float32)


def variables(strategy, *names, **how):
    with strategy.scope():
        return [mr.Variable(np.zeros(3, np.float32), name=name, **how) for name in names]


def test_readers_see_whole_values_and_writers_take_turns(strategy2, tmp_path):
    """Steps, functions, assignments and saves of several threads; each adds one to all elements, so no value is mixed."""
    w, u, seen = variables(strategy2, "w", "u", "seen")
    [count] = variables(strategy2, "count", synchronization="on_read", aggregation="sum")
    checkpoint = mr.Checkpoint(tmp_path, state={"w": w, "u": u}, max_to_keep=1)
    is_over, rounds = threading.Event(), 8

    def step():
        for variable in (w, u):
            variable.assign_add(jnp.ones(3))
        count.assign_add(jnp.ones(3))

    def other():
        w.assign_add(u - u + 1)
        seen.assign_add(jnp.ones(3))

    function = mr.function(lambda: strategy2.run(step))

    def train():
        for _ in range(rounds):
            strategy2.run(step)
            strategy2.run(other)

    def assign():
        for _ in range(rounds):
            function()
            seen.assign_add(np.ones(3, np.float32))
            strategy2.run(other)
        with mr.eager():
            strategy2.run(other)

    def watch():
        last, number = -1.0, 0
        while not is_over.is_set():
            for value in (w.numpy(), np.asarray(w.value), np.asarray(w + 0), np.asarray(strategy2.reduce("mean", w))):
                assert (value == value[0]).all() and value[0] >= last, (value, last)
                last = value[0]
            float(w[0]), repr(w), count.numpy(), list(w), strategy2.local_results(u), strategy2.assert_mirrored()
            number += 1
            if number <= 3:
                checkpoint.save(number)
                checkpoint.wait()

    def work():
        try:
            in_threads(train, train, assign)
        finally:
            is_over.set()

    strategy2.run(step), strategy2.run(other)
    in_threads(work, watch)
    steps = 1 + 3 * rounds  # three threads, of which one by an mr.function
    others = 1 + 3 * rounds + 1
    assert (w.numpy() == steps + others).all() and (u.numpy() == steps).all() and (seen.numpy() == others + rounds).all()
    assert (count.numpy() == steps * strategy2.num_replicas_in_sync).all()
    saved = mr.Checkpoint(tmp_path, state={"w": w, "u": u})
    assert saved.restore_latest() is not None
    assert (w.numpy() == w.numpy()[0]).all() and u.numpy()[0] <= steps
    assert not storage.claims and not storage.borrowed


def test_what_a_reader_holds_is_not_overwritten_and_costs_a_copy_only_meanwhile(strategy2):
    [w] = variables(strategy2, "w")
    step = lambda: [w.assign_add(jnp.ones(3))][1:]  # noqa: E731
    strategy2.run(step)
    values = []

    def slow(value):
        in_threads(lambda: strategy2.run(step))
        values.append(np.array(value))

    w._use(slow)
    assert values[0].tolist() == [1] * 3 and w.numpy().tolist() == [2] * 3
    before = w._array
    strategy2.run(step)
    assert before.is_deleted()  # so no copy was made


def test_a_host_callback_reads_all_variables_and_writes_those_that_its_step_does_not(strategy2):
    w, u, best = variables(strategy2, "w", "u", "best")
    read = []

    def callback(x):
        read.append((w.numpy()[0], u.numpy()[0], np.asarray(best.value)[0]))
        best.assign(np.array(x))
        return x

    def step():
        value = jax.experimental.io_callback(callback, ROWS, w.value + 1)
        w.assign(mr.get_replica_context().all_reduce("mean", value))

    for number in range(3):
        strategy2.run(step)
        assert {values[:2] for values in read} == {(number, 0)}, "what they were before the step"
        assert best.numpy().tolist() == w.numpy().tolist() == [number + 1] * 3
        read.clear()

    def into_its_own(x):
        with pytest.raises(mr.ContextError, match=r"a host callback writes 'w', which the step .* Return the new value"):
            w.assign(np.array(x))
        read.append("refused")
        return x

    def step_into_its_own():
        value = jax.pure_callback(into_its_own, ROWS, w.value)
        w.assign(mr.get_replica_context().all_reduce("mean", value))

    strategy2.run(step_into_its_own)
    assert set(read) == {"refused"} and w.numpy().tolist() == [3] * 3
    assert not storage.claims


@pytest.mark.parametrize("kind", ["pure", "ordered", "debug", "function"])
def test_a_callback_that_raises_changes_nothing(strategy2, kind):
    w, u = variables(strategy2, "w", "u")
    beside = mr.MirroredStrategy(strategy2.devices)
    [z] = variables(beside, "z")
    is_failing = True

    def callback(x):
        if is_failing:
            raise ZeroDivisionError("in the callback")
        return x

    def step():
        if kind == "debug":
            value = w.value + 1
            jax.debug.callback(callback, value)
        elif kind == "pure":
            value = jax.pure_callback(callback, ROWS, w.value + 1)
        else:
            value = jax.experimental.io_callback(callback, ROWS, w.value + 1, ordered=kind == "ordered")
        w.assign(mr.get_replica_context().all_reduce("mean", value))
        u.assign_add(jnp.ones(3))

    def other():
        z.assign_add(jnp.ones(3))
        if kind == "ordered":
            jax.experimental.io_callback(lambda x: None, None, z.value, ordered=True)

    run = mr.function(lambda: strategy2.run(step)) if kind == "function" else lambda: strategy2.run(step)
    taken = w.value
    for number in range(1, 3):
        is_failing = True
        with pytest.raises(Exception, match="in the callback"):
            run()
        assert w.numpy().tolist() == u.numpy().tolist() == [number - 1] * 3
        beside.run(other)
        is_failing = False
        run()
        assert w.numpy().tolist() == u.numpy().tolist() == z.numpy().tolist() == [number] * 3
    assert taken.tolist() == [0] * 3
    jax.effects_barrier()


def test_what_a_failing_program_has_overwritten_is_named_at_each_use_until_it_is_restored(strategy2, tmp_path):
    w, u, other = variables(strategy2, "w", "u", "other")
    checkpoint = mr.Checkpoint(tmp_path, state={"w": w, "u": u})

    def step(x):
        w.assign_add(jnp.log(x))
        u.assign_add(jnp.ones(3))

    fine, bad = np.ones(3, np.float32), np.full(3, -1, np.float32)
    strategy2.run(step, args=(fine,))
    checkpoint.save(1)
    checkpoint.wait()
    taken = u.value
    strategy2.run(step, args=(fine,))
    with jax.debug_nans(True), pytest.raises(RuntimeError) as failed:
        strategy2.run(step, args=(bad,))
    assert "the value of 'w', 'u' is lost" in "".join(failed.value.__notes__)
    for use in (
        w.numpy, lambda: w.value, lambda: u + 1, lambda: u.assign_add(fine), lambda: strategy2.run(step, args=(fine,)),
        lambda: checkpoint.save(2), lambda: strategy2.reduce("sum", w), lambda: mr.function(step)(fine), lambda: float(u[0]),
        lambda: strategy2.barrier("end"), lambda: strategy2.run(lambda: w + other), lambda: strategy2.local_results(w),
    ):  # fmt: skip
        with pytest.raises(mr.VariableLostError, match=r"the value of 'w', 'u' is lost: .*RuntimeError.*restore_latest\(\)"):
            use()
    assert "is lost" in repr(w)
    assert other.numpy().tolist() == [0] * 3 and taken.tolist() == [1] * 3
    strategy2.run(lambda: [other.assign_add(jnp.ones(3))][1:])
    u.assign(fine)
    assert u.numpy().tolist() == [1] * 3
    assert checkpoint.restore_latest() == 1
    strategy2.run(step, args=(fine,))
    assert w.numpy().tolist() == [0] * 3 and u.numpy().tolist() == [2] * 3
    del failed
    gc.collect()
