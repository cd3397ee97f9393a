"""Variables of several workers have what they have on one worker with as many replicas."""

from pathlib import Path

import numpy as np
import pytest
from parameters import nightly
from processes import run_workers

SCRIPT = Path(__file__).parent / "same_results.py"
OTHER_CPU = Path(__file__).parent / "other_cpu.py"


def found(folder: Path, num_workers: int, devices: int) -> list[dict[str, np.ndarray]]:
    for worker in run_workers(SCRIPT, num_workers, folder, devices=devices, timeout=200, env={"JAX_ENABLE_X64": "1"}):
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


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_workers", [2, *nightly(3)])
def test_workers_give_in_64_bits_what_one_gives_without_a_warning(num_workers: int, tmp_path: Path) -> None:
    [one] = found(tmp_path, 1, num_workers)
    assert_same(found(tmp_path, num_workers, 1), one)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, *nightly(3)])
def test_a_worker_with_another_cpu_is_named_when_they_meet_and_when_copies_differ(num_workers: int, tmp_path: Path) -> None:
    """Another CPU, as XLA sees it: without the flag, all machines are the same here."""
    last = f"worker {num_workers - 1} with --xla_cpu_max_isa=SSE4_2"
    for one in run_workers(OTHER_CPU, num_workers, f"folder={tmp_path}", "other=--xla_cpu_max_isa=SSE4_2"):
        assert one.code == 1 and "SAVED" not in one.output, one.output
        warning = f"WARNING the machines of the workers differ from worker 0's: {last}. So results may differ in the last bit"
        assert one.output.count(warning) == (one.index == 0), one.output
        assert f"ReplicasDivergeError: the copies of variable 'w' differ: replicas [{num_workers - 1}]" in one.output, one.output
        assert f"where machines differ from worker 0's: {last}. Use machines of one kind" in one.output, one.output
