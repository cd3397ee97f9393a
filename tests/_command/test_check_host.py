"""What one host lacks is found without the network: GPUs, shared memory, open files."""

import os
import resource
import shutil
from pathlib import Path

import pytest

from mirrored._command import check_host
from mirrored._command.check_lines import Finding

DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\nGCC version:  gcc version 12.2.0"


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return a folder of devices, and the file of the driver."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    (tmp_path / "version").write_text(DRIVER)
    return str(tmp_path), str(tmp_path / "version")


def test_gpus_without_a_plugin_and_with_one(two_gpus: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_host, "versions", lambda: {"jax": "0.12"})
    assert check_host.gpus(*two_gpus) == ("", "2 NVIDIA GPUs, and JAX cannot use any: pip install 'jax[cuda13]'")
    monkeypatch.setattr(check_host, "versions", lambda: {"jax": "0.12", "jax-cuda13-plugin": "0.12"})
    assert check_host.gpus(*two_gpus) == ("2 NVIDIA GPUs, driver 570.124.06", "")
    assert check_host.gpus(two_gpus[0], "/no/driver") == ("2 NVIDIA GPUs, driver unknown", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert check_host.gpus(*two_gpus) == ("1 NVIDIA GPU, driver 570.124.06", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert check_host.gpus(*two_gpus) == ("1 NVIDIA GPU, not used: JAX_PLATFORMS is cpu", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_host.gpus(*two_gpus) == ("no NVIDIA GPU", "")


def test_shared_memory_is_for_gpus(two_gpus: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 64 << 20
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, free))
    gpus, none = two_gpus[0], str(tmp_path / "none")
    Path(none).mkdir()
    assert check_host.shared_memory("/x", none) == ("64.0 MiB free, enough for CPUs", "")
    _, problem = check_host.shared_memory("/x", gpus)
    assert problem.startswith(
        "64.0 MiB free, and NCCL needs 512.0 MiB: docker run --shm-size=1g; in Kubernetes mount an emptyDir"
    )
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert check_host.shared_memory("/x", gpus) == ("64.0 MiB free, enough for CPUs", "")
    monkeypatch.delenv("JAX_PLATFORMS")
    free = 1 << 30
    assert check_host.shared_memory("/x", gpus) == ("1.0 GiB free", "")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: os.statvfs(path))
    assert check_host.shared_memory("/no/such/folder", gpus).problem.startswith("0 B free, and NCCL")


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 1024))
    assert check_host.open_files(2) == Finding("at most 1024, and 264 are enough")
    assert check_host.open_files(192) == Finding("at most 1024, and 1024 are enough")
    problem = "at most 1024, and 193 workers need 1028: raise the limit that `ulimit -Hn` shows"
    assert check_host.open_files(193) == ("", problem)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, resource.RLIM_INFINITY))
    assert check_host.open_files(10_000) == Finding("any number")


def test_proxies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert check_host.proxies() == Finding("none")
    monkeypatch.setenv("http_proxy", "http://user:secret@proxy:3128")
    monkeypatch.setenv("grpc_proxy", "http://proxy:3128")
    assert check_host.proxies() == Finding("grpc_proxy, http_proxy set; the workers connect without")
