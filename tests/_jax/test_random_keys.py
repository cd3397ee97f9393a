"""What keys by rows take from JAX: how threefry numbers the elements of a draw, and keys of a kind of one's own."""

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np

from mirrored._jax import random_keys

KEY = jax.random.key(7)


def test_jax_numbers_elements_as_keys_by_rows_do() -> None:
    """Also far into a batch, where the numbers have more than 32 bits."""

    def draw(key: jax.Array) -> list[jax.Array]:
        return [jax.random.bits(key, (3, 2), f"uint{width}") for width in (8, 16, 32, 64)]

    def far(before: jax.Array) -> jax.Array:
        return jax.random.bits(random_keys.by_rows(KEY, before, 1, 1, False), (2, 3 << 12))[:, jnp.array([0, -1])]

    with jax.enable_x64(True):
        whole = jax.jit(draw)(KEY)
        of_row = lambda key: [jax.random.bits(key, (1, 2), x.dtype) for x in whole]  # noqa: E731
        own = jax.jit(lambda replica: of_row(random_keys.by_rows(KEY, replica, 1, replica, False)))
        for replica in range(3):  # which has one row
            for part, expected in zip(own(replica), whole, strict=True):
                np.testing.assert_array_equal(part[0], expected[replica])
    before, columns = 1_835_357_525, 3 << 12  # 32 bits overflow within the first row
    numbers = (2 * before + np.arange(2)[:, None]) * columns + np.array([0, columns - 1])
    high, low = (jnp.asarray(part.astype(np.uint32)) for part in (numbers >> 32, numbers & 0xFFFFFFFF))
    first, second = jax.random.key_data(KEY)
    expected = jnp.bitwise_xor(*jax.extend.random.threefry2x32_p.bind(first, second, high, low))
    np.testing.assert_array_equal(jax.jit(far)(jnp.uint32(before)), expected)


def test_only_threefry_counts() -> None:
    assert random_keys.are_counted(KEY) and random_keys.are_counted(random_keys.by_rows(KEY, 0, 1, 0, False))
    for key in (jax.random.PRNGKey(0), jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")):
        assert not random_keys.are_counted(key)
    with jax.threefry_partitionable(False):
        assert not random_keys.are_counted(KEY)
