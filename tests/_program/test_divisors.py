"""By what a loss was divided is found whoever differentiates it, and right programs are left alone."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import slow

import mirrored as mr
from mirrored.losses import compute_average_loss, scale_regularization_loss

Loss = Callable[[Any, Any], Any]


def rows_of(strategy: mr.Strategy, sizes: list[int]) -> Any:
    rows = np.split(np.cos(np.arange(3.0 * sum(sizes), dtype=np.float32)).reshape(-1, 3), np.cumsum(sizes)[:-1])
    return rows, strategy.distribute_values_from_function(lambda ctx: rows[ctx.replica_id_in_sync_group])


def warned(strategy: mr.Strategy, step: Callable[..., Any], *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            strategy.run(step, args=args)
    return [str(w.message) for w in caught if w.category is mr.FactorOfReplicasWarning]


def model(strategy: mr.Strategy, **options: Any) -> tuple[mr.Variable, mr.Optimizer]:
    with strategy.scope():
        w = mr.Variable(np.ones((3, 5), np.float32), name="w")
        return w, mr.Optimizer(optax.sgd(0.1), [w], **options)


def each(w: Any, x: Any) -> Any:
    """Return the losses of examples, one a row."""
    return jnp.sum((jnp.tanh(x @ w) - 1) ** 2, axis=-1)


def squares(w: Any, x: Any) -> Any:
    return (jax.nn.gelu(x @ w) - 1) ** 2


def normalized(x: Any) -> Any:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 0.1)


def mask(x: Any) -> Any:
    return (x[:, 0] > 0).astype(x.dtype)


def num_replicas() -> int:
    return mr.get_replica_context().num_replicas_in_sync


def total(x: Any) -> Any:
    return mr.get_replica_context().all_reduce("sum", x)


#: Divided by the replica's own rows only.
OWN: dict[str, Loss] = {
    "mean": lambda w, x: jnp.mean(each(w, x)),
    "mean of all": lambda w, x: jnp.mean(squares(w, x)),
    "of means": lambda w, x: jnp.mean(jnp.mean(squares(w, x), axis=-1)),
    "of the first axis": lambda w, x: jnp.sum(jnp.mean(squares(w, x), axis=0)),
    "sum by rows": lambda w, x: jnp.sum(each(w, x)) / x.shape[0],
    "rows by rows": lambda w, x: jnp.sum(each(w, x) / x.shape[0]),
    "times the inverse": lambda w, x: (1.0 / x.shape[0]) * jnp.sum(each(w, x)),
    "masked": lambda w, x: jnp.sum(each(w, x) * mask(x)) / jnp.maximum(jnp.sum(mask(x)), 1),
    "weighted": lambda w, x: jnp.average(each(w, x), weights=1 + mask(x)),
    "where": lambda w, x: jnp.mean(each(w, x), where=x[:, 0] > 0),
    "scaled and regularized": lambda w, x: 0.7 * jnp.mean(each(w, x)) + 0.01 * jnp.sum(w**2),
    "negative": lambda w, x: -jnp.mean(-each(w, x)),
    "jitted, remat, vmap": lambda w, x: jax.jit(jax.checkpoint(lambda w, x: jnp.mean(jax.vmap(lambda r: each(w, r))(x))))(w, x),
    "with a layer that normalizes": lambda w, x: jnp.mean(each(w, normalized(x @ w) @ w.T)),
    "scan": lambda w, x: jax.lax.scan(lambda c, r: (c + each(w, r), None), 0.0, x)[0] / x.shape[0],
    "beside one by all": lambda w, x: compute_average_loss(each(w, x)) + jnp.mean(squares(w, x)),
    "mixed precision": lambda w, x: jnp.mean(each(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))).astype(jnp.float32),
    "logits": lambda w, x: optax.softmax_cross_entropy_with_integer_labels(x @ w, jnp.argmax(x, -1)).mean(),
}
#: Right when gradients are summed, or a sum: nothing is said.
RIGHT: dict[str, Loss] = {
    "average": lambda w, x: compute_average_loss(each(w, x)),
    "average of all axes": lambda w, x: compute_average_loss(squares(w, x)),
    "average of means": lambda w, x: compute_average_loss(jnp.mean(squares(w, x), axis=-1)),
    "given": lambda w, x: compute_average_loss(each(w, x), global_batch_size=20),
    "sum": lambda w, x: jnp.sum(each(w, x)),
    "sum of means": lambda w, x: jnp.sum(jnp.mean(squares(w, x), axis=-1)),
    "sum of means of as many": lambda w, x: jnp.sum(jnp.mean(squares(w[:, :4], x), axis=-1)),
    "by the batch": lambda w, x: jnp.sum(each(w, x)) / (x.shape[0] * num_replicas()),
    "by a constant": lambda w, x: jnp.sum(each(w, x)) * (1.0 / (x.shape[0] * num_replicas())),
    "by the batch inside": lambda w, x: jnp.sum(each(w, x) / (x.shape[0] * num_replicas())),
    "mean by replicas": lambda w, x: jnp.mean(each(w, x)) / num_replicas(),
    "mean by replicas inside": lambda w, x: jnp.mean(each(w, x) / num_replicas()),
    "mean times 1 / R": lambda w, x: (1 / num_replicas()) * jnp.mean(each(w, x)),
    "by all rows": lambda w, x: jnp.sum(each(w, x)) / total(x.shape[0]),
    "by all masks": lambda w, x: jnp.sum(each(w, x) * mask(x)) / total(jnp.sum(mask(x))),
    "regularized": lambda w, x: compute_average_loss(each(w, x)) + scale_regularization_loss(0.1 * jnp.mean(w**2)),
    "a mean of weights": lambda w, x: compute_average_loss(each(w, x)) + 0.1 * jnp.mean(w**2),
    "normalized": lambda w, x: compute_average_loss(each(w, normalized(x @ w) @ w.T)),
    "normalized sum": lambda w, x: jnp.sum(each(w, normalized(x @ w) @ w.T)),
    "gradient penalty": lambda w, x: compute_average_loss(
        jnp.sum(jax.grad(lambda y: jnp.mean(each(w, y)))(x) ** 2, axis=-1) + each(w, x)
    ),
}


#: Those that `jax.grad` differentiates too, where the beginning of a gradient is not marked.
PLAIN = (
    "mean",
    "masked",
    "scaled and regularized",
    "jitted, remat, vmap",
    "scan",
    "average",
    "sum",
    "mean times 1 / R",
    "normalized sum",
)


def step_of(loss: Loss, w: mr.Variable, optimizer: mr.Optimizer, is_ours: bool = True) -> Callable[[Any], None]:
    def step(x: Any) -> None:
        gradients = mr.grad(lambda: loss(w.value, x), [w])() if is_ours else [jax.grad(loss)(w.value, x)]
        optimizer.apply_gradients(gradients)

    return step


#: The cases of the default suite: a kind of division, or of a reason to be silent, each.
SOME = (
    "mean",
    "masked",
    "rows by rows",
    "scan",
    "average",
    "average of means",
    "mean by replicas",
    "by all masks",
    "regularized",
)


@pytest.mark.parametrize("names", [SOME, *slow([*OWN, *RIGHT])], ids=["some", "all"])
def test_a_mean_over_a_replicas_own_rows_warns_once_and_what_is_right_does_not(
    names: Sequence[str], strategy3: mr.Strategy
) -> None:
    _, x = rows_of(strategy3, [4, 4, 4])
    for name in names:
        loss = (OWN | RIGHT)[name]
        for is_ours in (True, False):
            if not is_ours and name not in PLAIN:
                continue
            found = warned(strategy3, step_of(loss, *model(strategy3), is_ours), x)
            assert len(found) == (name in OWN), (name, is_ours, found)
            for message in found:
                assert "is 3 times that of one device" in message, name
                assert "mr.losses.compute_average_loss(per_example_loss)" in message and "aggregate='mean'" in message


@pytest.mark.parametrize("sizes", [[4], [4, 3], [3, 2, 0], *slow([4, 4], [2, 2, 1], [8] * 8, [3, 3] + [2] * 6)], ids=str)
def test_both_remedies_are_the_update_of_one_device_for_any_number_of_replicas(sizes: list[int]) -> None:
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(len(sizes))])
    rows, x = rows_of(strategy, sizes)
    loss = OWN["mean"]
    expected = jnp.ones((3, 5))
    for _ in range(2):
        expected = expected - 0.1 * jax.grad(loss)(expected, np.concatenate(rows))
    for own, options in ((loss, {"aggregate": "mean"}), (RIGHT["average"], {})):
        w, optimizer = model(strategy, **options)
        assert warned(strategy, step_of(own, w, optimizer), x) == []
        np.testing.assert_allclose(w.numpy(), expected, rtol=1e-5, atol=1e-6)
        strategy.assert_mirrored()
    assert len(warned(strategy, step_of(loss, *model(strategy)), x)) == (len(sizes) > 1)


@pytest.mark.slow
def test_a_loss_that_was_divided_by_all_rows_warns_when_its_gradients_are_averaged(strategy3: mr.Strategy) -> None:
    for sizes in ([4, 4, 4], [2, 2, 1]):
        _, x = rows_of(strategy3, sizes)
        for name in ("average", "by all rows", "by the batch", "normalized"):
            if name != "by the batch" or sizes[-1] == 4:
                [message] = warned(strategy3, step_of(RIGHT[name], *model(strategy3, aggregate="mean")), x)
                assert "3 times smaller than that of one device" in message and "aggregate='sum'" in message, name
    for name in ("mean", "beside one by all", "masked"):
        assert warned(strategy3, step_of(OWN[name], *model(strategy3, aggregate="mean")), x) == [], name


def test_the_own_number_is_told_from_that_of_the_replicas_when_both_are_one_number() -> None:
    for count in (2, 4):
        strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(count)])
        _, x = rows_of(strategy, [count] * count)
        for name, expected in (("mean", 1), ("mean by replicas", 0), ("average", 0), ("by the batch", 0)):
            assert len(warned(strategy, step_of((OWN | RIGHT)[name], *model(strategy)), x)) == expected, (name, count)


def test_a_mean_of_one_row_is_a_sum(strategy3: mr.Strategy) -> None:
    _, x = rows_of(strategy3, [1, 1, 1])
    assert warned(strategy3, step_of(RIGHT["sum of means"], *model(strategy3)), x) == []


# -- one average for each part of the batch


def accumulated(number: int, *, is_loop: bool, divisor: int = 1, **given: Any) -> Callable[..., Callable[[Any], None]]:
    def make(w: mr.Variable, optimizer: mr.Optimizer) -> Callable[[Any], None]:
        def gradients_of(x: Any) -> Any:
            return mr.grad(lambda: compute_average_loss(each(w.value, x), **given), [w])()

        def step(x: Any) -> None:
            parts = x.reshape(number, -1, 3)
            add = lambda total, x: (jax.tree.map(jnp.add, total, gradients_of(x)), None)  # noqa: E731
            summed: Any = [jnp.zeros((3, 5))]
            if is_loop:
                summed, _ = jax.lax.scan(add, summed, parts)
            else:
                for part in parts:
                    summed, _ = add(summed, part)
            optimizer.apply_gradients([gradient / divisor for gradient in summed])

        return step

    return make


def test_an_average_of_each_part_of_the_batch_warns_and_its_remedies_are_right(strategy3: mr.Strategy) -> None:
    rows, x = rows_of(strategy3, [4, 4, 4])
    loss = lambda w: jnp.mean(each(w, np.concatenate(rows)))  # noqa: E731
    for is_loop in (True, False):
        [message] = warned(strategy3, accumulated(2, is_loop=is_loop)(*model(strategy3)), x)
        assert "2 parts of the batch" in message and "global_batch_size=n" in message and "divide the gradients by 2" in message
        for right in (accumulated(2, is_loop=is_loop, divisor=2), accumulated(2, is_loop=is_loop, global_batch_size=12)):
            w, optimizer = model(strategy3)
            assert warned(strategy3, right(w, optimizer), x) == []
            expected = jnp.ones((3, 5))
            for _ in range(2):
                expected = expected - 0.1 * jax.grad(loss)(expected)
            np.testing.assert_allclose(w.numpy(), expected, rtol=1e-5)


def test_an_update_for_each_part_of_the_batch_is_right(strategy3: mr.Strategy) -> None:
    _, x = rows_of(strategy3, [4, 4, 4])
    w, optimizer = model(strategy3)
    update = step_of(RIGHT["average"], w, optimizer)

    def in_turn(x: Any) -> None:
        for part in x.reshape(2, 2, 3):
            update(part)

    def in_a_loop(x: Any) -> None:
        mr.scan(lambda carry, part: (carry, update(part)), 0.0, x.reshape(2, 2, 3))

    assert warned(strategy3, in_turn, x) == warned(strategy3, in_a_loop, x) == []


# -- the same data everywhere


def test_the_whole_batch_with_different_noise_warns_when_it_is_too_much(strategy3: mr.Strategy) -> None:
    def with_noise(loss: Loss) -> Loss:
        return lambda w, x: loss(w, x * jax.random.bernoulli(mr.get_replica_context().rng(0), 0.5, x.shape))

    whole = np.ones((4, 3), np.float32)
    [message] = warned(strategy3, step_of(with_noise(OWN["mean"]), *model(strategy3)), whole)
    assert "the replica's own number of rows" in message.replace("this replica's", "the replica's")
    for right in (with_noise(RIGHT["average"]), RIGHT["average"], lambda w, x: scale_regularization_loss(jnp.sum(w**2))):
        assert warned(strategy3, step_of(right, *model(strategy3)), whole) == []
    assert warned(strategy3, step_of(OWN["mean"], *model(strategy3, aggregate="mean")), whole) == []


def test_each_optimizer_is_looked_at_by_itself(strategy3: mr.Strategy) -> None:
    _, x = rows_of(strategy3, [4, 4, 4])
    first, second = model(strategy3), model(strategy3)

    def step(x: Any, loss: Loss) -> None:
        step_of(RIGHT["average"], *first)(x)
        step_of(lambda w, _: loss(w, None), *second)(x)

    [message] = warned(strategy3, step, x, lambda w, _: jnp.sum(w**2))
    assert "all 3 replicas computed the same gradients" in message
    assert warned(strategy3, step, x, lambda w, _: scale_regularization_loss(jnp.sum(w**2))) == []
