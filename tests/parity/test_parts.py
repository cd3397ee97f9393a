"""A step gives the same numbers whether what is the same on every replica is stored whole or in parts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import nightly
from strategies import divide_small_arrays

import mirrored as mr
from mirrored._replicas import division
from mirrored._variables import spec

pytestmark = pytest.mark.usefixtures("in_numpy")

DEVICES = [f"cpu:{i}" for i in range(8)]
WIDTH, LAYERS = 20, 3
#: A step, and the variables that it trains.
Made = tuple[Callable[[Any], Any], Any]


@pytest.fixture(autouse=True)
def small_arrays_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    divide_small_arrays(monkeypatch, 256)


def parameters(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    up, down = (rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(dtype) * dtype(0.2) for _ in range(2))
    return {"up": up, "down": down, "bias": np.zeros((LAYERS, WIDTH), dtype)}


def layer(h: Any, p: Any) -> Any:
    return h + jnp.tanh(h @ p["up"]) @ p["down"] + p["bias"]


def through(h: Any, p: Any, body: Callable[..., Any] = layer) -> Any:
    for k in range(LAYERS):
        h = body(h, jax.tree.map(lambda a, k=k: a[k], p))
    return h


def error(h: Any) -> Any:
    return ((h - 1) ** 2).mean(-1)


def trained(tx: Any, model: Callable[..., Any] = through, dtype: Any = np.float32, **options: Any) -> Made:
    """Make the step of an optimizer on the model."""
    w = mr.Variable(parameters(dtype), name="w")
    optimizer = mr.Optimizer(tx, w, **options)
    return lambda x: optimizer.minimize(lambda: error(model(x.astype(dtype), w.value))), (w, optimizer.state)


def half(model: Callable[..., Any]) -> Callable[..., Any]:
    """Compute in bfloat16."""
    cast = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)  # noqa: E731
    return lambda h, p: model(cast(h), cast(p)).astype(h.dtype)


def scanned(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda h, p: jax.lax.scan(lambda h, p: (body(h, p), None), h, p)[0]


def tied(h: Any, p: Any) -> Any:
    first = jax.tree.map(lambda a: a[0], p)
    return layer(h, first) @ first["up"].T + through(h, p)


def recurrent(h: Any, p: Any) -> Any:
    first = jax.tree.map(lambda a: a[0], p)
    return jax.lax.fori_loop(0, 3, lambda _, h: layer(h, first), h)


def by_hand(change: Callable[..., Any]) -> Made:
    """Make a step that sums gradients itself, after `change`, and updates variables with optax."""
    tx = optax.adam(1e-2)
    w, s = mr.Variable(parameters(), name="w"), mr.Variable(tx.init(parameters()), name="s", trainable=False)

    def step(x: Any) -> Any:
        loss_of = lambda p, x=x: mr.losses.compute_average_loss(error(through(x, p)))  # noqa: E731
        loss, gradients = change(loss_of, x, w.value)
        updates, new = tx.update(gradients, s.value, w.value)
        w.assign(optax.apply_updates(w.value, updates))
        s.assign(new)
        return loss

    return step, (w, s)


def total(value: Any) -> Any:
    return mr.get_replica_context().all_reduce("sum", mr.losses.as_share(value))


def with_finite(loss_of: Any, x: Any, p: Any) -> Any:
    """Look at own gradients before their sum, and at the sum."""
    loss, own = jax.value_and_grad(loss_of)(p)
    is_finite = lambda tree: jnp.all(jnp.stack([jnp.isfinite(a).all() for a in jax.tree.leaves(tree)]))  # noqa: E731
    num_finite, gradients = total(is_finite(own).astype(jnp.float32)), total(own)
    ok = (num_finite > 0) & is_finite(gradients)
    return loss, jax.tree.map(lambda a: jnp.where(ok, a, 0), gradients)


def with_own_clipping(loss_of: Any, x: Any, p: Any) -> Any:
    loss, own = jax.value_and_grad(loss_of)(p)
    return loss, total(jax.tree.map(lambda a: a / jnp.maximum(1, 10 * optax.tree.norm(own)), own))


def in_micro_batches(loss_of: Any, x: Any, p: Any) -> Any:
    """Add gradients up, row by row."""

    def one(carry: Any, row: Any) -> Any:
        loss, own = jax.value_and_grad(loss_of)(p, row[None])
        return jax.tree.map(jnp.add, carry, own), loss

    own, losses = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, p), x)
    return losses.sum(), total(jax.tree.map(lambda a: a / 2, own))


def with_conditions(loss_of: Any, x: Any, p: Any) -> Any:
    loss, own = jax.value_and_grad(loss_of)(p)
    gradients = total(own)
    gradients = jax.lax.cond(total(loss) > 0, lambda g: jax.tree.map(jnp.sin, g), lambda g: g, gradients)
    return loss, jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, jax.tree.map(lambda a: a * 0.5, c[1])), (0, gradients)
    )[1]


def with_noise(loss_of: Any, x: Any, p: Any) -> Any:
    loss, own = jax.value_and_grad(loss_of)(p)
    key = jax.random.key(0)
    return loss, jax.tree.map(lambda a: a + 0.1 * jax.random.normal(key, a.shape), total(own))


def reduced(loss_of: Any, x: Any, p: Any) -> Any:
    """Reduce parts along the divided axis in every way, and move and cut them."""
    loss, own = jax.value_and_grad(loss_of)(p)

    def scale(a: Any) -> Any:
        a = a - 3.0  # of no sign: the zeros of a padding would be the largest
        pieces = a.max() * a.min() + jnp.prod(jnp.exp(a / 1e3)) + (a < 0).all() + (a > 0).any() + a.astype(jnp.int32).max()
        turned = a.reshape(-1, a.shape[-1]).T.mean(0).reshape(a.shape[:-1])[..., None]
        both = jnp.concatenate([a[:1], a[1:] * 2], 0)[::1] + turned + jnp.argmax(a, -1, keepdims=True)
        return both / (1 + jnp.abs(pieces))

    return loss, jax.tree.map(scale, total(own))


def with_statistics() -> Made:
    """Keep an exponential mean of the weights, a batch's mean, and each replica's own count."""
    step, (w, s) = trained(optax.adam(1e-2))
    mean = mr.Variable(parameters(), name="mean", trainable=False)
    rows = mr.Variable(np.zeros(70, np.float32), name="rows", aggregation="mean", trainable=False)
    count = mr.Variable(np.zeros(70, np.float32), name="count", synchronization="on_read", aggregation="sum", trainable=False)

    def all_of(x: Any) -> Any:
        loss = step(x)
        mean.assign(jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, mean.value, w.value))
        rows.assign(0.9 * rows.value + 0.1 * x.sum())
        count.assign_add(jnp.ones(70) * len(x))
        return loss

    return all_of, (w, s, mean, rows, count)


MADE = {
    "layers": lambda: trained(optax.adam(1e-2)),
    "checkpoint": lambda: trained(optax.adam(1e-2), lambda h, p: through(h, p, jax.checkpoint(layer))),
    "scan": lambda: trained(optax.adam(1e-2), scanned(layer)),
    "scan, checkpoint": lambda: trained(optax.adam(1e-2), scanned(jax.checkpoint(layer))),
    "bfloat16": lambda: trained(optax.adam(1e-2), half(scanned(jax.checkpoint(layer)))),
    "bfloat16 variables": lambda: trained(optax.adam(1e-2), dtype=jnp.bfloat16),
    "tied": lambda: trained(optax.sgd(1e-2, momentum=0.9), tied),
    "recurrent": lambda: trained(optax.adam(1e-2), recurrent),
    "clip": lambda: trained(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))),
    "LAMB": lambda: trained(optax.lamb(1e-2)),
    "Adafactor": lambda: trained(optax.adafactor(1e-2, min_dim_size_to_factor=2)),
    "Muon": lambda: trained(optax.contrib.muon(1e-2)),
    "MultiSteps": lambda: trained(optax.MultiSteps(optax.adam(1e-2), 2)),
    "ZeRO-1": lambda: trained(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)), shard_state=True),
    "statistics": with_statistics,
    **{
        f.__name__: lambda f=f: by_hand(f)
        for f in (with_finite, with_own_clipping, in_micro_batches, with_conditions, with_noise, reduced)
    },
}


def run(made: Callable[[], Made], strategy: mr.Strategy, num_rows: int) -> list[Any]:
    """Train for three steps; return the losses, and the values of the variables."""
    rng = np.random.default_rng(1)
    batches = [rng.normal(size=(num_rows, WIDTH)).astype(np.float32) for _ in range(3)]
    with strategy.scope():
        step, variables = made()
    losses = [strategy.reduce("sum", strategy.run(step, args=(batch,))) for batch in strategy.distribute_dataset(batches)]
    is_variable = lambda leaf: isinstance(leaf, mr.Variable)  # noqa: E731
    values = [leaf.value if is_variable(leaf) else leaf for leaf in jax.tree.leaves(variables, is_leaf=is_variable)]
    return [np.asarray(a, np.float64) for a in [*losses, *values] if jnp.issubdtype(a.dtype, np.number)]


def check(made: Callable[[], Made], num_devices: int, num_rows: int, tolerance: float = 2e-5, **options: Any) -> None:
    devices = DEVICES[:num_devices]
    whole = run(made, mr.MirroredStrategy(devices, **options), num_rows)
    parts = run(made, mr.MirroredStrategy(devices, storage="parts", **options), num_rows)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance * (1 + np.abs(one).max()))


#: The cases of the default suite; the others are nightly.
FAST = ("scan, checkpoint", "MultiSteps", "statistics", "with_conditions", "in_micro_batches")


@pytest.mark.parametrize("name", [*FAST, *nightly(*(name for name in MADE if name not in FAST))])
def test_three_replicas_with_odd_batches_and_padding(name: str) -> None:
    check(MADE[name], 3, 6 if name == "in_micro_batches" else 7, tolerance=3e-2 if "bfloat16" in name else 2e-5)


@pytest.mark.nightly("tests/parity/test_parts.py::test_three_replicas_with_odd_batches_and_padding")
@pytest.mark.parametrize("name", ["checkpoint", "clip", "reduced"])
@pytest.mark.parametrize(("num_devices", "num_rows"), [(1, 3), (2, 5), (4, 8), (8, 13)])
def test_other_numbers_of_replicas(name: str, num_devices: int, num_rows: int) -> None:
    check(MADE[name], num_devices, num_rows)


def with_typed_numbers(loss_of: Any, x: Any, p: Any) -> Any:
    """Carry, choose and return numbers that stand in the program with a type of their own."""
    loss, own = jax.value_and_grad(loss_of)(p)
    gradients = total(own)
    scale, ones = jax.lax.scan(lambda c, _: (np.float32(2), np.int16(1)), np.float32(1), length=2)
    chosen, count = jax.lax.cond(total(loss) > 0, lambda g: (g, np.int16(3)), lambda g: (g, np.int16(4)), gradients["up"])
    return loss, gradients | {"up": (chosen * scale / (ones.sum() + count)).astype(chosen.dtype)}


@pytest.mark.slow
def test_float64() -> None:
    with jax.enable_x64(True):
        check(lambda: trained(optax.adam(1e-2), dtype=np.float64), 3, 6, tolerance=1e-12)
        check(lambda: by_hand(with_typed_numbers), 3, 6)


@pytest.mark.parametrize(("name", "num_replicas"), [("clip", 4), ("scan, checkpoint", 4), *nightly(("reduced", 6), ("tied", 4))])
def test_several_replicas_on_a_device(name: str, num_replicas: int) -> None:
    check(MADE[name], 2, 7, num_replicas=num_replicas)


@pytest.mark.nightly("tests/parity/test_parts.py::test_several_replicas_on_a_device")
def test_several_replicas_one_by_one() -> None:
    check(MADE["checkpoint"], 2, 8, num_replicas=4, schedule="one_by_one")


def test_functions_and_loops_around_steps() -> None:
    """A function reads parts, and loops over steps."""

    def made() -> Made:
        step, (w, s) = trained(optax.adam(1e-2))

        @mr.function
        def outer(x: Any) -> Any:
            strategy = mr.get_strategy()
            loss, _ = mr.scan(lambda loss, _: (loss + strategy.reduce("sum", strategy.run(step, args=(x,))), None), 0.0, length=2)
            w.assign(jax.tree.map(lambda a: a * 0.99, w.value))
            return loss, sum(jnp.sum(a) for a in jax.tree.leaves(w.value))

        return outer, (w, s)

    def values(storage: str) -> list[Any]:
        strategy = mr.MirroredStrategy(DEVICES[:3], storage=storage)
        rows = np.random.default_rng(1).normal(size=(6, WIDTH)).astype(np.float32)
        with strategy.scope():
            outer, (w, _) = made()
            results = [outer(batch) for batch in strategy.distribute_dataset([rows] * 2)]
        sums = [float(number) for pair in results for number in pair]
        return [*sums, *(np.asarray(a) for a in jax.tree.leaves(w.value))]

    for one, other in zip(values("whole"), values("parts"), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_copies_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with several workers, of which each has all parts: 4 devices hold each of 2 parts twice."""

    def with_copies(mesh: Any, shape: Any, dtype: Any, storage: Any = None) -> Any:
        found = division_of(mesh, shape, dtype, storage)
        return found and dataclasses.replace(found, num_parts=2, num_copies=2)

    division_of = division.division_of
    for module in (division, spec):
        monkeypatch.setattr(module, "division_of", with_copies)
    for name in ("scan, checkpoint", "reduced"):
        check(MADE[name], 4, 8)


SHAPE = (WIDTH + 1, WIDTH - 1)  # two and three devices pad the first axis


def numbers(dtype: Any) -> np.ndarray:
    return (np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) % 13 - 6).astype(dtype)


def summed(w: Any, x: Any, one: Callable[..., Any], dtype: Any, after: Callable[..., Any] = lambda sum_: sum_) -> Any:
    """Sum what each of the rows gives in a loop whose rounds have backward passes, then over the replicas."""

    def round_(sum_: Any, row: Any) -> Any:
        gradient = jax.grad(lambda p: jnp.sum(jnp.sin(p.astype(jnp.float32) * row[0])))(w)
        return one(sum_, gradient), None

    sum_, _ = jax.lax.scan(round_, jnp.zeros(SHAPE, dtype), x)
    return total(after(sum_))


#: What a step computes of a variable and a replica's rows, and the variable's type.
DELICATE: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "a row is added to a sum": (np.float32, lambda w, x: summed(w, x, lambda s, g: s + g.mean(0, keepdims=True), w.dtype)),
    "a number is added to a sum": (np.float32, lambda w, x: summed(w, x, lambda s, g: s + jnp.mean(g), w.dtype)),
    "integers divided": (
        np.float32,
        lambda w, x: summed(w, x, lambda s, g: s + (g * 9).astype(jnp.int32), jnp.int32, lambda s: jax.lax.div(s, jnp.int32(7))),
    ),
    "float16 divided": (
        np.float16,
        lambda w, x: summed(w, x, lambda s, g: s + (g + jnp.float16(20000)), w.dtype, lambda s: s / jnp.float16(8)),
    ),
    "and": (np.int32, lambda w, x: jnp.bitwise_and.reduce(w | 7, axis=0)),
    "and of bytes": (np.uint8, lambda w, x: jnp.bitwise_and.reduce(w | 7, axis=0)),
    "8 bits without infinity": (jnp.float8_e4m3fn, lambda w, x: (w.max(0), w.min(0), w.max())),
    "8 bits with infinity": (jnp.float8_e5m2, lambda w, x: (w.max(0), w.min(0))),
}


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("name", DELICATE)
def test_what_padding_or_an_earlier_sum_would_change(name: str, num_devices: int) -> None:
    dtype, compute = DELICATE[name]
    results = []
    for storage in ("whole", "parts"):
        strategy = mr.MirroredStrategy(DEVICES[:num_devices], storage=storage)
        with strategy.scope():
            w = mr.Variable(numbers(dtype), name="w")
        [x] = strategy.distribute_dataset([np.arange(num_devices * 2, dtype=np.float32)[:, None]])
        results.append(jax.tree.map(lambda a: np.asarray(a, np.float64), strategy.run(lambda x: compute(w.value, x), args=(x,))))  # noqa: B023
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(results))
    jax.tree.map(np.testing.assert_array_equal, *results)


#: Values of all kinds, large and small: each is divided, padded, or whole.
KINDS = {
    "complex": numbers(np.complex64) * (1 + 2j),
    **{np.dtype(d).name: numbers(d) for d in (np.int8, np.uint16, np.float16, jnp.bfloat16, jnp.float8_e4m3fn)},
    "bool": numbers(np.float32) > 0,
    "empty": np.zeros((0, 100), np.float32),
    "number": np.float32(3),
    "row": np.ones((1, 399), np.float32),
    "four axes": np.arange(2 * 3 * 4 * 24, dtype=np.int32).reshape(2, 3, 4, 24),
    "a row for each replica": np.arange(3 * 100, dtype=np.float32).reshape(3, 100),
}


def test_all_kinds_of_values_in_steps_with_callbacks() -> None:
    """Variables, arguments and results of each kind, which steps take, change, return and hand to the host."""

    def values(storage: str) -> list[Any]:
        strategy, seen = mr.MirroredStrategy(DEVICES[:3], storage=storage), []
        with strategy.scope():
            v = mr.Variable(KINDS, name="v", trainable=False)
            own = mr.Variable(np.zeros(SHAPE, np.float32), synchronization="on_read", aggregation="sum")

        def step(bare: Any, x: Any) -> Any:
            half = v.value["bfloat16"].astype(jnp.float32)
            jax.debug.callback(lambda a: seen.append(float(a.sum())), half)
            twice = jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(SHAPE, jnp.float32), half)
            own.assign_add(half * x.sum())
            v.assign(jax.tree.map(lambda a: ~a if a.dtype == bool else (a + jnp.ones((), a.dtype)).astype(a.dtype), v.value))
            return jax.tree.map(lambda a: a + a, bare), v.value["four axes"][1].sum((0, 2)), twice, v.value["int8"].sum()

        bare: Any = KINDS | {"weak": jax.jit(lambda: jnp.broadcast_to(2.0, SHAPE))()}
        for x in strategy.distribute_dataset([np.ones(6, np.float32)] * 2):
            bare, *others = strategy.run(step, args=(bare, x))
        jax.effects_barrier()
        strategy.assert_mirrored()
        others[1] = strategy.reduce("mean", others[1])
        leaves = jax.tree.leaves((bare, others, strategy.reduce("mean", bare), v.value, own.numpy()))
        return [*sorted(set(seen)), *((a.dtype, getattr(a, "weak_type", None), np.asarray(a)) for a in leaves)]

    jax.tree.map(np.testing.assert_array_equal, values("whole"), values("parts"))
