"""`mirrored check`: is this cluster ready for a first training? Without a cluster it checks this machine.

Every worker runs it, under `mirrored launch` or any other launcher; worker 0 prints for all. What needs no network comes first.
"""

from __future__ import annotations

import argparse
import collections
import platform
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax

from .._cluster.resolvers import discover
from .._cluster.spec import LOOPBACK, Cluster
from .._errors import ClusterConfigError, ClusterStartError, DeviceError, RecompilationWarning
from .._options import CommunicationOptions
from .._replicas.mesh import raising_cpu_threads
from .._strategy.strategies import MultiWorkerMirroredStrategy
from .._strategy.strategy import Strategy, coordination_of
from .._workers import runtime
from .._workers.coordination import Coordination
from . import check_cluster, check_host, check_sums
from .check_folder import check_folder
from .check_lines import Finding, Lines

_DESCRIPTION = (
    "Check this machine, or the cluster of all workers that run this, as by srun mirrored check, mirrored launch -n 2 -m "
    "mirrored check, or torchrun --nproc-per-node 2 -m mirrored check."
)
#: So many workers are named, with their hosts.
_MAX_NAMED = 8


def main(argv: Sequence[str]) -> int:
    """Check the cluster; return 0 if it is in order, else 1."""
    parser = argparse.ArgumentParser(
        "mirrored check", description=_DESCRIPTION, epilog="Exit code: 0 if all is in order, else 1."
    )
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="the folder of checkpoints, which all hosts share")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for the other workers (60)")
    options = parser.parse_args(argv)
    try:
        limits = CommunicationOptions(timeout_seconds=options.timeout)
        cluster, found = discover()
    except ValueError as error:
        return Lines(0).fail("cluster", error)
    lines = Lines(cluster.worker_index)
    lines.add("cluster", Finding(found))
    for name, finding in check_host.findings(cluster.num_workers):
        lines.add(name, finding)
    what = "start"
    try:
        host = _meet(lines, cluster, limits)
        if not _compare_hosts(lines, host, options.checkpoints):
            return lines.end("; the rest is not checked")
        what = "devices"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecompilationWarning)  # each size needs its own program
            _compute(lines, MultiWorkerMirroredStrategy(communication_options=limits))
    except (ClusterConfigError, ClusterStartError, DeviceError) as error:
        return lines.fail(what, error)
    return lines.end()


def _meet(lines: Lines, cluster: Cluster, limits: CommunicationOptions) -> str:
    """Wait for the other workers; return the address at which they reach this one."""
    if cluster.num_workers == 1:
        lines.meet(Coordination(), platform.node())
        return LOOPBACK
    start = time.monotonic()
    with raising_cpu_threads():
        joined = runtime.start(cluster, limits)
    assert joined is not None
    lines.meet(joined.coordination, platform.node())
    seconds = f"{time.monotonic() - start:.1f} s"
    names = ", ".join(map(lines.call, range(min(_MAX_NAMED, cluster.num_workers))))
    more = ", ..." * (cluster.num_workers > _MAX_NAMED)
    lines.add("start", Finding(f"{cluster.num_workers} workers met in {seconds}: {names}{more}"))
    return joined.host


def _compare_hosts(lines: Lines, host: str, folder: Path | None) -> bool:
    """Compare the hosts, before JAX starts its devices; return whether the workers can compute together."""
    is_ready = True
    if len(lines.hosts) > 1:
        lines.add("same versions", check_cluster.differences(lines, check_host.versions()))
        is_ready = lines.add("connections", check_cluster.connections(lines, host))
        lines.add("clocks", check_cluster.clocks(lines))
    if folder is not None:
        check_folder(lines, folder)
    return is_ready


def _compute(lines: Lines, strategy: Strategy) -> None:
    """Look at the devices, and compute with all of them."""
    coordination = coordination_of(strategy)
    lines.add("devices", _devices(lines))
    lines.add("sums", check_sums.sums(strategy, coordination))
    if strategy.num_replicas_in_sync > 1:
        lines.add("all-reduce", check_sums.rates(strategy, coordination))
    lines.add("computing", check_sums.computing(coordination))
    if coordination.num_workers > 1:
        lines.add("messages", check_sums.messages(coordination))


def _devices(lines: Lines) -> Finding:
    """Compare the kinds of the devices with worker 0's, and with the GPUs that are there."""
    counts = collections.Counter(device.device_kind for device in jax.local_devices())
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))
    first = lines.exchange("kinds", kinds)[0]
    if kinds != first:
        return Finding("", f"has {kinds}, not {first} as worker 0: use hosts of one kind")
    if jax.default_backend() == "cpu" and check_host.is_for_gpus() and not check_host.gpus().problem:
        return Finding("", "JAX uses the CPU, not the NVIDIA GPUs: is the driver (`nvidia-smi`) new enough for JAX's CUDA?")
    return Finding(f"{kinds} on each worker")
