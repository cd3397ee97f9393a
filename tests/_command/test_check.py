"""`mirrored check` says ok for a cluster that is in order, and what is wrong for one that is not."""

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from mirrored import launch
from mirrored._command import check
from mirrored._workers.coordination import Coordination


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SIZES", ((4, 2), (8192, 2)))
    monkeypatch.setattr(check, "LENGTHS", (1, 1009))


def test_one_worker_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["check"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^1 worker met in \d\.\d s, mr.MultiWorkerMirroredStrategy\(8 replicas", out)
    assert re.search(rf"^worker 0: host .*, pid {os.getpid()}, 8 x cpu", out, re.M)
    assert re.search(r"^all-reduce of 4 bytes: [\d.]+ ms$", out, re.M)
    assert re.search(r"^all-reduce of 8192 bytes: [\d.]+ ms, [\d.]+ GB/s for each replica$", out, re.M)
    assert re.search(r"^computing, ms: worker 0 [\d.]+$", out, re.M)
    assert out.endswith("\nok\n")


def test_a_wrong_sum_is_found(strategy2: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_measure", lambda *_: ())
    monkeypatch.setattr(check, "MultiWorkerMirroredStrategy", lambda **_: strategy2)
    monkeypatch.setattr(check, "coordination_of", lambda _: Coordination())
    make, calls = check._make_all_reduce, itertools.count()

    def make_wrong(*args: Any) -> Callable[[], Any]:
        work, factor = make(*args), 1.001 if next(calls) >= 3 else 1
        return lambda: jnp.asarray(work()) * factor

    monkeypatch.setattr(check, "_make_all_reduce", make_wrong)
    assert launch.main(["check"]) == 1
    out = capsys.readouterr().out
    for kind in ("integers", "whole floats", "floats"):
        assert re.search(rf"^WRONG: worker 0: sum of 1009 {kind}: element \d+ is [\d.]+, expected [\d.]+$", out, re.M)
    assert out.count("WRONG") == 3 and out.endswith("\nnot ok\n")


class Canned(Coordination):
    """A worker 0 whose two peers answer with what it says, multiplied."""

    def exchange(self, channel: str, value: Any, timeout_seconds: float | None = None) -> Any:
        if channel == "check/digests":
            return [value, value + 1, value]
        return [value, value * 30, value] if channel == "check/computing" else [value] * 3


class Foreign(Coordination):
    """A worker 0 whose peer draws on the terminal."""

    def exchange(self, channel: str, value: Any, timeout_seconds: float | None = None) -> Any:
        return ["host \x1b[2J"] if channel == "check/who" else [["sum\nok\x1b[2J"]]


def test_what_other_workers_say_is_shown_escaped(
    strategy2: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "MultiWorkerMirroredStrategy", lambda **_: strategy2)
    monkeypatch.setattr(check, "coordination_of", lambda _: Foreign())
    for name, result in (("_compare", []), ("_measure", []), ("_find_slow", [])):
        monkeypatch.setattr(check, name, lambda *_, result=result: result)
    assert check.main([]) == 1
    out = capsys.readouterr().out
    assert r"worker 0: host \x1b[2J" in out.splitlines() and r"WRONG: worker 0: sum\nok\x1b[2J" in out.splitlines()


def test_a_slow_worker_is_marked() -> None:
    computing, talking = check._find_slow(Canned())
    assert re.fullmatch(r"computing, ms: worker 0 [\d.]+, worker 1 [\d.]+ SLOW, worker 2 [\d.]+", computing)
    assert "SLOW" not in talking


def test_results_that_differ_by_worker_are_found(strategy2: Any) -> None:
    problems = check._compare(strategy2, Canned())
    assert len(problems) == 2 * 3
    assert problems[0] == "sum of 1 integers: the workers have different results"


def test_a_wrong_cluster_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    assert launch.main(["check"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("mirrored check: TF_CONFIG: it is not JSON") and err.count("\n") == 1 and out == ""


def test_a_missing_worker_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrored._jax.distributed.has_backend", lambda: False)
    for name, value in (("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1"), ("JAX_NUM_PROCESSES", "2"), ("JAX_PROCESS_ID", "1")):
        monkeypatch.setenv(name, value)
    assert launch.main(["check", "--timeout", "1"]) == 1
    assert capsys.readouterr().err.startswith("mirrored check: worker 1 waited 1 s for the chief (127.0.0.1:1): Connection ref")


@pytest.mark.slow
def test_a_cluster_under_the_launcher_is_ok() -> None:
    command = ["launch", "-n", "2", "--cpu-devices", "1", "-m", "mirrored", "check"]
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-m", "mirrored", *command], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert "[0] 2 workers met in " in result.stdout
    assert all(f"[0] worker {i}: host " in result.stdout for i in range(2))
    assert re.search(r"all-reduce of 67108864 bytes: [\d.]+ ms, [\d.]+ GB/s", result.stdout)
    assert result.stdout.splitlines()[-1] == "[0] ok"
    assert "Warning" not in result.stderr
    assert time.monotonic() - start < 90
