"""How this process finds its cluster: the resolvers, and the order of the variables (docs/design/clusters.md)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence

from .. import _env
from .._text import describe
from . import environments
from .environments import DEFAULT_PORT, NOTHING, SOURCES, decimal, has, near_miss
from .spec import MAX_WORKERS, Cluster, ClusterSpec, refuse, said_by


class ClusterResolver(abc.ABC):
    """A source of the cluster's description: its tasks, and this process's task. Subclasses define `cluster`.

    >>> isinstance(mr.TFConfigClusterResolver(), mr.ClusterResolver)
    True

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/ClusterResolver
    """

    @abc.abstractmethod
    def cluster(self) -> Cluster:
        """Return the cluster as this process sees it."""

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks; false when there is no cluster, as in TensorFlow."""
        return self.cluster().spec

    @property
    def task_type(self) -> str | None:
        """The type of this process's task, None without a cluster."""
        cluster = self.cluster()
        return cluster.task_type if cluster.spec else None

    @property
    def task_id(self) -> int | None:
        """The index of this process among the tasks of its type, None without a cluster."""
        cluster = self.cluster()
        return cluster.task_id if cluster.spec else None


class SimpleClusterResolver(ClusterResolver):
    """A resolver that takes the cluster from its arguments.

    Args:
        cluster_spec: task type -> addresses, equal on all workers.
        task_type: the type of this process, such as "worker".
        task_id: the index among the tasks of that type.

    Raises:
        ClusterConfigError: when an argument is malformed, or they contradict each other.

    >>> resolver = mr.SimpleClusterResolver({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "worker", 1)
    >>> resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id
    ({'worker': ['10.0.0.1:2222', '10.0.0.2:2222']}, 'worker', 1)

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/SimpleClusterResolver
    """

    def __init__(self, cluster_spec: ClusterSpec | Mapping[str, Sequence[str]], task_type: str, task_id: int) -> None:
        with said_by("SimpleClusterResolver"):
            self._cluster = Cluster(ClusterSpec.of(cluster_spec), task_type, task_id, found_in="SimpleClusterResolver")

    def cluster(self) -> Cluster:
        """Return the cluster that was given."""
        return self._cluster


class TFConfigClusterResolver(ClusterResolver):
    """A resolver that reads the cluster from the variable TF_CONFIG at every access. Without it there is no cluster.

    Args:
        environment: the variables to look in; by default this process's own.

    Raises:
        ClusterConfigError: at the access, when TF_CONFIG is malformed.

    >>> config = '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 1}}'
    >>> mr.TFConfigClusterResolver(environment={"TF_CONFIG": config}).task_id
    1

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
    """

    def __init__(self, *, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment

    def cluster(self) -> Cluster:
        """Return the cluster of TF_CONFIG."""
        environment = _environment(self._environment)
        if not has(environment, _env.TF_CONFIG):
            return Cluster()
        return _late(environment, environments.from_tf_config(environment))


class SlurmClusterResolver(ClusterResolver):
    """A resolver that reads the variables that `srun` sets. Hosts keep Slurm's order, in which node2 is before node10.

    Args:
        port_base: the port of the first worker on each host; others there take the next. Jobs on one host need different ones.
        environment: the variables to look in; by default this process's own.

    Raises:
        ClusterConfigError: at the access, when this is no step of a job, or a variable is malformed.

    >>> step = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[2,10]",
    ...         "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    >>> mr.SlurmClusterResolver(environment=step).cluster_spec().as_dict()
    {'worker': ['n2:8888', 'n2:8889', 'n10:8888']}

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/SlurmClusterResolver,
    which sorts the hosts as text.
    """

    def __init__(self, port_base: int = 8888, *, environment: Mapping[str, str] | None = None) -> None:
        self._port_base, self._environment = port_base, environment

    def cluster(self) -> Cluster:
        """Return the cluster of Slurm's variables."""
        environment = _environment(self._environment)
        return _late(environment, environments.slurm_step(environment, self._port_base))


class KubernetesClusterResolver(ClusterResolver):
    """A resolver that reads the variables of a pod. The Kubernetes API is not asked, so no permission is needed.

    A TFJob sets TF_CONFIG, a TrainJob sets JAX_*, a JAXJob and a PyTorchJob set their own. The pods of an indexed Job
    or a JobSet know only their own name and index, so the arguments say the rest.

    Args:
        num_workers: for an indexed Job, its number of pods (`parallelism`).
        subdomain: for an indexed Job, the headless service in front of the pods; a JobSet's own name.
        port: for an indexed Job, the port of worker 0.
        environment: the variables to look in; by default this process's own.

    Raises:
        ClusterConfigError: at the access, when the variables do not describe a cluster.

    >>> pod = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "digits-1"}
    >>> mr.KubernetesClusterResolver(num_workers=2, subdomain="pods", environment=pod).cluster_spec().as_dict()
    {'worker': ['digits-0.pods:8476', 'digits-1.pods:8476']}

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/KubernetesClusterResolver,
    which asks the API and sorts the pods as text.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        subdomain: str | None = None,
        port: int = DEFAULT_PORT,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._num_workers, self._subdomain, self._port, self._environment = num_workers, subdomain, port, environment

    def cluster(self) -> Cluster:
        """Return the cluster of the pod's variables."""
        environment = _environment(self._environment)
        for _, is_there, read in SOURCES[:4]:
            if is_there(environment):
                return dataclasses.replace(read(environment), names_come_late=True)
        return self._indexed_job(environment)

    def _indexed_job(self, environment: Mapping[str, str]) -> Cluster:
        with said_by("KubernetesClusterResolver"):
            if not has(environment, _env.JOB_COMPLETION_INDEX):
                refuse("the pod has neither TF_CONFIG nor JAX_NUM_PROCESSES nor JOB_COMPLETION_INDEX; start it as a job")
            count = self._num_workers
            if count is None or self._subdomain is None:
                refuse(
                    "the pods of an indexed Job do not know how many they are and behind which service: "
                    'write KubernetesClusterResolver(num_workers=2, subdomain="my-service")'
                )
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_WORKERS:
                refuse(f"num_workers is {describe(count)}; expected a whole number from 1 to {MAX_WORKERS}")
            index = decimal(environment, _env.JOB_COMPLETION_INDEX, count)
            name = _env.HOSTNAME.get(environment) or ""
            job, _, number = name.rpartition("-")
            if number != str(index):
                refuse(f"HOSTNAME is {describe(name)}; the pod {index} of an indexed Job is called JOB-{index}")
            addresses = [f"{job}-{i}.{self._subdomain}:{self._port}" for i in range(count)]
            return Cluster(ClusterSpec.of({"worker": addresses}), "worker", index, "an indexed Job", names_come_late=True)


def discover(explicit: object = None, environment: Mapping[str, str] | None = None) -> tuple[Cluster, str]:
    """Find the cluster, and return it with a sentence that names its source.

    Args:
        explicit: a Cluster or a resolver; None to look for variables, in the order of `SOURCES`: the first found decides.
        environment: the variables to look in; by default this process's own.

    Raises:
        ClusterConfigError: when the description is malformed.
    """
    environment = _environment(environment)
    if isinstance(explicit, ClusterResolver):
        explicit = explicit.cluster()
    if isinstance(explicit, Cluster):
        return explicit, f"{explicit}, from the argument `cluster` ({explicit.found_in})"
    if explicit is not None:
        refuse(
            f"cluster= is {describe(explicit)}; give a resolver, for example "
            'mr.SimpleClusterResolver({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "worker", 0)'
        )
    there = [(name, read) for name, is_there, read in SOURCES if is_there(environment)]
    if not there:
        cluster = Cluster(found_in=NOTHING)
        return cluster, "one worker: no variable describes a cluster" + near_miss(cluster, environment)
    cluster = _late(environment, there[0][1](environment))
    ignored = f"; not used: {', '.join(name for name, _ in there[1:])}" * (len(there) > 1)
    return cluster, f"{cluster}, from {cluster.found_in}{ignored}{near_miss(cluster, environment)}"


def _environment(given: Mapping[str, str] | None) -> Mapping[str, str]:
    return _env.current() if given is None else given


def _late(environment: Mapping[str, str], cluster: Cluster) -> Cluster:
    return dataclasses.replace(cluster, names_come_late=has(environment, _env.KUBERNETES_SERVICE_HOST))
