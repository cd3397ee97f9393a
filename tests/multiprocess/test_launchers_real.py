"""The launchers of others start a job as it is, where they are installed: torchrun and mpirun, found by name or variable."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import _NOT_INHERITED, free_port

HERE = Path(__file__).parent
#: Where they are, if not on PATH: torchrun may live in an environment of its own, since the workers need no torch.
TORCHRUN = os.environ.get("MIRRORED_TEST_TORCHRUN") or shutil.which("torchrun")
MPIRUN = os.environ.get("MIRRORED_TEST_MPIRUN") or shutil.which("mpirun")

needs_torchrun = pytest.mark.skipif(TORCHRUN is None, reason="no torchrun on PATH or in MIRRORED_TEST_TORCHRUN")
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun on PATH or in MIRRORED_TEST_MPIRUN")
pytestmark = pytest.mark.slow


def launched(*command: object) -> tuple[int, str]:
    """Run a launcher to its end; return its exit code, and what it and the workers wrote."""
    env = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    with subprocess.Popen(
        list(map(str, command)),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=90)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def torchrun(*arguments: object) -> tuple[int, str]:
    own = ["--no-python", "--nproc-per-node", 2]
    own += [] if "--standalone" in arguments else ["--master-port", free_port()]
    options = [argument for argument in arguments if str(argument).startswith("--")]
    return launched(TORCHRUN, *own, *options, sys.executable, *(a for a in arguments if a not in options))


def mpirun(*arguments: object) -> tuple[int, str]:
    """Open MPI needs to be told that more workers than cores, and root, are meant; MPICH knows neither option."""
    assert MPIRUN is not None
    is_open_mpi = "Open MPI" in subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=True).stdout
    own = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])] if is_open_mpi else []
    return launched(MPIRUN, *own, "-n", 2, sys.executable, *arguments)


def assert_started(code: int, output: str) -> None:
    assert code == 0, output
    for is_chief in (True, False):
        assert f"STARTED 2 4 {is_chief} 4.0" in output


def assert_ended_by_the_last_worker(code: int, output: str) -> None:
    assert code != 0, output
    assert "ValueError: the data is gone" in output
    assert "worker 1 failed at step" in output, "and the other worker says so"


@needs_torchrun
@pytest.mark.parametrize("option", [[], ["--standalone"]])
def test_torchrun_starts_a_job(option: list[str]) -> None:
    assert_started(*torchrun(*option, HERE / "start.py", "found", 30))


@needs_torchrun
def test_torchrun_sees_a_worker_that_fails() -> None:
    assert_ended_by_the_last_worker(*torchrun(HERE / "mistakes.py", 30, "one fails"))


@needs_torchrun
def test_torchrun_starts_a_job_again(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    fail_once = "\nimport os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('the first attempt')\n"
    script.write_text((HERE / "start.py").read_text() + fail_once)
    code, output = torchrun("--max-restarts=1", script, "found", 30)
    assert "the first attempt" in output
    assert_started(code, output)


@needs_mpirun
def test_mpirun_starts_a_job() -> None:
    assert_started(*mpirun(HERE / "start.py", "found", 30))


@needs_mpirun
def test_mpirun_sees_a_worker_that_fails() -> None:
    assert_ended_by_the_last_worker(*mpirun(HERE / "mistakes.py", 30, "one fails"))
