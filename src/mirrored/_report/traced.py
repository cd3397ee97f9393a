"""Reads from a trace of JAX's profiler how long the devices computed, and how long they ran collectives."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._replicas.spent import COMPUTATION

#: Larger traces are not read: reading them would take seconds, and memory that the training needs.
MAX_BYTES = 256 << 20

#: Kind -> names of operations: XLA's own, and those of JAX's primitives, which XLA keeps.
_KINDS = {
    "all-reduce": r"psum|psum-invariant|pmax|pmin|all-reduce",
    "all-gather": r"all-gather(-invariant)?",
    "reduce-scatter": r"reduce-scatter|psum-scatter",
    "all-to-all": r"(ragged-)?all-to-all",
    "collective-permute": r"ppermute|collective-permute",
    "broadcast": r"pbroadcast|collective-broadcast",
    "send and receive": r"send|recv",
}
_PATTERNS = {kind: re.compile(rf"(?:{names})(?:-start|-done)?(?:\.\w+)*") for kind, names in _KINDS.items()}
#: NCCL's and RCCL's kernels: `ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)`.
_KERNEL = re.compile(r"[nr]ccl\w*?Kernel_([A-Z][a-z]+(?:[A-Z][a-z]+)*)")
_OF_KERNELS = {"SendRecv": "send and receive"}
_DEVICE = re.compile(r"/device:[A-Z]+:(\d+)")


class Stretch(NamedTuple):
    """One operation on a device: its `start` and `end` in nanoseconds, and its kind, a collective or computation."""

    start: float
    end: float
    kind: str


def number_of(device: jax.Device) -> int:
    """Return a device's number in a trace: a CPU's number in the whole job, any other device's number in this process."""
    return device.id if device.platform == "cpu" else device.local_hardware_id or 0


def seconds_of(path: Path, devices: Collection[int]) -> dict[str, float]:
    """Return the summed seconds of some devices in a trace, an `xplane.pb`, by kind; raise ValueError when it holds none.

    Each moment of a device counts for the operation that began last: for a loop's body instead of the loop, and for
    computation that starts during a collective. Waiting for other replicas inside a collective counts as the collective.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"the trace has {size >> 20} MiB, more than the {MAX_BYTES >> 20} that are read; record fewer steps")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about the way ProfileData is made
        try:
            found = operations(jax.profiler.ProfileData.from_file(str(path)))
        except (AttributeError, RuntimeError, TypeError) as error:
            raise ValueError(f"jax.profiler.ProfileData cannot read the trace: {error}") from error
    missing = [device for device in devices if device not in found]
    if missing:
        raise ValueError(f"the trace has no operations of device {missing[0]}")
    total: dict[str, float] = {}
    for device in devices:
        for kind, nanoseconds in of_device(found[device]).items():
            total[kind] = total.get(kind, 0) + nanoseconds / 1e9
    return total


def operations(data: Any) -> dict[int, list[Stretch]]:
    """Return the operations in a `ProfileData`, by device number."""
    found: dict[int, list[Stretch]] = {}
    for plane in data.planes:
        if plane.name == "/host:CPU":
            for device, operation in _of_host(plane):
                found.setdefault(device, []).append(operation)
        elif (match := _DEVICE.fullmatch(plane.name)) and (listed := list(_of_accelerator(plane))):
            found[int(match[1])] = listed
    return found


def _of_host(plane: Any) -> Iterator[tuple[int, Stretch]]:
    """Yield the operations of CPU devices; one may begin on one thread and end on another, which marks the end."""
    begun, ends = [], {}
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith("$"):  # a function of Python
                continue
            facts = dict(event.stats)
            if event.name.startswith("end: "):
                ends[facts.get("_c")] = event.start_ns
            elif "hlo_op" in facts and "device_ordinal" in facts:
                begun.append((facts["device_ordinal"], facts.get("_p", -1), event.start_ns, event.end_ns, facts["hlo_op"]))
    for device, number, start, end, name in begun:
        yield device, Stretch(start, max(end, ends.get(number, end)), kind_of(name))


def _of_accelerator(plane: Any) -> Iterator[Stretch]:
    """Yield the operations on a GPU's streams, or of another accelerator, without copies from and to the host."""
    lines = list(plane.lines)
    streams = [line for line in lines if line.name.startswith("Stream #")]
    for line in streams or [line for line in lines if line.name == "XLA Ops"]:
        for event in line.events:
            if not event.name.startswith(("MemcpyH2D", "MemcpyD2H", "Memset")):
                facts = dict(event.stats)
                yield Stretch(event.start_ns, event.end_ns, kind_of(str(facts.get("hlo_op", event.name)), event.name))


def kind_of(name: str, kernel: str = "") -> str:
    """Return the kind of an operation, by its name and the name of its kernel.

    >>> kind_of("psum.7"), kind_of("all-gather-start.1"), kind_of("psum_add_fusion.2")
    ('all-reduce', 'all-gather', 'computation')
    """
    if (match := _KERNEL.search(kernel)) is not None:
        return _OF_KERNELS.get(match[1], re.sub(r"(?<=[a-z])(?=[A-Z])", "-", match[1]).lower())
    head = name.removeprefix("%").split(" ")[0].replace("_", "-")
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.fullmatch(head)), COMPUTATION)


def of_device(listed: Iterable[Stretch]) -> dict[str, float]:
    """Return the time of one device by kind; each moment belongs to the operation that began last.

    >>> loop, inside = Stretch(0, 10, COMPUTATION), Stretch(2, 5, "all-reduce")
    >>> of_device([loop, inside])
    {'computation': 7.0, 'all-reduce': 3}
    """
    took: dict[str, float] = {}
    running: list[Stretch] = []
    now = 0.0
    for operation in [*sorted(listed, key=lambda stretch: (stretch.start, -stretch.end)), Stretch(float("inf"), 0, COMPUTATION)]:
        while running and now < operation.start:
            last = running[-1]
            until = min(last.end, operation.start)
            if until > now:
                took[last.kind] = took.get(last.kind, 0) + until - now
                now = until
            if last.end <= now:
                running.pop()
        now = max(now, operation.start)
        running.append(operation)
    return took
