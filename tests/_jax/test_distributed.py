"""What is used of the private side of `jax.distributed` is still there, and does what it did."""

import socket
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax._src.lib import _jax, utils

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


@pytest.mark.parametrize(("chosen", "levels"), [(None, [2, 1]), ("1", [2, 1]), ("0", []), ("3", [])])
def test_warnings_are_left_out_unless_the_user_has_chosen(
    chosen: str | None, levels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(utils, "absl_set_min_log_level", set_to.append)
    monkeypatch.setattr(distributed._env.XLA_LOG_LEVEL.__class__, "get", lambda _: chosen)
    with pytest.raises(ValueError, match="inside"), distributed.without_warnings():
        raise ValueError("inside")
    assert set_to == levels


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


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_worker_is_live_until_it_has_disconnected() -> None:
    """What `Coordination.await_gone` relies on; and that a worker asks about others at several places at once."""
    address = free_address()
    service = _jax.get_distributed_runtime_service(address, 3, recoverable=True)
    clients = [_jax.get_distributed_runtime_client(address, worker, init_timeout=30) for worker in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda client: client.connect(), clients))
        of_two = threads.submit(clients[0].get_live_nodes, [0, 2])
        of_all = threads.submit(clients[0].get_live_nodes, [0, 1, 2])
        assert wait([of_two, of_all], 0.2).not_done == {of_two, of_all}
        clients[2].shutdown()
        assert of_two.result(30).keys() == {0}
        assert wait([of_all], 0.1).not_done
        clients[1].shutdown()
        assert of_all.result(30).keys() == {0}
    clients[0].shutdown()
    service.shutdown()


def test_what_comes_before_the_shutdown_comes_once_and_only_where_jax_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    state, order = jax_distributed.State(), []
    monkeypatch.setattr(jax_distributed, "global_state", state)
    distributed.before_shutdown(lambda: order.append("before"))
    jax_distributed.shutdown()
    assert order == []
    state.client = SimpleNamespace(shutdown=lambda: order.append("client"))
    for _ in range(2):
        jax_distributed.shutdown()
    assert order == ["before", "client"]


def test_the_service_counts_together_and_removes_a_folder_with_all_that_is_in_it() -> None:
    """What `_workers/coordination` relies on, and no documentation says; beside a folder, names that begin alike stay."""
    address = free_address()
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
