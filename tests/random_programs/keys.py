"""Keys of JAX's usual generator as NumPy numbers: of 64 bits, so that a key is one element of an array, as in JAX."""

import math
from typing import Any

import jax
import numpy as np

KEY = np.dtype(np.uint64)
_TURNS = (13, 15, 26, 6), (17, 29, 16, 24)
_BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def dtype_in_numpy(dtype: Any) -> Any:
    """Return the type that stands for one of JAX's in NumPy; None for keys of another generator."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype
    return KEY if dtype.name == "key<fry>" and jax.config.jax_threefry_partitionable else None


def as_numbers(data: Any) -> Any:
    """Return keys of their data, whose last axis has two words."""
    return np.ascontiguousarray(data).view(KEY)[..., 0]


def data_of(keys: Any) -> Any:
    return np.array(keys, KEY, order="C")[..., None].view(np.uint32)


def as_jax(keys: Any) -> Any:
    return jax.random.wrap_key_data(data_of(keys), impl="threefry2x32")


def _hashed(keys: Any, high: Any, low: Any) -> Any:
    """Return the words that Threefry makes of a count's two words, on a last axis."""
    data = data_of(keys)
    first, second = data[..., 0], data[..., 1]
    words = first, second, first ^ second ^ np.uint32(0x1BD11BDA)
    x, y = np.asarray(high + words[0]), np.asarray(low + words[1])
    for i in range(5):
        for turn in _TURNS[i % 2]:
            x = x + y
            y = ((y << np.uint32(turn)) | (y >> np.uint32(32 - turn))) ^ x
        x, y = x + words[(i + 1) % 3], y + words[(i + 2) % 3] + np.uint32(i + 1)
    return np.stack([x, y], -1)


def _of_counts(keys: Any, shape: tuple[int, ...]) -> Any:
    counts = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    return _hashed(keys.reshape(keys.shape + (1,) * len(shape)), np.zeros_like(counts), counts)


def _random_bits(keys: Any, p: dict[str, Any]) -> Any:
    words = _of_counts(keys, p["shape"])
    if p["bit_width"] == 64:
        return words[..., 0].astype(np.uint64) << np.uint64(32) | words[..., 1]
    return (words[..., 0] ^ words[..., 1]).astype(_BITS[p["bit_width"]])


def _random_seed(seeds: Any, p: dict[str, Any]) -> Any:
    wide = seeds.astype(np.uint64) if seeds.dtype.itemsize > 4 else seeds.astype(np.uint32).astype(np.uint64)
    return as_numbers(np.stack([(wide >> np.uint64(32)).astype(np.uint32), wide.astype(np.uint32)], -1))


RULES = {
    "random_bits": _random_bits, "random_seed": _random_seed,
    "random_split": lambda keys, p: as_numbers(_of_counts(keys, p["shape"])),
    "random_fold_in": lambda keys, n, p: as_numbers(_hashed(keys, np.zeros_like(n), n)),
    "random_wrap": lambda data, p: as_numbers(data), "random_unwrap": lambda keys, p: data_of(keys),
}  # fmt: skip
