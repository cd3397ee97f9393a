"""mr.Optimizer: gradients are combined over the replicas once; that any transformation trains right is in test_optax."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_rows import ROWS, START
from strategies import TWO, strategy_of, variable

import mirrored as mr
from mirrored._variables.variable import is_variable

# One test function makes a step for each transformation.
pytestmark = [pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning"), pytest.mark.usefixtures("in_numpy")]


def distributed(strategy, *values):
    return strategy.distribute_values_from_function(lambda ctx: values[ctx.replica_id_in_sync_group])


# -- which gradients


def pair():
    return variable(np.ones(2, np.float32), name="a"), variable(1.0, name="b")


def test_gradients_come_as_a_tree_or_in_pairs():
    a, b = pair()
    optimizer = mr.Optimizer(optax.sgd(0.1), [a, b])
    grads = [jnp.ones(2), 2.0]
    for given, of_b in (
        (grads, 0.8),
        (zip(grads, [a, b], strict=True), 0.8),
        ([(grads[1], b), (grads[0], a)], 0.8),
        ((pair for pair in zip(grads, [a, b], strict=True)), 0.8),
        (zip(grads[:1], [a], strict=True), 1.0),
    ):
        a.assign([1.0, 1.0])
        b.assign(1.0)
        optimizer.apply_gradients(given)
        np.testing.assert_allclose([*a.numpy(), b.numpy()], [0.9, 0.9, of_b], rtol=1e-6)


def test_a_variable_without_a_gradient_is_skipped_with_its_state():
    names = ("adamw", "adafactor", "multi_transform", "masked")
    variables = {name: jax.tree.map(variable, START) for name in names}
    optimizers = {name: mr.Optimizer(ROWS[name].make(), variables[name]) for name in names}

    def of_b():
        states = {name: optimizer.state for name, optimizer in optimizers.items()}
        leaves = jax.tree_util.tree_leaves_with_path((variables, states), is_leaf=is_variable)
        return {name: leaf for path, leaf in leaves if (name := jax.tree_util.keystr(path)).endswith("['b']")}

    for leaf in of_b().values():
        leaf.assign(np.full(leaf.shape, 0.5))
    gradients = TWO.distribute_values_from_function(
        lambda ctx: jax.tree.map(lambda x: np.cos(x + ctx.replica_id_in_sync_group), START)
    )

    def step(gradients):
        for optimizer in optimizers.values():
            optimizer.apply_gradients({**gradients, "b": None}, aggregate="sum")

    for _ in range(2):
        TWO.run(step, args=(gradients,))
    assert [name for name, leaf in of_b().items() if not np.all(leaf.numpy() == 0.5)] == []
    assert not any(np.array_equal(own["w"].numpy(), START["w"]) for own in variables.values())
    assert int(optimizers["adamw"].state[0].count) == 2, "what belongs to no variable goes on"
    params = {"w": variable(1.0), "deep": {"w": variable(1.0)}}
    adam = mr.Optimizer(optax.adam(0.1), params)
    adam.apply_gradients({"w": None, "deep": {"w": 1.0}})
    assert [float(value) for value in jax.tree.leaves(adam.state[0].mu)] == [pytest.approx(0.1), 0.0], "the longest name counts"


def test_outside_a_step_gradients_are_one_value_and_per_replica_ones_are_summed():
    a, b = pair()
    optimizer = mr.Optimizer(optax.sgd(0.1), [a, b])
    optimizer.apply_gradients([jnp.ones(2), 1.0])
    optimizer.apply_gradients([distributed(TWO, np.float32([1, 2]), np.float32([3, 4])), 1.0], aggregate="sum")
    np.testing.assert_allclose(a.numpy(), [1 - 0.1 - 0.4, 1 - 0.1 - 0.6], rtol=1e-6)
    optimizer.apply_gradients([a, b])  # a variable is an array too
    np.testing.assert_allclose(b.numpy(), 0.8 * 0.9, rtol=1e-6)

    def update(_, gradient):
        optimizer.apply_gradients([gradient, 1.0], aggregate="sum")

    a.assign([1.0, 1.0])
    x = distributed(TWO, np.float32([1, 2]), np.float32([3, 4]))
    TWO.run(lambda x: mr.get_replica_context().merge_call(update, args=(x,)), args=(x,))
    mr.function(lambda x: update(TWO, x))(x)
    np.testing.assert_allclose(a.numpy(), [1 - 0.8, 1 - 1.2], rtol=1e-5)


def test_gradients_that_a_step_returned_or_merged_say_what_their_loss_said():
    w = variable(0.0)
    optimizer = mr.Optimizer(optax.sgd(1.0), [w])
    [x] = TWO.distribute_dataset([np.float32([1, 2, 3, 6])])

    def updated(gradient_of, way, **options):
        def merge(_, gradient):
            optimizer.apply_gradients([gradient], **options)

        w.assign(0.0)
        if way == "merged":
            TWO.run(lambda x: mr.get_replica_context().merge_call(merge, args=(gradient_of(x),)), args=(x,))
        else:
            apply = lambda x: merge(TWO, TWO.run(gradient_of, args=(x,)))  # noqa: E731
            (mr.function(apply) if way == "in a function" else apply)(x)
        return -float(w)

    share = lambda x: mr.grad(lambda: w * x, [w])()[0]  # noqa: E731
    own_mean = lambda x: jax.grad(lambda w: jnp.mean(w * x))(w.value)  # noqa: E731
    for way in ("returned", "in a function", "merged"):
        assert updated(share, way) == 3 and updated(own_mean, way, aggregate="mean") == 3, way
        with pytest.raises(mr.FactorOfReplicasError, match="is that of a share of the global batch's loss"):
            updated(share, way, aggregate="mean")
        with pytest.warns(mr.FactorOfReplicasWarning, match="nobody has said how the loss is divided"):
            assert updated(own_mean, way) == 6


def test_a_change_of_a_variable_or_of_the_state_between_steps_is_seen():
    w = variable(1.0)
    optimizer = mr.Optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), [w])
    x = distributed(TWO, np.float32(1), np.float32(2))

    def step(x):
        optimizer.apply_gradients(mr.grad(lambda: w * x, [w])(), aggregate="sum")

    TWO.run(step, args=(x,))
    w.assign(5.0)
    TWO.run(step, args=(x,))
    optimizer.state.hyperparams["learning_rate"].assign(1.0)
    TWO.run(step, args=(x,))
    np.testing.assert_allclose(w.numpy(), 5 - 0.3 - 3, rtol=1e-6)
    for name in ("learning_rate", "lr"):
        with pytest.raises(AttributeError, match=r"no attribute '(learning_rate|lr)'.*hyperparams\['learning_rate'\]: assign"):
            setattr(optimizer, name, 0.1)
    optimizer.note = "mine"
    assert optimizer.note == "mine"


def test_the_state_is_named_and_not_trainable():
    a, b = pair()
    optimizer = mr.Optimizer(optax.adam(0.1), {"a": a, "b": b})
    state = jax.tree.leaves(optimizer.state, is_leaf=is_variable)
    assert [v.name for v in state][:2] == ["optimizer[0].count", "optimizer[0].mu['a']"]
    assert not any(v.trainable for v in (*state, optimizer.iterations))


# -- no factor R (the refusals are in test_refusals)


def test_how_gradients_are_combined_is_said_once_or_each_time(per_replica):
    strategy = strategy_of(3)
    own = per_replica(strategy, *np.float32([3, 6, 0]))

    def update(made_with, **given):
        w, half = variable(0.0, strategy), variable(np.float16(0), strategy)
        optimizer = mr.Optimizer(optax.sgd(1.0), [w, half], aggregate=made_with)
        strategy.run(lambda x: optimizer.apply_gradients([x, (x * 10000).astype(jnp.float16)], **given), args=(own,))
        return -float(w), -float(half)

    assert update("sum") == update(mr.ReduceOp.SUM) == update(True) == update("mean", aggregate="SUM") == (9, math.inf)
    assert update("mean") == update(False, aggregate="mean") == (3, 30000), "float16 is added up in float32"
    with pytest.raises(mr.ReplicasDivergeError):
        update(False)
    with pytest.warns(mr.FactorOfReplicasWarning, match="nobody has said how the loss is divided"):
        assert update(None) == (9, math.inf)
    assert update(None, aggregate="mean") == (3, 30000) and update("sum", aggregate=None) == (9, math.inf)

    w = variable(0.0, strategy)
    optimizer = mr.Optimizer(optax.sgd(1.0), [w], aggregate="mean")
    optimizer.apply_gradients([own])
    mr.function(lambda x: optimizer.apply_gradients([x]))(own)
    assert float(w) == -6


def test_a_mean_in_merge_call_weighs_replicas_by_their_rows_and_leaves_out_who_has_none(strategy3: mr.Strategy) -> None:
    w = variable(0.0, strategy3)
    optimizer = mr.Optimizer(optax.sgd(1.0), [w], aggregate="mean")
    x, y = (distributed(strategy3, *(np.arange(n, dtype=np.float32) for n in counts)) for counts in ((3, 1, 0), (2, 1, 0)))

    def step(x, _):
        merge = lambda strategy, gradient: optimizer.apply_gradients([gradient])  # noqa: E731
        mr.get_replica_context().merge_call(merge, args=(jnp.mean(x),))  # NaN where there are no rows

    strategy3.run(step, args=(x, x))
    assert float(w) == -0.75
    with pytest.raises(mr.UnevenReplicasError, match=r"\(3, 1, 0\), \(2, 1, 0\) rows.*aggregate='sum'"):
        strategy3.run(step, args=(x, y))
    assert float(w) == -0.75


# -- minimize and iterations


def test_minimize_is_value_and_grad_and_apply_gradients(strategy2: mr.Strategy) -> None:
    def train(minimize):
        variables = {"w": variable(np.ones(2, np.float32), strategy2), "b": [variable(0.5, strategy2), None]}
        optimizer = mr.Optimizer(optax.sgd(0.1, momentum=0.9), variables)

        def step(x):
            loss = lambda: (x @ variables["w"] + variables["b"][0]) ** 2  # noqa: E731
            if minimize:
                return optimizer.minimize(loss)
            value, gradients = mr.value_and_grad(loss, variables)()
            optimizer.apply_gradients(gradients)
            return value

        rows = np.cos(np.arange(14, dtype=np.float32)).reshape(7, 2)
        losses = [strategy2.reduce("sum", strategy2.run(step, args=(x,))) for x in strategy2.distribute_dataset([rows] * 2)]
        return losses, jax.tree.map(np.asarray, variables)

    jax.tree.map(np.testing.assert_array_equal, train(True), train(False))
    w, b = (variable(1.0, strategy2) for _ in range(2))
    optimizer = mr.Optimizer(optax.sgd(0.1), {"w": w, "b": b})
    x = distributed(strategy2, 1.0, 2.0)
    losses = strategy2.run(lambda x: optimizer.minimize(lambda: w * b * x, [b], aggregate="sum"), args=(x,))
    assert (float(strategy2.reduce("sum", losses)), float(w), float(b)) == (3.0, 1.0, np.float32(0.7)), "of one of the variables"
    assert float(optimizer.minimize(lambda: w * 2, w)) == 2.0 and float(w) == np.float32(0.8), "outside a step, once"
    strategy2.run(lambda: optimizer.minimize(lambda: w * 2, aggregate=False))
    assert float(w) == np.float32(0.6) and int(optimizer.iterations) == 3


def test_iterations_count_the_updates_wherever_they_are_made(strategy2: mr.Strategy) -> None:
    w, b = variable(1.0, strategy2), variable(1.0, strategy2)
    optimizer = mr.Optimizer(optax.MultiSteps(optax.sgd(0.1), 2), [w, b])

    def step():
        before = optimizer.iterations.value
        optimizer.apply_gradients([w.value, None])
        return before, optimizer.iterations.value

    with warnings.catch_warnings(action="ignore", category=mr.FactorOfReplicasWarning):
        assert [int(n) for n in strategy2.run(step)] == [0, 1]
        mr.function(lambda: [strategy2.run(step), strategy2.run(step)])()
        mr.scan(lambda c, _: (c, strategy2.run(step)), 0.0, length=2)
    optimizer.apply_gradients(zip([1.0], [b], strict=True))
    assert int(optimizer.iterations) == 6
    with pytest.raises(AttributeError):
        optimizer.iterations = 3
    assert int(optimizer.iterations) == 6 and optimizer.iterations.name == "optimizer.iterations"
