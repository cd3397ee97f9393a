"""What is used of JAX's private side is still there, and does what it did."""

import inspect
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

import mirrored as mr
from mirrored import _collectives, _preflight, _runtime
from mirrored._agreement import Agreement
from mirrored._cluster_spec import Cluster, ClusterSpec
from mirrored._coordination import Coordination


def test_the_client_of_the_coordination_service_is_where_it_was() -> None:
    state = distributed.global_state
    assert {"client", "process_id", "num_processes"} <= set(vars(state)) | set(vars(type(state)))
    methods = {"key_value_set", "blocking_key_value_get", "key_value_dir_get", "key_value_delete"}
    assert methods <= set(dir(_jax.DistributedRuntimeClient))
    assert "allow_overwrite" in (_jax.DistributedRuntimeClient.key_value_set.__doc__ or "")


def test_a_cpu_client_can_be_made_with_collectives_of_ones_own() -> None:
    assert list(inspect.signature(xla_bridge.make_cpu_client).parameters) == ["collectives"]
    assert "hostname" in (_jax.make_gloo_tcp_collectives.__doc__ or "")
    assert {"priority", "fail_quietly"} <= set(inspect.signature(xla_bridge.register_backend_factory).parameters)


def test_whether_a_backend_runs_can_be_asked() -> None:
    jax.devices()
    assert xla_bridge.backends_are_initialized() is True
    with pytest.raises(
        mr.ClusterStartError, match=r"Move\s+mr.MultiWorkerMirroredStrategy\(\) above the first use of JAX"
    ) as info:
        _runtime._require_no_backend()
    assert info.value.exit_code == 76  # the next attempt would come to the same line
    assert mr.ClusterStartError("worker 1 is missing").exit_code == 75


def test_the_settings_exist() -> None:
    for name in ("jax_enable_preemption_service", "jax_cpu_collectives_implementation"):
        assert hasattr(jax.config, name), name
    code = "import jax; jax.config.update('jax_cpu_enable_async_dispatch', False)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    parameters = inspect.signature(jax.distributed.initialize).parameters
    assert {"heartbeat_timeout_seconds", "shutdown_timeout_seconds", "coordinator_bind_address"} <= set(parameters)


def two_workers(*addresses: str) -> Cluster:
    return Cluster(ClusterSpec.of({"worker": list(addresses)}), "worker", 0)


@pytest.mark.parametrize(("options", "seconds"), [({}, 300.0), ({"timeout_seconds": 7}, 7)])
def test_the_workers_compare_their_versions_within_the_timeout(options, seconds, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def check(*arguments: object) -> None:
        asked.append(arguments)
        raise mr.ClusterStartError("enough seen")

    monkeypatch.setattr(_runtime, "_require_no_backend", lambda: None)
    monkeypatch.setattr(_runtime._preflight, "check", check)
    cluster = two_workers("a:1", "b:1")
    with pytest.raises(mr.ClusterStartError, match="enough seen"):
        _runtime.start(cluster, mr.CommunicationOptions(**options))
    [(given, versions, timeout)] = asked
    assert (given, timeout) == (cluster, seconds) and versions["jax"] == jax.__version__
    assert set(versions) == {"mirrored", "jax", "jaxlib", "numpy", "python"}


def test_jax_is_told_where_to_listen_and_how_soon_a_silent_worker_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, object] = {}
    meeting = _preflight.Meeting("10.0.0.1", "10.0.0.1:1")
    monkeypatch.setattr(_runtime, "_require_no_backend", lambda: None)
    monkeypatch.setattr(_runtime._preflight, "check", lambda *_: meeting)
    monkeypatch.setattr(_runtime.jax, "config", SimpleNamespace(update=told.__setitem__))
    monkeypatch.setattr(_runtime.jax.distributed, "initialize", lambda **given: told.update(given))
    monkeypatch.setattr(_runtime, "_listen_at", lambda host: told.update(gloo=host))
    monkeypatch.setattr(_runtime, "_begin", lambda *given: given)
    cluster, options = two_workers("chief:1", "b:1"), mr.CommunicationOptions(timeout_seconds=20)
    assert _runtime.start(cluster, options) == (cluster, options, 0, 2)
    assert told == {
        "coordinator_address": "chief:1", "num_processes": 2, "process_id": 0, "cluster_detection_method": "deactivate",
        "coordinator_bind_address": "10.0.0.1:1", "gloo": "10.0.0.1", "initialization_timeout": 20,
        "heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 30,
        "jax_enable_preemption_service": False, "jax_cpu_collectives_implementation": "gloo",
    }  # fmt: skip


def test_the_guard_watches_from_the_start_to_the_end_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[object] = []

    class Watcher:
        def __init__(self, coordination: Coordination, progress: object, *, stall_seconds: float | None) -> None:
            did.append((coordination.worker, coordination.num_workers, stall_seconds))

        def start(self) -> None:
            did.append("start")

        def stop(self) -> None:
            did.append("stop")

    monkeypatch.setattr(_runtime, "Guard", Watcher)
    monkeypatch.setattr(_runtime, "_current", None)
    monkeypatch.setattr(_runtime._distributed, "global_state", SimpleNamespace(client=object()))
    monkeypatch.setattr(_runtime.atexit, "register", lambda function: did.append("at exit") or function())
    runtime = _runtime._begin(None, mr.CommunicationOptions(timeout_seconds=20), 1, 2)
    assert did == [(1, 2, 20), "start", "at exit", "stop"] and _runtime.current() is runtime


def test_gloo_listens_where_the_other_workers_reach_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    factories: dict[str, object] = {}
    monkeypatch.setattr(_runtime._xla_bridge, "register_backend_factory", lambda name, make, **_: factories.update({name: make}))
    monkeypatch.setattr(_runtime._xla_bridge, "make_cpu_client", lambda collectives: ("client", collectives))
    monkeypatch.setattr(_runtime._jax, "make_gloo_tcp_collectives", lambda distributed_client, hostname: hostname)
    monkeypatch.setattr(_runtime, "_cpu_collectives", lambda: "mpi")
    _runtime._listen_at("10.0.0.1")
    monkeypatch.setattr(_runtime, "_cpu_collectives", lambda: "gloo")
    _runtime._listen_at(None)
    assert factories == {}
    _runtime._listen_at("10.0.0.1")
    assert factories["cpu"]() == ("client", "10.0.0.1")


def test_a_process_is_part_of_one_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    coordination = Coordination()
    runtime = _runtime.Runtime(coordination, Agreement(coordination), two_workers("a:1", "b:1"))
    monkeypatch.setattr(_runtime, "_current", runtime)
    assert _runtime.start(two_workers("a:1", "b:1"), mr.CommunicationOptions()) is runtime
    with pytest.raises(mr.ClusterConfigError, match=r"this process is worker 0 of 2 \(a:1\).* cannot also be .*\(a:2\)"):
        _runtime.start(two_workers("a:2", "b:1"), mr.CommunicationOptions())


@pytest.mark.parametrize(
    ("implementation", "before", "after", "collectives"),
    [("ring", None, "Ring", "gloo"), ("ring", "Tree", "Tree", "gloo"), ("auto", None, None, "gloo"), ("mpi", None, None, "mpi")],
)
def test_the_implementation_is_told_to_jax_and_nccl(
    implementation: str, before: str | None, after: str | None, collectives: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, object] = {}
    monkeypatch.setattr(_runtime.jax, "config", SimpleNamespace(update=told.__setitem__))
    monkeypatch.setenv("NCCL_ALGO", before or "")
    if before is None:
        monkeypatch.delenv("NCCL_ALGO")
    _runtime._choose_collectives(mr.CommunicationOptions(implementation=implementation))
    assert told["jax_cpu_collectives_implementation"] == collectives and os.environ.get("NCCL_ALGO") == after


def test_without_a_cluster_nothing_is_started() -> None:
    strategy = mr.MultiWorkerMirroredStrategy()
    assert (strategy.num_workers, strategy.is_chief, _runtime.current()) == (1, True, None)
    assert strategy.cluster is not None and strategy.cluster.worker_index == 0
    strategy.barrier("alone")
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"implementation": "gloo"}, ValueError, r"implementation is 'gloo'; expected one of 'auto', 'ring', 'nccl', 'mpi'"),
        ({"implementation": 3}, TypeError, r"implementation is 3"),
        ({"bytes_per_pack": -1}, ValueError, r"bytes_per_pack is -1; expected 0 or more"),
        ({"bytes_per_pack": 1.5}, TypeError, r"bytes_per_pack is 1.5; expected an int"),
        ({"timeout_seconds": 0}, ValueError, r"timeout_seconds is 0; expected 1 to 604800 seconds"),
        ({"timeout_seconds": 0.5}, ValueError, r"timeout_seconds is 0.5; expected 1 to 604800 seconds"),
        ({"timeout_seconds": "60"}, TypeError, r"timeout_seconds is '60'; expected seconds"),
        ({"timeout_seconds": float("nan")}, ValueError, r"timeout_seconds is nan"),
    ],
)
def test_wrong_options_are_refused(options, error, message) -> None:
    with pytest.raises(error, match=message):
        mr.CommunicationOptions(**options)


def test_nccl_without_a_gpu_is_an_error() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("there is an accelerator")
    with pytest.raises(ValueError, match=r"implementation is NCCL, which connects GPUs, but JAX has found none"):
        mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(implementation="nccl"))
    ring = mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(implementation="ring"))
    assert float(ring.reduce("sum", 1.0)) == ring.num_replicas_in_sync


def test_what_is_no_cluster_and_no_options_is_refused() -> None:
    with pytest.raises(mr.ClusterConfigError, match=r"cluster= is .*; give a resolver"):
        mr.MultiWorkerMirroredStrategy("10.0.0.1:2222")
    with pytest.raises(TypeError, match=r"communication_options is 'ring'; expected mr.CommunicationOptions"):
        mr.MultiWorkerMirroredStrategy(communication_options="ring")
    ring = mr.CollectiveCommunication.RING
    right = r"Write mr.MultiWorkerMirroredStrategy\(communication_options=mr.CommunicationOptions\("
    for arguments in ({"cluster": mr.CommunicationOptions()}, {"cluster": ring}, {"communication_options": ring}):
        with pytest.raises(TypeError, match=right):
            mr.MultiWorkerMirroredStrategy(**arguments)


@pytest.mark.parametrize("num_bytes", [0, 1, 40, 10**9])
def test_bytes_per_pack_changes_no_number(num_bytes: int) -> None:
    strategy = mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(bytes_per_pack=num_bytes))
    tree = {"a": jax.numpy.arange(5.0), "b": jax.numpy.ones((2, 3)), "c": jax.numpy.arange(4), "d": jax.numpy.float32(2)}
    total = strategy.run(lambda: mr.get_replica_context().all_reduce("sum", tree))
    scale = strategy.num_replicas_in_sync
    assert all((total[name] == tree[name] * scale).all() for name in tree)


def test_bytes_per_pack_reaches_the_collectives_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    group = _collectives._groups_of_bytes
    monkeypatch.setattr(_collectives, "_groups_of_bytes", lambda arrays, size: asked.append(size) or group(arrays, size))
    strategy = mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(bytes_per_pack=24))
    strategy.run(lambda: mr.get_replica_context().all_reduce("sum", [jax.numpy.ones(5), jax.numpy.ones(6)]))
    assert set(asked) == {24}


@pytest.mark.parametrize(
    ("num_bytes", "groups"), [(1, [[0], [1], [2], [3]]), (21, [[0, 1], [2], [3]]), (10**9, [[0, 1, 3], [2]])]
)
def test_bytes_per_pack_says_what_travels_together(num_bytes: int, groups: list[list[int]]) -> None:
    arrays = [np.zeros(5, np.float32), np.zeros(6, np.float32), np.zeros(4, np.int32), np.zeros((), np.float32)]
    assert _collectives._groups_of_bytes(arrays, num_bytes) == groups


COMMUNICATION = re.escape(
    "communication is called communication_options here; write communication_options="
    "mr.CommunicationOptions(implementation=mr.CommunicationImplementation.RING)."
)


def test_tensorflows_names_of_the_arguments_work_and_say_so() -> None:
    with pytest.warns(DeprecationWarning, match=COMMUNICATION):
        strategy = mr.MultiWorkerMirroredStrategy(communication=mr.CollectiveCommunication.RING)
    assert strategy.num_workers == 1
    resolver = mr.TFConfigClusterResolver(environment={})
    with pytest.warns(DeprecationWarning, match="cluster_resolver is called cluster here"):
        assert mr.MultiWorkerMirroredStrategy(cluster_resolver=resolver).num_workers == 1
    with pytest.raises(TypeError, match="got cluster_resolver and cluster, which say the same"):
        mr.MultiWorkerMirroredStrategy(resolver, cluster_resolver=resolver)
