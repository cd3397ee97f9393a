"""The backward pass waits for large gradients and their sums: the same numbers, made earlier, with less memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import all_reduce, made, strategy_of

import mirrored as mr
from mirrored._replicas import platforms
from mirrored._variables.variable import spec_of

pytestmark = pytest.mark.usefixtures("in_numpy")

WIDTH, LAYERS, ROWS = 192, 3, 24
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
WEIGHTS = [
    {"up": RNG.normal(size=(WIDTH, 2 * WIDTH)).astype(np.float32) / 14, "down": RNG.normal(size=(2 * WIDTH, WIDTH)) / 20}
    for _ in range(LAYERS)
]
NUM_GRADIENTS = 2 * LAYERS
CPU = platforms.PLATFORMS["cpu"]
OFF = CPU._replace(orders_sums=False)


Step = Callable[[jax.Array], Any]


def block(h: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return h + jnp.tanh(h @ w["up"]) @ w["down"]


def loss_of(weights: Any, x: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    h = x.astype(dtype)
    for w in weights:
        h = jax.checkpoint(block)(h, jax.tree.map(lambda a: a.astype(dtype), w))
    return jnp.sum(h.astype(jnp.float32) ** 2, axis=-1)


def total(weights: Any, x: jax.Array) -> jax.Array:
    return mr.losses.compute_average_loss(loss_of(weights, x))


# -- steps, each with its own way from gradients to their sums


def by_optimizer(w: mr.Variable, dtype: Any = jnp.float32, **options: Any) -> Step:
    optimizer = mr.Optimizer(optax.adam(1e-2), w, **options)
    return lambda x: optimizer.minimize(lambda: loss_of(w.value, x, dtype))


def descend(w: mr.Variable, gradients: Any) -> None:
    w.assign(jax.tree.map(lambda a, g: a - 0.01 * g, w.value, gradients))


def by_hand(w: mr.Variable, before: Callable[[Any], Any] = lambda g: g, after: Callable[[Any], Any] = lambda g: g) -> Step:
    def step(x: jax.Array) -> jax.Array:
        loss, gradients = jax.value_and_grad(total)(w.value, x)
        descend(w, after(all_reduce("sum", before(gradients))))
        return loss

    return step


def clipped(gradients: Any) -> Any:
    return optax.clip_by_global_norm(0.1).update(gradients, optax.EmptyState())[0]


def scaled(w: mr.Variable) -> Step:
    """Scale the loss, look for infinities before the sum, and leave the weights if there is one."""

    def step(x: jax.Array) -> jax.Array:
        gradients = jax.grad(lambda weights: 1024.0 * total(weights, x))(w.value)
        gradients = jax.tree.map(lambda g: g / 1024.0, gradients)
        is_finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()
        is_finite = all_reduce("sum", 1 - is_finite.astype(np.int32)) == 0
        descend(w, jax.tree.map(lambda g: jnp.where(is_finite, g, 0), all_reduce("sum", gradients)))
        return is_finite

    return step


def accumulated(w: mr.Variable) -> Step:
    """Add the gradients of two micro-batches before the sum."""

    def step(x: jax.Array) -> jax.Array:
        first, second = (jax.grad(total)(w.value, part) for part in jnp.split(x, 2))
        descend(w, all_reduce("sum", jax.tree.map(jnp.add, first, second)))
        return x.sum()

    return step


STEPS: dict[str, Callable[[mr.Variable], Step]] = {
    "optimizer": by_optimizer,
    "bfloat16": functools.partial(by_optimizer, dtype=jnp.bfloat16),
    "by hand": by_hand,
    "clipped before": functools.partial(by_hand, before=lambda g: mr.losses.as_share(clipped(g))),
    "clipped after": functools.partial(by_hand, after=clipped),
    "scaled": scaled,
    "accumulated": accumulated,
}


def weights_and_step(strategy: mr.Strategy, make: Callable[[mr.Variable], Step]) -> tuple[mr.Variable, Step]:
    with strategy.scope():
        w = mr.Variable(WEIGHTS, dtype=np.float32)
        return w, make(w)


def trained(make: Callable[[mr.Variable], Step], count: int, rows: int = ROWS, **how: Any) -> tuple[Places, Any]:
    """Train for two steps; return the `places` of the sums, and the last result with the weights."""
    strategy, result = strategy_of(count, **how), None
    w, step = weights_and_step(strategy, make)
    for x in strategy.distribute_dataset([X[:rows]] * 2):
        result = strategy.run(step, args=(x,))
    return places(strategy), (result, w.value)


class Places(NamedTuple):
    """What the program of a step has: large sums, those before its last product, and barriers."""

    sums: int
    early: int
    barriers: int


def places(strategy: mr.Strategy) -> Places:
    *_, program = strategy._steps.programs
    lifted, count = program.lifted, strategy.num_replicas_in_sync
    invars, first, rest = lifted.closed.jaxpr.invars, len(lifted.written), len(lifted.variables)
    is_own = [spec_of(variable).is_on_read for variable in lifted.variables] + [True] * (len(invars) - rest)
    shapes = [(count, *v.aval.shape) if own else v.aval.shape for v, own in zip(invars, is_own, strict=True)]
    avals = [jax.ShapeDtypeStruct(shape, v.aval.dtype) for shape, v in zip(shapes, invars, strict=True)]
    [mapped] = jax.make_jaxpr(program.mapped)(avals[:first], avals[first:rest], avals[rest:], program.constants).eqns
    names = [(e.primitive.name, max(a.aval.size for a in e.invars)) for e in mapped.params["jaxpr"].eqns if e.invars]
    last = max(k for k, (name, _) in enumerate(names) if name in ("dot_general", "remat2", "cond"))
    sums = [k for k, (name, size) in enumerate(names) if name in ("psum", "reduce_scatter") and size > 2**15]
    return Places(len(sums), sum(k < last for k in sums), sum(name == "optimization_barrier" for name, _ in names))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(array).tobytes() for array in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", STEPS)
def test_early_sums_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last gradient has no product behind it; one that is clipped has a late sum, and is made early."""
    num_replicas = 3 if name == "optimizer" else 2
    ordered, results = trained(STEPS[name], num_replicas)
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", OFF)
    plain, expected = trained(STEPS[name], num_replicas)
    assert bits(results) == bits(expected)
    assert (plain.early, plain.barriers) == (0, 0)
    assert ordered.early == (0 if name == "clipped before" else NUM_GRADIENTS - 1) and ordered.barriers > NUM_GRADIENTS
    assert ordered.sums == plain.sums == NUM_GRADIENTS


@pytest.mark.parametrize(
    ("how", "count", "rows"),
    [
        ({}, 1, ROWS),  # one replica adds nothing up
        ({"num_replicas": 4}, 2, ROWS),  # the sums are products of all rows
        ({"cross_device_ops": mr.ReductionToOneDevice(accumulation_fn=sum)}, 2, ROWS),
        ({}, 3, ROWS - 1),  # replicas with other numbers of rows: the backward pass is a choice of two
    ],
)
def test_other_steps_are_left_alone(how: dict[str, Any], count: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained(by_hand, count, rows, **how)
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", OFF)
    places_before, before = trained(by_hand, count, rows, **how)
    assert (found[0], bits(found[1])) == (places_before, bits(before))


@pytest.mark.parametrize(
    ("platform", "name", "early"), [("tpu", "optimizer", 0), ("tpu", "shard_state", 5), ("gpu", "optimizer", 5)]
)
def test_a_platform_says_which_sums_are_early(platform: str, name: str, early: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce-scatters have the order of `turns` on every platform."""
    its = platforms.PLATFORMS[platform]
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", its._replace(is_paced=True, is_host_memory=True))
    strategy = strategy_of(2)
    _, step = weights_and_step(strategy, functools.partial(by_optimizer, shard_state=name == "shard_state"))
    [x] = strategy.distribute_dataset([X])
    made(strategy.run, step, (x,))
    found = places(strategy)
    assert (found.early, found.barriers > 0) == (early, early > 0)
