"""Turns users' values into arrays, and refuses conversions that would lose information."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._libraries import lines_for
from .._text import call_it, shown

#: Kinds of dtypes, from narrow to wide: a value is converted to its own kind, or to a wider one.
_KINDS = (np.bool_, jnp.unsignedinteger, jnp.signedinteger, jnp.floating, jnp.complexfloating)


def cast(array: jax.Array, dtype: DTypeLike, what: str) -> jax.Array:
    """Convert an array to a dtype of its own kind or a wider one; refuse a narrower one. `what` begins the message."""
    is_weak = getattr(array, "weak_type", False)  # random keys have no weak_type
    if array.dtype == dtype and not is_weak:
        return array
    given, own = _kind(array.dtype, is_weak), _kind(dtype)
    if given is None or own is None:
        raise TypeError(
            f"{what} of dtype {dtype} was given a value of dtype {array.dtype}; random keys and numbers are not converted into "
            "each other, nor keys of one generator into those of another. A key to keep is ctx.rng(key, by_rows=False)."
        )
    if given > own:
        raise TypeError(
            f"{what} of dtype {dtype} was given a value of dtype {array.dtype}, which would lose information. Convert it "
            f"yourself: value.astype('{dtype}')."
        )
    return strong(array, dtype)


def check_range(array: np.ndarray, what: Callable[[], str]) -> None:
    """Refuse 64-bit integers that would wrap around in JAX's 32-bit mode; `what` begins the message."""
    held = jax.dtypes.canonicalize_dtype(array.dtype)
    if held == array.dtype or array.dtype.kind not in "iu" or not array.size:
        return
    smallest, largest, limits = array.min(), array.max(), np.iinfo(held)
    if smallest < limits.min or largest > limits.max:
        raise ValueError(
            f"{what()} {array.dtype} values from {smallest} to {largest}, and JAX holds them as {held}, which would wrap "
            "around. Make them smaller (an index instead of a hash, a difference of times), or switch JAX to 64 bits "
            "at the start: jax.config.update('jax_enable_x64', True)."
        )


def refuse_mask(value: object, what: Callable[[], str]) -> None:
    """Refuse a masked array: a conversion would unmask the values under its mask. `what` begins the message."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what()} a masked array, and no device holds masks. Write array.filled(value).")


def host_array(value: Any, what: str, dtype: DTypeLike | None) -> np.ndarray:
    """Copy a host value into a new numpy array: `jax.device_put` may keep numpy's memory, which the user may change."""
    refuse_mask(value, lambda: f"{what} is")
    if hasattr(value, "__jax_array__"):
        value = np.asarray(value.__jax_array__())
    kind = type(value).__name__
    try:
        array = np.array(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} is {shown(value)}; expected an array or a number.{lines_for(value)}") from error
    if not jnp.issubdtype(array.dtype, jnp.number) and array.dtype != jnp.bool_:
        raise TypeError(f"{what} is {shown(value)} of type {kind}; expected an array or a number.{lines_for(value)}")
    if dtype is None or array.dtype.kind not in "biuf":
        return array
    is_array = isinstance(value, np.ndarray | np.generic)
    if is_array and not (array.dtype.kind in "iu" and jnp.issubdtype(dtype, jnp.integer)):  # the caller converts it
        return array
    return converted_number(array, what, dtype)


def converted_number(array: np.ndarray, what: str, dtype: DTypeLike) -> np.ndarray:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"{what} is a number, but the variable holds random keys ({dtype}); expected one: jax.random.key(0).")
    with np.errstate(invalid="ignore"):
        converted = array.astype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact) and not np.array_equal(converted, array):
        raise TypeError(f"{what} is {array}, which the dtype {dtype} cannot hold. Round it, or use another dtype.")
    return converted


def _kind(dtype: DTypeLike, is_weak: bool = False) -> int | None:
    """Return the position of a dtype's kind in `_KINDS`; a traced Python int (weak type) fits signed and unsigned integers."""
    kind = next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), None)
    return 1 if is_weak and kind == 2 else kind


def strong(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Convert an array to a dtype, as a strong type: a variable's type must not depend on the value that it is given."""
    if array.dtype == dtype and not getattr(array, "weak_type", False):
        return array
    return jax.lax.convert_element_type(array, dtype)


def as_array(leaf: Any, verb: str) -> jax.Array:
    """Turn a leaf into an array; refuse a leaf that cannot be combined over replicas."""
    check_leaf(leaf, verb)
    # `array` copies a host array, whose memory JAX would keep and the user may change.
    return jnp.array(leaf) if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)


def check_leaf(leaf: object, verb: str) -> None:
    """Refuse a leaf that cannot be combined over replicas."""
    kind = type(leaf).__name__
    if is_sparse(leaf):
        raise TypeError(f"{verb} got a {kind}, whose indices would be combined like its values. Make it dense: x.todense().")
    is_right = isinstance(leaf, jax.Array | bool | int | float | complex) or hasattr(leaf, "__jax_array__")
    if isinstance(leaf, np.ndarray | np.generic):
        is_right = is_numeric(leaf.dtype)
    if not is_right:
        raise TypeError(
            f"{verb} got {shown(leaf)} of type {kind}; expected arrays or numbers, in any nest of "
            "dicts, lists and tuples." + (call_it(leaf) or " Leave other values out of the tree.")
        )
    if isinstance(leaf, np.ndarray | np.generic):
        refuse_mask(leaf, lambda: f"the value given to {verb} is")
        check_range(np.asarray(leaf), lambda: f"the value given to {verb} holds")


_OURS = f"{__name__.partition('.')[0]}."


def is_wrapped(leaf: object) -> bool:
    """Tell whether we treat a pytree as one leaf: our variables and PerReplica values, and sparse arrays."""
    # Another library's wrapper of an array, such as `nnx.Param`, stays a node of its tree.
    return (hasattr(leaf, "__jax_array__") and type(leaf).__module__.startswith(_OURS)) or is_sparse(leaf)


def is_sparse(leaf: object) -> bool:
    """Tell whether a value is one of JAX's sparse arrays, which are pytrees of indices and values."""
    return type(leaf).__module__.startswith("jax.experimental.sparse")  # not imported here: it is large


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Tell whether devices can hold arrays of a numpy dtype."""
    return dtype.kind in "biufc" or (dtype.kind == "V" and jax.numpy.issubdtype(dtype, np.number))  # V: bfloat16 and its like


def check_losses(losses: jax.Array, what: str) -> None:
    """Refuse an array that is not one loss for each example; `what` begins the message."""
    if losses.ndim <= 1:
        return
    line = f"losses.mean(axis={1 if losses.ndim == 2 else tuple(range(1, losses.ndim))})"
    raise ValueError(
        f"{what} losses of shape {losses.shape}; expected one number for each example, shape {losses.shape[:1]}. A difference of "
        "shapes (n,) and (n, 1) has shape (n, n): give both one shape. Otherwise write one of these lines:\n"
        f"    {line:<40}  # the mean over each example's own elements\n"
        "    mr.losses.weighted_mean(losses, weights)  # the mean over all elements, such as tokens; weights of the same shape"
    )
