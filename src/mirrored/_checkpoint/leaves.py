"""Finds the values that a checkpoint holds: the leaves of the user's objects, by their paths."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._libraries import lines_for
from .._models import libraries, objects
from .._options import VariableAggregation, VariableSynchronization
from .._replicas.arrays import refuse_mask
from .._replicas.division import division_in
from .._replicas.per_replica import PerReplica
from .._text import shown
from .._typing import PyTree
from .._variables.access import lent
from .._variables.tree import VariableTree
from .._variables.variable import Variable, spec_of
from ..data._iterator import DistributedIterator, num_workers_of
from ..optimizer import Optimizer

#: Path, such as `model['layers'][0]` -> variable, array, number, or iterator with a position.
Leaves: TypeAlias = dict[str, Any]
#: Leaves with a dtype and a shape.
ArrayLeaf: TypeAlias = Variable | jax.Array | np.ndarray

NUMBERS = {"bool": "True".__eq__, "int": int, "float": float, "complex": complex}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}", re.ASCII)


def leaves_of(named: Mapping[str, PyTree]) -> Leaves:
    """Return the leaves of the user's objects, in an order that is the same on all workers."""
    if not named:
        raise TypeError("mr.Checkpoint got nothing to save; expected for example mr.Checkpoint(directory, model=variables).")
    found: Leaves = {}
    for name in sorted(named):
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"mr.Checkpoint: the name {name!r} will not do; expected 1 to 128 of the characters A-Z, a-z, 0-9, '_', '.' and "
                "'-', the first not a '.'."
            )
        for path, leaf in _walk(name, named[name], False, lines_for(named[name])):
            if path in found:
                raise ValueError(f"mr.Checkpoint: two values have the path {path!r}; give their keys different names.")
            found[path] = leaf
    return found


def _walk(path: str, tree: PyTree, is_replaceable: bool, lines: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, VariableTree):
        tree = tree.variables
    if isinstance(tree, Optimizer):
        yield f"{path}:iterations", tree.iterations
        tree = tree.state
    tree = libraries.tree_of(tree)
    if objects.is_object(tree):
        for name, array in objects.arrays_by_name(tree).items():
            _check_leaf(path + name, array, True, lines)
            yield path + name, array
        return
    try:
        children = children_of(tree)
    except ValueError as error:
        raise ValueError(f"mr.Checkpoint: {path} cannot be saved: {error} Give its keys one type: '1' for 1.") from error
    if children is None:
        _check_leaf(path, tree, is_replaceable, lines)
        yield path, tree
        return
    for key, child in children[0]:
        yield from _walk(path + jax.tree_util.keystr(key), child, is_replaceable or isinstance(tree, dict | list), lines)


def children_of(tree: PyTree) -> tuple[list[tuple[Any, Any]], Any] | None:
    """Return a node's children, with their keys, and its treedef; None for a leaf."""
    if isinstance(tree, Variable | PerReplica | Optimizer) or has_position(tree) or objects.is_object(tree):
        return None
    children, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if len(children) == 1 and not children[0][0]:  # a leaf's path to itself is empty
        return None
    return children, treedef


def has_position(value: object) -> bool:
    """Tell whether a value is an iterator whose position can be saved and restored."""
    return callable(getattr(type(value), "get_state", None)) and callable(getattr(type(value), "set_state", None))


def _check_leaf(path: str, leaf: Any, is_replaceable: bool, lines: str) -> None:
    if isinstance(leaf, Variable) or has_position(leaf):
        return
    if isinstance(leaf, PerReplica):
        raise TypeError(
            f"mr.Checkpoint: {path} is a PerReplica, one value per replica. Reduce it with strategy.reduce('mean', value), or "
            "keep it in a mr.Variable(..., synchronization='on_read')."
        )
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(f"mr.Checkpoint: {path} is a traced value; save outside of jit and strategy.run.")
    is_mine = isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    if is_mine and division_in(leaf) is None:
        raise TypeError(f"mr.Checkpoint: {path} is an array of which this worker holds only a part; keep it in a mr.Variable.")
    refuse_mask(leaf, lambda: f"mr.Checkpoint: {path} is")
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    if not (is_array and _is_savable(leaf.dtype)) and type(leaf).__name__ not in NUMBERS:
        raise TypeError(
            f"mr.Checkpoint: {path} is {shown(leaf)} of type {type(leaf).__name__}; expected variables, optimizers, arrays, "
            "numbers, iterators of distributed datasets, or nests of them. For the position in the data give the iterator itself "
            "instead of its get_state(): state = {'epoch': 0, 'batches': iter(dataset)}." + lines
        )
    if not is_replaceable and not (isinstance(leaf, np.ndarray) and leaf.flags.writeable):
        raise TypeError(
            f"mr.Checkpoint: {path} is {shown(leaf)}, and a restored value could not be put in its place. Keep it in a dict or a "
            "list that the program reads it from: mr.Checkpoint(directory, state={'epoch': 0})." + lines
        )


def _is_savable(dtype: np.dtype) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_, jax.dtypes.prng_key)) and dtype.name != "float128"


def joint_among(leaves: Leaves) -> str | None:
    """Return the path of a variable or iterator that belongs to several workers together; None when there is none."""
    for path, leaf in leaves.items():
        is_variable = isinstance(leaf, Variable) and not spec_of(leaf).mesh.is_alone
        if is_variable or (isinstance(leaf, DistributedIterator) and num_workers_of(leaf) > 1):
            return path
    return None


def variables_of(leaves: Leaves) -> list[Variable]:
    """Return the variables among the leaves, each once."""
    return list(dict.fromkeys(leaf for leaf in leaves.values() if isinstance(leaf, Variable)))


def kinds_of(leaves: Leaves) -> dict[str, str]:
    """Describe each leaf in words that are equal on all workers."""
    return {path: kind_of(leaf) for path, leaf in leaves.items()}


def kind_of(leaf: Any) -> str:
    if isinstance(leaf, Variable):
        aggregation = "" if leaf.aggregation is VariableAggregation.NONE else f", {leaf.aggregation.name}"
        kind = "sync-on-read" if leaf.synchronization is VariableSynchronization.ON_READ else "mirrored"
        return f"{kind} {dtype_name(leaf)}{list(leaf.shape)}{aggregation}"
    if has_position(leaf):
        return "iterator"
    if not hasattr(leaf, "dtype"):
        return "number"
    return f"{dtype_name(leaf)}{list(leaf.shape)}"


def dtype_name(array: ArrayLeaf) -> str:
    return f"keys of {key_impl(array)} " if is_key(array) else array.dtype.name


def is_key(array: ArrayLeaf) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def key_impl(keys: ArrayLeaf) -> str:
    with lent([keys]) if isinstance(keys, Variable) else contextlib.nullcontext([keys]) as [array]:
        return str(jax.random.key_impl(array))
