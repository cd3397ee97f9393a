"""Lets users call JAX's own collectives in a step: `jax.lax.pmean(x, "replica")` weighs replicas by rows, and the proof sees it.

While a step is traced, functions of this module replace the public names in `jax.lax`. They pass on calls of other threads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from .. import _process
from .._errors import UnevenReplicasError
from .._jax import tracing, user_code
from .._jax.marks import Mark, Purpose, mark
from .._options import ReduceOp
from .._typing import REPLICA_AXIS, ArrayLike, PyTree
from . import frames
from .collectives import ReplicaAxis, all_reduce, noted

#: The functions of `jax.lax` that are replaced while a step is traced.
NAMES = ("all_gather", "all_to_all", "pmax", "pmean", "pmin", "ppermute", "psum", "psum_scatter")
_PURPOSES = {"pmean": Purpose.MEAN, "psum": Purpose.SUM, "psum_scatter": Purpose.SUM}


@contextlib.contextmanager
def seen() -> Iterator[None]:
    """Replace JAX's collectives during this block, in which a step is traced."""
    with _process.lax_lock:
        if not _process.num_step_traces:
            _process.lax_replaced = _places()
            for module, name, original in _process.lax_replaced:
                setattr(module, name, functools.wraps(original)(functools.partial(_call, name, original)))
        _process.num_step_traces += 1
    try:
        yield
    finally:
        with _process.lax_lock:
            _process.num_step_traces -= 1
            if not _process.num_step_traces:
                for place in _process.lax_replaced:
                    setattr(*place)


def _places() -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """List the places of JAX's collectives: `jax.lax`, and modules that have imported one by name, with name and function."""
    modules = [module for key, module in list(sys.modules.items()) if key == "jax.lax" or not key.startswith("jax")]
    having = [module for module in modules if not getattr(module, "__dict__", {}).keys().isdisjoint(NAMES)]
    originals = {name: getattr(jax.lax, name) for name in NAMES}
    named = itertools.product(having, originals.items())
    return [(module, name, function) for module, (name, function) in named if vars(module).get(name) is function]


def _call(name: str, original: Callable[..., Any], x: PyTree, axis_name: object, *more: Any, **options: Any) -> PyTree:
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    frame = frames.current()
    if frame is None or (axis := frame.axis) is None or REPLICA_AXIS not in names or tracing.is_mapped_over(REPLICA_AXIS):
        return original(x, axis_name, *more, **options)
    if name == "pmean" and axis.sizes is not None:
        others = tuple(other for other in names if other != REPLICA_AXIS)
        if others:
            x = original(x, others)
        return _mean(x, axis, **options)
    if name == "psum" and type(x) is int and names == (REPLICA_AXIS,):  # JAX would take x.shape[0] for every replica's
        return sum(axis.each(x))
    if axis.sizes is not None:
        x = jax.tree.map(functools.partial(_marked, name), x)
    purpose = _PURPOSES.get(name)
    if purpose is None:
        return original(x, axis_name, *more, **options)
    result = original(_noted(purpose, x, name), axis_name, *more, **options)
    return _noted(Purpose.TOTAL, result, name)


def _noted(purpose: Purpose, tree: PyTree, name: str) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):  # numbers: JAX multiplies them by R
        return tree
    return jax.tree.unflatten(treedef, noted(purpose, leaves, f"jax.lax.{name}"))


def _mean(x: PyTree, axis: ReplicaAxis, axis_index_groups: object = None) -> PyTree:
    if axis_index_groups is not None:
        raise UnevenReplicasError(
            f"jax.lax.pmean at {user_code.user_line()} is over groups of replicas, and the batch does not divide evenly among "
            "them: how many rows each group has is not known. Leave axis_index_groups out, divide a sum by the group's rows, "
            "or leave the odd rows out: strategy.distribute_dataset(dataset, mr.InputOptions(drop_remainder=True))."
        )
    return all_reduce(ReduceOp.MEAN, x, axis, verb="pmean")


def _marked(name: str, leaf: ArrayLike) -> ArrayLike:
    """Mark a collective's operand as the step's own: JAX itself makes the unmarked collectives, in gradients."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if name == "psum" and leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.int32)  # as psum itself would
    return mark(leaf, Mark(Purpose.OPERAND, name, ""))
