"""mr.Optimizer: any optax transformation, the numbers of plain optax, gradients summed over the replicas once."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_rows import OPTAX, START

import mirrored as mr

# One test function makes a step for each transformation.
pytestmark = pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")

STRATEGY = mr.MirroredStrategy(["cpu:0", "cpu:1"])


def variable(value, strategy=STRATEGY, **kwargs):
    with strategy.scope():
        return mr.Variable(value, **kwargs)


def distributed(strategy, *values):
    return strategy.distribute_values_from_function(lambda ctx: values[ctx.replica_id_in_sync_group])


def own_gradients(strategy, params):
    return strategy.distribute_values_from_function(
        lambda ctx: jax.tree.map(lambda x: np.cos(x + ctx.replica_id_in_sync_group), params)
    )


def assert_close(variables, expected):
    paths = jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda value: value, variables))
    for (path, own), value in zip(paths, jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            own, value = jax.random.key_data(own), jax.random.key_data(value)
        np.testing.assert_allclose(own, value, rtol=2e-5, atol=2e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_weights_and_states_are_those_of_plain_optax():
    """Weights with any transformation: test_optax."""
    transformations = {name: OPTAX[name].make() for name in ("stateless", "adamw", "masked", "inject_hyperparams")}
    params = dict.fromkeys(transformations, START)
    # Lookahead has fast and slow values, and gradients of the fast ones only.
    transformations["lookahead"] = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    params["lookahead"] = optax.LookaheadParams(START, START)
    variables = {name: jax.tree.map(variable, tree) for name, tree in params.items()}
    # Made outside the scope: the state goes where its variables are.
    optimizers = {name: mr.Optimizer(tx, variables[name]) for name, tx in transformations.items()}

    def step(given):
        for name, optimizer in optimizers.items():
            both = name == "lookahead"
            gradients = optax.LookaheadParams(given, jax.tree.map(jnp.zeros_like, given)) if both else given
            optimizer.apply_gradients(gradients, aggregate="sum")

    @jax.jit
    def plain_step(params, states, summed):
        updated = {name: tx.update(summed, states[name], params[name]) for name, tx in transformations.items()}
        params = {name: optax.apply_updates(params[name], updates) for name, (updates, _) in updated.items()}
        return params, {name: state for name, (_, state) in updated.items()}

    params = jax.tree.map(jnp.asarray, params)
    states = {name: tx.init(params[name]) for name, tx in transformations.items()}
    given = own_gradients(STRATEGY, START)
    summed = STRATEGY.reduce("sum", given)
    for _ in range(3):
        STRATEGY.run(step, args=(given,))
        params, states = plain_step(params, states, summed)
    for name, optimizer in optimizers.items():
        assert_close({name: variables[name]}, params[name])
        assert_close({name: optimizer.state}, states[name])
    STRATEGY.assert_mirrored()


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
    optimizers = {name: mr.Optimizer(OPTAX[name].make(), variables[name]) for name in names}

    def of_b():
        states = {name: optimizer.state for name, optimizer in optimizers.items()}
        leaves = jax.tree_util.tree_leaves_with_path((variables, states), is_leaf=lambda x: isinstance(x, mr.Variable))
        return {name: leaf for path, leaf in leaves if (name := jax.tree_util.keystr(path)).endswith("['b']")}

    for leaf in of_b().values():
        leaf.assign(np.full(leaf.shape, 0.5))
    gradients = own_gradients(STRATEGY, START)

    def step(gradients):
        for optimizer in optimizers.values():
            optimizer.apply_gradients({**gradients, "b": None}, aggregate="sum")

    for _ in range(2):
        STRATEGY.run(step, args=(gradients,))
    assert [name for name, leaf in of_b().items() if not np.all(leaf.numpy() == 0.5)] == []
    assert not any(np.array_equal(own["w"].numpy(), START["w"]) for own in variables.values())
    assert int(optimizers["adamw"].state[0].count) == 2, "what belongs to no variable goes on"


def test_the_state_of_the_longest_name_is_skipped_and_no_other():
    params = {"w": variable(1.0), "deep": {"w": variable(1.0)}}
    optimizer = mr.Optimizer(optax.adam(0.1), params)
    optimizer.apply_gradients({"w": None, "deep": {"w": 1.0}})
    moments = optimizer.state[0].mu
    assert (float(moments["w"]), float(moments["deep"]["w"])) == (0.0, pytest.approx(0.1))


def test_outside_a_step_gradients_are_one_value_and_per_replica_ones_are_summed():
    a, b = pair()
    optimizer = mr.Optimizer(optax.sgd(0.1), [a, b])
    optimizer.apply_gradients([jnp.ones(2), 1.0])
    optimizer.apply_gradients([distributed(STRATEGY, np.float32([1, 2]), np.float32([3, 4])), 1.0])
    np.testing.assert_allclose(a.numpy(), [1 - 0.1 - 0.4, 1 - 0.1 - 0.6], rtol=1e-6)
    optimizer.apply_gradients([a, b])  # a variable is an array too
    np.testing.assert_allclose(b.numpy(), 0.8 * 0.9, rtol=1e-6)
    with pytest.raises(mr.PerReplicaError, match=r"aggregate=False.*PerReplica as the gradient of 'a'.*strategy\.reduce"):
        optimizer.apply_gradients([distributed(STRATEGY, np.ones(2), np.ones(2)), 1.0], aggregate=False)


def test_in_merge_call_and_in_a_function_it_updates_once():
    a, b = pair()
    optimizer = mr.Optimizer(optax.sgd(0.1), [a, b])
    x = distributed(STRATEGY, np.float32([1, 2]), np.float32([3, 4]))

    def update(strategy, gradient):
        optimizer.apply_gradients([gradient, 1.0])

    STRATEGY.run(lambda x: mr.get_replica_context().merge_call(update, args=(x,)), args=(x,))
    mr.function(lambda x: update(STRATEGY, x))(x)
    np.testing.assert_allclose(a.numpy(), [1 - 0.8, 1 - 1.2], rtol=1e-5)
    np.testing.assert_allclose(b.numpy(), 0.8, rtol=1e-6)


def test_a_change_of_a_variable_or_of_the_state_between_steps_is_seen():
    w = variable(1.0)
    optimizer = mr.Optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), [w])
    x = distributed(STRATEGY, np.float32(1), np.float32(2))

    def step(x):
        optimizer.apply_gradients(mr.grad(lambda: w * x, [w])(), aggregate="sum")

    STRATEGY.run(step, args=(x,))
    w.assign(5.0)
    STRATEGY.run(step, args=(x,))
    optimizer.state.hyperparams["learning_rate"].assign(1.0)
    STRATEGY.run(step, args=(x,))
    np.testing.assert_allclose(w.numpy(), 5 - 0.3 - 3, rtol=1e-6)


def test_the_state_is_made_once_named_and_not_trainable():
    a, b = pair()
    optimizer = mr.Optimizer(optax.adam(0.1), {"a": a, "b": b})
    first = optimizer.state
    optimizer.apply_gradients({"a": jnp.ones(2), "b": 1.0})
    assert all(x is y for x, y in zip(_variables(first), _variables(optimizer.state), strict=True))
    assert [v.name for v in _variables(first)][:2] == ["optimizer[0].count", "optimizer[0].mu['a']"]
    assert not any(v.trainable for v in _variables(first))
    assert optimizer.variables == {"a": a, "b": b}
    assert repr(optimizer) == "mr.Optimizer('a', 'b'; 5 state variables)"


def _variables(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, mr.Variable))


# -- no factor R (the refusals are in test_refusals)


def test_gradients_that_were_reduced_before():
    w = variable(1.0, name="w")
    optimizer = mr.Optimizer(optax.sgd(0.1), [w])
    x = distributed(STRATEGY, np.float32(1), np.float32(3))

    def step(x, aggregate, is_reduced):
        gradients = mr.grad(lambda: w * x, [w])()
        gradients = mr.get_replica_context().all_reduce("mean", gradients) if is_reduced else gradients
        optimizer.apply_gradients(gradients, aggregate=aggregate)

    with pytest.raises(mr.FactorOfReplicasError, match=r"'w' given to apply_gradients at .*already been.*aggregate=False"):
        STRATEGY.run(step, args=(x, True, True))
    with pytest.raises(mr.ReplicasDivergeError, match="is mirrored, but the value assigned"):
        STRATEGY.run(step, args=(x, False, False))
    assert float(w) == 1.0
    STRATEGY.run(step, args=(x, False, True))
    np.testing.assert_allclose(w.numpy(), 0.8, rtol=1e-6)


def test_how_gradients_are_combined_is_said_once_or_each_time(per_replica):
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(3)])
    own = per_replica(strategy, *np.float32([3, 6, 0]))

    def update(made_with, **given):
        with strategy.scope():
            w, half = mr.Variable(0.0), mr.Variable(np.float16(0))
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

    with strategy.scope():
        w = mr.Variable(0.0)
        optimizer = mr.Optimizer(optax.sgd(1.0), [w], aggregate="mean")
    optimizer.apply_gradients([own])
    mr.function(lambda x: optimizer.apply_gradients([x]))(own)
    assert float(w) == -6
    for wrong, error in (("max", ValueError), (1, TypeError), ("", ValueError)):
        with pytest.raises(error, match=r"aggregate is .*expected one of 'sum', 'mean'"):
            mr.Optimizer(optax.sgd(1.0), [w], aggregate=wrong)
    with pytest.raises(ValueError, match="aggregate is 'average'"):
        optimizer.apply_gradients([own], aggregate="average")
    assert float(w) == -6


def test_a_mean_weighs_replicas_by_their_rows_and_leaves_out_who_has_none():
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(3)])
    with strategy.scope():
        w, merged, other = mr.Variable(0.0), mr.Variable(0.0), mr.Variable(0.0)
        optimizers = [mr.Optimizer(optax.sgd(1.0), [v], aggregate="mean") for v in (w, merged, other)]
    rows = [np.arange(count, dtype=np.float32) for count in (3, 1, 0)]
    x = strategy.distribute_values_from_function(lambda ctx: rows[ctx.replica_id_in_sync_group])
    pairs = strategy.distribute_values_from_function(lambda ctx: np.repeat(rows[ctx.replica_id_in_sync_group], 2))

    def step(x, pairs):
        optimizers[0].apply_gradients([jnp.mean(x)])  # NaN where there are no rows
        merge = lambda strategy, gradient: optimizers[1].apply_gradients([gradient])  # noqa: E731
        mr.get_replica_context().merge_call(merge, args=(jnp.mean(x),))
        optimizers[2].apply_gradients([jnp.mean(pairs)])

    strategy.run(step, args=(x, pairs))
    assert float(w) == float(merged) == float(other) == -0.75
    ways = strategy.distribute_values_from_function(lambda ctx: np.ones(2 - ctx.replica_id_in_sync_group, np.float32))
    with pytest.raises(mr.UnevenReplicasError, match=r"\(3, 1, 0\), \(2, 1, 0\) rows.*aggregate='sum'"):
        strategy.run(step, args=(x, ways))
    assert float(w) == -0.75


def test_a_none_in_the_tree_of_variables_is_a_none_in_that_of_the_gradients(strategy2: mr.Strategy) -> None:
    with strategy2.scope():
        w = mr.Variable(1.0)
        optimizer = mr.Optimizer(optax.sgd(0.5), {"w": w, "b": None})

    def step() -> None:
        _, gradients = mr.value_and_grad(lambda: w * w / 2, {"w": w, "b": None})()
        optimizer.apply_gradients(gradients, aggregate=False)

    strategy2.run(step)
    assert float(w) == 0.5
    with pytest.raises(ValueError, match="gradients of structure"):
        optimizer.apply_gradients({"w": 1.0, "b": 1.0})


def test_what_a_transformation_takes_besides_is_passed_on(strategy2: mr.Strategy) -> None:
    target = jnp.asarray([3.0, 4.0])
    with strategy2.scope():
        w, alone = mr.Variable(jnp.asarray([1.0, -2.0])), mr.Variable(1.0)
        optimizer = mr.Optimizer(optax.lbfgs(), w)
        plateau = mr.Optimizer(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1)), alone)

    def step(value: jax.Array) -> None:
        loss = lambda x: jnp.sum((x - target) ** 2)  # noqa: E731
        value_of, gradient = jax.value_and_grad(loss)(w.value)
        optimizer.apply_gradients(gradient, aggregate=False, value=value_of, grad=gradient, value_fn=loss)
        plateau.apply_gradients(jnp.float32(0.0), aggregate=False, value=value)

    for _ in range(4):
        strategy2.run(step, args=(jnp.float32(1.0),))
    np.testing.assert_allclose(w.numpy(), target, atol=1e-4)
    state = jax.tree.leaves(plateau.state, is_leaf=lambda x: isinstance(x, mr.Variable))
    assert [float(v) < 1.0 for v in state if "scale" in v.name] == [True]


# -- minimize and iterations


def test_minimize_is_value_and_grad_and_apply_gradients(strategy: mr.MirroredStrategy) -> None:
    rows = np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)

    def train(minimize):
        with strategy.scope():
            variables = {"w": mr.Variable(np.ones(2, np.float32)), "b": [mr.Variable(0.5), None]}
            optimizer = mr.Optimizer(optax.adam(0.1), variables)

        def step(x):
            def loss():
                return mr.losses.compute_average_loss((x @ variables["w"] + variables["b"][0]) ** 2)

            if minimize:
                return optimizer.minimize(loss)
            value, gradients = mr.value_and_grad(loss, variables)()
            optimizer.apply_gradients(gradients)
            return value

        losses = [strategy.reduce("sum", strategy.run(step, args=(x,))) for x in strategy.distribute_dataset([rows] * 3)]
        assert int(optimizer.iterations) == 3 and optimizer.iterations.dtype == np.int32
        return losses, jax.tree.map(np.asarray, variables)

    jax.tree.map(np.testing.assert_array_equal, train(True), train(False))


def test_minimize_some_of_the_variables(strategy2: mr.Strategy) -> None:
    w, b = (variable(1.0, strategy2) for _ in range(2))
    optimizer = mr.Optimizer(optax.sgd(0.1), {"w": w, "b": b})
    x = distributed(strategy2, 1.0, 2.0)
    losses = strategy2.run(lambda x: optimizer.minimize(lambda: w * b * x, [b], aggregate="sum"), args=(x,))
    assert (float(strategy2.reduce("sum", losses)), float(w), float(b)) == (3.0, 1.0, np.float32(0.7))
    assert float(optimizer.minimize(lambda: w * 2, w)) == 2.0 and float(w) == np.float32(0.8)  # outside a step, once
    assert int(optimizer.iterations) == 2
    strategy2.run(lambda: optimizer.minimize(lambda: w * 2, aggregate=False))
    assert float(w) == np.float32(0.6)
    assert int(optimizer.iterations) == 3


def test_iterations_count_the_updates_wherever_they_are_made(strategy2: mr.Strategy) -> None:
    w, b = variable(1.0, strategy2), variable(1.0, strategy2)
    optimizer = mr.Optimizer(optax.MultiSteps(optax.adam(0.1), 2), [w, b])

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
    with pytest.raises(ValueError, match="got no gradient for any variable"):
        optimizer.apply_gradients([None, None])
    with pytest.raises(AttributeError):
        optimizer.iterations = 3
    assert int(optimizer.iterations) == 6 and optimizer.iterations.name == "optimizer.iterations"
    assert all(
        optimizer.iterations is not v for v in jax.tree.leaves(optimizer.state, is_leaf=lambda v: v is not optimizer.state)
    )
