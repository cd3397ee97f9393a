"""Several workers compute what one device computes: trees, large values, shared-out updates, models, the table of programs."""

from pathlib import Path

import pytest
from processes import run_workers

SCRIPT = Path(__file__).with_name("numbers_worker.py")
VERBS = ("trees", "combined", "sharded")


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("workers", "devices", "parts"),
    [(2, 2, (*VERBS, "programs")), (3, 1, VERBS)],
    ids=["2x2", "3x1"],
)
def test_workers_compute_what_one_device_computes(workers: int, devices: int, parts: tuple[str, ...], tmp_path: Path) -> None:
    quickly = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as in the table of programs itself: nearly all of its time is XLA's
    ended = run_workers(SCRIPT, workers, tmp_path, *parts, devices=devices, timeout=400, env=quickly)
    assert [worker.code for worker in ended] == [0] * workers, [worker.output for worker in ended]
    right = [[line for line in worker.output.splitlines() if line.startswith("RIGHT")] for worker in ended]
    assert [line.split()[1] for line in right[0]] == list(parts) and right == [right[0]] * workers, "to the bit"
