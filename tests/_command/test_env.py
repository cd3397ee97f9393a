"""`mirrored env` reports what a bug report needs, whatever is broken, and no secrets."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys

import jax
import pytest

import mirrored as mr
from mirrored import _env, launch
from mirrored._command import env


def report(capsys: pytest.CaptureFixture[str]) -> str:
    assert launch.main(["env"]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lists the devices runs here, once, and its words are printed by a process that need not start jax."""
    listed = io.StringIO()
    with contextlib.redirect_stdout(listed):
        exec(env._LIST_DEVICES, {})
    monkeypatch.setattr(env, "_LIST_DEVICES", f"print({listed.getvalue().strip()!r})")


def test_devices_versions_and_no_values_but_those_of_the_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "_OPTIONAL", ("grain", "no-such-package", "protobuf"))
    monkeypatch.setenv("API_TOKEN", "hunter2")
    monkeypatch.setenv("https_proxy", "http://user:hunter2@proxy:1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    for name, value in (("JAX_COORDINATOR_ADDRESS", "10.0.0.1:9000"), ("JAX_NUM_PROCESSES", "2"), ("JAX_PROCESS_ID", "1")):
        monkeypatch.setenv(name, value)
    text = report(capsys)
    assert f"mirrored {mr.__version__}, jax {jax.__version__}, jaxlib " in text
    assert re.search(r"\n          optional: grain [0-9.]+, protobuf [0-9.]+\n", text)
    assert "devices:  8 x cpu (" in text
    assert "cluster:  worker 1 of 2, coordinator 10.0.0.1:9000, from JAX_COORDINATOR_ADDRESS" in text
    assert "JAX_PROCESS_ID = 1\n" in text and "XLA_FLAGS is set\n" in text
    assert "https_proxy is set (not used between workers)\n" in text
    assert "device_count" not in text and "hunter2" not in text and "API_TOKEN" not in text


def test_a_broken_cluster_is_reported_and_escaped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{\x1b[2J" + "x" * 1000)
    text = report(capsys)
    assert "cluster:  wrong: TF_CONFIG: it is not JSON" in text
    assert r"TF_CONFIG = {\x1b[2Jxxx" in text
    assert "\x1b" not in text and "x" * 301 not in text


def test_a_reader_that_leaves_and_characters_that_the_output_lacks_are_no_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `mirrored env | head -1`, and in a job whose locale is of another century."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert launch.main(["env"]) == 128 + signal.SIGPIPE
    monkeypatch.setenv("TF_CONFIG", "{\xfc")
    with io.TextIOWrapper(io.BytesIO(), "ascii") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert launch.main(["env"]) == 0
        assert b"TF_CONFIG = {\\xfc" in stream.buffer.getvalue()


def test_streams_that_are_closed_or_read_by_nobody_are_no_error_of_ours() -> None:
    run = f"{sys.executable} -m mirrored"
    code = f"{run} --version >&-; echo $?; {run} --version | true; {run} what 2>&-; echo $?; {run} what >&- 2>&-"
    ended = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert (ended.stdout, "Traceback" in ended.stderr) == ("0\n2\n", False), ended


def test_without_a_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in _env.TABLE:
        monkeypatch.delenv(variable.name, raising=False)
    text = report(capsys)
    assert text.endswith("cluster:  one worker: no variable describes a cluster\n")
    assert "CPU cores" in text and "MemAvailable" in text
    with pytest.raises(SystemExit, match="2"):
        launch.main(["env", "everything"])
    assert "unrecognized arguments: everything" in capsys.readouterr().err
    names = {variable.name for variable in _env.CLUSTER}
    assert {"TF_CONFIG", "JAX_COORDINATOR_ADDRESS", "MASTER_ADDR", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "HOSTNAME"} <= names
    assert not {"XLA_FLAGS", "NPROC", "PJRT_NPROC", "NO_COLOR", "JAX_PLATFORMS", "MIRRORED_PROGRESS_FILE"} & names


def test_a_driver_that_hangs_or_crashes_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_LIST_DEVICES", "import os; os.write(2, b'no \\x1b driver\\n'); os.abort()")
    assert "devices:  JAX cannot list its devices (exit code -6): no \\x1b driver" in report(capsys)
    monkeypatch.setattr(env, "_LIST_DEVICES", "import time; time.sleep(600)")
    monkeypatch.setattr(env, "DEVICES_SECONDS", 0.1)
    assert "JAX did not list its devices within 0 s: a driver hangs" in report(capsys)
