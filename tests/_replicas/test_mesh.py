"""Devices: how they are named, made, and refused. What happens when JAX starts is seen in processes of their own."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax._src import xla_bridge
from processes import run_program
from strategies import variable

import mirrored as mr
from mirrored._replicas import mesh

#: Prints a strategy's size, the number of CPU devices, the size of XLA's thread pool, and PJRT_NPROC afterwards.
REPORT = """
import os, pathlib, warnings, jax, mirrored as mr
warnings.simplefilter("error")

def name(thread):
    try:
        return (thread / "comm").read_text().strip()
    except OSError:  # it has ended
        return ""

def report(count):
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(count)] if count else None)
    names = [name(thread) for thread in pathlib.Path("/proc/self/task").iterdir()]
    print(strategy.num_replicas_in_sync, len(jax.devices("cpu")), names.count("tf_XLAEigen"), os.environ.get("PJRT_NPROC"))
"""


def printed(environment: dict[str, str], code: str) -> str:
    """Return what a program prints whose JAX nobody has configured but `environment`, or its error."""
    done = run_program(f"{REPORT}\n{code}", env=environment)
    return (done.stdout or done.stderr.splitlines()[-1]).strip()


# -- making devices


def pool(*expected: object) -> str:
    replicas, devices, threads, nproc = expected
    return f"{replicas} {devices} {max(threads, len(os.sched_getaffinity(0)))} {nproc}"


@pytest.fixture
def set_platforms() -> Iterator[Callable[[str | None], None]]:
    """A function that sets JAX_PLATFORMS, as the program itself would."""
    before = jax.config.jax_platforms
    yield lambda names: jax.config.update("jax_platforms", names)
    jax.config.update("jax_platforms", before)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_backend_starts_with_enough_devices_and_threads() -> None:
    flags, four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, {"JAX_NUM_CPU_DEVICES": "4"}
    cases = {
        "asked for by name": ({}, "report(8)", pool(8, 8, 16, None)),
        "the count in XLA_FLAGS kept": (flags, "report(4)", pool(4, 8, 16, None)),
        "smaller pool raised, then restored": ({"PJRT_NPROC": "3"}, "report(4)", pool(4, 4, 8, "3")),
        "one device, with those before it": ({}, "mr.OneDeviceStrategy('cpu:2'); report(0)", pool(3, 3, 6, None)),
        "taken": (four, "report(0)", pool(4, 4, 8, None)),
        "kept": (four, "report(2)", pool(2, 4, 8, None)),
        "the way out": (four, "jax.devices(); print(mr.MirroredStrategy(['cpu:3', 'cpu:0']).devices[0].id)", "3"),
    }
    assert {name: printed(*case[:2]) for name, case in cases.items()} == {name: case[2] for name, case in cases.items()}
    late = printed({}, "jax.devices(); mr.MirroredStrategy(['cpu:0', 'cpu:1', 'cpu:2'])")
    assert "DeviceError: devices contains 'cpu:1', but this process has 1 cpu devices (cpu:0)." in late
    assert "make the strategy before anything else uses JAX" in late and "JAX_NUM_CPU_DEVICES=3" in late


def test_pool_is_twice_the_devices_and_not_below_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6), raising=False)
    assert [mesh.cpu_pool_size(count) for count in (1, 3, 4, 16)] == [6, 6, 8, 32]
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert mesh.cpu_pool_size(1) == 5


#: An accelerator that is installed: its backend fails when JAX starts it.
BROKEN = """
from jax.extend.backend import register_backend_factory

def start():
    raise RuntimeError("the card has fallen off the bus")

register_backend_factory("broken", start, priority=500, fail_quietly=False)
"""
#: Makes a strategy, and says which, or why not.
TRY = """
def attempt(*devices):
    try:
        print(mr.MirroredStrategy(*devices).devices[0].platform, end="; ")
    except mr.DeviceError as error:
        print(error, end="; ")
"""


@pytest.mark.slow
def test_an_accelerator_that_does_not_start_is_an_error_and_never_the_cpu() -> None:
    def said(code: str, **environment: str) -> str:
        return run_program(f"{REPORT}{BROKEN}{TRY}{code}", env=environment).stdout

    for asks in ("attempt()", "attempt(['gpu:0'])", "attempt(); attempt()"):  # also whoever catches the error and tries again
        reason = (
            "JAX cannot start the devices of this process: Unable to initialize backend 'broken': the card has fallen off the bus"
        )
        assert (text := said(asks)).count(reason) == asks.count("attempt") and "cpu; " not in text
        assert "to train on the CPU, set JAX_PLATFORMS=cpu in the environment." in text
    assert said("attempt()", JAX_PLATFORMS="cpu") == "cpu; "  # the line that the message offers
    if not os.path.exists("/dev/nvidiactl"):  # JAX itself raises an AssertionError without a word
        words = "devices of this process: none is of JAX_PLATFORMS. Nothing is trained on the CPU instead"
        assert said("attempt(); attempt(['cpu:0'])", JAX_PLATFORMS="cuda").count(words) == 2
    done = run_program(f"{REPORT}{BROKEN}{TRY}attempt(['cpu:0', 'cpu:1'])", env={})
    assert done.stdout == "cpu; " and "JAX cannot start the others: Unable to initialize backend 'broken'" in done.stderr


def test_an_error_of_jax_s_start_is_the_devices_or_another_worker_s_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    error, cleared = RuntimeError("Unable to initialize backend 'cuda': no memory"), []

    def local_devices(backend: str | None = None) -> list[object]:
        raise error

    monkeypatch.setattr(jax, "local_devices", local_devices)
    monkeypatch.setattr(mesh.distributed, "clear_backends", lambda: cleared.append(True))
    with pytest.raises(mr.DeviceError, match=r"cannot start .* 'cuda': no memory\. Nothing is trained on the CPU") as caught:
        mesh.resolve_devices(None)
    assert caught.value.__cause__ is error and cleared == [True]
    error = RuntimeError("Unable to initialize backend 'cuda': INTERNAL: Getting local topologies failed")
    with pytest.raises(RuntimeError, match="topologies failed") as lost:
        mesh.resolve_devices(None)
    assert lost.value is error and cleared == [True]


def test_gpus_that_a_variable_names_and_jax_has_not_found_are_an_error(monkeypatch: pytest.MonkeyPatch, set_platforms) -> None:
    """JAX itself warns in such a case, and computes on the CPU."""
    set_platforms(None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert mr.MirroredStrategy().devices[0].platform == "cpu", "JAX without CUDA was installed for the CPU"
    monkeypatch.setattr(mesh.importlib.metadata, "entry_points", lambda group: [SimpleNamespace(name="xla_cuda13")])
    with pytest.raises(mr.DeviceError, match=r"CUDA_VISIBLE_DEVICES is '3', and JAX, .* found no such GPU\. .* the CPU instead"):
        mr.MirroredStrategy()
    assert mr.MirroredStrategy(["cpu:0"]).devices[0].platform == "cpu"
    set_platforms("cuda,cpu")  # JAX leaves out the first without a word, if NVIDIA's driver is not there
    with pytest.raises(mr.DeviceError, match="found no such GPU"):
        mr.MirroredStrategy()
    set_platforms(None)
    for none in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert mr.MirroredStrategy().devices[0].platform == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    set_platforms("cpu")  # the line that the message offers
    assert mr.MirroredStrategy().devices[0].platform == "cpu"


def test_gpus_that_the_launcher_was_asked_for_and_jax_has_not_found_are_an_error(
    monkeypatch: pytest.MonkeyPatch, set_platforms
) -> None:
    set_platforms(None)
    monkeypatch.setenv("MIRRORED_GPUS", "2")
    assert mr.MirroredStrategy(["cpu:0"]).devices[0].platform == "cpu", "what the program names counts"
    for found in (0, 1):
        monkeypatch.setattr(mesh, "_local_devices", lambda platform, found=found: [platform] * found)
        with pytest.raises(
            mr.DeviceError, match=rf"asked for 2 GPUs in each worker, and JAX has found {found}\. .*--cpu-devices"
        ):
            mr.MirroredStrategy()
    monkeypatch.setattr(mesh, "_local_devices", lambda platform: [platform] * 2)
    assert mr.MirroredStrategy()
    monkeypatch.setattr(mesh, "_local_devices", lambda platform: [])
    monkeypatch.setenv("MIRRORED_GPUS", "0")
    assert mr.MirroredStrategy()


def test_a_gpu_that_jax_does_not_see_has_a_cause_and_a_line(monkeypatch, tmp_path: Path, caplog, set_platforms) -> None:
    caplog.set_level("INFO", logger="mirrored")

    def tell() -> str:
        caplog.clear()
        mr.MirroredStrategy()
        with pytest.raises(mr.DeviceError) as caught:
            mr.MirroredStrategy(["gpu:0"])
        return f"{caplog.messages[0]} {caught.value}"

    monkeypatch.setattr(mesh, "_NVIDIA_DRIVER", str(tmp_path / "no driver"))
    assert "pip install" not in tell() and "Leave devices out" in tell()
    monkeypatch.setattr(mesh, "_NVIDIA_DRIVER", __file__)
    set_platforms(None)
    assert tell().count('JAX has no CUDA. Write pip install "jax[cuda13]".') == 2
    set_platforms("cpu")
    assert tell().count("JAX_PLATFORMS=cpu leaves its GPUs out. Unset it.") == 2


def test_workers_with_different_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(worker: int, platform: str = "cpu") -> SimpleNamespace:
        return SimpleNamespace(process_index=worker, id=10 - worker, platform=platform)

    for devices, listed in (
        ([device(0), device(0), device(1)], "worker 0 2 cpu, worker 1 1 cpu"),
        ([device(1, "gpu"), device(0)], "worker 0 1 cpu, worker 1 1 gpu"),
    ):
        monkeypatch.setattr(jax, "devices", lambda devices=devices: devices)
        with pytest.raises(mr.ClusterConfigError, match=f"the workers have different devices: {listed}. Each needs the same"):
            mesh.cluster_mesh()
    monkeypatch.setattr(jax, "devices", lambda: list(reversed(jax.local_devices())))
    assert mesh.cluster_mesh().devices == tuple(jax.local_devices())


# -- naming devices


def test_spellings_and_lists_of_devices() -> None:
    for name in ("cpu:3", "/cpu:3", "CPU:3", "/device:CPU:3", "device:cpu:3", "cpu:03"):
        assert mr.OneDeviceStrategy(name).devices == (jax.devices()[3],)
    for container in (list, tuple, np.array, iter):
        strategy = mr.MirroredStrategy(container(["cpu:5", "cpu:0", "cpu:2"]))
        assert [device.id for device in strategy.devices] == [5, 0, 2]
    assert mr.MirroredStrategy([jax.devices()[5], "cpu:0", "/CPU:2"]).devices == strategy.devices
    ids = strategy.run(lambda: mr.get_replica_context().replica_id_in_sync_group)
    assert [(int(value), next(iter(value.devices())).id) for value in ids.values] == [(0, 5), (1, 0), (2, 2)]
    assert mr.MirroredStrategy().devices == tuple(jax.local_devices())


def test_accelerators_have_the_names_that_jax_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices of each name of JAX's, a plug-in's too; what it does not know is a slip, and what it has not is told."""
    monkeypatch.setitem(xla_bridge._backend_factories, "neuron", None)
    monkeypatch.setattr(mesh, "start_backend", lambda _: None)
    devices = {name: [SimpleNamespace(platform=name, id=i) for i in range(2)] for name in ("tpu", "gpu", "rocm", "neuron")}
    monkeypatch.setattr(jax, "local_devices", lambda backend="tpu": devices[backend])
    for entry in ("tpu:1", "/tpu:1", "TPU:1", "/device:TPU:1", "gpu:1", "rocm:1", "Neuron:1"):
        platform = entry.rpartition(":")[0].rpartition("/")[2].rpartition(":")[2].lower()
        assert mesh.resolve_devices([entry]) == (devices[platform][1],)
    with pytest.raises(mr.DeviceError, match=r"'tpu:2', but this process has 2 tpu devices \(tpu:0, tpu:1\)"):
        mesh.resolve_devices(["tpu:2"])
    with pytest.raises(mr.DeviceError, match="'tpi:0'; expected the form"):
        mesh.resolve_devices(["tpi:0"])


def test_strategies_on_the_same_devices_are_the_same_place() -> None:
    one, other = mr.MirroredStrategy(["cpu:0", "cpu:1"]), mr.MirroredStrategy([jax.devices()[0], jax.devices()[1]])
    w = variable(1.0, one)
    assert float(other.run(lambda: w.value)) == 1.0
    assert float(other.reduce("sum", one.distribute_values_from_function(lambda ctx: np.float32(2)))) == 4.0
    with pytest.raises(mr.StrategyMismatchError, match=r"lives on 2 replicas \(cpu:0, cpu:1\)"):
        mr.MirroredStrategy(["cpu:1", "cpu:0"]).run(lambda: w.value)


# -- refusing devices: more is in test_bad_input.py


def test_devices_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda backend="cpu": [SimpleNamespace(platform=backend)])
    with pytest.raises(mr.DeviceError, match=r"devices mixes cpu and gpu devices .* Name only gpu devices"):
        mesh.resolve_devices(["cpu:0", "gpu:0"])


def test_a_worker_raises_the_threads_before_any_begins_and_its_devices_write_nothing_then(monkeypatch) -> None:
    monkeypatch.setenv("PJRT_NPROC", "1")
    with pytest.raises(mr.ClusterStartError), mesh.raising_cpu_threads():
        raise mr.ClusterStartError("a worker is missing")
    assert os.environ["PJRT_NPROC"] == "1"
    with mesh.raising_cpu_threads():
        pass
    enough = int(os.environ["PJRT_NPROC"])
    assert enough >= mesh.cpu_pool_size(max(1, jax.config.jax_num_cpu_devices))
    monkeypatch.setenv("PJRT_NPROC", str(enough + 7))
    with mesh.raising_cpu_threads():
        pass
    assert os.environ["PJRT_NPROC"] == str(enough + 7), "never lowered"
