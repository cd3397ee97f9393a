"""`distribute_values_from_function`: makes PerReplica values from values that a function returns for each replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import ContextError
from .._jax import user_code
from .._replicas import placement
from .._replicas.arrays import as_array, check_leaf
from .._replicas.host_memory import empty_rows
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica, stack_shapes
from .._typing import ArrayLike, PyTree, Shape
from .._workers.coordination import Coordination
from .._workers.progress import progress

_VERB = "distribute_values_from_function"


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The replica for which a function passed to `distribute_values_from_function` makes a value.

    Attributes:
        replica_id_in_sync_group: the replica's number, a Python int.
        num_replicas_in_sync: the number of replicas.

    >>> print(mr.ValueContext(2, 4))
    ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/ValueContext
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


def distribute(mesh: ReplicaMesh, coordination: Coordination, trees: Iterable[PyTree]) -> PyTree:
    """Make a tree of PerReplica values from the trees of this worker's replicas, in order; the workers exchange their shapes."""
    arrays: list[list[Any]] = []
    told: list[dict[str, Any]] = []
    for tree in trees:
        leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda leaf: hasattr(leaf, "__jax_array__"))
        arrays.append(list(map(_array, leaves)))
        kinds = [[list(a.shape), str(a.dtype)] for a in arrays[-1]]
        told.append({"structure": str(treedef), "leaves": kinds})
    with progress.phase(_VERB, waits=True):
        every = [replica for worker in coordination.exchange(_VERB, told) for replica in worker]
    for replica, described in enumerate(every):
        if described["structure"] != every[0]["structure"]:
            raise ValueError(
                f"value_fn returned the structure {every[0]['structure']} for replica 0 and {described['structure']} for replica "
                f"{replica}; expected one structure for all."
            )
    columns = zip(*arrays, strict=True)
    kinds = zip(*(replica["leaves"] for replica in every), strict=True)
    return jax.tree.unflatten(treedef, [_per_replica(mesh, column, kind) for column, kind in zip(columns, kinds, strict=True)])


def _array(leaf: ArrayLike) -> np.ndarray | jax.Array:
    """Turn a leaf into an array; copy numpy's, because the function may reuse its memory for the next replica."""
    if isinstance(leaf, jax.core.Tracer):
        raise ContextError(
            f"{_VERB} was given an array that JAX traces, at {user_code.user_line()}, as in a function under jax.jit, jax.vmap "
            "or jax.grad: it has no value yet, and this verb brings values to the devices. Give the array to the step as it is: "
            "strategy.run(step, args=(x,))."
        )
    if not isinstance(leaf, np.ndarray):
        return as_array(leaf, _VERB)
    check_leaf(leaf, _VERB)
    return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype.newbyteorder("=")))


def _per_replica(mesh: ReplicaMesh, arrays: Sequence[Any], kinds: Sequence[tuple[list[int], str]]) -> PerReplica:
    """Make a PerReplica from this worker's arrays for a leaf; `kinds` has the shape and dtype of every replica's array."""
    every = [tuple(shape) for shape, _ in kinds]
    if len(set(map(len, every))) > 1:
        raise ValueError(
            f"value_fn returned arrays of different ranks, shapes {', '.join(map(str, every))}; expected one "
            "rank for all replicas. Add axes of length one."
        )
    dtypes = sorted({dtype for _, dtype in kinds})
    if len(dtypes) > 1:
        raise TypeError(f"value_fn returned different dtypes: {', '.join(dtypes)}; expected one for all replicas.")
    padded, shapes = stack_shapes(every)
    if not jnp.issubdtype(arrays[0].dtype, jax.dtypes.prng_key):
        return PerReplica(_stack(mesh, arrays, padded), shapes)
    data = [jax.random.key_data(array) for array in arrays]
    stacked = _stack(mesh, data, (*padded, *data[0].shape[len(padded) :]))
    return PerReplica(jax.random.wrap_key_data(stacked, impl=jax.random.key_impl(arrays[0])), shapes)


def _stack(mesh: ReplicaMesh, arrays: Sequence[Any], padded: Shape) -> jax.Array:
    """Put each replica's array on its device, padded with zeros to one shape."""
    rows = empty_rows(len(arrays), padded, arrays[0].dtype)
    for place, array in enumerate(arrays):
        if array.shape != padded:
            rows[place] = 0
        rows[(place, *map(slice, array.shape))] = np.asarray(array)
    return placement.stack(mesh, rows)
