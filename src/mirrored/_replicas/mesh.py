"""Chooses the replicas' devices: parses their names, starts the backend, and makes the mesh with one axis."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _env, _process
from .._errors import ClusterConfigError, DeviceError
from .._jax import distributed, interrupts, topologies
from .._options import Storage
from .._text import counted, shown
from .._typing import DEVICE_AXIS, REPLICA_AXIS, ArrayLike, PyTree
from .._workers import verdict
from . import planned

_DEVICE_NAME = re.compile(r"/?(?:device:)?(\w+):(\d+)", re.IGNORECASE | re.ASCII)
_logger = logging.getLogger("mirrored")
#: A file that exists where NVIDIA's driver is, also in a container with a GPU.
_NVIDIA_DRIVER = "/proc/driver/nvidia/version"
#: The most virtual CPU devices that a strategy makes: each takes threads, and a slip such as "cpu:88888" would take all.
MAX_CPU_DEVICES = 1024
#: The name of the mesh's axis when each device has several replicas.
_SEVERAL = re.compile(DEVICE_AXIS + r"(\d+)_replicas")
_ONE_BY_ONE = "_one_by_one"


@dataclasses.dataclass(frozen=True)
class ReplicaMesh:
    """The devices of all replicas, in replica order, and the two placements that exist."""

    # The axis type is Auto: with `jax.make_mesh` it would be Explicit, and every array's type would carry the mesh. The axis is
    # called "replica", or has a name that says how many replicas each device has: so an array's sharding tells its strategy.
    mesh: Mesh
    storage: Storage = dataclasses.field(default=Storage.WHOLE, compare=False)  # of what is the same on every replica

    @functools.cached_property
    def axis(self) -> str:
        return self.mesh.axis_names[0]

    @functools.cached_property
    def per_device(self) -> int:
        """The number of replicas on each device, which are neighbours in replica order."""
        return int(match[1]) if (match := _SEVERAL.match(self.axis)) else 1

    @functools.cached_property
    def one_by_one(self) -> bool:
        """Whether a device runs its replicas one after the other instead of together; see `_program/passes/virtual`."""
        return self.axis.endswith(_ONE_BY_ONE)

    def __str__(self) -> str:
        count = counted(self.num_replicas, "replica")
        own = ", ".join(f"{device.platform}:{device.id}" for device in self.devices)
        if not self.is_alone:
            own = f"{len(self.local_devices)} {self.devices[0].platform} here"
        if self.per_device == 1:
            return f"{count} ({own})"
        return f"{count} on {counted(len(self.devices), 'device')} ({own}), {'one by one' if self.one_by_one else 'together'}"

    @functools.cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices, in the order of their replicas; one for each replica, unless each device has several."""
        return tuple(self.mesh.devices.flat)

    @functools.cached_property
    def num_replicas(self) -> int:
        return self.mesh.devices.size * self.per_device

    @functools.cached_property
    def mirrored(self) -> NamedSharding:
        """The placement of a value that is the same on every replica."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def stacked(self) -> NamedSharding:
        """The placement of a value with a leading replica axis, one row on each replica's device."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis))

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """The numbers of the replicas on this process's devices."""
        return tuple(i for i in range(self.num_replicas) if self.devices[i // self.per_device] in self.local_devices)

    @functools.cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        return tuple(self.mesh.local_devices)

    @functools.cached_property
    def is_alone(self) -> bool:
        """Whether this process has all replicas, so that no other worker takes part."""
        return len(self.local_replicas) == self.num_replicas

    # -- arrays and programs on the devices

    def put(self, arrays: PyTree, placements: PyTree) -> Any:
        """Bring arrays to the devices; one placement for all of them, or one for each."""
        return jax.device_put(arrays, placements)

    def fresh(self, array: ArrayLike) -> Any:
        """Return a copy of an array that nobody else holds. JAX compiles nothing for it, unlike for `jnp.copy`."""
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return jax.jit(jnp.copy)(array)
        return jax.device_put(array, getattr(array, "sharding", None), may_alias=False)

    def evaluate(self, function: Callable[..., Any], *arguments: PyTree) -> Any:
        """Call a function on arrays that are tied to no device."""
        return function(*arguments)

    def memory_limit(self) -> int | None:
        """Return how many bytes of a device's memory JAX may use; None if the device does not say, like a CPU."""
        return (self.local_devices[0].memory_stats() or {}).get("bytes_limit")

    def executable(self, program: Callable[..., Any], name: str, is_trained: Callable[[], list[bool]]) -> Callable[..., Any]:
        """Return a function that runs a jitted program; `is_trained` tells which of the program's variables are trained."""
        return program


@dataclasses.dataclass(frozen=True)
class PlannedMesh(ReplicaMesh):
    """A topology's devices, which are not here: arrays on them are shapes, and programs are compiled but never run."""

    @functools.cached_property
    def programs(self) -> list[planned.CompiledOnly]:
        """The programs made for these devices, kept even after their functions are gone."""
        return []

    @functools.cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        return self.devices

    def __str__(self) -> str:
        how = "one by one" if self.one_by_one else "together"
        on = "" if self.per_device == 1 else f", {self.per_device} on each device, {how}"
        kind = f"{self.devices[0].device_kind}, {counted(len({device.process_index for device in self.devices}), 'host')}"
        return f"{counted(self.num_replicas, 'replica')} (planned: {len(self.devices)} x {kind}){on}"

    def put(self, arrays: PyTree, placements: PyTree) -> Any:
        if isinstance(placements, list):
            return list(map(planned.stand_in, arrays, placements))
        return jax.tree.map(lambda array: planned.stand_in(array, placements), arrays)

    def fresh(self, array: ArrayLike) -> Any:
        return array

    def memory_limit(self) -> int | None:
        return None  # the plan knows the limit

    def evaluate(self, function: Callable[..., Any], *arguments: PyTree) -> Any:
        shapes = [array for array in jax.tree.leaves(arguments) if isinstance(array, jax.ShapeDtypeStruct)]
        if not shapes:  # inside a trace the arguments are tracers
            return function(*arguments)
        return self.put(jax.eval_shape(function, *arguments), shapes[0].sharding)

    def executable(self, program: Callable[..., Any], name: str, is_trained: Callable[[], list[bool]]) -> Callable[..., Any]:
        self.programs.append(made := planned.CompiledOnly(program, name, is_trained(), (self.mirrored, self.stacked)))
        return made


def make_mesh(devices: Sequence[jax.Device], axis: str = REPLICA_AXIS, storage: Storage = Storage.WHOLE) -> ReplicaMesh:
    """Make the mesh of some devices, in the given order."""
    mesh = replicas_of(Mesh(np.array(devices, dtype=object), (axis,)), _process.what_if.storage or storage)
    if _process.topology and isinstance(mesh, PlannedMesh):
        _process.planned_meshes.append(mesh)
    return mesh


def replicas_of(mesh: Mesh, storage: Storage = Storage.WHOLE) -> ReplicaMesh:
    """Return the ReplicaMesh of one of our meshes, as found in an array's sharding."""
    return (PlannedMesh if topologies.runs_nothing(mesh.devices.flat[0]) else ReplicaMesh)(mesh, storage)


def with_replicas(mesh: ReplicaMesh, num_replicas: int | None, schedule: str) -> ReplicaMesh:
    """Return a mesh of the same devices with `num_replicas` replicas, equally many on each; for None, the mesh itself."""
    if isinstance(mesh, PlannedMesh) and (parts := _process.what_if.parts) > 1:
        num_replicas, schedule = parts * (num_replicas or len(mesh.devices)), "one_by_one"
    if schedule not in ("together", "one_by_one"):
        raise ValueError(
            f"schedule is {schedule!r}; expected 'together' (all replicas of a device at once) or 'one_by_one' (one after the "
            "other, with the memory of one)."
        )
    if num_replicas is None:
        return mesh
    if isinstance(num_replicas, bool) or not isinstance(num_replicas, int | np.integer):
        raise TypeError(f"num_replicas is {shown(num_replicas)}; expected an int, such as num_replicas=8.")
    count = len(mesh.devices)
    if num_replicas < count or num_replicas % count:
        whole = max(num_replicas - num_replicas % count, count)
        raise DeviceError(
            f"num_replicas is {num_replicas} for {count} devices; expected a multiple of {count}, so that each device has "
            f"equally many replicas. Write num_replicas={whole}, or name as many devices as divide the number of replicas: "
            f"devices=[...] with {max((n for n in range(1, count) if num_replicas % n == 0), default=1)} of them."
        )
    if num_replicas == count:
        return mesh
    axis = f"{DEVICE_AXIS}{num_replicas // count}_replicas"
    if schedule == "one_by_one":
        axis += _ONE_BY_ONE
    return make_mesh(mesh.devices, axis, mesh.storage)


def cluster_mesh(storage: Storage = Storage.WHOLE) -> ReplicaMesh:
    """Make the mesh of all workers' best devices, worker by worker; refuse workers with different kinds or numbers of them."""
    start_backend(0)
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    owned = collections.Counter((device.process_index, device.platform) for device in devices)
    if len(set(owned.values())) > 1 or len({platform for _, platform in owned}) > 1:
        listed = ", ".join(f"worker {worker} {count} {platform}" for (worker, platform), count in sorted(owned.items()))
        raise ClusterConfigError(
            f"the workers have different devices: {listed}. Each needs the same number of one kind: set CUDA_VISIBLE_DEVICES, "
            "JAX_PLATFORMS or JAX_NUM_CPU_DEVICES alike on all of them."
        )
    return make_mesh(devices, storage=storage)


@functools.cache
def default_mesh() -> ReplicaMesh:
    """Return the mesh of the default strategy: the first device."""
    return make_mesh(resolve_devices(None)[:1])


def resolve_devices(devices: Sequence[Any] | None) -> tuple[jax.Device, ...]:
    """Turn a user's `devices` into distinct, existing devices of one kind; None means all devices of the best kind."""
    if devices is None and _process.topology:
        return _process.topology
    if devices is None:
        start_backend(0)
        best = jax.local_devices()
        if best[0].platform == "cpu" and (cause := _why_no_gpu()):
            _logger.info("training on the CPU: %s", cause)
        return tuple(best)
    wanted = _listed(devices)
    places = [_place_of(entry) for entry in wanted]
    num_cpu_devices = max([index + 1 for platform, index in filter(None, places) if platform == "cpu"], default=0)
    start_backend(num_cpu_devices)
    found: list[jax.Device] = []
    for entry, place in zip(wanted, places, strict=True):
        device = entry if place is None else _find_device(entry, *place, num_cpu_devices)
        if device in found:
            raise DeviceError(
                f"devices names {device} twice, as {wanted[found.index(device)]!r} and {entry!r}. Each replica needs its own "
                "device; for several replicas on one CPU write devices=['cpu:0', 'cpu:1', ...]."
            )
        found.append(device)
    platforms = sorted({device.platform for device in found})
    if len(platforms) > 1:
        raise DeviceError(
            f"devices mixes {' and '.join(platforms)} devices ({', '.join(map(str, found))}); one program is compiled for all "
            f"replicas, so they must be of one kind. Name only {platforms[-1]} devices, or leave devices out."
        )
    return tuple(found)


def start_backend(num_cpu_devices: int) -> None:
    """Start JAX's backends, unless they run, with enough CPU devices and a thread pool that cannot starve.

    If an accelerator does not start, raise an error, unless the user has named CPU devices. XLA reads the size of its CPU
    thread pool once, when the backend starts: docs/design/cpu-rendezvous.md.
    """
    interrupts.send_ignored_again()
    configured = jax.config.jax_num_cpu_devices  # pyrefly: ignore[missing-attribute]
    if configured < 0:
        configured = _env.forced_host_devices() or 1
    if num_cpu_devices > configured:
        try:
            jax.config.update("jax_num_cpu_devices", num_cpu_devices)
        except RuntimeError:
            return  # the backends have started; `_find_device` raises for the first missing device
    with _env.at_least(_env.CPU_THREADS, cpu_pool_size(max(num_cpu_devices, configured)), _env.CPU_THREADS_FALLBACK):
        try:
            jax.local_devices()
        except (RuntimeError, AssertionError) as error:  # the second has no words
            if verdict.tells_of_loss(error):  # another worker's devices are missing
                raise
            if num_cpu_devices and str(error):
                _logger.warning("training on CPU devices, as devices= says. JAX cannot start the others: %s", error)
                return
            distributed.clear_backends()  # else the next request would get the CPU, which JAX has started
            raise DeviceError(
                f"JAX cannot start the devices of this process: {str(error) or 'none is of JAX_PLATFORMS'}. Nothing is trained "
                "on the CPU instead. Free or repair them; to train on the CPU, set JAX_PLATFORMS=cpu in the environment."
            ) from error
    is_chosen = num_cpu_devices or (jax.config.jax_platforms or "").startswith("cpu")  # pyrefly: ignore[missing-attribute]
    if not is_chosen:
        _require_wanted_gpus()


def raising_cpu_threads() -> contextlib.AbstractContextManager[None]:
    """Raise XLA's number of CPU threads in the environment; undone only if the block raises."""
    # Call this before C code starts threads, as `jax.distributed` does: `setenv` moves texts that their `getenv` has found.
    configured = max(1, jax.config.jax_num_cpu_devices, _env.forced_host_devices())  # pyrefly: ignore[missing-attribute]
    return _env.at_least(_env.CPU_THREADS, cpu_pool_size(configured), _env.CPU_THREADS_FALLBACK, keep=True)


def cpu_pool_size(num_devices: int) -> int:
    """Return how many threads XLA's CPU client needs so that one Python thread can never starve it."""
    return max(2 * num_devices, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _listed(devices: object) -> list[Any]:
    if isinstance(devices, str | jax.Device):
        raise TypeError(f"devices is {devices!r}; expected a list, for example devices=[{devices!r}].")
    if isinstance(devices, Set | Mapping) or not isinstance(devices, Iterable):
        raise TypeError(
            f"devices is {shown(devices)} of type {type(devices).__name__}; expected a list with one entry for each replica, in "
            "replica order, for example devices=['cpu:0', 'cpu:1']."
        )
    if not (listed := list(devices)):
        raise DeviceError(
            "devices is empty, and a strategy needs at least one. Leave it out to use all accelerators, "
            "or write for example devices=['cpu:0', 'cpu:1']."
        )
    return listed


def _place_of(entry: object) -> tuple[str, int] | None:
    """Return the platform and number that an entry names; None for a `jax.Device`."""
    if isinstance(entry, jax.Device):
        return None
    if not isinstance(entry, str):
        raise TypeError(
            f"devices contains {shown(entry)} of type {type(entry).__name__}; expected strings such as 'gpu:0' "
            "or 'cpu:3', or jax.Device objects from jax.devices()."
        )
    match = _DEVICE_NAME.fullmatch(entry)
    if match is None or not distributed.is_known_platform(match[1].lower()):
        raise DeviceError(f"devices contains {entry!r}; expected the form 'gpu:0', '/gpu:0', 'GPU:0', 'tpu:1' or 'cpu:3'.")
    platform, index = match[1].lower(), int(match[2])
    if platform == "cpu" and index >= MAX_CPU_DEVICES:
        raise DeviceError(
            f"devices contains {entry!r}; at most {MAX_CPU_DEVICES} virtual CPU devices are made, 'cpu:0' to "
            f"'cpu:{MAX_CPU_DEVICES - 1}', because each takes threads of this machine."
        )
    return platform, index


def _find_device(entry: str, platform: str, index: int, num_cpu_devices: int) -> jax.Device:
    available = _local_devices(platform)
    if index < len(available):
        return available[index]
    have = ", ".join(f"{platform}:{i}" for i in range(len(available))) or "none"
    message = f"devices contains {entry!r}, but this process has {len(available)} {platform} devices ({have})."
    if platform != "cpu":
        others = ", ".join(f"{d.platform}:{i}" for i, d in enumerate(jax.local_devices()))
        cause = _why_no_gpu() if platform in ("gpu", "cuda") and not available else ""
        raise DeviceError(f"{message} It has {others}. {cause or 'Leave devices out to use all of the best kind.'}")
    raise DeviceError(
        f"{message} CPU devices are made when JAX starts, and it had started before this strategy was made. "
        "Two ways out: make the strategy before anything else uses JAX (move it above the first jnp call), "
        f"or run the program with JAX_NUM_CPU_DEVICES={num_cpu_devices} in the environment."
    )


def _local_devices(platform: str) -> Sequence[jax.Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # JAX has no such backend: `start_backend` has started all that exist
        return ()


def _require_wanted_gpus() -> None:
    """Raise when the user asked for GPUs, by name or number, and JAX found none: it would compute without them."""
    found, asked, named = len(_local_devices("gpu")), _env.MIRRORED_GPUS.get_int(), _env.CUDA_VISIBLE_DEVICES.get()
    if found < asked:
        raise DeviceError(
            f"`mirrored launch` was asked for {counted(asked, 'GPU')} in each worker, and JAX has found {found}. Nothing is "
            f"trained without them. {_why_no_gpu() or 'Run it where they are, with a JAX that finds them.'} To train on the "
            "CPU, write --cpu-devices 1 in place of --gpus-per-worker."
        )
    if _env.named_gpus() and jax.default_backend() == "cpu" and _has_cuda():
        raise DeviceError(
            f"CUDA_VISIBLE_DEVICES is {named!r}, and JAX, whose CUDA is installed, has found no such GPU. Nothing is trained on "
            "the CPU instead. Name GPUs that nvidia-smi lists; to train on the CPU, set JAX_PLATFORMS=cpu in the environment."
        )


def _has_cuda() -> bool:
    return any("cuda" in plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins"))


def _why_no_gpu() -> str:
    """Explain why JAX has no GPU on a machine with NVIDIA's driver; return "" on another machine."""
    if not os.path.exists(_NVIDIA_DRIVER):
        return ""
    chosen = jax.config.jax_platforms  # pyrefly: ignore[missing-attribute]
    if chosen and "cuda" not in chosen and "gpu" not in chosen:
        return f"This machine has an NVIDIA driver, and JAX_PLATFORMS={chosen} leaves its GPUs out. Unset it."
    return 'This machine has an NVIDIA driver, and JAX has no CUDA. Write pip install "jax[cuda13]".'
