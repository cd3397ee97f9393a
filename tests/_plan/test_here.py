"""A plan for devices that are here says what the steps of the benchmarks send and need when they run on them."""

from pathlib import Path

import pytest
from parameters import nightly

import mirrored as mr
from mirrored._jax import topologies
from mirrored._program.program import collectives_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["W1", *nightly("W2", "W3", "W4")])
def test_a_plan_says_what_is_measured(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _jax_contenders
    from _workloads import WORKLOADS

    def first_step():
        """Train one step on two replicas; return the strategy, and what else must live as long."""
        strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
        step = _jax_contenders.mirrored_step(strategy, WORKLOADS[name])
        batch = next(iter(strategy.distribute_dataset(WORKLOADS[name].batches())))
        strategy.run(step, args=batch)
        return strategy, step, batch

    real, _step, batch = first_step()
    [program] = real._steps.programs
    with monkeypatch.context() as patch:
        patch.setattr(topologies, "runs_nothing", lambda device: True)
        [found] = mr.plan(first_step()[0]).programs
    explained = sum(collective.num_bytes for collective in collectives_of(program))
    carried = 4 * len(program.joined.carried)  # the sum of the loss travels with the gradients
    assert sum(sent.num_bytes for sent in found.collectives) == explained + carried
    assert found.memory.variables + found.memory.state == sum(slot.array.nbytes for slot in program.lifted.writes.slots)
    arrays = [value._array for value in batch]
    sizes = program.compiled.lower(program.home.arrays, [], arrays, program.constants).compile().memory_analysis()
    assert found.memory.temporaries == sizes.temp_size_in_bytes
    assert found.memory.results == sizes.output_size_in_bytes - sizes.alias_size_in_bytes
