"""What is used of the private side of `jax.distributed` is still there, and does what it did."""

import inspect
import subprocess
import sys

import jax
import pytest
from jax._src import distributed as private
from jax._src import xla_bridge
from jax._src.lib import _jax

from mirrored._jax import distributed


def test_the_client_of_the_coordination_service_is_where_it_was() -> None:
    state = private.global_state
    assert {"client", "process_id", "num_processes"} <= set(vars(state)) | set(vars(type(state)))
    methods = {"key_value_dir_get_bytes", "key_value_set", "blocking_key_value_get", "key_value_dir_get", "key_value_delete"}
    methods |= {"key_value_try_get"}
    assert methods <= set(dir(_jax.DistributedRuntimeClient))
    assert "allow_overwrite" in (_jax.DistributedRuntimeClient.key_value_set.__doc__ or "")


def test_a_cpu_client_can_be_made_with_collectives_of_ones_own() -> None:
    assert list(inspect.signature(xla_bridge.make_cpu_client).parameters) == ["collectives"]
    assert "hostname" in (_jax.make_gloo_tcp_collectives.__doc__ or "")
    assert {"priority", "fail_quietly"} <= set(inspect.signature(xla_bridge.register_backend_factory).parameters)


def test_the_settings_exist() -> None:
    for name in ("jax_enable_preemption_service", "jax_cpu_collectives_implementation"):
        assert hasattr(jax.config, name), name
    code = "import jax; jax.config.update('jax_cpu_enable_async_dispatch', False)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    parameters = inspect.signature(jax.distributed.initialize).parameters
    assert {"heartbeat_timeout_seconds", "shutdown_timeout_seconds", "coordinator_bind_address"} <= set(parameters)


def test_the_preemption_service_is_seen() -> None:
    assert hasattr(private.State(), "preemption_sync_manager")
    assert distributed.swallows_sigterm() is False


def test_gloo_listens_where_the_other_workers_reach_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    factories: dict[str, object] = {}
    monkeypatch.setattr(
        distributed._xla_bridge, "register_backend_factory", lambda name, make, **_: factories.update({name: make})
    )
    monkeypatch.setattr(distributed._xla_bridge, "make_cpu_client", lambda collectives: ("client", collectives))
    monkeypatch.setattr(distributed._jax, "make_gloo_tcp_collectives", lambda distributed_client, hostname: hostname)
    monkeypatch.setattr(distributed, "_cpu_collectives", lambda: "mpi")
    distributed.listen_at("10.0.0.1")
    monkeypatch.setattr(distributed, "_cpu_collectives", lambda: "gloo")
    distributed.listen_at(None)
    assert factories == {}
    distributed.listen_at("10.0.0.1")
    assert factories["cpu"]() == ("client", "10.0.0.1")
