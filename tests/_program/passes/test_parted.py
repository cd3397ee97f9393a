"""Where arrays in parts are gathered, where sums become reduce-scatters, and that only the proof says what is in parts."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import nightly
from strategies import divide_small_arrays, made, strategy_of

import mirrored as mr
from mirrored._plan.modules import collectives_in
from mirrored._program.passes import parted
from mirrored._replicas.division import Division, placement_of
from mirrored._replicas.per_replica import stack_of
from mirrored._strategy.strategy import parts_of
from mirrored._variables.variable import spec_of

pytestmark = pytest.mark.usefixtures("in_numpy")

WIDTH, LAYERS = 24, 3
WEIGHTS = np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 9
BATCH = np.random.default_rng(1).normal(size=(6, WIDTH)).astype(np.float32)


@pytest.fixture(autouse=True)
def small_arrays_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    divide_small_arrays(monkeypatch, 512)


@pytest.fixture
def in_parts() -> mr.MirroredStrategy:
    return mr.MirroredStrategy([f"cpu:{i}" for i in range(3)], storage="parts")


def counted(strategy: mr.Strategy, step: Callable[[Any], Any], rows: np.ndarray = BATCH) -> Counter[str]:
    """Make the program of a step, and return its collectives as compiled, those of loops as often as they run."""
    [batch] = strategy.distribute_dataset([rows])
    made(strategy.run, step, (batch,))
    *_, program = parts_of(strategy).steps.programs

    def stored(variable: mr.Variable) -> jax.ShapeDtypeStruct:
        spec = spec_of(variable)
        shape = spec.shape if spec.division is None else spec.division.stored_shape(spec.shape)
        return jax.ShapeDtypeStruct(shape, spec.dtype, sharding=placement_of(spec.mesh, spec.division))

    lifted = program.lifted
    arguments = list(map(stored, lifted.written)), list(map(stored, lifted.read_only)), [stack_of(batch)], program.constants
    sent = collectives_in(program.compiled.lower(*arguments).compile().as_text())
    return Counter(itertools.chain.from_iterable([each.kind] * each.times for each in sent if each.num_bytes > 300))


def trained(
    strategy: mr.Strategy, model: Callable[[Any, Any], Any], tx: Any = None, shard_state: bool = False
) -> Callable[[Any], Any]:
    with strategy.scope():
        w = mr.Variable(WEIGHTS, name="w")
        optimizer = mr.Optimizer(tx or optax.adam(1e-2), w, shard_state=shard_state)
    return lambda x: optimizer.minimize(lambda: (model(x, w.value) ** 2).mean(-1))


def layer(h: Any, a: Any) -> Any:
    return h + jnp.tanh(h.astype(jnp.bfloat16) @ a.astype(jnp.bfloat16)).astype(h.dtype)


#: A model, and how many gathers and sums of weights it has. Without a checkpoint XLA joins the last gather of the forward pass
#: and the first of the backward pass, and the first layer has no gradient by its input.
MODELS = {
    "layers": (lambda x, w: [x := layer(x, w[k]) for k in range(LAYERS)][-1], 2 * LAYERS - 2, 1),
    "checkpoint": (lambda x, w: [x := jax.checkpoint(layer)(x, w[k]) for k in range(LAYERS)][-1], 2 * LAYERS, 1),
    "scan": (lambda x, w: jax.lax.scan(lambda h, a: (jax.checkpoint(layer)(h, a), None), x, w)[0], 2 * LAYERS, LAYERS),
    "the same in each round": (lambda x, w: jax.lax.fori_loop(0, 5, lambda _, h: layer(h, w[0]), x), 1, 1),
}


@pytest.mark.by_xla
@pytest.mark.parametrize(("name", "num_replicas"), [*((name, 3) for name in MODELS), ("scan", 6), *nightly(("checkpoint", 6))])
def test_a_layer_is_gathered_twice_and_its_gradient_is_scattered(name: str, num_replicas: int) -> None:
    model, gathers, scatters = MODELS[name]
    in_parts = strategy_of(3, storage="parts", num_replicas=num_replicas)
    assert counted(in_parts, trained(in_parts, model)) == {"all-gather": gathers, "reduce-scatter": scatters}


_turned = optax.stateless(lambda gradients, _: jnp.flip(gradients) - jnp.flip(jnp.sort(gradients, 0)))


@pytest.mark.by_xla
@pytest.mark.parametrize(
    ("tx", "gathers"),
    [
        (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, mask=lambda w: w.ndim > 1)), 1),  # the new weights
        (optax.chain(_turned, optax.adam(1e-2)), 2),  # and the gradients, once
        *nightly((optax.adam(1e-2), 1), (optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-2, 0.9)), 1)),
    ],
)
def test_whole_weights_are_gathered_once_where_only_the_state_is_in_parts(tx: Any, gathers: int) -> None:
    strategy = strategy_of(3)
    step = trained(strategy, MODELS["checkpoint"][0], tx, shard_state=True)
    assert counted(strategy, step) == {"all-gather": gathers, "reduce-scatter": 1}


@pytest.mark.by_xla
@pytest.mark.parametrize(
    ("add", "storage", "scatters"),
    [
        (lambda carry, own: carry + own, "parts", 2),
        (lambda carry, own: carry + own, "whole", 1),
        (lambda carry, own: carry + own * carry, "parts", 1),
        (lambda carry, own: carry - own, "parts", 1),
    ],
)
def test_gradients_of_micro_batches_are_added_up_in_parts(add: Any, storage: mr.Storage, scatters: int) -> None:
    """A round that only adds to what it carries has a sum, if it gathers weights; any other carries whole arrays to one sum."""
    in_parts = strategy_of(3)
    with in_parts.scope():
        w, mean = mr.Variable(WEIGHTS[0], name="w", storage=storage), mr.Variable(WEIGHTS[0], name="mean", storage="parts")

    def step(x: Any) -> Any:
        def one(carry: Any, row: Any) -> tuple[Any, Any]:
            loss_of = lambda w: mr.losses.compute_average_loss((layer(row, w) ** 2).mean(-1))  # noqa: E731
            loss, own = jax.value_and_grad(loss_of)(w.value)
            return add(carry, own), loss

        carry, losses = jax.lax.scan(one, jnp.zeros_like(WEIGHTS[0]), x[:, None])
        mean.assign(mr.get_replica_context().all_reduce("sum", mr.losses.as_share(-carry / len(x))))
        w.assign_sub(mean * 0.1)
        return losses

    assert counted(in_parts, step)["reduce-scatter"] == scatters


@pytest.mark.by_xla
@pytest.mark.parametrize(
    ("dtype", "uses", "expected"),
    [
        (np.float32, 2, ["loop", "sum", "loop", "sum"]),
        (np.float32, 3, ["loop", "loop", "sum"]),
        (np.float16, 2, ["loop", "loop", "sum"]),  # a sum of one term may be infinite
    ],
)
def test_the_first_term_of_a_tied_weights_gradient_is_summed_before_the_loop_goes_back(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, uses: int, expected: list[str]
) -> None:
    made, scattered_sum, run_parts = list[str](), Division.scattered_sum, parted.run_parts
    monkeypatch.setattr(Division, "scattered_sum", lambda *given: made.append("sum") or scattered_sum(*given))
    monkeypatch.setattr(parted, "run_parts", lambda *given: made.append("loop") or run_parts(*given))

    def model(w: Any, x: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, a: (jnp.tanh(h * a), None), x @ w, jnp.ones(LAYERS, dtype))
        return functools.reduce(lambda h, w: jnp.tanh(h @ w), [w] * (uses - 1), h)

    def trained_in(storage: mr.Storage) -> np.ndarray:
        strategy = strategy_of(3, storage=storage)
        with strategy.scope():
            w = mr.Variable(WEIGHTS[0].astype(dtype), name="w")

        def step(x: Any) -> None:
            own = jax.grad(lambda w: (model(w, x) ** 2).sum())(w.value)
            w.assign_sub(0.1 * mr.get_replica_context().all_reduce("sum", mr.losses.as_share(own)))

        [batch] = strategy.distribute_dataset([BATCH.astype(dtype)])
        strategy.run(step, args=(batch,))
        return w.numpy()

    np.testing.assert_allclose(trained_in("parts"), trained_in("whole"), rtol=1e-5 if dtype == np.float32 else 1e-2)
    assert made == expected


def test_what_a_callback_returns_is_never_taken_for_a_part(in_parts: mr.MirroredStrategy) -> None:
    """Its operand is the same on all replicas, and its result has the shape of what is stored in parts."""
    with in_parts.scope():
        w = mr.Variable(WEIGHTS[0], name="w")
    numbers = itertools.count()
    kind = jax.ShapeDtypeStruct(WEIGHTS[0].shape, np.float32)

    def step() -> Any:
        other = jax.pure_callback(lambda a: np.asarray(a) * 0 + np.float32(next(numbers)), kind, w.value)
        return w.value + other, other

    together, other = in_parts.run(step)
    assert isinstance(together, mr.PerReplica)
    assert len({float(each.mean()) for each in map(np.asarray, other.values)}) == 3
    for one, added in zip(together.values, other.values, strict=True):
        np.testing.assert_allclose(np.asarray(one), WEIGHTS[0] + np.asarray(added), rtol=1e-6)


def test_own_gradients_stay_a_replicas_own(in_parts: mr.MirroredStrategy) -> None:
    with in_parts.scope():
        w = mr.Variable(WEIGHTS[0], name="w")

    def step(x: Any) -> Any:
        own = jax.grad(lambda w: ((x @ w) ** 2).sum())(w.value)
        total = mr.get_replica_context().all_reduce("sum", mr.losses.as_share(own))
        return own, total, own + total

    [batch] = in_parts.distribute_dataset([BATCH])
    own, total, both = in_parts.run(step, args=(batch,))
    np.testing.assert_allclose(sum(map(np.asarray, own.values)), np.asarray(total), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(own.values[1]) + np.asarray(total), np.asarray(both.values[1]), rtol=1e-5)


def test_arrays_shaped_like_stored_ones_that_are_not_stored_so(in_parts: mr.MirroredStrategy) -> None:
    """Sums of complex numbers, keys, references and arrays that differ by replica, all shaped like a weight in parts."""
    with in_parts.scope():
        w = mr.Variable(WEIGHTS[0], name="w")

    def step(x: Any) -> Any:
        def cell(w: Any) -> Any:
            cell = jax.new_ref(w * 1)
            cell[0] = jnp.zeros(WIDTH)
            return (jnp.tanh(x @ cell[...]) ** 2).sum()

        own = jax.grad(cell)(w.value)
        total = mr.get_replica_context().all_reduce("sum", (1 + 1j) * mr.losses.as_share(own))
        keys = jax.random.split(jax.random.key(0), WEIGHTS[0].shape)
        drawn = jax.vmap(jax.vmap(jax.random.normal))(keys)
        return total, w.value + drawn, w.value * jnp.where(total.imag > 0, 1j, 1)

    def both(strategy: mr.Strategy) -> list[Any]:
        [batch] = strategy.distribute_dataset([BATCH])
        return [np.asarray(a) for a in strategy.run(step, args=(batch,))]

    found = both(in_parts)
    draw = lambda: jax.vmap(jax.vmap(jax.random.normal))(jax.random.split(jax.random.key(0), WEIGHTS[0].shape))  # noqa: E731
    expected_drawn = jax.jit(draw)()
    gradient = jax.jit(jax.grad(lambda w: (jnp.tanh(BATCH @ w.at[0].set(0)) ** 2).sum()))(WEIGHTS[0])
    np.testing.assert_allclose(found[0], np.asarray(gradient) * (1 + 1j), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[1], WEIGHTS[0] + np.asarray(expected_drawn), rtol=1e-5)
