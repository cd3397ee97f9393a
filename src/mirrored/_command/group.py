"""Runs the workers of one attempt until they and all their children are gone: one thread, one loop for all events."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from .. import _env
from .._errors import PREEMPTED
from . import keeper
from .ending import Attempt, Ending
from .output import STATE_SECONDS, BarState, LineCutter, LogFile, Outlet, Tail, prefix
from .signals import Signals

#: How long the other workers have to leave by themselves after a failure, before SIGTERM; the library needs about a second.
FAREWELL_SECONDS = 5.0
#: How long the children of an ended worker may live on, for example to clean up.
LEFTOVER_SECONDS = 1.0
#: How gloo's line for each connected worker begins: no log level turns it off, so only the log files keep it.
_NOISE = b"[Gloo] Rank "
_IS_STOPPED = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
_READ_BYTES = 1 << 20  # the most that a pipe holds
#: The most bytes of a progress file, and the most progress files; each folder of checkpoints has one.
_PROGRESS_BYTES, _MAX_WRITERS = 32, 100


@dataclasses.dataclass
class Stream:
    """One of a worker's two output streams, and its outlet; the pipe is closed when the stream has ended."""

    pipe: IO[bytes]
    outlet: Outlet
    prefix: bytes
    cutter: LineCutter = dataclasses.field(default_factory=LineCutter)
    shown_at: float = -math.inf


@dataclasses.dataclass
class Worker:
    """One worker: its process, its streams, and its state."""

    index: int
    process: subprocess.Popen[bytes]
    streams: list[Stream]
    log: LogFile | None
    tail: Tail = dataclasses.field(default_factory=Tail)
    was_signalled: bool = False
    was_suspended: bool = False
    ended: float = 0.0  # as of time.monotonic()


@dataclasses.dataclass
class Group:
    """The workers of one attempt on this host, from their start until all are gone."""

    command: Sequence[str]  # a worker's arguments to Python
    environments: Sequence[Mapping[str, str]]  # one for each worker; MIRRORED_PROGRESS_FILE is added
    first_index: int  # of the first worker, in the cluster
    num_workers: int  # of the whole cluster, also on other hosts
    grace: float  # seconds between asking workers to leave and killing them
    logs: Path | None
    outlets: tuple[Outlet, Outlet]  # for output and errors; the same one twice if both go to one place
    signals: Signals
    _workers: list[Worker] = dataclasses.field(default_factory=list)  # the workers that are not gone
    _endings: list[Ending] = dataclasses.field(default_factory=list)  # of the workers that are gone
    _plan: list[tuple[float, int]] = dataclasses.field(default_factory=list)  # (time, signal to send)
    _num_signals: int = 0  # how many of the launcher's signals have been obeyed
    _is_ending: bool = False  # since a signal came, or a worker failed

    def watch(self) -> Attempt:
        """Start the workers, and return when all are gone."""
        with _kept_folder() as (folder, pipe):
            progress = Path(folder, "progress")
            self._keeper_pipe = pipe
            self._enrol = [*_isolated("enrol"), str(pipe)]
            self._start = time.monotonic()
            try:
                for index, environment in enumerate(self.environments, self.first_index):
                    self._spawn(index, {**environment, _env.MIRRORED_PROGRESS_FILE.name: str(progress)})
                while self._workers:
                    self._step()
            finally:
                for worker in list(self._workers):
                    self._end(worker)
            steps = _read_steps(progress)
        endings = sorted(self._endings, key=lambda ending: (ending.seconds, ending.index))
        return Attempt(endings, list(self.signals.received), steps)

    def _spawn(self, index: int, environment: Mapping[str, str]) -> None:
        log = LogFile(self.logs / f"worker-{index}.log") if self.logs else None
        command = [*self._enrol, sys.executable, "-u", *self.command]
        # A session of its own: Ctrl-C reaches the launcher alone, which passes it on once.
        process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            pass_fds=(self._keeper_pipe,),
        )
        streams = []
        for pipe_end, outlet in zip((process.stdout, process.stderr), self.outlets, strict=True):
            assert pipe_end is not None
            os.set_blocking(pipe_end.fileno(), False)
            streams.append(Stream(pipe_end, outlet, prefix(index, self.num_workers, outlet.has_colour)))
        self._workers.append(Worker(index, process, streams, log))

    def _step(self) -> None:
        """Wait for the next event, and handle all that have come."""
        deadlines = [when for when, _ in self._plan]
        if any(worker.ended for worker in self._workers):
            deadlines.append(time.monotonic() + 0.02)  # no event says that a group's last process has ended
        streams = [stream for worker in self._workers for stream in worker.streams]
        pipes = [stream.pipe.fileno() for stream in streams if not (stream.pipe.closed or stream.outlet.is_full)]
        seconds = min(deadlines) - time.monotonic() if deadlines else None
        self.signals.wait(self.outlets, pipes, seconds)
        now = time.monotonic()
        for worker in list(self._workers):
            for stream in worker.streams:
                if not (stream.pipe.closed or stream.outlet.is_full):
                    self._relay(worker, stream)
            self._look_after(worker, now)
        self._obey_signals(now)
        while self._plan and self._plan[0][0] <= now:
            self._send(self._plan.pop(0)[1])

    def _relay(self, worker: Worker, stream: Stream) -> None:
        """Pass on a worker's new output."""
        data = stream.pipe.read(_READ_BYTES)
        if data is None:  # the pipe does not block, and is empty
            return
        if data and worker.log and (problem := worker.log.append(data)):
            self.outlets[1].write(f"mirrored launch: {problem}\n".encode())
        lines = stream.cutter.feed(data) if data else stream.cutter.finish()
        self._pass_on(worker, stream, lines)
        if not data:
            stream.pipe.close()

    def _pass_on(self, worker: Worker, stream: Stream, lines: Sequence[bytes]) -> None:
        for line in lines:
            if line.startswith(_NOISE):
                continue
            if not worker.ended or time.monotonic() < worker.ended + LEFTOVER_SECONDS:  # later output is its trackers' warnings
                worker.tail.add(line)
            if not isinstance(line, BarState):
                stream.outlet.write(stream.prefix + line + b"\n")
            elif stream.outlet.is_terminal:
                if worker.index == self.first_index:  # several bars would overwrite each other on one line
                    stream.outlet.show(stream.prefix, line)
            elif (now := time.monotonic()) >= stream.shown_at + STATE_SECONDS:
                stream.shown_at = now
                stream.outlet.write(stream.prefix + line + b"\n")

    def _look_after(self, worker: Worker, now: float) -> None:
        """Note a worker's end; if it failed, plan the end of the others; kill the rest of its process group when due."""
        if not worker.ended and worker.process.poll() is not None:
            worker.ended = now
            code = worker.process.returncode
            if code and not self._is_ending:
                self._is_ending = True
                others = [running for running in self._workers if running.process.poll() is None]
                for running in others:
                    running.was_suspended = os.waitid(os.P_PID, running.process.pid, _IS_STOPPED) is not None
                farewell = max(FAREWELL_SECONDS, self.grace) if code == PREEMPTED else FAREWELL_SECONDS
                if all(running.was_suspended for running in others):
                    farewell = 0.0  # none of them can leave by itself
                self._plan = [(now + farewell, signal.SIGTERM), (now + farewell + self.grace, signal.SIGKILL)]
        if worker.ended:
            is_over = all(stream.pipe.closed for stream in worker.streams) and not _is_alive(worker.process.pid)
            late = now - worker.ended - LEFTOVER_SECONDS
            if is_over or (late > 0 and not keeper.kill_but_trackers({worker.process.pid})) or late > keeper.TRACKER_SECONDS:
                self._end(worker)

    def _obey_signals(self, now: float) -> None:
        while self.signals.of_workers:
            number = self.signals.of_workers.pop(0)
            for worker in self._workers:
                worker.process.send_signal(number)  # its meaning is the program's
        for number in self.signals.received[self._num_signals :]:
            self._is_ending, deadline = True, now  # a second signal kills at once
            if not self._num_signals:
                deadline = now + self.grace
                # When a terminal hangs up, ask workers to save and leave; SIGHUP itself would kill Python without a message.
                first = signal.SIGTERM if number == signal.SIGHUP else number
                self._send(first)
            self._plan = [(deadline, signal.SIGKILL)]
            self._num_signals += 1

    def _send(self, number: int) -> None:
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.was_signalled = True
                if number == signal.SIGKILL:
                    worker.process.kill()
                    keeper.kill_but_trackers({worker.process.pid})
                else:  # but not to its children: a worker needs its loaders until it has saved
                    worker.process.send_signal(number)
                    worker.process.send_signal(signal.SIGCONT)  # a stopped process gets signals only when it continues

    def _end(self, worker: Worker) -> None:
        """Kill the rest of a worker's process group, and pass on the rest of its output."""
        keeper.kill(worker.process.pid)
        worker.process.wait()
        for stream in worker.streams:
            if not stream.pipe.closed:
                self._relay(worker, stream)  # once: a process outside of the group may go on writing
            self._pass_on(worker, stream, stream.cutter.finish())
            stream.pipe.close()
        if worker.log:
            worker.log.close()
        keeper.tell(self._keeper_pipe, "-", worker.process.pid)  # another process may get its number
        self._workers.remove(worker)
        ending = Ending(
            index=worker.index,
            pid=worker.process.pid,
            code=worker.process.returncode,
            seconds=worker.ended - self._start,
            at=time.time() - (time.monotonic() - worker.ended),
            was_signalled=worker.was_signalled,
            tail=worker.tail.lines(),
            was_suspended=worker.was_suspended,
        )
        self._endings.append(ending)


@contextlib.contextmanager
def _kept_folder() -> Iterator[tuple[str, int]]:
    """Yield a folder, and the pipe of the keeper, which ends the workers and removes the folder if this process is killed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with (
        tempfile.TemporaryDirectory(prefix="mirrored-", ignore_cleanup_errors=True) as folder,
        subprocess.Popen([*_isolated("keep"), folder], 0, start_new_session=True, **pipes) as process,
    ):
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        try:
            yield folder, process.stdin.fileno()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            process.kill()  # a suspended keeper would not end by itself


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of the group has changed its user
        return True
    return True


def _isolated(role: str) -> list[str]:
    return [sys.executable, "-I", "-S", keeper.__file__, role]


def _read_steps(path: Path) -> dict[str, int]:
    """Return name -> step of the last complete checkpoint, from the progress files; skip files with other contents."""
    steps: dict[str, int] = {}
    for file in (path, *itertools.islice(path.parent.glob(f"{path.name}-????????"), _MAX_WRITERS)):
        try:
            with file.open("rb") as opened:
                text = opened.read(_PROGRESS_BYTES)
        except OSError:  # no checkpoint yet
            continue
        if text.isdigit() and len(text) < _PROGRESS_BYTES:
            steps[file.name] = int(text)
    return steps
