"""What `mirrored check` finds out about one host, without the network and before JAX starts."""

from __future__ import annotations

import platform
import re
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from .. import _env
from .._text import NO_VERSION, bytes_in_words, counted, version_of
from .check_lines import Finding

#: Packages of which every worker needs the same version.
_PACKAGES = (
    "jax", "jaxlib", "mirrored", "numpy", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "nvidia-nccl-cu12",
    "nvidia-nccl-cu13", "libtpu",
)  # fmt: skip
#: NCCL keeps buffers in shared memory: with docker's 64 MB it fails.
_LEAST_SHARED_MEMORY = 512 << 20
#: Open files that a process needs for itself, and for each worker: connections of gRPC and of collectives.
_FILES, _FILES_FOR_WORKER = 256, 4


def findings(num_workers: int) -> Iterator[tuple[str, Finding]]:
    """Yield the checks of one host."""
    yield "versions", Finding(", ".join(f"{name} {version}" for name, version in versions().items()))
    yield "GPUs", gpus()
    yield "/dev/shm", shared_memory()
    yield "open files", open_files(num_workers)
    yield "proxies", proxies()


def versions() -> Mapping[str, str]:
    """Return the versions of what is installed here."""
    found = {name: version_of(name) for name in _PACKAGES}
    return {"Python": platform.python_version()} | {name: version for name, version in found.items() if version != NO_VERSION}


def num_gpus(devices: str = "/dev") -> int:
    """Return the number of this host's NVIDIA GPUs that JAX may use."""
    count = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path(devices).iterdir())
    named = _env.named_gpus()
    return count if named is None else min(count, named)


def is_for_gpus(devices: str = "/dev") -> bool:
    """Tell whether JAX is to use GPUs of this host."""
    return num_gpus(devices) > 0 and _env.JAX_PLATFORMS.get() != "cpu"


def gpus(devices: str = "/dev", driver: str = "/proc/driver/nvidia/version") -> Finding:
    """Find the GPUs, their driver, and whether JAX has a plugin for them."""
    count = num_gpus(devices)
    if not count:
        return Finding("no NVIDIA GPU")
    there = counted(count, "NVIDIA GPU")
    if not is_for_gpus(devices):
        return Finding(f"{there}, not used: JAX_PLATFORMS is cpu")
    if not any("cuda" in name for name in versions()):
        return Finding("", f"{there}, and JAX cannot use any: pip install 'jax[cuda13]'")
    try:
        version = re.findall(r"\d+\.\d+[.\d]*", Path(driver).read_text())[0]
    except (OSError, IndexError):
        version = "unknown"
    return Finding(f"{there}, driver {version}")


def shared_memory(folder: str = "/dev/shm", devices: str = "/dev") -> Finding:
    """Compare the free shared memory with what NCCL needs."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # not Linux
        free = 0
    fact = f"{bytes_in_words(free)} free"
    if free >= _LEAST_SHARED_MEMORY:
        return Finding(fact)
    if not is_for_gpus(devices):
        return Finding(f"{fact}, enough for CPUs")
    remedy = "docker run --shm-size=1g; in Kubernetes mount an emptyDir with medium: Memory at /dev/shm"
    return Finding("", f"{fact}, and NCCL needs {bytes_in_words(_LEAST_SHARED_MEMORY)}: {remedy}")


def open_files(num_workers: int) -> Finding:
    """Compare the limit of open files with the number of connections."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_FOR_WORKER * num_workers
    if limit == resource.RLIM_INFINITY:
        return Finding("any number")
    if limit < needed:
        return Finding("", f"at most {limit}, and {num_workers} workers need {needed}: raise the limit that `ulimit -Hn` shows")
    return Finding(f"at most {limit}, and {needed} are enough")


def proxies() -> Finding:
    """Say which proxies are set: the workers connect directly."""
    names = [variable.name for variable in _env.PROXIES if variable.get()]
    if not names:
        return Finding("none")
    return Finding(f"{', '.join(names)} set; the workers connect without")
