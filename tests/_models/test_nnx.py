"""NNX objects among a step's arguments."""

import gc
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import strategy_of

import mirrored as mr
from mirrored._program.program import StepProgram
from mirrored._replicas import division

pytestmark = pytest.mark.usefixtures("in_numpy")

nnx = pytest.importorskip("flax.nnx")

ROWS = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
LABELS = np.arange(12) % 2


class Net(nnx.Module):
    def __init__(self, axis_name: str | None = None) -> None:
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, axis_name=axis_name, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.inner(x))


class Own(nnx.metrics.Metric):
    def __init__(self) -> None:
        self.best = nnx.metrics.MetricState(jnp.zeros(()))

    def update(self, **values: jax.Array) -> None:
        self.best[...] = jnp.maximum(self.best[...], values["x"].max())


def loss_of(model: nnx.Module, batch: dict) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def mean(tree: object) -> object:
    return mr.get_replica_context().all_reduce("mean", tree)


def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: dict) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    loss, grads = mean((loss, grads))
    optimizer.update(model, grads)
    return loss


def made(axis_name: str | None = None) -> tuple[Net, nnx.Optimizer]:
    model = Net(axis_name)
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def state_of(*objects: object) -> list[np.ndarray]:
    arrays = jax.tree.leaves(nnx.as_pure(nnx.state(list(objects))))
    return [np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a) for a in arrays]


def batch_of(strategy: mr.Strategy, num_rows: int = 12) -> dict:
    dataset = strategy.distribute_dataset([{"x": ROWS[:num_rows], "y": LABELS[:num_rows]}])
    return next(iter(dataset))


def test_large_arrays_of_objects_are_and_stay_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step takes parts already, and no later one gathers them before it begins."""
    monkeypatch.setattr(division, "LEAST_BYTES", 256)
    execute, taken = StepProgram.execute, []

    def recording(program: StepProgram, arrays: list) -> list:
        taken.append({a.sharding.shard_shape(a.shape) for a in arrays})
        return execute(program, arrays)

    def add(model: nnx.Linear) -> None:
        model.kernel[...] += 1

    monkeypatch.setattr(StepProgram, "execute", recording)
    model, strategy = nnx.Linear(12, 20, rngs=nnx.Rngs(0)), strategy_of(4, storage="parts")
    for _ in range(2):
        strategy.run(add, args=(model,))
    assert [((12, 20) in shapes, (3, 20) in shapes) for shapes in taken] == [(False, True)] * 2


@pytest.mark.by_xla
def test_objects_are_overwritten_in_place_where_the_steps_own_jit_says_so(strategy2: mr.Strategy, batch: dict) -> None:
    """Else who has taken their arrays keeps them, also as `jax.device_put` takes them, which shares memory without a trace."""
    ended = []
    for jit in (nnx.jit, nnx.jit(donate_argnums=(0, 1))):
        model, optimizer = made()
        train, failing = jit(step), jit(lambda model, optimizer, batch: step(model, optimizer, batch) / (1 // 0))
        strategy2.run(train, args=(model, optimizer, batch))
        old = jax.tree.leaves(nnx.state(model))
        shared = jax.device_put(old, strategy2.devices[0])
        with pytest.raises(ZeroDivisionError):
            strategy2.run(failing, args=(model, optimizer, batch))
        assert not any(array.is_deleted() for array in old)
        strategy2.run(train, args=(model, optimizer, batch))
        assert {array.is_deleted() for array in (*old, *shared)} == {jit is not nnx.jit}
        ended.append(state_of(model, optimizer))
    assert [array.tolist() for array in ended[0]] == [array.tolist() for array in ended[1]]


def test_objects_that_begin_with_the_same_arrays_are_both_donated(strategy2: mr.Strategy) -> None:
    model, target = (nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in range(2))
    nnx.update(target, nnx.state(model))
    assert target.kernel.get_value() is (first := model.kernel.get_value())

    def halve(model: nnx.Linear, target: nnx.Linear) -> None:
        model.kernel[...] /= 2

    strategy2.run(nnx.jit(halve, donate_argnums=(0, 1)), args=(model, target))
    assert (target.kernel[...] == first).all() and (model.kernel[...] == first / 2).all()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def batch(strategy2: mr.Strategy) -> dict:
    return batch_of(strategy2)


def test_a_step_trains_as_nnx_jit_does_whatever_form_its_arguments_have(strategy2: mr.Strategy, batch: dict) -> None:
    def on_nest(batch: dict, *, objects: dict) -> jax.Array:
        return step(objects["model"], objects["more"][0], batch)

    @mr.function
    def as_one_program(model: Net, optimizer: nnx.Optimizer, batch: dict) -> jax.Array:
        return strategy2.run(step, args=(model, optimizer, batch))

    alone, its_optimizer = made()
    single = nnx.jit(lambda model, optimizer, loss: optimizer.update(model, nnx.grad(loss_of)(model, loss)))
    expected = []
    for _ in range(2):
        single(alone, its_optimizer, {"x": ROWS, "y": LABELS})
        expected.append(state_of(alone, its_optimizer))
    ways = {
        "a nest": lambda model, optimizer: strategy2.run(on_nest, (batch,), {"objects": {"model": model, "more": [optimizer]}}),
        "nnx.jit": lambda model, optimizer: strategy2.run(nnx.jit(step), args=(model, optimizer, batch)),
        "mr.function": lambda model, optimizer: as_one_program(model, optimizer, batch),
    }
    wrong = []
    for name, way in ways.items():
        model, optimizer = made()
        for after in expected:
            way(model, optimizer)
            same = [np.allclose(a, b, atol=1e-6) for a, b in zip(state_of(model, optimizer), after, strict=True)]
            wrong += [] if all(same) else [name]
    assert wrong == []


def test_what_would_differ_by_replica_is_refused_by_its_name_and_nothing_has_changed(strategy2: mr.Strategy, batch: dict) -> None:
    def forgotten(model: Net, optimizer: nnx.Optimizer, batch: dict) -> None:
        optimizer.update(model, nnx.grad(loss_of)(model, batch))

    def by_row(model: Net, optimizer: nnx.Optimizer, batch: dict) -> None:
        nnx.vmap(lambda model, x: model(x[None]), in_axes=(None, 0), axis_name="rows")(model, batch["x"])

    def changes_structure(model: Net, optimizer: nnx.Optimizer, batch: dict) -> None:
        model.eval()

    sum_first = r"Net\.inner\.\w+, which the step at .*test_nnx.*all_reduce\('sum', \(loss, grads\)\)"
    cases = [
        (made(), forgotten, mr.ReplicasDivergeError, sum_first),
        (made("rows"), by_row, mr.ReplicasDivergeError, r"Net\.norm\.mean.*axis_name='replica'"),
        (made(), changes_structure, mr.ContextError, r"has changed the structure .*`model\.train\(\)`"),
    ]
    for objects, wrong, error, message in cases:
        before = state_of(*objects)
        with pytest.raises(error, match=message):
            strategy2.run(wrong, args=(*objects, batch))
        for old, new in zip(before, state_of(*objects), strict=True):
            np.testing.assert_array_equal(old, new)
    with pytest.raises(mr.ReplicasDivergeError, match=r"Own\.best"):
        strategy2.run(lambda metric, batch: metric.update(x=batch["x"]), args=(Own(), batch))


class Dropped(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.inner, self.drop = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.inner(x))


def test_the_replicas_own_random_streams_are_named_where_they_are_the_cause(strategy3: mr.Strategy) -> None:
    model, batch = Dropped(), batch_of(strategy3, 7)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def forgotten(model: Dropped, optimizer: nnx.Optimizer, batch: dict) -> None:
        optimizer.update(model, nnx.grad(loss_of)(model, batch))

    with pytest.raises(
        mr.ReplicasDivergeError, match=r"ctx\.rng\) at the start of the step, where its nnx\.Rngs and metrics become"
    ):
        strategy3.run(forgotten, args=(model, optimizer, batch))
    strategy3.run(step, args=(model, optimizer, batch))


def test_a_step_leaves_no_old_state_to_the_cyclic_collector(strategy2: mr.Strategy, batch: dict, no_collector: None) -> None:
    objects = made()
    for _ in range(3):
        jax.block_until_ready(strategy2.run(step, args=(*objects, batch)))
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(5):
        jax.block_until_ready(strategy2.run(step, args=(*objects, batch)))
    assert gc.collect() == 0, "objects in reference cycles"
    assert len(jax.live_arrays()) <= before + 5, "but for the losses in flight"


class Scanned(nnx.Module):
    """Layers that a scan goes through: each has its own weights and its own stream of random numbers."""

    def __init__(self) -> None:
        made = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs)))
        self.drops = made(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda drop, x: (x, drop(x)), in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))(self.drops, x)[1]


def test_layers_of_a_scan_draw_what_they_draw_on_one_device(strategy3: mr.MirroredStrategy) -> None:
    model, alone = Scanned(), Scanned()
    step = lambda model, batch: model(jnp.ones((len(batch["x"]), 64)))  # noqa: E731
    for _ in range(2):
        drawn = strategy3.gather(strategy3.run(step, args=(model, batch_of(strategy3, 12))), axis=1)
        np.testing.assert_array_equal(drawn, alone(jnp.ones((12, 64))))
    assert np.asarray(model.drops.rngs.count[...]).tolist() == [2, 2, 2]
    keys = jax.random.key_data(alone.drops.rngs.key[...])
    np.testing.assert_array_equal(jax.random.key_data(model.drops.rngs.key[...]), keys)


@pytest.mark.by_xla  # `lockstep` knows no scatter of one number
def test_metrics_are_those_of_all_rows(strategy3: mr.MirroredStrategy) -> None:
    def evaluate(metrics: nnx.MultiMetric, batch: dict, afresh: bool) -> None:
        if afresh:
            metrics.reset()
        metrics.update(logits=batch["x"][:, :2], labels=batch["y"], values=batch["x"], x=batch["x"])

    kinds = {"accuracy": nnx.metrics.Accuracy(), "spread": nnx.metrics.Welford(), "average": nnx.metrics.Average("x")}
    metrics, seen = nnx.MultiMetric(**kinds), []
    for num_rows, afresh in [(7, False), (2, True), (7, False)]:  # of 2 rows a replica has none
        strategy3.run(evaluate, args=(metrics, batch_of(strategy3, num_rows), afresh))
        seen = [*([] if afresh else seen), *range(num_rows)]
        x, right = ROWS[seen], (ROWS[seen, 0] < ROWS[seen, 1]) == LABELS[seen]
        spread = [x.mean(), x.std() / np.sqrt(x.size), x.std()]
        found = metrics.compute()
        np.testing.assert_allclose([found["accuracy"], found["average"]], [right.mean(), x.mean()], rtol=1e-5)
        np.testing.assert_allclose(jax.tree.leaves(found["spread"]), spread, rtol=1e-5)


def test_a_single_variable_objects_that_share_one_trees_and_bare_arrays(strategy2: mr.Strategy) -> None:
    counter = nnx.Param(jnp.zeros(2))
    shared = nnx.Dict(a=nnx.Dict(x=counter), b=nnx.Dict(y=counter))
    mixed = nnx.Dict(tree=nnx.Param({"a": jnp.zeros(2), "b": {"c": jnp.zeros(3)}}), bare=jnp.zeros(2))

    def count(each: object) -> None:
        variable = each if isinstance(each, nnx.Variable) else each["b"]["y"]
        variable[...] = variable[...] + 1

    def count_mixed(mixed: nnx.Dict) -> None:
        mixed["tree"].set_value(jax.tree.map(lambda array: array + 1, mixed["tree"].get_value()))
        mixed["bare"] = mixed["bare"] + 1

    strategy2.run(count, args=(counter,))
    strategy2.run(count, args=(shared,))
    with mr.eager():
        strategy2.run(count, args=(shared,))
    for _ in range(3):
        strategy2.run(count_mixed, args=(mixed,))
    for array in (counter[...], shared["a"]["x"][...], *jax.tree.leaves(mixed["tree"].get_value()), mixed["bare"]):
        np.testing.assert_array_equal(array, np.full_like(array, 3))


def test_a_variable_gets_the_array_of_another_as_a_target_network_does(strategy3: mr.Strategy) -> None:
    """The new array is one that the step began with: what counts is whose it was."""
    pair = nnx.Dict(a=nnx.Param(jnp.zeros(2)), b=nnx.Param(jnp.ones(2)), bare=jnp.full(2, 5.0), rngs=nnx.Rngs(0))
    online, target, seen = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1)), nnx.metrics.Average()
    seen.update(values=jnp.ones(4))

    def swap(pair: nnx.Dict, online: nnx.Linear, target: nnx.Linear, seen: nnx.metrics.Average) -> None:
        a, b = pair["a"].get_value(), pair["b"].get_value()
        pair["a"].set_value(b)
        pair["b"].set_value(a)
        pair["bare"] = a
        nnx.update(target, nnx.state(online))

    strategy3.run(swap, args=(pair, online, target, seen))
    found = [pair["a"][...], pair["b"][...], pair["bare"], target.kernel[...], seen.compute()]
    for array, expected in zip(found, [[1, 1], [0, 0], [0, 0], online.kernel[...], 1], strict=True):
        np.testing.assert_array_equal(array, expected)
    wrong = nnx.Dict(a=nnx.Param(jnp.zeros(())), key=nnx.Param(jnp.zeros(())), seen=nnx.metrics.Average())
    with pytest.raises(mr.ReplicasDivergeError, match=r"Dict\.a, which .* would differ by replica"):
        strategy3.run(lambda wrong: wrong["a"].set_value(wrong["seen"].total.get_value()), args=(wrong,))


def test_a_model_whose_variables_are_references_is_refused_with_the_line_to_write(strategy2: mr.Strategy) -> None:
    model = nnx.with_vars(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), ref=True)

    def step(model: nnx.Linear) -> None:
        model.bias[...] = model.bias[...] + 1

    with pytest.raises(mr.ContextError, match=r"takes no references: .* of nnx.with_vars\(model, ref=True\) needs ref=False"):
        strategy2.run(step, args=(model,))
    model = nnx.with_vars(model, ref=False)
    strategy2.run(step, args=(model,))
    np.testing.assert_array_equal(model.bias[...], [1, 1])


def test_jaxs_transformations_go_around_a_step_that_takes_a_model(strategy2: mr.Strategy) -> None:
    model, many = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.array([1.0, 2.0])
    [batch] = strategy2.distribute_dataset([ROWS])

    def total(model: nnx.Module, k: jax.Array | float = 1.0) -> jax.Array:
        return strategy2.reduce("sum", strategy2.run(lambda model, x: model(x).sum() * k, args=(model, batch)))

    np.testing.assert_allclose(nnx.grad(total)(model)["kernel"][...], np.stack([ROWS.sum(0)] * 2, 1), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(lambda k: total(model, k))(many), model(ROWS).sum() * many, rtol=1e-5)
