"""One table of every environment variable that the library reads or sets. No jax here."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class EnvironmentVariable:
    """An environment variable: its name, and how the library uses it."""

    name: str
    use: str

    def get(self, environment: Mapping[str, str] | None = None) -> str | None:
        """Return the value in `environment`, by default in this process's own, or None if it is unset."""
        return current().get(self.name) if environment is None else environment.get(self.name)

    def set_default(self, value: str) -> None:
        """Set the variable, unless it is already set."""
        os.environ.setdefault(self.name, value)

    def set(self, value: str) -> None:
        """Set the variable, also for processes that this one starts."""
        os.environ[self.name] = value

    def get_int(self, environment: Mapping[str, str] | None = None) -> int:
        """Return the value as an int, or 0 if it is unset or no number."""
        text = self.get(environment) or ""
        return int(text) if text.isdecimal() else 0


CPU_THREADS = EnvironmentVariable(
    "PJRT_NPROC", "XLA's CPU threads. Raised while the backend starts, never lowered: a CPU client with too few can deadlock."
)
CPU_THREADS_FALLBACK = EnvironmentVariable("NPROC", "What XLA reads when PJRT_NPROC is unset; respected, never set.")
XLA_FLAGS = EnvironmentVariable("XLA_FLAGS", "Read: the number of CPU devices there; workers compare the other flags.")
XLA_LOG_LEVEL = EnvironmentVariable("TF_CPP_MIN_LOG_LEVEL", "Read: JAX sets 1; then XLA is silent while the workers connect.")
NCCL_ALGO = EnvironmentVariable("NCCL_ALGO", "Set to Ring for CommunicationImplementation.RING, unless it is set already.")
MEMORY_FRACTION = EnvironmentVariable("XLA_CLIENT_MEM_FRACTION", "Read by plans: the part of a GPU's memory that JAX takes.")
OLD_MEMORY_FRACTION = EnvironmentVariable("XLA_PYTHON_CLIENT_MEM_FRACTION", "The older name of XLA_CLIENT_MEM_FRACTION.")
ALLOCATOR = EnvironmentVariable("XLA_PYTHON_CLIENT_ALLOCATOR", "Read by plans: with `platform` JAX takes all of a GPU's memory.")
DEBUG = EnvironmentVariable("MIRRORED_DEBUG", "Read: `detail` compares the workers' programs at every start, not the first only.")
TF_CONFIG = EnvironmentVariable(
    "TF_CONFIG", "JSON that names all workers and this one. MirroredStrategy ignores it, and logs so."
)

# The cluster of this worker: `_cluster/`, docs/design/clusters.md. The library reads all of them; `mirrored launch` sets the
# address, number and index of JAX_* for its workers.
JAX_COORDINATOR_ADDRESS = EnvironmentVariable("JAX_COORDINATOR_ADDRESS", "host:port of worker 0: Kubeflow TrainJob, or by hand.")
JAX_COORDINATOR_PORT = EnvironmentVariable("JAX_COORDINATOR_PORT", "The port, where JAX_COORDINATOR_ADDRESS has none.")
JAX_NUM_PROCESSES = EnvironmentVariable("JAX_NUM_PROCESSES", "The number of workers; jax itself does not read it.")
JAX_PROCESS_ID = EnvironmentVariable("JAX_PROCESS_ID", "The index of this worker; jax itself does not read it.")
COORDINATOR_ADDRESS = EnvironmentVariable("COORDINATOR_ADDRESS", "The host of worker 0 in a Kubeflow JAXJob.")
COORDINATOR_PORT = EnvironmentVariable("COORDINATOR_PORT", "The port of worker 0 in a Kubeflow JAXJob.")
NUM_PROCESSES = EnvironmentVariable("NUM_PROCESSES", "The number of workers of a Kubeflow JAXJob.")
PROCESS_ID = EnvironmentVariable("PROCESS_ID", "The index of this worker in a Kubeflow JAXJob.")
MASTER_ADDR = EnvironmentVariable("MASTER_ADDR", "torchrun, PyTorchJob: the host of worker 0.")
MASTER_PORT = EnvironmentVariable("MASTER_PORT", "torchrun itself listens on it, so worker 0 takes the next one.")
RANK = EnvironmentVariable("RANK", "torchrun, PyTorchJob: the index of this worker.")
WORLD_SIZE = EnvironmentVariable("WORLD_SIZE", "torchrun, PyTorchJob: the number of workers.")
LOCAL_WORLD_SIZE = EnvironmentVariable("LOCAL_WORLD_SIZE", "torchrun: the number of workers on this host.")
SLURM_JOB_ID = EnvironmentVariable("SLURM_JOB_ID", "The port of worker 0 is derived from it, and from the step.")
SLURM_STEP_ID = EnvironmentVariable("SLURM_STEP_ID", "The port of worker 0 is derived from it, and from the job.")
SLURM_STEP_NODELIST = EnvironmentVariable("SLURM_STEP_NODELIST", "srun: the hosts of the workers, such as gpu[01-03,7].")
SLURM_STEP_NUM_TASKS = EnvironmentVariable("SLURM_STEP_NUM_TASKS", "srun: the number of workers.")
SLURM_NTASKS = EnvironmentVariable("SLURM_NTASKS", "Slurm: the number of tasks, also where srun has not started this one.")
SLURM_STEP_TASKS_PER_NODE = EnvironmentVariable("SLURM_STEP_TASKS_PER_NODE", "srun: workers on each host, such as 2(x3),1.")
SLURM_PROCID = EnvironmentVariable("SLURM_PROCID", "srun: the index of this worker.")
SLURM_NODEID = EnvironmentVariable("SLURM_NODEID", "srun: the position of this host, to check the order of the workers.")
OMPI_COMM_WORLD_RANK = EnvironmentVariable("OMPI_COMM_WORLD_RANK", "Open MPI's mpirun: the index of this worker.")
OMPI_COMM_WORLD_SIZE = EnvironmentVariable("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun: the number of workers.")
OMPI_COMM_WORLD_LOCAL_SIZE = EnvironmentVariable("OMPI_COMM_WORLD_LOCAL_SIZE", "Open MPI's mpirun: workers on this host.")
OMPI_4_LAUNCHER = EnvironmentVariable("OMPI_MCA_orte_hnp_uri", "Open MPI 4: the job, and the addresses of mpirun's host.")
PMIX_NAMESPACE = EnvironmentVariable("PMIX_NAMESPACE", "Open MPI 5: the job, and the name of mpirun's host.")
PMI_RANK = EnvironmentVariable("PMI_RANK", "MPICH's and Intel's mpiexec: the index of this worker.")
PMI_SIZE = EnvironmentVariable("PMI_SIZE", "MPICH's and Intel's mpiexec: the number of workers.")
MPI_LOCALNRANKS = EnvironmentVariable("MPI_LOCALNRANKS", "MPICH's and Intel's mpiexec: the number of workers on this host.")
KUBERNETES_SERVICE_HOST = EnvironmentVariable("KUBERNETES_SERVICE_HOST", "Set in every pod: the DNS may get pods' names late.")
JOB_COMPLETION_INDEX = EnvironmentVariable("JOB_COMPLETION_INDEX", "The index of this worker in an indexed Job or a JobSet.")
HOSTNAME = EnvironmentVariable("HOSTNAME", "The name of a pod: in an indexed Job, the job's name and the index.")

# `mirrored launch` sets these for its workers, beside the JAX_* above: launch.py.
JAX_PLATFORMS = EnvironmentVariable("JAX_PLATFORMS", "Set to cpu by `mirrored launch --cpu-devices`; JAX reads it.")
JAX_NUM_CPU_DEVICES = EnvironmentVariable("JAX_NUM_CPU_DEVICES", "Set by `mirrored launch --cpu-devices`; JAX reads it.")
JAX_LOCAL_DEVICE_IDS = EnvironmentVariable("JAX_LOCAL_DEVICE_IDS", "Set by `mirrored launch`: a worker's GPUs; JAX reads it.")
CUDA_VISIBLE_DEVICES = EnvironmentVariable("CUDA_VISIBLE_DEVICES", "Read: the number of GPUs that the user wants.")
MIRRORED_ATTEMPT = EnvironmentVariable("MIRRORED_ATTEMPT", "Set by `mirrored launch`: 0, and one more after every restart.")
MIRRORED_PROGRESS_FILE = EnvironmentVariable("MIRRORED_PROGRESS_FILE", "Set by `mirrored launch`: file of the last saved step.")
MIRRORED_WORKER = EnvironmentVariable("MIRRORED_WORKER", "Set by each worker of several: the worker that its children cannot be.")
MIRRORED_GPUS = EnvironmentVariable(
    "MIRRORED_GPUS", "Set by `mirrored launch --gpus-per-worker`: how many each worker must have."
)
NO_COLOR = EnvironmentVariable("NO_COLOR", "When it is set and not empty, `mirrored launch` writes no colours: no-color.org.")

# gRPC, which connects the workers, reads these names in this order; in capital letters it reads none.
GRPC_PROXY = EnvironmentVariable("grpc_proxy", "Read: a proxy, which is not used between workers.")
HTTPS_PROXY = EnvironmentVariable("https_proxy", "Read: a proxy, which is not used between workers.")
HTTP_PROXY = EnvironmentVariable("http_proxy", "Read: a proxy, which is not used between workers.")
NO_GRPC_PROXY = EnvironmentVariable("no_grpc_proxy", "Where there is a proxy, set to its old value and the host of worker 0.")
NO_PROXY = EnvironmentVariable("no_proxy", "What gRPC reads where no_grpc_proxy is unset, so the start of what is set there.")
PROXIES = (GRPC_PROXY, HTTPS_PROXY, HTTP_PROXY)

# For compiling for TPUs where there is no TPU: `mr.topology`.
TPU_SKIP_MDS_QUERY = EnvironmentVariable("TPU_SKIP_MDS_QUERY", "Set while libtpu is loaded, which else asks the network.")
TPU_ACCELERATOR_TYPE = EnvironmentVariable("TPU_ACCELERATOR_TYPE", "Set while libtpu is loaded: it need not ask for the kind.")
TPU_WORKER_HOSTNAMES = EnvironmentVariable("TPU_WORKER_HOSTNAMES", "Set while libtpu is loaded: this machine is the only one.")
ALLOW_MULTIPLE_LIBTPU_LOAD = EnvironmentVariable("ALLOW_MULTIPLE_LIBTPU_LOAD", "Set while libtpu is loaded: it takes no TPU.")
FOR_TPU_COMPILER = {
    TPU_SKIP_MDS_QUERY: "1",
    TPU_ACCELERATOR_TYPE: "v5litepod-8",
    TPU_WORKER_HOSTNAMES: "localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD: "1",
}

TABLE = tuple(variable for variable in list(globals().values()) if isinstance(variable, EnvironmentVariable))
#: The variables that describe the cluster. They are no secrets, so messages may show them.
CLUSTER = TABLE[TABLE.index(TF_CONFIG) : TABLE.index(HOSTNAME) + 1]


def current() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def forced_host_devices() -> int:
    """Return the number of CPU devices that `XLA_FLAGS` asks for, or 0."""
    counts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", XLA_FLAGS.get() or "")
    return int((counts or ["0"])[-1])


def share_of_gpu_memory() -> float:
    """Return the part of a GPU's memory that JAX takes, at once or (XLA_PYTHON_CLIENT_PREALLOCATE=false) as it needs it."""
    if (ALLOCATOR.get() or "").lower() == "platform":
        return 1.0
    return float(MEMORY_FRACTION.get() or OLD_MEMORY_FRACTION.get() or 0.75)


def named_gpus() -> int | None:
    """Return how many GPUs `CUDA_VISIBLE_DEVICES` names, or None if it is unset."""
    if (names := CUDA_VISIBLE_DEVICES.get()) is None:
        return None
    listed = [name.strip() for name in names.split(",")]  # CUDA stops reading at the first that is no GPU, such as -1
    return len(list(itertools.takewhile(lambda name: name not in ("", "NoDevFiles") and name[0] != "-", listed)))  # Slurm's none


def connect_directly(host: str) -> None:
    """Keep gRPC's connections to a host out of any proxy, in this process and its children."""
    if any(proxy.get() for proxy in PROXIES):
        before = NO_PROXY.get() if NO_GRPC_PROXY.get() is None else NO_GRPC_PROXY.get()
        NO_GRPC_PROXY.set(",".join(filter(None, (before, host))))


@contextlib.contextmanager
def meanwhile(defaults: Mapping[EnvironmentVariable, str]) -> Iterator[None]:
    """Set variables that are unset, for the duration of a block."""
    unset = [variable.name for variable in defaults if variable.get() is None]
    os.environ.update({variable.name: value for variable, value in defaults.items() if variable.name in unset})
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]


@contextlib.contextmanager
def at_least(variable: EnvironmentVariable, minimum: int, fallback: EnvironmentVariable, keep: bool = False) -> Iterator[None]:
    """Raise a number in the environment to at least `minimum` during a block; `keep` it afterwards, unless the block raises."""
    if variable.get_int() >= minimum:
        yield
        return
    before = variable.get()
    os.environ[variable.name] = str(max(minimum, variable.get_int() or fallback.get_int()))
    is_kept = False
    try:
        yield
        is_kept = keep
    finally:
        if not is_kept and before is None:
            del os.environ[variable.name]
        elif not is_kept:
            os.environ[variable.name] = before or ""
