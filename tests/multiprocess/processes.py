"""Real processes: several of one script, as the workers of a job, or one program; whatever happens, none is left."""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

#: Much of a short job is compilation, and few of its tests are about the code that comes out.
QUICK_COMPILATION = "--xla_backend_optimization_level=0"
#: A script that is the command `mirrored`.
LAUNCHER = Path(__file__).with_name("launcher.py")
#: What says to a process that it is a worker of a job, or changes what jax does; a test's workers inherit none of it
#: but the compile cache. Nor PYTHONUNBUFFERED, which writes each piece of a line alone: a message may come in between.
_NOT_INHERITED = re.compile(
    r"(?i:.*_proxy)|TF_CONFIG|JAX_(?!COMPILATION_CACHE|PERSISTENT).*|XLA_.*|MIRRORED_.*|SLURM_.*|OMPI_.*|PMI_.*|PMIX_.*"
    r"|RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*|COORDINATOR_.*|NUM_PROCESSES|PROCESS_ID|PYTEST_.*|PYTHONUNBUFFERED|(PJRT_)?NPROC"
)


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a worker ended: its exit code (-9 for SIGKILL), when, and all it wrote to stdout and stderr."""

    index: int
    code: int
    seconds: float  # since the start of the job
    time: float  # as of time.time(), to compare with the moment of a fault
    output: str


class ForkServer:
    """The process that forks workers, fork_server.py: one for each process of pytest, which it does not survive."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(other.fileno())]
        env = _inherited() | {"OPENBLAS_NUM_THREADS": "1"}  # no threads where it forks
        with other:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self._lock, self._started = threading.Lock(), queue.SimpleQueue[Worker]()
        self._ends: dict[int, Worker] = {}
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._end)

    def start(self, worker: "Worker", out: BinaryIO, errors: BinaryIO, **request: object) -> None:
        """Start a worker, and return when it has its number."""
        with self._lock:
            self._started.put(worker)
            socket.send_fds(self._socket, [json.dumps(request).encode()], [out.fileno(), errors.fileno()])
        assert worker.is_started.wait(60), "the fork server does not answer"

    def _listen(self) -> None:
        while message := self._socket.recv(1 << 16):
            said = json.loads(message)
            if "started" in said:
                worker = self._ends[said["started"]] = self._started.get()
                worker.pid = said["started"]
                worker.is_started.set()
            else:
                worker = self._ends.pop(said["ended"])
                worker.end = (said["code"], said["time"])
                worker.has_ended.set()

    def _end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer:
    """Return this process's."""
    return ForkServer()


class Worker:
    """One running process of a job."""

    def __init__(self, index: int, log: Path) -> None:
        self.index, self.log = index, log
        self.pid, self.end, self._begin = 0, (0, 0.0), time.time()
        self.is_started, self.has_ended = threading.Event(), threading.Event()

    @property
    def output(self) -> str:
        """All that it has written so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal; what a stopped process gets besides SIGKILL and SIGCONT waits."""
        if not self.has_ended.is_set():
            os.kill(self.pid, number)

    def wait(self, timeout: float = 60.0) -> Ended:
        """Wait for the end, and say how it ended. After the timeout: its stacks are in the error."""
        if not self.has_ended.wait(timeout):
            self.signal(signal.SIGABRT)  # faulthandler writes the stacks
            self.has_ended.wait(2.0)
            raise TimeoutError(f"worker {self.index} still ran after {timeout} s; it wrote:\n{self.output}")
        code, moment = self.end
        return Ended(self.index, code, moment - self._begin, moment, self.output)

    def kill(self) -> None:
        """End it and all its children, also when it is stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.has_ended.wait(10.0)


def free_port() -> int:
    """Return a port of the loopback address on which nobody listens, and which the kernel gives nobody by itself meanwhile."""
    while True:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


def wait_for_line(worker: Worker, pattern: str, timeout: float = 60.0) -> re.Match[str]:
    """Wait until something that the worker wrote matches the regular expression, and return the match."""
    deadline = time.monotonic() + timeout
    while True:
        has_ended = worker.has_ended.is_set()  # before its output is read
        if match := re.search(pattern, worker.output):
            return match
        if has_ended or time.monotonic() > deadline:
            raise TimeoutError(f"worker {worker.index} never wrote {pattern!r}; it wrote:\n{worker.output}")
        time.sleep(0.01)


@contextlib.contextmanager
def workers(
    script: Path | str,
    num_workers: int,
    *args: object,
    devices: int = 1,
    env: Mapping[str, str] | None = None,
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
    shared = _inherited() | {
        "PYTHONFAULTHANDLER": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": QUICK_COMPILATION,
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(num_workers),
    }
    running: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="mirrored-workers-") as folder:
        try:
            for index in range(num_workers):
                log = Path(folder) / f"worker{index}.log"
                running.append(Worker(index, log))
                with log.open("wb") as sink:
                    command, own = [str(script), *map(str, args)], {**shared, "JAX_PROCESS_ID": str(index), **(env or {})}
                    fork_server().start(running[-1], sink, sink, command=command, env=own)
            yield running
        finally:
            for worker in running:
                worker.kill()


@contextlib.contextmanager
def program(code: str, *args: object, env: Mapping[str, str] | None = None) -> Iterator[Worker]:
    """Start a program, with more environment variables, and kill it when it still runs at the end; stdout is its output."""
    with tempfile.TemporaryDirectory(prefix="mirrored-program-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(code)
        worker = Worker(0, folder / "out")
        try:
            with (folder / "out").open("wb") as out, (folder / "errors").open("wb") as errors:
                command = [str(folder / "program.py"), *map(str, args)]
                fork_server().start(worker, out, errors, command=command, env=_inherited() | (env or {}))
            yield worker
        finally:
            worker.kill()


def run_program(
    code: str, *args: object, env: Mapping[str, str] | None = None, timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    with program(code, *args, env=env) as worker:
        end = worker.wait(timeout)
        return subprocess.CompletedProcess(args, end.code, end.output, (worker.log.parent / "errors").read_text(errors="replace"))


def run_workers(script: Path | str, num_workers: int, *args: object, timeout: float = 60.0, **options: Any) -> list[Ended]:
    """Run a job to its end, and return how each worker ended; see `workers`. TimeoutError with the outputs if one does not."""
    deadline = time.monotonic() + timeout
    with workers(script, num_workers, *args, **options) as running:
        try:
            return [worker.wait(max(0.0, deadline - time.monotonic())) for worker in running]
        except TimeoutError as error:
            error.add_note("\n".join(f"--- worker {worker.index} wrote:\n{worker.output}" for worker in running))
            raise


def found(ended: list[Ended]) -> list[dict[str, Any]]:
    """Return what each worker of a job that went well has printed as JSON after FOUND."""
    assert [worker.code for worker in ended] == [0] * len(ended), [worker.output for worker in ended]
    return [json.loads(re.search(r"^FOUND(.*)$", worker.output, re.MULTILINE)[1]) for worker in ended]
