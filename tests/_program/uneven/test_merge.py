"""What is carried from one part of an uneven step to the next arrives as it was."""

import jax
import jax.numpy as jnp
import numpy as np

from mirrored._program.uneven.merge import Slots


def carried(*rows):
    """Pack and unpack values of several programs; return what each gets back."""
    slots = Slots([[jax.typeof(value) for value in values] for values in rows])
    packed = [slots.pack(program, values) for program, values in enumerate(rows)]
    shapes = {tuple((array.shape, array.dtype) for array in arrays) for arrays in packed}
    assert len(shapes) == 1, "a switch needs one type from all programs"
    return [slots.unpack(program, arrays) for program, arrays in enumerate(packed)]


def assert_same(before, after):
    for a, b in zip(before, after, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


CARRIED = [
    ([jnp.arange(6.0).reshape(3, 2)], [jnp.arange(4.0).reshape(2, 2)]),
    ([jnp.ones(3), jnp.arange(2), jnp.arange(4.0), jnp.zeros(5)], [jnp.zeros(3)]),
    ([jnp.ones((0, 4)), jnp.array(True)], [jnp.ones((5, 4)), jnp.array(False)], []),
    ([jnp.float32(1), jnp.ones(2, jnp.bfloat16), jnp.ones(3)], [jnp.ones(7, jnp.bfloat16), jnp.ones((2, 2))]),
    ([jax.random.split(jax.random.key(0), 3)], [jax.random.split(jax.random.key(1, impl="rbg"), 2)]),
    ([jax.random.key(0), jnp.ones(2, jnp.uint32)], [jax.random.split(jax.random.key(1), 2)]),
]


def test_values_arrive_as_they_were():
    for rows in CARRIED:
        for before, after in zip(rows, carried(*rows), strict=True):
            assert_same(before, after)


def test_values_of_one_shape_are_not_flattened():
    slots = Slots([[jax.typeof(jnp.ones((2, 3)))], [jax.typeof(jnp.ones((2, 3)))]])
    assert [array.shape for array in slots.pack(0, [jnp.ones((2, 3))])] == [(2, 3)]
