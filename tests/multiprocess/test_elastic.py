"""Fewer or more workers, the same loss curve: the steps of a job of 3, 2 and 3 workers are those of one device."""

import signal
from pathlib import Path

import pytest
from processes import Ended, Worker, run_workers, wait_for_line, workers

SCRIPT = Path(__file__).with_name("elastic_worker.py")
NUM_ROWS, BATCH_SIZE, NUM_EPOCHS = 29, 8, 4
STEPS_OF_EPOCH = -(-NUM_ROWS // BATCH_SIZE)

Steps = dict[int, tuple[float, list[int]]]


def steps_of(output: str) -> Steps:
    """Return the loss and the rows of each step that a worker has said."""
    found = [line.split() for line in output.splitlines() if line.startswith("STEP ")]
    return {int(step): (float(loss), list(map(int, rows.split(",")))) for _, step, loss, rows, *_ in found}


def struck(num_workers: int, folder: Path, scheduler: str, victim: int, step: int, number: signal.Signals) -> list[Ended]:
    """Run a job, send a signal to one of its workers after a step, and return how all ended."""
    with workers(SCRIPT, num_workers, folder, scheduler, 0.1, NUM_EPOCHS) as running:
        hit: Worker = running[victim]
        wait_for_line(hit, rf"STEP {step} ", 100)
        hit.signal(number)
        return [worker.wait(60) for worker in running]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_of_three_two_and_three_workers_takes_the_steps_of_one_device(tmp_path: Path) -> None:
    [alone] = run_workers(SCRIPT, 1, tmp_path / "alone", "torchrun", 0, NUM_EPOCHS, timeout=100)
    expected = steps_of(alone.output)
    assert alone.code == 0 and len(expected) == NUM_EPOCHS * STEPS_OF_EPOCH, alone.output

    folder = tmp_path / "elastic"
    lost = struck(3, folder, "torchrun", 2, 5, signal.SIGKILL)  # a host is lost for good
    assert [worker.code for worker in lost] == [75, 75, -signal.SIGKILL], [worker.output for worker in lost]
    noticed = struck(2, folder, "slurm", 1, 9, signal.SIGTERM)  # the scheduler takes both back
    assert [worker.code for worker in noticed] == [143, 143], [worker.output for worker in noticed]
    ended = run_workers(SCRIPT, 3, folder, "found", 0, NUM_EPOCHS, timeout=100)
    assert [worker.code for worker in ended] == [0, 0, 0], [worker.output for worker in ended]

    first, second, third = (steps_of(job[0].output) for job in (lost, noticed, ended))
    assert min(second) <= max(first) + 1 and min(second) in (1, 4, 7), "it goes on from the last checkpoint"
    assert min(third) == max(second) + 1, "after SIGTERM no step is taken again"
    for steps in (first, second, third):
        for step, (loss, rows) in steps.items():
            assert rows == expected[step][1] and loss == pytest.approx(expected[step][0], rel=1e-5), step
    taken = first | second | third
    assert taken.keys() == expected.keys()
    for epoch in range(NUM_EPOCHS):
        used = [row for step in range(STEPS_OF_EPOCH) for row in taken[epoch * STEPS_OF_EPOCH + step + 1][1]]
        assert sorted(used) == list(range(NUM_ROWS)), "each row once an epoch"
