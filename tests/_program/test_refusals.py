"""A factor of R in an update is noticed, and right programs are left alone."""

import re
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from random_programs import lockstep
from strategies import all_reduce, ctx, made, numbers, strategy_of, variable

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

SIZE = 3
HERE = re.escape(__file__)


def model(strategy):
    """Two variables, an optimizer for both and one for each."""
    with strategy.scope():
        w, b = mr.Variable(np.ones(SIZE, "float32"), name="w"), mr.Variable(0.5, name="b")
        return w, b, *(mr.Optimizer(optax.sgd(0.1), variables) for variables in ([w, b], [w], [b]))


def own_rows(strategy):
    return numbers(strategy, range(SIZE))


def warnings_of(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    same = "computed the same gradients"
    return [warning for warning in caught if warning.category is mr.FactorOfReplicasWarning or same in str(warning.message)]


def warned(function, *args):
    """Return what is said of a step when its program is made."""
    return warnings_of(made, function, *args)


def values(*variables):
    return [np.asarray(variable).tobytes() for variable in variables]


# -- shares of a loss that are averaged


def test_a_mean_of_shares_that_a_step_has_returned_is_said_too(strategy2):
    [x] = strategy2.distribute_dataset([np.arange(4, dtype=np.float32)])
    step = lambda x: {"loss": mr.losses.compute_average_loss(x), "metric": jnp.mean(x)}  # noqa: E731
    result = strategy2.run(step, args=(x,))
    for mean_of in (lambda: strategy2.reduce("mean", result), mr.function(lambda: strategy2.reduce("mean", result["loss"]))):
        [found] = warnings_of(lambda mean_of=mean_of: [mean_of()])
        assert re.search(r"test_refusals.*strategy\.reduce\('sum', value", str(found.message)) and found.filename == __file__
    assert not warnings_of(lambda: [strategy2.reduce("sum", result), strategy2.reduce("mean", result["metric"])])


def test_a_mean_of_shares_in_a_metric_is_said_too(strategy2):
    seen = variable(0.0, strategy2, synchronization="on_read", aggregation="mean")
    [x] = strategy2.distribute_dataset([np.arange(4, dtype=np.float32)])
    [found] = warned(strategy2.run, lambda x: seen.assign_add(mr.losses.compute_average_loss(x)), (x,))
    assert re.search(rf"the mean over the replicas at {HERE}:\d+ is of this replica's share", str(found.message))
    is_finite = lambda x: jnp.isfinite(mr.losses.compute_average_loss(x)).astype(jnp.float32)  # noqa: E731
    for metric in (jnp.mean, is_finite):
        assert not warned(strategy2.run, lambda x, metric=metric: seen.assign_add(metric(x)), (x,))
    [found] = warned(strategy_of(1).run, lambda x: all_reduce("mean", mr.losses.compute_average_loss(x)), (np.ones(4),))
    assert "R = 1 here" in str(found.message), "before it is R times too small"


def test_a_loss_of_all_replicas_that_nobody_has_spoken_for_warns(strategy2):
    [x] = strategy2.distribute_dataset([np.arange(4, dtype=np.float32)])
    whole = lambda loss: lambda x: mr.losses.global_loss(lambda w: loss(w * x))(1.0)  # noqa: E731
    [found] = warned(strategy2.run, whole(jnp.mean), (x,))
    assert re.search(rf"nobody has said .*global_loss sums over the replicas at {HERE}:\d+", str(found.message))
    for loss in (mr.losses.compute_average_loss, lambda losses: mr.losses.mean_over_own_rows(jnp.mean(losses))):
        assert not warned(strategy2.run, whole(loss), (x,))


def test_a_mean_outside_of_an_uneven_step_is_said_and_each_line_is_right(strategy3):
    strategy = strategy3
    for rows, is_uneven in ((np.float32([3, 1, 4, 1, 5, 9, 2]), True), (np.arange(6, dtype=np.float32), False)):
        [x] = strategy.distribute_dataset([rows])
        own, each, inside = strategy.run(lambda x: (x.mean(), x * 1, all_reduce("mean", x.mean())), args=(x,))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.reduce("mean", {"own": own})
        found = [str(warning.message) for warning in caught if warning.category is mr.UnevenReplicasWarning]
        assert len(found) == is_uneven and all("all_reduce('mean', value)" in message for message in found)
        for mean in (inside, strategy.reduce("mean", each, axis=0)):
            np.testing.assert_allclose(mean, rows.mean(), rtol=1e-6)
        np.testing.assert_array_equal(
            strategy.reduce("sum", own) / 3, np.mean([np.float32(v) for v in strategy.local_results(own)])
        )
        strategy.reduce("mean", {"inside": inside})


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_mean_that_a_variable_keeps_of_own_rows_is_refused_beside_an_uneven_batch(num_replicas):
    strategy = strategy_of(num_replicas)
    seen = variable(0.0, strategy, synchronization="on_read", aggregation="mean")
    [even], [odd] = (strategy.distribute_dataset([np.arange(n, dtype=np.float32)]) for n in (6, 7))
    plain, combined = (lambda x: seen.assign(x.mean())), (lambda x: seen.assign(all_reduce("mean", x.mean())))
    strategy.run(plain, args=(even,))
    assert float(seen) == 2.5
    if num_replicas > 1:
        line = r"assign\(ctx\.all_reduce\('mean', value\)\)"
        with pytest.raises(mr.UnevenReplicasError, match=rf"at {HERE}:\d+\. Combine .*{line}"):
            strategy.run(plain, args=(odd,))
        assert float(seen) == 2.5
    strategy.run(combined, args=(odd,))
    np.testing.assert_allclose(float(seen), 3.0, rtol=1e-6)


def test_a_penalty_of_own_rows_is_no_regularization_and_both_lines_are_right(strategy3):
    scaled, own, average = mr.losses.scale_regularization_loss, mr.losses.mean_over_own_rows, mr.losses.compute_average_loss
    losses = {
        "in its mean": lambda w, h: average((h - 1) ** 2) + own(0.1 * jnp.mean(h**2) + 0.1 * w**2),
        "in each": lambda w, h: average((h - 1) ** 2 + 0.1 * h**2) + scaled(0.1 * w**2),
    }
    for rows in ([1.0, 2.0, 6.0, 4.0], [2.0]):
        x = np.float32(rows)
        [batch] = strategy3.distribute_dataset([x])
        wrong = lambda x: average(x) + scaled(0.1 * jnp.mean(x**2))  # noqa: E731
        message = rf"at {HERE}:\d+ depends on the argument `x`.*mean_over_own_rows\(penalty\)"
        with pytest.raises(mr.FactorOfReplicasError, match=message):
            strategy3.run(wrong, args=(batch,))
        on_one = lambda w, x=x: jnp.mean((x * w - 1) ** 2) + 0.1 * jnp.mean((x * w) ** 2) + 0.1 * w**2  # noqa: E731
        expected = lockstep.jit(jax.grad(on_one))(1.0)
        for name, loss in losses.items():
            step = lambda x, loss=loss: all_reduce("sum", jax.grad(lambda w: loss(w, x * w))(1.0))  # noqa: E731
            np.testing.assert_allclose(strategy3.run(step, args=(batch,)), expected, rtol=1e-5, err_msg=name)


# -- gradients that have been combined before


REDUCTIONS = {
    "sum": lambda gradients: all_reduce("sum", gradients),
    "mean": lambda gradients: all_reduce("mean", gradients),
    "psum": lambda gradients: jax.lax.psum(gradients, "replica"),
    "gathered": lambda gradients: [jnp.sum(ctx().all_gather(g[None], 0), 0) for g in gradients],
    "merged": lambda gradients: ctx().merge_call(lambda s, g: s.reduce("mean", g), args=(gradients,)),
    "clipped_afterwards": lambda gradients: [jnp.clip(g, -1, 1) for g in all_reduce("mean", gradients)],
    "decayed_afterwards": lambda gradients: [g + 0.01 for g in all_reduce("mean", gradients)],
    "one_of_two": lambda gradients: [all_reduce("mean", gradients[0]), gradients[1]],
}  # fmt: skip


def test_gradients_that_were_combined_before_are_refused(strategy3):
    for strategy in (strategy3, mr.OneDeviceStrategy("cpu:0")):
        w, b, optimizer, *_ = model(strategy)

        def step(x, combine, w=w, b=b, optimizer=optimizer):
            _, gradients = mr.value_and_grad(lambda: mr.losses.already_divided(jnp.sum(w * x) + b * x[0]), [w, b])()
            gradients = combine(gradients)
            optimizer.apply_gradients(gradients)

        before, line = values(w, b), step.__code__.co_firstlineno + 3
        expected = (
            rf"the gradient of variable 'w' given to apply_gradients at {HERE}:{line} has already been combined .*"
            r"optimizer\.apply_gradients\(grads, aggregate=False\)"
        )
        for name, combine in REDUCTIONS.items() if strategy is strategy3 else [("sum", REDUCTIONS["sum"])]:
            with pytest.raises(mr.FactorOfReplicasError, match=expected):
                strategy.run(step, args=(own_rows(strategy), combine)), pytest.fail(name)
        assert values(w, b) == before


def test_an_accumulator_that_aggregates_counts_as_combined_and_a_local_one_does_not(strategy3):
    w, _, _, optimizer, _ = model(strategy3)
    total = variable(np.zeros(SIZE, "float32"), strategy3, aggregation="sum")
    local = variable(np.zeros(SIZE, "float32"), strategy3, synchronization="on_read", aggregation="sum")

    def step(x, accumulator):
        _, [gradient] = mr.value_and_grad(lambda: jnp.sum(w * x), [w])()
        accumulator.assign_add(gradient)
        optimizer.apply_gradients([accumulator.value], aggregate="sum")  # what a variable keeps says nothing

    x = own_rows(strategy3)
    with pytest.raises(mr.FactorOfReplicasError, match="already been combined"):
        strategy3.run(lambda x: step(x, total), args=(x,))
    assert warnings_of(lambda: strategy3.run(lambda x: step(x, local), args=(x,))) == []


# -- the whole batch on every replica


def whole_batch_step(w, optimizer):
    def step(x):
        loss, gradients = mr.value_and_grad(lambda: jnp.mean(w * x), [w])()
        optimizer.apply_gradients(gradients)
        return loss

    return step


def test_the_whole_batch_on_every_replica_warns_once(strategy3):
    x = np.ones(SIZE, "float32")
    closed_over = jnp.asarray(x)
    ways = {
        "argument": lambda step: lambda: strategy3.run(step, args=(x,)),
        "closure": lambda step: lambda: strategy3.run(lambda: step(closed_over)),
        "function": lambda step: mr.function(lambda: strategy3.run(step, args=(x,))),
        "scan": lambda step: lambda: mr.scan(lambda c, _: (c, strategy3.run(step, args=(x,))), 0.0, None, length=3),
    }
    for name, way in ways.items():
        w, _, _, optimizer, _ = model(strategy3)
        step = whole_batch_step(w, optimizer)
        run = way(step)
        caught = warnings_of(lambda run=run: [run() for _ in range(2)])
        assert [warning.filename for warning in caught] == [__file__], name
        line = step.__code__.co_firstlineno + 2
        expected = rf"3 replicas .* apply_gradients at {HERE}:{line} (.*\n.*)strategy\.distribute_dataset\(dataset\)"
        assert re.search(expected, str(caught[0].message)), name
    strategy3.assert_mirrored()


def test_the_warning_tells_the_truth_and_as_an_error_leaves_everything_as_it_was(strategy):
    """The update is R times that of one device; on one device it is that nobody has said what the loss is."""
    w, _, _, optimizer, _ = model(strategy)
    step, x, before = whole_batch_step(w, optimizer), np.ones(SIZE, "float32"), values(w)
    with pytest.raises(mr.FactorOfReplicasWarning):  # warnings are errors here
        strategy.run(step, args=(x,))
    assert values(w) == before
    [caught] = warnings_of(strategy.run, step, (x,))
    expected = "computed the same gradients" if strategy.num_replicas_in_sync > 1 else "nobody has said how the loss is divided"
    assert expected in str(caught.message)
    np.testing.assert_allclose(w.numpy(), 1 - strategy.num_replicas_in_sync * 0.1 / SIZE, rtol=1e-6)


def mean_by_hand(loss, w, _):
    gradient = jax.grad(loss)(w.value)
    w.assign(w - 0.1 * jax.lax.pmean(gradient * jnp.minimum(1.0, 1 / jnp.linalg.norm(gradient)), "replica"))


def mean_that_speaks(loss, w, optimizer):
    optimizer.apply_gradients(mr.grad(lambda: mr.losses.mean_over_own_rows(loss(w.value)), [w])())


@pytest.mark.parametrize("update", [mean_by_hand, mean_that_speaks])
def test_rows_drawn_in_the_step_of_one_key_are_the_same_work_on_each_replica(strategy, update):
    """The numbers are right, which is why nothing else would say it. With a key and rows of its own none repeats another's."""
    w, _, _, optimizer, _ = model(strategy)
    num_replicas = strategy.num_replicas_in_sync

    def step(key, is_own):
        rows = jax.random.normal(ctx().rng(key) if is_own else key, (6 // (num_replicas if is_own else 1), 1))
        update(lambda w: jnp.mean((rows * w - 1) ** 2), w, optimizer)

    said = warnings_of(lambda: [strategy.run(step, args=(jax.random.key(k), False)) for k in range(2)])
    assert [warning.filename for warning in said] == [__file__] * (num_replicas > 1)
    for warning in said:
        expected = (
            rf"all {num_replicas} replicas .*the numbers are right, and each replica has done .*\n.*\n    key = ctx\.rng\(key\)"
        )
        assert re.match(expected, str(warning.message))
    assert warned(strategy.run, step, (jax.random.key(0), True)) == []


def test_the_same_gradient_beside_that_of_own_rows_is_silent(strategy3):
    """As that of a penalty."""
    w, b, both, _, _ = model(strategy3)

    def step(x):
        both = [jax.grad(lambda w: jnp.sum(w**2))(w.value), jax.grad(lambda w: jnp.mean(x * w))(w.value)]
        w.assign(w - 0.1 * sum(ctx().all_reduce("mean", both)))

    assert warned(strategy3.run, step, (own_rows(strategy3),)) == []
    average = lambda: w.assign(0.9 * w + 0.1 * ctx().all_reduce("mean", b.value))  # noqa: E731
    assert warned(strategy3.run, average, ()) == [], "it is no gradient"
    unspoken = lambda x: both.minimize(lambda: jnp.mean(x * w) + b**2)  # noqa: E731
    [found] = warned(strategy3.run, unspoken, (own_rows(strategy3),))
    assert str(found.message).startswith(UNSPOKEN), "as the gradient of `w` alone"


# -- a loss that was combined before it was differentiated


def gathered(z):
    return ctx().all_gather(z, axis=0)


def test_the_gradient_of_a_weight_behind_what_was_gathered_is_a_share_too(strategy3):
    """A temperature of logits of all rows: the same gradient on all replicas, each a share of that of the whole."""
    rows, average = np.arange(9, dtype="float32").reshape(3, 3) / 10, mr.losses.compute_average_loss
    loss_of = lambda z, b: jax.nn.logsumexp(b * z @ z.T, axis=1)  # noqa: E731
    share = lambda z, b: average(loss_of(gathered(z), b))  # noqa: E731
    again = lambda gradients, x: [gradients[0], gradients[1] + all_reduce("sum", gradients[1] + 0 * x.sum())]  # noqa: E731
    plain = lambda gradients, x: gradients  # noqa: E731
    [batch] = strategy3.distribute_dataset([rows])

    def step(x, w, b, optimizer, loss, combine):
        optimizer.apply_gradients(combine(mr.grad(lambda: loss(x * w, b.value), [w, b])(), x))

    w, b, optimizer, _, _ = model(strategy3)
    assert warnings_of(lambda: strategy3.run(step, (batch, w, b, optimizer, share, plain))) == []
    expected = lockstep.jit(jax.grad(lambda w, b: loss_of(rows * w, b).mean(), (0, 1)))(np.ones(SIZE, "float32"), 0.5)
    for found, start, gradient in zip((w, b), (1, 0.5), expected, strict=True):
        np.testing.assert_allclose(found.numpy(), start - 0.1 * gradient, rtol=1e-5)
    whole = lambda z, b: jnp.mean(loss_of(gathered(z), b))  # noqa: E731
    beside = lambda z, b: share(z, b) + b * all_reduce("sum", z.sum())  # noqa: E731
    for loss, combine in ((share, again), (whole, plain), (beside, plain)):
        with pytest.raises(mr.FactorOfReplicasError, match=r"variable 'b' .* already been combined"):
            strategy3.run(step, (batch, w, b, optimizer, loss, combine))


COMBINED, UNSPOKEN = "combined over the replicas before it was differentiated", "nobody has said how the loss is divided"
CURVED = "the derivative of the loss by a share of mr.losses"
#: Losses of four own rows, by what is said of them where `jax.grad` differentiates them.
DIFFERENTIATED = {
    "sum of shares": (lambda each: all_reduce("sum", mr.losses.compute_average_loss(each)), COMBINED),
    "sum, then divided by all rows": (lambda each: jax.lax.psum(jnp.sum(each), "replica") / 12, COMBINED),
    "beside a share, first": (
        lambda each: all_reduce("sum", {"loss": each.sum()})["loss"] * 2 + mr.losses.compute_average_loss(each), COMBINED
    ),
    "in jit": (lambda each: jax.jit(lambda each: all_reduce("sum", jnp.sum(each) / 12))(each), COMBINED),
    "beside a share": (lambda each: mr.losses.compute_average_loss(each) + all_reduce("sum", each.sum()), COMBINED),
    "mean of means": (lambda each: jax.lax.pmean(jnp.mean(each), "replica"), COMBINED),
    "share of a sum": (lambda each: mr.losses.scale_regularization_loss(all_reduce("sum", each.sum()) / 12), ""),
    "divided by a count": (lambda each: each.sum() / all_reduce("sum", jnp.ones(()) * 4), UNSPOKEN),
    "said to be divided": (lambda each: mr.losses.already_divided(each.sum() / all_reduce("sum", jnp.ones(()) * 4)), ""),
    "of what is left of a mean": (lambda each: mr.losses.compute_average_loss((each - all_reduce("mean", each.mean())) ** 2), ""),
    "not linear in a share": (lambda each: jnp.log(mr.losses.compute_average_loss(each)), CURVED),
    "not linear in combined shares": (lambda each: jnp.log(all_reduce("sum", mr.losses.compute_average_loss(each))), COMBINED),
    "a share and what is not linear in combined shares": (
        lambda each: (own := mr.losses.compute_average_loss(each)) + all_reduce("sum", own) ** 2, COMBINED
    ),
    "a share weighed by combined shares": (
        lambda each: (own := mr.losses.compute_average_loss(each)) * jax.lax.stop_gradient(all_reduce("sum", own)), ""
    ),
    "scaled shares": (lambda each: -2 * mr.losses.compute_average_loss(each) / 3 - mr.losses.weighted_mean(each, each > 1), ""),
    "a share and another": (lambda each: mr.losses.compute_average_loss(each) + 0.1 * each.mean(), UNSPOKEN),
}  # fmt: skip


@pytest.mark.parametrize("expected", [COMBINED, UNSPOKEN, CURVED, ""])
def test_what_is_said_of_a_loss_goes_to_its_gradient_however_it_is_differentiated(strategy3, expected):
    losses = [loss for loss, said in DIFFERENTIATED.values() if said == expected]
    models = [model(strategy3) for _ in losses]
    [batch] = strategy3.distribute_dataset([np.arange(12 * SIZE, dtype="float32").reshape(12, SIZE) / 10])

    def update(loss, x, w, both, of_w):
        own = lambda w: loss(jnp.sum(jnp.tanh(x * w), axis=1))  # noqa: E731
        before = w.value
        both.apply_gradients([jax.grad(own)(before), None])
        of_w.apply_gradients([mr.grad(lambda: own(w.value), w)()])

    def step(x):
        for loss, (w, _, both, of_w, _) in zip(losses, models, strict=True):
            update(loss, x, w, both, of_w)

    found = warned(lambda: strategy3.run(step, args=(batch,)))
    messages = [str(warning.message) for warning in found]
    assert len(messages) == 2 * bool(expected) * len(losses), messages
    assert all(expected in message for message in messages), messages
    assert all(warning.filename == __file__ for warning in found)


def squares(w, x):
    return (x * w - 1) ** 2


def of_all(share):
    return all_reduce("sum", share)


average, as_one = mr.losses.compute_average_loss, mr.losses.scale_regularization_loss
#: Losses whose derivative by a share differs by replica, what the message's lines make of them, and the loss of one device.
OF_SHARES = {
    "a root": (
        lambda w, x: jnp.sqrt(average(squares(w, x))),
        lambda w, x: as_one(jnp.sqrt(of_all(average(squares(w, x))))),
        lambda w, x: jnp.sqrt(squares(w, x).mean()),
    ),
    "a quotient in jit": (
        jax.jit(lambda w, x: average(squares(w, x)) / average(abs(x * w))),
        lambda w, x: as_one(of_all(average(squares(w, x))) / of_all(average(abs(x * w)))),
        lambda w, x: squares(w, x).mean() / abs(x * w).mean(),
    ),
    "a checkpoint": (
        jax.checkpoint(lambda w, x: jnp.maximum(average(squares(w, x)), 5.0)),
        lambda w, x: as_one(jnp.maximum(of_all(average(squares(w, x))), 5.0)),
        lambda w, x: jnp.maximum(squares(w, x).mean(), 5.0),
    ),
    "times rows": (
        lambda w, x: average(squares(w, x)) * x.sum(),
        lambda w, x: average(squares(w, x) * x),
        lambda w, x: (squares(w, x) * x).mean(),
    ),
}  # fmt: skip


def test_what_is_not_linear_in_a_share_is_said_with_the_shares_line_and_the_lines_to_write_are_right(strategy3):
    rows = np.arange(1, 8, dtype=np.float32)
    [even], [own] = strategy3.distribute_dataset([rows[:6]]), strategy3.distribute_dataset([rows])
    w = variable(2.0, strategy3)
    optimizer = mr.Optimizer(optax.sgd(0.1), [w])
    summed = lambda loss: lambda x: ctx().all_reduce("sum", jax.grad(loss)(2.0, x))  # noqa: E731
    wrong = [("all_reduce", summed(loss)) for loss, _, _ in OF_SHARES.values()]
    of_root = OF_SHARES["a root"][0]
    wrong.append(("apply_gradients", lambda x: optimizer.apply_gradients([mr.grad(lambda: of_root(w.value, x), w)()])))
    for position, (verb, step) in enumerate(wrong):
        [warning] = warned(strategy3.run, step, (even if position else own,))
        assert re.match(rf"{CURVED}, at {HERE}:\d+, may .* by {verb} at {HERE}:\d+ need not", str(warning.message))
    right = lambda x: {name: summed(loss)(x) for name, (_, loss, _) in OF_SHARES.items()}  # noqa: E731
    alone = {name: lockstep.jit(jax.grad(loss))(2.0, rows) for name, (_, _, loss) in OF_SHARES.items()}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), strategy3.run(right, args=(own,)), alone)


@jax.custom_vjp
def packed_sine(z):
    return jnp.sin(z)


def unpack_and_multiply(z, g):
    z, g = jnp.split(jnp.concatenate([z, g]) * 1.0, 2)
    return (jnp.cos(z) * g,)


packed_sine.defvjp(lambda z: (jnp.sin(z), z), unpack_and_multiply)


def test_a_backward_pass_that_packs_values_and_cotangents_warns_and_the_designs_lines_silence_it(strategy3):
    """As that of `jax.experimental.ode.odeint`."""
    rows, w = np.arange(7, dtype=np.float32), variable(2.0, strategy3)
    [own], optimizer = strategy3.distribute_dataset([rows]), mr.Optimizer(optax.sgd(1.0), [w])

    def by_hand(x):
        return ctx().all_reduce("sum", jax.grad(lambda w: average(packed_sine(w * x)))(2.0))

    minimize = lambda x, **options: optimizer.minimize(lambda: packed_sine(w * x), **options)  # noqa: E731
    for step in (minimize, by_hand):
        [warning] = warned(strategy3.run, step, (own,))
        assert str(warning.message).startswith(UNSPOKEN)
    assert warnings_of(strategy3.run, lambda x: minimize(x, aggregate="sum"), (own,)) == []
    expected = np.mean(np.cos(2 * rows) * rows)
    assert np.isclose(float(w), 2 - expected, rtol=1e-4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nobody has said", mr.FactorOfReplicasWarning)
        assert np.isclose(float(strategy3.run(lambda x: by_hand(x), args=(own,))), expected, rtol=1e-4)


def test_an_update_of_what_was_updated_is_judged_by_itself(strategy3):
    """Its new value is the same on all replicas as any variable's is, and not a gradient that was combined."""
    w, b, _, first, second = model(strategy3)

    def step(x):
        first.apply_gradients(mr.grad(lambda: mr.losses.compute_average_loss(w * x), [w])())
        second.apply_gradients(mr.grad(lambda: b * jnp.sum(w.value**2), [b])())

    [warning] = warned(strategy3.run, step, (own_rows(strategy3),))
    assert "computed the same gradients, from no data" in str(warning.message)
    assert "why the batch reaches nothing that is trained" in str(warning.message)


# -- a value of all replicas beside a gradient


def share(w, x):
    return mr.losses.compute_average_loss((x * w - 1) ** 2)


def decayed(gradient, w):
    return optax.add_decayed_weights(0.1).update(gradient, optax.EmptyState(), w)[0]


#: What a step sums over the replicas, given parameters and rows, and what is no linear function of own gradients.
BENT = {
    "decay": lambda w, x: jax.grad(share)(w, x) + 0.1 * w,
    "decay by optax": lambda w, x: decayed(jax.grad(share)(w, x), w),
    "momentum, scaled and clipped": lambda w, x: (lambda g: g / jnp.maximum(1.0, abs(g)))(0.9 * w + jax.grad(share)(w, x)),
    "accumulated": lambda w, x: jax.lax.fori_loop(0, 2, lambda _, total: total + jax.grad(share)(w, x), 0.1 * w),
    "a constant": lambda w, x: jax.grad(share)(w, x) * 2 + 1.0,
    "filled up with ones": lambda w, x: jnp.pad(jax.grad(share)(w, x)[None], (0, 2), constant_values=1),
    "noise of a constant key": lambda w, x: jax.grad(share)(w, x) + jax.random.normal(jax.random.key(0)),
    "over its norm": lambda w, x: jax.grad(share)(w, x) / jnp.linalg.norm(jax.grad(share)(w, x)[None]),
    "its sign": lambda w, x: jnp.sign(jax.grad(share)(w, x)),
    "Adam's update": lambda w, x: optax.adam(0.1).update(jax.grad(share)(w, x), optax.adam(0.1).init(w))[0],
    "each row's, clipped": lambda w, x: jnp.clip(jax.vmap(jax.grad(lambda w, x: (x * w - 1) ** 2), (None, 0))(w, x), -1, 1).sum(),
}
ALONE = {
    "scaled by what all know": lambda w, x: jax.grad(share)(w, x) / (1 + w) * 2,
    "zero where it is not finite": lambda w, x: (lambda g: jnp.where(jnp.isfinite(g), g, 0.0))(jax.grad(share)(w, x)),
    "zero where all say so, an integer": lambda w, x: jnp.where(w > 1, jax.grad(share)(w, x), 0),
    "filled up": lambda w, x: jnp.pad(jax.grad(share)(w, x)[None], (0, 2)),
    "stopped and named": lambda w, x: checkpoint_name(jax.lax.stop_gradient(jax.grad(share)(w, x)), "gradient"),
    "its finiteness": lambda w, x: jnp.isfinite(jax.grad(share)(w, x)).astype(np.float32),
    "weighed by own rows": lambda w, x: jax.grad(lambda w: jnp.mean((x * w - 1) ** 2))(w) * jnp.sum(x),
    "meant": lambda w, x: mr.losses.as_share({"vote": jnp.sign(jax.grad(share)(w, x))}),
    "what is each replica's own": lambda w, x: jax.grad(share)(w, x) + jnp.sum(x),
    "a loss of another update": lambda w, x: share(w - 0.1 * jax.grad(share)(w, x), x),
    "a penalty that counts once": lambda w, x: jax.grad(
        lambda w, x: share(w, x) + mr.losses.scale_regularization_loss(0.05 * w**2))(w, x),
}  # fmt: skip


def test_what_is_no_linear_function_of_own_gradients_is_not_to_be_summed(strategy3):
    w, x = np.float32(2), np.arange(1, 8, dtype=np.float32)
    [even], [own] = strategy3.distribute_dataset([x[:6]]), strategy3.distribute_dataset([x])
    every = lambda op, values: lambda w, x: [ctx().all_reduce(op, value(w, x)) for value in values.values()]  # noqa: E731
    for position, (name, value) in enumerate(BENT.items()):
        rows = own if position % 4 == 0 else even
        [warning] = warned(strategy3.run, lambda w, x, v=value: ctx().all_reduce("sum", v(w, x)), (w, rows))
        for part in ("too large (R = 3 here)", "Sum first:", "mr.losses.as_share(value)"):
            assert part in str(warning.message), name
    means = warned(strategy3.run, every("mean", BENT), (w, own))
    assert not any("Sum first:" in str(warning.message) for warning in means)
    assert warned(strategy3.run, every("sum", ALONE), (w, own)) == []
    after = strategy3.run(lambda w, x: decayed(ctx().all_reduce("sum", jax.grad(share)(w, x)), w), args=(w, own))
    penalty = strategy3.run(lambda w, x: ctx().all_reduce("sum", ALONE["a penalty that counts once"](w, x)), args=(w, own))
    assert np.allclose([after, penalty], np.mean(2 * x * (2 * x - 1)) + 0.2)


def test_a_decay_that_is_given_to_an_optimizer_counts_r_times_too_and_its_line_is_right(strategy3):
    tx = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
    w, of_all = variable(2.0, strategy3), variable(2.0, strategy3)
    optimizer, other = mr.Optimizer(optax.sgd(0.1), [w]), mr.Optimizer(tx, [of_all])

    def step(x, aggregate):
        [gradient] = mr.grad(lambda: (x * w.value - 1) ** 2, [w])()
        optimizer.apply_gradients([gradient + 0.1 * w.value], aggregate=aggregate)

    [x] = strategy3.distribute_dataset([np.arange(1, 8, dtype=np.float32)])
    for aggregate in (None, "sum"):
        [warning] = warned(strategy3.run, step, (x, aggregate))
        assert "apply_gradients at" in str(warning.message) and "a weight decay" in str(warning.message)
    strategy3.run(lambda x: other.apply_gradients(mr.grad(lambda: (x * of_all.value - 1) ** 2, [of_all])()), args=(x,))
    rows = np.arange(1, 8, dtype=np.float32)
    assert np.isclose(float(of_all), 2 - 0.1 * (np.mean(2 * rows * (2 * rows - 1)) + 0.2))


# -- parameters and an optimizer's state to which each replica adds its own gradients

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def gradients(params, x):
    return jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)


def forgotten(tx):
    def step(params, state, x):
        updates, state = tx.update(gradients(params, x), state)
        return optax.apply_updates(params, updates), state

    return step


def batch(strategy):
    return next(iter(strategy.distribute_dataset([X])))


class TrainState(NamedTuple):
    params: Any
    opt: Any


def test_a_forgotten_all_reduce_is_said_once_at_the_users_line(strategy2):
    """Of parameters and states that are carried apart, and of one state beside a logged loss."""
    tx, params, x = optax.adam(0.1), PARAMS, batch(strategy2)
    state = tx.init(PARAMS)
    message = r"such as result\[0\]\['b'\], are arrays .*all_reduce\('sum', grads\)"
    with pytest.warns(mr.ReplicasDivergeWarning, match=message) as seen:
        for _ in range(3):
            params, state = strategy2.run(forgotten(tx), args=(params, state, x))
    assert len(seen) == 1 and seen[0].filename == __file__

    def logged(state: TrainState, x):
        return TrainState(*forgotten(tx)(*state, x)), ctx().all_reduce("mean", x.mean())

    with pytest.warns(mr.ReplicasDivergeWarning, match=r"6 of its results, such as result\[0\]\.params\['b'\]"):
        strategy2.run(logged, args=(TrainState(PARAMS, tx.init(PARAMS)), x))


def test_what_is_meant_so_is_silent(strategy2):
    """Other things that a step carries are carried in silence in tests/parity/programs.py."""
    tx, x, alone = optax.adam(0.1), batch(strategy2), mr.MirroredStrategy(["cpu:0"])
    state = tx.init(PARAMS)
    own, state_of_each = (strategy2.distribute_values_from_function(lambda ctx, t=t: t) for t in (PARAMS, state))
    params = PARAMS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            own, state_of_each = strategy2.run(forgotten(tx), args=(own, state_of_each, x))
            params, state = alone.run(forgotten(tx), args=(params, state, X))
