"""How to tell whether two copies of an array have the same bits, from a few bytes of each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Odd, so that multiplying by it loses no bit; its powers differ at each position. From Knuth's multiplicative hashing.
_FACTOR = np.uint32(2654435761)


def checksum(array: jax.Array) -> jax.Array:
    """Return a `uint32` that differs whenever one word of an array does, and changes when words are exchanged.

    Each word is mixed with its position before the words are added up: a sum alone is blind to an exchange. One changed
    word always changes the result, because the mixing is a bijection of the word; several changed words go unseen
    once in 2**32.

    Args:
        array: any shape and dtype, keys of random numbers included.
    """
    words = to_words(array)
    position = jax.lax.iota(jnp.uint32, words.size) * _FACTOR + np.uint32(1)
    mixed = (words ^ position) * _FACTOR
    mixed = (mixed ^ (mixed >> 15)) * _FACTOR
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)


def to_words(array: jax.Array) -> jax.Array:
    """Return an array's bits as a flat array of `uint32`; small elements become one word each."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    flat = array.reshape(-1)
    if flat.dtype == jnp.bool_:
        return flat.astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(flat, _word_of(flat.dtype))  # 64 bits become two words
    return bits.reshape(-1).astype(jnp.uint32)


def _word_of(dtype: Any) -> Any:
    bits = jax.dtypes.itemsize_bits(dtype)
    return {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
