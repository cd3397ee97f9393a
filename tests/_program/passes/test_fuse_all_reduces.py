"""Sums of one step travel in one buffer and carry small results' sums, with the numbers of sums that travel alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._replicas.per_replica import carried_sums, stack_of, uneven_shapes

pytestmark = pytest.mark.usefixtures("in_numpy")

ROWS = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


def all_reduce(value):
    return mr.get_replica_context().all_reduce("sum", value)


def rows(strategy, count):
    return next(iter(strategy.distribute_dataset(strategy.make_numpy_dataset(ROWS[:count]).batch(count))))


def alone(value):
    """Return the same values as another object, of which nobody knows the sum."""
    copy = jax.tree.map(lambda array: array, value)
    assert carried_sums(copy) is None
    return copy


def bits(value):
    return np.asarray(value).tobytes()


def num_all_reduces(strategy):
    """Return how many all-reduces the last program has, and how many arrays they send."""
    *_, program = strategy._steps.programs
    arrays = [jax.ShapeDtypeStruct((strategy.num_replicas_in_sync, *leaf), np.float32) for leaf in [(16 // 2, 3)]]
    text = program.compiled.lower([], [], arrays, program.constants).compile().as_text()
    calls = [line.split(" all-reduce(")[1].split(")")[0] for line in text.splitlines() if " all-reduce(" in line]
    return len(calls), sum(call.count(",") + 1 for call in calls)


@pytest.mark.by_xla
def test_sums_join_whether_or_not_jax_compiles(strategy2):
    with jax.disable_jit():
        twice = strategy2.run(lambda x: (all_reduce(x.sum()), all_reduce(x.max())), args=(rows(strategy2, 16),))
    assert num_all_reduces(strategy2) == (1, 1) and float(twice[0]) == pytest.approx(ROWS.sum(), rel=1e-5)


@pytest.mark.by_xla  # as what looks for a sum outside of steps
@pytest.mark.filterwarnings("ignore::mirrored.UnevenReplicasWarning")
@pytest.mark.parametrize("count", [16, 13])
def test_a_result_that_a_step_has_added_up_is_looked_up_with_the_same_bits(strategy, count):
    def step(x):
        loss = jnp.sum(x * x)
        return {"loss": loss, "pair": jnp.stack([loss, -loss]), "total": all_reduce([x.sum(0), loss])[1]}

    result = strategy.run(step, args=(rows(strategy, count),))
    for key in ("loss", "pair"):
        value, other = result[key], alone(result[key])
        for op in ("sum", "mean"):
            looked_up = strategy.reduce(op, value)
            assert looked_up is strategy.reduce(op, value) and looked_up is not strategy.reduce(op, other)
            assert bits(looked_up) == bits(strategy.reduce(op, other))
            assert looked_up.sharding.is_equivalent_to(strategy.reduce(op, other).sharding, looked_up.ndim)
    assert bits(strategy.reduce("sum", result["pair"], axis=0)) == bits(strategy.reduce("sum", alone(result["pair"]), axis=0))
    assert bits(result["total"]) == bits(strategy.reduce("sum", result["loss"]))


@pytest.mark.by_xla
def test_what_is_reduced_in_one_step_goes_into_one_buffer_whoever_asked(strategy2):
    def step(x):
        loss = jnp.sum(x * x)
        gradients = all_reduce([x.sum(0), x.max(0)])
        return all_reduce(loss), gradients, loss

    x = rows(strategy2, 16)
    total, gradients, loss = strategy2.run(step, args=(x,))
    assert num_all_reduces(strategy2) == (1, 1)
    assert bits(total) == bits(strategy2.reduce("sum", alone(loss)))
    parts = [np.asarray(part) for part in x.values]
    np.testing.assert_allclose(gradients[1], sum(part.max(0) for part in parts), rtol=1e-6)
    said = "2 all-reduce of 28 B, 1 in the buffer of another; carries the sum of 1 result, which strategy.reduce looks up\n"
    assert said in strategy2.explain()


def test_one_replica_copies_nothing_into_buffers_and_its_results_are_their_own_sums():
    strategy = mr.MirroredStrategy(["cpu:0"])

    def step(x):
        loss = jnp.sum(x * x)
        return all_reduce([x.sum(0), x.max(0)]), all_reduce(loss), loss

    gradients, total, loss = strategy.run(step, args=(rows(strategy, 13),))
    [program] = strategy._steps.programs
    array = jax.ShapeDtypeStruct((1, 13, 3), np.float32)
    assert "concatenate" not in str(jax.make_jaxpr(program.mapped)([], [], [array], [])) and program.joined.carried
    np.testing.assert_array_equal(gradients[1], ROWS[:13].max(0))
    assert bits(total) == bits(strategy.reduce("sum", loss)) == bits(strategy.reduce("mean", alone(loss)))
    assert strategy.reduce("mean", loss) is strategy.reduce("mean", loss)  # looked up


def test_what_is_written_to_a_reference_after_a_sum_is_read_after_it(strategy2):
    def step(x):
        reference = jax.new_ref(jnp.float32(1.0))
        total = all_reduce(x.sum())
        reference[...] = total
        return reference[...] - total, all_reduce(x.max())

    difference, _ = strategy2.run(step, args=(rows(strategy2, 16),))
    assert [float(value) for value in difference.values] == [0.0, 0.0]


def test_nothing_is_sent_for_a_result_that_would_need_a_message_of_its_own(strategy2):
    steps = {
        "no all-reduce": lambda x: x.sum(),
        "large": lambda x: (all_reduce(x.sum()), jnp.tile(x[:1], (65, 1)))[1],
        "an integer": lambda x: (all_reduce(x.sum()), (x > 0).sum())[1],
        "half": lambda x: (all_reduce(x.sum()), x.sum().astype(jnp.float16))[1],
        "another dtype in the buffer": lambda x: (all_reduce((x > 0).sum()), x.sum())[1],
        "after the last": lambda x: x.sum() + all_reduce(x.sum()),
        "a large buffer": lambda x: (all_reduce(jnp.full(40_000, x.sum())), x.sum())[1],
    }
    for what, step in steps.items():
        value = strategy2.run(step, args=(rows(strategy2, 16),))
        assert carried_sums(value) is None, what
        local = [np.asarray(part, np.float64) for part in value.values]
        np.testing.assert_allclose(strategy2.reduce("mean", value), sum(local) / 2, rtol=1e-2, err_msg=what)
    uneven = strategy2.run(lambda x: (all_reduce(x.sum()), x[:, 0])[1], args=(rows(strategy2, 13),))
    assert uneven_shapes(uneven) is not None and carried_sums(uneven) is None


def test_a_changed_value_has_its_own_sum_and_a_deleted_one_is_none(strategy2):
    value = strategy2.run(lambda x: (all_reduce(x.sum()), x.sum())[1], args=(rows(strategy2, 16),))
    total = strategy2.reduce("sum", value)
    known = float(total)
    assert float(strategy2.reduce("sum", jax.tree.map(lambda array: 2 * array, value))) == 2 * known
    jax.jit(jnp.negative, donate_argnums=0)(total)  # the user's, who may give it away
    assert float(strategy2.reduce("sum", value)) == known
    stack_of(value).delete()
    with pytest.raises(RuntimeError, match="deleted"):
        strategy2.reduce("mean", value)
