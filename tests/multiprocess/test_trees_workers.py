"""Trees and large values of several workers."""

from pathlib import Path

import pytest
from processes import run_workers


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("workers, devices", [(2, 2), (3, 1)])
def test_trees_are_reduced_and_gathered_and_large_values_arrive(tmp_path: Path, workers: int, devices: int) -> None:
    for worker in run_workers(Path(__file__).with_name("trees_worker.py"), workers, tmp_path, devices=devices, timeout=120):
        assert worker.code == 0 and worker.output.splitlines()[-1] == "right", worker.output
