"""Divides arrays that are the same on every replica into parts, one on each device: along which axis, and with which padding.

An array in parts is still one value: a device stores its part only, and every operation that needs the whole array gathers it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._options import Storage
from .._typing import REPLICA_AXIS, Shape
from .mesh import ReplicaMesh
from .platforms import platform_of

#: Smaller arrays stay whole: a collective for each would cost more time than their bytes are worth.
LEAST_BYTES = 128 * 1024
#: So many numbers of the last axis lie together, on platforms that have lanes.
LANES = 128
#: The most devices among which a sum is scattered in one round, on platforms where two are better.
MOST_AT_ONCE = 8


class Shaped(Protocol):
    """Anything with a shape and a dtype: an array or a stand-in for one."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


@dataclasses.dataclass(frozen=True)
class Division:
    """The division of an array along `axis`, which has `length` elements, into `num_parts` equal parts.

    Behind the last element is padding, zeros until a program computes there. There are `num_copies` of each part: device i has
    part `i % num_parts`. If `in_two`, sums are scattered in two rounds.
    """

    axis: int
    length: int
    num_parts: int
    num_copies: int = 1
    in_two: bool = dataclasses.field(default=False, compare=False)

    def __str__(self) -> str:
        words = f"in {self.num_parts} parts along axis {self.axis}"
        if self.is_padded:
            words += f", padded from {self.length} to {self.num_parts * self.part_length}"
        if self.num_copies > 1:
            words += f", {self.num_copies} copies of each"
        return words

    @property
    def part_length(self) -> int:
        """The length of a part along the axis, padding included."""
        return -(-self.length // self.num_parts)

    @property
    def is_padded(self) -> bool:
        """Whether zeros pad the last parts."""
        return self.length % self.num_parts > 0

    @property
    def is_plain(self) -> bool:
        """Whether the stored array has the shape of the whole one, so that JAX takes it for the value."""
        return self.num_copies == 1 and not self.is_padded

    def part_shape(self, shape: Shape) -> Shape:
        """Return the shape of one part, given the whole array's."""
        return (*shape[: self.axis], self.part_length, *shape[self.axis + 1 :])

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the stored array's shape, given the whole array's: all parts and copies are concatenated along the axis."""
        count = self.num_copies * self.num_parts
        return (*shape[: self.axis], count * self.part_length, *shape[self.axis + 1 :])

    def stored(self, whole: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> Any:
        """Return a whole array, or the stand-in for one, in its stored form: all its parts and copies."""
        if isinstance(whole, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.stored_shape(whole.shape), whole.dtype)
        padded = self._padded(whole)
        if self.num_copies == 1:
            return padded
        return jnp.concatenate([padded] * self.num_copies, self.axis)

    def whole(self, stored: jax.Array) -> jax.Array:
        """Return the whole array, given the stored one or all parts: remove padding and further copies."""
        if stored.shape[self.axis] == self.length:
            return stored
        return jax.lax.slice_in_dim(stored, 0, self.length, axis=self.axis)

    def range_of(self, device: int) -> tuple[int, int]:
        """Return where a device's part begins and ends along the axis of the whole array."""
        start = device % self.num_parts * self.part_length
        return min(start, self.length), min(start + self.part_length, self.length)

    def without_padding(self, part: np.ndarray, device: int) -> np.ndarray:
        """Return a device's part without its padding."""
        start, end = self.range_of(device)
        return part[(*[slice(None)] * self.axis, slice(end - start))]

    def with_padding(self, part: np.ndarray) -> np.ndarray:
        """Return a device's part with its padding."""
        return self._up_to(self.part_length, part)

    def _padded(self, whole: jax.Array | np.ndarray) -> Any:
        return self._up_to(self.num_parts * self.part_length, whole)

    def _up_to(self, length: int, array: jax.Array | np.ndarray) -> Any:
        if array.shape[self.axis] == length:
            return array
        widths = [(0, 0)] * array.ndim
        widths[self.axis] = (0, length - array.shape[self.axis])
        if isinstance(array, np.ndarray):
            return np.pad(array, widths)
        return jnp.pad(array, widths)

    @property
    def _groups(self) -> list[list[int]] | None:
        """The groups of devices that together have each part once; None: all devices are one group."""
        if self.num_copies == 1:
            return None
        ids = range(self.num_copies * self.num_parts)
        return [list(ids[k : k + self.num_parts]) for k in ids[:: self.num_parts]]

    # -- inside a step, on each device; `name` is that of the mesh's axis

    def gathered(self, part: jax.Array, name: str = REPLICA_AXIS) -> jax.Array:
        """Return the whole array, gathered from all devices' parts."""
        groups = self._groups
        return self.whole(jax.lax.all_gather(part, name, axis=self.axis, tiled=True, axis_index_groups=groups))

    def begin(self, name: str = REPLICA_AXIS) -> jax.Array:
        """Return where this device's part begins along the axis of the whole array."""
        return jax.lax.axis_index(name) % self.num_parts * self.part_length

    def own_part(self, whole: jax.Array, name: str = REPLICA_AXIS) -> jax.Array:
        """Return this device's part of a whole array."""
        return jax.lax.dynamic_slice_in_dim(self._padded(whole), self.begin(name), self.part_length, self.axis)

    def scattered_sum(self, whole: jax.Array, name: str = REPLICA_AXIS) -> jax.Array:
        """Return this device's part of the sum of all devices' arrays."""
        part = self._padded(whole)
        for groups in self._rounds:
            part = jax.lax.psum_scatter(part, name, scatter_dimension=self.axis, tiled=True, axis_index_groups=groups)
        if self._groups is None:
            return part
        return jax.lax.psum(part, name, axis_index_groups=list(map(list, zip(*self._groups, strict=True))))

    @property
    def _rounds(self) -> list[Any]:
        """The groups of devices among which a sum is scattered, round by round."""
        near = next(k for k in range(1, self.num_parts + 1) if self.num_parts % k == 0 and k**2 >= self.num_parts)
        if not self.in_two or self.num_parts <= MOST_AT_ONCE or near == self.num_parts:
            return [self._groups]
        ids = np.arange(self.num_copies * self.num_parts).reshape(self.num_copies, -1, near)
        far = ids.swapaxes(1, 2).reshape(-1, ids.shape[1])  # first, so that each gets parts that are neighbours
        return [far.tolist(), ids.reshape(-1, near).tolist()]


def division_of(mesh: ReplicaMesh, shape: Shape, dtype: np.dtype[Any], storage: Storage | None = None) -> Division | None:
    """Return how a variable of a shape and dtype is divided, by its own `storage` or the mesh's; None: each device has it all."""
    if storage is None:
        storage = mesh.storage
    if storage is Storage.WHOLE:
        return None
    num_copies = _num_workers(mesh) if storage is Storage.PARTS_OF_WORKER else 1
    has_lanes = platform_of(mesh.mesh).has_lanes
    return _division(tuple(shape), dtype, len(mesh.devices) // num_copies, num_copies, has_lanes, LEAST_BYTES)


def _num_workers(mesh: ReplicaMesh) -> int:
    return len({device.process_index for device in mesh.devices})


@functools.lru_cache(maxsize=4096)
def _division(shape: Shape, dtype: np.dtype[Any], num_parts: int, num_copies: int, has_lanes: bool, _: int) -> Division | None:
    if num_parts == 1 or not is_divisible(shape, dtype):
        return None

    def cost(axis: int) -> tuple[bool, bool, bool, float]:
        length = shape[axis]
        is_narrow = has_lanes and axis == len(shape) - 1 and length <= (LANES - 1) * num_parts
        # The first of three axes or more counts layers, and a loop over layers takes them one by one: rather another is divided.
        return length <= num_parts, axis == 0 and len(shape) > 2, is_narrow, -length % num_parts / length

    axis = min((k for k in range(len(shape)) if shape[k] > 1), key=cost)
    return Division(axis, shape[axis], num_parts, num_copies, has_lanes)


def is_divisible(shape: Shape, dtype: np.dtype[Any]) -> bool:
    """Tell whether arrays of a shape and dtype are divided: they must be large and have real numbers."""
    # XLA on CPU cannot scatter complex numbers; random keys and numbers of a few bits are small.
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer)) or jax.dtypes.itemsize_bits(dtype) < 8:
        return False
    return math.prod(shape) * dtype.itemsize >= LEAST_BYTES


def division_of_array(mesh: ReplicaMesh, shape: Shape, dtype: np.dtype[Any]) -> Division | None:
    """Return how an array that is no variable's, such as a step's result, is divided; None if it would need padding."""
    division = division_of(mesh, shape, dtype)
    # One that is divided into rows of one element looks like an array of all replicas' values, and stays whole.
    if division is None or not division.is_plain or (division.axis, division.length) == (0, mesh.num_replicas):
        return None
    return division


def division_in(array: jax.Array) -> Division | None:
    """Return how an existing array is divided among devices; None if it is whole, or divided in another way."""
    placement = array.sharding
    if not isinstance(placement, NamedSharding) or placement.is_fully_replicated or not is_divisible(array.shape, array.dtype):
        return None
    if placement.mesh.axis_names != (REPLICA_AXIS,):
        return None
    axis = next(axis for axis, name in enumerate(placement.spec) if name is not None)
    return Division(axis, array.shape[axis], placement.num_devices)


def placement_of_array(mesh: ReplicaMesh, array: Shaped) -> NamedSharding:
    """Return the placement of a mirrored array that is no variable's; a stand-in for the array is enough."""
    return placement_of(mesh, division_of_array(mesh, array.shape, array.dtype))


def placement_of(mesh: ReplicaMesh, division: Division | None) -> NamedSharding:
    """Return the placement of a stored value that is the same on every replica."""
    return mesh.mirrored if division is None else _placement(mesh, division.axis)


@functools.lru_cache(maxsize=1024)
def _placement(mesh: ReplicaMesh, axis: int) -> NamedSharding:
    return NamedSharding(mesh.mesh, PartitionSpec(*[None] * axis, mesh.axis))
