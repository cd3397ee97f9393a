"""The environment variables of launchers: one reader for each launcher, and their order (docs/design/clusters.md)."""

from __future__ import annotations

import collections
import itertools
import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from .. import _env
from .._env import EnvironmentVariable
from .._errors import ClusterConfigError
from .._text import counted, describe
from .spec import (
    LOOPBACK,
    MAX_WORKERS,
    Cluster,
    ClusterSpec,
    check_address,
    check_addresses,
    has_port,
    join_address,
    refuse,
    said_by,
)

EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}'

#: Characters of one variable. Linux gives a variable half of this at most.
MAX_TEXT = 256 * 1024
#: Ports for jobs whose variables name none: above the range from which Linux gives ports to connections.
JOB_PORTS = range(61440, 64512)
#: The port of worker 0 in Kubernetes or under mpiexec, if nothing names one; jax's port on TPUs.
DEFAULT_PORT = 8476
#: Sources of descriptions for which other files ask.
NOTHING, SLURM, TORCHRUN = "nothing", "Slurm's variables", "torchrun's variables"

_NODES = re.compile(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+")
_NUMBERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def from_tf_config(environment: Mapping[str, str]) -> Cluster:
    """Read the variable TF_CONFIG."""
    with said_by("TF_CONFIG", f". Right: TF_CONFIG='{EXAMPLE}'"):
        config = _parse(environment[_env.TF_CONFIG.name])
        if not config:
            return Cluster(found_in="an empty TF_CONFIG")
        if "sparseCluster" in config:
            refuse("it has a sparseCluster (enableDynamicWorker): the number of workers must be fixed")
        for key in ("cluster", "task"):
            if key not in config:
                refuse(f"it has no {key!r}, only {_keys(config)}")
            if not isinstance(config[key], dict):
                refuse(f"{key} is {describe(config[key])}")
        task = config["task"]
        for key in ("type", "index"):
            if key not in task:
                refuse(f"task has no {key!r}, only {_keys(task)}")
        jobs = {role: _in_order(role, addresses) for role, addresses in config["cluster"].items()}
        if "evaluator" in jobs:  # it stands beside the cluster, listed or not
            check_addresses("evaluator", jobs.pop("evaluator"))
        return Cluster(ClusterSpec.of(jobs), task["type"], _as_index(task["index"]), found_in="TF_CONFIG")


def _in_order(role: str, addresses: Any) -> Any:
    """Turn TensorFlow's other form, `{"1": "b:2222", "0": "a:2222"}`, into a list."""
    if not isinstance(addresses, dict):
        return addresses
    by_index = {_as_index(index): address for index, address in addresses.items()}
    missing = [index for index in range(len(by_index)) if index not in by_index]
    if missing:
        refuse(f"cluster.{role} has the indices {_keys(addresses)}; of {len(by_index)} tasks, {missing[0]} is missing")
    return [by_index[index] for index in range(len(by_index))]


def _as_index(index: Any) -> Any:
    if isinstance(index, str) and re.fullmatch("[0-9]{1,6}", index):
        return int(index)
    return index


def _parse(text: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(result := dict(pairs)) != len(pairs):
            refuse(f"{describe(collections.Counter(name for name, _ in pairs).most_common(1)[0][0])} stands twice in one object")
        return result

    if len(text) > MAX_TEXT:
        refuse(f"it has {len(text)} characters, more than {MAX_TEXT}")
    if not text.strip():
        refuse("it is empty; unset it for one worker")
    try:
        config = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        refuse(f"it is not JSON: {error.msg} at character {error.pos}, near {describe(text[max(0, error.pos - 20) :], 40)}")
    except (ValueError, RecursionError) as error:
        if isinstance(error, ClusterConfigError):
            raise
        refuse("it is not JSON that I can read: a number is too long, or it is nested too deeply")
    if not isinstance(config, dict):
        refuse(f"it is {describe(config)}, not an object")
    return config


def _from_jax(environment: Mapping[str, str]) -> Cluster:
    variables = (_env.JAX_COORDINATOR_ADDRESS, _env.JAX_NUM_PROCESSES, _env.JAX_PROCESS_ID)
    with said_by("JAX_*"):
        missing = [variable.name for variable in variables if not has(environment, variable)]
        if missing:
            refuse(f"{' and '.join(missing)} missing: {', '.join(v.name for v in variables)} are set together")
        return _numbered(environment, *variables[1:], _jax_address(environment), "JAX_COORDINATOR_ADDRESS")


def _jax_address(environment: Mapping[str, str]) -> str:
    address, port = _env.JAX_COORDINATOR_ADDRESS.get(environment) or "", _env.JAX_COORDINATOR_PORT.get(environment)
    if port is None or has_port(address):
        return address
    return f"{address}:{port}"


def _from_jaxjob(environment: Mapping[str, str]) -> Cluster:
    with said_by("a JAXJob's variables"):
        address = f"{_env.COORDINATOR_ADDRESS.get(environment)}:{_env.COORDINATOR_PORT.get(environment) or ''}"
        return _numbered(environment, _env.NUM_PROCESSES, _env.PROCESS_ID, address, "COORDINATOR_ADDRESS of a JAXJob")


def _from_torchrun(environment: Mapping[str, str]) -> Cluster:
    def address() -> str:
        if not has(environment, _env.MASTER_ADDR, _env.MASTER_PORT):
            refuse("RANK and WORLD_SIZE are set without MASTER_ADDR and MASTER_PORT, which say where rank 0 is")
        port = max(1, decimal(environment, _env.MASTER_PORT, 65536))
        port += 1 if port < 65535 else -1  # torchrun's own store listens on MASTER_PORT
        host = _host_or_loopback(environment, _env.LOCAL_WORLD_SIZE, _env.WORLD_SIZE, environment[_env.MASTER_ADDR.name])
        return join_address(host, port)

    return _launched(environment, TORCHRUN, _env.WORLD_SIZE, _env.RANK, address)


def _from_open_mpi(environment: Mapping[str, str]) -> Cluster:
    def address() -> str:
        uri, namespace = _env.OMPI_4_LAUNCHER.get(environment) or "", _env.PMIX_NAMESPACE.get(environment) or ""
        # Worker 0 is expected on mpirun's own host, as jax does; the preflight finds out when it is not.
        v4 = re.match(r"([0-9]+)\.[0-9]+;tcp6?://(?:\[([^\],]+)|([^,:;]+))", uri)
        v5 = re.fullmatch(r"prterun-(.+)-[0-9]+@[0-9]+", namespace)
        job, host = namespace, v5 and v5[1]
        if v4:
            job, host = v4[1], v4[2] or v4[3]
        host = _host_or_loopback(environment, _env.OMPI_COMM_WORLD_LOCAL_SIZE, _env.OMPI_COMM_WORLD_SIZE, host)
        return join_address(host, _job_port(job))

    return _launched(environment, "Open MPI's variables", _env.OMPI_COMM_WORLD_SIZE, _env.OMPI_COMM_WORLD_RANK, address)


def _from_mpich(environment: Mapping[str, str]) -> Cluster:
    def address() -> str:
        return f"{_host_or_loopback(environment, _env.MPI_LOCALNRANKS, _env.PMI_SIZE, None)}:{DEFAULT_PORT}"

    return _launched(environment, "mpiexec's variables", _env.PMI_SIZE, _env.PMI_RANK, address)


def _from_slurm(environment: Mapping[str, str]) -> Cluster:
    if has(environment, _env.JAX_COORDINATOR_ADDRESS):
        return _launched(environment, SLURM, _env.SLURM_STEP_NUM_TASKS, _env.SLURM_PROCID, str)
    job = f"{_env.SLURM_JOB_ID.get(environment)}.{_env.SLURM_STEP_ID.get(environment)}"
    return slurm_step(environment, _job_port(job))


def slurm_step(environment: Mapping[str, str], port_base: int) -> Cluster:
    """Read the variables of `srun`; the workers of one host listen at `port_base` and the ports after it."""
    with said_by("Slurm"):
        num_workers = decimal(environment, _env.SLURM_STEP_NUM_TASKS, MAX_WORKERS + 1)
        index = decimal(environment, _env.SLURM_PROCID, num_workers)
        hosts = expand_nodes(_text(environment, _env.SLURM_STEP_NODELIST))
        counts = _tasks_per_node(_text(environment, _env.SLURM_STEP_TASKS_PER_NODE))
        if len(counts) != len(hosts) or sum(counts) != num_workers:
            refuse(
                f"SLURM_STEP_NODELIST has {counted(len(hosts), 'host')}, SLURM_STEP_TASKS_PER_NODE has {len(counts)} of them "
                f"with {counted(sum(counts), 'task')}, and SLURM_STEP_NUM_TASKS is {num_workers}: they do not fit together"
            )
        if not isinstance(port_base, int) or not 1 <= port_base <= 65536 - max(counts):
            refuse(f"port_base is {describe(port_base)}; with {max(counts)} workers on a host give 1 to {65536 - max(counts)}")
        places = [(node, offset) for node, count in enumerate(counts) for offset in range(count)]
        expected = places[index][0]
        node = decimal(environment, _env.SLURM_NODEID, len(hosts)) if has(environment, _env.SLURM_NODEID) else expected
        if node != expected:
            refuse(
                f"task {index} runs on host {node} of the step, not on host {expected}: workers of one host must have "
                "neighbouring numbers, so start with `srun --distribution=block`"
            )
        addresses = [f"{hosts[node]}:{port_base + offset}" for node, offset in places]
        return Cluster(ClusterSpec.of({"worker": addresses}), "worker", index, SLURM)


def _tasks_per_node(text: str) -> list[int]:
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item)
        if not match or not int(match[1]) or len(counts) + int(match[2] or 1) > MAX_WORKERS:
            refuse(f"SLURM_STEP_TASKS_PER_NODE is {describe(text)}; right: '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    if sum(counts) > MAX_WORKERS:
        refuse(f"SLURM_STEP_TASKS_PER_NODE is {describe(text)}: more than {MAX_WORKERS} workers")
    return counts


def _launched(
    environment: Mapping[str, str], name: str, size: EnvironmentVariable, rank: EnvironmentVariable, address: Callable[[], str]
) -> Cluster:
    """Read a launcher's variables; JAX_COORDINATOR_ADDRESS overrides worker 0's address, and one worker needs none."""
    with said_by(name):
        given = _jax_address(environment) if has(environment, _env.JAX_COORDINATOR_ADDRESS) else None
        if given is None and decimal(environment, size, MAX_WORKERS + 1) > 1:
            given = address()
        return _numbered(environment, size, rank, given, "worker 0's address", name)


def _numbered(
    environment: Mapping[str, str],
    size: EnvironmentVariable,
    rank: EnvironmentVariable,
    address: str | None,
    where: str,
    found_in: str = "",
) -> Cluster:
    """Make a cluster from its size, this worker's number, and worker 0's address."""
    num_workers = decimal(environment, size, MAX_WORKERS + 1)
    index = decimal(environment, rank, num_workers)
    first = None if address is None else check_address(where, address)
    spec = ClusterSpec((("worker", (first, *[None] * (num_workers - 1))),))
    return Cluster(spec, "worker", index, found_in or where)


def _host_or_loopback(
    environment: Mapping[str, str], local_size: EnvironmentVariable, size: EnvironmentVariable, host: str | None
) -> str:
    if has(environment, local_size) and local_size.get(environment) == size.get(environment):
        return LOOPBACK
    if host is None:
        refuse("it does not say on which host worker 0 is; set JAX_COORDINATOR_ADDRESS=host:port for all workers as well")
    return host


def _job_port(job: str) -> int:
    """Choose a port by the name of a job, so that all its workers choose the same one."""
    return JOB_PORTS[zlib.crc32(job.encode(errors="replace")) % len(JOB_PORTS)]


def _text(environment: Mapping[str, str], variable: EnvironmentVariable) -> str:
    text = variable.get(environment)
    if not text:
        refuse(f"{variable.name} is {'unset' if text is None else 'empty'}")
    if len(text) > MAX_TEXT:
        refuse(f"{variable.name} has {len(text)} characters, more than {MAX_TEXT}")
    return text


def decimal(environment: Mapping[str, str], variable: EnvironmentVariable, below: int) -> int:
    """Read a whole number below a limit: from 0 on, or from 1 on if the limit is that of numbers of workers."""
    text = _text(environment, variable)
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) >= below:
        refuse(f"{variable.name} is {describe(text)}; expected a whole number below {below}")
    if below == MAX_WORKERS + 1 and int(text) == 0:
        refuse(f"{variable.name} is 0; there is at least one worker")
    return int(text)


def expand_nodes(nodes: str) -> list[str]:
    """Turn Slurm's `gpu[01-03,7],login1` into host names, in the order given."""
    hosts: list[str] = []
    position = 0
    while position <= len(nodes):
        item = _NODES.match(nodes, position)
        if not item or nodes[item.end() : item.end() + 1] not in ("", ","):
            refuse(f"cannot read {describe(nodes[position:])} in a list of hosts; right: 'gpu[01-03,7],login1'")
        names = [""]
        # Texts and contents of brackets take turns.
        for i, part in enumerate(re.split(r"\[([0-9,-]+)\]", item[0])):
            numbers = _expand_numbers(part, (MAX_WORKERS - len(hosts)) // len(names)) if i % 2 else [part]
            names = [name + number for name in names for number in numbers]
        hosts += names
        position = item.end() + 1
    return hosts


def _expand_numbers(ranges: str, limit: int) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _NUMBERS.fullmatch(text)
        if not match:
            refuse(f"cannot read {describe(text)} in a list of hosts; right: '01-03'")
        first, last = match[1], match[2] or match[1]
        count = int(last) - int(first) + 1
        if not 0 < count <= limit - len(numbers):
            refuse(f"{describe(text)} is no range of hosts: it runs backwards, or there are more than {MAX_WORKERS} in all")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers


def has(environment: Mapping[str, str], *variables: EnvironmentVariable) -> bool:
    """Tell whether all of these variables are set, even to the empty text."""
    return all(variable.name in environment for variable in variables)


def _has_jax(environment: Mapping[str, str]) -> bool:
    launched = _has_torchrun(environment) or _has_open_mpi(environment) or _has_mpich(environment) or _has_slurm(environment)
    numbered = _env.JAX_NUM_PROCESSES.name in environment or _env.JAX_PROCESS_ID.name in environment
    return numbered or (has(environment, _env.JAX_COORDINATOR_ADDRESS) and not launched)


def _has_torchrun(environment: Mapping[str, str]) -> bool:
    return has(environment, _env.RANK, _env.WORLD_SIZE)


def _has_open_mpi(environment: Mapping[str, str]) -> bool:
    # Some sites set OMPI_COMM_WORLD_* from Slurm's variables; only mpirun itself sets the launcher's.
    launcher = has(environment, _env.OMPI_4_LAUNCHER) or (_env.PMIX_NAMESPACE.get(environment) or "").startswith("prterun-")
    return has(environment, _env.OMPI_COMM_WORLD_SIZE, _env.OMPI_COMM_WORLD_RANK) and (launcher or not _has_slurm(environment))


def _has_mpich(environment: Mapping[str, str]) -> bool:
    # srun can set PMI_* too; MPI_LOCALNRANKS comes from mpiexec only.
    hydra = has(environment, _env.MPI_LOCALNRANKS) or not _has_slurm(environment)
    return has(environment, _env.PMI_SIZE, _env.PMI_RANK) and hydra


def _has_slurm(environment: Mapping[str, str]) -> bool:
    return has(environment, _env.SLURM_STEP_NODELIST, _env.SLURM_STEP_NUM_TASKS, _env.SLURM_PROCID)


#: The sources of a description, the most explicit first. Under mpirun in a Slurm allocation, Slurm's variables describe
#: mpirun's daemons and not the workers, so MPI's come before. The jobs of Kubeflow set the first four.
SOURCES: tuple[tuple[str, Callable[[Mapping[str, str]], bool], Callable[[Mapping[str, str]], Cluster]], ...] = (
    ("TF_CONFIG", lambda environment: has(environment, _env.TF_CONFIG), from_tf_config),
    ("JAX_*", _has_jax, _from_jax),
    ("JAXJob", lambda e: has(e, _env.COORDINATOR_ADDRESS, _env.NUM_PROCESSES, _env.PROCESS_ID), _from_jaxjob),
    ("torchrun", _has_torchrun, _from_torchrun),
    ("Open MPI", _has_open_mpi, _from_open_mpi),
    ("mpiexec", _has_mpich, _from_mpich),
    ("Slurm", _has_slurm, _from_slurm),
)


def is_left_alone(cluster: Cluster, environment: Mapping[str, str]) -> bool:
    """Tell whether this process trains alone although Slurm has several tasks."""
    is_said = cluster.found_in not in (NOTHING, SLURM)
    return cluster.num_workers == 1 and not is_said and _env.SLURM_NTASKS.get_int(environment) > 1


def near_miss(cluster: Cluster, environment: Mapping[str, str]) -> str:
    """Return a hint if the variables of a job are set, but describe no cluster."""
    if is_left_alone(cluster, environment):
        number = _env.SLURM_NTASKS.get(environment)
        return f" (SLURM_NTASKS is {number}, and this process trains alone: start all tasks with `srun python train.py`)"
    if cluster.found_in != NOTHING:
        return ""
    if has(environment, _env.SLURM_JOB_ID):
        return " (in a Slurm job, but not started with srun)"
    if has(environment, _env.JOB_COMPLETION_INDEX):
        return " (in an indexed Job: if its pods belong together, give mr.KubernetesClusterResolver(num_workers, subdomain))"
    return ""


def _keys(mapping: Mapping[str, Any]) -> str:
    return ", ".join(describe(key, 20) for key in itertools.islice(mapping, 6)) or "nothing"
