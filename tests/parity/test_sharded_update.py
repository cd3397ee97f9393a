"""mr.Optimizer(..., shard_state=True): the numbers of the optimizer without it, from parts of the state on each device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optax_rows import ROWS
from parameters import nightly
from strategies import divide_small_arrays, strategy_of, variable

import mirrored as mr
from mirrored._variables.variable import is_variable

# One test function makes a step for each optimizer.
pytestmark = [pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning"), pytest.mark.usefixtures("in_numpy")]


@pytest.fixture(autouse=True)
def small_arrays_in_parts(monkeypatch):
    divide_small_arrays(monkeypatch, 16)


#: What changes each number by itself is laid out in parts; norms, factors, matrices, conditions and labels need more.
TRANSFORMATIONS = {
    name: ROWS[name].make
    for name in "sgd clip_by_global_norm lamb adafactor add_noise MultiSteps contrib.muon inject_hyperparams".split()  # noqa: SIM905
} | {
    "mask that asks for shapes": lambda: optax.adamw(
        optax.cosine_decay_schedule(0.1, 10), mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "labels": lambda: optax.multi_transform({"a": optax.adam(0.1), "s": optax.sgd(0.1)}, {"w": "a", "b": "s", "scale": "a"}),
}


def start():
    w = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
    return {"w": w, "b": np.full(7, 0.1, np.float32), "scale": np.float32(2)}


def make(strategy, tx, **options):
    variables = {name: variable(value, strategy, name=name) for name, value in start().items()}
    return variables, mr.Optimizer(tx, variables, **{"aggregate": "sum"} | options)


def gradients_of(strategy, k=0):
    """Give each replica gradients of its own."""
    return strategy.distribute_values_from_function(
        lambda ctx: jax.tree.map(lambda x: np.cos(x + k + ctx.replica_id_in_sync_group), start())
    )


def plain(tree):
    """Return a tree of variables as numpy arrays."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def assert_alike(one, other, name=""):
    (variables, optimizer), (others, other_optimizer) = one, other
    assert optimizer.iterations.numpy() == other_optimizer.iterations.numpy()
    tree, other_tree = (variables, optimizer.state), (others, other_optimizer.state)
    assert jax.tree.structure(tree, is_leaf=is_variable) == jax.tree.structure(other_tree, is_leaf=is_variable)
    for a, b in zip(plain(tree), plain(other_tree), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=name)


def both(strategy, make_tx=lambda: optax.adam(0.1), **options):
    return [make(strategy, make_tx(), shard_state=is_sharded, **options) for is_sharded in (False, True)]


SOME, ALL = ["sgd", "clip_by_global_norm"], list(TRANSFORMATIONS)
LARGEST = mr.ReductionToOneDevice(accumulation_fn=lambda arrays: jnp.stack(arrays).max(0))
#: Devices, options of the strategy, and transformations. Of eight devices some have no elements of a small array.
WAYS = [
    (3, {}, SOME), (2, {"num_replicas": 4}, SOME),
    *nightly((2, {"cross_device_ops": LARGEST}, SOME), (1, {}, SOME), (2, {}, ALL), (3, {}, ALL), (8, {}, ALL)),
]  # fmt: skip


@pytest.mark.parametrize(("num_devices", "options", "names"), WAYS)
def test_the_numbers_are_those_without_shards(num_devices, options, names):
    strategy = strategy_of(num_devices, **options)
    made = {name: both(strategy, TRANSFORMATIONS[name]) for name in names}

    def step(gradients):
        for _, optimizer in (pair for pairs in made.values() for pair in pairs):
            optimizer.apply_gradients(gradients)

    for k in range(3):
        strategy.run(step, args=(gradients_of(strategy, k),))
    strategy.assert_mirrored()
    for name, pairs in made.items():
        assert_alike(*pairs, name)


def test_each_replica_holds_its_part_of_the_state(strategy3):
    (_, whole), (_, sharded) = both(strategy3)
    strategy3.run(sharded.apply_gradients, args=(gradients_of(strategy3),))

    def bytes_by_device(optimizer):
        arrays = [v._array for v in jax.tree.leaves(optimizer.state, is_leaf=is_variable)]
        return [sum(s.data.nbytes for a in arrays for s in a.addressable_shards if s.device == d) for d in strategy3.devices]

    assert bytes_by_device(whole) == [4 * (1 + 2 * (15 + 7 + 1))] * 3
    assert bytes_by_device(sharded) == [4 * (1 + 2 * (6 + 3 + 1))] * 3  # scalars are on each; 5 rows of 3 are 2 + 2 + 1
    assert [v.shape for v in sharded.state[0].mu.values()] == [(7,), (), (5, 3)]


def test_outside_of_a_step_and_without_some_gradients(strategy2):
    variables, optimizer = make(strategy2, optax.sgd(0.1, momentum=0.9), shard_state=True)
    optimizer.apply_gradients(jax.tree.map(np.ones_like, start()))
    optimizer.apply_gradients([(np.ones((5, 3), np.float32), variables["w"])])
    np.testing.assert_allclose(variables["w"], start()["w"] - 0.1 * (1 + 1.9), rtol=1e-6)
    np.testing.assert_allclose(variables["b"], start()["b"] - 0.1, rtol=1e-6)
    strategy2.run(lambda: optimizer.apply_gradients([(jnp.ones(7), variables["b"])], aggregate=False))
    np.testing.assert_allclose(variables["b"], start()["b"] - 0.1 * (1 + 1.9), rtol=1e-6)
    np.testing.assert_allclose(optimizer.state[0].trace["w"], np.full((5, 3), 1.9), rtol=1e-6)

    empty, one = (mr.Variable(value) for value in (np.zeros((0, 3), np.float32), np.ones(1, np.float32)))
    mr.Optimizer(optax.adam(0.1), [empty, one], shard_state=True).apply_gradients([jnp.zeros((0, 3)), jnp.ones(1)])
    np.testing.assert_allclose(one, [0.9], rtol=1e-5)


def test_what_differs_by_replica_is_refused_before_it_is_gathered(strategy2):
    """An all-gather makes the same of anything, so the proof must see what goes into the parts."""
    given = gradients_of(strategy2)

    def refused(tx, message, step, error=mr.ReplicasDivergeError):
        _, optimizer = make(strategy2, tx, shard_state=True)
        with pytest.raises(error, match=message):
            strategy2.run(lambda g: step(optimizer.apply_gradients, g), args=(given,))

    with_loss = lambda apply, g: apply(g, value=g["scale"])  # noqa: E731
    by_hand = lambda apply, g: apply({**jax.tree.map(jnp.ones_like, g), "w": g["w"]}, aggregate=False)  # noqa: E731
    refused(optax.sgd(0.1), "variable 'b' is mirrored, but the value", lambda apply, g: apply(g, aggregate=False))
    refused(optax.chain(contrib.reduce_on_plateau(), optax.sgd(0.1)), "may differ by replica", with_loss)
    refused(optax.polyak_sgd(), "may differ by replica", with_loss)
    refused(optax.adam(0.1), "variable 'w' is mirrored, but the value", by_hand)
    refused(optax.sgd(0.1, momentum=0.9), "variable 'w' is mirrored, but the value", by_hand)
    summed = lambda apply, g: apply(mr.get_replica_context().all_reduce("sum", g), value=1.0)  # noqa: E731
    refused(optax.polyak_sgd(), "already been combined", summed, mr.FactorOfReplicasError)


@pytest.mark.parametrize("there, here", [(True, False), *nightly((False, True))])
def test_a_checkpoint_restores_into_the_other_kind_on_another_number_of_replicas(strategy2, strategy3, tmp_path, there, here):
    tx = optax.sgd(0.1, momentum=0.9)
    saved = make(strategy3, tx, shard_state=there)
    strategy3.run(saved[1].apply_gradients, args=(gradients_of(strategy3),))
    with mr.Checkpoint(tmp_path, variables=saved[0], optimizer=saved[1]) as checkpoint:
        checkpoint.save(1)
    restored = make(strategy2, tx, shard_state=here)
    mr.Checkpoint(tmp_path, variables=restored[0], optimizer=restored[1]).restore_latest()
    assert_alike(saved, restored)
    summed = jax.tree.map(np.asarray, strategy3.reduce("sum", gradients_of(strategy3, 1)))
    for _, optimizer in (saved, restored):
        optimizer.apply_gradients(summed)
    assert_alike(saved, restored)


def test_the_first_state_may_be_computed_from_the_values_of_variables(strategy2):
    def init(params):
        largest = max(float(np.abs(value).max()) for value in params.values())
        return {"largest": np.float32(largest), "sums": jax.tree.map(jnp.zeros_like, params)}

    unchanged = optax.GradientTransformation(init, lambda updates, state, params: (updates, state))
    _, optimizer = make(strategy2, unchanged, shard_state=True)
    assert optimizer.state["largest"].numpy() == max(np.abs(value).max() for value in start().values())
    assert not np.any(optimizer.state["sums"]["w"])
