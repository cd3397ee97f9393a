"""mr.Optimizer: any optax transformation, the numbers of plain optax, gradients summed over the replicas once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import mirrored as mr

# One test function makes a step for each transformation.
pytestmark = pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")

STRATEGY = mr.MirroredStrategy(["cpu:0", "cpu:1"])
ELSEWHERE = mr.MirroredStrategy(["cpu:6", "cpu:7"])


def variable(value, strategy=STRATEGY, **kwargs):
    with strategy.scope():
        return mr.Variable(value, **kwargs)


def start():
    return {
        "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
        "b": np.zeros(3, np.float32),
        "deep": [np.float32(2), (np.ones(1, np.float32),)],
    }


def loss_of(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) ** 2) * params["deep"][0] + jnp.sum(params["deep"][1][0] ** 2)


DATA = np.linspace(-2, 2, 48, dtype=np.float32).reshape(4, 6, 2)  # 4 steps, 6 rows
LABELS = {"w": "a", "b": "s", "deep": ["a", ("s",)]}
SCHEDULE = optax.cosine_decay_schedule(0.1, 10)

TRANSFORMATIONS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw, schedule": lambda: optax.adamw(SCHEDULE, weight_decay=0.01),
    "lamb": lambda: optax.lamb(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=1),
    "clip by norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "multi_transform": lambda: optax.multi_transform({"a": optax.adam(0.1), "s": optax.sgd(0.1)}, LABELS),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False, "deep": [True, (False,)]}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.1)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "schedule_free": lambda: contrib.schedule_free_adamw(0.1),
}


def trained_plainly(tx, num_replicas, params, trained=lambda params: params):
    """The same with optax alone, on one device: the replicas' gradients are summed."""

    @jax.jit
    def step(params, state, x):
        parts = [jax.grad(loss_of)(trained(params), part) for part in jnp.split(x, num_replicas)]
        updates, state = tx.update(jax.tree.map(lambda *g: sum(g), *parts), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, params)
    state = tx.init(params)
    for x in DATA:
        params, state = step(params, state, x)
    return params, state


def split(strategy, x):
    parts = np.split(x, strategy.num_replicas_in_sync)
    return strategy.distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group])


def values_of(tree):
    return jax.tree.map(lambda value: value, tree)


def assert_close(variables, expected):
    for (path, own), value in zip(
        jax.tree_util.tree_leaves_with_path(values_of(variables)), jax.tree.leaves(expected), strict=True
    ):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            own, value = jax.random.key_data(own), jax.random.key_data(value)
        np.testing.assert_allclose(own, value, rtol=2e-5, atol=2e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_any_transformation_gives_the_numbers_of_plain_optax(name):
    variables = jax.tree.map(variable, start())
    optimizer = mr.Optimizer(TRANSFORMATIONS[name](), variables)  # outside the scope: it goes where its variables are
    traces = []

    def step(x):
        traces.append(None)
        optimizer.apply_gradients(mr.grad(lambda: loss_of(variables, x), variables)())

    for x in DATA:
        STRATEGY.run(step, args=(split(STRATEGY, x),))
    params, state = trained_plainly(TRANSFORMATIONS[name](), 2, start())
    assert_close(variables, params)
    assert_close(optimizer.state, state)
    assert len(traces) == 2
    STRATEGY.assert_mirrored()


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_the_number_of_replicas_does_not_matter(num_replicas):
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    variables = jax.tree.map(lambda x: variable(x, strategy), start())
    optimizer = mr.Optimizer(optax.adam(0.1), variables)

    def step(x):
        optimizer.apply_gradients(mr.grad(lambda: loss_of(variables, x), variables)())

    for x in DATA:
        strategy.run(step, args=(split(strategy, x),))
    assert_close(variables, trained_plainly(optax.adam(0.1), num_replicas, start())[0])


def test_lookahead_trains_fast_and_slow_values():
    tx = optax.lookahead(optax.adam(0.1), 3, 0.5)
    params = optax.LookaheadParams(jax.tree.map(variable, start()), jax.tree.map(variable, start()))
    optimizer = mr.Optimizer(tx, params)

    def step(x):
        optimizer.apply_gradients(mr.grad(lambda: loss_of(params.fast, x), params)())

    for x in DATA:
        STRATEGY.run(step, args=(split(STRATEGY, x),))
    plain = optax.LookaheadParams(start(), start())
    assert_close(params, trained_plainly(tx, 2, plain, lambda params: params.fast)[0])


# -- which gradients


def pair():
    return variable(np.ones(2, np.float32), name="a"), variable(1.0, name="b")


@pytest.mark.parametrize("form", ["tree", "zip", "list of pairs", "generator", "part of a zip"])
def test_gradients_come_as_a_tree_or_in_pairs(form):
    a, b = pair()
    optimizer = mr.Optimizer(optax.sgd(0.1), [a, b])
    grads = [jnp.ones(2), 2.0]
    given = {
        "tree": grads,
        "zip": zip(grads, [a, b], strict=True),
        "list of pairs": [(grads[1], b), (grads[0], a)],
        "generator": (pair for pair in zip(grads, [a, b], strict=True)),
        "part of a zip": zip(grads[:1], [a], strict=True),
    }[form]
    optimizer.apply_gradients(given)
    np.testing.assert_allclose(a.numpy(), [0.9, 0.9], rtol=1e-6)
    np.testing.assert_allclose(b.numpy(), 1.0 if form == "part of a zip" else 0.8, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw, schedule", "adafactor", "multi_transform", "masked", "MultiSteps"])
def test_a_variable_without_a_gradient_is_skipped_with_its_state(name):
    variables = jax.tree.map(variable, start())
    optimizer = mr.Optimizer(TRANSFORMATIONS[name](), variables)

    def step(x, is_skipped):
        gradients = mr.grad(lambda: loss_of(variables, x), variables)()
        optimizer.apply_gradients({**gradients, "b": None} if is_skipped else gradients)

    def of_b():
        leaves = jax.tree_util.tree_leaves_with_path({"b": variables["b"].value, "state": values_of(optimizer.state)})
        return {name: np.asarray(leaf) for path, leaf in leaves if (name := jax.tree_util.keystr(path)).endswith("['b']")}

    STRATEGY.run(step, args=(split(STRATEGY, DATA[0]), False))
    before, other = of_b(), variables["w"].numpy()
    for x in DATA[1:]:
        STRATEGY.run(step, args=(split(STRATEGY, x), True))
    after = of_b()
    assert [name for name in before if not np.array_equal(before[name], after[name])] == []
    assert not np.array_equal(other, variables["w"].numpy())


def test_the_state_of_the_longest_name_is_skipped_and_no_other():
    params = {"w": variable(1.0), "deep": {"w": variable(1.0)}}
    optimizer = mr.Optimizer(optax.adam(0.1), params)
    optimizer.apply_gradients({"w": None, "deep": {"w": 1.0}})
    moments = optimizer.state[0].mu
    assert (float(moments["w"]), float(moments["deep"]["w"])) == (0.0, pytest.approx(0.1))


def test_outside_a_step_gradients_are_one_value_and_per_replica_ones_are_summed(strategy2, per_replica):
    a, b = pair()
    optimizer = mr.Optimizer(optax.sgd(0.1), [a, b])
    optimizer.apply_gradients([jnp.ones(2), 1.0])
    optimizer.apply_gradients([per_replica(STRATEGY, np.float32([1, 2]), np.float32([3, 4])), 1.0])
    np.testing.assert_allclose(a.numpy(), [1 - 0.1 - 0.4, 1 - 0.1 - 0.6], rtol=1e-6)
    optimizer.apply_gradients([a, b])  # a variable is an array too
    np.testing.assert_allclose(b.numpy(), 0.8 * 0.9, rtol=1e-6)
    with pytest.raises(mr.PerReplicaError, match=r"aggregate=False.*PerReplica as the gradient of 'a'.*strategy\.reduce"):
        optimizer.apply_gradients([per_replica(STRATEGY, np.ones(2), np.ones(2)), 1.0], aggregate=False)


def test_in_merge_call_and_in_a_function_it_updates_once(per_replica):
    a, b = pair()
    optimizer = mr.Optimizer(optax.sgd(0.1), [a, b])
    x = per_replica(STRATEGY, np.float32([1, 2]), np.float32([3, 4]))

    def update(strategy, gradient):
        optimizer.apply_gradients([gradient, 1.0])

    STRATEGY.run(lambda x: mr.get_replica_context().merge_call(update, args=(x,)), args=(x,))
    mr.function(lambda x: update(STRATEGY, x))(x)
    np.testing.assert_allclose(a.numpy(), [1 - 0.8, 1 - 1.2], rtol=1e-5)
    np.testing.assert_allclose(b.numpy(), 0.8, rtol=1e-6)


def test_a_change_of_a_variable_or_of_the_state_between_steps_is_seen(per_replica):
    w = variable(1.0)
    optimizer = mr.Optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), [w])
    x = per_replica(STRATEGY, np.float32(1), np.float32(2))

    def step(x):
        optimizer.apply_gradients(mr.grad(lambda: w * x, [w])())

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


# -- no factor R


def test_gradients_that_were_reduced_before(per_replica):
    w = variable(1.0, name="w")
    optimizer = mr.Optimizer(optax.sgd(0.1), [w])
    x = per_replica(STRATEGY, np.float32(1), np.float32(3))

    def step(x, aggregate):
        gradients = mr.get_replica_context().all_reduce("mean", mr.grad(lambda: w * x, [w])())
        optimizer.apply_gradients(gradients, aggregate=aggregate)

    with pytest.raises(mr.FactorOfReplicasError, match=r"'w' given to apply_gradients at .*already been.*aggregate=False"):
        STRATEGY.run(step, args=(x, True))
    assert float(w) == 1.0
    STRATEGY.run(step, args=(x, False))
    np.testing.assert_allclose(w.numpy(), 0.8, rtol=1e-6)


def test_gradients_that_were_not_reduced_with_aggregate_false(per_replica):
    w = variable(1.0, name="w")
    optimizer = mr.Optimizer(optax.adam(0.1), [w])
    with pytest.raises(mr.ReplicasDivergeError, match="is mirrored, but the value assigned"):
        STRATEGY.run(
            lambda x: optimizer.apply_gradients(mr.grad(lambda: w * x, [w])(), aggregate=False),
            args=(per_replica(STRATEGY, np.float32(1), np.float32(3)),),
        )
    assert [float(v) for v in (w, *_variables(optimizer.state))] == [1.0, 0.0, 0.0, 0.0]


def test_the_same_data_on_every_replica_warns_of_the_factor():
    w = variable(1.0)
    optimizer = mr.Optimizer(optax.sgd(0.1), [w])

    def step(x):
        optimizer.apply_gradients(mr.grad(lambda: w * x, [w])())

    with pytest.warns(mr.FactorOfReplicasWarning, match=r"2 times that of one device.*distribute_dataset"):
        STRATEGY.run(step, args=(np.float32(1),))
    STRATEGY.run(step, args=(np.float32(1),))  # once
    np.testing.assert_allclose(w.numpy(), 0.6, rtol=1e-6)


# -- what is wrong is said, and changes nothing

A, B = pair()
COUNT = variable(1, name="count")
OWN = variable(1.0, name="own", synchronization="on_read")
THERE = variable(1.0, ELSEWHERE, name="there")
OPTIMIZER = mr.Optimizer(optax.adam(0.1), [A, B])
ONES = np.ones(2, np.float32)


def made(variables, tx=None):
    return lambda: mr.Optimizer(tx or optax.sgd(0.1), variables)


def applied(grads, **kwargs):
    return lambda: OPTIMIZER.apply_gradients(grads() if callable(grads) else grads, **kwargs)


def distributed(strategy, *values):
    return strategy.distribute_values_from_function(lambda ctx: values[ctx.replica_id_in_sync_group])


WRONG = {
    "no transformation": (made([A], optax.adam), TypeError, r"expected an optax transformation, for example optax\.adam\(1e-3\)"),
    "no variables": (made([]), TypeError, "got no variables"),
    "an array": (made([ONES]), TypeError, "of type ndarray among its variables"),
    "an integer variable": (made([COUNT]), TypeError, "'count' has dtype int32"),
    "a sync-on-read variable": (made([OWN]), ValueError, "'own' is sync-on-read"),
    "a variable twice": (made([A, B, A]), ValueError, "'a' is listed twice"),
    "two strategies": (made([A, THERE]), mr.StrategyMismatchError, "'a' and 'there' belong to different strategies"),
    "too few": (applied([ONES]), ValueError, r"structure PyTreeDef\(\[\*\]\); expected PyTreeDef\(\[\*, \*\]\)"),
    "a dict": (applied({"a": ONES, "b": 1.0}), ValueError, "like the variables, or zip"),
    "another shape": (applied([np.ones(3), 1.0]), ValueError, r"'a' has shape \(3,\); expected \(2,\)"),
    "none at all": (applied([None, None]), ValueError, "no gradient for any variable"),
    "text": (applied(["x", 1.0]), TypeError, "'a' is 'x'; expected an array or None"),
    "complex": (applied([ONES * 1j, 1.0]), TypeError, "'a' has dtype complex64; expected float32"),
    "a foreign variable": (applied([(1.0, THERE)]), ValueError, r"'there' in zip.*not one that this optimizer.*\('a', 'b'\)"),
    "one twice": (applied([(1.0, B), (2.0, B)]), ValueError, "'b' is twice in zip"),
    "no pairs": (applied(lambda: iter([ONES, 1.0])), TypeError, r"an iterator of .*expected pairs, as of zip"),
    "an empty zip": (applied(lambda: zip([], [], strict=True)), TypeError, r"an iterator of \[\]; expected pairs"),
    "uneven": (applied([distributed(STRATEGY, np.ones(2), np.ones(1)), 1.0]), ValueError, r"'a' has shape \(None,\)"),
    "of another strategy": (applied([distributed(ELSEWHERE, ONES, ONES), 1.0]), mr.StrategyMismatchError, "another strategy"),
    "in another's step": (lambda: ELSEWHERE.run(applied([ONES, 1.0])), mr.StrategyMismatchError, "'a' lives on 2 replicas"),
    "in jit": (lambda: jax.jit(applied([ONES, 1.0]))(), mr.ContextError, "under a JAX transformation"),
    "a PerReplica in a step": (
        lambda: STRATEGY.run(applied([distributed(STRATEGY, ONES, ONES), 1.0])),
        mr.PerReplicaError,
        r"compute inside strategy\.run",
    ),
    "made in a step": (lambda: STRATEGY.run(made([A])), mr.ContextError, "created inside a step.*next to the variables"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_and_changes_nothing(name):
    call, error, message = WRONG[name]
    before = [v.numpy() for v in (A, B, *_variables(OPTIMIZER.state))]
    with pytest.raises(error, match=message):
        call()
    after = [v.numpy() for v in (A, B, *_variables(OPTIMIZER.state))]
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
