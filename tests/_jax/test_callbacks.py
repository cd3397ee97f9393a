"""JAX keeps the error of an ordered callback, until it is told to forget it."""

import jax
import numpy as np
import pytest

from mirrored._jax import callbacks


def test_an_error_is_forgotten() -> None:
    is_failing = True

    def callback() -> None:
        if is_failing:
            raise ZeroDivisionError("in the callback")

    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    placed = jax.device_put(np.ones(2, np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    call = jax.jit(lambda x: (jax.experimental.io_callback(callback, None, ordered=True), x)[1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="in the callback"):
        jax.block_until_ready(call(placed))
        jax.effects_barrier()
    callbacks.forget_failed()
    is_failing = False
    assert jax.block_until_ready(call(placed)).tolist() == [1, 1]
    jax.effects_barrier()
