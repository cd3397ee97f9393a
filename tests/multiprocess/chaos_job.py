"""One `mirrored launch` whose workers are killed when they say that they do something."""

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from processes import LAUNCHER, Worker, workers

PROGRAM = Path(__file__).parent / "chaos_worker.py"
#: Without anything said; far more than it takes on a busy machine.
DEADLINE_SECONDS = 60.0
SAID = re.compile(rb"CHAOS (\d+) (\d+) ([A-Z]+) (\d+) ([\d.]+)\n")


class Event(NamedTuple):
    """Something that a worker said: what it is about to do, or (STEP, COMMITTED, RESTORED) has done."""

    time: float
    worker: int
    attempt: int
    name: str
    number: int


class Fault(NamedTuple):
    """A signal to some workers, so many seconds after the first of them says that it is at a moment, in this step or later."""

    moment: str
    step: int
    victims: tuple[int, ...]
    delay: float
    number: signal.Signals = signal.SIGKILL


class Hit(NamedTuple):
    """A fault that happened: when, and in which attempt."""

    fault: Fault
    time: float
    attempt: int


class Job:
    """One `mirrored launch`, what its workers say, and their processes; nothing of it is left at the end."""

    def __init__(self, launcher: Worker, temporary: Path) -> None:
        self.launcher, self._temporary, self._started = launcher, temporary, time.monotonic()
        self.events: list[Event] = []
        self._processes: dict[tuple[int, int], int] = {}  # pid file descriptors, by worker and attempt
        self._num_read = 0

    def _read(self) -> None:
        """Take note of what the workers have said since the last time."""
        with self.launcher.log.open("rb") as log:
            log.seek(self._num_read)
            text = log.read().rpartition(b"\n")
        self._num_read += len(text[0]) + len(text[1])
        for worker, attempt, name, number, moment in SAID.findall(text[0] + b"\n"):
            event = Event(float(moment), int(worker), int(attempt), name.decode(), int(number))
            self.events.append(event)
            if event.name == "START":
                with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
                    self._processes[event.worker, event.attempt] = os.pidfd_open(event.number)

    def wait_for(self, is_it: Callable[[Event], bool]) -> Event | None:
        """Wait for an event; None when the job ends without it."""
        seen = 0
        while True:
            has_ended = self.launcher.has_ended.is_set()  # before its output is read
            self._read()
            for event in self.events[seen:]:
                if is_it(event):
                    return event
            seen = len(self.events)
            if has_ended:
                return None
            if time.monotonic() > (self.events[-1].time if self.events else self._started) + DEADLINE_SECONDS:
                raise TimeoutError("the job still runs")
            time.sleep(0.003)

    def strike(self, fault: Fault, last: Hit | None) -> Hit:
        """Wait for a fault's moment, in a later attempt than the last hit's, and let it happen."""
        first, victim = 0 if last is None else last.attempt + 1, fault.victims[0]
        event = self.wait_for(
            lambda said: (
                (said.name, said.worker) == (fault.moment, victim) and said.number >= fault.step and said.attempt >= first
            )
        )
        assert event is not None, f"the job has ended before {fault}"
        time.sleep(max(0.0, event.time + fault.delay - time.monotonic()))
        self._read()
        for worker in fault.victims:
            with contextlib.suppress(KeyError, ProcessLookupError):  # one that has not started yet, or has ended
                signal.pidfd_send_signal(self._processes[worker, event.attempt], fault.number)
        return Hit(fault, time.monotonic(), event.attempt)

    def end(self) -> int:
        """Wait until the launcher has ended, and return its exit code; nothing of it is left."""
        self.wait_for(lambda event: False)
        left = [key for key, process in self._processes.items() if not select.select([process], [], [], 0)[0]]
        assert not left, f"these workers (worker, attempt) live on: {left}"
        files = [path.name for path in self._temporary.glob("mirrored-*")]
        assert not files, f"the launcher has left files behind: {files}"
        return self.launcher.wait(10).code

    def close(self) -> None:
        """End what still runs: the launcher, and all workers."""
        self.launcher.kill()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)


@contextlib.contextmanager
def job(folder: Path, num_workers: int, num_devices: int, *options: object) -> Iterator[Job]:
    """Run a job, whose workers have so many devices each; when something is wrong with it, its last lines are in the error."""
    temporary = folder / "temporary"
    temporary.mkdir(parents=True)
    launch = ("launch", "-n", num_workers, "--cpu-devices", num_devices, "--max-restarts", 20, "--grace", 10)
    with workers(LAUNCHER, 1, *launch, PROGRAM, folder, *options, env={"TMPDIR": str(temporary)}) as (launcher,):
        running = Job(launcher, temporary)
        try:
            yield running
        except Exception as error:
            error.add_note("\n".join(["the job's last lines:", *launcher.output.splitlines()[-60:]]))
            raise
        finally:
            running.close()
