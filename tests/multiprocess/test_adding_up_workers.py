"""Several workers add up in each way of `cross_device_ops`, with the same numbers, and the same bits on each of them."""

from pathlib import Path

import pytest
from processes import run_workers

SCRIPT = Path(__file__).parent / "adding_up_worker.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers, devices", [(2, 2), (3, 1), (2, 3)])
def test_workers_add_up_in_each_way_with_the_same_numbers(workers: int, devices: int) -> None:
    ended = run_workers(SCRIPT, workers, devices=devices, timeout=200)
    assert [worker.code for worker in ended] == [0] * workers, [worker.output for worker in ended]
    assert len({worker.output.splitlines()[-1] for worker in ended}) == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_workers_that_add_up_in_different_ways_are_found(tmp_path: Path) -> None:
    (script := tmp_path / "worker.py").write_text(
        "import os, mirrored as mr, jax.numpy as jnp\n"
        "ways = mr.ReductionToOneDevice(), mr.HierarchicalCopyAllReduce()\n"
        "strategy = mr.MultiWorkerMirroredStrategy(cross_device_ops=ways[int(os.environ['JAX_PROCESS_ID'])])\n"
        "strategy.run(lambda: mr.get_replica_context().all_reduce('sum', jnp.ones(3)))\n"
    )
    for worker in run_workers(script, 2, timeout=100):
        assert worker.code != 0 and "ProgramMismatchError" in worker.output, worker.output
        assert "added up by mr.ReductionToOneDevice" in worker.output, worker.output
