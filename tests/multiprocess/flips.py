"""A bit that changes in the memory of one device, as of a broken one."""

import jax
import numpy as np

import mirrored as mr


def flip(variable: mr.Variable, copy: int = -1, word: int = 0, bit: int = 7) -> None:
    """Flip one bit of one of this process's copies of a variable, behind the library's back."""
    array = variable._array
    copies = {shard.device: np.array(shard.data) for shard in array.addressable_shards}
    list(copies.values())[copy].view(np.uint32).reshape(-1)[word] ^= np.uint32(1 << bit)
    placed = [jax.device_put(values, device) for device, values in copies.items()]
    variable._array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)
