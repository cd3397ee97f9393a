"""A job starts, or says what is wrong: with the right exit code, in time, and never by a signal."""

import json
import re
from pathlib import Path

import pytest
from processes import free_port, run_workers

SCRIPT = Path(__file__).parent / "start.py"
NOTHING = {"JAX_COORDINATOR_ADDRESS": "", "JAX_NUM_PROCESSES": "", "JAX_PROCESS_ID": ""}


def tf_config(index: object, *addresses: str) -> dict[str, str]:
    return {
        **NOTHING,
        "TF_CONFIG": json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}),
    }


def test_a_malformed_tf_config_is_one_readable_error_with_its_code() -> None:
    [worker] = run_workers(SCRIPT, 1, "tf", 20, env=tf_config(2, "127.0.0.1:2222", "127.0.0.1:2223"))
    assert worker.code == 76, worker.output
    assert "ClusterConfigError: TF_CONFIG: task.index is 2; with 2 workers give 0 to 1" in worker.output


@pytest.mark.slow
def test_the_launcher_starts_all_again_after_a_death(tmp_path: Path) -> None:
    script, command = tmp_path / "worker.py", tmp_path / "command.py"
    script.write_text(
        "import os, signal, time\n"
        "worker, attempt = os.environ['JAX_PROCESS_ID'], os.environ['MIRRORED_ATTEMPT']\n"
        "print('ATTEMPT', attempt, os.environ['JAX_COORDINATOR_ADDRESS'], flush=True)\n"
        "if attempt == '0':\n"
        "    time.sleep(100) if worker == '0' else os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command.write_text("import sys\nfrom mirrored.launch import main\nsys.exit(main())\n")
    [launcher] = run_workers(command, 1, "launch", "-n", 2, "--max-restarts", 1, "--cpu-devices", 1, script, timeout=40)
    assert launcher.code == 0 and "starting all again" in launcher.output, launcher.output
    said = set(re.findall(r"\[(\d)\] ATTEMPT (\d) (\S+)", launcher.output))
    assert {(worker, attempt) for worker, attempt, _ in said} == {("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")}
    assert len({address for _, _, address in said}) == 2, "each attempt has a port of its own"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["found", "own jax.distributed", "alone"])
def test_workers_start(way: str) -> None:
    num_workers = 1 if way == "alone" else 2
    for worker in run_workers(SCRIPT, num_workers, way, 30, devices=2, fresh=way == "found"):
        assert worker.code == 0, worker.output
        assert f"STARTED {num_workers} {2 * num_workers} {worker.index == 0} {2.0 * num_workers}" in worker.output
        assert ("preemption service swallows SIGTERM" in worker.output) == (way == "own jax.distributed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "code", "messages"),
    [
        ("jax first", 76, ["Move mr.MultiWorkerMirroredStrategy() above the first use of JAX"]),
        ("different devices", 76, ["ClusterConfigError: the workers have different devices: worker 0 1 cpu, worker 1 2 cpu"]),
        (
            *("devices stuck", 75),
            [
                "worker 1 has not entered the exchange of devices for 2 s",
                "worker 1: the exchange of devices (its cpu devices have not started yet)",
            ],
        ),
    ],
)
def test_what_is_wrong_at_the_start_is_said_by_all(way: str, code: int, messages: list[str]) -> None:
    for worker in run_workers(SCRIPT, 2, way, 2 if code == 75 else 20):
        assert worker.code == code and worker.seconds < 25, worker.output
        assert all(message in worker.output for message in messages), worker.output


@pytest.mark.slow
def test_a_worker_that_does_not_start_is_named() -> None:
    port = free_port()
    [worker] = run_workers(SCRIPT, 1, "found", 2, env=tf_config(0, f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"))
    assert worker.code == 75 and worker.seconds < 12, worker.output
    assert "worker 1" in worker.output and "ClusterStartError" in worker.output


@pytest.mark.slow
def test_a_worker_that_dies_between_the_meeting_and_jax_ends_the_others_with_an_error() -> None:
    first, second = run_workers(SCRIPT, 2, "gone after the meeting", 2)
    assert second.code == 9 and first.code == 75 and first.seconds < 25, first.output
    assert "ClusterStartError: worker 0 met all 2 workers, but one of them was gone" in first.output
