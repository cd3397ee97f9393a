"""Keras on two workers: fit, a loop of one's own and checkpoints give the numbers of one device."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import run_workers

pytest.importorskip("keras")
PROGRAM = Path(__file__).parent / "keras_worker.py"


def found(num_workers: int, folder: Path, *args: str, devices: int) -> list[dict[str, Any]]:
    ended = run_workers(PROGRAM, num_workers, folder, *args, devices=devices, timeout=110)
    for worker in ended:
        assert worker.code == 0, worker.output
    return [json.loads(re.search(r"^FOUND(.*)$", worker.output, re.MULTILINE)[1]) for worker in ended]


@pytest.mark.slow
def test_two_workers_train_keras_nets_as_one_device_does(tmp_path: Path) -> None:
    [alone] = found(1, tmp_path / "alone", "alone", devices=1)
    together = found(2, tmp_path / "together", devices=2)
    refused = [own.pop("refused") for own in together]
    assert together[0] == together[1] and alone.pop("replicas") == 1 and alone.pop("devices") == 1
    own = together[0]
    assert own.pop("replicas") == own.pop("devices") == 4
    assert own.keys() == alone.keys()
    for name, value in own.items():
        assert flat(value) == pytest.approx(flat(alone[name]), rel=1e-4, abs=1e-5), name
    assert all("worker 1 gave model.fit" in message and "set_random_seed" in message for message in refused)


def flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    return [number for part in value for number in flat(part)] if isinstance(value, list) else [value]
