"""mr.Optimizer(..., shard_state=True) on several workers: one device's numbers, 1/R of the state, checkpoints of either kind."""

import json
from pathlib import Path

import numpy as np
import pytest
from processes import run_workers
from sharded_worker import Model

import mirrored as mr

SCRIPT = Path(__file__).parent / "sharded_worker.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers, devices", [(2, 2), (3, 1)])
def test_workers_that_share_out_the_update_go_on_from_one_device_and_back(tmp_path: Path, workers: int, devices: int) -> None:
    alone = Model(mr.OneDeviceStrategy("cpu:0"))
    alone.train()
    alone.save(tmp_path / "alone", 1)
    alone.train()

    replicas = workers * devices
    parts = sum(-(-size // replicas) for size in (40, 7, 1))
    for worker in run_workers(SCRIPT, workers, tmp_path, devices=devices, timeout=200):
        assert worker.code == 0, worker.output
        found = json.loads(worker.output.splitlines()[-1])
        assert found["whole"] == [4 * (1 + 2 * (40 + 7 + 1))] * devices
        assert found["sharded"] == [4 * (1 + 2 * parts)] * devices  # 1/R, rounded up for each variable; the count is on each

    back = Model(mr.OneDeviceStrategy("cpu:1"))
    assert back.restore(tmp_path / "workers") == 2
    for _ in range(2):
        for ours, theirs in zip(back.numbers(), alone.numbers(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        for model in (back, alone):
            model.train()
