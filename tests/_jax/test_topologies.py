"""The devices of a topology are told from those that are here; `make plans` fails loudly when JAX moves what tells them apart."""

import jax
import pytest

import mirrored as mr
from mirrored._jax.topologies import runs_nothing


def test_devices_that_are_here_run_programs() -> None:
    assert not any(map(runs_nothing, jax.devices()))


@pytest.mark.slow
def test_the_devices_of_a_topology_run_nothing() -> None:
    pytest.importorskip("libtpu")
    assert all(map(runs_nothing, mr.topology("v5e:2x4")))
