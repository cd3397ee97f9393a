"""One variable of a tree: the parameters of a model, an optimizer's state, a module, a train state."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .. import _html
from .._replicas import frames
from .._replicas.arrays import is_wrapped
from .._replicas.per_replica import is_per_replica
from .._text import counted
from .._typing import PyTree
from . import storage
from .making import Made

#: So many arrays of a tree are shown.
_MAX_SHOWN = 20
_WAYS_IN = "Write variable.value['w'] for the array at 'w', and variable.variables['w'] for its mr.Variable."


class VariableTree:
    """A tree whose arrays are variables: what `mr.Variable` makes of a nest of arrays, a module or a train state.

    Its arrays are state, one variable for each; everything else in the tree (Python numbers, strings, functions, None) stays
    as it was given, as in Equinox. What holds for a variable holds for each of the tree's: copies that provably cannot differ,
    checkpoints, gradients by `mr.value_and_grad(loss, tree)`, and updates by `mr.Optimizer(tx, tree)`. As a pytree it stands for
    the tree of its values, with None for what is no array.

    >>> with strategy.scope():
    ...     params = mr.Variable({"w": np.ones((2, 3)), "b": np.zeros(3)}, name="params")
    ...     optimizer = mr.Optimizer(optax.sgd(0.5), params)
    >>> def step(x):
    ...     def loss():
    ...         return (x @ params.value["w"] + params.value["b"]).sum(axis=1)  # one for each example
    ...     optimizer.apply_gradients(mr.grad(loss, params)())
    >>> for batch in strategy.distribute_dataset([np.ones((2, 2), np.float32)]):
    ...     strategy.run(step, args=(batch,))
    >>> params.numpy()["b"]
    array([-0.5, -0.5, -0.5], dtype=float32)
    """

    __slots__ = ("__weakref__", "_name", "_static", "_treedef", "_variables")

    def __init__(self, tree: PyTree, make: Callable[..., Any], name: str) -> None:
        """Make the variables; users call `mr.Variable(tree)`."""
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(_with_values(tree), is_leaf=is_per_replica)
        self._name = name
        #: The leaves that are no arrays, each in a tuple; None where a variable is.
        self._static: list[tuple[Any] | None] = [None if _is_state(leaf) else (leaf,) for _, leaf in paths]
        self._variables = [make(leaf, name=name + jax.tree_util.keystr(path)) for path, leaf in paths if _is_state(leaf)]
        if paths and not self._variables:
            raise TypeError(
                f"variable {name!r}: there is no array in {tree!r}. Make arrays of the numbers that are state, for example "
                "mr.Variable(jax.tree.map(jnp.asarray, tree))."
            )

    @property
    def name(self) -> str:
        """The prefix of its variables' names."""
        return self._name

    @property
    def value(self) -> PyTree:
        """The tree with the variables' values: this replica's inside a step, the one value outside."""
        return self._with([variable.value for variable in self._variables])

    @property
    def variables(self) -> PyTree:
        """The tree with its variables, and None for a leaf that is no array."""
        remaining = iter(self._variables)
        return jax.tree.unflatten(self._treedef, [next(remaining) if s is None else None for s in self._static])

    def numpy(self) -> PyTree:
        """Return the tree with copies of the values as numpy arrays."""
        return self._with([variable.numpy() for variable in self._variables])

    def assign(self, value: PyTree) -> VariableTree:
        """Set all values, and return the tree; for each array the rules of `mr.Variable.assign` hold.

        Args:
            value: a tree of the same structure, as `optax.apply_updates` or `TrainState.apply_gradients` return it.

        Raises:
            ValueError: for another structure, and when something that is no array has changed. Nothing is assigned then.
            ReplicasDivergeError: (a ValueError) when copies would differ, or cannot be shown to be equal.
        """
        leaves = self._checked(value)
        frame = frames.current()
        with storage.claimed([variable._slot for variable in self._variables], frame):
            new = [(v, v._new_value(frame, "assign", leaf, None)) for v, leaf in zip(self._variables, leaves, strict=True)]
            for variable, array in new:
                variable._store(frame, array)
        return self

    def _checked(self, value: PyTree) -> list[Any]:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(_with_values(value), is_leaf=is_wrapped)
        if treedef != self._treedef:
            raise ValueError(
                f"{self._name}.assign got a tree of structure {treedef}; expected {self._treedef}, which mr.Variable was given."
            )
        for (path, leaf), static in zip(leaves, self._static, strict=True):
            if static is not None and not _is_same(leaf, static[0]):
                at = jax.tree_util.keystr(path)
                raise ValueError(
                    f"{self._name}.assign got {at} = {leaf!r}, which was {static[0]!r} when mr.Variable was called. Only arrays "
                    "are state; everything else is compiled into the steps. Make what changes an array before, for example "
                    "mr.Variable(train_state.replace(step=jnp.asarray(train_state.step)))."
                )
        return [leaf for (_, leaf), static in zip(leaves, self._static, strict=True) if static is None]

    def _with(self, arrays: Sequence[Any]) -> PyTree:
        remaining = iter(arrays)
        return jax.tree.unflatten(self._treedef, [next(remaining) if s is None else s[0] for s in self._static])

    if not TYPE_CHECKING:  # so that type checkers find them

        def __getitem__(self, key: object) -> NoReturn:
            raise TypeError(f"variable {self._name!r} is a tree, and has no [key], `in` or iteration itself. {_WAYS_IN}")

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"mr.VariableTree has no attribute {name!r}. {_WAYS_IN}")

    def __repr__(self) -> str:
        shown = [f"  {path}: {shape} {dtype}" for path, shape, dtype in self._rows()[:_MAX_SHOWN]]
        hidden = [f"  ... and {len(self._variables) - _MAX_SHOWN} more"] * (len(self._variables) > _MAX_SHOWN)
        return "\n".join([f"mr.Variable(name={self._name!r}, {self._summary()}:", *shown, *hidden]) + ")"

    def _repr_html_(self) -> str:
        rows = self._rows()
        hidden = [("...", "", "")] * (len(rows) > _MAX_SHOWN)
        title = _html.element("b", f"mr.Variable {self._name!r}")
        return _html.join([title, f", {self._summary()}", _html.table(("array", "shape", "dtype"), rows[:_MAX_SHOWN] + hidden)])

    def _summary(self) -> str:
        size = sum(int(np.prod(variable.shape)) for variable in self._variables)
        return f"a tree of {counted(len(self._variables), 'variable')} with {counted(size, 'element')}"

    def _rows(self) -> list[tuple[str, tuple[int, ...], Any]]:
        return [(v.name.removeprefix(self._name), v.shape, v.dtype) for v in self._variables]

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(f"variable {self._name!r} cannot be copied or pickled; make a new one with mr.Variable(variable.value).")


def is_array(leaf: object) -> bool:
    """Tell whether a leaf of a tree is state."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | Made)


def _is_state(leaf: object) -> bool:
    return is_array(leaf) or is_per_replica(leaf)  # a PerReplica is refused by `mr.Variable`, as outside of a tree


def _with_values(tree: PyTree) -> PyTree:
    """Replace variables in a tree by their values: variables made of that tree are copies with their own state."""
    if not any(map(_is_whole, jax.tree.leaves(tree, is_leaf=_is_whole))):
        return tree
    return jax.tree.map(_value_of, tree, is_leaf=_is_whole)


def _value_of(leaf: Any) -> Any:
    if _is_whole(leaf) and hasattr(type(leaf), "value"):
        return leaf.value
    return leaf


def is_tree(value: PyTree) -> bool:
    """Tell whether `mr.Variable(value)` makes a tree of variables; a list of numbers is one array, as for numpy."""
    if value is None or is_wrapped(value) or jax.tree_util.all_leaves([value]):
        return False
    if type(value) not in (list, tuple) or any(map(is_tree, value)):
        return True
    return any(map(is_array, jax.tree.leaves(value))) and len({np.shape(part) for part in value}) > 1


def trainable(tree: PyTree) -> PyTree:
    """Replace trees of variables in a tree by nests of their floating point variables."""

    def floating(variables: PyTree) -> PyTree:
        return jax.tree.map(lambda v: v if jnp.issubdtype(v.dtype, jnp.inexact) else None, variables, is_leaf=is_wrapped)

    return jax.tree.map(lambda x: floating(x.variables) if isinstance(x, VariableTree) else x, tree, is_leaf=_is_whole)


def _is_whole(node: object) -> bool:
    return isinstance(node, VariableTree) or is_wrapped(node)


def _is_same(new: object, old: object) -> bool:
    return new is old or (type(new) is type(old) and not is_array(new) and bool(new == old))


def _unflatten(tree: VariableTree, children: tuple[PyTree]) -> Any:
    # The tree's own variables make the tree again; anything else, such as gradients, makes a plain one.
    leaves = jax.tree.leaves(children[0], is_leaf=is_wrapped)
    is_own = len(leaves) == len(tree._variables) and all(map(operator.is_, leaves, tree._variables))
    return tree if is_own else children[0]


jax.tree_util.register_pytree_node(VariableTree, lambda tree: ((tree.variables,), tree), _unflatten)
