"""Makes mirrored values: the chief's version of a value goes to all replicas.

With one worker this is `jax.device_put`. With several, each worker makes the value separately, and a difference would go
unnoticed. So the chief sends its bits to all, and the checksums of all workers' values are compared: docs/design/workers.md.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import weakref
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .. import _process
from .._errors import ReplicasDivergeError, StrategyMismatchError
from .._text import numbered
from .._typing import Shape
from .._workers import joint_programs
from .._workers.progress import progress
from . import cross_replica, host_memory, in_flight
from .division import Division, placement_of
from .mesh import ReplicaMesh

_NAME = "sending values from the chief"
_CHECK = "comparing an array of all workers"
#: A function that raises, given the position of an array that differs and the workers whose values differ from the chief's.
OnDifference = Callable[[int, Sequence[int]], None]


def mirror(
    mesh: ReplicaMesh, arrays: Sequence[Any], on_difference: OnDifference | None = None, is_checked_late: bool = False
) -> list[jax.Array]:
    """Mirror arrays with the chief's values; return arrays that are already mirrored unchanged.

    All workers call this with equally many arrays, of the same shapes and dtypes. If their values differ, every worker calls
    `on_difference`; with `is_checked_late` up to two programs later, so that the devices do not wait for this process.
    """
    placed = list(arrays)
    missing = [i for i, array in enumerate(arrays) if not (isinstance(array, jax.Array) and array.sharding == mesh.mirrored)]
    if missing and mesh.is_alone:
        with jax.ensure_compile_time_eval():  # compute now, also inside a larger trace
            new = mesh.put([own_copy(arrays[i]) for i in missing], mesh.mirrored)
    else:
        for i in [i for i in missing if isinstance(arrays[i], jax.Array) and not arrays[i].is_fully_addressable]:
            placed[i] = _mirrored_again(mesh, arrays[i])
            missing.remove(i)
        own = [arrays[i] for i in missing]
        new = _from_chief(mesh, own, missing, on_difference, is_checked_late) if missing else []
    for i, array in zip(missing, new, strict=True):
        placed[i] = array
    return placed


def own_copy(array: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Return this worker's copy of an array that all workers hold whole; return any other value unchanged."""
    is_joint = isinstance(array, jax.Array) and not array.is_fully_addressable and array.is_fully_replicated
    return array.addressable_data(0) if is_joint else array  # pyrefly: ignore[missing-attribute]


def unshared(mesh: ReplicaMesh, arrays: Sequence[Any], others: Sequence[Any], is_moving: bool = False) -> list[Any]:
    """Return arrays any of which may be donated: copies of those given twice, closed over, or among `others`."""
    # A program that donates an array and has it twice may fail on some devices only: it takes the written variables with it, and
    # the next program may wait forever. A moved array shares the memory of the user's, which other arrays may share too.
    places_of = _memory_of if is_moving else lambda array: [id(array)]
    times = collections.Counter(place for array in (*arrays, *others) for place in places_of(array))
    is_shared = lambda a: any(times[place] > 1 for place in places_of(a)) or _key_of(mesh, a) in _process.constants  # noqa: E731
    return [mesh.fresh(array) if isinstance(array, jax.Array) and is_shared(array) else array for array in arrays]


def _memory_of(array: object) -> list[Hashable]:
    """Return the addresses of an array's memory on the devices; none of a host's array."""
    is_there = isinstance(array, jax.Array) and not array.is_deleted()
    shards = [shard for shard in array.addressable_shards if not shard.data.is_deleted()] if is_there else []
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards]


def shared_with_user(constants: Sequence[Any], placed: Sequence[object]) -> list[jax.Array]:
    """Return the parts of moved constants on the constants' own devices, where their memory is the user's too."""
    moved = [(a, to) for a, to in zip(constants, placed, strict=True) if a is not to and isinstance(a, jax.Array)]
    shards = [(a.devices(), shard) for a, to in moved for shard in getattr(to, "addressable_shards", ())]
    return [shard.data for devices, shard in shards if shard.device in devices]


def divide(mesh: ReplicaMesh, division: Division, array: jax.Array | np.ndarray) -> jax.Array:
    """Store an array in parts; all workers pass equal arrays. A device gets no more than its part of a host's array."""
    target = placement_of(mesh, division)
    if division.is_plain and isinstance(array, jax.Array) and array.sharding == target:
        return array
    if mesh.is_alone:
        with jax.ensure_compile_time_eval():
            return mesh.put(division.stored(own_copy(array)), target)
    return cross_replica.compiled(_stored, target, division)(array)


class Sliced(Protocol):
    """A host's array, or a reader of one, from which slices can be taken."""

    @property
    def shape(self) -> Shape: ...
    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray: ...


def divide_slices(mesh: ReplicaMesh, division: Division, host: Sliced) -> jax.Array:
    """Store a host's array in parts; read only the slices of this worker's devices, one after the other."""
    shape = tuple(host.shape)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        start = index[division.axis].start or 0
        first, last = division.range_of(start // division.part_length)
        own = np.asarray(host[(*index[: division.axis], slice(first, last), *index[division.axis + 1 :])])
        return division.with_padding(own)

    return jax.make_array_from_callback(division.stored_shape(shape), placement_of(mesh, division), part)


def join(mesh: ReplicaMesh, division: Division, stored: jax.Array) -> jax.Array:
    """Return a stored array's value: unchanged if that is one array that this process can read, else whole on each device."""
    if division.is_plain and mesh.is_alone:
        return stored
    with jax.ensure_compile_time_eval():
        return cross_replica.compiled(_joined, mesh.mirrored, division, mesh.mirrored)(stored)


def _stored(array: jax.Array, division: Division) -> jax.Array:
    return division.stored(array)


def _joined(stored: jax.Array, division: Division, everywhere: NamedSharding) -> jax.Array:
    """Join parts. They are brought to all devices first: XLA may join them by adding zeros, which turns -0.0 into 0.0."""
    return division.whole(jax.lax.with_sharding_constraint(stored, everywhere))


def check_later(mesh: ReplicaMesh, arrays: Sequence[Any], name_of: Callable[[int], str]) -> None:
    """Check that mirrored arrays have the same bits on all workers, at most two programs later; change no array."""
    # The user's own JAX code may have computed them from mirrored arrays and from a value that differs between workers.
    if mesh.is_alone:
        return
    known = {i: array for i, array in enumerate(arrays) if isinstance(array, jax.Array)}
    mirrored = {i: array for i, array in known.items() if not isinstance(array, jax.core.Tracer) and _is_whole(mesh, array)}
    if mirrored:
        kinds = ", ".join(f"{array.dtype}{list(array.shape)}" for array in mirrored.values())
        joint_programs.started(_CHECK, kinds, lambda: None)()
        in_flight.joined(list(mirrored.values())[-1], lambda _: _compare_bits(mirrored, name_of))


def mirror_constants(mesh: ReplicaMesh, constants: Sequence[Any], what: str) -> list[Any]:
    """Mirror the arrays that a function closes over, the same on all workers; leave tracers of a larger program as they are."""
    # All programs share one copy on a device. Several workers may have kept different constants, so they mirror all of them.
    known = [constant for constant in constants if not isinstance(constant, jax.core.Tracer)]
    check_later(mesh, known, lambda _: what)
    pairs = [_kept_or_own(mesh, constant) for constant in known]
    placed = mirror(mesh, [array for _, array in pairs], refuse_constant)
    kept = iter([_process.constants.setdefault(key, array) for (key, _), array in zip(pairs, placed, strict=True)])
    return [constant if isinstance(constant, jax.core.Tracer) else next(kept) for constant in constants]


def _kept_or_own(mesh: ReplicaMesh, constant: jax.Array | np.ndarray) -> tuple[Hashable, jax.Array | np.ndarray]:
    """Return a constant's key and the copy kept under the key; without a kept copy, an array to mirror."""
    key = _key_of(mesh, constant)
    if mesh.is_alone and (kept := _process.constants.get(key)) is not None:
        return key, kept
    if not isinstance(constant, jax.Array):  # copied, because its owner may change it; all CPU devices share the copy
        own = host_memory.empty_rows(1, constant.shape, constant.dtype)[0, ...]
        own[...] = constant
        return _key_of(mesh, own), own
    weakref.finalize(constant, _process.constants.pop, key, None)  # before another array can get its `id`
    if constant.sharding == mesh.mirrored:  # keep its memory, not the user's object: programs end with that
        copies = [shard.data for shard in constant.addressable_shards]
        constant = jax.make_array_from_single_device_arrays(constant.shape, mesh.mirrored, copies)
    return key, constant


def _key_of(mesh: ReplicaMesh, constant: jax.Array | np.ndarray) -> Hashable:
    if isinstance(constant, jax.Array):
        return (mesh, id(constant))
    content = hashlib.sha256(np.ascontiguousarray(constant).reshape(-1).view(np.uint8))
    return (mesh, str(jax.typeof(constant)), content.digest())


def _compare_bits(arrays: Mapping[int, jax.Array], name_of: Callable[[int], str]) -> None:
    # By now the user may have donated an array; then all workers have.
    rows = joint_programs.exchange(_CHECK, [0 if array.is_deleted() else checksum(array) for array in arrays.values()])
    for column, index in enumerate(arrays):
        if workers := [worker for worker, row in enumerate(rows) if row[column] != rows[0][column]]:
            raise ReplicasDivergeError(
                f"{name_of(index)} is an array on all workers, but {numbered(workers)} computed other values than worker 0: "
                "outside of a step, of something that is not the same on all workers, such as a loss or a random number. Make "
                "that one value first: strategy.reduce('mean', strategy.distribute_values_from_function(lambda context: value))."
            )


def stack(mesh: ReplicaMesh, rows: np.ndarray) -> jax.Array:
    """Make a stacked array from all workers' rows; a worker passes a row for each of its replicas, or of its devices."""
    if mesh.is_alone:
        return mesh.put(rows, mesh.stacked)
    num_rows = len(rows) // len(mesh.local_devices) * len(mesh.devices)  # all workers have equally many devices
    return jax.make_array_from_process_local_data(mesh.stacked, rows, (num_rows, *rows.shape[1:]))


def _mirrored_again(mesh: ReplicaMesh, array: jax.Array) -> jax.Array:
    """Mirror an array that has another placement, for example from the user's own JAX code; all workers call this."""
    if array.sharding.device_set != mesh.mirrored.device_set:
        raise StrategyMismatchError(
            f"an array of shape {array.shape} lies on devices of several workers which are not those of {mesh}. Bring it to this "
            "strategy's devices first, or pass a numpy array."
        )
    is_near = array.sharding.memory_kind == mesh.mirrored.memory_kind
    if is_near and _is_whole(mesh, array):  # the same placement under another name, such as P(None, None)
        copies = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, mesh.mirrored, copies)
    return cross_replica.compiled(_mirror_from, mesh.mirrored, array.sharding)(array)


def _mirror_from(array: jax.Array, placement: jax.sharding.Sharding) -> jax.Array:
    return array  # the program places its result


def _is_whole(mesh: ReplicaMesh, array: jax.Array) -> bool:
    return array.sharding.device_set == mesh.mirrored.device_set and array.is_fully_replicated


def _from_chief(
    mesh: ReplicaMesh, arrays: list[Any], positions: list[int], on_difference: OnDifference | None, is_checked_late: bool
) -> list[jax.Array]:
    plain = list(map(_without_keys, arrays))
    kinds = tuple((tuple(array.shape), jax.dtypes.canonicalize_dtype(array.dtype)) for array in plain)
    hosts = [np.asarray(array).astype(dtype, copy=False) for array, (_, dtype) in zip(plain, kinds, strict=True)]
    sums = np.array([checksum(host) for host in hosts], np.uint32)
    rows = [stack(mesh, np.stack([bits] * len(mesh.local_devices))) for bits in (*map(_bits, hosts), sums)]
    *values, sums = _program(mesh, kinds)(rows)
    check = None
    if on_difference is not None:
        check = functools.partial(_compare, mesh, positions, on_difference)
    in_flight.joined(sums, check)
    if check is not None and not is_checked_late:
        in_flight.finish()
    with jax.ensure_compile_time_eval():
        return [
            jax.random.wrap_key_data(value, impl=jax.random.key_impl(array)) if array is not data else value
            for value, array, data in zip(values, arrays, plain, strict=True)
        ]


@functools.lru_cache(maxsize=1024)
def _program(mesh: ReplicaMesh, kinds: tuple[tuple[Shape, Any], ...]) -> Callable[..., Any]:
    """Make the program that broadcasts the chief's bits and gathers all checksums; compile it now, so that a trace can run it."""
    text = "\n".join(f"{dtype}{list(shape)}" for shape, dtype in kinds)
    joint_programs.agree(_NAME, text)

    def body(rows: list[jax.Array]) -> list[jax.Array]:
        *own, sums = [row[0] for row in rows]
        is_chief = jax.lax.axis_index(mesh.axis) == 0
        first = jax.lax.psum([jnp.where(is_chief, bits, jnp.zeros_like(bits)) for bits in own], mesh.axis)
        return [*(_array_of(bits, *kind) for bits, kind in zip(first, kinds, strict=True)), jax.lax.all_gather(sums, mesh.axis)]

    specs = {"in_specs": PartitionSpec(mesh.axis), "out_specs": PartitionSpec(), "check_vma": False}
    sent = [*(_bits(np.empty(*kind)) for kind in kinds), np.empty(len(kinds), np.uint32)]
    rows = [jax.ShapeDtypeStruct((len(mesh.devices), *row.shape), row.dtype, sharding=mesh.stacked) for row in sent]
    with progress.phase(f"compiling {_NAME}", is_patient=True):
        program = jax.jit(jax.shard_map(body, mesh=mesh.mesh, **specs)).lower(rows).compile()
    return joint_programs.started(_NAME, text, program)


def _compare(mesh: ReplicaMesh, positions: list[int], on_difference: OnDifference, sums: jax.Array) -> None:
    """Call `on_difference` for each array that differs; `sums` has one row of checksums for each device."""
    rows = np.asarray(sums)
    differ = rows != rows[0]
    for column, position in enumerate(positions):
        if differ[:, column].any():
            owners = [mesh.devices[row].process_index for row in np.flatnonzero(differ[:, column])]
            on_difference(position, sorted(set(owners)))


def _bits(host: np.ndarray) -> np.ndarray:
    """Return an array's bits as integers, to which zeros add exactly: -0.0 + 0.0 would be 0.0."""
    return np.ascontiguousarray(host).reshape(-1).view(np.uint32 if host.itemsize % 4 == 0 else np.uint8)


def _array_of(bits: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Return the array from which `_bits` made these bits."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _array_of(bits, (*shape, 2), np.finfo(dtype).dtype)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    if jax.dtypes.itemsize_bits(dtype) < 8:  # numpy stores each in a byte
        bits = bits.astype(f"uint{jax.dtypes.itemsize_bits(dtype)}")
    return bits.view(dtype).reshape(shape)


def refuse_argument(what: str, position: int, workers: Sequence[int]) -> NoReturn:
    """Refuse an argument that goes whole to every replica but differs between workers."""
    raise ReplicasDivergeError(
        f"{what}, is not the same on all workers: {numbered(workers)} gave other values than worker 0. A plain array goes "
        "whole to every replica, so it must be one value. Rows of a batch are shared out by strategy.distribute_dataset(...); "
        "one value for each replica is made by strategy.distribute_values_from_function(...)."
    )


def refuse_constant(position: int, workers: Sequence[int]) -> NoReturn:
    """Refuse an array that a step closes over but that differs between workers."""
    raise ReplicasDivergeError(
        f"an array that the step closes over (number {position} of them) is not the same on all workers: {numbered(workers)} "
        "made other values than worker 0. Seed what makes it alike on all workers, or keep it in a mr.Variable, which "
        "starts with the chief's value everywhere."
    )


def checksum(array: np.ndarray | jax.Array) -> int:
    """Return the CRC-32 of an array's bits: it finds every change within 32 bits, and misses one in 2**32 other changes."""
    # On the host: XLA took 45 s to compile it for 200 variables of different shapes.
    return zlib.crc32(np.ascontiguousarray(_without_keys(array)).reshape(-1).view(np.uint8).data)


def _without_keys(array: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Return the data of random keys; return any other array unchanged."""
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array
    with jax.ensure_compile_time_eval():  # now, also while a larger program is traced
        return jax.random.key_data(array)
