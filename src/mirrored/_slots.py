"""Carry values of different shapes in arrays of one shape, as the branches of a switch must return them."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._replicas.collectives import pad_to
from ._typing import Shape


class Slots:
    """Carry values of several kinds of replicas from one part of a program to a later one, in common arrays.

    The i-th value of a dtype of each kind travels in the i-th array of that dtype: as it is when all have
    one shape, else flat and padded.

    Args:
        avals: for each kind, the shapes and dtypes of its values.
    """

    def __init__(self, avals: Sequence[Sequence[Any]]) -> None:
        self._avals = avals
        self._plain = [[jax.eval_shape(functools.partial(_plain, aval=aval), aval) for aval in own] for own in avals]
        self._keys = [_numbered([plain.dtype for plain in own]) for own in self._plain]
        shapes: dict[Any, set[Shape]] = collections.defaultdict(set)
        for key, plain in zip(itertools.chain(*self._keys), itertools.chain(*self._plain), strict=True):
            shapes[key].add(plain.shape)
        self._shapes = {key: own.pop() if len(own) == 1 else (max(map(math.prod, own)),) for key, own in shapes.items()}

    def pack(self, kind: int, values: Sequence[Any]) -> list[jax.Array]:
        """Return all common arrays, with one kind's values in its own and zeros in the rest."""
        own = {key: _plain(v, aval) for key, v, aval in zip(self._keys[kind], values, self._avals[kind], strict=True)}
        return [_filled(own.get(key), key[0], shape) for key, shape in self._shapes.items()]

    def unpack(self, kind: int, packed: Sequence[jax.Array]) -> list[Any]:
        """Return one kind's values."""
        arrays = dict(zip(self._shapes, packed, strict=True))
        own = zip(self._keys[kind], self._plain[kind], self._avals[kind], strict=True)
        return [_restored(_cut(arrays[key], plain.shape), aval) for key, plain, aval in own]


def _filled(plain: jax.Array | None, dtype: Any, shape: Shape) -> jax.Array:
    if plain is None:
        return jnp.zeros(shape, dtype)
    return plain if plain.shape == shape else pad_to(plain.reshape(-1), shape)


def _cut(array: jax.Array, shape: Shape) -> jax.Array:
    return array if array.shape == shape else array[: math.prod(shape)].reshape(shape)


def _numbered(dtypes: Sequence[Any]) -> list[tuple[Any, int]]:
    """Pair each dtype with how often it came before."""
    counts: collections.Counter[Any] = collections.Counter()
    keys = []
    for dtype in dtypes:
        keys.append((dtype, counts[dtype]))
        counts[dtype] += 1
    return keys


def padded(array: Any, aval: Any, shape: Shape) -> jax.Array:
    """Return a value as an array of exactly the shape, with zeros behind the real rows, as a switch must return it."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return pad_to(array if is_key else _plain(array, aval), shape)


def _plain(array: Any, aval: Any) -> jax.Array:
    """Turn a value into an array that can be padded: random keys into numbers, weak types into strong ones."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    return jax.lax.convert_element_type(array, aval.dtype)


def _restored(plain: jax.Array, aval: Any) -> jax.Array:
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return plain
    impl: list[Any] = []
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.random.wrap_key_data(plain, impl=impl[0])
