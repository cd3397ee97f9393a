"""Replicas add up in the way that `cross_device_ops` names: the same numbers for any number of replicas, or a clear error."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr
from mirrored._program import joined_sums
from mirrored._replicas import cross_device
from mirrored._replicas.per_replica import carried_sums
from mirrored.testing import assert_equal_copies

HIERARCHICAL, AT_ONE = mr.HierarchicalCopyAllReduce(), mr.ReductionToOneDevice()
WAYS = {"hierarchical": HIERARCHICAL, "at one": AT_ONE, "alone": mr.HierarchicalCopyAllReduce(0)}
SLOW = pytest.mark.slow
#: Large enough to be scattered, and divided by none of 2, 3, 5 and 8.
SIZE = cross_device.SCATTER_FROM_BYTES // 4 + 1


def strategy_of(num_devices: int, ops: Any, **options: Any) -> mr.MirroredStrategy:
    return mr.MirroredStrategy([f"cpu:{i}" for i in range(num_devices)], cross_device_ops=ops, **options)


def maximum(values: list[Any]) -> Any:
    return functools.reduce(jnp.maximum, values)


def per_replica(strategy: mr.Strategy) -> mr.PerReplica:
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=SIZE).astype(np.float32) for _ in range(8)]
    return strategy.distribute_values_from_function(lambda ctx: rows[ctx.replica_id_in_sync_group])


def all_reduce(op: str, value: Any) -> Any:
    return mr.get_replica_context().all_reduce(op, value)


def compiled_text(strategy: mr.Strategy, *arrays: Any) -> str:
    *_, program = strategy._steps.programs
    return program.compiled.lower([], [], list(arrays), program.constants).as_text()


@pytest.mark.parametrize(
    ("way", "num_replicas"),
    [
        *[("hierarchical", 1), ("hierarchical", 3), ("at one", 3)],
        *[pytest.param(way, r, marks=SLOW) for way in WAYS for r in (1, 2, 3, 5, 8) if way == "alone" or r in (2, 5, 8)],
    ],
)
def test_the_numbers_are_those_of_xlas_all_reduce(way: str, num_replicas: int) -> None:
    def step(x: Any) -> Any:
        values = {"large": x, "int": (x * 9).astype(jnp.int32), "pair": x[:6].reshape(2, 3), "half": x.astype(jnp.bfloat16)}
        return {op: all_reduce(op, {**values, "one": 1.0, "complex": x[:5] * 1j}) for op in ("sum", "mean")}

    chosen, plain = strategy_of(num_replicas, WAYS[way]), strategy_of(num_replicas, None)
    found, expected = (s.run(step, args=(per_replica(s),)) for s in (chosen, plain))
    for path, value in jax.tree.leaves_with_path(found):
        wanted = functools.reduce(lambda tree, key: tree[key.key], path, expected)
        tolerance = 0.05 if path[-1].key == "half" and path[0].key == "sum" else 1e-5
        np.testing.assert_allclose(np.asarray(value, np.complex64), np.asarray(wanted, np.complex64), tolerance, tolerance)
        assert len({np.asarray(shard.data).tobytes() for shard in value.addressable_shards}) == 1
    x = per_replica(chosen)
    for op in ("sum", "mean"):
        np.testing.assert_allclose(chosen.reduce(op, x), plain.reduce(op, per_replica(plain)), 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("way", "count"), [("hierarchical", 7), *[pytest.param(*p, marks=SLOW) for p in [("at one", 7), ("hierarchical", 9)]]]
)
def test_training_is_the_same_and_the_copies_are_equal(way: str, count: int) -> None:
    rows = np.random.default_rng(1).normal(size=(count, 110)).astype(np.float32)

    def train(strategy: mr.Strategy) -> Any:
        with strategy.scope():
            w = mr.Variable(np.full((110, 80), 0.1, np.float32))
            optimizer = mr.Optimizer(optax.sgd(1e-3), w)

        def step(x: Any) -> Any:
            loss_fn = lambda: mr.losses.compute_average_loss(jnp.sum((x @ w.value) ** 2, axis=1))  # noqa: E731
            loss, gradient = mr.value_and_grad(loss_fn, w)()
            optimizer.apply_gradients(gradient)
            return loss

        batch = next(iter(strategy.distribute_dataset(strategy.make_numpy_dataset(rows).batch(count))))
        losses = [float(strategy.reduce("sum", strategy.run(step, args=(batch,)))) for _ in range(2)]
        assert_equal_copies(strategy)
        return losses, w.numpy()

    (losses, w), (expected_losses, expected) = train(strategy_of(3, WAYS[way])), train(strategy_of(3, None))
    np.testing.assert_allclose(losses, expected_losses, 1e-5)
    np.testing.assert_allclose(w, expected, 1e-4, 1e-6)


def test_sums_in_loops_conditions_and_calls_are_made_in_this_way_too() -> None:
    def step(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return all_reduce("mean", carry * x), None

        looped, _ = jax.lax.scan(body, x, None, length=2)
        chosen = jax.lax.cond(all_reduce("sum", x[0]) > 0, lambda: all_reduce("sum", x), lambda: all_reduce("sum", 2 * x))
        called = jax.jit(jax.checkpoint(lambda: all_reduce("sum", x + 1)))()
        counted = jax.lax.fori_loop(0, 2, lambda _, c: all_reduce("mean", c + x), x)
        return looped, chosen, called, counted

    chosen, plain = strategy_of(3, HIERARCHICAL), strategy_of(3, None)
    found, expected = (s.run(step, args=(per_replica(s),)) for s in (chosen, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), found, expected)
    text = compiled_text(chosen, jax.ShapeDtypeStruct((3, SIZE), np.float32))
    assert text.count("all_reduce") == 1, "of the condition's number"
    assert text.count("reduce_scatter") == 5


@pytest.mark.parametrize(("num_replicas", "per_host"), [(4, 2), (6, 3), (3, 1), pytest.param(8, 2, marks=SLOW)])
def test_between_hosts_travels_each_replicas_share_only(
    num_replicas: int, per_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sum_by = lambda *args, per_host, **kwargs: cross_device.sum_by(*args, per_host=own, **kwargs)  # noqa: E731
    own = per_host
    monkeypatch.setattr(joined_sums, "sum_by", sum_by)
    chosen, plain = strategy_of(num_replicas, HIERARCHICAL), strategy_of(num_replicas, None)
    found, expected = (s.run(lambda x: all_reduce("sum", x), args=(per_replica(s),)) for s in (chosen, plain))
    np.testing.assert_allclose(found, expected, 1e-5, 1e-5)
    assert len({np.asarray(shard.data).tobytes() for shard in found.addressable_shards}) == 1
    text = compiled_text(chosen, jax.ShapeDtypeStruct((num_replicas, SIZE), np.float32))
    assert ("reduce_scatter" in text) == (per_host > 1) and ("all_reduce" in text) == (per_host < num_replicas)
    share = -(-SIZE // per_host) if per_host > 1 else SIZE
    assert f"tensor<{share}xf32>" in text


def test_at_one_device_values_are_added_in_the_order_of_the_replicas() -> None:
    strategy = strategy_of(3, AT_ONE)
    rows = [np.float32(1e8), np.float32(-1e8), np.float32(1.0)]
    x = strategy.distribute_values_from_function(lambda ctx: rows[ctx.replica_id_in_sync_group])
    assert float(strategy.run(lambda x: all_reduce("sum", x), args=(x,))) == 1.0 == float(strategy.reduce("sum", x))


def test_the_number_of_packs_says_how_many_collectives_there_are() -> None:
    def num_collectives(num_packs: int) -> int:
        strategy = strategy_of(2, mr.HierarchicalCopyAllReduce(num_packs))
        strategy.run(lambda: all_reduce("sum", [jnp.ones(10 + i) for i in range(6)]))
        return compiled_text(strategy).count("stablehlo.all_reduce")

    assert [num_collectives(n) for n in (0, 1, 2)] == [6, 1, 2]
    sizes = [jax.ShapeDtypeStruct((n,), np.float32) for n in (50, 30, 20, 100)] + [jax.ShapeDtypeStruct((), np.int32)]
    assert cross_device.packs_of(sizes, 2) == [[0, 1, 2], [3], [4]]


def test_a_function_of_the_users_takes_the_place_of_the_sum() -> None:
    strategy = strategy_of(3, mr.ReductionToOneDevice("cpu:1", maximum))
    with strategy.scope():
        w, total = mr.Variable(0.0), mr.Variable(0.0, aggregation="sum")
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
    expected = r"accumulation_fn returned .* for 2 arrays float32\[\]; expected one array like them"
    for wrong in (lambda values: 1.0, jnp.stack, lambda values: None, lambda values: values[0].astype(jnp.int32)):
        strategy = strategy_of(2, mr.ReductionToOneDevice(accumulation_fn=wrong))
        with pytest.raises(TypeError, match=expected):
            strategy.run(lambda: all_reduce("sum", jnp.ones(())))
        with pytest.raises(TypeError, match=expected):
            strategy.reduce("sum", jnp.ones(()))


def test_a_mean_with_weights_and_a_shared_out_update_have_no_place_for_a_function() -> None:
    strategy = strategy_of(2, mr.ReductionToOneDevice(accumulation_fn=maximum))
    batch = next(iter(strategy.distribute_dataset(strategy.make_numpy_dataset(np.ones((3, 2), np.float32)).batch(3))))
    assert list(strategy.run(lambda x: all_reduce("sum", x.sum(0)), args=(batch,))) == [2.0, 2.0]
    step = lambda x, by_rows: mr.get_replica_context().all_reduce("mean", x.mean(0), by_rows)  # noqa: E731
    assert list(strategy.run(step, args=(batch, False))) == [0.5, 0.5]  # of the largest, divided by the replicas
    for by_rows in (None, True):
        with pytest.raises(mr.UnevenReplicasError, match=r"has an accumulation_fn, which knows no weights. Combine with 'sum'"):
            strategy.run(step, args=(batch, by_rows))
    with strategy.scope():
        w = mr.Variable(np.ones(4, np.float32))
        optimizer = mr.Optimizer(optax.adam(0.1), w, shard_state=True)
    with pytest.raises(ValueError, match=r"has no place for its accumulation_fn. Leave shard_state=True out"):
        strategy.run(lambda: optimizer.apply_gradients(jnp.ones(4)))


@pytest.mark.parametrize("way", ["hierarchical", pytest.param("at one", marks=SLOW)])
def test_several_replicas_on_a_device_are_added_up_by_xla_and_one_warning_says_so(way: str) -> None:
    with pytest.warns(UserWarning, match=r"has no part in steps of 6 replicas on 2 devices .* XLA's all-reduce the devices"):
        chosen = strategy_of(2, WAYS[way], num_replicas=6)
    found = chosen.run(lambda x: all_reduce("sum", x), args=(per_replica(chosen),))
    plain = strategy_of(2, None, num_replicas=6)
    np.testing.assert_allclose(found, plain.reduce("sum", per_replica(plain)), 1e-5, 1e-5)
    largest = strategy_of(2, mr.ReductionToOneDevice(accumulation_fn=maximum), num_replicas=6)
    numbers = largest.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
    assert int(largest.run(lambda x: all_reduce("sum", x), args=(numbers,))) == 5 == int(largest.reduce("sum", numbers))


def test_a_shared_out_update_and_a_compiled_function_know_the_way() -> None:
    def train(strategy: mr.Strategy) -> Any:
        with strategy.scope():
            w = mr.Variable(np.ones(SIZE, np.float32))
            optimizer = mr.Optimizer(optax.adam(0.1), w, shard_state=True)

        def step(x: Any) -> Any:
            optimizer.apply_gradients(x, aggregate="sum")
            return all_reduce("sum", x * x)

        x = per_replica(strategy)
        return mr.function(lambda x: strategy.run(step, args=(x,)))(x), w.numpy()

    found, expected = train(strategy_of(3, HIERARCHICAL)), train(strategy_of(3, None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), found, expected)


def test_explain_and_the_report_name_the_way(tmp_path: Path) -> None:
    strategy = strategy_of(2, HIERARCHICAL)
    strategy.run(lambda x: all_reduce("sum", [x, 1.0]), args=(per_replica(strategy),))
    first, program, *_ = strategy.explain().splitlines()
    assert first.endswith("(cpu:0, cpu:1), adds up by mr.HierarchicalCopyAllReduce(num_packs=1)")
    assert "2 all-reduce of 32.0 KiB" in program or "1 all-reduce of 32.0 KiB" in program
    assert "1 array by mr.HierarchicalCopyAllReduce(num_packs=1)" in program
    assert "maximum" in str(mr.ReductionToOneDevice(accumulation_fn=maximum)), "the same on all workers, without an address"
    assert "adds up by" not in strategy_of(2, None).explain()
    assert f"Replicas add up by {HIERARCHICAL}." in mr.report(strategy, tmp_path / "report.html").read_text()


def test_nccl_without_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mr.NcclAllReduce\(num_packs=1\), which connects GPUs, but the devices are 1 replica"):
        strategy_of(1, mr.NcclAllReduce())
    with pytest.raises(ValueError, match="which connects GPUs"):
        mr.MultiWorkerMirroredStrategy(cross_device_ops=mr.NcclAllReduce())
    assert "adds up by" in mr.MultiWorkerMirroredStrategy(cross_device_ops=HIERARCHICAL).explain()
