"""Training that is killed at any moment, or preempted, ends as if nothing had happened.

The program is chaos_worker.py under `mirrored launch`. Moments are relative to what the program says that it does, so that they
are the same on a slower machine.
"""

import collections
import itertools
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos_job import PROGRAM, Event, Fault, Hit, job
from parameters import nightly
from processes import run_workers

NUM_WORKERS, NUM_ROWS, NUM_EPOCHS = 2, 27, 2
#: One kind of moment each; those around saves and ends of epochs are where positions and steps could part. Of five files of 2 to
#: 10 records worker 0 reads 21, and worker 1 reads 6. An epoch has 7 steps, and each is saved.
FAULTS = [
    Fault("SAVE", 2, (0, 1), 0.03),
    Fault("STEP", 5, (1,), 0.0, signal.SIGTERM),
    Fault("READ", 9, (0,), 0.002),
]
#: The promise is 10 s, for 2 local workers; this machine may be busy.
RESTART_SECONDS = 60.0


def rows_of_steps(folder: Path) -> dict[int, list[int]]:
    """Return the rows of each step in replica order, as the last attempt that took it has used them."""
    used: dict[int, dict[str, list[int]]] = collections.defaultdict(dict)
    for path in sorted(folder.glob("rows-*")):  # attempt by attempt
        for step, own in map(json.loads, path.read_text().splitlines()):
            used[step][path.name[-1]] = list(itertools.chain(*own))
    return {step: list(itertools.chain(*(used[step][worker] for worker in sorted(used[step])))) for step in sorted(used)}


def results(folder: Path) -> dict[tuple[int, str], Any]:
    """Return the bits of what the workers had in the end."""
    arrays = {(worker, name): a for worker in range(NUM_WORKERS) for name, a in np.load(folder / f"result-{worker}.npz").items()}
    return {key: (array.dtype, array.tobytes()) for key, array in arrays.items()}


def check_restart(events: Sequence[Event], hit: Hit) -> None:
    """Check that no attempt goes back behind a step that is on disk, or after SIGTERM behind any, and that it is soon there."""
    before = [event for event in events if event.attempt <= hit.attempt]
    after = [event for event in events if event.attempt == hit.attempt + 1]
    done = max(event.number for event in before if event.name == "STEP")
    committed = max((event.number for event in before if event.name == "COMMITTED"), default=0)
    [restored] = {event.number for event in after if event.name == "RESTORED"}
    is_killed = hit.fault.number == signal.SIGKILL
    at_most = 2 if is_killed else 0  # the steps since the last save, and that while it was written
    assert committed <= restored and done - restored <= at_most, (hit, committed, restored, done)
    assert not is_killed or min(event.time for event in after if event.name == "STEP") - hit.time < RESTART_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("storage", "num_devices"), [("parts_of_worker", 2), *nightly(("whole", 1), ("parts", 1))])
def test_kills_at_any_moment_leave_no_trace(tmp_path: Path, storage: str, num_devices: int) -> None:
    """What was restored wrong, or used twice, would show in the last bits, or in the rows of a step.

    `parts_of_worker` has values of each kind: in the parts of a worker's devices, and whole the small ones and those of steps.
    """
    what = NUM_ROWS, NUM_EPOCHS, storage
    alone, folder, hits = tmp_path / "undisturbed", tmp_path / "disturbed", list[Hit]()
    alone.mkdir()
    undisturbed = run_workers(PROGRAM, NUM_WORKERS, alone, *what, devices=num_devices, env={"MIRRORED_ATTEMPT": "0"}, timeout=100)
    assert [worker.code for worker in undisturbed] == [0] * NUM_WORKERS, [worker.output for worker in undisturbed]
    with job(folder, NUM_WORKERS, num_devices, *what) as running:
        for fault in FAULTS:
            hits.append(running.strike(fault, hits[-1] if hits else None))
        assert running.end() == 0
        assert any(folder.rglob("parts-1.npz")) == (storage != "whole")
        rows, ended, expected = rows_of_steps(folder), results(folder), results(alone)
        used = list(itertools.chain(*rows.values()))
        epochs = [sorted(used[start : start + NUM_ROWS]) for start in range(0, len(used), NUM_ROWS)]
        assert epochs == [list(range(NUM_ROWS))] * NUM_EPOCHS, "each row once in each epoch"
        assert rows == rows_of_steps(alone), "the order of the data is another one"
        assert ended.keys() == expected.keys() and [key for key in expected if ended[key] != expected[key]] == []
        for hit in hits:
            check_restart(running.events, hit)
