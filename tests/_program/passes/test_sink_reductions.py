"""Sums over the replicas of a device: one product over the rows of all, as exact as the sum of what each replica has."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import nightly
from strategies import all_reduce, arrays_of, made, numbers, strategy_of, variable

import mirrored as mr
from mirrored._jax.costs import costs_of
from mirrored._variables import storage

pytestmark = pytest.mark.usefixtures("in_numpy")

TOKENS, WIDTH, OUT, SIDE = 24, 16, 40, 5
RNG = np.random.default_rng(0)
#: A network of an embedding, which is its last layer too, a matrix, a convolution, and one of each channel alone.
SHAPES = {"embedding": (TOKENS, WIDTH), "matrix": (WIDTH, OUT), "kernel": (3, 3, WIDTH, OUT), "channels": (3, 3, 1, OUT)}
PARAMS = {name: (RNG.normal(size=shape) / 4).astype(np.float32) for name, shape in SHAPES.items()}


def losses(params, tokens, dtype):
    """Return the losses of rows of [SIDE, SIDE] tokens, computed in another type."""
    embedding, matrix, kernel, channels = (params[name].astype(dtype) for name in SHAPES)
    h = embedding[tokens]
    convolve = lambda h, kernel, groups: jax.lax.conv_general_dilated(  # noqa: E731
        h, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )
    h = jnp.tanh(convolve(h, kernel, 1) + h @ matrix)
    h = jnp.tanh(convolve(h, channels, OUT)) @ matrix.T @ embedding.T
    return (h - h.mean()).astype(jnp.float32).mean((1, 2, 3)) ** 2 + jnp.sin(h[..., 0].astype(jnp.float32)).mean((1, 2))


def gradients_of(strategy, dtype, num_rows):
    """Return the step that sums gradients, and its arguments."""
    params = variable(PARAMS, strategy)
    tokens = np.random.default_rng(1).integers(0, TOKENS, (num_rows, SIDE, SIDE), np.int32)
    [tokens] = strategy.distribute_dataset(strategy.make_numpy_dataset(tokens).batch(num_rows))

    def step(tokens):
        return all_reduce("sum", mr.grad(lambda: losses(params.value, tokens, dtype), params)())

    return step, (tokens,)


def text_of(make, schedule="together"):
    """Return the text of the program of the step that `make` makes for eight replicas of a device, which writes no variable."""
    strategy = strategy_of(1, num_replicas=8, schedule=schedule)
    step, args = make(strategy)
    made(strategy.run, step, args)
    [program] = strategy._steps.programs
    with storage.lent(program.lifted.reads.slots) as values:
        return program.compiled.lower([], values, [arg._array for arg in args], program.constants).as_text()


@pytest.mark.by_xla
@pytest.mark.parametrize(
    ("dtype", "schedule"), [(jnp.float32, "together"), (jnp.bfloat16, "together"), (jnp.float32, "one_by_one")]
)
def test_no_replica_has_a_gradient_of_its_own(dtype, schedule):
    text, is_together = text_of(lambda strategy: gradients_of(strategy, dtype, 16), schedule), schedule == "together"
    of_each = ["x".join(map(str, (8, *shape))) for shape in SHAPES.values()]
    assert [shape for shape in of_each if shape in text] == []
    groups = set(map(int, re.findall(r"(?:feature|batch)_group_count = (\d+)", text)))
    assert groups == {1, OUT}  # and not those of eight replicas
    assert (f"8x2x{SIDE}x{SIDE}x{WIDTH}" in text) is is_together  # but of its rows
    behind = set(re.findall(rf"tanh .*<(\w+)x{SIDE}x{SIDE}x{OUT}x", text))
    assert behind == {"16" if is_together else "2"}  # and no axis of replicas between a convolution and what XLA may make with it


LAYERS = (RNG.normal(size=(3, WIDTH, WIDTH)) / 4).astype(np.float32)


def layer_by_layer(strategy, num_rows, again=lambda layer: layer, unroll=False):
    """Return a step whose layers are rounds of a scan, which also counts, and stacks what is common and what is not."""
    layers = variable(LAYERS, strategy)
    x = np.random.default_rng(1).normal(size=(num_rows, WIDTH)).astype(np.float32)
    [x] = strategy.distribute_dataset(strategy.make_numpy_dataset(x).batch(num_rows))

    @again
    def layer(carry, matrix):
        count, h = carry
        h = jnp.tanh(h @ matrix + count)
        return (count + 1, h), (matrix.sum() + count, h.sum(1), h.astype(jnp.bfloat16))

    def run(carry, matrices):
        if not unroll:
            return jax.lax.scan(layer, carry, matrices)
        rows = []
        for matrix in matrices:
            carry, row = layer(carry, matrix)
            rows.append(row)
        return carry, jax.tree.map(lambda *arrays: jnp.stack(arrays), *rows)

    def losses(x):
        (count, h), (common, own, narrow) = run((0.0, x), layers.value)
        return h.mean(1) * count + own.mean(0) * common.sum() + narrow.astype(jnp.float32).mean((0, 2))

    def step(x):
        matrices, h = jax.lax.optimization_barrier((layers.value, x))
        (count, _), (common, own, narrow) = run((0.0, h), matrices)
        sums = (own.sum(1), common, narrow.sum(1).astype(jnp.float32), count)
        return all_reduce("sum", (mr.grad(lambda: losses(x), layers)(), sums)), common

    return step, (x,)


HOW = [{}, {"again": jax.checkpoint}, {"again": jax.checkpoint, "unroll": True}]


@pytest.mark.by_xla
@pytest.mark.parametrize("how", HOW)
def test_no_replica_has_a_gradient_of_layers_of_its_own(how):
    text = text_of(lambda strategy: layer_by_layer(strategy, 16, **how))
    of_each = [f"{first}{WIDTH}x{WIDTH}" for first in ("3x8x", "8x3x", "8x")]
    assert [shape for shape in of_each if shape in text] == []
    assert f"8x2x{WIDTH}" in text  # but of its rows
    barriers = re.findall(r"optimization_barrier .*", text)
    assert len(barriers) == {0: 1, 1: 2, 2: 4}[HOW.index(how)]  # that of the step, and one for what is computed again
    assert all(f"{WIDTH}x{WIDTH}xf32" in held and f"8x2x{WIDTH}xf32" in held for held in barriers)


# -- what a scan adds up, and what a barrier holds


@jax.custom_vjp
def hold(params):
    """Return parameters, whose gradients a barrier holds until all are made."""
    return params


hold.defvjp(lambda params: (params, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),))


def recurrent(params, x, dtype=jnp.float32, hold=lambda params: params):
    """Return the losses of rows of a recurrent network, whose gradients a scan adds up."""
    held = hold(params)

    def round_(h, row):
        h = jnp.tanh(h @ held["kept"].astype(dtype) + row @ held["new"].astype(dtype))
        return h, h.mean(1)

    h, means = jax.lax.scan(round_, jnp.zeros_like(x[:, 0], dtype), x.astype(dtype).swapaxes(0, 1))
    h = h + means[-1:].T * (h @ held["last"].astype(dtype))
    return h.astype(jnp.float32).mean(1) ** 2 + means.astype(jnp.float32).sum(0)


def cast_before(params, x, dtype):
    """Do the same with parameters that are converted before the scan, which adds up in their type."""
    return recurrent(jax.tree.map(lambda array: array.astype(dtype), params), x, dtype)


def of_recurrent(strategy, num_rows, losses, how):
    params = variable(dict(zip(("kept", "new", "last"), LAYERS, strict=True)), strategy)
    x = np.random.default_rng(1).normal(size=(num_rows, 5, WIDTH)).astype(np.float32)
    [x] = strategy.distribute_dataset(strategy.make_numpy_dataset(x).batch(num_rows))
    return lambda x: all_reduce("sum", mr.grad(lambda: losses(params.value, x, **how), params)()), (x,)


HELD = (recurrent, {"hold": hold})
CARRIED = [
    (recurrent, {}),
    HELD,
    (cast_before, {"dtype": jnp.float16}),
    *nightly((cast_before, {"dtype": jnp.bfloat16}), (recurrent, {"dtype": jnp.bfloat16}), (recurrent, {"dtype": jnp.float16})),
]


def of_net(dtype):
    return lambda strategy: gradients_of(strategy, dtype, 2 * strategy.num_replicas_in_sync)


def of_layers(**how):
    return lambda strategy: layer_by_layer(strategy, 4 * strategy.num_replicas_in_sync, **how)


def of_scan(losses, **how):
    return lambda strategy: of_recurrent(strategy, 4 * strategy.num_replicas_in_sync, losses, how)


#: Steps that sum gradients, and the type in which they are computed.
STEPS = {
    "net": (of_net(jnp.bfloat16), jnp.bfloat16),
    "layers": (of_layers(), jnp.float32),
    "unrolled checkpoints": (of_layers(**HOW[2]), jnp.float32),
    "recurrent": (of_scan(recurrent), jnp.float32),
    "cast before": (of_scan(cast_before, dtype=jnp.float16), jnp.float16),
}
MORE = {
    "net in float32": (of_net(jnp.float32), jnp.float32),
    "checkpoints": (of_layers(**HOW[1]), jnp.float32),
    "behind a barrier": (of_scan(recurrent, hold=hold), jnp.float32),
    "recurrent in bfloat16": (of_scan(recurrent, dtype=jnp.bfloat16), jnp.bfloat16),
}
WAYS = [(name, 2, "together") for name in STEPS]
AT_NIGHT = [*((name, 2, "together") for name in MORE), *((name, 3, way) for name in STEPS for way in ("together", "one_by_one"))]


@pytest.mark.parametrize(("name", "num_replicas", "schedule"), [*WAYS, *nightly(*AT_NIGHT)])
def test_gradients_are_those_of_as_many_devices(name, num_replicas, schedule):
    make, dtype = (STEPS | MORE)[name]
    found: list[Any] = []
    for strategy in (strategy_of(1, num_replicas=num_replicas, schedule=schedule), strategy_of(num_replicas)):
        step, args = make(strategy)
        leaves = jax.tree.leaves(strategy.run(step, args=args), is_leaf=lambda leaf: isinstance(leaf, mr.PerReplica))
        found.append([arrays_of(leaf) if isinstance(leaf, mr.PerReplica) else np.asarray(leaf) for leaf in leaves])
    tolerance = 1e-4 if dtype == jnp.float32 else 8 * float(jnp.finfo(dtype).eps)
    for own, expected in zip(*found, strict=True):
        np.testing.assert_allclose(own, expected, rtol=2e-3, atol=tolerance * np.abs(expected).max())


@pytest.mark.by_xla
@pytest.mark.parametrize(("losses", "how"), CARRIED)
def test_no_replica_has_a_gradient_that_a_scan_adds_up(losses, how):
    text = text_of(lambda strategy: of_recurrent(strategy, 16, losses, how))
    if how.get("hold"):  # the sums of all are behind one barrier
        held = re.findall(r"optimization_barrier .*", text)[-1]
        assert held.count(f"<{WIDTH}x{WIDTH}xf32>") == 3 and "8x" not in held
    else:
        assert f"8x{WIDTH}x{WIDTH}" not in text and f"8x2x{WIDTH}" in text


# -- what is in a narrow type, and its sum in a wide one


def counted(own):
    """Count to more than a narrow type can: 256 and 1 are 256 in bfloat16."""
    ones = jnp.ones(200, jnp.bfloat16) + 0 * own.astype(jnp.bfloat16)
    at_one_place = jnp.zeros((2, 3), jnp.bfloat16).at[0, 1].add(ones.sum())
    scattered = jnp.zeros(2, jnp.bfloat16).at[jnp.zeros(200, int)].add(ones)
    padded = jnp.pad(ones.reshape(20, 10)[::-1].T, 1)
    odd = jax.lax.reduce_sum((jnp.arange(201) < 200 + own).astype(jnp.bfloat16), [0])
    return [each.astype(jnp.float32) for each in (ones, scattered, at_one_place, padded, jnp.sum(ones), odd)]


def rounded(own, hold=jax.lax.optimization_barrier):
    """Round for each replica, as the user has written it; without a barrier XLA rounds less often."""
    fine = (0.3 + own * np.arange(7, dtype=np.float32)) / 7
    coarse = fine.astype(jnp.bfloat16)
    kept = hold((coarse, coarse + coarse[::-1], 3 * coarse, coarse / 3))
    return [each.astype(np.float32) for each in kept]


def large(own):
    """Make products which float16 has, and whose sum it has not."""
    wide = jnp.full((4, 4), 96, jnp.float16) + 4 * own.astype(jnp.float16)
    kernel = jax.lax.conv(wide[None, None], wide[None, None, :2, :2], (1, 1), "VALID")
    narrow = (jnp.full(4, 40960, jnp.float16) * own.astype(jnp.float16) ** 0).astype(jnp.bfloat16)
    return [(wide @ wide).astype(jnp.float32), kernel.astype(jnp.float32), narrow]


@pytest.mark.by_xla
@pytest.mark.parametrize("num_replicas", [2, *nightly(1, 3, 8)])
def test_a_wide_sum_of_narrow_values_is_as_exact_as_that_of_devices(num_replicas):
    strategy = strategy_of(1, num_replicas=num_replicas)
    exact = jax.jit(lambda own: counted(own) + large(own))
    found = strategy.run(lambda own: all_reduce("sum", [*exact(own), *rounded(own)]), args=(numbers(strategy),))
    numbers_of_each = np.arange(num_replicas, dtype=np.float32)
    each = [[*exact(own), *rounded(own, hold=list)] for own in numbers_of_each]  # NumPy rounds after each operation
    for total, *parts in zip(found, *each, strict=True):
        assert np.isfinite(parts).all()
        np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in (total, sum(parts))), rtol=1e-6)


# -- what it costs


@pytest.fixture
def benchmarks(monkeypatch):
    """The modules of the benchmarks."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    gpu, contenders, workloads = map(__import__, ("gpu", "_jax_contenders", "_workloads"))

    def model_of(name):
        if name == "GPT":
            return gpu.gpt(vocabulary=4096, length=128, width=256, heads=4, layers=2)
        if name == "RNN":
            params = {name: np.ones((256, 256), np.float32) for name in ("kept", "new", "last")}
            return gpu.Model(name, params, recurrent, np.ones((64, 24, 256), np.float32), optax.adam(1e-3))
        workload = workloads.WORKLOADS[name]
        losses_of = lambda params, rows: contenders.LOSSES[name](params, *rows)  # noqa: E731
        return gpu.Model(name, workload.parameters(), losses_of, workload.batches()[0], optax.adam(1e-3))

    return model_of


def by_hand(model):
    """Lower the training step of a model by plain JAX."""
    num_rows = len(jax.tree.leaves(model.rows)[0])

    def step(params, state, rows):
        loss, gradients = jax.value_and_grad(lambda params: model.losses(params, rows).sum() / num_rows)(params)
        updates, state = model.tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.eval_shape(model.tx.init, model.params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(model.params, state, model.rows)


def with_replicas(model, num_replicas):
    """Lower the same step for several replicas of one device, after it has run."""
    strategy = strategy_of(1, num_replicas=num_replicas)
    params = variable(model.params, strategy)
    optimizer = mr.Optimizer(model.tx, params)

    def step(rows):
        loss, gradients = mr.value_and_grad(lambda: model.losses(params.value, rows), params)()
        optimizer.apply_gradients(gradients)
        return loss

    [rows] = strategy.distribute_dataset([model.rows])
    strategy.run(step, args=(rows,))
    [program] = strategy._steps.programs
    written, read = program.lifted.writes.slots, program.lifted.reads.slots
    with storage.lent([*written, *read]) as values:
        count = len(written)
        arrays = [leaf._array for leaf in jax.tree.leaves(rows, is_leaf=lambda leaf: isinstance(leaf, mr.PerReplica))]
        return program.compiled.lower(values[:count], values[count:], arrays, program.constants)


def price_of(lowered):
    """Count operations, bytes that move, the bytes of temporaries, and the lines of the program, for which it is compiled."""
    compiled = lowered.compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return np.array([*costs_of(compiled).values(), temporaries, len(compiled.as_text().splitlines())])


@pytest.mark.by_xla
@pytest.mark.slow
@pytest.mark.parametrize("name", ["W2", *nightly("W3", "W4", "GPT", "RNN")])
def test_replicas_of_a_device_cost_what_it_costs_without(name, benchmarks):
    model = benchmarks(name)
    of_one = price_of(by_hand(model))
    for num_replicas in (2, 8):
        ratios = price_of(with_replicas(model, num_replicas)) / of_one
        assert (ratios <= (1.05, 1.05, 1.05, 1.5)).all(), f"{num_replicas} replicas: {ratios}"
