"""Each transformation that optax exports trains as on one device, or is refused."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optax_rows import CHANGE_STRUCTURE, OF_EXAMPLES, ROWS, exported
from parameters import nightly
from strategies import divide_small_arrays, jit, variable

import mirrored as mr
from mirrored import losses

pytestmark = pytest.mark.usefixtures("in_numpy")

SOME = ["adamw", "MultiSteps", "contrib.reduce_on_plateau"]
REST = [name for name in ROWS if name not in SOME]
GROUPS = [REST[i::8] for i in range(8)]
PAGE = Path(__file__).parents[1] / "docs" / "optax.md"


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Four batches of 7 rows, which three replicas share as 3, 2 and 2."""
    x, y = (np.sin(scale * np.arange(28 * n, dtype=np.float32)).reshape(4, 7, n) for scale, n in ((1.0, 4), (0.7, 3)))
    return list(zip(x, y, strict=True))


def each(params: Any, x: Any, y: Any) -> jax.Array:
    params = getattr(params, "fast", params)
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2, axis=1)


def given(names: Sequence[str], loss: Any, value: Any, gradient: Any) -> dict[str, Any]:
    everything = {"value": value, "grad": gradient, "value_fn": loss, "obj_fn": loss}
    everything["grad_fn"] = lambda params, _: jax.grad(loss)(params)
    return {name: everything[name] for name in names}


def alone(name: str) -> tuple[Any, Any]:
    """Train with plain optax on one device; return weights and state."""
    row = ROWS[name]
    tx = optax.with_extra_args_support(row.make())
    params: Any = jax.tree.map(jnp.asarray, row.start)
    state = tx.init(params)

    @jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss = lambda params: jnp.mean(each(params, x, y))  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(params)
        gradient = getattr(gradient, "fast", gradient)
        updates, state = tx.update(gradient, state, params, **given(row.given, loss, value, gradient))
        return optax.apply_updates(params, updates), state

    for x, y in batches():
        params, state = step(params, state, x, y)
    return params, state


def together(names: Sequence[str], strategy: mr.Strategy, shard_state: bool) -> dict[str, tuple[Any, mr.Optimizer]]:
    """Train with each of them, in one step."""
    with strategy.scope():
        variables = {name: jax.tree.map(mr.Variable, ROWS[name].start) for name in names}
        optimizers = {name: mr.Optimizer(ROWS[name].make(), variables[name], shard_state=shard_state) for name in names}

    def step(x: Any, y: Any) -> None:
        for name, optimizer in optimizers.items():
            params = jax.tree.map(lambda value: value, variables[name])
            own = lambda params: losses.compute_average_loss(each(params, x, y))  # noqa: E731
            if not ROWS[name].given:
                optimizer.apply_gradients(jax.grad(own)(params))
                continue
            loss = losses.global_loss(own)
            value, gradient = jax.value_and_grad(loss)(params)
            optimizer.apply_gradients(gradient, aggregate=False, **given(ROWS[name].given, loss, value, gradient))

    for rows in strategy.distribute_dataset(batches()):
        strategy.run(step, args=rows)
    strategy.assert_mirrored()
    return {name: (variables[name], optimizers[name]) for name in names}


def largest_difference(tree: Any, other: Any) -> float:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    arrays = [[jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in pair] for pair in pairs]
    return max((float(np.max(np.abs(np.subtract(*map(np.asarray, pair))), initial=0)) for pair in arrays), default=0.0)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:inject_stateful_hyperparams is deprecated", "ignore:`optimistic_adam` is deprecated")
@pytest.mark.usefixtures("without_optimizations")
@pytest.mark.parametrize("shard_state", [False, *nightly(True)])
@pytest.mark.parametrize("names", [SOME, *nightly(*GROUPS)], ids=lambda names: names[0])
def test_each_trains_as_on_one_device(
    names: Sequence[str], shard_state: bool, strategy3: mr.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {}
    divide_small_arrays(monkeypatch, 16)
    for name, (variables, optimizer) in together(names, strategy3, shard_state).items():
        params, state = alone(name)
        own, own_state = jax.tree.map(lambda value: value, (variables, optimizer.state))
        found, moved = largest_difference(own, params), largest_difference(ROWS[name].start, params)
        is_same_state = jax.tree.structure(own_state) == jax.tree.structure(state)
        if names is SOME:
            is_same_state = is_same_state and largest_difference(own_state, state) < 2e-5
        if not found < 2e-5 or (moved > 5e-3) is not ROWS[name].moves or not is_same_state:
            wrong[name] = found, moved
    assert wrong == {}


@pytest.mark.filterwarnings('ignore:"seed" is deprecated')  # dpsgd has no other argument yet
def test_what_takes_gradients_of_examples_or_changes_its_state_is_refused(strategy2: mr.Strategy) -> None:
    def of_examples(name: str) -> Any:
        options = {"learning_rate": 0.1, "seed": 0} if "dpsgd" in name else {"key": jax.random.key(0)}
        return getattr(contrib, name.removeprefix("contrib."))(l2_norm_clip=1.0, noise_multiplier=0.1, **options)

    shape, structure = (
        r"'w' has shape \(4, 3\); expected \(3,\)",
        r"state of another structure, .*'norm'.* leave it out, and return",
    )
    cases = [(of_examples(name), jnp.ones((4, 3)), shape) for name in OF_EXAMPLES]
    cases += [(optax.chain(make(), optax.sgd(0.1)), jnp.ones(3), structure) for make in CHANGE_STRUCTURE.values()]
    for tx, gradient, message in cases:
        w = variable(np.ones(3, np.float32), strategy2, name="w")
        optimizer = mr.Optimizer(tx, [w])
        with pytest.raises(ValueError, match=message):
            strategy2.run(optimizer.apply_gradients, args=([gradient],), kwargs={"aggregate": False})
        np.testing.assert_array_equal(w, np.ones(3))


def test_a_replicas_own_loss_and_a_second_sum_are_refused_and_the_loss_of_all_is_taken(strategy3: mr.Strategy) -> None:
    w = variable(np.ones(3, np.float32), strategy3, name="w")
    optimizer = mr.Optimizer(optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau()), w)
    x = strategy3.distribute_values_from_function(lambda ctx: np.full((2, 3), 1.0 + ctx.replica_id_in_sync_group, np.float32))

    def step(x: Any, is_whole: bool) -> None:
        own = lambda w: losses.compute_average_loss(jnp.sum((x * w) ** 2, axis=1))  # noqa: E731
        value, gradient = jax.value_and_grad(own)(w.value)
        value = mr.get_replica_context().all_reduce("sum", value) if is_whole else value
        optimizer.apply_gradients(gradient, value=value)

    def twice(x: Any) -> None:
        loss = losses.global_loss(lambda w: losses.compute_average_loss(jnp.sum(x * w, axis=1)))
        optimizer.apply_gradients(jax.grad(loss)(w.value), value=0.0)

    with pytest.raises(mr.ReplicasDivergeError, match=r"may differ by replica: it depends on the argument `x`"):
        strategy3.run(step, args=(x, False))
    with pytest.raises(mr.FactorOfReplicasError, match="aggregate=False"):
        strategy3.run(twice, args=(x,))
    np.testing.assert_array_equal(w, np.ones(3))
    strategy3.run(step, args=(x, True))
    assert not np.array_equal(w, np.ones(3))


@pytest.mark.slow
def test_the_loss_of_all_has_the_derivatives_of_one_device(strategy3: mr.Strategy) -> None:
    x = np.sin(np.arange(14, dtype=np.float32)).reshape(7, 2)
    start = {"a": np.float32([0.3, -0.8]), "n": np.int32(2)}

    def each_of(params: Any, x: Any, scale: Any = 1.0) -> Any:
        return jnp.sum(jnp.sin(x * params["a"]) ** params["n"], axis=1) * scale

    def everything(loss: Any) -> Any:
        direction = {"a": jnp.float32([1.0, 2.0]), "n": np.zeros((), jax.dtypes.float0)}
        gradient = jax.grad(lambda a: loss({"a": a, "n": 2}, scale=3.0))
        return {
            "value": loss(start),
            "gradient": gradient(start["a"]),
            "forward": jax.jvp(lambda p: loss(p), (start,), (direction,))[1],
            "forward over reverse": jax.jvp(gradient, (start["a"],), (direction["a"],))[1],
            "reverse over reverse": jax.grad(lambda a: jnp.sum(gradient(a) * direction["a"]))(start["a"]),
            "hessian": jax.hessian(lambda a: loss({"a": a, "n": 2}))(start["a"]),
            "in jit and scan": jax.lax.scan(lambda c, _: (c - jax.jit(gradient)(c), None), start["a"], None, length=3)[0],
        }

    expected = jax.jit(lambda: everything(lambda params, scale=1.0: jnp.mean(each_of(params, x, scale))))()

    def step(x: Any) -> Any:
        return everything(losses.global_loss(lambda p, scale=1.0: losses.compute_average_loss(each_of(p, x, scale))))

    [rows] = strategy3.distribute_dataset([x])
    found = strategy3.run(step, args=(rows,))
    for name, value in expected.items():
        assert isinstance(found[name], jax.Array), name  # one value: the same on every replica
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_no_transformation_is_missing_here_or_in_the_table() -> None:
    names = {re.sub(",.*", "", name) for name in ROWS} | {*OF_EXAMPLES, *CHANGE_STRUCTURE}
    assert exported() - names == set(), "optax exports more: give it a row, or say what it is"
    text = PAGE.read_text()
    as_they_are = re.findall(r"`([\w.]+)`", text.partition("These work as they are:")[2].partition("\n\n")[0])
    in_table = re.findall(r"^\| `([\w.]+)`", text, re.MULTILINE)
    assert names == {*as_they_are, *in_table} and len(names) == len(as_they_are) + len(in_table)
