"""One worker may print, read and compute alone; what reaches the others, or has made copies differ, ends with an error."""

from pathlib import Path

import pytest
from processes import run_workers

SCRIPT = Path(__file__).parent / "alone.py"


@pytest.mark.slow
def test_the_chief_may_print_read_and_compute_alone(tmp_path: Path) -> None:
    chief, other = run_workers(SCRIPT, 2, "alone", tmp_path, devices=2)
    assert chief.code == other.code == 0, chief.output + other.output
    assert f"END {chief.output.count('DID ')}" in chief.output


@pytest.mark.slow
@pytest.mark.parametrize("what", ["read on_read", "assign mirrored"])
def test_what_reaches_the_others_ends_the_job_when_one_does_it_alone(tmp_path: Path, what: str) -> None:
    for worker in run_workers(SCRIPT, 2, what, tmp_path):
        assert worker.code == 75, worker.output
        assert "worker 0" in worker.output and "worker 1" in worker.output


@pytest.mark.slow
def test_an_array_that_each_worker_computed_otherwise_is_found(tmp_path: Path) -> None:
    for worker in run_workers(SCRIPT, 2, "different", tmp_path):
        assert worker.code == 0, worker.output
        for given in (
            "REFUSED assigned: what variable 'v' was given by assign is an array on all workers",
            "REFUSED initial: the initial value of variable",
            "REFUSED closed over: an array that the step closes over",
            "REFUSED closed over by a function: an array that function_of.<locals>.<lambda> closes over",
            "REFUSED argument: the argument `by[1]` is an array on all workers",
            "REFUSED another name of the placement: the argument `y` is an array on all workers",
            "REFUSED argument of a function: the argument `a` is an array on all workers",
        ):
            assert given in worker.output
        assert worker.output.count("worker 1 computed other values than worker 0") == 7
