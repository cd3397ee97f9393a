"""Several workers compute what one device computes: shared-out updates, arrays that steps name, the table of programs."""

from pathlib import Path

import pytest
from parameters import nightly
from processes import run_workers

SCRIPT = Path(__file__).with_name("numbers_worker.py")
PARTS = ["sharded", "named", "programs"]


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("parts", [PARTS, *nightly(["more_programs"])], ids=["all", "more programs"])
def test_workers_compute_what_one_device_computes(tmp_path: Path, parts: list[str]) -> None:
    ended = run_workers(SCRIPT, 2, tmp_path, *parts, devices=2, timeout=400)
    assert [worker.code for worker in ended] == [0, 0], [worker.output for worker in ended]
    right = [[line for line in worker.output.splitlines() if line.startswith("RIGHT")] for worker in ended]
    assert [line.split()[1] for line in right[0]] == parts and right[1] == right[0], "to the bit"
    assert all("experimental" not in worker.output for worker in ended), "a line of JAX's own frightens users"
