"""Random programs on several workers give what they give on one worker with as many replicas, in every run."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run_workers

PROGRAMS = Path(__file__).parent / "random_programs.py"
#: More of them by hand: MIRRORED_TEST_SEEDS=1000,100 python -m pytest -m slow tests/multiprocess/test_random_programs.py
FIRST, COUNT = map(int, os.environ.get("MIRRORED_TEST_SEEDS", "5,4").split(","))


def found(
    folder: Path, num_workers: int, devices: int, first: int = FIRST, count: int = COUNT, **options: Any
) -> list[dict[str, np.ndarray]]:
    folder.mkdir(exist_ok=True)
    timeout = 60 + 10 * count * num_workers
    env = {"XLA_FLAGS": "", **options.pop("env", {})}  # XLA optimizes, as for users
    for worker in run_workers(PROGRAMS, num_workers, folder, first, count, devices=devices, timeout=timeout, env=env, **options):
        assert worker.code == 0 and "Warning" not in worker.output, worker.output
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


@pytest.mark.slow
def test_programs_compute_on_two_workers_what_they_do_on_one(tmp_path: Path) -> None:
    """With these seeds: values, verbs, variables of all kinds and workers, steps, whole functions, training, two datasets."""
    [one] = found(tmp_path, 1, 2, 3, 1)
    assert_same(found(tmp_path, 2, 1, 3, 1), one)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_programs_give_what_they_give_on_one_worker_and_the_same_bits_every_time(tmp_path: Path) -> None:
    [one] = found(tmp_path, 1, 3)
    several = found(tmp_path, 3, 1)
    assert_same(several, one)
    for own, again in zip(several, found(tmp_path / "again", 3, 1, count=2), strict=True):
        assert again and all(value.tobytes() == own[name].tobytes() for name, value in again.items())


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_programs_of_64_bits_give_what_they_give_on_one_worker_without_a_warning(tmp_path: Path) -> None:
    [one] = found(tmp_path, 1, 4, count=2, env={"JAX_ENABLE_X64": "1"})
    fresh = {"env": {"JAX_ENABLE_X64": "1", "PYTHONWARNINGS": "error"}, "fresh": True}
    assert_same(found(tmp_path, 2, 2, count=2, **fresh), one)
