"""The description of a cluster: its tasks with their addresses, and this process's task (docs/design/clusters.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from .._errors import ClusterConfigError
from .._text import counted, describe

#: The most workers of one cluster; a slip such as "n[1-99999999]" must not take the memory.
MAX_WORKERS = 2**16
LOOPBACK = "127.0.0.1"

_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<host>[^\[\]:]*)):(?P<port>[^:]*)")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{0,32}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """The tasks of a cluster: for each task type their addresses, None if unknown. `ClusterSpec.of` makes and checks one.

    >>> spec = mr.ClusterSpec.of({"chief": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222"]})
    >>> spec.jobs, spec.job("worker")
    (['chief', 'worker'], ('10.0.0.2:2222',))

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/train/ClusterSpec
    """

    tasks: tuple[tuple[str, tuple[str | None, ...]], ...] = ()

    @classmethod
    def of(cls, tasks: object) -> ClusterSpec:
        """Check a mapping such as `{"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}`."""
        if isinstance(tasks, cls):
            return tasks
        if not isinstance(tasks, Mapping) or not tasks:
            refuse(f'cluster is {describe(tasks)}; it names the workers: {{"worker": ["10.0.0.1:2222", ...]}}')
        spec = cls(tuple((_check_role(role), check_addresses(role, addresses)) for role, addresses in tasks.items()))
        if len(spec.job("chief")) > 1:
            refuse(f"cluster.chief has {len(spec.job('chief'))} addresses; a cluster has one chief, the others are workers")
        _check_distinct(spec)
        return spec

    @property
    def jobs(self) -> list[str]:
        """The task types."""
        return [role for role, _ in self.tasks]

    def job(self, task_type: str) -> tuple[str | None, ...]:
        """Return the addresses of one task type."""
        return dict(self.tasks).get(task_type, ())

    def as_dict(self) -> dict[str, Any]:
        """Return for each task type the list of addresses, or index -> address if some are unknown, as TensorFlow does."""
        return {
            role: {i: a for i, a in enumerate(addresses) if a} if None in addresses else list(addresses)
            for role, addresses in self.tasks
        }

    def __bool__(self) -> bool:
        return bool(self.tasks)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster, and the task of this process in it.

    Args:
        spec: the tasks; empty for one worker that is not part of a cluster.
        task_type: "chief", "worker", or "evaluator", which stands beside the cluster of the workers.
        task_id: the index among the tasks of this type.
        found_in: the source of the description, for messages.
        names_come_late: whether host names may take a while to appear in the DNS, as in Kubernetes.

    Raises:
        ClusterConfigError: when the task is not one of the cluster's.
    """

    spec: ClusterSpec = ClusterSpec()
    task_type: str = "worker"
    task_id: int = 0
    found_in: str = "the arguments"
    names_come_late: bool = False

    def __post_init__(self) -> None:
        if self.task_type not in ("chief", "worker", "evaluator"):
            refuse(f"task.type is {describe(self.task_type)}{_role_hint(self.task_type)}")
        count = len(self.spec.job(self.task_type))
        if self.is_evaluator or not self.spec:
            count = 1
        if not count:
            refuse(f"task.type is {describe(self.task_type)}, but cluster has only {', '.join(self.spec.jobs)}")
        if isinstance(self.task_id, bool) or not isinstance(self.task_id, int):
            refuse(f"task.index is {describe(self.task_id)}; it is a whole number without quotes, 0 for the first")
        if not 0 <= self.task_id < count:
            right = "0" if count == 1 else f"0 to {count - 1}"
            refuse(f"task.index is {describe(self.task_id)}; with {counted(count, self.task_type)} give {right}")

    def __str__(self) -> str:
        if self.is_evaluator:
            return f"evaluator, beside {counted(len(self.workers), 'worker')}"
        if self.num_workers == 1:
            return "one worker"
        at = f" ({self.address})" * bool(self.address)
        return f"worker {self.worker_index} of {self.num_workers}{at}, coordinator {self.coordinator_address}"

    @property
    def workers(self) -> tuple[str | None, ...]:
        """The addresses of all workers in the order of their indices, the chief first; None if unknown."""
        return self.spec.job("chief") + self.spec.job("worker")

    @property
    def is_evaluator(self) -> bool:
        """Whether this process evaluates the workers' model; it computes alone."""
        return self.task_type == "evaluator"

    @property
    def num_workers(self) -> int:
        """The number of processes that compute together with this one, itself included."""
        return 1 if self.is_evaluator else max(1, len(self.workers))

    @property
    def worker_index(self) -> int:
        """The position of this process among the workers: 0 for the chief."""
        if self.is_evaluator:
            return 0
        return self.task_id + (self.task_type == "worker" and len(self.spec.job("chief")))

    @property
    def is_chief(self) -> bool:
        """Whether this process saves and logs for all; the evaluator does so for itself, as in TensorFlow."""
        return self.worker_index == 0

    @property
    def address(self) -> str | None:
        """This worker's `host:port`; None if unknown."""
        if not self.spec or self.is_evaluator:
            return None
        return self.workers[self.worker_index]

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether all workers are known to be on one host, so that nothing needs to listen on the network."""
        hosts = {address and split_address(address)[0] for address in self.workers}
        return len(hosts) == 1 and None not in hosts

    @property
    def coordinator_address(self) -> str | None:
        """The address of worker 0 for `jax.distributed`, the loopback if all workers are on one host; None for one worker."""
        if self.num_workers == 1 or (first := self.workers[0]) is None:
            return None
        host, port = split_address(first)
        if self.is_local:
            host = "::1" if ":" in host else LOOPBACK
        return join_address(host, port)

    def digest(self) -> str:
        """Return a text that is equal on two workers exactly when they have the same description of the cluster."""
        known = self.workers
        if None in known:  # only worker 0's is known, whose host may have another name on each worker: the port counts
            known = tuple(address and str(split_address(address)[1]) for address in known)
        return hashlib.sha256(json.dumps([len(self.spec.job("chief")), known]).encode()).hexdigest()[:32]


def split_address(address: str) -> tuple[str, int]:
    """Split a checked `host:port`; an IPv6 host comes without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Write `host:port`, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Tell whether a numeric address is one of the host itself."""
    return host == "::1" or host.startswith("127.")


def has_port(address: str) -> bool:
    """Tell whether a text ends in a port, right or wrong."""
    return bool(_ADDRESS.fullmatch(address))


def _check_role(role: object) -> str:
    if role not in ("chief", "worker"):
        refuse(f"cluster has the task type {describe(role)}{_role_hint(role)}")
    return str(role)


def _role_hint(role: object) -> str:
    if role == "evaluator":
        return ": the evaluator stands beside the cluster; name it in task.type only"
    if role == "ps":
        return ": parameter servers are not supported; every worker holds all variables, so leave the servers out"
    return "; known are chief and worker, beside them evaluator" + " (the master is now the chief)" * (role == "master")


def check_addresses(role: object, addresses: object) -> tuple[str, ...]:
    """Return the addresses of a task type as they are, or refuse them."""
    if not isinstance(addresses, list | tuple) or not addresses:
        given = "empty" if isinstance(addresses, list | tuple) else describe(addresses)
        refuse(f'cluster.{role} is {given}; it is a list of addresses: ["10.0.0.1:2222"]')
    if len(addresses) > MAX_WORKERS:
        refuse(f"cluster.{role} has {len(addresses)} addresses, more than {MAX_WORKERS}")
    return tuple(check_address(f"cluster.{role}[{i}]", address) for i, address in enumerate(addresses))


def check_address(where: str, address: object) -> str:
    """Return a `host:port` as it is, or refuse it; an IPv6 host stands in brackets."""
    right = "write 'host:port', for example '10.0.0.1:2222'"
    if not isinstance(address, str) or not address:
        refuse(f"{where} is {describe(address)}; {right}")
    if "://" in address:
        refuse(f"{where} is {describe(address)}; leave the {describe(address.partition('://')[0] + '://', 20)} out: {right}")
    match = _ADDRESS.fullmatch(address)
    if not match and address.count(":") > 1:
        refuse(f"{where} is {describe(address)}; write an IPv6 address in brackets, for example '[fd00::1]:2222'")
    if not match:
        refuse(f"{where} is {describe(address)}, which has no port; {right}")
    if not _PORT.fullmatch(match["port"]) or int(match["port"]) > 65535:
        refuse(f"{where} is {describe(address)}, whose port is {describe(match['port'])}; a port is a number from 1 to 65535")
    host = match["host"] if match["v6"] is None else match["v6"]
    if not _is_host(host, match["v6"] is not None):
        refuse(f"{where} is {describe(address)}, whose host is {describe(host)}; {right}")
    return address


def _is_host(host: str, is_v6: bool) -> bool:
    if not is_v6 and re.search("[^0-9.]", host):
        return bool(_HOST.fullmatch(host))
    try:
        ip = ipaddress.IPv6Address(host) if is_v6 else ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return not ip.is_unspecified and host.isascii() and bool(_ZONE.fullmatch(host.partition("%")[2]))


def _check_distinct(spec: ClusterSpec) -> None:
    seen: dict[str, str] = {}
    for role, addresses in spec.tasks:
        for i, address in enumerate(addresses):
            first = seen.setdefault(str(address).lower(), where := f"cluster.{role}[{i}]")
            if first != where:
                refuse(f"{first} and {where} are both {describe(address)}; every task has an address of its own")


def refuse(text: str) -> NoReturn:
    """Raise ClusterConfigError, the error of a wrong description."""
    raise ClusterConfigError(text)


@contextlib.contextmanager
def said_by(source: str, right: str = "") -> Iterator[None]:
    """Add to an error the source of the description, and an example of a right one."""
    try:
        yield
    except ClusterConfigError as error:
        raise ClusterConfigError(f"{source}: {error}{right}") from None
