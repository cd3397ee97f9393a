"""Workers as threads, whose checks exchange values."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from mirrored._command.check_lines import Lines


class Together(Lines):
    """The lines of one of several workers of this process."""

    def __init__(self, worker: int, given: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(worker)
        self.hosts = [f"host-{index}" for index in range(len(given))]
        self._given, self._barrier = given, barrier

    def exchange(self, name: str, value: object) -> Sequence[Any]:
        self._given[self.worker] = value
        self._barrier.wait(20)
        values = list(self._given)
        self._barrier.wait(20)
        return values


def run_together(num_workers: int, check: Callable[[Lines], Any]) -> list[Any]:
    """Return what a check returns for each worker."""
    given, barrier, results = [None] * num_workers, threading.Barrier(num_workers), [None] * num_workers

    def work(worker: int) -> None:
        results[worker] = check(Together(worker, given, barrier))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
