"""Judges how an attempt ended: which worker failed first, the launcher's exit code, whether to restart, the summary."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import signal
import time
from collections.abc import Mapping, Sequence

from .._errors import BAD_CONFIGURATION, FAILED, PREEMPTED, RESTART, ProgramMismatchError
from .._text import MARGIN, counted

#: Workers that fail within this time count as failing together: the first need not be the cause.
TOGETHER_SECONDS = 1.0
#: The library's reason for ending a worker of a job whose workers do different things: they would do so again.
_MISMATCH = re.compile(rf"worker \d+ leaves with code {FAILED}: (worker \d+ failed .* with )?{ProgramMismatchError.__name__}: ")


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of one worker."""

    index: int  # in the cluster
    pid: int
    code: int  # the exit code, or the negative number of the signal that killed it
    seconds: float  # since the start
    at: float  # time of day, in seconds since 1970
    was_signalled: bool  # by a signal of the launcher, so it is not the cause
    tail: Sequence[str]  # the last lines of its output, escaped
    was_suspended: bool = False  # as by SIGSTOP, when another failed

    def is_for_ever(self) -> bool:
        """Tell whether starting again would not help."""
        return self.code == BAD_CONFIGURATION or (self.code == FAILED and any(map(_MISMATCH.search, self.tail)))


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The end of one attempt."""

    endings: Sequence[Ending]  # in order of time
    signals: Sequence[int]  # received by the launcher
    steps: Mapping[str, int]  # progress file of a folder of checkpoints -> last complete step

    def exit_code(self) -> int:
        """Return the launcher's exit code."""
        failed = [ending for ending in self.endings if ending.code]
        if not failed:
            return 0
        if not self.signals:
            return shell_code(self.culprit().code)
        number = self.signals[-1]
        if len(self.signals) == 1 and number != signal.SIGINT:  # after Ctrl-C, a program's own code says nothing
            for ending in failed:
                if ending.code not in (RESTART, PREEMPTED, -signal.SIGTERM):
                    return shell_code(ending.code)
        return 128 + number

    def culprit(self) -> Ending:
        """Return the first worker that failed, except workers that left because another had failed."""
        failed = [ending for ending in self.endings if ending.code]
        causes = [ending for ending in failed if not ending.was_signalled]
        first = (causes or failed)[0]
        together = [ending for ending in causes if ending.seconds - first.seconds <= TOGETHER_SECONDS]
        # If all leave together with 75, worker 0 knows the reason best: all others connect to its port.
        alike = min(together, key=lambda ending: ending.index, default=first)
        return next((ending for ending in causes if ending.code != RESTART), alike)

    def alike(self) -> Sequence[Ending]:
        """Return the workers that failed together with the first, and with its exit code: none of them failed because of it."""
        first = self.culprit()
        if first.code in (PREEMPTED, RESTART):
            return [first]
        causes = [ending for ending in self.endings if ending.code == first.code and not ending.was_signalled]
        return [ending for ending in causes if abs(ending.seconds - first.seconds) <= TOGETHER_SECONDS] or [first]


@dataclasses.dataclass
class Budget:
    """The count of restarts since the last new checkpoint, and its limit."""

    max_restarts: int  # 0: never restart
    used: int = 0
    best: dict[str, int] = dataclasses.field(default_factory=dict)
    last_new: int | None = None

    def allows(self, attempt: Attempt) -> bool:
        """Count this attempt, and tell whether to restart after it."""
        known = max(self.best.values(), default=-1)  # a new folder counts as progress only with a step larger than all others
        new = {folder: step for folder, step in attempt.steps.items() if step > self.best.get(folder, known)}
        for folder, step in attempt.steps.items():
            self.best[folder] = max(step, self.best.get(folder, -1))
        if new:
            self.last_new, self.used = max(new.values()), 0
        if attempt.signals or any(ending.is_for_ever() for ending in attempt.endings) or not self.max_restarts:
            return False
        if not new or attempt.culprit().code not in (PREEMPTED, -signal.SIGTERM):
            self.used += 1  # else a machine was taken away after a save: no failure to count
        return self.used <= self.max_restarts

    def __str__(self) -> str:
        if not self.used:
            return f"not counted: a new checkpoint, of step {self.last_new}"
        since = "without a checkpoint" if self.last_new is None else f"since the checkpoint of step {self.last_new}"
        return f"restart {self.used} of {self.max_restarts} {since}"


def shell_code(code: int) -> int:
    """Return an exit code as a shell reports it: 128 plus the signal's number for a process that a signal killed."""
    return code if code >= 0 else 128 - code


def describe_code(code: int) -> str:
    """Describe an exit code in words."""
    meanings = {
        RESTART: ", asks to be started again",
        BAD_CONFIGURATION: ", starting again would not help",
        PREEMPTED: ", preempted",
    }
    if code >= 0:
        return f"exit code {code}{meanings.get(code, '')}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def describe_failure(attempt: Attempt) -> str:
    """Describe in one line which worker failed first, which ones failed together, or which one was preempted."""
    culprit, alike = attempt.culprit(), attempt.alike()
    who, what, how = f"worker {culprit.index} (pid {culprit.pid})", "failed first", describe_code(culprit.code)
    if culprit.code == PREEMPTED:
        what, how = "was preempted", f"exit code {PREEMPTED}"
    if len(alike) > 1:
        who, what = _ranges(sorted(ending.index for ending in alike)), "failed together"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(culprit.at))
    return f"{who} {what}: {how}, {culprit.seconds:.1f} s after the start, at {at}"


def summarize(attempt: Attempt, restarts: int, seconds: float, logs: str | None) -> list[str]:
    """Return the lines that end a run's output; none after a success without restarts."""
    total = f"{counted(restarts, 'restart')}, {seconds:.1f} s in all" + f", logs in {logs}" * bool(logs)
    if not any(ending.code for ending in attempt.endings):
        return [f"done: {total}"] * bool(restarts)
    if attempt.signals:
        names = " and ".join(signal.Signals(number).name for number in attempt.signals[:2])
        return [f"ended by {names}: {_groups(attempt.endings)}", total]
    culprit, alike = attempt.culprit(), attempt.alike()
    stopped = [ending.index for ending in attempt.endings if ending.was_suspended]
    lines = [f"{_ranges(stopped)} had been stopped, as by SIGSTOP, so that the others waited in vain"] * bool(stopped)
    lines += [describe_failure(attempt)]
    if culprit.tail:
        whose = "its last lines" if len(alike) == 1 else f"the last lines of worker {culprit.index}"
        lines += [f"{whose}:", *(MARGIN + line for line in culprit.tail)]
    if others := [ending for ending in attempt.endings if ending not in alike]:
        lines.append(f"the others: {_groups(others)}")
    return [*lines, total]


def _groups(endings: Sequence[Ending]) -> str:
    """Write "workers 0, 2-7: exit code 75, asks to be started again; worker 1: SIGKILL, did not leave and was killed ..."."""
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for ending in sorted(endings, key=lambda ending: ending.index):
        by = ", did not leave and was killed by the launcher" * (ending.was_signalled and ending.code == -signal.SIGKILL)
        groups[describe_code(ending.code) + by].append(ending.index)
    return "; ".join(f"{_ranges(indices)}: {how}" for how, indices in groups.items())


def _ranges(indices: Sequence[int]) -> str:
    """Write "workers 0, 2-7"."""
    runs = [[index for _, index in run] for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"worker{'s' * (len(indices) > 1)} {text}"
