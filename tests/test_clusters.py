"""The files in examples/clusters describe the clusters that the resolvers find; what can be run of them here is run."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mirrored import launch
from mirrored._cluster.resolvers import discover
from mirrored._cluster.spec import Cluster

ROOT = Path(__file__).parent.parent
CLUSTERS = ROOT / "examples" / "clusters"
PAGE = (ROOT / "docs" / "clusters.md").read_text()


def _stub(folder: Path, name: str, code: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


def _bash(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
    return subprocess.run(["bash", *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=20)


def _found(environment: Mapping[str, str], num_workers: int, index: int) -> Cluster:
    cluster, _ = discover(environment=environment)
    assert (cluster.num_workers, cluster.worker_index) == (num_workers, index)
    return cluster


def _yaml(name: str) -> Any:
    return pytest.importorskip("yaml").safe_load((CLUSTERS / name).read_text())


def _is_right_container(pod: dict, name: str) -> bool:
    [container] = pod["containers"]
    mounts, volumes = container["volumeMounts"], pod["volumes"]
    runs = "exec python examples/two_hosts.py --checkpoints /shared/" in container["args"][0]
    return container["name"] == name and runs and mounts[0]["name"] == volumes[0]["name"] and container["command"][0] == "bash"


def test_the_page_names_each_file_and_each_file_says_how_it_is_started() -> None:
    for path in CLUSTERS.iterdir():
        if path.is_file():
            assert f"examples/clusters/{path.name}" in PAGE, path
            assert f"examples/clusters/{path.name}" in path.read_text()[:700], path


@pytest.mark.parametrize(("name", "rank"), [("launch.sh", 0), ("launch.sh", 1), ("skypilot.yaml", 1), ("two-hosts.service", 1)])
def test_the_launcher_reads_the_commands(name: str, rank: int, tmp_path: Path) -> None:
    _stub(tmp_path, "mirrored", 'for a in "$@"; do printf "%s\\n" "$a"; done')
    if name == "launch.sh":
        ended = _bash(tmp_path, str(CLUSTERS / name), str(rank), "gpu-0")
    elif name == "skypilot.yaml":
        job = _yaml(name)
        sky = {"SKYPILOT_NUM_NODES": str(job["num_nodes"]), "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "gpu-0\ngpu-1"}
        ended = _bash(tmp_path, "-c", job["run"], **sky)
    else:
        line = re.search("ExecStart=[^ ]*/mirrored (.*)", (CLUSTERS / name).read_text())[1]
        ended = _bash(tmp_path, "-c", f"exec mirrored {line}", NODE_RANK=str(rank))
    command, *arguments = ended.stdout.splitlines()
    options = launch._parse(arguments)
    assert command == "launch" and options.nnodes == 2 and options.node_rank == rank and options.n == 1
    assert options.coordinator == "gpu-0:9000" and options.max_restarts == 3
    assert options.command[:2] == ["examples/two_hosts.py", "--checkpoints"]


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd here")
    unit = tmp_path / "two-hosts.service"
    unit.write_text((CLUSTERS / unit.name).read_text().replace("/shared/mirrored/.venv/bin/mirrored", "/bin/true"))
    ended = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=20)
    if "Failed to" in ended.stderr and "two-hosts" not in ended.stderr:
        pytest.skip(f"systemd-analyze does not work here: {ended.stderr}")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_torchrun_gives_each_host_one_worker(tmp_path: Path) -> None:
    """The environment that torchrun makes of these arguments, by hand."""
    _stub(tmp_path, "torchrun", 'echo "$@"')
    for rank in (0, 1):
        arguments = shlex.split(_bash(tmp_path, str(CLUSTERS / "torchrun.sh"), str(rank), "gpu-0").stdout)
        given = dict(zip(arguments[0:-3:2], arguments[1:-3:2], strict=True))
        assert given["--nproc-per-node"] == "1" and arguments[-3] == "examples/two_hosts.py"
        options = {"RANK": "node-rank", "WORLD_SIZE": "nnodes", "MASTER_ADDR": "master-addr", "MASTER_PORT": "master-port"}
        environment = {name: given[f"--{option}"] for name, option in options.items()}
        assert _found(environment | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, 2, rank).coordinator_address == "gpu-0:29501"


def test_torchrun_is_told_to_go_on_with_fewer_hosts(tmp_path: Path) -> None:
    _stub(tmp_path, "torchrun", 'echo "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE $@"')
    written = _bash(tmp_path, str(CLUSTERS / "torchrun_elastic.sh"), "gpu-0").stdout
    assert written.startswith("1 --nnodes 2:3 ") and "--rdzv-endpoint gpu-0:29400 " in written, written


@pytest.mark.parametrize(
    ("code", "restarts", "is_queued_again"), [(0, 0, False), (75, 0, True), (143, 4, True), (76, 0, False), (1, 5, False)]
)
def test_slurm_queues_the_job_again_when_that_can_help(code: int, restarts: int, is_queued_again: bool, tmp_path: Path) -> None:
    _stub(tmp_path, "srun", f'echo "srun $@"; exit {code}')
    _stub(tmp_path, "scontrol", 'echo "$@"')
    ended = _bash(tmp_path, str(CLUSTERS / "slurm.sbatch"), SLURM_JOB_ID="7", SLURM_RESTART_COUNT=str(restarts))
    assert ended.returncode == code and ("requeue 7" in ended.stdout) is is_queued_again, ended
    assert re.search(r"srun .*python examples/two_hosts\.py --checkpoints /shared/", ended.stdout)


def test_the_slurm_step_has_one_worker_on_each_host() -> None:
    text = (CLUSTERS / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    assert text.index("#SBATCH --open-mode") < text.index("srun --kill"), "Slurm reads options before the first command"
    nodes = int(options["nodes"])
    step = {"SLURM_STEP_NODELIST": f"gpu[0-{nodes - 1}]", "SLURM_STEP_TASKS_PER_NODE": f"{options['ntasks-per-node']}(x{nodes})"}
    for i in range(nodes):
        cluster = _found(step | {"SLURM_STEP_NUM_TASKS": str(nodes), "SLURM_PROCID": str(i), "SLURM_JOB_ID": "7"}, 2, i)
        assert cluster.coordinator_address.startswith("gpu0:")


def test_the_pods_of_the_jobset_find_each_other() -> None:
    job_set = _yaml("jobset.yaml")
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [replicated] = job_set["spec"]["replicatedJobs"]
    job, name = replicated["template"]["spec"], job_set["metadata"]["name"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] and job["backoffLimit"] == 0
    assert _is_right_container(pod, "worker") and pod["restartPolicy"] == "Never"
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [76]}
    _require_workers(job, f"{name}-{replicated['name']}-0-0.{name}")


def _require_workers(job: Any, worker_0: str) -> None:
    """Find the cluster that the environment of each pod of an indexed Job describes."""
    [container] = job["template"]["spec"]["containers"]
    for i in range(job["completions"]):
        index = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(i)}
        environment = {
            entry["name"]: entry["value"] if "value" in entry else index[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for entry in container["env"]
        }
        environment |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(i)}
        cluster = _found(environment, job["completions"], i)
        assert cluster.coordinator_address == f"{worker_0}:{container['ports'][0]['containerPort']}"


def test_an_indexed_job_with_a_headless_service_and_the_image_of_the_dockerfile() -> None:
    yaml = pytest.importorskip("yaml")
    claim, service, job = yaml.safe_load_all((CLUSTERS / "job.yaml").read_text())
    assert [thing["kind"] for thing in (claim, service, job)] == ["PersistentVolumeClaim", "Service", "Job"]
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] == "OnFailure"
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": name} and pod["subdomain"] == service["metadata"]["name"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert _is_right_container(pod, "worker")
    _require_workers(spec, f"{name}-0.{pod['subdomain']}")
    image = f"docker build -t {pod['containers'][0]['image']} --build-arg EXTRA="
    for name in ("job", "jobset", "jaxjob", "tfjob"):
        text = (CLUSTERS / f"{name}.yaml").read_text()
        assert image in text and f"image: {pod['containers'][0]['image']}\n" in text and "pip install" not in text


def test_the_image_and_the_environment_of_conda_have_what_is_tried() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    [base] = [line for line in lines if line.startswith("FROM ")]
    tried = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert base == f"FROM python:{tried[-1]}-slim" and 'CMD ["make", "demo"]' in lines and "ARG EXTRA" in "".join(lines)
    environment = pytest.importorskip("yaml").safe_load((ROOT / "environment.yml").read_text())
    python, pip, of_pip = environment["dependencies"]
    assert (environment["name"], python, pip) == ("mirrored", f"python={tried[-1]}", "pip")
    assert of_pip == {"pip": ["-r requirements.lock", "--editable ."]}


def test_one_form_of_words_for_installing() -> None:
    """No page and no message names a package `mirrored` of an index: whoever took the name there would be installed."""
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py"), *CLUSTERS.iterdir()]
    lines = [line for path in texts if path.is_file() for line in path.read_text().splitlines() if "pip install" in line]
    assert len(lines) > 10 and [line for line in lines if re.search(r"pip install [^`]*\bmirrored\b(?!'s)", line)] == []


@pytest.mark.parametrize(
    ("kind", "specs", "container"), [("JAXJob", "jaxReplicaSpecs", "jax"), ("TFJob", "tfReplicaSpecs", "tensorflow")]
)
def test_the_pods_of_kubeflow_find_each_other(kind: str, specs: str, container: str) -> None:
    """The environment that the training operator makes of these files, by hand."""
    job = _yaml(f"{kind.lower()}.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", kind)
    [(role, spec)] = job["spec"][specs].items()
    # By ExitCode, the operator takes 1 to 127 for errors for good, and so 75 too.
    assert role == "Worker" and spec["restartPolicy"] == "OnFailure"
    assert _is_right_container(spec["template"]["spec"], container)
    names = [f"{job['metadata']['name']}-worker-{i}" for i in range(spec["replicas"])]
    for i in range(len(names)):
        jax_job = {"COORDINATOR_ADDRESS": names[0], "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "2", "PROCESS_ID": str(i)}
        addresses = ", ".join(f'"{name}.default.svc:2222"' for name in names)
        task = f'{{"type": "worker", "index": {i}}}'
        tf_job = {"TF_CONFIG": f'{{"cluster": {{"worker": [{addresses}]}}, "task": {task}, "environment": "cloud"}}'}
        cluster = _found(jax_job if kind == "JAXJob" else tf_job, 2, i)
        assert cluster.coordinator_address == (f"{names[0]}:6666" if kind == "JAXJob" else f"{names[0]}.default.svc:2222")
