"""Several real processes of one script, as the workers of a job; whatever happens, none is left."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

#: What says to a process that it is a worker of a job, or changes what jax does; a test's workers inherit none of it.
#: Nor PYTHONUNBUFFERED, which writes each piece of a line alone: a log message of another thread may come in between.
_NOT_INHERITED = re.compile(
    r"(?i:.*_proxy)|TF_CONFIG|JAX_.*|XLA_.*|MIRRORED_.*|SLURM_.*|OMPI_.*|PMI_.*|PMIX_.*|RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*"
    r"|COORDINATOR_.*|NUM_PROCESSES|PROCESS_ID|PYTEST_.*|PYTHONUNBUFFERED"
)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a worker ended: its exit code (-9 for SIGKILL), when, and all it wrote to stdout and stderr."""

    index: int
    code: int
    seconds: float  # since the start of the job
    time: float  # as of time.time(), to compare with the moment of a fault
    output: str


class Worker:
    """One running process of a job."""

    def __init__(self, index: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.index, self.process, self._log = index, process, log
        self._started, self._ended = time.time(), 0.0
        self._waiter = threading.Thread(target=self._wait)
        self._waiter.start()

    def _wait(self) -> None:
        self.process.wait()
        self._ended = time.time()

    @property
    def output(self) -> str:
        """All that it has written so far."""
        return self._log.read_text(errors="replace")

    @property
    def runs(self) -> bool:
        return self._waiter.is_alive()

    def signal(self, number: int) -> None:
        """Send a signal; what a stopped process gets besides SIGKILL and SIGCONT waits."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 60.0) -> Ended:
        """Wait for the end, and say how it ended. After the timeout: its stacks are in the error."""
        self._waiter.join(timeout)
        if self.runs:
            self.signal(signal.SIGABRT)  # faulthandler writes the stacks
            self._waiter.join(2.0)
            raise TimeoutError(f"worker {self.index} still ran after {timeout} s; it wrote:\n{self.output}")
        return Ended(self.index, self.process.returncode, self._ended - self._started, self._ended, self.output)

    def kill(self) -> None:
        """End it and all its children, also when it is stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._waiter.join(10.0)


def free_port() -> int:
    """Return a port of the loopback address on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_line(worker: Worker, pattern: str, timeout: float = 60.0) -> re.Match[str]:
    """Wait until something that the worker wrote matches the regular expression, and return the match."""
    deadline = time.monotonic() + timeout
    while True:
        has_ended = not worker.runs  # before its output is read
        if match := re.search(pattern, worker.output):
            return match
        if has_ended or time.monotonic() > deadline:
            raise TimeoutError(f"worker {worker.index} never wrote {pattern!r}; it wrote:\n{worker.output}")
        time.sleep(0.01)


@contextlib.contextmanager
def workers(
    script: Path | str, num_workers: int, *args: object, devices: int = 1, env: Mapping[str, str] | None = None
) -> Iterator[list[Worker]]:
    """Start `num_workers` processes of a script as one job on this machine's CPU, and kill what still runs at the end.

    Args:
        script: a Python file; it finds JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. It flushes what it
            prints.
        num_workers: how many processes.
        args: arguments of the script, the same for all.
        devices: CPU devices of each process.
        env: more environment variables.
    """
    shared = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
    shared |= {
        "PYTHONFAULTHANDLER": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(num_workers),
    }
    running: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="mirrored-workers-") as folder:
        try:
            for index in range(num_workers):
                log = Path(folder) / f"worker{index}.log"
                with log.open("wb") as sink:
                    process = subprocess.Popen(
                        [sys.executable, str(script), *map(str, args)],
                        stdin=subprocess.DEVNULL,
                        stdout=sink,
                        stderr=subprocess.STDOUT,
                        env={**shared, "JAX_PROCESS_ID": str(index), **(env or {})},
                        start_new_session=True,  # so that its children can be killed with it
                    )
                running.append(Worker(index, process, log))
            yield running
        finally:
            for worker in running:
                worker.kill()


def run_workers(
    script: Path | str,
    num_workers: int,
    *args: object,
    devices: int = 1,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Run a job to its end, and return how each worker ended; see `workers`. TimeoutError with the outputs if one does not."""
    deadline = time.monotonic() + timeout
    with workers(script, num_workers, *args, devices=devices, env=env) as running:
        return [worker.wait(max(0.0, deadline - time.monotonic())) for worker in running]
