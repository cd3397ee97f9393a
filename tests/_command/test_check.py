"""`mirrored check` says ok for a machine or a cluster that is in order, and what to do about one that is not."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import run_workers

from mirrored import launch
from mirrored._cluster.meeting import meet
from mirrored._command import check, check_host, check_sums
from mirrored._command.check_lines import Finding
from mirrored._workers import runtime

SCRIPT = Path(__file__).parents[1] / "multiprocess" / "check_worker.py"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_sums, "SIZES", ((4, 2), (8192, 2)))
    monkeypatch.setattr(check_sums, "LENGTHS", (1, 1009))


def test_one_machine_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = (
        "ok    cluster        one worker: no variable describes a cluster",
        r"ok    versions       Python 3\.\d+\.\d+, jax [\d.]+, jaxlib [\d.]+, mirrored [\d.]+, numpy [\d.]+.*",
        "ok    GPUs           .*",
        "ok    /dev/shm       .* free.*",
        r"ok    open files     at most \d+, and 260 are enough|ok    open files     any number",
        "ok    proxies        .*",
        "ok    devices        8 x cpu on each worker",
        "ok    sums           of integers and floats, up to 1,009 of them: right, and the same on all",
        r"ok    all-reduce     4 B in [\d.]+ ms, 8.0 KiB in [\d.]+ ms \([\d.]+ GB/s\) on each replica",
        r"ok    computing      worker 0 [\d.]+ ms",
        "ok: 10 checks",
    )
    assert [re.fullmatch(pattern, line) is not None for pattern, line in zip(expected, lines, strict=True)] == [True] * 11, lines


def test_what_is_wrong_with_one_machine_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_host, "shared_memory", lambda: Finding("", "64.0 MiB free\x1b[2J"))
    assert launch.main(["check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert r"wrong /dev/shm       64.0 MiB free\x1b[2J" in lines
    assert [line[:5] for line in lines].count("wrong") == 1 and lines[-1] == "not ok: 1 of 10 checks"


def test_gpus_that_jax_does_not_use_are_found(
    strategy2: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "MultiWorkerMirroredStrategy", lambda **_: strategy2)
    monkeypatch.setattr(check_host, "is_for_gpus", lambda *_: True)
    monkeypatch.setattr(check_host, "gpus", lambda: Finding("2 NVIDIA GPUs, driver 470.1"))
    assert launch.main(["check"]) == 1
    assert "\nwrong devices        JAX uses the CPU, not the NVIDIA GPUs: is the driver" in capsys.readouterr().out


def test_a_wrong_cluster_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    assert launch.main(["check"]) == 1
    wrong, end = capsys.readouterr().out.splitlines()
    assert wrong.startswith("wrong cluster        TF_CONFIG: it is not JSON")
    assert end == "not ok: 1 of 1 checks; the rest is not checked"


def test_a_missing_chief_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrored._jax.distributed.has_backend", lambda: False)
    monkeypatch.setattr(runtime, "meet", lambda cluster, versions, seconds: meet(cluster, versions, seconds / 10))
    for name, value in (("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1"), ("JAX_NUM_PROCESSES", "2"), ("JAX_PROCESS_ID", "1")):
        monkeypatch.setenv(name, value)
    assert launch.main(["check", "--timeout", "1"]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("wrong start          worker 1 waited 0 s for the chief (127.0.0.1:1): Connection ref")


def test_two_workers_are_ok_behind_a_dead_proxy(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    chief, other = run_workers(SCRIPT, 2, "right", "--checkpoints", folder, env={"grpc_proxy": "http://127.0.0.1:9"})
    assert (chief.code, other.code) == (0, 0), chief.output + other.output
    assert not re.search("^(ok|wrong)", other.output, re.MULTILINE), "it prints only its own failures"
    assert list(folder.iterdir()) == []
    lines = [line for line in chief.output.splitlines() if "Gloo" not in line]
    assert lines[-1] == "ok: 16 checks" and {line[:6] for line in lines[:-1]} == {"ok    "}, chief.output
    assert "ok    proxies        grpc_proxy set; the workers connect without" in lines
    for pattern in (
        r"start          2 workers met in [\d.]+ s: worker 0 on \S+, worker 1 on \S+",
        "same versions  Python, .*: the same on all",
        r"connections    each worker reaches 1 other, at ports of \d+-\d+",
        r"clocks         differ by at most 0\.\d+ s",
        rf"checkpoints    {folder}: written at \d+ MB/s, read by all, [\d.]+ GiB free",
        r"messages       worker 0 [\d.]+, worker 1 [\d.]+ ms",
    ):
        assert re.search(f"^ok    {pattern}$", chief.output, re.MULTILINE), chief.output


def test_all_that_is_wrong_with_another_worker_is_said_by_both(tmp_path: Path) -> None:
    """And JAX's devices, which would wait for each other, are not started."""
    chief, other = run_workers(SCRIPT, 2, "wrong", "--checkpoints", tmp_path / "{worker}")
    assert (chief.code, other.code) == (1, 1), chief.output + other.output
    wrong = [line for line in chief.output.splitlines() if line.startswith("wrong ")]
    patterns = (
        r"wrong /dev/shm       worker 1 on \S+: 64.0 MiB free, and NCCL needs 512.0 MiB: docker run --shm-size=1g; .*",
        r"wrong same versions  worker 1 on \S+: has nvidia-nccl-cu13 2.1, not none as worker 0; triton 3, not none as .*",
        r"wrong connections    worker 1 on \S+: cannot reach worker 0 on \S+ at [\d.:]+ \(timed out\); open the TCP .*",
        r"wrong clocks         worker 1 on \S+: its clock is 1\d\d.\d s ahead of worker 0's: start NTP .*",
        rf"wrong checkpoints    worker 1 on \S+: {tmp_path}/1 is another folder, the new file of worker 0 on \S+ is not .*",
    )
    assert [re.fullmatch(pattern, line) is not None for pattern, line in zip(patterns, wrong, strict=True)] == [True] * 5, wrong
    assert chief.output.endswith("\nnot ok: 5 of 11 checks; the rest is not checked\n")
    told = [line for line in other.output.splitlines() if line.startswith("wrong ")]
    assert told[0].startswith("wrong /dev/shm       64.0 MiB free") and told[1:] == wrong[1:], "it met the others after the first"


@pytest.mark.slow
def test_a_cluster_under_the_launcher_is_ok() -> None:
    command = ["launch", "-n", "2", "--cpu-devices", "1", "-m", "mirrored", "check"]
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-m", "mirrored", *command], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^\[0\] ok    all-reduce .* 64\.0 MiB in [\d.]+ ms \([\d.]+ GB/s\) on each replica$", result.stdout, re.M)
    assert result.stdout.splitlines()[-1] == "[0] ok: 15 checks" and "[1]" not in result.stdout
    assert "Warning" not in result.stderr
    assert time.monotonic() - start < 90
