"""State in parts with real workers: each has its own parts, writes them, and reads them again."""

from pathlib import Path
from typing import Any

import pytest
from processes import found, run_workers

PROGRAM = Path(__file__).parent / "parts_worker.py"


def job(num_workers: int, devices: int, mode: str, storage: str, directory: Path) -> list[dict[str, Any]]:
    return found(run_workers(PROGRAM, num_workers, mode, storage, directory, devices=devices, timeout=110))


def test_each_worker_writes_its_parts_any_number_goes_on_and_who_stores_otherwise_is_told(tmp_path: Path) -> None:
    saved = job(2, 2, "save", "parts", tmp_path / "parts")
    assert (
        "ClusterConfigError: the workers store what is the same in different ways: worker 0 WHOLE, worker 1 P"
        in saved[1]["differ"]
    )
    assert saved[0] == saved[1] and saved[0]["step"] is None and saved[0]["shards"] == [[50, 257], [201, 51]]
    names = sorted(path.name for path in (tmp_path / "parts" / "3").iterdir())
    assert names == ["arrays.npz", "parts-0.npz", "parts-1.npz", "record.json"]
    sizes = [(tmp_path / "parts" / "3" / name).stat().st_size for name in names]
    assert sizes[0] < 20_000 and abs(sizes[1] - sizes[2]) < 5_000 and sizes[1] > 500_000
    [own] = job(1, 3, "restore", "parts", tmp_path / "parts")
    assert own["step"] == 3 and own["values"] == pytest.approx(saved[0]["values"], rel=1e-6)
    assert own["again"] == pytest.approx(saved[0]["again"], rel=1e-5)


@pytest.mark.slow
def test_parts_of_each_worker_are_restored_whole_on_several(tmp_path: Path) -> None:
    saved = job(2, 2, "save", "parts_of_worker", tmp_path)
    for own in job(2, 2, "restore", "whole", tmp_path):
        assert own["step"] == 3 and own["values"] == pytest.approx(saved[0]["values"], rel=1e-6)
        assert own["again"] == pytest.approx(saved[0]["again"], rel=1e-5)


@pytest.mark.slow
def test_first_values_and_words_that_differ_are_told(tmp_path: Path) -> None:
    for own in job(2, 1, "refuse", "parts", tmp_path):
        assert "in 2 parts along axis 0" in own["repr"]
        assert "ReplicasDivergeError" in own["seeds"] and "Seed what makes it alike" in own["seeds"]
        assert "create different variables" in own["words"] and "worker 1: 'v in 2 parts along axis 0'" in own["words"]
        assert "ProgramMismatchError: the workers have come to different programs" in own["made"]
