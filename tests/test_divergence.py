"""Copies that differ are found on the devices, and named."""

import jax
import numpy as np
import pytest

import mirrored as mr
from mirrored import _divergence


def flip(variable: mr.Variable, replica: int, word: int = 0, bit: int = 0) -> None:
    """Flip one bit of one replica's real copy, behind the library's back."""
    array = variable._array
    shards = {shard.device: np.array(shard.data) for shard in array.addressable_shards}
    device = variable._mesh.devices[replica]
    shards[device].view(np.uint32).reshape(-1)[word] ^= np.uint32(1 << bit)
    arrays = [jax.device_put(shards[d], d) for d in variable._mesh.devices]
    variable._array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, arrays)


@pytest.mark.parametrize("replica", [0, 1, 2])
@pytest.mark.parametrize("bit", [0, 31])
def test_one_flipped_bit_is_found_and_named(strategy3, replica: int, bit: int) -> None:
    with strategy3.scope():
        good = mr.Variable(np.ones((4, 5), np.float32), name="good")
        bad = mr.Variable(np.ones((4, 5), np.float32), name="bad")
    strategy3.assert_mirrored()
    flip(bad, replica, word=13, bit=bit)
    with pytest.raises(mr.ReplicasDivergeError, match=rf"copies of variable 'bad' differ: replicas \[{replica}\] from replica"):
        strategy3.assert_mirrored()
    bad.assign(good.value)
    strategy3.assert_mirrored()


def test_of_two_that_differ_the_second_is_named(strategy2) -> None:
    with strategy2.scope():
        variable = mr.Variable(np.zeros(3, np.float32), name="two")
    flip(variable, 1)
    with pytest.raises(mr.ReplicasDivergeError, match=r"'two' differ: replicas \[1\] from replica 0"):
        strategy2.assert_mirrored()


def test_variables_of_one_name_are_not_mixed_up(strategy2) -> None:
    with strategy2.scope():
        pair = [mr.Variable(np.full(2, n, np.float32), name="same") for n in range(2)]
    strategy2.assert_mirrored()
    assert [v._number for v in pair] == sorted(v._number for v in pair)


def test_keys_and_small_dtypes_are_compared(strategy2) -> None:
    with strategy2.scope():
        kept = [mr.Variable(jax.random.key(1)), mr.Variable(np.array([True])), mr.Variable(np.int8(3))]
    strategy2.assert_mirrored()
    sums = np.asarray(_divergence.checksums(strategy2._mesh, kept))
    assert sums.shape == (2, 3) and (sums[0] == sums[1]).all()
