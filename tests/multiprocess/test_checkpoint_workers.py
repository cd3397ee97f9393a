"""Checkpoints and preemption with real workers: one writes, all restore, all leave together."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from processes import LAUNCHER, Ended, found, run_workers, wait_for_line, workers

PROGRAM = Path(__file__).parent / "checkpoint_worker.py"


def job(num_workers: int, *args: object, devices: int = 1, **options: Any) -> list[Ended]:
    return run_workers(PROGRAM, num_workers, *args, devices=devices, timeout=110, **options)


def test_two_workers_save_and_others_go_on(tmp_path: Path) -> None:
    env = {"MIRRORED_PROGRESS_FILE": str(tmp_path / "progress"), "http_proxy": "http://127.0.0.1:9"}  # where nobody listens
    ended = job(2, "save", tmp_path / "saved", devices=2, env=env)
    saved = found(ended)
    assert not any(re.search("WARNING|CRITICAL", one.output) for one in ended), "as if there were no guard"
    for own in saved:
        assert own["again"] == own["values"] and own["steps"] == [3, 5] and own["rows"] == list(range(12))
        assert {**own["values"], "local": 0} == {**saved[0]["values"], "local": 0}
    assert [path.read_text() for path in tmp_path.glob("progress-????????")] == ["5"]
    [own] = found(job(1, "restore", tmp_path / "saved", devices=3))
    assert own["step"] == 5 and own["rows"] == list(range(16, 40))  # what was read after the save is read again
    assert own["values"]["seen"] == 16 and own["values"]["mean"] == 13.5 and own["values"]["epoch"] == 4
    assert own["values"]["key"] == saved[0]["values"]["key"] and own["values"]["local"] == [13.5] * 3


@pytest.mark.slow
def test_what_fails_fails_on_all_workers(tmp_path: Path) -> None:
    own = found(job(2, "refuse", tmp_path))
    for worker, said in enumerate(own):
        assert "StrategyMismatchError" in said["outside"] and "with strategy.scope():" in said["outside"]
        assert said["without"] == [], "outside of all scopes, the strategy is that of the members"
        assert "extra is mirrored float32[] on worker 1, and not there on worker 0" in said["kinds"]
        assert "different calls of a checkpoint: worker 0 save(1), worker 1 save(2)" in said["steps"]
        assert "ReplicasDivergeError" in said["diverged"] and "'w'" in said["diverged"] and "worker 1" in said["diverged"]
        assert said["written"] == [] and said["saved"] == 1
        for text in said["apart"]:
            assert "CheckpointError: the workers do not share the directory" in text
            assert re.search(r"own0 on \S+ is not seen by worker 1 \(\S+own1 on \S+\)\..*such as NFS", text)
        assert said["own_written"] == [] and said["marks"] == []
        assert re.search(
            r"own0 on \S+ \(worker 0\) holds the steps \[1\], and .*own1 on \S+ \(worker 1\) holds none", said["own"]
        )
        assert "another program writes checkpoints to" in said["busy"] and said["free"] == 1
        assert ("failed on worker 0" in said["busy"]) == (worker == 1)
        assert said["full"][:2] == ["no error", "no error"]
        assert "CheckpointError" in said["full"][2] and " on worker 0 failed 2 times in a row: step 7: OSError" in said["full"][2]


@pytest.mark.slow
def test_workers_that_end_without_waiting_lose_nothing(tmp_path: Path) -> None:
    found(job(2, "end", tmp_path, "no"))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.slow
def test_ctrl_c_while_a_worker_waits_for_its_last_save_ends_all(tmp_path: Path) -> None:
    chief, other = job(2, "end", tmp_path, "yes")
    assert (chief.code, other.code) == (130, 75), chief.output + other.output
    assert re.search(r"worker 0 failed at step \d+ with KeyboardInterrupt", other.output), other.output
    assert chief.seconds < 30 and not (tmp_path / "1").exists()


def steps_of(ended: Ended) -> list[int]:
    return [int(step) for step in re.findall(r"^STEP (\d+)$", ended.output, re.MULTILINE)]


@pytest.mark.slow
def test_a_signal_to_one_worker_lets_all_leave_at_one_step(tmp_path: Path) -> None:
    ended = job(2, "preempt", tmp_path, 1, 1, 20000)
    assert [worker.code for worker in ended] == [143] * 2, "\n".join(worker.output for worker in ended)
    [sent] = re.findall(r"^SENT (\S+)$", ended[1].output, re.MULTILINE)
    assert max(worker.time for worker in ended) - float(sent) < 10, "two seconds, with much room for a busy machine"
    stopped = steps_of(ended[0])[-1]
    assert 1 <= stopped < 20000 and all(steps_of(worker) == list(range(1, stopped + 1)) for worker in ended)
    for worker in job(2, "preempt", tmp_path, 1, 1, stopped + 5):
        assert worker.code == 0, worker.output
        assert f"FIRST {stopped}\n" in worker.output and steps_of(worker) == list(range(stopped + 1, stopped + 6))
        assert f"DONE {stopped + 5} {stopped + 5.0}\n" in worker.output


#: What says that a worker takes steps; the launcher writes a prefix before it.
RUNS = r"(?m)^(\[{}\] )?STEP 5$"
FOR_EVER = ("none", 0, 10**6)


@pytest.mark.slow
def test_a_signal_to_the_launcher_and_its_workers_is_one_notice(tmp_path: Path) -> None:
    """As systemd sends it to a control group, and Slurm to a step: each worker gets two."""
    saved = tmp_path / "saved"
    with workers(LAUNCHER, 1, "launch", "-n", 2, "--cpu-devices", 1, PROGRAM, "preempt", saved, *FOR_EVER) as (launcher,):
        for index in range(2):
            wait_for_line(launcher, RUNS.format(index))
        pid = launcher.pid
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        pids = [child for child in children if PROGRAM.name.encode() in Path(f"/proc/{child}/cmdline").read_bytes()]
        assert len(pids) == 2
        for child in pids:
            os.kill(child, signal.SIGTERM)
        time.sleep(0.01)  # else the kernel would make one of them
        launcher.signal(signal.SIGTERM)
        ended = launcher.wait()
    assert ended.code == 143 and "workers 0-1: exit code 143, preempted" in ended.output, ended.output
    step = re.findall(r"STEP (\d+)$", ended.output, re.MULTILINE)[-1]
    assert [path.name for path in saved.iterdir()] == [step]
