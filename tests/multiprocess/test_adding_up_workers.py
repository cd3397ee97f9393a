"""Several workers combine values by a function of the user's in place of sums."""

from pathlib import Path

import pytest
from processes import run_workers

SCRIPT = Path(__file__).parent / "adding_up_worker.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_function_is_given_the_values_of_all_workers() -> None:
    ended = run_workers(SCRIPT, 2, devices=3, timeout=200)
    assert [worker.code for worker in ended] == [0] * 2, [worker.output for worker in ended]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_workers_that_combine_in_different_ways_are_found(tmp_path: Path) -> None:
    (script := tmp_path / "worker.py").write_text(
        "import os, mirrored as mr, jax.numpy as jnp\n"
        "ways = mr.ReductionToOneDevice(accumulation_fn=lambda rows: rows[0]), mr.HierarchicalCopyAllReduce()\n"
        "strategy = mr.MultiWorkerMirroredStrategy(cross_device_ops=ways[int(os.environ['JAX_PROCESS_ID'])])\n"
        "strategy.run(lambda: mr.get_replica_context().all_reduce('sum', jnp.ones(())))\n"
    )
    for worker in run_workers(script, 2, timeout=100):
        assert worker.code != 0 and "ProgramMismatchError" in worker.output, worker.output
        assert "all_gather" in worker.output and "psum" in worker.output, worker.output
