"""A factor of R in an update is noticed, and right programs are left alone; branches on a replica's number are explained."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr

SIZE = 3
HERE = re.escape(__file__)


def model(strategy):
    """Two variables, an optimizer for both and one for each."""
    with strategy.scope():
        w, b = mr.Variable(np.ones(SIZE, "float32"), name="w"), mr.Variable(0.5, name="b")
        return w, b, *(mr.Optimizer(optax.sgd(0.1), variables) for variables in ([w, b], [w], [b]))


def own_rows(strategy):
    return strategy.distribute_values_from_function(lambda ctx: np.arange(SIZE, dtype="float32") + ctx.replica_id_in_sync_group)


def all_reduce(op, tree):
    return mr.get_replica_context().all_reduce(op, tree)


def warnings_of(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [warning for warning in caught if warning.category is mr.FactorOfReplicasWarning]


def values(*variables):
    return [np.asarray(variable).tobytes() for variable in variables]


# -- shares of a loss that are averaged


def by_hand(op: str, w: Any, loss: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Make a step that combines the loss and its gradient itself, as for parameters that are no variables."""

    def step(x: Any) -> Any:
        combine = functools.partial(jax.lax.pmean, axis_name="replica") if op == "pmean" else functools.partial(all_reduce, op)
        value, gradient = jax.value_and_grad(loss)(w, x)
        return combine(value), combine(gradient)

    return step


SHARES = {
    "average": lambda w, x: mr.losses.compute_average_loss(x * jnp.sum(w)),
    "own rows, and a penalty": lambda w, x: mr.losses.mean_over_own_rows(jnp.mean(x * jnp.sum(w)) + jnp.sum(w**2)),
    "doubled": lambda w, x: 2 * mr.losses.weighted_mean(x * jnp.sum(w), x),
}


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("num_rows", [4, 5])
@pytest.mark.parametrize("op", ["mean", "pmean"])
def test_a_mean_of_shares_is_said_with_the_sum_to_write(op: str, name: str, num_replicas: int, num_rows: int) -> None:
    strategy, w = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]), np.ones(SIZE, np.float32)
    [batch] = strategy.distribute_dataset([np.arange(1, num_rows + 1, dtype=np.float32)])
    [found] = warnings_of(strategy.run, by_hand(op, w, SHARES[name]), (batch,))  # one for each line; both are on one
    said = rf"the mean over the replicas at {HERE}:\d+ .* too small \(R = {num_replicas} here\)\. .*all_reduce\('sum', value"
    assert re.search(said, str(found.message)) and found.filename == __file__
    one = mr.MirroredStrategy(["cpu:0"])
    [whole] = one.distribute_dataset([np.arange(1, num_rows + 1, dtype=np.float32)])
    total, gradient = strategy.run(by_hand("sum", w, SHARES[name]), args=(batch,))
    expected, expected_gradient = one.run(by_hand("sum", w, SHARES[name]), args=(whole,))
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6)


def test_other_means_are_silent(strategy2: mr.Strategy) -> None:
    """Of metrics, of losses that are means over own rows, of what has been added up, and what an optimizer has updated."""
    w, _, _, optimizer, _ = model(strategy2)
    [batch] = strategy2.distribute_dataset([np.arange(5, dtype=np.float32)])

    def step(x: Any) -> Any:
        value, [gradient] = mr.value_and_grad(lambda: x * jnp.sum(w), [w])()
        own = jax.grad(lambda w: jnp.mean(x * jnp.sum(w)))(w.value)
        total = all_reduce("sum", value)
        optimizer.apply_gradients([gradient])
        is_finite = jnp.isfinite(mr.losses.compute_average_loss(x)).astype(jnp.float32)
        return all_reduce("mean", [jnp.mean(x), jnp.mean((x > 1) * 1.0), own, total, w.value, 3, 2.5, is_finite])

    assert not warnings_of(strategy2.run, step, (batch,))


# -- gradients that have been combined before


REDUCTIONS = {
    "sum": lambda gradients: all_reduce("sum", gradients),
    "mean": lambda gradients: all_reduce("mean", gradients),
    "psum": lambda gradients: jax.lax.psum(gradients, "replica"),
    "gathered": lambda gradients: [jnp.sum(mr.get_replica_context().all_gather(g[None], 0), 0) for g in gradients],
    "merged": lambda gradients: mr.get_replica_context().merge_call(lambda s, g: s.reduce("mean", g), args=(gradients,)),
    "clipped_afterwards": lambda gradients: [jnp.clip(g, -1, 1) for g in all_reduce("mean", gradients)],
    "decayed_afterwards": lambda gradients: [g + 0.01 for g in all_reduce("mean", gradients)],
    "one_of_two": lambda gradients: [all_reduce("mean", gradients[0]), gradients[1]],
}  # fmt: skip


def test_gradients_that_were_combined_before_are_refused(strategy3):
    w, b, optimizer, *_ = model(strategy3)

    def step(x, combine):
        _, gradients = mr.value_and_grad(lambda: mr.losses.already_divided(jnp.sum(w * x) + b * x[0]), [w, b])()
        gradients = combine(gradients)
        optimizer.apply_gradients(gradients)

    before, line = values(w, b), step.__code__.co_firstlineno + 3
    expected = (
        rf"the gradient of variable 'w' given to apply_gradients at {HERE}:{line} has already been combined .*"
        r"optimizer\.apply_gradients\(grads, aggregate=False\)"
    )
    for name, combine in REDUCTIONS.items():
        for _ in range(2):  # a refusal is not cached
            with pytest.raises(mr.FactorOfReplicasError, match=expected):
                strategy3.run(step, args=(own_rows(strategy3), combine)), pytest.fail(name)
    assert values(w, b) == before


def test_combined_gradients_are_refused_or_applied_alike_on_one_replica_too():
    strategy = mr.OneDeviceStrategy("cpu:0")
    w, _, _, optimizer, _ = model(strategy)
    x = own_rows(strategy)

    def step(x, aggregate):
        _, gradients = mr.value_and_grad(lambda: jnp.sum(w * x), [w])()
        optimizer.apply_gradients(all_reduce("mean", gradients), aggregate=aggregate)

    with pytest.raises(mr.FactorOfReplicasError, match="already been combined"):
        strategy.run(step, args=(x, True))
    assert warnings_of(lambda: strategy.run(step, args=(x, False))) == []
    np.testing.assert_allclose(w.numpy(), 1 - 0.1 * np.asarray(strategy.reduce("mean", x)), rtol=1e-6)


def test_an_accumulator_that_aggregates_counts_as_combined_and_a_local_one_does_not(strategy3):
    w, _, _, optimizer, _ = model(strategy3)
    with strategy3.scope():
        total = mr.Variable(np.zeros(SIZE, "float32"), aggregation="sum")
        local = mr.Variable(np.zeros(SIZE, "float32"), synchronization="on_read", aggregation="sum")

    def step(x, accumulator):
        _, [gradient] = mr.value_and_grad(lambda: jnp.sum(w * x), [w])()
        accumulator.assign_add(gradient)
        optimizer.apply_gradients([accumulator.value], aggregate="sum")  # what a variable keeps says nothing

    x = own_rows(strategy3)
    with pytest.raises(mr.FactorOfReplicasError, match="already been combined"):
        strategy3.run(lambda x: step(x, total), args=(x,))
    assert warnings_of(lambda: strategy3.run(lambda x: step(x, local), args=(x,))) == []


def test_gradients_that_were_not_combined_are_refused_with_aggregate_false(strategy3):
    w, _, _, optimizer, _ = model(strategy3)

    def step(x):
        _, gradients = mr.value_and_grad(lambda: jnp.sum(w * x), [w])()
        optimizer.apply_gradients(gradients, aggregate=False)

    line = step.__code__.co_firstlineno + 2
    with pytest.raises(mr.ReplicasDivergeError, match=rf"variable 'w' .* at {HERE}:{line} .* the argument `x`"):
        strategy3.run(step, args=(own_rows(strategy3),))


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

    def eager(step):
        with mr.eager():
            return strategy3.run(step, args=(x,))

    ways = {
        "argument": lambda step: lambda: strategy3.run(step, args=(x,)),
        "closure": lambda step: lambda: strategy3.run(lambda: step(closed_over)),
        "no data": lambda step: lambda: strategy3.run(lambda: step(1.0)),
        "function": lambda step: mr.function(lambda: strategy3.run(step, args=(x,))),
        "scan": lambda step: lambda: mr.scan(lambda c, _: (c, strategy3.run(step, args=(x,))), 0.0, None, length=3),
        "eager": lambda step: lambda: eager(step),
    }
    for name, way in ways.items():
        w, _, _, optimizer, _ = model(strategy3)
        step = whole_batch_step(w, optimizer)
        run = way(step)
        caught = warnings_of(lambda run=run: [run() for _ in range(2)])
        assert [warning.filename for warning in caught] == [__file__], name
        line = step.__code__.co_firstlineno + 2
        expected = rf"3 replicas .* apply_gradients at {HERE}:{line} .*strategy\.distribute_dataset\(dataset\)"
        assert re.search(expected, str(caught[0].message)), name
    strategy3.assert_mirrored()


def test_the_warning_tells_the_truth(strategy):
    """The update is R times that of one device; on one device it is that nobody has said what the loss is."""
    w, _, _, optimizer, _ = model(strategy)
    x = np.ones(SIZE, "float32")
    caught = warnings_of(lambda: strategy.run(whole_batch_step(w, optimizer), args=(x,)))
    expected = "computed the same gradients" if strategy.num_replicas_in_sync > 1 else "nobody has said how the loss is divided"
    assert [expected in str(warning.message) for warning in caught] == [True]
    np.testing.assert_allclose(w.numpy(), 1 - strategy.num_replicas_in_sync * 0.1 / SIZE, rtol=1e-6)


def test_as_an_error_the_warning_leaves_everything_as_it_was(strategy3):
    w, _, _, optimizer, _ = model(strategy3)
    before = values(w)
    with pytest.raises(mr.FactorOfReplicasWarning):  # warnings are errors here
        strategy3.run(whole_batch_step(w, optimizer), args=(np.ones(SIZE, "float32"),))
    assert values(w) == before


# -- a loss that was combined before it was differentiated


def test_a_combined_loss_warns(strategy3):
    for combine in (lambda loss: all_reduce("sum", {"loss": loss})["loss"] * 2, lambda loss: jax.lax.pmean(loss, "replica")):
        for strategy in (strategy3, mr.MirroredStrategy(["cpu:0"])):
            w, _, _, optimizer, _ = model(strategy)

            def step(x, w=w, optimizer=optimizer, combine=combine):
                loss, gradients = mr.value_and_grad(lambda: combine(jnp.mean(w * x)), [w])()
                optimizer.apply_gradients(gradients)
                return loss

            caught = warnings_of(lambda s=strategy, step=step: [s.run(step, args=(own_rows(s),)) for _ in range(2)])
            [warning] = caught
            assert warning.filename == __file__ and COMBINED in str(warning.message)
            assert "mr.losses.compute_average_loss" in str(warning.message)


def of_statistics(z):
    return jnp.sum((z - 2) ** 2)


def of_embeddings(z):
    return jax.nn.logsumexp(z @ z.T, axis=1)


def test_a_share_of_a_combined_loss_is_the_gradient_of_one_device(strategy3):
    """A loss of statistics or embeddings of all rows cannot be a replica's own: every replica computes it and takes its share."""
    rows, gathered = np.arange(9, dtype="float32").reshape(3, 3) / 10, lambda z: mr.get_replica_context().all_gather(z, axis=0)
    share, average = mr.losses.scale_regularization_loss, mr.losses.compute_average_loss
    ways = [
        (lambda z: share(of_statistics(all_reduce("sum", z.sum(axis=0)))), lambda z: of_statistics(z.sum(axis=0))),
        (lambda z: average(of_embeddings(gathered(z))), lambda z: of_embeddings(z).mean()),
    ]
    for loss, of_one in ways:
        w, _, _, optimizer, _ = model(strategy3)
        [batch] = strategy3.distribute_dataset([rows])
        step = lambda x, w=w, o=optimizer, loss=loss: o.apply_gradients(mr.grad(lambda: loss(x * w), [w])())  # noqa: E731
        assert warnings_of(lambda step=step, batch=batch: strategy3.run(step, args=(batch,))) == []
        gradient = jax.grad(lambda w, of_one=of_one: of_one(rows * w))(jnp.ones(SIZE))
        np.testing.assert_allclose(w.numpy(), 1 - 0.1 * gradient, rtol=1e-5)


def test_the_gradient_of_a_weight_behind_what_was_gathered_is_a_share_too(strategy3):
    """A temperature of logits of all rows: the same gradient on all replicas, each a share of that of the whole."""
    rows, gathered = np.arange(9, dtype="float32").reshape(3, 3) / 10, lambda z: mr.get_replica_context().all_gather(z, axis=0)
    loss_of = lambda z, b: jax.nn.logsumexp(b * z @ z.T, axis=1)  # noqa: E731
    average = mr.losses.compute_average_loss
    ways = {
        "a share": lambda z, b: average(loss_of(gathered(z), b)),
        "the whole": lambda z, b: jnp.mean(loss_of(gathered(z), b)),
        "the whole beside": lambda z, b: average(loss_of(gathered(z), b)) + b * all_reduce("sum", z.sum()),
    }
    for name, loss in ways.items():
        w, b, optimizer, _, _ = model(strategy3)
        [batch] = strategy3.distribute_dataset([rows])

        def step(x, w=w, b=b, o=optimizer, loss=loss, combine=False):
            gradients = mr.grad(lambda: loss(x * w, b.value), [w, b])()
            if combine:  # added to one that is a share, and so not told by itself
                gradients = [gradients[0], gradients[1] + all_reduce("sum", gradients[1] + 0 * x.sum())]
            o.apply_gradients(gradients)

        if name == "a share":
            assert warnings_of(lambda step=step, batch=batch: strategy3.run(step, args=(batch,))) == []
            gradients = jax.grad(lambda w, b: loss_of(rows * w, b).mean(), (0, 1))(jnp.ones(SIZE), 0.5)
            np.testing.assert_allclose(w.numpy(), 1 - 0.1 * gradients[0], rtol=1e-5)
            np.testing.assert_allclose(b.numpy(), 0.5 - 0.1 * gradients[1], rtol=1e-5)
        for combine in (True,) if name == "a share" else (True, False):
            with pytest.raises(mr.FactorOfReplicasError, match=r"variable 'b' .* already been combined"):
                strategy3.run(step, args=(batch,), kwargs={"combine": combine}), pytest.fail(f"{name} {combine}")


def test_a_share_does_not_excuse_what_is_combined_beside_or_after_it(strategy3):
    share, total = mr.losses.scale_regularization_loss, lambda z: of_statistics(all_reduce("sum", z))
    ways = {
        "beside": lambda z: share(total(z)) + total(z),
        "beside, first": lambda z: total(z) + share(total(z)),
        "after": lambda z: all_reduce("sum", share(z)),
    }
    for name, loss in ways.items():
        w, _, _, optimizer, _ = model(strategy3)
        step = lambda x, w=w, o=optimizer, loss=loss: o.apply_gradients(mr.grad(lambda: loss(x * w), [w])())  # noqa: E731
        assert len(warnings_of(lambda step=step: strategy3.run(step, args=(own_rows(strategy3),)))) == 1, name


COMBINED, UNSPOKEN = "combined over the replicas before it was differentiated", "nobody has said how the loss is divided"
#: Losses of four own rows, by what is said of them where `jax.grad` differentiates them.
DIFFERENTIATED = {
    "sum of shares": (lambda each: all_reduce("sum", mr.losses.compute_average_loss(each)), COMBINED),
    "sum, then divided by all rows": (lambda each: jax.lax.psum(jnp.sum(each), "replica") / 12, COMBINED),
    "in jit": (lambda each: jax.jit(lambda each: all_reduce("sum", jnp.sum(each) / 12))(each), COMBINED),
    "beside a share": (lambda each: mr.losses.compute_average_loss(each) + all_reduce("sum", each.sum()), COMBINED),
    "mean of means": (lambda each: jax.lax.pmean(jnp.mean(each), "replica"), COMBINED),
    "share of a sum": (lambda each: mr.losses.scale_regularization_loss(all_reduce("sum", each.sum()) / 12), ""),
    "divided by a count": (lambda each: each.sum() / all_reduce("sum", jnp.ones(()) * 4), UNSPOKEN),
    "said to be divided": (lambda each: mr.losses.already_divided(each.sum() / all_reduce("sum", jnp.ones(()) * 4)), ""),
    "of what is left of a mean": (lambda each: mr.losses.compute_average_loss((each - all_reduce("mean", each.mean())) ** 2), ""),
    "not linear in a share": (lambda each: jnp.log(mr.losses.compute_average_loss(each)), UNSPOKEN),
    "scaled shares": (lambda each: -2 * mr.losses.compute_average_loss(each) / 3 - mr.losses.weighted_mean(each, each > 1), ""),
    "a share and another": (lambda each: mr.losses.compute_average_loss(each) + 0.1 * each.mean(), UNSPOKEN),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_what_is_said_of_a_loss_goes_to_its_gradient_however_it_is_differentiated(strategy3, name):
    loss, expected = DIFFERENTIATED[name]
    w, _, _, optimizer, _ = model(strategy3)
    [batch] = strategy3.distribute_dataset([np.arange(12 * SIZE, dtype="float32").reshape(12, SIZE) / 10])

    def step(x):
        optimizer.apply_gradients([jax.grad(lambda w: loss(jnp.sum(jnp.tanh(x * w), axis=1)))(w.value)])

    messages = [str(warning.message) for warning in warnings_of(lambda: strategy3.run(step, args=(batch,)))]
    assert len(messages) == bool(expected) and all(expected in message for message in messages), messages


def test_an_update_of_what_was_updated_is_judged_by_itself(strategy3):
    """Its new value is the same on all replicas as any variable's is, and not a gradient that was combined."""
    w, b, _, first, second = model(strategy3)

    def step(x):
        first.apply_gradients(mr.grad(lambda: mr.losses.compute_average_loss(w * x), [w])())
        second.apply_gradients(mr.grad(lambda: b * jnp.sum(w.value**2), [b])())

    [warning] = warnings_of(lambda: strategy3.run(step, args=(own_rows(strategy3),)))
    assert "computed the same gradients, from no data" in str(warning.message)


# -- right programs


def average_loss(w, x):
    return mr.losses.compute_average_loss(jnp.reshape(w * x, (1, -1)))


def regularized(w, b, both, first, second, x):
    loss = lambda: average_loss(w, x) + mr.losses.scale_regularization_loss(jnp.sum(w**2) + b**2)  # noqa: E731
    both.apply_gradients(mr.value_and_grad(loss, [w, b])()[1])


def regularized_three_times(*model_and_x):
    """From the second time on, the gradient of `b` depends on nothing but a sum over the replicas."""
    mr.fori_loop(0, 3, lambda i, carry: [carry, regularized(*model_and_x)][0], 0)


def gan(w, b, both, first, second, x, noise=None):
    """`w` tells data from what `b` generates."""
    noise = jax.random.normal(mr.get_replica_context().rng(0), (SIZE,)) if noise is None else noise
    first.apply_gradients(mr.value_and_grad(lambda: average_loss(w, b.value * noise - x), [w])()[1])
    second.apply_gradients(mr.value_and_grad(lambda: -average_loss(w, b.value * noise), [b])()[1])


def gan_with_common_noise(*model_and_x):
    gan(*model_and_x, noise=jax.random.normal(jax.random.key(0), (SIZE,)))


def clipped_by_the_norm_over_all_replicas(w, b, both, first, second, x):
    gradients = mr.grad(lambda: average_loss(w, x) + average_loss(b, x), [w, b])()
    norm = optax.global_norm(all_reduce("sum", gradients))
    both.apply_gradients([g * jnp.minimum(1.0, 1.0 / norm) for g in gradients])


def line_search_on_the_common_loss(w, b, both, first, second, x):
    gradients = mr.grad(lambda: average_loss(w, x), [w])()
    common = lambda t: all_reduce("sum", average_loss(w - t, x))  # noqa: E731
    size = jax.lax.while_loop(lambda t: common(t) > common(0.0), lambda t: t / 2, 1.0)
    first.apply_gradients([g * size for g in gradients])


#: Others run in silence in tests/parity/programs.py: warnings are errors here.
RIGHT = [
    regularized_three_times, gan, gan_with_common_noise, clipped_by_the_norm_over_all_replicas, line_search_on_the_common_loss,
]  # fmt: skip


def test_right_programs_run_in_silence(strategy3):
    for update in RIGHT:
        variables_and_optimizers = model(strategy3)
        before = values(variables_and_optimizers[0])
        step = lambda x, update=update, own=variables_and_optimizers: update(*own, x)  # noqa: E731
        caught = warnings_of(lambda step=step: strategy3.run(step, args=(own_rows(strategy3),)))
        assert [str(warning.message) for warning in caught] == [], update
        assert values(variables_and_optimizers[0]) != before, update
    strategy3.assert_mirrored()


def test_an_optimizer_outside_a_step_is_not_guarded(strategy3):
    w, _, _, optimizer, _ = model(strategy3)
    gradient = strategy3.reduce("mean", own_rows(strategy3))
    assert warnings_of(lambda: optimizer.apply_gradients([gradient])) == []
    np.testing.assert_allclose(w.numpy(), 1 - 0.1 * np.asarray(gradient), rtol=1e-6)


# -- one program


def test_a_branch_on_the_replica_number_is_explained(strategy3):
    def eagerly(step):
        with mr.eager():
            strategy3.run(step)

    expected = (
        rf"(?s)differs by replica, at {HERE}:\d+\. Write\n    jnp\.where.*jax\.lax\.cond.*All replicas run one.*variable\.assign"
    )
    for branch in (lambda n: 1 if n == 0 else 2, int, lambda n: "many" if jnp.sum(n + 1.0) > 2 else "few"):
        step = lambda branch=branch: branch(mr.get_replica_context().replica_id_in_sync_group)  # noqa: E731
        for run in (strategy3.run, eagerly):
            with pytest.raises(mr.OneProgramError, match=expected):
                run(step)
