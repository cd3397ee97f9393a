"""Losses whose gradients, summed over the replicas, are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored.losses import compute_average_loss, scale_regularization_loss

STRATEGY = mr.MirroredStrategy(["cpu:0", "cpu:1"])
LOSSES = np.arange(24, dtype=np.float32)
WEIGHTS = np.linspace(0, 2, 24, dtype=np.float32)


def split(strategy, x):
    parts = np.split(x, strategy.num_replicas_in_sync)
    return strategy.distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group])


def total(strategy, fn, *arrays):
    return float(strategy.reduce("sum", strategy.run(fn, args=tuple(split(strategy, x) for x in arrays))))


def test_the_replicas_losses_add_up_to_the_mean_of_the_global_batch(strategy):
    assert total(strategy, compute_average_loss, LOSSES) == pytest.approx(LOSSES.mean())
    # Weights multiply, and the number of examples stays.
    assert total(strategy, compute_average_loss, LOSSES, WEIGHTS) == pytest.approx((LOSSES * WEIGHTS).mean())


def test_the_number_of_examples_may_be_given():
    def step(x, count):
        return compute_average_loss(x, global_batch_size=count)

    for count in (12, 12.0, np.int64(12), np.float32(12), np.array(12), jnp.int32(12)):  # static, or traced
        loss = STRATEGY.run(step, args=(split(STRATEGY, LOSSES), count))
        assert float(STRATEGY.reduce("sum", loss)) == LOSSES.sum() / 12
    assert total(STRATEGY, lambda x: step(x, np.int64(12)), LOSSES) == LOSSES.sum() / 12


def test_further_axes_are_summed_and_weights_broadcast_from_the_left():
    ones, weights = jnp.ones((4, 3)), np.arange(12, dtype=np.float32)
    cases = [
        ((ones,), 3.0),
        ((ones, weights[:4]), 4.5),  # one weight for each example
        ((ones, weights.reshape(4, 3)), 16.5),
        ((ones, weights[None, :3]), 3.0),
        ((ones[0], 2.0), 2.0),
    ]
    results = mr.OneDeviceStrategy("cpu:0").run(lambda: [compute_average_loss(*arguments) for arguments, _ in cases])
    assert [float(result) for result in results] == [expected for _, expected in cases]


def test_losses_of_every_real_dtype():
    for dtype in ("int32", "bool", "bfloat16", "float16"):
        assert total(STRATEGY, compute_average_loss, np.array([0, 1, 1, 0], jnp.dtype(dtype))) == 0.5


def test_gradients_summed_over_the_replicas_are_those_of_one_device(strategy3):
    with strategy3.scope():
        w = mr.Variable(0.5)

    def step(x, weight):
        def loss():
            return compute_average_loss((w * x - 1) ** 2, weight) + scale_regularization_loss(w**2)

        return mr.grad(loss, w)()

    def plain(w):
        return jnp.mean((w * LOSSES - 1) ** 2 * WEIGHTS) + w**2

    assert total(strategy3, step, LOSSES, WEIGHTS) == pytest.approx(float(jax.grad(plain)(0.5)), rel=1e-5)


def test_a_regularization_loss_counts_once(strategy3):
    with strategy3.scope():
        w = mr.Variable(np.full(2, 3, np.float32))
    losses = [6.0, 6, np.float32(6), jnp.full(3, 2.0), [1.0, 2.0, 3.0], w]
    scaled = strategy3.run(lambda: [scale_regularization_loss(loss) for loss in losses])
    assert [float(loss) for loss in scaled] == [2.0] * len(losses)


# Other wrong arguments are in test_bad_input.


def test_a_wrong_number_of_examples_or_weight_is_refused():
    for size in (0, -1, True, float("inf"), float("nan"), np.int64(0), [6], np.ones(3)):
        with pytest.raises(ValueError, match=r"global_batch_size is .*expected the whole number of examples.*at least 1"):
            STRATEGY.run(lambda size=size: compute_average_loss(jnp.ones(3), global_batch_size=size)), pytest.fail(str(size))
    with pytest.raises(
        ValueError, match=r"sample_weight has shape \(3, 1\), per_example_loss has shape \(3,\); expected \(3,\)\."
    ):
        STRATEGY.run(lambda: compute_average_loss(jnp.ones(3), jnp.ones((3, 1))))
