"""A cluster is found where its launcher described it, and a description that is wrong is one readable error."""

import copy
import dataclasses
import json
import pickle
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mirrored._cluster.environments import MAX_TEXT, expand_nodes, is_left_alone
from mirrored._cluster.resolvers import (
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    discover,
)
from mirrored._cluster.spec import Cluster, ClusterSpec, check_address, join_address, split_address
from mirrored._errors import ClusterConfigError

A, B, C = "10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"
FUZZ = settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def tf_config(cluster: object = None, task: object = None, **more: object) -> dict[str, str]:
    cluster = {"worker": [A, B]} if cluster is None else cluster
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task or {"type": "worker", "index": 0}, **more})}


# Recorded: the pod of a TFJob (training-operator v1), names shortened.
TFJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "HOSTNAME": "mnist-worker-1",
    "TF_CONFIG": '{"cluster":{"chief":["mnist-chief-0.kubeflow.svc:2222"],"worker":["mnist-worker-0.kubeflow.svc:2222",'
    '"mnist-worker-1.kubeflow.svc:2222"]},"task":{"type":"worker","index":1},"environment":"cloud"}',
}
# What kubeflow/trainer's plugin for jax sets (pkg/runtime/framework/plugins/jax/jax.go), in an indexed Job of a JobSet.
TRAINJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "digits-node-0-1", "JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "3",
    "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "digits-node-0-0.digits:6666", "JAX_COORDINATOR_PORT": "6666",
    "JAX_DISTRIBUTED_BACKEND": "gloo",
}  # fmt: skip
JAXJOB = {"COORDINATOR_ADDRESS": "digits-worker-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "2", "PROCESS_ID": "0"}
# Recorded: torchrun --nnodes 2 --nproc-per-node 2.
TORCHRUN = {
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
# Recorded: a step of srun, the part that says who is where, with two hosts more.
SRUN = {
    "SLURMD_NODENAME": "sh04-10n05", "SLURM_DISTRIBUTION": "block", "SLURM_JOB_ID": "22902023", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2", "SLURM_NTASKS": "5", "SLURM_PROCID": "4", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "sh04-10n[02-03,05]", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_TASKS_PER_NODE": "2(x2),1",
}  # fmt: skip
# Recorded: Open MPI 5.0.11, mpirun -n 2.
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_UNIVERSE_SIZE": "2", "OMPI_VERSION": "5.0.11",
    "PMIX_HOSTNAME": "vm", "PMIX_NAMESPACE": "prterun-vm-26329@1", "PMIX_RANK": "1",
}  # fmt: skip
OPEN_MPI_4 = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "1531576321",
}  # fmt: skip
# Recorded: MPICH 5.0.2, mpiexec -n 2.
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11", "PMI_HOSTNAME": "vm", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}


def quickly(work: Callable[[], object], seconds: float = 0.3) -> object:
    """Do something in so much time of the processor."""
    before = time.process_time()
    try:
        return work()
    finally:
        assert time.process_time() - before < seconds


def not_refused(cases: Iterable[tuple[Any, str]], begins: str = "") -> list[str]:
    """Return of which variables, or calls, the error does not say so in one line."""
    wrong = []
    for case, says in cases:
        try:
            wrong.append(f"{says}: {quickly(case if callable(case) else lambda e=case: discover(environment=e))}")
        except ClusterConfigError as error:
            text = str(error)
            is_right = re.search(says, text) and text.startswith(begins) and error.exit_code == 76
            if not (is_right and text.isprintable() and len(text) < 600):
                wrong.append(f"{says}: {text}")
    return wrong


def test_each_launcher_is_understood() -> None:
    of_chief = tf_config({"chief": ["h:1"], "worker": ["h:2", "h:3"]}, {"type": "worker", "index": 0})
    for environment, index, num_workers, coordinator, found_in in [
        (TFJOB, 2, 3, "mnist-chief-0.kubeflow.svc:2222", "TF_CONFIG"),
        (TRAINJOB, 1, 3, "digits-node-0-0.digits:6666", "JAX_COORDINATOR_ADDRESS"),
        (JAXJOB, 0, 2, "digits-worker-0:6666", "JAXJob"),
        (TORCHRUN, 3, 4, "node0:29501", "torchrun"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, 3, 4, "127.0.0.1:29501", "torchrun"),
        (TORCHRUN | {"MASTER_PORT": "65535"}, 3, 4, "node0:65534", "torchrun"),
        (TORCHRUN | {"MASTER_ADDR": "fd00::1"}, 3, 4, "[fd00::1]:29501", "torchrun"),
        (SRUN, 4, 5, "sh04-10n02:62304", "Slurm"),
        (OPEN_MPI_5, 1, 2, "127.0.0.1:64450", "Open MPI"),
        (OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 1, 2, "vm:64450", "Open MPI"),
        (OPEN_MPI_4, 0, 4, "10.96.0.1:61556", "Open MPI"),
        (MPICH, 1, 2, "127.0.0.1:8476", "mpiexec"),
        (MPICH | {"MPI_LOCALNRANKS": "1", "JAX_COORDINATOR_ADDRESS": "n0:1234"}, 1, 2, "n0:1234", "mpiexec"),
        (SRUN | {"JAX_COORDINATOR_ADDRESS": "n0:1234"}, 4, 5, "n0:1234", "Slurm"),
        (TRAINJOB | {"JAX_COORDINATOR_ADDRESS": "digits-node-0-0.digits"}, 1, 3, "digits-node-0-0.digits:6666", "JAX"),
        (tf_config(), 0, 2, A, "TF_CONFIG"),
        (of_chief, 1, 3, "127.0.0.1:1", "TF_CONFIG"),
        (tf_config({"worker": ["[fd00::1]:1", "[fd00::1]:2"]}), 0, 2, "[::1]:1", "TF_CONFIG"),
        (tf_config({"worker": [A]}), 0, 1, None, "TF_CONFIG"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0, 1, None, "torchrun"),
    ]:
        cluster, found = discover(environment=environment)
        assert (cluster.worker_index, cluster.num_workers, cluster.coordinator_address) == (index, num_workers, coordinator)
        assert cluster.is_chief == (index == 0)
        assert found_in in cluster.found_in and cluster.found_in in found and "\n" not in found
        assert cluster.names_come_late == ("KUBERNETES_SERVICE_HOST" in environment)
        assert (str(num_workers) in found or "one worker" in found) and (coordinator or "") in found


def test_without_a_description_there_is_one_worker_and_the_sentence_says_what_is_near() -> None:
    for environment, says in [
        ({}, "one worker: no variable describes a cluster"),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, "not started with srun"),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
            "SLURM_NTASKS is 4, and this process trains alone: .* `srun python train.py`",
        ),
        ({"JOB_COMPLETION_INDEX": "1"}, "KubernetesClusterResolver"),
        ({"MASTER_ADDR": "x", "MASTER_PORT": "1", "WORLD_SIZE": "2"}, "one worker"),
    ]:
        cluster, found = discover(environment=environment)
        assert re.search(says, found) and not cluster.spec and cluster.address is None
        assert (cluster.num_workers, cluster.worker_index, cluster.is_chief, cluster.coordinator_address) == (1, 0, True, None)


def test_a_process_that_knows_itself_only_of_several_tasks_of_slurm_is_left_alone() -> None:
    one = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
    for environment, is_alone in [
        ({"SLURM_NTASKS": "2"}, True),
        (one | {"SLURM_NTASKS": "2"}, True),  # the shell of `salloc`, which is a step of its own
        (one | {"SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "many"}, False),
        (SRUN, False),
        (tf_config({"worker": [A]}) | {"SLURM_NTASKS": "2"}, False),  # somebody has said so
    ]:
        cluster, found = discover(environment=environment)
        assert is_left_alone(cluster, environment) == is_alone == ("trains alone" in found), environment


def test_the_most_explicit_description_decides_and_the_others_are_named() -> None:
    everything = SRUN | MPICH | OPEN_MPI_5 | TORCHRUN | JAXJOB | TRAINJOB | tf_config()
    names = ["TF_CONFIG", "JAX", "JAXJob", "torchrun", "Open MPI", "mpiexec", "Slurm"]
    owned = [tf_config(), TRAINJOB, JAXJOB, TORCHRUN, OPEN_MPI_5, MPICH, SRUN]
    for name, variables in zip(names, owned, strict=True):
        cluster, found = discover(environment=everything)
        assert name in cluster.found_in
        assert ("not used: " in found) == (name != "Slurm")
        everything = {key: value for key, value in everything.items() if key not in variables}


def test_an_argument_decides_before_all_variables() -> None:
    given_cluster = SimpleClusterResolver({"worker": [A, B]}, "worker", 1)
    for explicit in (given_cluster, given_cluster.cluster()):
        cluster, found = discover(explicit, environment=tf_config() | SRUN)
        assert cluster == given_cluster.cluster() and "the argument `cluster`" in found
    with pytest.raises(ClusterConfigError, match=r"cluster= is a list of 2; give a resolver, for example mr\.Simple"):
        discover([A, B])


def test_mpirun_in_a_slurm_allocation_is_not_taken_for_slurm() -> None:
    for name, mpi in {"Open MPI": OPEN_MPI_5, "mpiexec": MPICH}.items():
        assert name in discover(environment=SRUN | mpi)[0].found_in
        copied = {key: value for key, value in mpi.items() if key not in ("PMIX_NAMESPACE", "MPI_LOCALNRANKS")}
        assert "Slurm" in discover(environment=SRUN | copied)[0].found_in


def test_jobs_on_one_host_get_different_ports() -> None:
    ports = {discover(environment=SRUN | {"SLURM_JOB_ID": str(job)})[0].coordinator_address for job in range(50)}
    steps = {discover(environment=SRUN | {"SLURM_STEP_ID": str(step)})[0].coordinator_address for step in range(10)}
    assert len(ports) > 45 and len(steps) > 8


def test_chief_workers_and_evaluator_know_their_places() -> None:
    for task, index, num_workers, address, coordinator in [
        (("chief", 0), 0, 3, A, A),
        (("worker", 0), 1, 3, B, A),
        (("worker", 1), 2, 3, C, A),
        (("evaluator", 0), 0, 1, None, None),
    ]:
        it = SimpleClusterResolver({"worker": [B, C], "chief": [A]}, *task).cluster()
        assert (it.worker_index, it.num_workers, it.address, it.coordinator_address) == (index, num_workers, address, coordinator)
        assert it.is_chief == (index == 0) and it.is_evaluator == (task[0] == "evaluator") and it.workers == (A, B, C)
    assert "evaluator, beside 3 workers" in str(it)


def test_a_cluster_is_a_value_with_a_digest_that_is_the_same_on_all_workers() -> None:
    def cluster(spec: Any, task: str = "worker", index: int = 0) -> Cluster:
        return SimpleClusterResolver(spec, task, index).cluster()

    one, same = cluster({"worker": [A, B]}, index=1), cluster({"worker": (A, B)}, index=1)
    assert one == same == pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) and hash(one) == hash(same)  # noqa: S301
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.task_id = 0
    assert ClusterSpec.of(one.spec) is one.spec
    assert one.digest() == cluster({"worker": [A, B]}).digest()
    with_chief = {"chief": [A], "worker": [B]}
    assert cluster(with_chief).digest() == cluster({"worker": [B], "chief": [A]}, "chief").digest()
    assert len({cluster(s).digest() for s in ({"worker": [A, B]}, {"worker": [B, A]}, {"worker": [A]}, with_chief)}) == 4
    first, renamed, moved = (
        discover(environment=TORCHRUN | {"MASTER_ADDR": host, "MASTER_PORT": port})[0].digest()
        for host, port in [("a", "1"), ("b", "1"), ("a", "2")]
    )
    assert first == renamed != moved


def test_resolvers_answer_as_in_tensorflow() -> None:
    hosts = [f"sh04-10n{n}:{port}" for n, port in [("02", 8888), ("02", 8889), ("03", 8888), ("03", 8889), ("05", 8888)]]
    for resolver, place, jobs in [
        (TFConfigClusterResolver(environment=TFJOB), ("worker", 1), json.loads(TFJOB["TF_CONFIG"])["cluster"]),
        (TFConfigClusterResolver(environment={}), (None, None), {}),
        (SlurmClusterResolver(environment=SRUN), ("worker", 4), {"worker": hosts}),
        (KubernetesClusterResolver(environment=TRAINJOB), ("worker", 1), {"worker": {0: "digits-node-0-0.digits:6666"}}),
        (SimpleClusterResolver({"chief": [A]}, "chief", 0), ("chief", 0), {"chief": [A]}),
    ]:
        spec = resolver.cluster_spec()
        assert (resolver.task_type, resolver.task_id, spec.as_dict(), spec.jobs, bool(spec)) == (
            *place,
            jobs,
            [*jobs],
            bool(jobs),
        )
    assert SlurmClusterResolver(7000, environment=SRUN).cluster().coordinator_address == "sh04-10n02:7000"


def test_tf_config_is_read_at_every_access(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = TFConfigClusterResolver()
    for index in (0, 1):
        monkeypatch.setenv("TF_CONFIG", tf_config(task={"type": "worker", "index": index})["TF_CONFIG"])
        assert resolver.task_id == index == discover()[0].task_id
    monkeypatch.delenv("TF_CONFIG")
    assert resolver.task_id is None


def test_in_kubernetes_names_may_come_late_and_an_indexed_job_needs_the_number_of_its_pods() -> None:
    for pod in (TFJOB, TRAINJOB, JAXJOB, TORCHRUN):
        environment = {name: value for name, value in pod.items() if name != "KUBERNETES_SERVICE_HOST"}
        assert KubernetesClusterResolver(environment=environment).cluster().names_come_late
        assert not discover(environment=environment)[0].names_come_late
    pod = {"JOB_COMPLETION_INDEX": "11", "HOSTNAME": "digits-11", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    cluster = KubernetesClusterResolver(12, "pods", 9999, environment=pod).cluster()
    assert cluster.address == "digits-11.pods:9999" and cluster.coordinator_address == "digits-0.pods:9999"
    assert cluster.names_come_late
    cases = [
        ((), pod, r'write KubernetesClusterResolver\(num_workers=2, subdomain="'),
        ((), {}, "neither TF_CONFIG nor JAX_NUM_PROCESSES nor JOB_COMPLETION_INDEX"),
        ((3, "pods"), pod, "JOB_COMPLETION_INDEX is '11'; expected a whole number below 3"),
        ((True, "pods"), pod, "num_workers is true"),
        ((12, "pods"), pod | {"HOSTNAME": "x"}, "HOSTNAME is 'x'; the pod 11 .* called JOB-11"),
        ((12, "a b"), pod, r"cluster.worker\[0\] is 'digits-0.a b:8476', whose host"),
        ((12, "pods", 0), pod, "a port is a number from 1 to 65535"),
    ]
    assert not_refused((KubernetesClusterResolver(*given, environment=e).cluster, says) for given, e, says in cases) == []


def test_a_malformed_tf_config_says_what_is_wrong_and_shows_a_right_one() -> None:
    cases = {
        "": "it is empty; unset it for one worker", "  \n": "it is empty", "NaN": "it is a?n?.*, not an object",
        "{'cluster': {}}": r"not JSON: Expecting property name .* at character 1, near \"\{'cluster",
        "x" * (MAX_TEXT + 1): f"{MAX_TEXT + 1} characters, more than {MAX_TEXT}", "9" * 10_000: "a number is too long",
        "[" * 100_000: "nested too deeply", '{"a":' * 30_000 + "1" + "}" * 30_000: "(nested too deeply|only .a.)",
        "[]": "it is a list of 0, not an object", '"worker"': "it is 'worker', not an object", "null": "it is null, not an",
        '{"task": {}}': "it has no 'cluster', only 'task'",
        "{CLUSTER}": "it has no 'task', only 'cluster'", '{"cluster": [], "task": {}}': "cluster is a list of 0",
        '{"cluster": {}, "task": {"type": "worker", "index": 0}}': "cluster is an object with nothing",
        '{CLUSTER, "cluster": {"worker": ["b:1"]}, "task": {}}': "'cluster' stands twice",
        '{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {}}': "'worker' stands twice",
        '{"sparseCluster": {"worker": {"0": "a:1"}}}': "the number of workers must be fixed",
        '{CLUSTER, "task": {"index": 0}}': "task has no 'type', only 'index'",
        '{CLUSTER, "task": {"type": "worker"}}': "task has no 'index', only 'type'", '{CLUSTER, "task": 3}': "task is 3",
    }  # fmt: skip
    for text, says in cases.items():
        environment = {"TF_CONFIG": text.replace("CLUSTER", '"cluster": {"worker": ["a:1"]}')}
        says = f"(?s){says}.*Right: TF_CONFIG='{{"
        resolve = TFConfigClusterResolver(environment=environment).cluster
        assert not_refused([(resolve, says), (environment, says)], "TF_CONFIG: ") == []


def test_an_index_is_a_whole_number_of_a_task_that_exists() -> None:
    whole = "it is a whole number without quotes"
    cases: list[tuple[Any, str]] = [
        (2, "2; with 2 workers give 0 to 1"), (-1, "-1"), (10**30, "a huge number"), (0.5, f"0.5; {whole}"), (1.0, "1.0"),
        (float("nan"), "nan"), (True, "true"), ("x", f"'x'; {whole}"), (None, "null"), ([0], "a list of 1"),
    ]  # fmt: skip
    for index, says in cases:
        assert not_refused([(tf_config(task={"type": "worker", "index": index}), f"task.index is {says}")]) == []
        by_hand = (lambda i=index: SimpleClusterResolver({"worker": [A, B]}, "worker", i), f"task.index is {says}")
        assert not_refused([by_hand], "SimpleClusterResolver: ") == []


def test_a_cluster_that_contradicts_itself_says_where() -> None:
    cases = [
        ({"worker": [A], "ps": [B]}, None, "task type 'ps': parameter servers are not supported"),
        ({"worker": [A]}, {"type": "ps", "index": 0}, "task.type is 'ps': parameter servers are not supported"),
        ({"master": [A]}, None, "the master is now the chief"),
        ({"wrkr": [A]}, None, "task type 'wrkr'; known are chief and worker"),
        ({"worker": [A]}, {"type": "foo\n\x1b[31m", "index": 0}, r"task.type is 'foo\\n\\x1b\[31m'"),
        ({"worker": [A]}, {"type": "chief", "index": 0}, "task.type is 'chief', but cluster has only worker"),
        ({"chief": [A, B], "worker": [C]}, None, "cluster.chief has 2 addresses; a cluster has one chief"),
        ({"worker": [A]}, {"type": "evaluator", "index": 1}, "task.index is 1; with 1 evaluator give 0"),
        ({"worker": []}, None, "cluster.worker is empty; it is a list of addresses"),
        ({"worker": A}, None, "cluster.worker is '10.0.0.1:2222'; it is a list"),
        ({"worker": [A, B, A]}, None, r"cluster.worker\[0\] and cluster.worker\[2\] are both '10.0.0.1:2222'"),
        ({"chief": ["Host:1"], "worker": ["hOST:1"]}, None, r"cluster.chief\[0\] and cluster.worker\[0\] are both"),
        ({"worker": [A, "10.0.0.2"]}, None, r"cluster.worker\[1\] is '10.0.0.2', which has no port; write 'host:port'"),
    ]
    assert not_refused((tf_config(cluster, task), says) for cluster, task, says in cases) == []
    assert not_refused([(lambda: Cluster(ClusterSpec.of({"worker": [A]}), "boss"), "task.type is 'boss'")]) == []
    assert not_refused([(lambda: ClusterSpec.of([A]), "cluster is a list of 1; it names the workers")]) == []


def test_addresses_that_are_right_are_kept_and_others_refused() -> None:
    for address in ("h:1", "h-1.x_y.svc:65535", "10.0.0.1:2222", "[::1]:1", "[fe80::1%eth0]:80", "_a:1", "1a:1"):
        assert check_address("here", address) == address == join_address(*split_address(address))
    cases: dict[Any, str] = {
        '': "is ''", None: 'is null', 2222: 'is 2222', 'h': 'has no port', 'h:': "whose port is ''",
        'h:0': "whose port is '0'", 'h:65536': "whose port is '65536'; a port is a number from 1 to 65535",
        'h:99999999999': 'whose port is', 'h:1.5': 'whose port', 'h:+1': 'whose port',
        'h: 1': 'whose port', 'h:1\n': "whose port is '1\\\\n'", 'h:\u0661': 'whose port',
        ':1': "whose host is ''", '::1:2222': 'IPv6 address in brackets', 'h:1:2': 'in brackets', '[]:1': "whose host is ''",
        '[::g]:1': 'whose host', '[::]:1': "whose host is '::'", '[fe80::1%a b]:1': 'whose host',
        '[::1]': 'in brackets', '0.0.0.0:1': "whose host is '0.0.0.0'", '10.0.0.256:1': "whose host is '10.0.0.256'",
        '1.2.3:1': "whose host is '1.2.3'", 'grpc://h:1': "leave the 'grpc://' out: write 'host:port'",
        'http://10.0.0.1:2222': "is 'http://10.0.0.1:2222'; leave the 'http://' out: write 'host:port', for example",
        'http://h': "leave the 'http://' out", '://': "leave the '://' out", 'a b:1': "whose host is 'a b'",
        '$(reboot):1': 'whose host', 'a/b:1': 'whose host', '-x:1': 'whose host', 'é:1': "whose host is '\\\\xe9'",
        'h\x00:1': "whose host is 'h\\\\x00'", "x" * 300 + ":1": "whose host is 'x+'...",
    }  # fmt: skip
    given = [*cases.items(), (["h:1"], "is a list of 1")]
    refused = ((lambda a=address: check_address("cluster.worker[3]", a), says) for address, says in given)
    assert not_refused(refused, "cluster.worker[3] is ") == []


def test_lists_of_slurm_hosts_are_expanded_in_their_order_or_refused_at_once() -> None:
    for nodes, hosts in {
        "n1": "n1", "n2,n10": "n2 n10", "n[2,10]": "n2 n10", "gpu[01-03,7],login1": "gpu01 gpu02 gpu03 gpu7 login1",
        "n[8-11]": "n8 n9 n10 n11", "n[098-101]-ib": "n098-ib n099-ib n100-ib n101-ib",
        "r[1-2]n[1,3]": "r1n1 r1n3 r2n1 r2n3", "a.b_c-d[5]": "a.b_c-d5",
    }.items():  # fmt: skip
        assert expand_nodes(nodes) == hosts.split()
    wrong = [
        "", ",", "a,", "a,,b", "n[1-", "n]", "n[]", "n[a]", "n[3-1]", "n[1-2-3]", "n[1,]", "n[[1]]", "a b", "n[1-99999999]",
        "n[1-65537]", "n[1-300]m[1-300]", "[1-65536]" * 5000, "n[1-40000],m[1-40000]", "n[1-2]" + "\n", "é", "n[1-65536]," * 3,
    ]  # fmt: skip
    assert not_refused((lambda n=nodes: expand_nodes(n), "") for nodes in wrong) == []


def test_slurm_variables_that_do_not_fit_are_refused() -> None:
    cases = [
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID is '5'; expected a whole number below 5"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID is '-1'"),
        ({"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS is 0; there is at least one worker"),
        ({"SLURM_STEP_NUM_TASKS": "999999999"}, "SLURM_STEP_NUM_TASKS is '999999999'"),
        ({"SLURM_STEP_NUM_TASKS": "6"}, "3 hosts.* 5 tasks, and SLURM_STEP_NUM_TASKS is 6: they do not fit"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE is empty"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "has 2 of them"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x999999)"}, r"right: '2\(x3\),1'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "999999(x3)"}, "more than 65536 workers"),
        ({"SLURM_STEP_NODELIST": "n["}, "cannot read 'n\\['|cannot read"),
        ({"SLURM_NODEID": "0"}, "task 4 runs on host 0 of the step, not on host 2: .*`srun --distribution=block"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID is '3'"),
    ]
    for change, says in cases:
        resolve = SlurmClusterResolver(environment=SRUN | change).cluster
        assert not_refused([(resolve, says), (SRUN | change, says)]) == []
    for port_base in (0, 65535, -1, "8888", None):
        resolver = SlurmClusterResolver(port_base, environment=SRUN)  # pyrefly: ignore
        assert not_refused([(resolver.cluster, r"port_base is .*; with 2 workers on a host give 1 to 65534")]) == []
    assert not_refused([(SlurmClusterResolver(environment={}).cluster, "SLURM_STEP_NUM_TASKS is unset")]) == []


def test_variables_of_launchers_that_are_wrong_are_refused() -> None:
    cases = [
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID missing: .* are set together"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID missing"),
        (TRAINJOB | {"JAX_PROCESS_ID": "3"}, "JAX_PROCESS_ID is '3'; expected a whole number below 3"),
        (TRAINJOB | {"JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID is empty"),
        (TRAINJOB | {"JAX_NUM_PROCESSES": "x" * 999}, "JAX_NUM_PROCESSES is 'x+'..."),
        (TRAINJOB | {"JAX_COORDINATOR_ADDRESS": "h:0"}, "JAX_COORDINATOR_ADDRESS is 'h:0', whose port"),
        (JAXJOB | {"COORDINATOR_PORT": ""}, "a JAXJob's variables: .* whose port is ''"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set without MASTER_ADDR and MASTER_PORT"),
        (TORCHRUN | {"RANK": "4"}, "torchrun's variables: RANK is '4'"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
        (TORCHRUN | {"MASTER_ADDR": "a b"}, "whose host is 'a b'"),
        (MPICH | {"MPI_LOCALNRANKS": "1"}, "does not say on which host worker 0 is; set JAX_COORDINATOR_ADDRESS=host:port"),
        (OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": "?"}, "does not say on which host"),
        (OPEN_MPI_5 | {"OMPI_COMM_WORLD_RANK": "9"}, "Open MPI's variables: OMPI_COMM_WORLD_RANK is '9'"),
        (MPICH | {"JAX_COORDINATOR_ADDRESS": ""}, "worker 0's address is ''"),
    ]
    assert not_refused(cases) == []


KEYS = st.sampled_from(["cluster", "task", "worker", "chief", "type", "index", "ps"]) | st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.sampled_from([A, B, "worker", "chief"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)


def discovers_or_refuses(environment: dict[str, str]) -> None:
    try:
        cluster, found = quickly(lambda: discover(environment=environment))
    except ClusterConfigError as error:
        assert str(error).isprintable() and len(str(error)) < 1000
    else:
        assert 0 <= cluster.worker_index < cluster.num_workers and found.isprintable()


@FUZZ
@given(st.text(), JSON, JSON, JSON)
@example("\udcff", None, None, None)
@example("1e999", None, None, None)
def test_no_text_and_no_json_in_tf_config_escapes_as_another_error(text: str, config: Any, cluster: Any, task: Any) -> None:
    discovers_or_refuses({"TF_CONFIG": text})
    discovers_or_refuses({"TF_CONFIG": json.dumps(config)})
    discovers_or_refuses({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
    discovers_or_refuses({"TF_CONFIG": json.dumps({"cluster": {"worker": cluster}, "task": {"type": "worker", "index": task}})})


@FUZZ
@given(st.sampled_from([TFJOB, TRAINJOB, JAXJOB, TORCHRUN, SRUN, OPEN_MPI_4, OPEN_MPI_5, MPICH]), st.data())
def test_no_change_of_a_launchers_variable_escapes_as_another_error(environment: dict[str, str], data: st.DataObject) -> None:
    name = "TF_CONFIG" if environment is TFJOB else data.draw(st.sampled_from(sorted(environment)))
    text = list(environment[name])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 3))] = data.draw(
            st.text('{}[]()":,;\\/@x0123456789.eE-worker\x00\n', max_size=3)
        )
    discovers_or_refuses(environment | {name: "".join(text)})
    discovers_or_refuses(environment | {name: data.draw(st.text(max_size=20) | st.text("[]()x,-0123456789:.;/@", max_size=20))})


def test_a_cluster_of_the_largest_size_is_read_quickly() -> None:
    environment = tf_config({"worker": [f"h{i}:1" for i in range(20_000)]}, {"type": "worker", "index": 19_999})
    cluster, _ = quickly(lambda: discover(environment=environment), 1.0)
    assert cluster.num_workers == 20_000


def test_tf_config_as_tensorflow_takes_it() -> None:
    def read(config: object) -> TFConfigClusterResolver:
        return TFConfigClusterResolver(environment={"TF_CONFIG": json.dumps(config)})

    assert read({}).cluster_spec().as_dict() == {}
    sparse = {"cluster": {"worker": {"1": "b:2", "0": "a:1"}}, "task": {"type": "worker", "index": "1"}}
    assert (read(sparse).cluster_spec().as_dict(), read(sparse).task_id) == ({"worker": ["a:1", "b:2"]}, 1)
    listed = {"cluster": {"worker": ["a:1"], "evaluator": ["e:1"]}, "task": {"type": "evaluator", "index": 0}}
    assert (read(listed).cluster_spec().as_dict(), read(listed).task_type) == ({"worker": ["a:1"]}, "evaluator")
    wrong = {
        r"cluster\.worker has the indices '1', '2'; of 2 tasks, 0 is missing": {"worker": {"1": "b:2", "2": "a:1"}},
        r"cluster\.evaluator is 'x'": {"worker": ["a:1"], "evaluator": "x"},
    }
    for message, cluster in wrong.items():
        with pytest.raises(ClusterConfigError, match=message):
            read({"cluster": cluster, "task": {"type": "worker", "index": 0}}).cluster_spec()
