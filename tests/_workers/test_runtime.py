"""How a process becomes a worker, and what it is told when it cannot."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax._src.lib import _jax

import mirrored as mr
from mirrored._cluster import meeting as _meeting
from mirrored._cluster.spec import Cluster, ClusterSpec
from mirrored._jax import distributed
from mirrored._workers import runtime as _runtime
from mirrored._workers import verdict
from mirrored._workers.coordination import Coordination
from mirrored._workers.progress import progress
from mirrored._workers.same_program import Agreement
from mirrored._workers.stall import Own


def test_a_backend_that_runs_already_is_an_error_that_says_what_to_move() -> None:
    jax.devices()
    with pytest.raises(
        mr.ClusterStartError, match=r"Move\s+mr.MultiWorkerMirroredStrategy\(\) above the first use of JAX"
    ) as info:
        _runtime.start(two_workers("a:1", "b:1"), mr.CommunicationOptions())
    assert info.value.exit_code == 76  # the next attempt would come to the same line


def two_workers(*addresses: str) -> Cluster:
    return Cluster(ClusterSpec.of({"worker": list(addresses)}), "worker", 0)


def test_a_process_that_a_worker_has_started_is_not_that_worker_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "has_backend", lambda: False)
    monkeypatch.setattr(_runtime, "meet", lambda *_: (_ for _ in ()).throw(mr.ClusterStartError("it meets the others")))
    monkeypatch.setattr(_runtime, "_current", None)
    monkeypatch.setenv("MIRRORED_WORKER", "")
    options = mr.CommunicationOptions()
    with monkeypatch.context() as patch:  # it is named before JAX's threads begin, which read the environment
        patch.setattr(_runtime, "meet", lambda *_: _meeting.Meeting("10.0.0.1"))
        patch.setattr(_runtime, "_choose_collectives", lambda options: None)
        patch.setattr(_runtime.jax, "config", SimpleNamespace(jax_logging_level="NOTSET", update=lambda *_: None))
        patch.setattr(_runtime, "_connect", lambda *_: (_ for _ in ()).throw(mr.ClusterStartError("it connects")))
        with pytest.raises(mr.ClusterStartError, match="it connects"):
            _runtime.start(two_workers("a:1", "b:1"), options)
    process = os.environ["MIRRORED_WORKER"].partition(" ")[0]
    assert process == str(os.getpid())
    for parent, other, is_refused in [
        ("1", two_workers("a:1", "b:1"), True),  # in the parent's environment, as a process of multiprocessing
        (process, two_workers("a:1", "b:1"), False),  # os.execv
        ("1", two_workers("a:2", "b:1"), False),  # of a job of its own
        ("1", Cluster(ClusterSpec.of({"worker": ["a:1", "b:1"]}), "worker", 1), False),
    ]:
        monkeypatch.setenv("MIRRORED_WORKER", f"{parent} {_runtime._name_of(two_workers('a:1', 'b:1'))}")
        error = mr.ClusterConfigError if is_refused else mr.ClusterStartError
        with pytest.raises(error, match="started by process 1, which is" if is_refused else "it meets the others"):
            _runtime.start(other, options)


@pytest.fixture
def connecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., None]], object]]:
    """Start a worker whose `jax.distributed.initialize` is a function of the test."""
    monkeypatch.setenv("MIRRORED_WORKER", "")
    monkeypatch.setattr(distributed, "has_backend", lambda: False)
    config: dict[str, object] = {}
    meeting = _meeting.Meeting("10.0.0.1", "10.0.0.1:1")
    monkeypatch.setattr(_runtime, "meet", lambda cluster, versions, _: config.update(compared=sorted(versions)) or meeting)
    monkeypatch.setattr(_runtime.jax, "config", SimpleNamespace(jax_logging_level="NOTSET", update=config.__setitem__))
    monkeypatch.setattr(distributed, "listen_at", lambda host: config.update(gloo=host))
    monkeypatch.setattr(_runtime, "_begin", lambda *given: given)
    monkeypatch.setattr(_runtime, "_CONNECT_WARNING_SECONDS", 0.05)
    monkeypatch.setattr(_runtime, "_CHIEF_SECONDS", 0.1)

    def start(initialize: Callable[..., None]) -> object:
        monkeypatch.setattr(_runtime.jax.distributed, "initialize", initialize)
        return _runtime.start(two_workers("chief:1", "b:1"), mr.CommunicationOptions(timeout_seconds=1))

    start.config = config
    yield start
    for thread in threading.enumerate():
        if thread.name == "mirrored-connect":
            thread.join(10)


def test_a_worker_that_is_gone_after_the_meeting_is_an_error_in_time(connecting, monkeypatch, caplog) -> None:
    monkeypatch.setattr(_runtime, "CONNECT_SECONDS", 0.1)
    never = threading.Event()
    with pytest.raises(mr.ClusterStartError, match=r"worker 0 met all 2 workers, but one of them was gone before") as info:
        connecting(lambda **_: never.wait(10))
    assert info.value.exit_code == 75
    assert "worker 0 waits for all 2 workers, which have met, to connect to jax.distributed at chief:1; is one" in caplog.text
    never.set()


def test_what_jax_raises_when_it_connects_is_raised(connecting, caplog: pytest.LogCaptureFixture) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("jax's own")

    with pytest.raises(RuntimeError, match="jax's own"):
        connecting(fail)
    assert connecting(lambda **_: None)[2:] == (0, 2, "10.0.0.1") and not caplog.messages


def test_jax_is_told_where_to_listen_and_how_soon_a_silent_worker_is_dead(connecting) -> None:
    connecting(lambda **given: connecting.config.update(given))
    assert connecting.config == {
        "coordinator_address": "chief:1", "num_processes": 2, "process_id": 0, "cluster_detection_method": "deactivate",
        "coordinator_bind_address": "10.0.0.1:1", "gloo": "10.0.0.1", "initialization_timeout": 60,
        "heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 30, "jax_enable_preemption_service": False,
        "jax_enable_recoverability": True, "jax_cpu_collectives_implementation": "gloo", "jax_check_proxy_envs": False,
        "compared": ["jax", "jaxlib", "mirrored", "numpy", "python"],
    }  # fmt: skip


def devices_of(known: Mapping[str, Sequence[int]], process: int = 0, manager: object = None) -> SimpleNamespace:
    """Be a state of `jax.distributed` in which these workers have told their devices, by platform."""

    def list_keys(prefix: str) -> list[tuple[str, bytes]]:
        platform = prefix.partition(":")[0]
        return [(f"{platform}:local_topology/{platform}/{worker}", b"\x80") for worker in known.get(platform, ())]

    client = SimpleNamespace(key_value_dir_get_bytes=list_keys)
    return SimpleNamespace(client=client, process_id=process, num_processes=2, preemption_sync_manager=manager)


def test_who_waits_for_the_devices_of_others_is_told_from_who_starts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for known, process, waits, text in [
        ({}, 0, False, ""),
        ({"cpu": [0]}, 0, True, "its cpu devices are known to the others"),
        ({"cpu": [0]}, 1, False, "its cpu devices have not started yet"),
        ({"cpu": [0, 1]}, 0, False, ""),
        ({"cpu": [0, 1], "cuda": [1]}, 0, False, "its cuda devices have not started yet"),
        ({"cpu": [0, 1], "cuda": [1]}, 1, True, "its cuda devices are known to the others"),
    ]:
        monkeypatch.setattr(distributed._distributed, "global_state", devices_of(known, process))
        own = Own(progress, 5.0)
        with _runtime.starting_devices():
            assert own.measure(0.5, False).detail == text
            assert own.measure(0.5, False).waits == waits
        assert own.measure(0.5, False).phase == ""


def test_jax_s_own_limit_for_devices_names_the_worker_and_asks_for_a_new_start() -> None:
    why = "GetKeyValue() timed out with key: cpu:local_topology/cpu/1 and duration: 2m (set JAX_PLATFORMS='' to ...)"
    error = RuntimeError(f"Unable to initialize backend 'cpu': INTERNAL: Getting local topologies failed: Error 1: {why}")
    with pytest.raises(mr.WorkerLostError, match="the devices of worker 1 have not started for 2m"), _runtime.starting_devices():
        raise error
    with pytest.raises(RuntimeError, match="another"), _runtime.starting_devices():
        raise RuntimeError("another")
    with open(Path(_jax.__file__).parent / "libjax_common.so", "rb") as file:  # what it says stands there
        library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with library:
        for sign in ("Getting local topologies failed", "GetKeyValue() timed out", "Gloo all-reduce failed"):
            assert library.find(sign.encode()) >= 0
            assert verdict.tells_of_loss(RuntimeError(f"INTERNAL: {sign}: ..."))
            assert verdict.tells_of_loss(KeyError(f"the program says: UNKNOWN: {sign}: ...")), "an error around it follows too"
        assert library.find(b"local_topology/") >= 0 and library.find(b"timed out with key: ") >= 0


def test_the_users_own_jax_distributed_and_cluster_must_agree(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed._distributed, "global_state", devices_of({}))
    monkeypatch.setattr(_runtime, "_begin", lambda *given: given)
    monkeypatch.setattr(_runtime, "_current", None)
    for wrong in (two_workers("a:1", "b:1", "c:1"), Cluster(ClusterSpec.of({"worker": ["a:1", "b:1"]}), "worker", 1)):
        with pytest.raises(mr.ClusterConfigError, match=r"cluster= says worker . of . .*, coordinator a:1, but .* worker 0 of 2"):
            _runtime.attach(mr.CommunicationOptions(), wrong)
    _runtime.attach(mr.CommunicationOptions())
    assert not caplog.messages
    _runtime.attach(mr.CommunicationOptions(), two_workers("a:1", "b:1"))
    unused = "cluster= is not used: jax.distributed was initialised before, for the same worker and number of workers"
    assert caplog.messages == [unused]
    monkeypatch.setattr(distributed._distributed, "global_state", devices_of({}, manager=object()))
    _runtime.attach(mr.CommunicationOptions())
    assert 'Call jax.config.update("jax_enable_preemption_service", False) before jax.distributed' in caplog.text


def test_a_process_is_part_of_one_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    coordination = Coordination()
    runtime = _runtime.Runtime(coordination, Agreement(coordination), two_workers("a:1", "b:1"))
    monkeypatch.setattr(_runtime, "_current", runtime)
    assert _runtime.start(two_workers("a:1", "b:1"), mr.CommunicationOptions()) is runtime
    with pytest.raises(mr.ClusterConfigError, match=r"this process is worker 0 of 2 \(a:1\).* cannot also be .*\(a:2\)"):
        _runtime.start(two_workers("a:2", "b:1"), mr.CommunicationOptions())


def test_the_implementation_is_told_to_jax_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, object] = {}
    monkeypatch.setattr(distributed.jax, "config", SimpleNamespace(jax_logging_level="NOTSET", update=told.__setitem__))
    for implementation, before, after, collectives in [
        ("ring", None, "Ring", "gloo"),
        ("ring", "Tree", "Tree", "gloo"),
        ("auto", None, None, "gloo"),
        ("mpi", None, None, "mpi"),
    ]:
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


def test_what_is_no_cluster_and_no_options_is_refused() -> None:
    ring, options = mr.CollectiveCommunication.RING, mr.CommunicationOptions()
    right = r"Write mr.MultiWorkerMirroredStrategy\(communication_options=mr.CommunicationOptions\("
    for arguments, error, message in [
        ({"cluster": "10.0.0.1:2222"}, mr.ClusterConfigError, r"cluster= is .*; give a resolver"),
        ({"communication_options": "ring"}, TypeError, "communication_options is 'ring'; expected mr.CommunicationOptions"),
        ({"cluster": options}, TypeError, right),
        ({"cluster": ring}, TypeError, right),
        ({"communication_options": ring}, TypeError, right),
    ]:
        with pytest.raises(error, match=message):
            mr.MultiWorkerMirroredStrategy(**arguments)


def test_nccl_without_a_gpu_is_an_error() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("there is an accelerator")
    with pytest.raises(ValueError, match=r"implementation is NCCL, which connects GPUs, but JAX has found none"):
        mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(implementation="nccl"))
    ring = mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(implementation="ring"))
    assert float(ring.reduce("sum", 1.0)) == ring.num_replicas_in_sync


def test_tensorflows_names_of_the_arguments_work_and_say_so() -> None:
    with pytest.warns(DeprecationWarning, match="communication is called communication_options here; write .*implementation=mr"):
        strategy = mr.MultiWorkerMirroredStrategy(communication=mr.CollectiveCommunication.RING)
    assert strategy.num_workers == 1
    resolver = mr.TFConfigClusterResolver(environment={})
    with pytest.warns(DeprecationWarning, match="cluster_resolver is called cluster here"):
        assert mr.MultiWorkerMirroredStrategy(cluster_resolver=resolver).num_workers == 1
    with pytest.raises(TypeError, match="got cluster_resolver and cluster, which say the same"):
        mr.MultiWorkerMirroredStrategy(resolver, cluster_resolver=resolver)
