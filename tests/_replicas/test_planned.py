"""What stands for an array on devices that nobody has: its shape is known, and its values are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import TWO

import mirrored as mr
from mirrored._replicas import planned
from mirrored._replicas.planned import Planned


def stand_in(shape: tuple[int, ...] = (2, 3)) -> Planned:
    return planned.stand_in(jax.ShapeDtypeStruct(shape, jnp.float32), TWO._mesh.mirrored)


READINGS = {
    "float": lambda x: float(x), "int": lambda x: int(x), "bool": lambda x: bool(x), "numpy": lambda x: np.asarray(x),
    "print": lambda x: f"{x:.3f}", "item": lambda x: x.item(), "numpy of a sum": lambda x: np.asarray(x + 0),
    "index": lambda x: x[0], "iterate": lambda x: list(x), "device_get": lambda x: jax.device_get(x),
    "mean": lambda x: x.mean(),
    "shards": lambda x: x.addressable_shards, "tolist": lambda x: x.tolist(),
}  # fmt: skip


@pytest.mark.parametrize("reading", READINGS)
def test_every_reading_ends_the_plan(reading: str) -> None:
    with pytest.raises(mr.PlanError, match=r"reads the values of an array float32\[2, 3\].*print\(mr\.plan\(strategy\)\)"):
        READINGS[reading](stand_in())


def test_what_is_computed_of_shapes_is_a_shape() -> None:
    """As in an evaluation that adds up its losses."""
    x, total = stand_in(), 0.0
    for _ in range(2):
        total += x * 2
    assert isinstance(total, Planned) and total.shape == (2, 3) and total.dtype == jnp.float32 and total.sharding == x.sharding
    assert (x @ np.ones((3, 5), np.float32)).shape == (2, 5) and (1 - x).shape == (-x).shape == abs(x).shape == (2, 3)
    assert x.astype(jnp.bfloat16).nbytes == 12 and not hasattr(x, "no_such_name")
    assert (x > 1).dtype == bool and (x / x).shape == (2, 3) and (stand_in(()) + x).shape == (2, 3)
    with pytest.raises(ValueError, match="Incompatible shapes for broadcasting"):
        x + stand_in((5,))
    with pytest.raises(mr.PlanError, match=r"values of an array bool\[2, 3\]"):
        bool(x < 1)


def test_what_it_knows() -> None:
    array = stand_in()
    assert (array.shape, array.ndim, array.size, array.nbytes, array.dtype) == ((2, 3), 2, 6, 24, jnp.float32)
    assert not array.is_deleted() and array.block_until_ready() is array and array.sharding == TWO._mesh.mirrored
    assert array.astype(jnp.bfloat16).nbytes == 12
    assert not hasattr(array, "no_such_name")


@pytest.mark.parametrize("value", [3, 2.5, np.float64(1), np.ones(3, np.int64), jax.random.key(0), True])
def test_it_has_the_type_that_jax_would_give(value: object) -> None:
    array, real = planned.stand_in(value, None), jnp.asarray(value)
    assert (array.shape, array.dtype) == (real.shape, real.dtype)


def test_real_devices_are_not_planned() -> None:
    assert not planned.is_for_plan(TWO._mesh.stacked)
