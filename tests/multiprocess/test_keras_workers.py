"""Keras on two workers: fit, a loop of one's own and checkpoints give the numbers of one device."""

from pathlib import Path

import jax
import pytest
from processes import found, run_workers

pytest.importorskip("keras")
PROGRAM = Path(__file__).parent / "keras_worker.py"


@pytest.mark.slow
def test_two_workers_train_keras_nets_as_one_device_does(tmp_path: Path) -> None:
    own, other = found(run_workers(PROGRAM, 2, tmp_path, devices=2, timeout=110))
    alone = own.pop("alone")
    assert own == other and alone.pop("replicas") == alone.pop("devices") == 1
    assert own.pop("replicas") == own.pop("devices") == 4
    refused = own.pop("refused")
    assert "worker 1 gave model.fit" in refused and "set_random_seed" in refused
    assert own.keys() == alone.keys()
    for name, value in own.items():
        assert jax.tree.leaves(value) == pytest.approx(jax.tree.leaves(alone[name]), rel=1e-4, abs=1e-5), name
