"""What must be true after a run in which workers were killed: of the rows, of the state, of the steps done again."""

import collections
import dataclasses
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from chaos_job import Event, Hit


@dataclasses.dataclass(frozen=True)
class Life:
    """One attempt that came as far as to restore: its first step, and the records of all steps, by worker."""

    first: dict[str, Any]
    steps: dict[int, dict[int, dict[str, Any]]]
    num_workers: int


def read_lives(folder: Path) -> list[Life]:
    """Read the records of all attempts, in order."""
    files: dict[str, dict[int, Path]] = collections.defaultdict(dict)
    for path in sorted(folder.glob("records-*")):
        _, attempt, worker = path.name.split("-")
        files[attempt][int(worker)] = path
    lives = []
    for by_worker in files.values():
        steps: dict[int, dict[int, dict[str, Any]]] = collections.defaultdict(dict)
        firsts = {}
        for worker, path in by_worker.items():
            records = [json.loads(line) for line in path.read_text().splitlines()]
            if records:
                firsts[worker] = records[0]
            for record in records[1:]:
                steps[record["step"]][worker] = record
        if firsts:
            assert len({first["first"] for first in firsts.values()}) == 1, f"the workers restored different steps: {firsts}"
            assert len({first["mirrored"] for first in firsts.values()}) == 1, f"the workers restored different state: {firsts}"
            first = {**firsts[min(firsts)], "copies": {worker: own["copies"] for worker, own in firsts.items()}}
            lives.append(Life(first, dict(steps), firsts[min(firsts)]["num_workers"]))
    return lives


def check_lives(lives: Sequence[Life]) -> dict[int, list[int]]:
    """Check that each attempt began with exactly the state that it should; return the rows of each step in the end."""
    final: dict[int, dict[int, dict[str, Any]]] = {}
    for life in lives:
        begun = life.first["first"]
        if begun:
            saved = final[begun]
            assert life.first["mirrored"] == saved[0]["mirrored"], f"step {begun} was restored with other values than were saved"
            for worker, copies in life.first["copies"].items():
                assert copies == saved[worker]["copies"], f"step {begun}: worker {worker} has other copies than it saved"
        for step, by_worker in life.steps.items():
            for worker, record in by_worker.items():
                if worker in final.get(step, {}):
                    assert record == final[step][worker], f"step {step} was not redone as it had been done, on worker {worker}"
            if step < max(life.steps):
                assert len(by_worker) == life.num_workers, f"step {step} has no record of some worker"
        final = {step: records for step, records in final.items() if step <= begun} | life.steps
    return {
        step: [row for worker in sorted(by_worker) for rows in by_worker[worker]["rows"] for row in rows]
        for step, by_worker in sorted(final.items())
    }


def check_rows(rows: dict[int, list[int]], num_rows: int, num_epochs: int) -> None:
    """Check that every row was used exactly once in each epoch."""
    assert list(rows) == list(range(1, len(rows) + 1)), f"steps are missing: {list(rows)}"
    used = [row for step in rows.values() for row in step]
    assert len(used) == num_rows * num_epochs, f"{len(used)} rows were used, not {num_rows * num_epochs}"
    for epoch in range(num_epochs):
        of_epoch = sorted(used[epoch * num_rows : (epoch + 1) * num_rows])
        assert of_epoch == list(range(num_rows)), f"epoch {epoch} used the rows {of_epoch}"


def read_results(folder: Path, num_workers: int) -> list[dict[str, np.ndarray]]:
    """Read what the workers had in the end."""
    return [dict(np.load(folder / f"result-{worker}.npz")) for worker in range(num_workers)]


def check_same_bits(results: list[dict[str, np.ndarray]], expected: list[dict[str, np.ndarray]]) -> None:
    """Check that all workers ended with exactly the same bits as those of another run."""
    for worker, (own, right) in enumerate(zip(results, expected, strict=True)):
        assert own.keys() == right.keys()
        for name in own:
            same = own[name].tobytes() == right[name].tobytes() and own[name].dtype == right[name].dtype
            assert same, f"worker {worker} ended with another {name}: {own[name]!r}, not {right[name]!r}"


def check_commits(events: Sequence[Event]) -> None:
    """Check that no attempt went back behind a step that was said to be on disk."""
    committed = 0
    for event in events:
        if event.name == "COMMITTED":
            committed = max(committed, event.number)
        elif event.name == "RESTORED":
            assert event.number >= committed, f"step {committed} was on disk, and {event.number} was restored: {event}"


def check_preemptions(events: Sequence[Event], hits: Sequence[Hit]) -> None:
    """Check that after SIGTERM no step was repeated."""
    for hit in hits:
        if hit.fault.number == signal.SIGTERM:
            done = max(event.number for event in events if event.name == "STEP" and event.attempt == hit.attempt)
            began = [event.number for event in events if event.name == "RESTORED" and event.attempt > hit.attempt]
            assert not began or began[0] == done, f"step {done} was done when the worker was preempted, {began[0]} was restored"


def seconds_to_step(events: Sequence[Event], hits: Sequence[Hit]) -> list[float]:
    """Return for each SIGKILL the seconds until the next attempt's first step, where it came so far."""
    seconds = []
    for hit in hits:
        if hit.fault.number == signal.SIGKILL:
            times = [event.time for event in events if event.name == "STEP" and event.attempt == hit.attempt + 1]
            seconds += [min(times) - hit.time] if times else []
    return seconds


def steps_redone(lives: Sequence[Life]) -> list[int]:
    """Return for each restart how many steps were done again."""
    redone, done = [], 0
    for life in lives:
        redone.append(max(0, done - life.first["first"]))
        done = max(life.steps, default=life.first["first"])
    return redone[1:]
