"""A library takes part in scopes, steps, checkpoints and messages by one record in LIBRARIES, and no other file names it."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import strategy_of

import mirrored as mr
from mirrored._libraries import lines_for
from mirrored._models import libraries, objects
from mirrored._models.library import Apart, Library, Objects

pytestmark = pytest.mark.usefixtures("in_numpy")

toy = types.ModuleType("toy")
ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)


def of_toy(kind: type) -> type:
    kind.__module__ = "toy"
    setattr(toy, kind.__name__, kind)
    return kind


@of_toy
class Param:
    def __init__(self, value: Any) -> None:
        self.value = jnp.asarray(value)


@of_toy
class Linear:
    def __init__(self, width: int = 2) -> None:
        self.weights, self.num_seen, self.is_training = Param(np.ones(width, np.float32)), Param(np.float32(0)), True

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weights.value


@of_toy
class Cell:
    def __init__(self, value: Any) -> None:
        self.held = jnp.asarray(value)

    @property
    def value(self) -> Any:
        return getattr(self.held, "value", self.held)


@of_toy
class CellError(Exception):
    pass


def params_in(models: list[Any]) -> dict[Any, Param]:
    every = [(number, *item) for number, model in enumerate(models) for item in vars(model).items()]
    return {(number, name): value for number, name, value in every if isinstance(value, Param)}


def take_apart(models: list[Any]) -> Apart:
    params = params_in(models)

    def give_back(new: Any) -> None:
        for path, array in new.items():
            params[path].value = array

    structure = tuple((type(model), tuple(vars(model)), model.is_training) for model in models)
    return Apart(structure, {path: param.value for path, param in params.items()}, give_back)


def put_together(structure: Any, arrays: list[Any]) -> list[Any]:
    models = [object.__new__(kind) for kind, *_ in structure]
    values = iter(arrays)
    for model, (_, names, is_training) in zip(models, structure, strict=True):
        vars(model).update({name: is_training if name == "is_training" else Param(next(values)) for name in names})
    return models


def init_cell(old: Any, cell: Cell, value: Any) -> None:
    old(cell, value)
    if mr.in_cross_replica_context():
        cell.held = mr.Variable(cell.held)


traces: list[bool] = []


def traced(trace: Any, mesh: Any, may_repeat: bool) -> Any:
    traces.append(may_repeat)
    return trace()


TOY = Library(
    package="toy",
    name="Toy",
    before="strategy.run(step, args=(model, batch))",
    inside="model(batch)",
    unbuilt=" A toy has none before it is wound up.",
    replaced=lambda: [(Cell, "__init__", init_cell)],
    traced=traced,
    own_variable=lambda value: value.held if isinstance(value, Cell) else value,
    tree_of=lambda value: {"held": value.held} if isinstance(value, Cell) else value,
    describe=lambda mesh: [f"toys on {mesh.num_replicas} replicas"],
    explain=lambda error, arguments, where: (
        TypeError(f"wind up {arguments[0][0]}, at {where}") if isinstance(error, CellError) else None
    ),
    objects=Objects(
        is_one=lambda value: isinstance(value, Linear),
        is_whole=lambda value: isinstance(value, Linear),
        take_apart=take_apart,
        put_together=put_together,
        changed="the step at {where} has changed a toy",
        remedy="Ask the toy. ",
    ),
)


@pytest.fixture(autouse=True)
def entered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enter the library, as imported by the program."""
    monkeypatch.setitem(sys.modules, "toy", toy)
    libraries.LIBRARIES.append(TOY)
    yield
    libraries.LIBRARIES.remove(TOY)


def train(model: Linear, x: jax.Array) -> jax.Array:
    ctx = mr.get_replica_context()
    model.num_seen.value += ctx.all_reduce("sum", jnp.float32(len(x)))
    loss, gradient = jax.value_and_grad(lambda w: mr.losses.compute_average_loss((x @ w) ** 2))(model.weights.value)
    model.weights.value -= 0.001 * ctx.all_reduce("sum", gradient)
    return loss


@pytest.mark.parametrize(("num_replicas", "num_rows"), [(1, 6), (2, 6), (3, 6), (3, 5)])
def test_a_step_takes_the_arrays_of_objects_and_gives_them_new_ones(num_replicas: int, num_rows: int) -> None:
    strategy, model, rows = strategy_of(num_replicas), Linear(), ROWS[:num_rows]
    [batch] = strategy.distribute_dataset([rows])
    expected = np.ones(2, np.float32)
    for _ in range(2):
        strategy.run(train, args=(model, batch))
        expected = expected - 0.001 * 2 * rows.T @ (rows @ expected) / num_rows
    np.testing.assert_allclose(model.weights.value, expected, rtol=1e-5)
    assert int(model.num_seen.value) == 2 * num_rows and len(strategy.explain().split("compiled again")) == 1
    assert len(model.weights.value.devices()) == num_replicas and "toys on" in strategy.explain()


def test_the_twin_of_a_step_in_eager_mode_and_in_a_function_is_the_same(strategy2: mr.Strategy) -> None:
    [batch] = strategy2.distribute_dataset([ROWS])
    models = [Linear() for _ in range(3)]
    as_function = mr.function(lambda model: strategy2.run(train, args=(model, batch)))
    strategy2.run(train, args=(models[0], batch))
    as_function(models[1])
    traces.clear()
    with mr.eager():
        strategy2.run(train, kwargs={"model": models[2], "x": batch})
    assert set(traces) == {True, False}  # traced for the proof, then run
    for model in models[1:]:
        np.testing.assert_allclose(model.weights.value, models[0].weights.value, rtol=1e-6)


def test_objects_of_two_libraries_are_in_one_call(strategy3: mr.Strategy) -> None:
    nnx = pytest.importorskip("flax.nnx")
    linear, counter = Linear(), nnx.Variable(jnp.float32(1))

    def step(both: dict[str, Any], x: jax.Array) -> jax.Array:
        both["nnx"][...] += 1.0
        return train(both["toy"], x)

    [batch] = strategy3.distribute_dataset([ROWS])
    for _ in range(2):
        strategy3.run(step, args=({"nnx": counter, "toy": linear}, batch))
    assert (float(counter[...]), int(linear.num_seen.value)) == (3.0, 12)


def test_wrong_steps_are_refused_in_the_words_of_the_library_and_change_nothing(strategy2: mr.Strategy) -> None:
    def forgotten(model: Linear, x: jax.Array) -> None:
        model.weights.value += x[0]

    def evaluates(model: Linear, x: jax.Array) -> None:
        model.num_seen.value += 1
        model.is_training = False

    def broken(model: Linear, x: jax.Array) -> None:
        raise CellError

    [batch], model = strategy2.distribute_dataset([ROWS]), Linear()
    cases = [
        (
            forgotten,
            mr.ReplicasDivergeError,
            r"^Linear\.weights, which the step at .* mr\.losses\. Ask the toy\. What each replica",
        ),
        (evaluates, mr.ContextError, r"the step at .*test_library\.py:\d+ has changed a toy"),
        (broken, TypeError, r"^wind up `model.*, at .*test_library\.py:\d+$"),
    ]
    for step, error, message in cases:
        with pytest.raises(error, match=message):
            strategy2.run(step, args=(model, batch))
    assert model.weights.value.tolist() == [1, 1] and float(model.num_seen.value) == 0 and model.is_training


def test_a_program_sees_the_arrays_of_an_object_that_a_step_only_names(strategy2: mr.Strategy) -> None:
    model = Linear()
    step = lambda x: model(x)  # noqa: E731
    [batch] = strategy2.distribute_dataset([ROWS])
    for factor in (1, 2):
        model.weights.value = jnp.full(2, factor, jnp.float32)
        np.testing.assert_array_equal(strategy2.gather(strategy2.run(step, args=(batch,)), axis=0), factor * ROWS.sum(1))


def test_what_is_made_in_a_scope_is_the_strategys(strategy3: mr.Strategy) -> None:
    plain = Cell(1.0)
    with strategy3.scope():
        cell = Cell(np.ones(2, np.float32))
        optimizer = mr.Optimizer(optax.sgd(0.001), [cell])
    assert isinstance(cell.held, mr.Variable) and not isinstance(plain.held, mr.Variable)
    assert isinstance(Cell(1.0).held, jax.Array), "the method is replaced in the scope only"

    def step(x: jax.Array) -> None:
        gradients = mr.grad(lambda: (x @ cell.value) ** 2, [cell])()
        optimizer.apply_gradients(zip(gradients, [cell], strict=True))

    [batch] = strategy3.distribute_dataset([ROWS[:5]])
    strategy3.run(step, args=(batch,))
    np.testing.assert_allclose(cell.value, 1 - 0.002 * ROWS[:5].T @ ROWS[:5].sum(1) / 5, rtol=1e-5)


def test_state_is_saved_by_name_restored_in_place_and_exported(strategy2: mr.Strategy, tmp_path: Any) -> None:
    def made(value: float) -> dict[str, Any]:
        model = Linear()
        model.num_seen.value = jnp.float32(value)
        with strategy2.scope():
            return {"model": model, "cell": Cell(np.float32(value)), "nest": [model]}

    with mr.Checkpoint(tmp_path, **made(3)) as checkpoint:
        checkpoint.save(1)
    new = made(0)
    exported = mr.export(new)
    assert set(exported["model"]) == {"['weights']", "['num_seen']"} and exported["cell"]["held"].shape == ()
    with mr.Checkpoint(tmp_path, **new) as checkpoint:
        checkpoint.restore_latest()
    assert float(new["model"].num_seen.value) == 3 == float(new["cell"].value) and new["nest"] == [new["model"]]
    wrong = pytest.raises(mr.CheckpointError, match=r"model\['weights'\] is float32\[3\] here")
    with mr.Checkpoint(tmp_path, **(made(0) | {"model": Linear(3)})) as checkpoint, wrong:
        checkpoint.restore_latest()


def test_messages_name_the_library_and_the_lines() -> None:
    lines = " This is an object of Toy. Before the step write strategy.run(step, args=(model, batch)). In the step: model(batch)."
    assert lines_for([Linear()]) == lines and lines_for(Linear) == ""
    for call in (lambda: mr.Optimizer(optax.sgd(0.1), Linear()), lambda: mr.grad(lambda: 1.0, [Linear()])):
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value).endswith(lines)
    with pytest.raises(TypeError, match="before it is wound up"):
        mr.grad(lambda: 1.0, [])


def test_a_library_that_the_program_has_not_imported_is_not_asked(
    strategy2: mr.Strategy, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delitem(sys.modules, "toy")
    traces.clear()
    with strategy2.scope():
        assert isinstance(Cell(1.0).held, jax.Array)
    strategy2.run(lambda: 1)
    assert traces == [] and "toys" not in strategy2.explain() and not objects.is_object(Linear())
    with pytest.raises(TypeError, match="expected variables, optimizers, arrays"):
        mr.Checkpoint(tmp_path, model=Linear()).save(1)
