"""A program that does not fit is refused before it has run, with what takes the memory. The devices here tell a small one."""

import jax
import numpy as np
import optax
import pytest
from strategies import strategy_of, variable

import mirrored as mr
from mirrored import testing
from mirrored._program.memory import Memory
from mirrored._replicas.mesh import ReplicaMesh

ROWS, WIDTH = 64, 512


def train(strategy, **options):
    w = variable(np.zeros((WIDTH, WIDTH), np.float32), strategy, name="w")
    optimizer = mr.Optimizer(optax.adam(0.1), [w], **options)

    def step(x):
        loss, gradients = mr.value_and_grad(lambda: jax.numpy.square(jax.numpy.sin(x @ w) @ w).mean(-1), [w])()
        optimizer.apply_gradients(gradients)
        return loss

    [batch] = strategy.distribute_dataset([np.ones((ROWS * strategy.num_replicas_in_sync, WIDTH), np.float32)])
    return w, lambda: strategy.reduce("sum", strategy.run(step, args=(batch,)))


def test_what_is_in_parts_and_what_may_be_is_counted():
    strategy = strategy_of(4, storage="parts")
    kinds = ((WIDTH, "parts"), (WIDTH, "whole"), (1, "parts"))
    variables = [variable(np.zeros((WIDTH, columns), np.float32), strategy, storage=how) for columns, how in kinds]
    parts, whole, small = (v._slot.array for v in variables)
    found = Memory.of(None, [True, False, False], ([parts, whole], [small], [], []))
    each = 4 * WIDTH * WIDTH
    assert (found.variables, found.whole, found.saved) == (each // 4, each, each - each // 4)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_step_that_does_not_fit_says_what_takes_the_memory_and_changes_nothing(num_replicas, monkeypatch):
    strategy = strategy_of(num_replicas)
    w, run = train(strategy)
    monkeypatch.setattr(ReplicaMesh, "memory_limit", lambda mesh: 4 * WIDTH * WIDTH)
    with pytest.raises(mr.DeviceError, match=r"step needs \d+\.\d MiB .* which has 1\.0 MiB: 1\.0 MiB trained variables") as told:
        run()
    message = str(told.value)
    assert "2.0 MiB an optimizer's and other state" in message
    assert "128.0 KiB arguments" in message and "temporaries" in message and "shard_state=True" in message
    assert not w.numpy().any()
    monkeypatch.setattr(ReplicaMesh, "memory_limit", lambda mesh: 2**30)
    assert float(run()) == 0 and float(run()) == 0


def test_a_step_that_does_not_even_compile_says_the_same(strategy2, monkeypatch):
    """On a GPU XLA tries kernels while it compiles, on a TPU it knows the memory."""
    w, run = train(strategy2)
    monkeypatch.setattr(ReplicaMesh, "memory_limit", lambda mesh: 2**30)
    words = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 33.22GiB\nSource Location Trace"

    def compile(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError(words)

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile)
        expected = r"step does not fit into a device, which has 1\.0 GiB.* 33.22GiB\. Known so far: 1.0 MiB trained variables"
        with pytest.raises(mr.DeviceError, match=expected) as told:
            run()
        assert "nothing has changed" in str(told.value) and "Trace" not in str(told.value)
        with pytest.raises(mr.DeviceError, match=r"33.22GiB\. Known so far: no arguments\. It was not run"):
            mr.function(lambda: jax.numpy.ones(3))()
        words = "INTERNAL: another fault"
        with pytest.raises(jax.errors.JaxRuntimeError, match="another fault"):
            run()
    assert not w.numpy().any()
    assert float(run()) == 0


def test_it_is_compiled_once_and_asked_before_the_first_run_only(strategy2, monkeypatch):
    asked = []
    monkeypatch.setattr(ReplicaMesh, "memory_limit", lambda mesh: asked.append(mesh) or 2**30)
    _, run = train(strategy2)
    with testing.count_programs() as count:
        run()
        run()
        run()
    assert len(asked) == 1 and count.count == 1


def test_a_part_of_the_state_counts_as_a_part(strategy2, monkeypatch):
    monkeypatch.setattr(ReplicaMesh, "memory_limit", lambda mesh: 1)
    _, run = train(strategy2, shard_state=True)
    with pytest.raises(mr.DeviceError, match=r"1\.0 MiB trained variables, 1\.0 MiB an optimizer's and other state"):
        run()
