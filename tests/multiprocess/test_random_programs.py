"""Random programs on several workers give what they give on one worker with as many replicas, in every run."""

import os
from pathlib import Path

import numpy as np
import pytest
from processes import run_workers

PROGRAMS = Path(__file__).parent / "random_programs.py"
#: More of them by hand: MIRRORED_TEST_SEEDS=1000,100 python -m pytest -m slow tests/multiprocess/test_random_programs.py
FIRST, COUNT = map(int, os.environ.get("MIRRORED_TEST_SEEDS", "0,6").split(","))


def found(folder: Path, num_workers: int, devices: int, **env: str) -> list[dict[str, np.ndarray]]:
    folder.mkdir(exist_ok=True)
    timeout = 60 + 5 * COUNT * num_workers
    for worker in run_workers(PROGRAMS, num_workers, folder, FIRST, COUNT, devices=devices, timeout=timeout, env=env):
        assert worker.code == 0, worker.output
    return [dict(np.load(folder / f"{num_workers}x{devices}-{worker}.npz")) for worker in range(num_workers)]


def assert_same(several: list[dict[str, np.ndarray]], one: dict[str, np.ndarray]) -> None:
    """Compare: what is one value must be it on every worker to the bit, what is a replica's must be on its worker."""
    assert set().union(*several) == one.keys()
    for own in several:
        assert {name for name in one if "@" not in name} <= own.keys()
        for name, value in own.items():
            if "@" not in name:
                assert value.tobytes() == several[0][name].tobytes(), name
            assert value.dtype == one[name].dtype and value.shape == one[name].shape, name
            if value.dtype.kind in "fc":
                tolerance = 0.03 if "bfloat16" in name else 2e-6
                scale = np.max(np.abs(one[name]), initial=1.0)
                np.testing.assert_allclose(value, one[name], rtol=0, atol=tolerance * scale, err_msg=name)
            else:
                np.testing.assert_array_equal(value, one[name], err_msg=name)


def assert_same_bits(first: list[dict[str, np.ndarray]], second: list[dict[str, np.ndarray]]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value.tobytes() == other[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_programs_give_what_they_give_on_one_worker_and_the_same_bits_every_time(tmp_path: Path) -> None:
    [one] = found(tmp_path, 1, 3)
    several = found(tmp_path, 3, 1)
    assert_same(several, one)
    assert_same_bits(several, found(tmp_path / "again", 3, 1))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_programs_of_64_bits_give_what_they_give_on_one_worker(tmp_path: Path) -> None:
    [one] = found(tmp_path, 1, 4, JAX_ENABLE_X64="1")
    assert_same(found(tmp_path, 2, 2, JAX_ENABLE_X64="1"), one)
