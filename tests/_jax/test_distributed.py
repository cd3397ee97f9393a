"""What is used of the private side of `jax.distributed` is still there, and does what it did."""

import socket
from types import SimpleNamespace

import pytest
from jax._src import xla_bridge
from jax._src.lib import _jax

from mirrored._jax import distributed


def test_one_process_is_the_first_of_one_and_runs_no_preemption_service() -> None:
    assert distributed.place() == (0, 1) and distributed.has_backend() and distributed.swallows_sigterm() is False


def test_the_workers_whose_devices_are_known_and_late_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"cuda": [("cuda:local_topology/cuda/0", b""), ("cuda:local_topology/cuda/11", b"")], "cpu": [("…/cpu/x", b"")]}
    service = SimpleNamespace(key_value_dir_get_bytes=lambda folder: keys.get(folder.partition(":")[0], []))
    monkeypatch.setattr(distributed, "client", lambda: service)
    assert list(distributed.known_devices()) == [("cuda", {0, 11})]
    assert all(map(distributed.is_known_platform, ("cpu", "gpu", "tpu", "cuda", "rocm"))) and not distributed.is_known_platform(
        "tpi"
    )
    error = RuntimeError("topologies failed: timed out with key: cpu:local_topology/cpu/3 and duration: 2m")
    assert distributed.late_devices(error) == ("3", "2m") and distributed.late_devices(RuntimeError("2m")) is None


def test_gloo_listens_where_the_other_workers_reach_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    factories: dict[str, object] = {}
    monkeypatch.setattr(xla_bridge, "register_backend_factory", lambda name, make, **_: factories.update({name: make}))
    monkeypatch.setattr(xla_bridge, "make_cpu_client", lambda collectives: ("client", collectives))
    monkeypatch.setattr(_jax, "make_gloo_tcp_collectives", lambda distributed_client, hostname: hostname)
    for collectives, host in (("mpi", "10.0.0.1"), ("gloo", None), ("gloo", "10.0.0.1")):
        assert factories == {}
        monkeypatch.setattr(distributed, "_cpu_collectives", lambda name=collectives: name)
        distributed.listen_at(host)
    assert factories["cpu"]() == ("client", "10.0.0.1")


def test_the_service_counts_together_and_removes_a_folder_with_all_that_is_in_it() -> None:
    """What `_workers/coordination` relies on, and no documentation says; beside a folder, names that begin alike stay."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0, init_timeout=30, use_compression=True)
    client.connect()
    assert [client.key_value_increment("a/b/count", 1) for _ in range(3)] == [1, 2, 3]
    client.key_value_set("a/bc", "stays")
    client.key_value_delete("a/b")
    assert client.key_value_dir_get("a/") == [("a/bc", "stays")]
    client.key_value_delete("a/b")  # again does nothing
    client.shutdown()
    service.shutdown()
