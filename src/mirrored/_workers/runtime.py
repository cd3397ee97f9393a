"""The one place that starts and ends `jax.distributed`."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType

import jax

from .. import _env
from .._cluster.meeting import Meeting, meet
from .._cluster.spec import Cluster, split_address
from .._errors import BAD_CONFIGURATION, ClusterConfigError, ClusterStartError, WorkerLostError
from .._jax import distributed
from .._options import CommunicationImplementation, CommunicationOptions
from .._process import Lock
from .._text import version_of
from .coordination import Coordination
from .guard import Guard
from .progress import progress
from .same_program import Agreement

_logger = logging.getLogger("mirrored")

#: The default time for the other workers to start.
START_SECONDS = 300.0
#: After how long without a heartbeat the service takes a worker for dead; a pause of half of it does no harm.
HEARTBEAT_SECONDS = 10
#: How long the workers may take to connect after they have met; who is not there by then has died in between.
CONNECT_SECONDS, _CONNECT_WARNING_SECONDS = 30.0, 5.0
#: The additional time of worker 0, which must wait longer than the others, because they connect to its service.
_CHIEF_SECONDS = 2.0
#: How long JAX waits at the end for the others, whose end our own guard has already seen.
SHUTDOWN_SECONDS = 30


@dataclasses.dataclass(frozen=True)
class Runtime:
    """This process's connection to the other workers, from the start of the cluster to the end of the process."""

    coordination: Coordination
    agreement: Agreement
    cluster: Cluster | None  # None when the user had started `jax.distributed`
    host: str = ""  # the numeric address of this worker; empty then


_current: Runtime | None = None
_starting = Lock()


def current() -> Runtime | None:
    """Return the runtime that was started; None in a process that is not part of a cluster of several workers."""
    return _current


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Let a script whose cluster fails exit with a code that says whether a restart would help."""
    try:
        yield
    except (ClusterConfigError, ClusterStartError):
        _install_exit_codes()
        raise


@functools.cache
def _install_exit_codes() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, ClusterConfigError | ClusterStartError):
            raise SystemExit(error.exit_code)  # from a hook, it sets the code and nothing else

    sys.excepthook = hook


def attach(options: CommunicationOptions, cluster: Cluster | None = None) -> Runtime | None:
    """Use the user's `jax.distributed`; None if it has one process. A `cluster` must have the same worker and size."""
    worker, num_workers = distributed.place()
    if cluster is not None:
        if (cluster.worker_index, cluster.num_workers) != (worker, num_workers):
            raise ClusterConfigError(
                f"cluster= says {cluster}, but jax.distributed.initialize(...) was called before, and says worker {worker} of "
                f"{num_workers}. Leave one of them out; without the call, the workers meet first, and errors name them."
            )
        _logger.warning("cluster= is not used: jax.distributed was initialised before, for the same worker and number of workers")
    if num_workers > 1 and distributed.swallows_sigterm():
        _logger.warning(
            "JAX's preemption service swallows SIGTERM, so this process neither ends by it nor saves. Call "
            'jax.config.update("jax_enable_preemption_service", False) before jax.distributed.initialize(...)'
        )
    with _starting:
        if _current is None and num_workers > 1:
            _begin(None, options, worker, num_workers)
        return _current


def start(cluster: Cluster, options: CommunicationOptions) -> Runtime | None:
    """Meet the other workers and start `jax.distributed`; None for a cluster of one worker."""
    if cluster.num_workers == 1:
        return None
    with _starting:
        if _current is not None:
            _require_same(_current, cluster)
            return _current
        _refuse_child(cluster)
        _require_no_backend()
        seconds = START_SECONDS if options.timeout_seconds is None else options.timeout_seconds
        meeting = meet(cluster, _versions(), seconds)
        _choose_collectives(options)
        jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
        jax.config.update("jax_enable_recoverability", True)  # else JAX aborts all workers when one is gone; the guard ends them
        _env.MIRRORED_WORKER.set(f"{os.getpid()} {_name_of(cluster)}")  # now: C code of JAX's threads reads the environment
        _env.connect_directly(split_address(cluster.coordinator_address or "")[0])
        jax.config.update("jax_check_proxy_envs", False)  # it would ask to unset a proxy that is now not used
        with distributed.without_warnings():
            _connect(cluster, meeting, min(seconds, CONNECT_SECONDS))
        distributed.listen_at(meeting.host)
        return _begin(cluster, options, cluster.worker_index, cluster.num_workers, meeting.host)


def _connect(cluster: Cluster, meeting: Meeting, seconds: float) -> None:
    """Start `jax.distributed` in a thread: when a worker is missing, JAX aborts the process instead of raising."""
    errors: list[BaseException] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                coordinator_address=cluster.coordinator_address,
                num_processes=cluster.num_workers,
                process_id=cluster.worker_index,
                cluster_detection_method="deactivate",
                initialization_timeout=2 * int(CONNECT_SECONDS),  # the abort, for which this process does not wait
                coordinator_bind_address=meeting.bind_address,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            )
        except BaseException as error:  # the thread that waits raises it
            errors.append(error)

    thread = threading.Thread(target=initialize, name="mirrored-connect", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds + _CHIEF_SECONDS * cluster.is_chief
    thread.join(min(seconds, _CONNECT_WARNING_SECONDS))
    if thread.is_alive():
        what = "worker %d waits for all %d workers, which have met, to connect to jax.distributed at %s; is one gone since?"
        _logger.warning(what, cluster.worker_index, cluster.num_workers, cluster.coordinator_address)
        thread.join(max(0.0, deadline - time.monotonic()))
    if thread.is_alive():
        raise ClusterStartError(
            f"worker {cluster.worker_index} met all {cluster.num_workers} workers, but one of them was gone before it had "
            f"connected to jax.distributed at {cluster.coordinator_address}, or has not done so for {seconds:.0f} s: the output "
            "of the others says which. Start all again; this process cannot go on, and JAX would end it"
        )
    if errors:
        raise errors[0]


@contextlib.contextmanager
def starting_devices() -> Iterator[None]:
    """Enter a phase while JAX starts this worker's devices, and waits for those of the others; their keys tell who is late."""

    def detail() -> str:  # called by the guard, twice a second
        phase.waits, text = _is_waiting_for_devices()
        return text

    phase = progress.phase("the exchange of devices", detail)
    try:
        with phase:
            yield
    except RuntimeError as error:
        if late := distributed.late_devices(error):
            text = f"the devices of worker {late.worker} have not started for {late.limit}, which is JAX's limit"
            raise WorkerLostError(text) from error
        raise


def _is_waiting_for_devices() -> tuple[bool, str]:
    worker, num_workers = distributed.place()
    for kind, known in distributed.known_devices():
        if not known.issuperset(range(num_workers)):
            state = "are known to the others" if worker in known else "have not started yet"
            return worker in known, f"its {kind} devices {state}"
    return False, ""


def _begin(cluster: Cluster | None, options: CommunicationOptions, worker: int, num_workers: int, host: str = "") -> Runtime:
    global _current
    coordination = Coordination(distributed.client(), worker, num_workers)
    guard = Guard(coordination, progress, stall_seconds=options.timeout_seconds)
    _current = Runtime(coordination, Agreement(coordination), cluster, host)

    def end() -> None:
        guard.stop()
        if distributed.is_recoverable():
            guard.outlive_others(SHUTDOWN_SECONDS)

    guard.start()
    atexit.register(guard.stop)  # before JAX's own function, which was registered earlier
    distributed.before_shutdown(end)
    return _current


def _name_of(cluster: Cluster) -> str:
    return f"{cluster.worker_index} {cluster.digest()}"


def _refuse_child(cluster: Cluster) -> None:
    """Refuse a child process with the cluster of its parent: it would wait for the parent's port."""
    process, _, name = (_env.MIRRORED_WORKER.get() or "").partition(" ")
    if name == _name_of(cluster) and process != str(os.getpid()):
        raise ClusterConfigError(
            f"this process was started by process {process}, which is {cluster} already, and inherited that from it; one process "
            "is one worker. multiprocessing, data loaders and grain's mp_prefetch import the program's file again in each "
            "process that they start. Put mr.MultiWorkerMirroredStrategy(), and all that follows from it, into a function that "
            'is called under `if __name__ == "__main__":`.'
        )


def _require_same(runtime: Runtime, cluster: Cluster) -> None:
    if runtime.cluster is not None and runtime.cluster.digest() != cluster.digest():
        raise ClusterConfigError(
            f"this process is {runtime.cluster} already, and cannot also be {cluster}; a process is part of one cluster. Use the "
            "same cluster for all strategies, or start another process."
        )


def _require_no_backend() -> None:
    if distributed.has_backend():
        raise ClusterStartError(
            "JAX had started before the strategy was made, so this process cannot join the other workers any more. Move "
            "mr.MultiWorkerMirroredStrategy() above the first use of JAX: above every jnp, jax.random, jax.devices, and every "
            "other strategy or variable.",
            exit_code=BAD_CONFIGURATION,
        )


def _versions() -> dict[str, str]:
    found = {name: version_of(name) for name in ("jax", "jaxlib", "mirrored", "numpy")}
    return {**found, "python": ".".join(platform.python_version_tuple()[:2])}


def _choose_collectives(options: CommunicationOptions) -> None:
    """Tell JAX, or NCCL, which implementation to use; both read it when their backend starts."""
    implementation = "mpi" if options.implementation is CommunicationImplementation.MPI else "gloo"
    distributed.choose_cpu_collectives(implementation)
    if options.implementation is CommunicationImplementation.RING:
        _env.NCCL_ALGO.set_default("Ring")
