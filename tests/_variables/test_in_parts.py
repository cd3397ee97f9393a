"""Variables of which each device stores a part: they are used as any others."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import nightly
from strategies import strategy_of

import mirrored as mr
from mirrored import testing
from mirrored._replicas import division
from mirrored._report.facts import facts_of
from mirrored._variables import equal_copies
from mirrored._variables.variable import spec_of

pytestmark = pytest.mark.usefixtures("in_numpy")

VALUE = np.arange(12 * 20, dtype=np.float32).reshape(12, 20)


@pytest.fixture(autouse=True)
def small_arrays_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "LEAST_BYTES", 256)


@pytest.fixture(params=[1, *nightly(2), 3, 8], ids=lambda r: f"R{r}")
def parts(request: pytest.FixtureRequest) -> mr.MirroredStrategy:
    return strategy_of(request.param, storage="parts")


def variable(strategy: mr.Strategy, value: Any = VALUE, **options: Any) -> mr.Variable:
    with strategy.scope():
        return mr.Variable(value, name="w", **options)


def stored_shapes(v: mr.Variable) -> set[tuple[int, ...]]:
    return {shard.data.shape for shard in v._slot.array.addressable_shards}


@pytest.mark.parametrize(
    "make", [np.array, jnp.asarray, lambda value: lambda: jnp.asarray(value) + 0, lambda value: lambda: value]
)
def test_a_new_variable_has_a_part_on_each_device(parts: mr.MirroredStrategy, make: Any) -> None:
    v = variable(parts, make(VALUE))
    expected = {1: (12, 20), 2: (6, 20), 3: (4, 20), 8: (12, 3)}[parts.num_replicas_in_sync]  # 8: 20 is padded to 24
    assert stored_shapes(v) == {expected} and v.shape == (12, 20) and v.dtype == np.float32
    np.testing.assert_array_equal(v.numpy(), VALUE)
    np.testing.assert_array_equal(v.value, VALUE)
    assert all((np.asarray(copy) == VALUE).all() for copy in parts.local_results(v))
    assert ("in 8 parts along axis 1, padded from 20 to 24" in repr(v)) == (parts.num_replicas_in_sync == 8)
    assert repr(v).count(": [") == parts.num_replicas_in_sync


def test_it_is_assigned_outside_of_steps_as_a_whole(parts: mr.MirroredStrategy) -> None:
    v, whole = variable(parts), VALUE.copy()
    shapes, taken = stored_shapes(v), v.value
    v.assign(2 * VALUE)
    v.assign_add(VALUE)
    v.assign_sub(jnp.ones_like(VALUE))
    v.scatter_update([0, 11], np.zeros((2, 20)))
    v.scatter_add([3], np.ones((1, 20)))
    v.assign(v)
    whole = 3 * VALUE - 1
    whole[[0, 11]] = 0
    whole[3] += 1
    np.testing.assert_array_equal(v.numpy(), whole)
    np.testing.assert_array_equal(v @ np.ones(20, np.float32), whole.sum(1))
    np.testing.assert_array_equal(mr.export([v])[0], whole)
    np.testing.assert_array_equal(parts.reduce("mean", v), whole)
    np.testing.assert_array_equal(parts.gather(v, axis=0), np.concatenate([whole] * parts.num_replicas_in_sync))
    np.testing.assert_array_equal(taken, VALUE, "an array that was taken stays")
    assert stored_shapes(v) == shapes
    with pytest.raises(ValueError, match=r"assign to variable 'w' of shape \(12, 20\) was given a value of shape \(12, 24\)"):
        v.assign(np.zeros((12, 24)))
    np.testing.assert_array_equal(v.numpy(), whole)


@pytest.mark.parametrize("parts", [3, 8], indirect=True)
def test_steps_functions_and_eager_mode_give_the_numbers_of_whole_storage(parts: mr.MirroredStrategy) -> None:
    found = []
    for strategy in (strategy_of(parts.num_replicas_in_sync), parts):
        v, w = variable(strategy), variable(strategy, VALUE[:, :7], trainable=False)

        def step(x: jax.Array, bare: jax.Array, v: mr.Variable = v, w: mr.Variable = w) -> Any:
            v.assign(v * 0.5 + mr.get_replica_context().all_reduce("sum", x).sum() + w.value.sum())
            w.assign_add(jnp.ones_like(w))
            return bare + v, x

        @mr.function
        def twice(x: Any, bare: jax.Array, strategy: mr.Strategy = strategy, v: mr.Variable = v, step: Any = step) -> Any:
            bare, _ = strategy.run(step, args=(x, bare))
            v.assign_add(jnp.ones_like(v))
            return strategy.run(step, args=(x, bare))[0], strategy.reduce("mean", v)

        x = strategy.distribute_values_from_function(lambda ctx: np.ones(2, np.float32) * ctx.replica_id_in_sync_group)
        bare, _ = strategy.run(step, args=(x, VALUE))
        with mr.eager():
            bare, _ = strategy.run(step, args=(x, bare))
        bare, mean = twice(x, bare)
        mr.fori_loop(0, 3, lambda i, c, v=v: (v.assign(v * 0.5 + i), c)[1], 0)
        [gradient] = mr.grad(lambda v=v: (v.value**2).sum(), [v])()
        found.append([np.asarray(a) for a in (bare, mean, v.numpy(), w.numpy(), gradient)])
        strategy.assert_mirrored()
    for whole, own in zip(*found, strict=True):
        np.testing.assert_allclose(own, whole, rtol=1e-6)


@pytest.mark.by_xla
def test_a_taken_array_outlives_steps_and_an_array_of_a_step_is_passed_on_as_it_is() -> None:
    strategy = strategy_of(2, storage="parts")
    v = variable(strategy)
    taken, bare = v.value, VALUE
    with testing.count_programs() as count:
        for _ in range(4):
            bare = strategy.run(lambda bare: (v.assign_add(jnp.ones_like(v)), bare + v)[1], args=(bare,))
    assert count.count == 1, count
    given = variable(strategy, bare)
    strategy.run(lambda: given.assign_add(jnp.ones_like(given)))
    assert bare.sharding.shard_shape(bare.shape) == (6, 20) and not bare.is_fully_replicated
    np.testing.assert_array_equal(bare, 5 * VALUE + 10)
    np.testing.assert_array_equal(strategy.reduce("sum", bare), 2 * (5 * VALUE + 10))
    np.testing.assert_array_equal(taken, VALUE)


def test_a_function_may_make_a_tree_in_parts_and_so_does_an_optimizer() -> None:
    calls = []

    def make() -> Any:
        calls.append(1)
        return {"w": jax.random.normal(jax.random.key(0), (12, 20)), "b": np.zeros(3, np.float32), "name": "dense"}

    for count in (3, 8):
        with strategy_of(count).scope():
            expected = mr.Variable(make)
        with strategy_of(count, storage="parts").scope():
            tree = mr.Variable(make)
            optimizer = mr.Optimizer(optax.adam(0.1), tree)
        assert tree.value["name"] == "dense"
        np.testing.assert_array_equal(tree.numpy()["w"], expected.numpy()["w"])
        mu = optimizer.state[0].mu["w"]
        assert stored_shapes(mu) == stored_shapes(tree.variables["w"]) and (mu.numpy() == 0).all() and mu.shape == (12, 20)
        assert not mu.trainable and mu.name == "optimizer[0].mu['w']"
    assert len(calls) == 4
    with strategy_of(2, storage="parts").scope(), pytest.raises(jax.errors.TracerArrayConversionError) as raised:
        mr.Variable(lambda: np.asarray(jnp.ones(100)))
    assert "mr.Variable(make()) in place of mr.Variable(make)" in "".join(raised.value.__notes__)


def test_a_variable_has_a_word_of_its_own() -> None:
    whole, parts = strategy_of(2), strategy_of(2, storage=mr.Storage.PARTS)
    assert stored_shapes(variable(parts, storage="whole")) == {(12, 20)} == stored_shapes(variable(whole))
    v = variable(whole, storage="parts")
    assert stored_shapes(v) == {(6, 20)}
    whole.run(lambda: v.assign(v + 1))
    np.testing.assert_array_equal(v.numpy(), VALUE + 1)
    assert stored_shapes(variable(parts, jnp.ones((20, 20), jnp.complex64))) == {(20, 20)}
    seen = variable(parts, np.zeros(100), synchronization="on_read", aggregation="sum")
    assert spec_of(seen).division is None
    with pytest.raises(ValueError, match=r"storage PARTS is for mirrored variables, and this one is sync-on-read"):
        variable(parts, np.zeros(100), synchronization="on_read", storage="parts")
    for make in (lambda: mr.MirroredStrategy(["cpu:0"], storage="half"), lambda: variable(whole, storage="half")):
        with pytest.raises(ValueError, match=r"storage is 'half'; expected one of 'whole', 'parts', 'parts_of_worker'"):
            make()


def test_what_is_in_parts_is_said() -> None:
    gc.collect()  # variables of other tests
    strategy = strategy_of(8, storage="parts")
    with strategy.scope():
        v, small = mr.Variable(VALUE, name="odd"), mr.Variable(1.0, name="one")
    text = strategy.explain()
    assert "in parts: 1 variable, 144 B on each device in place of 960 B" in text
    assert "with padding: 'odd' in 8 parts along axis 1, padded from 20 to 24" in text
    assert "whole on each device: 1 variable of 4 B; the largest is 'one', float32[] of 4 B" in text
    assert [(e.num_bytes, e.division[:10]) for e in facts_of(strategy).variables] == [(144, "in 8 parts"), (4, "")]
    assert "in parts" not in strategy_of(7).explain() and "there is one device" in strategy_of(1, storage="parts").explain()
    del v, small


def test_copies_of_parts_are_compared_and_single_parts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices of two workers, each of which has all parts."""
    strategy = strategy_of(4, storage="parts")
    v = variable(strategy)
    strategy.assert_mirrored()
    testing.assert_equal_copies([v, v.value])
    assert equal_copies.last_comparisons[strategy._mesh].num_variables == 0
    monkeypatch.setattr(division, "_num_workers", lambda mesh: 2)
    twice = variable(strategy, storage="parts_of_worker")
    assert stored_shapes(twice) == {(6, 20)} and "2 copies of each" in repr(twice)
    strategy.run(lambda: twice.assign(twice * 2 + v))
    np.testing.assert_array_equal(twice.numpy(), 3 * VALUE)
    strategy.assert_mirrored()
