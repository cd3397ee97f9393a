"""Training that is killed at any moment, or preempted, ends as if nothing had happened."""

import random
import signal
from collections.abc import Callable
from typing import Any

import chaos
import chaos_checks
import pytest
from chaos import Setting
from chaos_checks import Life
from chaos_job import Event, Fault, Hit

#: One size of batch: half the compilation, and so many more kills in the same time.
SMALL = Setting(num_rows=20, num_epochs=7, num_replicas=2)
#: Five files of 2 to 10 records: worker 0 has 21 of them, worker 1 has 6. An epoch has 7 steps.
FILES = Setting(num_rows=27, num_epochs=3, options=("--files", "--save-every", 1, "--wait-every", 2))
FILES_FAULTS = [
    *chaos.faults_around_saves(random.Random(0), 2, 2), Fault("READ", 8, (0,), 0.002), Fault("STEP", 15, (1,), 0.0),
]  # fmt: skip
RANDOM_FAULTS = chaos.random_faults(0, 8, SMALL.num_workers, num_steps=28)
#: The promise is 10 s, for 2 local workers; this machine may be busy.
RESTART_SECONDS = 60.0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_at_random_moments_leave_no_trace() -> None:
    outcome = chaos.disturbed(SMALL, RANDOM_FAULTS)
    missed = set(RANDOM_FAULTS) - {hit.fault for hit in outcome.hits}
    assert all(fault.moment == "END" for fault in missed), "only the end may come too soon"
    assert max(outcome.seconds_to_step, default=0.0) < RESTART_SECONDS
    assert max(outcome.steps_redone, default=0) <= 2 * 5, "the steps since the last save, and those while it was written"


def test_the_runs_meet_all_moments() -> None:
    met = {(fault.moment, fault.number) for fault in (*RANDOM_FAULTS, *FILES_FAULTS)}
    assert met == {(moment, signal.SIGKILL) for moment in chaos.DELAYS} | {("STEP", signal.SIGTERM)}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_around_saves_and_ends_of_epochs_lose_nothing_where_each_worker_reads_files_of_its_own() -> None:
    """Where the saved position is at the end of an epoch or before it."""
    outcome = chaos.disturbed(FILES, FILES_FAULTS)
    assert len(outcome.hits) == len(FILES_FAULTS) and outcome.num_attempts == 1 + len(FILES_FAULTS)


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
    assert chaos_checks.check_lives(lives) == {step: [2 * step, 2 * step + 1] for step in range(1, 6)}
    assert chaos_checks.steps_redone(lives) == [2]
    for change, message in WRONG:
        lives = [life(0, 1, 2, 3, 4), life(2, 3, 4, 5)]
        change(lives)
        with pytest.raises(AssertionError, match=message):
            chaos_checks.check_lives(lives)


def test_rows_that_are_not_used_once_are_found() -> None:
    chaos_checks.check_rows({1: [1, 0], 2: [2], 3: [2, 1], 4: [0]}, num_rows=3, num_epochs=2)
    for rows, message in (
        ({1: [0, 1], 2: [2, 1], 3: [0, 1], 4: [2]}, "7 rows were used, not 6"),
        ({1: [0, 1], 2: [1], 3: [2, 1], 4: [0]}, r"epoch 0 used the rows \[0, 1, 1\]"),
        ({1: [0, 1], 2: [2], 4: [2, 1, 0]}, r"steps are missing: \[1, 2, 4\]"),
    ):
        with pytest.raises(AssertionError, match=message):
            chaos_checks.check_rows(rows, num_rows=3, num_epochs=2)


def test_a_lost_commit_and_a_repeated_step_are_found() -> None:
    def events(restored: int) -> list[Event]:
        said = [(0, "STEP", 4), (0, "COMMITTED", 4), (0, "STEP", 5), (1, "RESTORED", restored), (1, "STEP", restored + 1)]
        return [Event(float(time), 0, attempt, name, number) for time, (attempt, name, number) in enumerate(said)]

    def hit(number: signal.Signals) -> list[Hit]:
        return [Hit(Fault("STEP", 4, (0,), 0.0, number), 0.5, 0)]

    chaos_checks.check_commits(events(5))
    chaos_checks.check_preemptions(events(5), hit(signal.SIGTERM))
    with pytest.raises(AssertionError, match="step 4 was on disk, and 3 was restored"):
        chaos_checks.check_commits(events(3))
    with pytest.raises(AssertionError, match="step 5 was done when the worker was preempted, 3 was restored"):
        chaos_checks.check_preemptions(events(3), hit(signal.SIGTERM))
    assert chaos_checks.seconds_to_step(events(5), hit(signal.SIGKILL)) == [3.5]
