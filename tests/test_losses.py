"""Losses whose gradients, summed over the replicas, are those of one device."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import nightly
from strategies import jit, made, variable

import mirrored as mr
from mirrored.losses import compute_average_loss, scale_regularization_loss

pytestmark = pytest.mark.usefixtures("in_numpy")

STRATEGY = mr.MirroredStrategy(["cpu:0", "cpu:1"])
LOSSES = np.arange(24, dtype=np.float32)


def split(strategy, x):
    parts = np.split(x, strategy.num_replicas_in_sync)
    return strategy.distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group])


def total(strategy, fn, *arrays):
    return float(strategy.reduce("sum", strategy.run(fn, args=tuple(split(strategy, x) for x in arrays))))


def test_the_number_of_examples_may_be_given():
    def step(x, count):
        return compute_average_loss(x, global_batch_size=count)

    for count in (12, 12.0, np.int64(12), np.float32(12), np.array(12), jnp.int32(12)):  # static, or traced
        loss = STRATEGY.run(step, args=(split(STRATEGY, LOSSES), count))
        assert float(STRATEGY.reduce("sum", loss)) == LOSSES.sum() / 12
    assert total(STRATEGY, lambda x: step(x, np.int64(12)), LOSSES) == LOSSES.sum() / 12


def test_one_loss_for_each_example_is_one_number_for_each_and_the_lines_that_the_message_has_are_right(strategy3):
    strategy = strategy3
    losses = np.random.default_rng(0).normal(size=(7, 4, 2)).astype(np.float32)
    w, weights = variable(1.0, strategy), np.ones((7, 4, 2), bool)
    takers = {
        "compute_average_loss got": compute_average_loss,
        "the function returned": lambda x: mr.value_and_grad(lambda: w * x, w)()[0],
    }
    shapes = {"(1, 2)": lambda x: x, "1": lambda x: x[:, :, 0]}
    for rows in (losses, losses[:1]):
        [batch, mask] = next(iter(strategy.distribute_dataset([(rows, weights[: len(rows)])])))
        for what, take in takers.items():
            for axis, shaped in shapes.items():
                expected = (
                    rf"{what} losses of shape \(\d+, 4.*\(n,\) and \(n, 1\).*\n *losses\.mean\(axis={re.escape(axis)}\) .*\n *"
                )
                with pytest.raises(ValueError, match=expected + r"mr\.losses\.weighted_mean\(losses, weights\)"):
                    strategy.run(lambda x, take=take, shaped=shaped: take(shaped(x)), args=(batch,))
            mean = strategy.reduce("sum", strategy.run(lambda x, take=take: take(x.mean(axis=(1, 2))), args=(batch,)))
            np.testing.assert_allclose(mean, rows.mean(), rtol=1e-5, atol=1e-6)
        mean = strategy.reduce("sum", strategy.run(mr.losses.weighted_mean, args=(batch, mask)))
        np.testing.assert_allclose(mean, rows.mean(), rtol=1e-5, atol=1e-6)
        with pytest.raises(ValueError, match=r"broadcast_to\(weights\[:, None\], losses\.shape\)"):
            strategy.run(lambda x: mr.losses.weighted_mean(x[:, :, 0], jnp.ones(len(x))), args=(batch,))
    with pytest.raises(ValueError, match=r"the function returned losses of shape \(7, 7\)"):  # outside of a step
        mr.value_and_grad(lambda: w * (losses[:, 0, 0] - losses[:, :1, 0]), w)()


#: Of rows `x` [n, 2]: losses that are not one for each example.
OTHER_LENGTHS = {
    "the mean over the wrong axis": lambda x: (x**2).mean(axis=0),
    "a vector of several terms": lambda x: jnp.stack([(x**2).mean(), jnp.abs(x).mean(), x.max(initial=0.0)]),
    "a term more than rows": lambda x: jnp.append((x**2)[:, 0], 3.0),
}


def test_losses_of_another_length_than_rows_are_refused_where_the_replicas_do_not_divide_the_batch(strategy3):
    strategy = strategy3
    w, rows = variable(1.0, strategy), np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)
    optimizer = mr.Optimizer(optax.sgd(0.1), w)
    takers = [compute_average_loss, lambda losses: optimizer.minimize(lambda: w * losses)]
    message = r"not divide evenly.* shape \[n\], has the lengths \(.* rows\..*\n    losses\.mean\(axis=1\) .*\n    mr\.losses\."
    every_size = ([7], [1], [6, 5])  # an odd last batch: before the first has run
    for (number, (name, loss)), (other, take) in itertools.product(enumerate(OTHER_LENGTHS.items()), enumerate(takers)):
        sizes = every_size[(number + other) % 3]  # each with each taker
        batch, *_ = strategy.distribute_dataset([rows[:size] for size in sizes])
        before = w.numpy()
        with pytest.raises(mr.UnevenReplicasError, match=message):
            strategy.run(lambda x, loss=loss, take=take: take(loss(x)), args=(batch,)), pytest.fail(f"{name}, {sizes}")
        assert w.numpy() == before


def test_lengths_in_the_ratio_of_rows_and_the_lines_for_others_are_those_of_one_device(strategy3):
    strategy = strategy3
    rows = np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)

    def terms(x):
        return jnp.stack([(x**2).mean(), x.mean()])

    right = [  # what a step computes of a batch, and one device
        (lambda x: compute_average_loss((x**2).mean(axis=1)), lambda x: (x**2).mean()),
        (lambda x: compute_average_loss(jnp.concatenate([x[:, 0], x[:, 1]])), np.mean),  # two views of each example
        (lambda x: compute_average_loss(jnp.repeat(x[:, 0], 3)), lambda x: x[:, 0].mean()),
        (lambda x: compute_average_loss(mr.get_replica_context().all_gather(x[:, 0], axis=0)), lambda x: x[:, 0].mean()),
        (lambda x: mr.losses.mean_over_own_rows(jnp.mean(terms(x))), lambda x: terms(x).mean()),
        (lambda x: mr.losses.weighted_mean(y := jnp.append(x[:, 0] * 0, 0) + 2, jnp.ones(y.shape)), lambda x: 2),
    ]
    for size in (7, 1):
        [batch] = strategy.distribute_dataset([rows[:size]])
        totals = strategy.reduce("sum", strategy.run(lambda x: [step(x) for step, _ in right], args=(batch,)))
        np.testing.assert_allclose(totals, [mean(rows[:size]) for _, mean in right], rtol=1e-5, err_msg=str(size))

    def of_both(x, y):
        return compute_average_loss(x[:, 0]), compute_average_loss(y[:, 0])

    [odd], [even] = strategy.distribute_dataset([rows]), strategy.distribute_dataset([rows[:6]])
    for own in ((odd, even), (even, odd)):
        totals = strategy.reduce("sum", strategy.run(of_both, args=own))
        np.testing.assert_allclose(sorted(totals), sorted([rows[:, 0].mean(), rows[:6, 0].mean()]), rtol=1e-5)
    labelled_and_not = lambda x, y: jnp.concatenate([x[:, 0], y[:, 0], y[:, 1]])  # noqa: E731
    for given in (np.ones((8, 2), np.float32), rows[:2]):
        [other] = strategy.distribute_dataset([given])
        shares = strategy.run(lambda x, y: compute_average_loss(labelled_and_not(x, y)), args=(odd, other))
        np.testing.assert_allclose(strategy.reduce("sum", shares), labelled_and_not(rows, given).mean(), rtol=1e-5)
    [other] = strategy.distribute_dataset([np.ones((8, 2), np.float32)])
    with pytest.raises(mr.UnevenReplicasError, match="lengths"):
        strategy.run(lambda x, y: compute_average_loss(jnp.append(labelled_and_not(x, y), 3)), args=(odd, other))
    sentences = strategy.distribute_values_from_function(lambda ctx: np.ones((2, 3 + ctx.replica_id_in_sync_group), np.float32))
    assert float(strategy.reduce("sum", strategy.run(lambda x: compute_average_loss(x.mean(axis=1)), args=(sentences,)))) == 1


def test_losses_of_every_real_dtype_and_a_regularization_loss_that_counts_once(strategy3):
    for dtype in ("int32", "bool", "bfloat16", "float16"):
        assert total(STRATEGY, compute_average_loss, np.array([0, 1, 1, 0], jnp.dtype(dtype))) == 0.5
    w = variable(np.full(2, 3, np.float32), strategy3)
    losses = [6.0, 6, np.float32(6), jnp.full(3, 2.0), [1.0, 2.0, 3.0], w]
    scaled = strategy3.run(lambda: [scale_regularization_loss(loss) for loss in losses])
    assert [float(loss) for loss in scaled] == [2.0] * len(losses)


# Other wrong arguments are in test_bad_input.


# -- the loss says how it is divided

W = np.linspace(-1, 1, 4, dtype=np.float32)
X, Y = np.cos(np.arange(48, dtype=np.float32)).reshape(12, 4), np.sin(np.arange(12, dtype=np.float32))
TOKENS = (np.arange(12)[:, None] * 7 % 5 > np.arange(4)).astype(np.float32)  # 0 to 4 of each row's 4 are tokens


def each(w, x, y):
    return (jnp.tanh(x @ w) - y) ** 2


def tokens_of(w, x):
    return (x * w - 0.5) ** 2


def all_of(value):
    return mr.get_replica_context().all_reduce("sum", value)


#: Each right form, and the loss of one device; whole programs are in parity/programs.py.
RIGHT = {
    "one for each example": (lambda w, x, y, m: each(w, x, y), lambda w, x, y, m: each(w, x, y).mean()),
    "one for each image": (lambda w, x, y, m: tokens_of(w, x).mean(1), lambda w, x, y, m: tokens_of(w, x).mean()),
    "compute_average_loss": (
        lambda w, x, y, m: compute_average_loss(each(w, x, y)) + scale_regularization_loss(0.1 * jnp.sum(w**2)),
        lambda w, x, y, m: each(w, x, y).mean() + 0.1 * jnp.sum(w**2),
    ),
    "weights of examples": (
        lambda w, x, y, m: compute_average_loss(each(w, x, y), x[:, 0]), lambda w, x, y, m: (each(w, x, y) * x[:, 0]).mean()
    ),
    "mean over own rows": (
        lambda w, x, y, m: mr.losses.mean_over_own_rows(optax.huber_loss(x @ w, y).mean() + 0.1 * jnp.sum(w**2)),
        lambda w, x, y, m: optax.huber_loss(x @ w, y).mean() + 0.1 * jnp.sum(w**2),
    ),
    "already divided": (
        lambda w, x, y, m: mr.losses.already_divided(each(w, x, y).sum() / all_of(y.shape[0])),
        lambda w, x, y, m: each(w, x, y).mean(),
    ),
    "padded": (
        lambda w, x, y, m: mr.losses.weighted_mean(tokens_of(w, x), m),
        lambda w, x, y, m: (tokens_of(w, x) * m).sum() / jnp.maximum(m.sum(), 1),
    ),
    "weights that are trained": (
        lambda w, x, y, m: mr.losses.weighted_mean(each(w, x, y), jnp.exp(x @ w)),
        lambda w, x, y, m: jnp.average(each(w, x, y), weights=jnp.exp(x @ w)),
    ),
    "products and differences": (
        lambda w, x, y, m: 3 * compute_average_loss(each(w, x, y)) / jnp.sum(w**2) - mr.losses.weighted_mean(x @ w, x[:, 0] > -2),
        lambda w, x, y, m: 3 * each(w, x, y).mean() / jnp.sum(w**2) - (x @ w).mean(),
    ),
    "jit, remat, scan": (
        lambda w, x, y, m: jax.jit(jax.checkpoint(lambda w: compute_average_loss(
            jax.lax.scan(lambda c, r: (c, each(w, *r)), 0.0, (x, y))[1])))(w),
        lambda w, x, y, m: each(w, x, y).mean(),
    ),
}  # fmt: skip


def batch_of(sizes):
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(len(sizes))])
    ends = np.cumsum(sizes)
    rows = [np.split(array[: ends[-1]], ends[:-1]) for array in (X, Y, TOKENS)]
    parts = [[parts[i] for parts in rows] for i in range(len(sizes))]
    return strategy, strategy.distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group])


def of_ours(loss):
    """Make a function of a variable and the rows that returns the loss and its gradient by `mr.value_and_grad`."""

    def value_and_gradient(w, rows):
        value, [gradient] = mr.value_and_grad(lambda: loss(w.value, *rows), [w])()
        return value, gradient

    return value_and_gradient


def by_optimizer(strategy, x, gradients, **options):
    """Return losses, and changes of weights by `mr.Optimizer`, of several functions like `of_ours(loss)` in one step."""
    variables = {name: variable(W, strategy) for name in gradients}
    optimizers = {name: mr.Optimizer(optax.sgd(1.0), [w], **options) for name, w in variables.items()}

    def step(rows):
        values = {}
        for name, w in variables.items():
            values[name], gradient = gradients[name](w, rows)
            optimizers[name].apply_gradients([gradient])
        return values

    values = strategy.reduce("sum", strategy.run(step, args=(x,)))
    strategy.assert_mirrored()
    return {name: (float(values[name]), W - w.numpy()) for name, w in variables.items()}


@pytest.mark.parametrize("sizes", [[4, 3, 0], *nightly([4, 4, 4])], ids=["uneven", "even"])
def test_every_right_form_is_the_update_of_one_device_in_silence(sizes):
    strategy, x = batch_of(sizes)
    found = by_optimizer(strategy, x, {name: of_ours(loss) for name, (loss, _) in RIGHT.items()})
    whole = [array[: sum(sizes)] for array in (X, Y, TOKENS)]
    alone = jit(lambda w: {name: jax.value_and_grad(of_one)(w, *whole) for name, (_, of_one) in RIGHT.items()})(W)
    for name, (value, gradient) in alone.items():
        np.testing.assert_allclose(found[name][0], value, rtol=2e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(found[name][1], gradient, rtol=1e-4, atol=2e-6, err_msg=name)


#: Scalars whose division nobody has said: no form of a mean or a sum is recognized. More are in test_refusals.
UNSPOKEN = {
    "jnp.mean": lambda w, x, y, m: jnp.mean(each(w, x, y)),
    "a sum": lambda w, x, y, m: jnp.sum(each(w, x, y)),
    "by a number that may be that of all rows": lambda w, x, y, m: each(w, x, y).sum() / 12,
}


@pytest.mark.parametrize("sizes", [[4], [4, 3, 0]], ids=str)
def test_a_loss_that_nobody_has_spoken_for_warns_once_for_any_number_of_replicas(sizes):
    strategy, x = batch_of(sizes)
    unspoken = {name: of_ours(loss) for name, loss in UNSPOKEN.items()}
    with pytest.warns(mr.FactorOfReplicasWarning) as caught:
        made(by_optimizer, strategy, x, {**unspoken, "right": of_ours(RIGHT["compute_average_loss"][0])})
    messages = [str(warning.message) for warning in caught if warning.category is mr.FactorOfReplicasWarning]
    assert len(messages) == len(UNSPOKEN), "one for each optimizer of such a loss"
    lines = (
        "return per_example_losses",
        "mr.losses.mean_over_own_rows(loss)",
        "return share + mr.losses.scale_regularization_loss(penalty)",
    )
    for line in (*lines, "aggregate='mean')"):
        assert all(line in message and "nobody has said how the loss is divided" in message for message in messages)
    for aggregate in ("sum", "mean"):
        mean = {"mean": unspoken["jnp.mean"]}
        made(
            functools.partial(by_optimizer, strategy, x, mean, aggregate=aggregate)
        )  # the user has said it, and warnings are errors here


GRADIENTS = {
    "jax.grad": lambda loss: lambda w: jax.grad(loss)(w),
    "forward mode": lambda loss: lambda w: jax.jacfwd(loss)(w),
    "jvp by hand": lambda loss: lambda w: jnp.stack([jax.jvp(loss, (w,), (e,))[1] for e in jnp.eye(4)]),
    "jit, remat": lambda loss: lambda w: jax.jit(jax.grad(jax.checkpoint(loss)))(w),
    "two halves": lambda loss: lambda w: jax.lax.scan(lambda g, _: (g + jax.grad(loss)(w) / 2, None), jnp.zeros(4), None, 2)[0],
    "while": lambda loss: lambda w: jax.lax.fori_loop(0, 2, lambda i, g: g + jax.grad(loss)(w) / 2, jnp.zeros(4)),
    "cond": lambda loss: lambda w: jax.lax.cond(w[0] < 9, jax.grad(loss), jnp.zeros_like, w),
    "custom_jvp": lambda loss: lambda w: jax.grad(lambda w: loss(jax.nn.relu(w + 9) - 9))(w),
    "loss scaling": lambda loss: lambda w: jax.grad(lambda w: 1024 * loss(w))(w) / 1024,
}  # fmt: skip


def test_what_a_loss_says_is_told_to_whatever_is_computed_of_its_gradient():
    strategy, x = batch_of([4, 4, 4])
    right, wrong = RIGHT["compute_average_loss"][0], UNSPOKEN["jnp.mean"]

    def gradients_by(makers, loss):
        def gradient_by(make):
            return lambda w, rows: (0.0, make(lambda w: loss(w, *rows))(w.value))

        return {name: gradient_by(make) for name, make in makers.items()}

    expected = jax.grad(lambda w: RIGHT["compute_average_loss"][1](w, X, Y, TOKENS))(W)
    for name, (_, change) in by_optimizer(strategy, x, gradients_by(GRADIENTS, right)).items():
        np.testing.assert_allclose(change, expected, rtol=1e-4, atol=1e-6, err_msg=name)
    others = {
        "per example": lambda loss: lambda w: jax.vmap(jax.grad(each), (None, 0, 0))(w, X[:4], Y[:4]).mean(0),
        "no gradient": lambda loss: lambda w: w - 1,
        "decayed": lambda loss: lambda w: jax.grad(loss)(w) + 0.1 * w,
    }
    with pytest.warns(mr.FactorOfReplicasWarning) as caught:
        made(by_optimizer, strategy, x, gradients_by(GRADIENTS, wrong) | gradients_by(others, right))
    assert len(caught) == len(GRADIENTS) + len(others), "one for each optimizer"
    assert sum("nobody has said" in str(warning.message) for warning in caught) >= len(GRADIENTS)


@pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")
def test_a_loss_that_speaks_and_an_aggregate_that_contradicts_it_are_refused():
    for sizes, name in (([4], "one for each example"), ([4, 3], "one for each example"), ([4, 3], "mean over own rows")):
        strategy, x = batch_of(sizes)
        w = variable(W, strategy, name="w")
        optimizer = mr.Optimizer(optax.adam(1.0), [w], aggregate="mean")

        def step(rows, w=w, optimizer=optimizer, loss=RIGHT[name][0], **options):
            optimizer.apply_gradients(mr.grad(lambda: loss(w.value, *rows), [w])(), **options)

        with pytest.raises(mr.FactorOfReplicasError, match=r"'w', given to apply_gradients .*='mean', is .* a share"):
            strategy.run(step, args=(x,)), pytest.fail(name)
        assert w.numpy().tobytes() == W.tobytes() and int(optimizer.iterations) == 0
    strategy.run(step, args=(x,), kwargs={"aggregate": "sum"})


def test_a_mean_by_weights_of_small_numbers_and_of_none():
    halves = jnp.full((4, 9000), 0.5, jnp.float16)
    [mask] = STRATEGY.distribute_dataset([np.ones((8, 9000), bool)])
    loss = STRATEGY.run(lambda mask: mr.losses.weighted_mean(halves, mask), args=(mask,))
    assert loss.dtype == jnp.float16 and float(STRATEGY.reduce("sum", loss)) == 0.5, "72,000 is no float16"

    def of_nothing(mask):
        return mr.value_and_grad(lambda: mr.losses.weighted_mean(w * mask, 0 * mask), w)()

    w = variable(3.0, STRATEGY)
    [mask] = STRATEGY.distribute_dataset([np.ones(4, np.float32)])
    assert [float(STRATEGY.reduce("sum", value)) for value in STRATEGY.run(of_nothing, args=(mask,))] == [0.0, 0.0]


def test_tokens_accumulated_in_parts_are_divided_by_those_of_all_parts(strategy3):
    strategy = strategy3
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    mask = np.arange(12) % 5 < 3
    w = variable(W, strategy)

    def step(x, mask, is_divided_by_all):
        total = mr.get_replica_context().all_reduce("sum", mask.sum()) if is_divided_by_all else None
        parts = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), (x, mask))
        loss = lambda w, x, mask: mr.losses.weighted_mean((x @ w) ** 2, mask, total)  # noqa: E731
        add = lambda sums, part: (jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(w.value, *part)), None)  # noqa: E731
        return mr.get_replica_context().all_reduce("sum", jax.lax.scan(add, (jnp.float32(0), jnp.zeros(4)), parts)[0])

    [batch] = strategy.distribute_dataset([(x, mask)])
    alone = jax.value_and_grad(lambda w: ((x @ w) ** 2 * mask).sum() / mask.sum())(W)
    jax.tree.map(
        lambda ours, one: np.testing.assert_allclose(ours, one, rtol=1e-5), strategy.run(step, args=(*batch, True)), alone
    )
    assert float(strategy.run(step, args=(*batch, False))[0]) > 1.5 * float(alone[0]), "each part by its own tokens"
    with pytest.raises(ValueError, match=r"total has shape \(3,\); expected a scalar: ctx.all_reduce"):
        strategy.run(lambda: mr.losses.weighted_mean(jnp.ones(3), jnp.ones(3), jnp.ones(3)))


#: Losses in which a share is divided again, and two in which it is not.
AGAIN = {
    "a mean": lambda w, x, y: mr.losses.mean_over_own_rows(compute_average_loss(each(w, x, y))),
    "a penalty": lambda w, x, y: scale_regularization_loss(compute_average_loss(each(w, x, y))),
    "beside rows": lambda w, x, y: each(w, x, y) + compute_average_loss(each(w, x, y)),
}
NOT_AGAIN = {
    "said twice": lambda w, x, y: mr.losses.already_divided(2 * compute_average_loss(each(w, x, y))),
    "two shares": lambda w, x, y: compute_average_loss(each(w, x, y)) + mr.losses.weighted_mean(each(w, x, y), jnp.ones_like(y)),
}


def updated(num_replicas, loss):
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    w = variable(W, strategy)
    optimizer = mr.Optimizer(optax.sgd(1.0), [w])
    [batch] = strategy.distribute_dataset([(X[:7], Y[:7])])
    strategy.run(lambda x, y: optimizer.minimize(lambda: loss(w, x, y)), args=batch)
    return w.numpy()


def penalized(w, x, y, combine):
    [gradient] = mr.grad(lambda: each(w, x, y), [w])()
    return each(w, x, y) + 0.5 * jnp.sum(combine(gradient) ** 2)


def test_a_share_that_is_divided_again_is_refused_for_any_number_of_replicas():
    of_a_gradient = lambda *rows: penalized(*rows, lambda gradient: gradient)  # noqa: E731
    for num_replicas, losses in ((1, [AGAIN["a mean"], of_a_gradient]), (2, [*AGAIN.values(), of_a_gradient])):
        for loss in losses:
            with pytest.raises(mr.FactorOfReplicasError, match=r"the loss at .*test_losses.py:\d+ .* was divided so before"):
                updated(num_replicas, loss)


def adversarial(w, x, y):
    """The gradient by a replica's own rows is theirs, and no share."""
    towards = jax.grad(lambda x: compute_average_loss(each(w.value, x, y)))(x)
    return each(w, x + 0.1 * jnp.sign(towards), y)


def test_shares_that_are_added_or_combined_are_not_divided_again():
    for loss in (*NOT_AGAIN.values(), adversarial, lambda *rows: penalized(*rows, all_of)):
        np.testing.assert_allclose(updated(3, loss), updated(1, loss), rtol=1e-5)
