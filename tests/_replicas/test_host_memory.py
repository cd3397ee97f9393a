"""Values go to CPU devices, and come back, with one copy, and nobody can change them afterwards."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from strategies import variable

import mirrored as mr
from mirrored._replicas import host_memory
from mirrored._replicas.per_replica import stack_of
from mirrored.testing import count_programs


def address(array: Any) -> int:
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize("shape, dtype", [((17, 1023), "float32"), ((65537,), "uint8"), ((9, 9001), ml_dtypes.bfloat16)])
def test_each_row_of_large_memory_can_be_kept(shape: tuple[int, ...], dtype: Any) -> None:
    rows = host_memory.empty_rows(3, shape, dtype)
    assert (rows.shape, rows.dtype) == ((3, *shape), dtype) and all(row.ctypes.data % 64 == 0 for row in rows)
    rows[...] = 1
    for row in rows:
        assert address(jax.device_put(row)) == row.ctypes.data, "the device has this memory"
    assert all(row.flags.c_contiguous for row in rows)
    for small in ((), (0,), (3, 0), (7,)):
        assert host_memory.empty_rows(2, small, dtype).shape == (2, *small)
    assert host_memory.empty_rows(0, shape, dtype).shape == (0, *shape)


def large(strategy: mr.Strategy, last: int = 0) -> tuple[Any, list[np.ndarray]]:
    """Return a PerReplica of more than 1 MiB, of which the last replica has so many columns less, and its values."""
    count = strategy.num_replicas_in_sync
    rows = [np.arange(i, 300_000 + i, dtype=np.float32).reshape(3, -1) for i in range(count)]
    rows[-1] = rows[-1][:, : rows[-1].shape[1] - last]
    return strategy.distribute_values_from_function(lambda context: rows[context.replica_id_in_sync_group]), rows


@pytest.mark.parametrize("last", [0, 5])
def test_a_large_gather_on_this_machine_is_no_program(last: int) -> None:
    for names, count in ((["cpu:0", "cpu:1", "cpu:2"], 3), (["cpu:0", "cpu:1"], 4), (["cpu:0"], 1)):
        strategy = mr.MirroredStrategy(names, num_replicas=count)
        value, rows = large(strategy, last)
        if count > 1 and not last:
            rows[0][:] = -1  # the user's own, later
            rows[0] = np.arange(300_000, dtype=np.float32).reshape(3, -1)
        with count_programs() as counted:
            gathered = strategy.gather(value, axis=1)
        assert not counted.others and gathered.sharding == strategy._mesh.mirrored
        np.testing.assert_array_equal(gathered, np.concatenate(rows, axis=1))
        in_trace = mr.function(lambda value, strategy=strategy: strategy.gather(value, axis=1))(value)
        np.testing.assert_array_equal(gathered, in_trace)


def test_devices_that_share_memory_do_not_write_into_it(strategy3: mr.Strategy) -> None:
    value, rows = large(strategy3)
    gathered, expected = strategy3.gather(value, 0), np.concatenate(rows)
    assert len({address(shard.data) for shard in gathered.addressable_shards}) == 1
    own = variable(gathered, strategy3)
    strategy3.run(lambda: own.assign_add(jnp.ones_like(own.value)))
    np.testing.assert_array_equal(gathered, expected)
    added = jax.jit(lambda x: x + 1, donate_argnums=0)(gathered)
    for array in (added, own.value):
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected + 1)


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_rows_in_memory_may_change_after_the_batch(strategy2: mr.Strategy, is_shuffled: bool) -> None:
    rows = np.arange(128.0 * 1024).reshape(128, 1024)
    for dtype in ("float64", "float32", ">f4"):  # float64 is another dtype on the devices
        array = rows.astype(dtype)
        dataset = strategy2.make_numpy_dataset(array)
        dataset = (dataset.shuffle(seed=0) if is_shuffled else dataset).batch(64)
        batches = list(strategy2.distribute_dataset(dataset))
        value = strategy2.distribute_values_from_function(lambda ctx, array=array: array[: 100 + ctx.replica_id_in_sync_group])
        array[:] = -1
        found = np.concatenate([value for batch in batches for value in batch.values])
        assert is_shuffled != np.array_equal(found, rows)
        np.testing.assert_array_equal(np.sort(found, axis=0), rows)
        assert [np.array_equal(own, rows[: len(own)]) for own in value.values] == [True, True] and value.dtype == jnp.float32
        assert not np.asarray(stack_of(value))[0, 100:].any(), "zeros behind the real rows"
