"""A strategy for one process says so in a process that was started as one of several workers."""

import json
import logging
import re
from collections.abc import Callable

import jax
import pytest

import mirrored as mr
from mirrored import _process
from mirrored._strategy import current
from mirrored._workers import runtime

TWO = {"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 1}}
ONE = {"cluster": {"worker": ["10.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}
EVALUATOR = TWO | {"task": {"type": "evaluator", "index": 0}}


@pytest.fixture(autouse=True)
def _not_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_process, "has_warned_of_workers", False)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if (record.name, record.levelname) == ("mirrored", "WARNING")]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: mr.MirroredStrategy(["cpu:0"]), "MirroredStrategy"),
        (lambda: mr.OneDeviceStrategy("cpu:0"), "OneDeviceStrategy"),
        (current._default_strategy.__wrapped__, "the default strategy"),
    ],
    ids=["mirrored", "one", "default"],
)
def test_a_worker_that_trains_by_itself_is_told_once(make: Callable[[], object], name: str, monkeypatch, caplog) -> None:
    make()
    assert warnings(caplog) == []
    monkeypatch.setenv("TF_CONFIG", json.dumps(TWO))
    make(), make(), mr.MirroredStrategy(["cpu:0", "cpu:1"])
    (warning,) = warnings(caplog)
    assert warning.startswith("this process is worker 1 of 2 (10.0.0.2:2222), coordinator 10.0.0.1:2222, from TF_CONFIG; but ")
    assert f"but {name} uses only the devices of this process" in warning
    assert "write mr.MultiWorkerMirroredStrategy() instead" in warning


@pytest.mark.parametrize("tasks", ["2", "1"])
def test_one_of_several_tasks_of_slurm_that_trains_alone_is_told(tasks: str, monkeypatch, caplog) -> None:
    monkeypatch.setenv("SLURM_NTASKS", tasks)
    assert mr.MultiWorkerMirroredStrategy().num_workers == 1
    told = (
        "cluster: one worker: .* (SLURM_NTASKS is 2, and this process trains alone: start all tasks with `srun python train.py`)"
    )
    assert [re.sub("no variable.* cluster", ".*", warning) for warning in warnings(caplog)] == [told] * (tasks == "2")


def test_who_has_no_others_or_has_joined_them_is_not_warned(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    for config in ("{not json", json.dumps(ONE), json.dumps(EVALUATOR)):
        caplog.clear()
        monkeypatch.setenv("TF_CONFIG", config)
        with caplog.at_level(logging.INFO, logger="mirrored"):
            assert mr.MirroredStrategy(["cpu:0"]).num_workers == 1
        assert warnings(caplog) == [] and "MirroredStrategy is for one machine and ignores it" in caplog.text
    monkeypatch.setenv("TF_CONFIG", json.dumps(TWO))
    for module, joined in ((jax.distributed, "is_initialized"), (runtime, "current")):
        with monkeypatch.context() as patch:
            patch.setattr(module, joined, lambda: True)
            mr.MirroredStrategy(["cpu:0"])
        assert warnings(caplog) == []
