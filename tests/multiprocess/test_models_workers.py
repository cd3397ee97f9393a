"""Models of Flax NNX, Linen and Equinox on two workers have the weights of one device, with batches that do not divide."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from processes import run_workers

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_workers_have_the_weights_of_one_device(tmp_path: Path) -> None:
    for library in ("equinox", "flax"):
        pytest.importorskip(library)
    spec = importlib.util.spec_from_file_location("nets", FOLDER.parent / "parity" / "test_model_libraries.py")
    nets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nets)
    for worker in run_workers(FOLDER / "models_worker.py", 2, tmp_path, *nets.LIBRARIES, devices=2, timeout=300):
        assert worker.code == 0, worker.output
    for library, train in nets.LIBRARIES.items():
        own, other = (list(np.load(tmp_path / f"{library}-{i}.npz").values()) for i in (0, 1))
        for ours, theirs, alone in zip(own, other, train(None), strict=True):
            np.testing.assert_array_equal(ours, theirs)
            np.testing.assert_allclose(ours, alone, atol=1e-5)
