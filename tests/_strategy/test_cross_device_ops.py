"""TensorFlow's names of `cross_device_ops` are accepted, and a function of the user's takes the place of sums."""

import contextlib
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import all_reduce, strategy_of, variable

import mirrored as mr
from mirrored._replicas.per_replica import carried_sums
from mirrored._strategy import strategies

pytestmark = pytest.mark.usefixtures("in_numpy")

NAMES = [mr.HierarchicalCopyAllReduce(), mr.HierarchicalCopyAllReduce(0), mr.ReductionToOneDevice()]


def maximum(values: list[Any]) -> Any:
    return functools.reduce(jnp.maximum, values)


def test_a_function_of_the_users_takes_the_place_of_the_sum() -> None:
    strategy = strategy_of(3, cross_device_ops=mr.ReductionToOneDevice("cpu:1", maximum))
    w, total = variable(0.0, strategy), variable(0.0, strategy, aggregation="sum")
    optimizer = mr.Optimizer(optax.sgd(1.0), w)

    def step(x: Any) -> Any:
        optimizer.apply_gradients(-x, aggregate="sum")
        total.assign(x)
        return {"max": all_reduce("sum", x), "mean": all_reduce("mean", x), "ints": all_reduce("mean", jnp.int32(7)), "own": x}

    x = strategy.distribute_values_from_function(lambda ctx: np.float32([3, 9, 6][ctx.replica_id_in_sync_group]))
    result = strategy.run(step, args=(x,))
    assert [float(result[key]) for key in ("max", "mean")] == [9.0, 3.0]
    np.testing.assert_allclose(result["ints"], 7 / 3)
    assert float(w.value) == 3.0 and float(total.value) == 18.0
    assert carried_sums(result["own"]) is None
    for reduce in (strategy.reduce, mr.function(lambda op, x: strategy.reduce(op, x))):
        assert float(reduce("sum", x)) == 9.0 and float(reduce("mean", x)) == 3.0
    assert float(strategy.reduce("sum", np.float32(4))) == 4.0, "a mirrored value is R times the same"
    rows = strategy.distribute_values_from_function(lambda ctx: np.arange(2.0) + ctx.replica_id_in_sync_group)
    assert float(strategy.reduce("sum", rows, axis=0)) == 5.0, "first over the rows of a replica, then over the replicas"
    assert float(strategy.run(lambda x: mr.get_strategy().reduce("mean", x, axis=0), args=(rows,))) == pytest.approx(5 / 6)
    merged = strategy.run(lambda x: mr.get_replica_context().merge_call(lambda s, x: s.reduce("sum", x), args=(x,)), args=(x,))
    assert float(merged) == 9.0


def test_a_function_that_returns_something_else_is_refused() -> None:
    for wrong in (lambda values: 1.0, jnp.stack, lambda values: None, lambda values: values[0].astype(jnp.int32)):
        strategy = strategy_of(2, cross_device_ops=mr.ReductionToOneDevice(accumulation_fn=wrong))
        for use in (lambda s: s.run(lambda: all_reduce("sum", jnp.ones(()))), lambda s: s.reduce("sum", jnp.ones(()))):
            with pytest.raises(TypeError, match=r"fn returned .* for 2 arrays float32\[\]; expected one array like them"):
                use(strategy)


def test_a_mean_with_weights_has_no_place_for_a_function() -> None:
    strategy = strategy_of(2, cross_device_ops=mr.ReductionToOneDevice(accumulation_fn=maximum))
    batch = next(iter(strategy.distribute_dataset(strategy.make_numpy_dataset(np.ones((3, 2), np.float32)).batch(3))))
    assert list(strategy.run(lambda x: all_reduce("sum", x.sum(0)), args=(batch,))) == [2.0, 2.0]
    step = lambda x, by_rows: mr.get_replica_context().all_reduce("mean", x.mean(0), by_rows)  # noqa: E731
    assert list(strategy.run(step, args=(batch, False))) == [0.5, 0.5]  # of the largest, divided by the replicas
    for by_rows in (None, True):
        with pytest.raises(mr.UnevenReplicasError, match=r"has an accumulation_fn, which knows no weights. Combine with 'sum'"):
            strategy.run(step, args=(batch, by_rows))


@pytest.mark.by_xla
def test_a_name_alone_changes_nothing() -> None:
    assert "adds up by" not in mr.MultiWorkerMirroredStrategy(cross_device_ops=NAMES[0]).explain()
    with pytest.raises(ValueError, match="which connects GPUs"):
        mr.MultiWorkerMirroredStrategy(cross_device_ops=mr.NcclAllReduce())
    for platform in ("gpu", "tpu"):
        mesh = SimpleNamespace(devices=[SimpleNamespace(platform=platform)])
        with contextlib.nullcontext() if platform == "gpu" else pytest.raises(ValueError, match="which connects GPUs"):
            assert strategies._select_accumulation(mr.NcclAllReduce(), mesh) is None  # type: ignore[arg-type]

    def text(strategy: mr.Strategy) -> str:
        step = lambda: all_reduce("mean", [jnp.ones(10 + i) for i in range(3)])  # noqa: E731
        strategy.run(step)
        assert "adds up by" not in strategy.explain()
        [program] = strategy._steps.programs
        return program.compiled.lower([], [], [], program.constants).as_text()

    plain = strategy_of(3)
    assert [text(strategy_of(3, cross_device_ops=ops)) for ops in NAMES] == [text(plain)] * 3


def test_several_replicas_on_a_device_and_the_report_know_the_function(tmp_path: Path) -> None:
    largest = strategy_of(2, cross_device_ops=mr.ReductionToOneDevice(accumulation_fn=maximum), num_replicas=6)
    numbers = largest.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
    assert int(largest.run(lambda x: all_reduce("sum", x), args=(numbers,))) == 5 == int(largest.reduce("sum", numbers))
    way = "mr.ReductionToOneDevice(reduce_to_device=None, accumulation_fn=maximum)"  # without an address: alike on all workers
    assert largest.explain().splitlines()[0].endswith(f"(cpu:0, cpu:1), together, adds up by {way}")
    assert f"Replicas add up by {way}." in mr.report(largest, tmp_path / "report.html").read_text()
