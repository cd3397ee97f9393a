"""One variable of a tree."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import variable

import mirrored as mr
from mirrored._variables.variable import is_variable

pytestmark = pytest.mark.usefixtures("in_numpy")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """As a module of a model library: with a function and numbers beside its arrays."""

    weight: jax.Array
    seen: jax.Array
    scale: float
    act: Callable[..., jax.Array]


class Pair(NamedTuple):
    first: object
    second: object


def layer() -> Layer:
    return Layer(np.full((2, 2), 0.5, np.float32), np.int32(0), 2.0, jnp.tanh)


def equal(one: object, other: object) -> bool:
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        np.array_equal(a, b) if hasattr(a, "shape") else a is b
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


@pytest.mark.parametrize(
    "value",
    [{"w": np.ones(2), "more": [np.zeros(3), None]}, layer(), Pair(np.ones(1), 5), [(np.ones((2, 2)), np.ones(2))]],
    ids=["dict", "module", "namedtuple", "list of layers"],
)
def test_a_tree_keeps_its_structure_and_what_is_no_array(strategy2: mr.Strategy, value: object) -> None:
    tree = variable(value, strategy2, name="net")
    assert isinstance(tree, mr.VariableTree)
    assert equal(jax.tree.map(np.asarray, tree.value), jax.tree.map(np.asarray, value))
    more = lambda tree: jax.tree.map(lambda x: x + 1 if hasattr(x, "shape") else x, tree)  # noqa: E731
    again = strategy2.run(lambda given: given.assign(more(given.value)) and None, args=(tree,))
    assert again is None and equal(tree.numpy(), more(value))
    assert all(variable.name.startswith("net") for variable in jax.tree.leaves(tree.variables, is_leaf=is_variable))


def test_what_numpy_makes_one_array_of_is_one_variable() -> None:
    for value in ([1.0, 2.0], ((1, 2), (3, 4)), [np.ones(2), np.zeros(2)], np.ones(3), 4):
        assert isinstance(mr.Variable(value), mr.Variable)


def test_as_a_pytree_it_is_the_tree_of_its_arrays(strategy2: mr.Strategy) -> None:
    tree = variable({"w": np.ones(2, np.float32), "n": 3}, strategy2)
    doubled = jax.tree.map(lambda x: x * 2, tree)
    assert doubled["n"] is None and np.array_equal(doubled["w"], [2, 2])
    assert jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_variable), [tree.variables["w"]]) is tree
    assert float(optax.tree.norm(tree)) == pytest.approx(2**0.5)
    counted = variable({"w": np.ones(2, np.float32), "seen": np.int32(0)}, strategy2)
    gradients = mr.grad(lambda: jnp.sum(counted.value["w"] ** 2), counted)()
    assert gradients["seen"] is None and gradients["w"].tolist() == [2, 2], "of its floating arrays"


def test_a_tree_is_shown_by_its_shapes_and_a_large_one_in_part(strategy2: mr.Strategy) -> None:
    tree = variable({"a": np.zeros((3, 2), np.float32), "b": {"c": np.int32(1), "n": 3}}, strategy2, name="params")
    lines = [
        "mr.Variable(name='params', a tree of 2 variables with 7 elements:",
        "  ['a']: (3, 2) float32",
        "  ['b']['c']: () int32)",
    ]
    assert repr(tree).split("\n") == lines
    assert "<td>[&#x27;a&#x27;]</td><td>(3, 2)</td><td>float32</td>" in tree._repr_html_()
    large = variable([np.zeros((1 + i, 2)) for i in range(23)], strategy2)
    assert repr(large).endswith("  [19]: (20, 2) float32\n  ... and 3 more)") and large._repr_html_().count("<tr>") == 22
    assert strategy2.run(lambda: repr(tree)) == repr(tree), "also in a step"


def test_what_is_refused_changes_nothing(strategy2: mr.Strategy) -> None:
    tree = variable({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32), "step": 0}, strategy2, name="state")
    with pytest.raises(ValueError, match=r"state\['b'\].*shape \(4,\)"):
        tree.assign({"a": np.ones(2), "b": np.ones(4), "step": 0})
    with pytest.raises(mr.ReplicasDivergeError, match=r"state\['a'\]"):
        own = strategy2.distribute_values_from_function(lambda ctx: np.full(2, ctx.replica_id_in_sync_group, np.float32))
        strategy2.run(lambda x: tree.assign({**tree.value, "a": x}) and None, args=(own,))
    assert all(not variable.numpy().any() for variable in (tree.variables["a"], tree.variables["b"]))
    assert mr.Variable(lambda: {"a": np.ones(2)}).variables["a"].name.endswith("['a']")
    for made in (own, {"a": own}, [np.ones(3), {"a": own}]):
        with pytest.raises(mr.PerReplicaError, match="the initial value is a PerReplica"):
            mr.Variable(made)


def test_what_a_tree_holds_is_in_its_value_and_its_variables(strategy: mr.Strategy) -> None:
    tree = variable({"w": np.ones(2, np.float32)}, strategy, name="params")
    wrong = (lambda: tree["w"], lambda: "w" in tree, lambda: list(tree), lambda: dict(tree), lambda: tree.items(), lambda: tree.w)
    for call in (lambda function: function(), strategy.run):
        for use in wrong:
            with pytest.raises(
                (TypeError, AttributeError), match=r"Write variable\.value\['w'\] .* variable\.variables\['w'\] for its"
            ):
                call(use)
        call(lambda: tree.variables["w"].assign(tree.value["w"] + 1))
    assert tree.numpy()["w"].tolist() == [3, 3] and "w" in tree.value and not hasattr(tree, "shape")
    assert np.asarray(tree, dtype=object).shape == () and jax.tree.leaves(tree)[0].tolist() == [3, 3]


@pytest.mark.by_xla
def test_a_variable_of_variables_is_a_copy_that_can_be_assigned(strategy2: mr.Strategy) -> None:
    with strategy2.scope():
        w = mr.Variable(np.ones(2, np.float32), name="w")
        params = mr.Variable({"a": np.ones(2, np.float32), "n": 3}, name="params")
        made = {
            "params": mr.Variable(params, name="average"),
            "nested": mr.Variable({"p": params, "w": w}, name="average"),
            "variables": mr.Variable({"w": w, "n": 3}, name="average"),
        }
    names = {how: sorted(v.name for v in jax.tree.leaves(tree.variables, is_leaf=is_variable)) for how, tree in made.items()}
    expected = {"params": ["average['a']"], "nested": ["average['p']['a']", "average['w']"], "variables": ["average['w']"]}
    assert names == expected
    for tree in made.values():
        tree.assign(tree.value)  # its own value fits, with the number at its place
        tree.assign(jax.tree.map(lambda x: x if isinstance(x, int) else x * 2, tree.value))
    assert made["nested"].numpy()["p"]["n"] == 3 and made["nested"].numpy()["w"].tolist() == [2, 2]
    assert params.numpy()["a"].tolist() == w.numpy().tolist() == [1, 1], "it is a copy"

    def take_over() -> None:
        made["params"].assign(params)
        made["nested"].assign({"p": params, "w": w})

    for way in (take_over, lambda: strategy2.run(take_over)):
        made["params"].assign({"a": np.zeros(2), "n": 3})
        way()
        assert made["params"].numpy()["a"].tolist() == made["nested"].numpy()["p"]["a"].tolist() == [1, 1]
