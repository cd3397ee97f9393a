"""A checksum finds every changed word, and an exchange of words, in arrays of every dtype."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from mirrored._replicas.placement import checksum

DTYPES = ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "int4"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_changed_element_is_found(dtype: str) -> None:
    array = jnp.asarray(np.arange(12) % 2).astype(dtype).reshape(3, 4)
    for index in range(12):
        flat = array.reshape(-1)
        changed = flat.at[index].set((flat[index] == 0).astype(dtype)).reshape(3, 4)
        assert (checksum(changed)) != (checksum(array)), index
    assert (checksum(array)) == (checksum(jnp.array(array)))


@hypothesis.settings(derandomize=True, deadline=None, max_examples=60)
@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(0, 99), st.integers(0, 31))
def test_every_flipped_bit_is_found(seed: int, word: int, bit: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2**32, 100, dtype=np.uint32)
    flipped = words.copy()
    flipped[word] ^= np.uint32(1 << bit)
    assert (checksum(words)) != (checksum(flipped))


@hypothesis.settings(derandomize=True, deadline=None, max_examples=60)
@hypothesis.given(st.integers(0, 2**32 - 1), st.permutations(range(8)))
def test_an_exchange_of_words_is_found(seed: int, order: list[int]) -> None:
    words = np.random.default_rng(seed).integers(0, 2**32, 8, dtype=np.uint32)
    if (words[order] != words).any():
        assert (checksum(words)) != (checksum(words[order]))


def test_bits_count_not_values() -> None:
    assert (checksum(jnp.array([0.0]))) != (checksum(jnp.array([-0.0])))
    assert (checksum(jnp.array([jnp.nan]))) == (checksum(jnp.array([jnp.nan])))
    assert (checksum(jax.random.key(0))) != (checksum(jax.random.key(1)))
    assert checksum(jnp.zeros((0,))) == checksum(np.zeros((0,)))


def test_a_key_is_added_up_also_while_a_program_is_traced() -> None:
    key, seen = jax.random.key(3), []
    jax.jit(lambda x: (seen.append(checksum(key)), x)[1])(1.0)
    assert seen == [checksum(key)]
