"""Exports variables as plain trees of arrays for other libraries."""

from __future__ import annotations

import jax

from .._errors import UnevenReplicasError
from .._jax import user_code
from .._models import libraries, objects
from .._replicas.per_replica import PerReplica, require_whole, stack_of, uneven_shapes
from .._typing import PyTree
from .._variables.tree import VariableTree
from .._variables.variable import Variable
from ..optimizer import Optimizer


@user_code.shorten_errors
def export(tree: PyTree) -> PyTree:
    """Return the values of variables as a plain tree of JAX arrays.

    The result shares the variables' arrays, on all devices of the strategy, without a copy: donate none of them. A later change
    of a variable does not change them. `variable.assign(array)` takes an array back, also for a tree that `mr.Variable(tree)` has
    made.

    Args:
        tree: any nest of variables, of results of `mr.Variable(tree)`, and of `mr.Optimizer` objects (exported as their
            states). Models, optimizers and metrics of Keras and Flax NNX become arrays by name. A PerReplica becomes its
            array `[R, ...]`, with one row for each replica. Other values are returned unchanged.

    Returns:
        The same nest, with arrays. A sync-on-read variable gives its aggregated value, as when it is read.

    Raises:
        UnevenReplicasError: (a ValueError) for a PerReplica whose shapes differ.
        ContextError: (a RuntimeError) under a `jax.jit` that does not know the variables.

    >>> with strategy.scope():
    ...     params = {"w": mr.Variable([1.0, 2.0]), "layers": [mr.Variable(3.0)]}
    >>> arrays = mr.export(params)
    >>> arrays["w"], float(jax.grad(lambda p: jnp.sum(p["w"]) * p["layers"][0])(arrays)["layers"][0])
    (Array([1., 2.], dtype=float32), 3.0)
    """
    return jax.tree.map(_export_leaf, tree, is_leaf=_is_whole)


def _is_whole(value: object) -> bool:
    return isinstance(value, Variable | VariableTree | PerReplica) or objects.is_object(value)


def _export_leaf(value: PyTree) -> PyTree:
    if isinstance(value, Variable | VariableTree):
        return value.value
    if isinstance(value, Optimizer):
        return export(value.state)
    if objects.is_object(value):
        return objects.arrays_by_name(value)
    if isinstance(value, PerReplica):
        if uneven_shapes(value) is not None:
            raise UnevenReplicasError(
                f"mr.export got a PerReplica with the shapes {value.shapes}, of which there is no one array. Join the rows: "
                "strategy.gather(value, axis=0)."
            )
        require_whole(value, lambda: "mr.export got")
        return stack_of(value)
    state = libraries.tree_of(value)
    if state is value:
        return value
    return export(state)
