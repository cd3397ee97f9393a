"""One `mirrored launch` whose workers are killed when they say that they do something."""

import contextlib
import dataclasses
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "multiprocess" / "chaos_worker.py"
#: Without anything said; far more than it takes on a busy machine.
DEADLINE_SECONDS = 60.0
#: Much of a short job is compilation, and few of its tests are about the code that comes out.
QUICK_COMPILATION = "--xla_backend_optimization_level=0"
SAID = re.compile(r"CHAOS (\d+) (\d+) ([A-Z]+) (\d+)")


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that a worker said: what it is about to do, or (STEP, COMMITTED, RESTORED) has done."""

    time: float
    worker: int
    attempt: int
    name: str
    number: int


@dataclasses.dataclass(frozen=True)
class Fault:
    """What to do when.

    Attributes:
        moment: the name of the event after which it happens, or SPAWN: as soon as the launcher has started a process.
        step: of the event, at least.
        victims: workers; for SPAWN the number of the launcher's child in order, 0 is its keeper.
        delay: seconds after it.
        number: of the signal.
    """

    moment: str
    step: int
    victims: tuple[int, ...]
    delay: float
    number: signal.Signals = signal.SIGKILL


@dataclasses.dataclass(frozen=True)
class Hit:
    """A fault that happened: when, and in which attempt (None where that is not known)."""

    fault: Fault
    time: float
    attempt: int | None


class Job:
    """One `mirrored launch`, what its workers say, and their processes; nothing of it is left at the end."""

    def __init__(self, folder: Path, num_workers: int, num_replicas: int, options: Sequence[object], max_restarts: int = 20):
        self._deadline = time.monotonic() + DEADLINE_SECONDS
        self._temporary = folder / "temporary"
        self._temporary.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "mirrored", "launch", "-n", num_workers, "--cpu-devices", num_replicas]
        command += ["--max-restarts", max_restarts, "--grace", 10, PROGRAM, folder, *options]
        foreign = ("JAX_", "XLA_", "MIRRORED_", "TF_CONFIG")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env={**environment, "TMPDIR": str(self._temporary), "PYTHONFAULTHANDLER": "1", "XLA_FLAGS": QUICK_COMPILATION},
        )  # fmt: skip
        self.events: list[Event] = []
        self.lines: list[str] = []
        self._processes: dict[tuple[int, int], int] = {}  # pid file descriptors, by worker and attempt
        self._has_ended = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            now = time.monotonic()
            text = line.decode(errors="replace").rstrip()
            with self._news:
                self.lines.append(text)
                if said := SAID.search(text):
                    event = Event(now, int(said[1]), int(said[2]), said[3], int(said[4]))
                    self.events.append(event)
                    self._deadline = now + DEADLINE_SECONDS
                    if event.name == "START":
                        with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
                            self._processes[event.worker, event.attempt] = os.pidfd_open(event.number)
                self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def wait_for(self, is_it: Callable[[Event], bool]) -> Event | None:
        """Wait for an event; None when the job ends without it."""
        seen = 0
        with self._news:
            while True:
                for event in self.events[seen:]:
                    if is_it(event):
                        return event
                seen = len(self.events)
                if self._has_ended:
                    return None
                left = self._deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the job still runs")
                self._news.wait(left)

    def strike(self, fault: Fault, last: Hit | None) -> Hit | None:
        """Wait for a fault's moment, in a later attempt than the last hit's, and let it happen; None when it does not come."""
        if fault.moment == "SPAWN":
            return self._strike_child(fault)
        event = self.wait_for(
            lambda event: (
                event.name == fault.moment
                and event.number >= fault.step
                and event.worker == fault.victims[0]
                and (last is None or (event.attempt > last.attempt if last.attempt is not None else event.time > last.time))
            )
        )
        if event is None:
            return None
        time.sleep(max(0.0, event.time + fault.delay - time.monotonic()))
        hits = [self._signal(worker, event.attempt, fault.number) for worker in fault.victims]
        return Hit(fault, time.monotonic(), event.attempt) if any(hits) else None

    def _signal(self, worker: int, attempt: int, number: int) -> bool:
        process = self._processes.get((worker, attempt))
        if process is None:  # of several victims, one that has not started yet
            return False
        try:
            signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            return False
        return True

    def _strike_child(self, fault: Fault) -> Hit | None:
        """Kill a child that the launcher is about to start, by its number in order."""
        before = set(self._children())
        while self.process.poll() is None and time.monotonic() < self._deadline:
            new = [child for child in self._children() if child not in before]
            if len(new) > fault.victims[0]:
                time.sleep(fault.delay)
                # Its number cannot be another's yet: only the launcher asks how it has ended, later than this.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(new[fault.victims[0]], fault.number)
                    return Hit(fault, time.monotonic(), None)
                return None
            time.sleep(0.0005)
        return None

    def _children(self) -> list[int]:
        try:
            return [int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]
        except OSError:  # it has ended
            return []

    def end(self) -> int:
        """Wait until the launcher has ended, and return its exit code; nothing of it is left."""
        self.wait_for(lambda event: False)
        code = self.process.wait(10)
        left = [key for key, process in self._processes.items() if not select.select([process], [], [], 0)[0]]
        assert not left, f"these workers (worker, attempt) live on: {left}"
        files = [path.name for path in self._temporary.glob("mirrored-*")]
        assert not files, f"the launcher has left files behind: {files}"
        return code

    def close(self) -> None:
        """End what still runs: the launcher, and by its keeper all workers."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for process in self._processes.values():
            os.close(process)


@contextlib.contextmanager
def job(folder: Path, num_workers: int, num_replicas: int, *options: object, **more: Any) -> Iterator[Job]:
    """Run a job; when something is wrong with it, its last lines are in the error."""
    running = Job(folder, num_workers, num_replicas, options, **more)
    try:
        yield running
    except Exception as error:
        error.add_note("\n".join(["the job's last lines:", *running.lines[-60:]]))
        raise
    finally:
        running.close()
