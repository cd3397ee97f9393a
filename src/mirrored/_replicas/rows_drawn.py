"""Which rows of the whole batch's random numbers does a replica draw?"""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import random_keys
from .collectives import ReplicaAxis


def key_of(keys: jax.Array, axis: ReplicaAxis, index: random_keys.Count, rows: int | None, by_rows: bool = True) -> jax.Array:
    """Make keys by rows of keys that are the same on all replicas; fold other kinds of keys. `index` is the replica's number."""
    if not random_keys.are_counted(keys):
        return random_keys.folded(keys, index)
    if not by_rows:
        return random_keys.folded(random_keys.plain(keys), index)
    lengths = axis.lengths if rows is None else (axis.each(rows),)
    if axis.sizes is None:  # replicas draw equally many elements: the R-th part of a draw, whatever its length
        has_several_rows = bool(lengths) and all(of_axis[0] > 1 for of_axis in lengths)
        return random_keys.by_rows(keys, index, 1, index, has_several_rows)
    if rows is None:  # only axes that differ by replica are rows for sure
        lengths = tuple(of_axis for of_axis in lengths if len(set(of_axis)) > 1)
    shares = {tuple(Fraction(length, sum(of_axis)) for length in of_axis) for of_axis in lengths if any(of_axis)}
    least = min(lengths)
    # Where a replica has more rows than one before it, parts of other draws would meet: then all draws are its own.
    is_known = len(shares) == 1 and list(least) == sorted(least, reverse=True)
    num_rows = _of_replica(least if is_known else (0,) * axis.size, index)
    return random_keys.by_rows(keys, _of_replica(_before(least), index), num_rows, index, num_rows > 1)


def keys_of(keys: jax.Array, axis: ReplicaAxis, index: random_keys.Count, num_rows: int) -> jax.Array:
    """Make the keys of a replica's rows, of a key that is the same on all replicas."""
    if random_keys.are_counted(keys):
        if keys.ndim:
            raise TypeError(
                f"row_keys got keys of shape {keys.shape}; expected one key. For the rows of each of several write "
                "jax.vmap(lambda key: ctx.row_keys(key, num_rows))(keys)."
            )
        return random_keys.of_rows(keys, num_rows, _of_replica(_before(axis.each(num_rows)), index))
    return jax.random.split(random_keys.folded(keys, index), num_rows)


def _before(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return for each replica the sum of the rows of the replicas before it."""
    return tuple(np.cumsum((0, *counts))[:-1].tolist())


def _of_replica(numbers: tuple[int, ...], index: random_keys.Count) -> jax.Array:
    return jnp.asarray(numbers, jnp.uint32)[index]
