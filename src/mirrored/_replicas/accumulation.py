"""A function of the user's in the place of the sum over the replicas: `accumulation_fn` of `mr.ReductionToOneDevice`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._jax import user_code
from .._options import ReductionToOneDevice


def accumulate(ops: ReductionToOneDevice, rows: Sequence[jax.Array]) -> jax.Array:
    """Give the replicas' arrays to the user's function.

    Raises:
        TypeError: when it returns something else than an array like one of them.
    """
    assert ops.accumulation_fn is not None
    result = ops.accumulation_fn(list(rows))
    expected = f"{rows[0].dtype}{list(rows[0].shape)}"
    if not hasattr(result, "dtype") or (jnp.shape(result), result.dtype) != (rows[0].shape, rows[0].dtype):
        given = f"{result.dtype}{list(jnp.shape(result))}" if hasattr(result, "dtype") else repr(result)
        raise TypeError(
            f"accumulation_fn returned {given} for {len(rows)} arrays {expected}; expected one array like them, such as that of "
            "lambda values: jnp.stack(values).max(axis=0)."
        )
    return result


def unweighed(ops: ReductionToOneDevice) -> str:
    """Return the message that a mean by rows has no place for the function."""
    return (
        f"a mean over the replicas of an uneven batch, at {user_code.user_line()}, weighs them by their rows, but {ops} has an "
        "accumulation_fn, which knows no weights. Combine with 'sum'; give all replicas one weight, "
        "ctx.all_reduce('mean', value, by_rows=False); or leave the odd rows out: mr.InputOptions(drop_remainder=True)."
    )
