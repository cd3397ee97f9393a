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
WAYS = [
    pytest.param([], marks=needs_torchrun, id="torchrun"),
    pytest.param(["--standalone"], marks=needs_torchrun, id="torchrun --standalone"),
    pytest.param(None, marks=needs_mpirun, id="mpirun"),
]


def launched(options: list[str] | None, *script: object) -> tuple[int, str]:
    """Run torchrun with options, or mpirun, to its end; return its exit code, and what it and the workers wrote."""
    if options is None:
        # Open MPI needs to be told that more workers than cores, and root, are meant; MPICH knows neither option.
        version = subprocess.run([str(MPIRUN), "--version"], capture_output=True, text=True, check=True).stdout
        own = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])] if "Open MPI" in version else []
        command: list[object] = [MPIRUN, *own, "-n", 2]
    else:
        port = [] if "--standalone" in options else ["--master-port", free_port()]
        command = [TORCHRUN, "--no-python", "--nproc-per-node", 2, *port, *options]
    env = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
    with subprocess.Popen(
        [str(part) for part in (*command, sys.executable, *script)],
        env=env | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
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


@pytest.mark.parametrize("options", WAYS)
def test_a_launcher_starts_a_job_and_sees_a_worker_that_fails(options: list[str] | None) -> None:
    code, output = launched(options, HERE / "start.py", "found", 30)
    assert code == 0 and all(f"STARTED 2 4 {is_chief} 4.0" in output for is_chief in (True, False)), output
    code, output = launched(options, HERE / "mistakes.py", 30, "one fails")
    assert code != 0 and "ValueError: the data is gone" in output, output
    assert "worker 1 failed at step" in output, "and the other worker says so"
