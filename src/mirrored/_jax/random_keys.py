"""Random keys by rows: a replica draws for its rows what one device draws for them in the whole batch.

Threefry computes each element of a draw from the key and the element's number alone. So drawing some rows costs only these
rows, wherever they begin. JAX does so under `jax_threefry_partitionable`, its default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.extend.random
import jax.numpy as jnp
import numpy as np

THREEFRY, _TAG_OF_TYPE = "threefry2x32", "fry_by_rows"
#: Folded in before the number of a replica, so that no number that a user folds in makes the same key.
_TAG = 0x6D697272
#: A number that may be known only while a step runs.
Count = jax.Array | int
_TYPES = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


def are_counted(keys: jax.Array) -> bool:
    """Tell whether these keys draw each element from its number."""
    is_new = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    return is_new and jax.config.jax_threefry_partitionable and jax.random.key_impl(keys) in (THREEFRY, _BY_ROWS)


def draws_by_rows(equation: jax.extend.core.JaxprEqn) -> bool:
    """Tell whether a draw has a key by rows."""
    return (
        equation.primitive.name == "random_bits" and str(getattr(equation.invars[0].aval, "dtype", "")) == f"key<{_TAG_OF_TYPE}>"
    )


def by_rows(keys: jax.Array, before: Count, rows: Count, replica: Count, is_for_all: Count) -> jax.Array:
    """Make the keys of a replica that has `rows` rows, after `before` rows of other replicas.

    A draw whose first axis has a multiple of `rows` elements gets what these rows get in the whole batch. Other draws, and all
    draws with 0 rows, differ by replica. With `is_for_all`, draws of a shape `[1, 1, n, ...]` are the same on all replicas.
    """
    block = jnp.where(replica == 0, 0, jnp.uint32(1 << 31) | jnp.asarray(replica, jnp.uint32))
    place = jnp.stack([jnp.asarray(word, jnp.uint32) for word in (before, rows, block, is_for_all)])
    return jax.random.wrap_key_data(_joined(jax.random.key_data(keys)[..., :2], place), impl=_BY_ROWS)


def of_rows(keys: jax.Array, num_rows: int, before: Count) -> jax.Array:
    """Return the keys that `jax.random.split` gives to `num_rows` rows, after `before` other rows."""
    data, low = jax.random.key_data(keys), jax.lax.iota(jnp.uint32, num_rows) + jnp.asarray(before, jnp.uint32)
    none = low - low  # replicas of one device are a mapped axis, and threefry needs it in all or none of its arrays
    return jax.random.wrap_key_data(jnp.stack(_threefry(data[:, None] + none, none, low), -1), impl=THREEFRY)


def folded(keys: jax.Array, replica: Count) -> jax.Array:
    """Make keys of any kind differ by replica; the first replica keeps them as they are."""

    def fold(key: jax.Array) -> jax.Array:
        return jnp.where(replica == 0, key, jax.random.fold_in(jax.random.fold_in(key, _TAG), replica))

    num_axes_of_key = 0 if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else 1
    for _ in range(keys.ndim - num_axes_of_key):
        fold = jax.vmap(fold)
    return fold(keys)


def plain(keys: jax.Array) -> jax.Array:
    """Return keys without their place in the batch."""
    return _plain(jax.random.key_data(keys))


def _plain(data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data[..., :2], impl=THREEFRY)


def _joined(new: jax.Array, place: jax.Array) -> jax.Array:
    return jnp.concatenate([new, jnp.broadcast_to(place, (*new.shape[:-1], place.shape[-1]))], -1)


def _threefry(data: jax.Array, high: jax.Array, low: jax.Array) -> Sequence[jax.Array]:
    return jax.extend.random.threefry2x32_p.bind(data[0], data[1], high, low)  # type: ignore[no-any-return]


def _bits(data: jax.Array, bit_width: int, shape: Sequence[int]) -> jax.Array:
    """Draw the bits of the replica's rows; in a shape that is not by rows, draw bits that differ by replica."""
    before, rows, block, is_for_all = data[2:]
    size = math.prod(shape)
    length = shape[0] if shape else 0
    if size >> 32:  # more elements than numbers of 32 bits
        return jax.random.bits(folded(_plain(data), block), tuple(shape), _TYPES[bit_width])
    divisor = jnp.maximum(rows, 1)
    is_by_rows = (rows > 0) & (length % divisor == 0) & bool(shape)
    if len(shape) > 2 and shape[0] == shape[1] == 1:  # as Flax' attention draws a mask; a draw for one row seldom is so
        before = jnp.where(is_for_all == 0, before, 0)
        is_by_rows |= is_for_all > 0
    high, low = _product(before, np.uint32(size) // divisor)
    first = jnp.where(is_by_rows, low, 0)
    low = jnp.broadcast_to(first, shape)
    for axis in range(len(shape)):  # in the shape of the draw, as JAX does: on CPU a reshape would cost a fifth
        low += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(math.prod(shape[axis + 1 :]))
    high = jnp.where(is_by_rows, high, block) + (low < first).astype(jnp.uint32)
    high, low = _threefry(data, high, low)
    if bit_width == 64:
        return jax.lax.shift_left(high.astype(jnp.uint64), jnp.uint64(32)) | low.astype(jnp.uint64)
    return (high ^ low).astype(_TYPES[bit_width])


def _product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Multiply numbers of 32 bits; return the high and the low half of the 64 bits."""
    (a_high, a_low), (b_high, b_low) = ((x >> 16, x & 0xFFFF) for x in (a, b))
    first = a_high * b_low + (a_low * b_low >> 16)
    second = a_low * b_high + (first & 0xFFFF)
    return a_high * b_high + (first >> 16) + (second >> 16), a * b


#: A key by rows has six numbers: threefry's two, and `before`, `rows`, `block` and `is_for_all` of `by_rows`. The block is the
#: high half of the numbers of elements that are not by rows. The tag begins with JAX's tag of threefry, "fry".
_BY_ROWS: Any = jax.extend.random.define_prng_impl(
    key_shape=(6,),
    seed=lambda seed: _joined(jax.random.key_data(jax.random.key(seed, impl=THREEFRY)), jnp.zeros(4, jnp.uint32)),
    split=lambda data, shape: _joined(jax.random.key_data(jax.random.split(_plain(data), shape)), data[2:]),
    fold_in=lambda data, number: _joined(jax.random.key_data(jax.random.fold_in(_plain(data), number)), data[2:]),
    random_bits=_bits,
    name="threefry2x32_by_rows",
    tag=_TAG_OF_TYPE,
)
