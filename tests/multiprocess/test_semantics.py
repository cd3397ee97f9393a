"""One program on several workers gives what it gives on one, with as many replicas."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from processes import run_workers

PROGRAM = Path(__file__).parent / "semantics.py"


def found(num_workers: int, devices: int) -> dict[str, Any]:
    ended = run_workers(PROGRAM, num_workers, devices=devices, timeout=100, env={"PYTHONWARNINGS": "error"})
    for worker in ended:
        assert worker.code == 0, worker.output
    [line] = [line for line in ended[0].output.splitlines() if line.startswith("FOUND")]
    return json.loads(line.removeprefix("FOUND"))


def assert_same(several: Mapping[str, Any], one: Mapping[str, Any]) -> None:
    assert several.keys() == one.keys()
    for name, value in several.items():
        if name in ("mine", "mirrored"):
            continue  # what concerns the workers themselves
        if isinstance(value, dict):
            assert_same(value, one[name])
        elif name == "start":
            assert value == one[name], name
        else:
            np.testing.assert_allclose(flatten(value), flatten(one[name]), rtol=1e-5, atol=1e-6, err_msg=name)


def flatten(nest: Any) -> np.ndarray:
    return np.array(jax.tree.leaves(nest), np.float64)


def test_two_workers_compute_what_one_does() -> None:
    assert_same(found(2, 1), found(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "devices"), [(3, 1), (2, 2), (4, 1)])
def test_more_workers_and_replicas_compute_what_one_worker_does(num_workers: int, devices: int) -> None:
    several = found(num_workers, devices)
    assert several == found(num_workers, devices), "and the same run gives the same bits every time"
    assert_same(several, found(1, num_workers * devices))
