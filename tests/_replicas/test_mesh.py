"""Devices: how they are named, made, and refused. What happens when JAX starts needs a fresh process each time."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import mirrored as mr
from mirrored._replicas import mesh

CONFIGURING = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "PJRT_NPROC", "NPROC")

#: Prints a strategy's size, the number of CPU devices, the size of XLA's thread pool, and PJRT_NPROC afterwards.
REPORT = """
import os, pathlib, jax, mirrored as mr

def name(thread):
    try:
        return (thread / "comm").read_text().strip()
    except OSError:  # it has ended
        return ""

strategy = {strategy}
names = [name(thread) for thread in pathlib.Path("/proc/self/task").iterdir()]
print(strategy.num_replicas_in_sync, len(jax.devices("cpu")), names.count("tf_XLAEigen"), os.environ.get("PJRT_NPROC"))
"""

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process whose JAX nobody has configured but `environment`."""
    clean = {name: value for name, value in os.environ.items() if name not in CONFIGURING}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=clean | environment, timeout=100
    )


def mirrored_strategy(count: int) -> str:
    return f"mr.MirroredStrategy({[f'cpu:{i}' for i in range(count)]})"


# -- making devices


@needs_proc
@pytest.mark.parametrize(
    ("strategy", "environment", "replicas", "devices", "pool", "nproc"),
    [
        pytest.param(mirrored_strategy(8), {}, 8, 8, 16, None, id="asked for by name"),
        pytest.param("mr.OneDeviceStrategy('cpu:2')", {}, 1, 3, 6, None, id="one device, with those before it"),
        pytest.param("mr.MirroredStrategy()", {"JAX_NUM_CPU_DEVICES": "4"}, 4, 4, 8, None, id="JAX_NUM_CPU_DEVICES"),
        pytest.param(mirrored_strategy(2), {"JAX_NUM_CPU_DEVICES": "4"}, 2, 4, 8, None, id="JAX_NUM_CPU_DEVICES kept"),
        pytest.param(mirrored_strategy(8), {"JAX_NUM_CPU_DEVICES": "4"}, 8, 8, 16, None, id="JAX_NUM_CPU_DEVICES raised"),
        pytest.param(
            mirrored_strategy(4),
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
            4, 8, 16, None,
            id="the count in XLA_FLAGS kept",
        ),
        pytest.param(mirrored_strategy(2), {"PJRT_NPROC": "40"}, 2, 2, 40, "40", id="larger pool kept"),
        pytest.param(mirrored_strategy(4), {"PJRT_NPROC": "3"}, 4, 4, 8, "3", id="smaller pool raised, then restored"),
        pytest.param(mirrored_strategy(2), {"NPROC": "40"}, 2, 2, 40, None, id="larger pool by XLA's other variable kept"),
        pytest.param(mirrored_strategy(4), {"PJRT_NPROC": "many"}, 4, 4, 8, "many", id="no number, restored"),
    ],
)  # fmt: skip
def test_backend_starts_with_enough_devices_and_threads(
    strategy: str, environment: dict[str, str], replicas: int, devices: int, pool: int, nproc: str | None
) -> None:
    pool = max(pool, len(os.sched_getaffinity(0)))
    done = run_python(REPORT.format(strategy=strategy), **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(replicas), str(devices), str(pool), str(nproc)]


def test_all_cpu_devices_are_taken_where_there_is_no_accelerator() -> None:
    assert mr.MirroredStrategy().devices == tuple(jax.local_devices())


def test_devices_asked_for_after_jax_has_started_name_two_ways_out() -> None:
    code = "import jax; jax.devices(); import mirrored as mr; mr.MirroredStrategy(['cpu:0', 'cpu:1', 'cpu:2'])"
    done = run_python(code)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("mirrored.DeviceError: devices contains 'cpu:1', but this process has 1 cpu devices (cpu:0).")
    assert "make the strategy before anything else uses JAX" in message
    assert "JAX_NUM_CPU_DEVICES=3" in message


def test_the_way_out_by_the_environment_works_after_jax_has_started() -> None:
    code = "import jax; jax.devices(); import mirrored as mr; print(mr.MirroredStrategy(['cpu:0', 'cpu:1', 'cpu:2']))"
    done = run_python(code, JAX_NUM_CPU_DEVICES="3")
    assert done.stdout.strip() == "mr.MirroredStrategy(3 replicas (cpu:0, cpu:1, cpu:2))", done.stderr


def test_importing_the_package_does_not_start_jax() -> None:
    code = "import mirrored, jax; jax.config.update('jax_num_cpu_devices', 5); print(jax.device_count())"
    done = run_python(code)
    assert done.stdout.strip() == "5", done.stderr


def test_pool_is_twice_the_devices_and_not_below_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6), raising=False)
    assert [mesh.cpu_pool_size(count) for count in (1, 3, 4, 16)] == [6, 6, 8, 32]
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert mesh.cpu_pool_size(1) == 5


def test_jax_without_cpu_devices_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with JAX_PLATFORMS=cuda: there is no CPU backend to prepare, and none is needed."""
    gpus = [SimpleNamespace(platform="gpu", id=i) for i in range(2)]

    def local_devices(backend: str | None = None) -> list[SimpleNamespace]:
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return gpus

    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert mesh.resolve_devices(None) == tuple(gpus)
    assert mesh.resolve_devices(["gpu:1"]) == (gpus[1],)
    with pytest.raises(mr.DeviceError, match=r"devices contains 'cpu:0', but this process has 0 cpu devices \(none\)"):
        mesh.resolve_devices(["cpu:0"])


# -- naming devices


@pytest.mark.parametrize("name", ["cpu:3", "/cpu:3", "CPU:3", "/device:CPU:3", "device:cpu:3", "cpu:03"])
def test_spellings_of_one_device(name: str) -> None:
    assert mr.OneDeviceStrategy(name).devices == (jax.devices()[3],)


@pytest.mark.parametrize("container", [list, tuple, np.array, iter], ids=lambda container: container.__name__)
def test_devices_keep_the_order_in_which_they_are_listed(container) -> None:
    strategy = mr.MirroredStrategy(container(["cpu:5", "cpu:0", "cpu:2"]))
    assert [device.id for device in strategy.devices] == [5, 0, 2]
    assert mr.MirroredStrategy([jax.devices()[5], "cpu:0", "/CPU:2"]).devices == strategy.devices


def test_replicas_run_on_the_devices_in_their_order() -> None:
    strategy = mr.MirroredStrategy(["cpu:5", "cpu:0"])
    ids = strategy.run(lambda: mr.get_replica_context().replica_id_in_sync_group)
    assert [(int(value), next(iter(value.devices())).id) for value in ids.values] == [(0, 5), (1, 0)]


def test_strategies_on_the_same_devices_are_the_same_place() -> None:
    one, other = mr.MirroredStrategy(["cpu:0", "cpu:1"]), mr.MirroredStrategy([jax.devices()[0], jax.devices()[1]])
    with one.scope():
        w = mr.Variable(1.0)
    assert float(other.run(lambda: w.value)) == 1.0
    third = mr.MirroredStrategy(["cpu:1", "cpu:0"])
    with pytest.raises(mr.StrategyMismatchError, match=r"lives on 2 replicas \(cpu:0, cpu:1\)"):
        third.run(lambda: w.value)


# -- refusing devices


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ([], mr.DeviceError, r"devices is empty, .* write for example devices=\['cpu:0', 'cpu:1'\]"),
        ((), mr.DeviceError, r"devices is empty"),
        ("cpu:0", TypeError, r"devices is 'cpu:0'; expected a list, for example devices=\['cpu:0'\]"),
        (2, TypeError, r"devices is 2 of type int; expected a list with one entry for each replica"),
        ({"cpu:0"}, TypeError, r"of type set; expected a list .* in replica order"),
        ({"cpu:0": 1}, TypeError, r"of type dict; expected a list"),
        ([None], TypeError, r"devices contains None of type NoneType; expected strings such as 'gpu:0'"),
        ([0, 1], TypeError, r"devices contains 0 of type int"),
        ([["cpu:0"]], TypeError, r"devices contains \['cpu:0'\] of type list"),
        (["cpu"], mr.DeviceError, r"devices contains 'cpu'; expected the form 'gpu:0'"),
        (["cpu:"], mr.DeviceError, r"devices contains 'cpu:'; expected the form"),
        (["cpu:-1"], mr.DeviceError, r"devices contains 'cpu:-1'; expected the form"),
        (["cpu:0\n"], mr.DeviceError, r"expected the form"),
        (["cpu:0 "], mr.DeviceError, r"expected the form"),
        (["/job:worker/cpu:0"], mr.DeviceError, r"expected the form"),
        (["npu:0"], mr.DeviceError, r"devices contains 'npu:0'; expected the form"),
        (["gpu:0"], mr.DeviceError, r"has 0 gpu devices \(none\)\. It has cpu:0, .* Leave devices out"),
        (["cpu:0", "TPU:1"], mr.DeviceError, r"devices contains 'TPU:1', but this process has 0 tpu devices"),
        (["cpu:0", "cpu:8"], mr.DeviceError, r"devices contains 'cpu:8', but this process has 8 .*JAX_NUM_CPU_DEVICES=9"),
        (["cpu:1024"], mr.DeviceError, r"at most 1024 virtual CPU devices are made"),
        (["cpu:0", "cpu:0"], mr.DeviceError, r"names cpu:0 twice, as 'cpu:0' and 'cpu:0'\. Each replica needs its own"),
        (["cpu:1", "cpu:0", "/CPU:1"], mr.DeviceError, r"names cpu:1 twice, as 'cpu:1' and '/CPU:1'"),
    ],
)  # fmt: skip
def test_wrong_devices(devices: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mr.MirroredStrategy(devices)


def test_a_device_and_its_name_are_the_same_device() -> None:
    with pytest.raises(mr.DeviceError, match="twice"):
        mr.MirroredStrategy([jax.devices()[0], "cpu:0"])


def test_devices_of_two_kinds() -> None:
    mixture = [SimpleNamespace(platform="cpu"), SimpleNamespace(platform="gpu")]
    mesh._refuse_mixture(mixture[:1])
    with pytest.raises(mr.DeviceError, match=r"devices mixes cpu and gpu devices .* Name only gpu devices"):
        mesh._refuse_mixture(mixture)


@pytest.mark.parametrize("device", [["cpu:0"], 0, ("cpu:0",)])
def test_one_device_is_not_a_list(device: object) -> None:
    with pytest.raises(TypeError, match="expected one device, for example 'gpu:0'"):
        mr.OneDeviceStrategy(device)


def test_one_device_that_does_not_exist() -> None:
    with pytest.raises(mr.DeviceError, match="devices contains 'gpu:0', but this process has 0 gpu devices"):
        mr.OneDeviceStrategy("gpu:0")
