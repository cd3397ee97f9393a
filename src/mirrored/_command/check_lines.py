"""The lines that `mirrored check` prints: worker 0 prints every check, another worker only what is wrong with itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from .._text import escape
from .._workers.coordination import Coordination
from .._workers.progress import progress

#: The number of characters shown of a worker's text.
_MAX_TEXT = 1000


class Finding(NamedTuple):
    """What a worker has found: a fact, or a problem with the remedy."""

    fact: str
    problem: str = ""


class Lines:
    """One line for each check. Before the workers meet, each knows its own problems only."""

    def __init__(self, worker: int) -> None:
        self.hosts: Sequence[str] = ()  # of all workers, after they have met
        self.worker, self._coordination = worker, Coordination()
        self._num_checks = self._num_wrong = 0
        self._early: list[tuple[str, str]] = []  # problems from before the workers met

    def meet(self, coordination: Coordination, host: str) -> None:
        """From now on every worker knows the problems of all; worker 0 prints those of the others from before."""
        self._coordination = coordination
        self.hosts = self.exchange("hosts", host)
        early = self.exchange("before", self._early)
        self._num_wrong = len({str(name) for problems in early for name, _ in problems})
        for index, problems in enumerate(early[1:], 1):
            for name, problem in problems:
                if self.worker == 0:
                    self._print("wrong", name, f"{self.call(index)}: {problem}")

    def exchange(self, name: str, value: object) -> Sequence:
        """Return the values of all workers; the guard names a worker that does not come."""
        with progress.phase(f"mirrored check: {name}", waits=True):
            return self._coordination.exchange(f"check/{name}", value)

    def add(self, name: str, finding: Finding) -> bool:
        """Print a check, which all workers add; return whether it is in order on all of them."""
        self._num_checks += 1
        if not self.hosts:
            self._early += [(name, finding.problem)] * bool(finding.problem)
            problems = {self.worker: finding.problem}
        else:
            problems = dict(enumerate(self.exchange(name, finding.problem)))
        problems = {index: problem for index, problem in problems.items() if problem}
        for index, problem in problems.items():
            if self.worker in (0, index):
                self._print("wrong", name, f"{self.call(index)}: {problem}" if len(self.hosts) > 1 else problem)
        if not problems and self.worker == 0:
            self._print("ok", name, finding.fact)
        self._num_wrong += bool(problems)
        return not problems

    def fail(self, name: str, error: Exception) -> int:
        """Print an error of this worker, after which it cannot go on; return the exit code."""
        self._num_checks += 1
        self._num_wrong += 1
        self._print("wrong", name, error)
        return self.end("; the rest is not checked")

    def end(self, not_done: str = "") -> int:
        """Print the summary on worker 0; return the exit code."""
        result = f"ok: {self._num_checks} checks"
        if self._num_wrong:
            result = f"not ok: {self._num_wrong} of {self._num_checks} checks{not_done}"
        if self.worker == 0:
            sys.stdout.write(f"{result}\n")
        return int(self._num_wrong > 0)

    def call(self, index: int) -> str:
        """Name a worker and its host."""
        return f"worker {index} on {self.hosts[index]}"

    def _print(self, mark: str, name: object, text: object) -> None:
        sys.stdout.write(f"{mark:6}{escape(str(name), 20):15}{escape(str(text), _MAX_TEXT)}\n")
        sys.stdout.flush()
