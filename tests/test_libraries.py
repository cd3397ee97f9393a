"""A model library's object where variables are expected: the library is named, and the lines to write; no arrays are printed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr
from mirrored._libraries import lines_for
from mirrored._text import shown


def model_of(module: str, is_tree: bool) -> object:
    """An object of a user's class, over one that calls itself a library's; in tests no model library is installed."""
    base = type("Module", (), {"__module__": module})

    class Mine(base):
        def __init__(self) -> None:
            self.kernel = jnp.ones((30, 30))

        def __repr__(self) -> str:
            return f"Mine({self.kernel})"

    if is_tree:
        jax.tree_util.register_pytree_node(Mine, lambda m: ((m.kernel,), None), lambda _, kernel: Mine())
    return Mine()


LIBRARIES = {
    "flax.nnx.module": ("Flax NNX", "strategy.run(step, args=(model, optimizer, batch))"),
    "flax.linen.module": ("Flax Linen", "variables = mr.Variable(model.init(key, x))"),
    "equinox._module": ("Equinox", "variables = mr.Variable(model)"),
    "keras.src.layers.layer": ("Keras", "optimizer.apply_gradients of Keras"),
    "torch.nn.modules.module": ("PyTorch", "model.named_parameters()"),
}


@pytest.mark.parametrize("module", LIBRARIES)
def test_the_library_and_the_lines_are_named_and_no_array_is_printed(module: str, tmp_path) -> None:
    library, line = LIBRARIES[module]
    for is_tree in (False, True):
        model = model_of(module, is_tree)
        calls = [lambda: mr.Checkpoint(tmp_path, model=model).save(1)]  # noqa: B023
        calls += [] if is_tree else [lambda: mr.Variable(model)]  # noqa: B023
        for given in (model, [model], {"a": model}):
            calls += [lambda given=given: mr.Optimizer(optax.sgd(0.1), given)]
            calls += [lambda given=given: mr.value_and_grad(lambda: 1.0, given)]
        for call in calls:
            with pytest.raises(TypeError) as caught:
                call()
            text = str(caught.value)
            assert f"an object of {library}" in text and line in text and len(text) < 1000 and "[[1." not in text, text
    others = (3, "flax", None, [], {}, np.ones(3), [mr.Variable(1.0)], model_of("kerasy", False), model_of("myflax.nnx", False))
    assert set(map(lines_for, others)) == {""}


def test_values_are_shown_shortly() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError

    for large in (np.ones((40, 50)), np.asfortranarray(np.ones((40, 50)))):
        assert shown(large) == "an array of shape (40, 50) and dtype float64"
    assert shown(jnp.ones((40, 50), int)) == "an array of shape (40, 50) and dtype int32"
    assert (shown(3), shown("a"), shown(None), shown([1, 2])) == ("3", "'a'", "None", "[1, 2]")
    assert shown({"a": np.ones(1000)}) == "a dict of 1" and shown([np.ones(1000)] * 3) == "a list of 3"
    assert shown("x" * 1000) == repr("x" * 299)[:-1] + "..."
    assert shown(Bad()) == f"an object of type {__name__}.test_values_are_shown_shortly.<locals>.Bad"
    assert shown(type("Short", (model_of("keras", False).__class__,), {"__repr__": lambda self: "short"})()).endswith(".Short")
    assert shown(model_of("mine", False)).startswith(f"an object of type {__name__}.model_of")


def test_messages_stay_short_for_large_objects(strategy2: mr.MirroredStrategy) -> None:
    w = mr.Variable(1.0)
    calls = {
        "optimizer": lambda large: mr.Optimizer(optax.sgd(0.1), [large]),
        "tx": lambda large: mr.Optimizer(large, [w]),
        "gradient": lambda large: mr.Optimizer(optax.sgd(0.1), [w]).apply_gradients([large]),
        "value_and_grad": lambda large: mr.value_and_grad(large, [w]),
        "loss": lambda large: mr.value_and_grad(lambda: [large], [w])(),
        "reduce": lambda large: strategy2.reduce("sum", [object(), large]),
        "assign": w.assign,
        "run": strategy2.run,
        "rng": lambda large: mr.get_replica_context().rng(large),
        "function": mr.function,
        "scan": lambda large: mr.scan(large, 0.0, length=2),
        "devices": lambda large: mr.MirroredStrategy([large]),
    }
    for large in (model_of("mine", False), {"a": np.ones((40, 50))}, np.ones((40, 50))):
        for what, call in calls.items():
            with pytest.raises((TypeError, ValueError)) as caught:
                call(large)
            assert len(str(caught.value)) < 700, (what, str(caught.value))
