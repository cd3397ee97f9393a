"""What differs by platform, on CPUs that are given the name of another platform's devices."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._jax import jaxprs
from mirrored._replicas import host_memory, in_flight
from mirrored._replicas.per_replica import carried_sums
from mirrored._replicas.platforms import PLATFORMS, platform_of


@pytest.fixture(params=["packed", "alone"])
def packs(request, monkeypatch):
    """Whether the CPU packs, as it does, or is a platform that nobody has named."""
    if request.param == "alone":
        monkeypatch.delitem(PLATFORMS, "cpu")
    return request.param == "packed"


@pytest.mark.parametrize("platform", ["tpu", "gpu", "neuron"])
def test_only_cpus_pack_are_paced_and_share_memory(platform):
    assert PLATFORMS["cpu"][:5] == (True, True, False, True, True)
    mesh = SimpleNamespace(
        devices=np.array([SimpleNamespace(platform=platform, client=SimpleNamespace(runtime_type="stream_executor"))] * 2)
    )
    assert platform_of(mesh)[:5] == (False, False, platform == "tpu", platform == "gpu", False)
    placement = SimpleNamespace(num_devices=2, mesh=mesh, is_fully_addressable=True)
    assert not in_flight.is_paced(placement)
    placement.is_fully_addressable = False
    assert in_flight.is_paced(placement), "workers wait for each other on every platform"


def test_a_gather_goes_through_host_memory_on_cpus_only(packs, strategy2):
    stack = jnp.zeros((2, 1024, 1024))
    assert host_memory.gathers(strategy2._mesh, stack) is packs


def operands_of_sums(strategy, x):
    """Return the shapes of all that the last program adds up over the replicas."""
    *_, program = strategy._steps.programs
    outermost = jax.make_jaxpr(program.mapped)([], [], [x], program.constants).jaxpr
    sums = [equation for equation in jaxprs.all_equations(outermost) if equation.primitive.name.startswith("psum")]
    return [atom.aval.shape for equation in sums for atom in equation.invars]


def test_a_platform_that_nobody_named_gets_a_sum_of_each_array_and_the_same_numbers(packs, strategy3):
    strategy, num_replicas = strategy3, 3
    x = strategy.distribute_values_from_function(lambda ctx: np.arange(6, dtype=np.float32) + ctx.replica_id_in_sync_group)

    def step(x):
        first = mr.get_replica_context().all_reduce("sum", [x, x[:2], x.reshape(2, 3)])
        return first, mr.get_replica_context().all_reduce("sum", x[0]), x.sum()

    (a, b, c), d, loss = strategy.run(step, args=(x,))
    expected = num_replicas * np.arange(6) + sum(range(num_replicas))
    assert a.tolist() == [*expected] and b.tolist() == [*expected[:2]] and c.ravel().tolist() == [*expected]
    assert float(d) == expected[0] and carried_sums(loss) is not None, "`strategy.reduce` looks the loss up on each platform"
    assert float(strategy.reduce("sum", loss)) == expected.sum()
    nest = strategy.reduce("sum", {"x": x, "loss": loss})
    assert nest["x"].tolist() == [*expected] and float(nest["loss"]) == expected.sum()
    shapes = operands_of_sums(strategy, x._array)
    assert sorted(shapes) == ([(6 + 2 + 6 + 1 + 1,)] if packs else [(), (), (2,), (2, 3), (6,)])


@pytest.mark.parametrize("storage", ["whole", "parts"])
def test_programs_with_arrays_in_parts_have_options_of_their_own(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"xla_no_such_option": 1}  # XLA refuses to compile with it
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["cpu"]._replace(options_of_parts=options))
    for of_all, own in ((storage, None), ("whole", storage)):
        strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"], storage=of_all)
        with strategy.scope():
            v = mr.Variable(np.zeros((256, 256), np.float32), storage=own)
        refused = contextlib.nullcontext() if storage == "whole" else pytest.raises(Exception, match="xla_no_such_option")
        with refused:
            strategy.run(lambda v=v: v.assign(v + 1))
