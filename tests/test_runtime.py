"""What is used of JAX's private side is still there, and does what it did."""

import inspect
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

import mirrored as mr
from mirrored import _collectives, _runtime


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
    with pytest.raises(mr.ClusterStartError, match=r"Move\s+mr.MultiWorkerMirroredStrategy\(\) above the first use of JAX"):
        _runtime._require_no_backend()


def test_the_settings_exist() -> None:
    for name in ("jax_enable_preemption_service", "jax_cpu_collectives_implementation"):
        assert hasattr(jax.config, name), name
    code = "import jax; jax.config.update('jax_cpu_enable_async_dispatch', False)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    parameters = inspect.signature(jax.distributed.initialize).parameters
    assert {"heartbeat_timeout_seconds", "shutdown_timeout_seconds", "coordinator_bind_address"} <= set(parameters)


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


@pytest.mark.parametrize("num_bytes", [0, 1, 40, 10**9])
def test_bytes_per_pack_changes_no_number(num_bytes: int) -> None:
    strategy = mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(bytes_per_pack=num_bytes))
    tree = {"a": jax.numpy.arange(5.0), "b": jax.numpy.ones((2, 3)), "c": jax.numpy.arange(4), "d": jax.numpy.float32(2)}
    total = strategy.run(lambda: mr.get_replica_context().all_reduce("sum", tree))
    scale = strategy.num_replicas_in_sync
    assert all((total[name] == tree[name] * scale).all() for name in tree)


@pytest.mark.parametrize(
    ("num_bytes", "groups"), [(1, [[0], [1], [2], [3]]), (21, [[0, 1], [2], [3]]), (10**9, [[0, 1, 3], [2]])]
)
def test_bytes_per_pack_says_what_travels_together(num_bytes: int, groups: list[list[int]]) -> None:
    arrays = [np.zeros(5, np.float32), np.zeros(6, np.float32), np.zeros(4, np.int32), np.zeros((), np.float32)]
    assert _collectives._groups_of_bytes(arrays, num_bytes) == groups


def test_tensorflows_names_of_the_arguments_work_and_say_so() -> None:
    with pytest.warns(DeprecationWarning, match="communication is called communication_options here"):
        strategy = mr.MultiWorkerMirroredStrategy(communication=mr.CollectiveCommunication.RING)
    assert strategy.num_workers == 1
    resolver = mr.TFConfigClusterResolver(environment={})
    with pytest.warns(DeprecationWarning, match="cluster_resolver is called cluster here"):
        assert mr.MultiWorkerMirroredStrategy(cluster_resolver=resolver).num_workers == 1
    with pytest.raises(TypeError, match="got cluster_resolver and cluster, which say the same"):
        mr.MultiWorkerMirroredStrategy(resolver, cluster_resolver=resolver)
