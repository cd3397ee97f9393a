"""Training that is killed at any moment, or preempted, ends as if nothing had happened.

The program is chaos_worker.py under `mirrored launch`. Moments are relative to what the program says that it does, so that they
are the same on a slower machine.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chaos_checks as checks
import pytest
from chaos_checks import Life
from chaos_job import Fault, Hit, job

NUM_WORKERS, NUM_ROWS, NUM_EPOCHS = 2, 27, 3
#: Five files of 2 to 10 records: worker 0 has 21 of them, worker 1 has 6. An epoch has 7 steps, and each is saved.
OPTIONS = ("--rows", NUM_ROWS, "--epochs", NUM_EPOCHS)
#: One kind of moment each; those around saves and ends of epochs are where positions and steps could part.
FAULTS = [
    Fault("SAVE", 2, (0, 1), 0.03),
    Fault("STEP", 5, (1,), 0.0, signal.SIGTERM),
    Fault("READ", 8, (0,), 0.002),
]
#: The promise is 10 s, for 2 local workers; this machine may be busy.
RESTART_SECONDS = 60.0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_at_any_moment_leave_no_trace(tmp_path: Path) -> None:
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    with job(tmp_path / "undisturbed", NUM_WORKERS, *OPTIONS) as running:
        assert running.end() == 0, "the undisturbed run failed"
    folder, hits = tmp_path / "disturbed", list[Hit]()
    with job(folder, NUM_WORKERS, *OPTIONS) as running:
        for fault in FAULTS:
            hit = running.strike(fault, hits[-1] if hits else None)
            assert hit is not None, fault
            hits.append(hit)
        assert running.end() == 0
        lives = checks.read_lives(folder)
        rows = checks.check_lives(lives)
        checks.check_rows(rows, NUM_ROWS, NUM_EPOCHS)
        assert rows == checks.check_lives(checks.read_lives(tmp_path / "undisturbed")), "the order of the data is another one"
        expected = checks.read_results(tmp_path / "undisturbed", NUM_WORKERS)
        checks.check_same_bits(checks.read_results(folder, NUM_WORKERS), expected)
        checks.check_commits(running.events)
        checks.check_preemptions(running.events, hits)
    assert max(checks.seconds_to_step(running.events, hits)) < RESTART_SECONDS
    assert max(checks.steps_redone(lives)) <= 2, "the steps since the last save, and that while it was written"


# -- a recovery that forgets something is found


def life(first: int, *steps: int) -> Life:
    """Return the records of an attempt of two workers, whose state after step n has the checksum n."""
    records = {
        step: {w: {"step": step, "rows": [[2 * step + w]], "mirrored": step, "copies": 10 * step + w} for w in range(2)}
        for step in steps
    }
    begun = {"first": first, "mirrored": first, "copies": {w: 10 * first + w for w in range(2)}}
    return Life(begun, records, 2)


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda lives: lives[1].first.update(mirrored=7), "step 2 was restored with other values than were saved"),
    (lambda lives: lives[1].first["copies"].update({1: 7}), "step 2: worker 1 has other copies than it saved"),
    (lambda lives: lives[1].steps[3][1].update(rows=[[0]]), "step 3 was not redone as it had been done, on worker 1"),
    (lambda lives: lives[1].steps[4][0].update(copies=0), "step 4 was not redone as it had been done, on worker 0"),
    (lambda lives: lives[1].steps[3].pop(1), "step 3 has no record of some worker"),
]


def test_what_was_redone_counts_once_and_wrong_records_are_found() -> None:
    lives = [life(0, 1, 2, 3, 4), life(2, 3, 4, 5)]
    assert checks.check_lives(lives) == {step: [2 * step, 2 * step + 1] for step in range(1, 6)}
    assert checks.steps_redone(lives) == [2]
    for change, message in WRONG:
        lives = [life(0, 1, 2, 3, 4), life(2, 3, 4, 5)]
        change(lives)
        with pytest.raises(AssertionError, match=message):
            checks.check_lives(lives)
