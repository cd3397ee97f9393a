"""The strategies: they differ only in their devices."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Sequence
from typing import Literal, TypeVar, get_args

import jax
import numpy as np

from .. import _env, _process
from .._cluster import environments, resolvers
from .._cluster.resolvers import ClusterResolver
from .._errors import ClusterConfigError
from .._jax import user_code
from .._options import (
    CommunicationImplementation,
    CommunicationName,
    CommunicationOptions,
    CrossDeviceOps,
    NcclAllReduce,
    ReductionToOneDevice,
    Storage,
    StorageName,
)
from .._replicas import placement
from .._replicas.mesh import ReplicaMesh, cluster_mesh, make_mesh, raising_cpu_threads, resolve_devices, with_replicas
from .._workers import machine, runtime
from .._workers.progress import progress
from .._workers.runtime import Runtime
from .strategy import Strategy

_logger = logging.getLogger("mirrored")

T = TypeVar("T")


class MirroredStrategy(Strategy):
    """A strategy for several devices of one machine, with one copy of every variable on each.

    Args:
        devices: `jax.Device` objects or names such as `"gpu:0"`, `"/gpu:0"`, `"tpu:0"`, `"cpu:3"`, one for
            each replica. None: all local accelerators, or the CPU devices if there are none. Before JAX has started,
            `["cpu:0", ..., "cpu:7"]` makes eight virtual CPU devices.
        cross_device_ops: TensorFlow's `mr.NcclAllReduce`, `mr.HierarchicalCopyAllReduce` or `mr.ReductionToOneDevice`. With
            or without them XLA chooses the collective, NCCL's between GPUs; only an `accumulation_fn` replaces it.
        num_replicas: the number of replicas, a multiple of the number of devices; each device runs the same number. The
            results are those of as many devices. None: one replica on each device.
        schedule: how a device runs several replicas: `"together"`, which is fast, or `"one_by_one"`, which needs the memory
            of one replica.
        storage: `"parts"` for models larger than a device: each device stores a part of every large variable, and of every large
            array that a step returns for all replicas. `"whole"`, the default: every device stores all of it. See `mr.Storage`.

    Raises:
        DeviceError: (a ValueError) for a device that does not exist or is named twice, for an empty list, and when the
            number of devices does not divide `num_replicas`.
        TypeError: for an entry that is neither a name nor a `jax.Device`, a `num_replicas` that is no int, and any other
            `cross_device_ops`.
        ValueError: for any other `schedule` or `storage`, and for NCCL without GPUs.

    >>> strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.num_replicas_in_sync
    2
    >>> mr.MirroredStrategy(["cpu:0", "cpu:1"], num_replicas=8)
    mr.MirroredStrategy(8 replicas on 2 devices (cpu:0, cpu:1), together)

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/MirroredStrategy
    """

    @user_code.shorten_errors
    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        *,
        cross_device_ops: CrossDeviceOps | Literal["auto"] | None = None,
        num_replicas: int | None = None,
        schedule: Literal["together", "one_by_one"] = "together",
        storage: Storage | StorageName = Storage.WHOLE,
    ) -> None:
        ops, stored = _parse_ops(cross_device_ops), Storage.parse(storage, "storage")
        look_for_others("MirroredStrategy")
        mesh = with_replicas(make_mesh(resolve_devices(devices), storage=stored), num_replicas, schedule)
        super().__init__(mesh, ops=_select_accumulation(ops, mesh))


class MultiWorkerMirroredStrategy(Strategy):
    """A strategy for the devices of several processes, with one copy of every variable on each device.

    Every worker runs the same script. The strategy looks for the cluster in this order: `jax.distributed`, if it is already
    initialised; `cluster`; the environment variables `TF_CONFIG`, `JAX_*` (`mirrored launch`, Kubeflow), torchrun's, Open MPI's,
    MPICH's and Slurm's. If nothing describes a cluster, this is the only worker. One line of the log says what was found.

    Make it before anything else uses JAX: a process whose devices are in use cannot join the others.

    Args:
        cluster: a resolver, such as `mr.SimpleClusterResolver`, or None to look at the environment.
        communication_options: see `mr.CommunicationOptions`.
        cross_device_ops: as in `mr.MirroredStrategy`. TensorFlow's strategy has no such argument.
        storage: as in `mr.MirroredStrategy`; `"parts_of_worker"` divides arrays among the devices of each worker.
        cluster_resolver: TensorFlow's name of `cluster`; it works, with a DeprecationWarning.
        communication: TensorFlow 2.0's name of the options' implementation; it also works with a DeprecationWarning.

    Raises:
        ClusterConfigError: (a ValueError) when the cluster's description is wrong, or when workers have different
            descriptions or numbers of devices.
        ClusterStartError: (a RuntimeError) when a worker is missing, a port is taken, or JAX has already started.
        ValueError: for any other `storage`, and for NCCL without GPUs.

    >>> strategy = mr.MultiWorkerMirroredStrategy()
    >>> strategy.num_workers, strategy.is_chief
    (1, True)

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/MultiWorkerMirroredStrategy
    """

    @user_code.shorten_errors
    def __init__(
        self,
        cluster: ClusterResolver | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        cross_device_ops: CrossDeviceOps | Literal["auto"] | None = None,
        storage: Storage | StorageName = Storage.WHOLE,
        cluster_resolver: ClusterResolver | None = None,
        communication: CommunicationImplementation | CommunicationName | None = None,
    ) -> None:
        cluster = _by_either_name("cluster_resolver", cluster_resolver, "cluster", cluster)
        chosen, right = None, ""
        if communication is not None:
            chosen = CommunicationOptions(implementation=communication)
            right = f"; write communication_options=mr.CommunicationOptions(implementation=mr.{chosen.implementation})"
        communication_options = _by_either_name("communication", chosen, "communication_options", communication_options, right)
        options = CommunicationOptions() if communication_options is None else communication_options
        _refuse_options(cluster, options)
        ops, stored = _parse_ops(cross_device_ops), Storage.parse(storage, "storage")
        with runtime.exit_codes():
            joined = self._join(cluster, options)
            if joined is None:
                mesh = make_mesh(resolve_devices(None), storage=stored)
            else:
                with runtime.starting_devices():
                    mesh = cluster_mesh(stored)
        if options.implementation is CommunicationImplementation.NCCL and (kind := mesh.devices[0].platform) != "gpu":
            raise ValueError(
                f"implementation is NCCL, which connects GPUs, but JAX has found none; it uses {kind} devices. Leave the option "
                "out, or install JAX for CUDA: pip install 'jax[cuda13]'."
            )
        super().__init__(mesh, bytes_per_pack=options.bytes_per_pack, ops=_select_accumulation(ops, mesh))
        if joined is not None:
            self._coordination = joined.coordination
            # The first collective on a set of devices waits only 30 s for all workers: so all run one now, together.
            with progress.phase("the barrier after the exchange of devices", waits=True):
                hardware = machine.words(device.device_kind for device in mesh.local_devices)
                told = self._coordination.barrier("MultiWorkerMirroredStrategy", [hardware, stored.name])
            machines, storages = zip(*told, strict=True)
            if len(set(storages)) > 1:
                listed = ", ".join(f"worker {worker} {name}" for worker, name in enumerate(storages))
                raise ClusterConfigError(
                    f"the workers store what is the same in different ways: {listed}. Give storage= alike on all of them."
                )
            if self.is_chief and (difference := machine.difference(machines)):
                machine.warn_once(difference)
            placement.mirror(mesh, [np.zeros((), np.int32)])[0].block_until_ready()

    def _join(self, cluster: ClusterResolver | None, options: CommunicationOptions) -> Runtime | None:
        if _process.topology:  # one worker plans the devices of all
            return None
        if runtime.current() is None and jax.distributed.is_initialized():
            _logger.info("cluster: jax.distributed was initialised already, and is used as it is")
            return runtime.attach(options, None if cluster is None else resolvers.discover(cluster)[0])
        self._cluster, sentence = resolvers.discover(cluster)
        is_left_alone = environments.is_left_alone(self._cluster, _env.current())
        _logger.log(logging.WARNING if is_left_alone else logging.INFO, "cluster: %s", sentence)
        if self._cluster.num_workers == 1:
            return runtime.start(self._cluster, options)
        with raising_cpu_threads():
            return runtime.start(self._cluster, options)


def _by_either_name(old_name: str, old: T | None, new_name: str, new: T | None, right: str = "") -> T | None:
    """Return an argument that the user gave under TensorFlow's name or ours."""
    if old is None:
        return new
    if new is not None:
        raise TypeError(f"MultiWorkerMirroredStrategy got {old_name} and {new_name}, which say the same; give {new_name} only.")
    warnings.warn(f"{old_name} is called {new_name} here{right}.", DeprecationWarning, stacklevel=user_code.user_stacklevel())
    return old


def _refuse_options(cluster: object, options: object) -> None:
    """Refuse swapped arguments and bare options, with the line to write."""
    right = "mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(implementation=mr.{}))"
    if isinstance(cluster, CommunicationOptions):
        raise TypeError(
            "cluster is a mr.CommunicationOptions; the first argument is the cluster's resolver. Write "
            "mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(...))."
        )
    if isinstance(cluster, CommunicationImplementation):
        raise TypeError(f"cluster is {cluster!r}; the first argument is the cluster's resolver. Write {right.format(cluster)}.")
    if isinstance(options, CommunicationImplementation):
        raise TypeError(f"communication_options is {options!r}; expected mr.CommunicationOptions. Write {right.format(options)}.")
    if not isinstance(options, CommunicationOptions):
        raise TypeError(f"communication_options is {options!r}; expected mr.CommunicationOptions(...).")


def _parse_ops(given: object) -> CrossDeviceOps | None:
    """Return the user's `cross_device_ops`, or None for "auto"; refuse anything else, such as a class instead of an object."""
    if given is None or isinstance(given, CrossDeviceOps):
        return given
    if isinstance(given, str) and given == "auto":
        return None
    if isinstance(given, type) and given in get_args(CrossDeviceOps):
        name = given.__name__
        raise TypeError(f"cross_device_ops is the class mr.{name}; expected an object. Write cross_device_ops=mr.{name}().")
    error = ValueError if isinstance(given, str) else TypeError
    raise error(
        f"cross_device_ops is {given!r}; expected None or 'auto', with which XLA chooses the collective for the devices, or "
        "mr.NcclAllReduce(), mr.HierarchicalCopyAllReduce() or mr.ReductionToOneDevice()."
    )


def _select_accumulation(ops: CrossDeviceOps | None, mesh: ReplicaMesh) -> ReductionToOneDevice | None:
    """Return `ops` if its `accumulation_fn` replaces XLA's sums, else None. Refuse NCCL without GPUs."""
    if isinstance(ops, NcclAllReduce) and mesh.devices[0].platform != "gpu":
        raise ValueError(
            f"cross_device_ops is {ops}, which connects GPUs, but the devices are {mesh}. Leave the argument out: XLA "
            "chooses the collective for the devices."
        )
    return ops if isinstance(ops, ReductionToOneDevice) and ops.accumulation_fn is not None else None


def look_for_others(name: str) -> None:
    """Warn once if this process trains alone, although its environment describes several workers."""
    if _env.TF_CONFIG.get() is not None:
        _logger.info("TF_CONFIG is set, but %s is for one machine and ignores it", name)
    if runtime.current() is not None or jax.distributed.is_initialized():
        return
    with contextlib.suppress(ClusterConfigError):  # a malformed description is an error only for those who use it
        cluster, sentence = resolvers.discover()
        if cluster.num_workers > 1 and not _process.has_warned_of_workers:
            _process.has_warned_of_workers = True
            _logger.warning(
                "this process is %s; but %s uses only the devices of this process, so that each worker trains by itself. To "
                "train together, write mr.MultiWorkerMirroredStrategy() instead, before anything else uses JAX.", sentence, name
            )  # fmt: skip


class OneDeviceStrategy(Strategy):
    """A strategy for one device, with the same program and types as on several devices.

    Args:
        device: a `jax.Device` or a name such as `"gpu:0"`. None: the first accelerator, or the CPU.

    Raises:
        DeviceError: (a ValueError) for a device that does not exist.
        TypeError: for anything else, such as a list.

    >>> mr.OneDeviceStrategy("cpu:0").num_replicas_in_sync
    1

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/OneDeviceStrategy
    """

    @user_code.shorten_errors
    def __init__(self, device: str | jax.Device | None = None) -> None:
        if device is not None and not isinstance(device, str | jax.Device):
            raise TypeError(f"device is {device!r}; expected one device, for example 'gpu:0' or jax.devices()[0].")
        look_for_others("OneDeviceStrategy")
        devices = None if device is None else [device]
        super().__init__(make_mesh(resolve_devices(devices)[:1]))
