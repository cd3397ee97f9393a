import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from parameters import nightly

from mirrored._options import Storage
from mirrored._replicas.division import Division, division_of, division_of_array, placement_of
from mirrored._replicas.mesh import make_mesh
from mirrored._replicas.platforms import PLATFORMS


def mesh_of(count, storage=Storage.PARTS):
    return make_mesh(jax.devices()[:count], storage=storage)


@pytest.mark.parametrize(
    ("count", "shape", "axis"),
    [
        (2, (256, 512), 0),
        (3, (256, 513), 1),  # which 3 divides
        (3, (256, 512), 1),  # the least padding
        (8, (24, 2048, 100), 1),  # a loop takes the rows of axis 0 one by one
        (2, (24, 999, 999), 1),
        (8, (3, 3, 64, 64), 2),
        (8, (512, 256, 3, 3), 1),
        (8, (8192, 1, 3, 3), 0),  # no other axis has as many elements as there are devices
        (1, (256, 512), None),
        (8, (256, 127), None),  # small
        (8, (), None),
    ],
)
def test_the_axis_of_a_division(count, shape, axis):
    division = division_of(mesh_of(count), shape, jnp.dtype("float32"))
    assert (division and division.axis) == axis


@pytest.mark.parametrize(("shape", "axis"), [((1009, 1024), 1), ((1009, 1016), 0), ((512, 1016), 0), ((4, 40000), 1)])
def test_the_last_axis_is_not_divided_into_parts_of_a_few_lanes(shape, axis, monkeypatch):
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["cpu"]._replace(has_lanes=True))
    division = division_of(mesh_of(8), shape, jnp.dtype("float32"))
    assert division.axis == axis and division.in_two


@pytest.mark.parametrize(
    ("dtype", "is_divided"), [("bfloat16", True), ("int32", True), ("complex64", False), ("bool", False), ("int4", False)]
)
def test_large_arrays_of_real_numbers_are_divided(dtype, is_divided):
    assert (division_of(mesh_of(2), (1024, 1024), jnp.dtype(dtype)) is not None) == is_divided
    assert division_of(mesh_of(2), (1024, 1024), jax.random.key(0).dtype) is None


def test_the_word_of_a_variable_counts_before_that_of_its_strategy():
    def of(storage, own=None):
        return division_of(mesh_of(2, storage), (1024, 1024), jnp.dtype("float32"), own)

    assert of(Storage.WHOLE) is None is of(Storage.PARTS, Storage.WHOLE)
    assert of(Storage.PARTS) == of(Storage.WHOLE, Storage.PARTS) == of(Storage.PARTS_OF_WORKER) == Division(0, 1024, 2)


def test_what_is_no_variable_is_divided_only_without_padding():
    assert division_of_array(mesh_of(3), (300, 300), jnp.dtype("float32")) == Division(0, 300, 3)
    assert division_of_array(mesh_of(3), (301, 301), jnp.dtype("float32")) is None


@pytest.mark.parametrize(
    "division",
    [Division(0, 16, 8), Division(1, 3, 8), Division(0, 7, 4, 2), *nightly(Division(1, 10, 8), Division(1, 10, 2, 4))],
    ids=str,
)
@pytest.mark.parametrize("in_two", [True, *nightly(False)])
def test_parts_are_gathered_and_summed_on_the_devices(division, in_two, monkeypatch):
    """Also in two rounds, as XLA on TPUs needs it."""
    monkeypatch.setattr("mirrored._replicas.division.MOST_AT_ONCE", 2)
    division = dataclasses.replace(division, in_two=in_two)
    mesh, shape = mesh_of(8), (division.length, 5) if division.axis == 0 else (6, division.length)
    whole = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    placement = placement_of(mesh, division)
    stored = jax.device_put(division.stored(jnp.asarray(whole)), placement)
    assert stored.shape == division.stored_shape(shape)
    assert stored.addressable_shards[0].data.shape == division.part_shape(shape)

    def body(part):
        gathered = division.gathered(part)
        own_sum = division.scattered_sum(gathered * (1 + jax.lax.axis_index("replica")))
        return gathered[None], division.own_part(gathered), own_sum

    out = (PartitionSpec("replica"), placement.spec, placement.spec)
    mapped = jax.shard_map(body, mesh=mesh.mesh, in_specs=placement.spec, out_specs=out, check_vma=False)
    copies, parts, sums = jax.jit(mapped)(stored)
    for copy in np.asarray(copies):
        np.testing.assert_array_equal(copy, whole)
    np.testing.assert_array_equal(parts, stored)
    np.testing.assert_array_equal(sums, 36 * np.asarray(stored))  # the padding stays zero
    np.testing.assert_array_equal(division.whole(stored), whole)
