"""`mirrored env`: prints the facts for a bug report, without secrets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import _env
from .._cluster.resolvers import discover
from .._errors import ClusterConfigError
from .._text import NO_VERSION, escape, version_of

#: How long a driver may take to list its devices; if it hangs, the report says so.
DEVICES_SECONDS = 60.0
_PACKAGES = ("mirrored", "jax", "jaxlib", "numpy", "optax")
_OPTIONAL = (
    "grain", "protobuf", "google-crc32c", "flax", "keras", "equinox",
    "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu",
)  # fmt: skip
# Run in another process, so that a driver that hangs or crashes costs only one line of the report.
_LIST_DEVICES = """
import collections, json, jax
print(json.dumps(collections.Counter(f"{d.platform} ({d.device_kind})" for d in jax.devices())))
"""
_GIB = 1024**3


def main(argv: Sequence[str]) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser("mirrored env", description="Print what a bug report needs; no values of secret variables.")
    parser.parse_args(argv)
    for name, lines in (("versions", _versions()), ("machine", _machine()), ("devices", _devices()), ("cluster", _cluster())):
        first, *more = lines
        sys.stdout.write(f"{name + ':':10}{first}\n" + "".join(f"{'':10}{line}\n" for line in more))
        sys.stdout.flush()
    return 0


def _versions() -> Iterator[str]:
    yield ", ".join(f"{name} {version_of(name)}" for name in _PACKAGES)
    found = {name: version_of(name) for name in _OPTIONAL}
    yield f"optional: {', '.join(f'{name} {version}' for name, version in found.items() if version != NO_VERSION) or 'none'}"
    yield f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"


def _machine() -> Iterator[str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"{os.cpu_count()} CPU cores, {usable} of them usable"
    sizes = []
    try:
        for name, size in re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            sizes.append(f"{name} {int(size) * 1024 / _GIB:.1f} GiB")
        sizes.append(f"free in /dev/shm {shutil.disk_usage('/dev/shm').free / _GIB:.1f} GiB")
    except OSError:  # not Linux
        sizes.append("memory unknown")
    yield ", ".join(sizes)


def _devices() -> Iterator[str]:
    command = [sys.executable, "-c", _LIST_DEVICES]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEVICES_SECONDS, text=True, errors="backslashreplace"
        )
    except subprocess.TimeoutExpired:
        yield f"JAX did not list its devices within {DEVICES_SECONDS:.0f} s: a driver hangs, or another process holds the device"
        return
    try:
        counts = json.loads(result.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        yield f"JAX cannot list its devices (exit code {result.returncode}): {escape(last, 400)}"
        return
    for kind, count in counts.items():
        yield f"{count} x {escape(kind, 100)}"


def _cluster() -> Iterator[str]:
    try:
        yield discover()[1]
    except ClusterConfigError as error:
        yield f"wrong: {error}"
    for variable in _env.TABLE:
        value = variable.get()
        if value is None:
            continue
        shown = f" = {escape(value, 300)}" if variable in _env.CLUSTER else " is set"  # other variables may hold secrets
        yield variable.name + shown + " (not used between workers)" * (variable in _env.PROXIES)
