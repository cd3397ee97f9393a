"""A job starts, or says what is wrong: with the right exit code, in time, and never by a signal."""

import json
from pathlib import Path

import pytest
from processes import run_workers

SCRIPT = Path(__file__).parent / "start.py"


def test_a_malformed_tf_config_is_one_readable_error_with_its_code() -> None:
    config = {"cluster": {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}, "task": {"type": "worker", "index": 2}}
    env = {"JAX_COORDINATOR_ADDRESS": "", "JAX_NUM_PROCESSES": "", "JAX_PROCESS_ID": "", "TF_CONFIG": json.dumps(config)}
    [worker] = run_workers(SCRIPT, 1, "tf", 20, env=env)
    assert worker.code == 76, worker.output
    assert "ClusterConfigError: TF_CONFIG: task.index is 2; with 2 workers give 0 to 1" in worker.output


@pytest.mark.slow
def test_workers_start_with_a_jax_distributed_of_their_own() -> None:
    for worker in run_workers(SCRIPT, 2, "own jax.distributed", 30, devices=2):
        assert worker.code == 0 and f"STARTED 2 4 {worker.index == 0} 4.0" in worker.output, worker.output
        assert "preemption service swallows SIGTERM" in worker.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "seconds", "codes", "messages"),
    [
        ("different devices", 20, (76, 76), ["ConfigError: the workers have different devices: worker 0 1 cpu, worker 1 2 cpu"]),
        ("devices stuck", 2, (75, 75), ["worker 1 has not entered the exchange of devices for 2 s", "have not started"]),
        (
            "accelerator fails",
            120,
            (75, 1),
            ["worker 1 failed at step 0 with DeviceError: JAX cannot", "the card has fallen off the bus"],
        ),
        ("accelerator hangs", 2, (75, 75), ["worker 1 has not entered the barrier after the exchange of devices for 2 s"]),
        ("gone after the meeting", 2, (75, 9), ["ClusterStartError: worker 0 met all 2 workers, but one of them was gone"]),
    ],
)
def test_what_is_wrong_at_the_start_is_said_by_all(way: str, seconds: int, codes: tuple[int, int], messages: list[str]) -> None:
    for worker, code in zip(run_workers(SCRIPT, 2, way, seconds), codes, strict=True):
        assert worker.code == code and worker.seconds < 25, worker.output
        assert code == 9 or all(message in worker.output for message in messages), worker.output
