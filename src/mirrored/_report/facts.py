"""Collects facts about a strategy's run as plain data, writes each worker's to a file, and joins the workers' files."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .. import _process
from .._jax import topologies
from .._plan.plan import plan_of
from .._program.program import Program, collectives_of, name_of_collective
from .._replicas.mesh import PlannedMesh
from .._replicas.spent import DeviceTime, last_profile
from .._strategy.strategy import Strategy, coordination_of, parts_of
from .._text import describe, version_of
from .._transforms.function import function_programs
from .._variables.equal_copies import CopiesCompared, last_comparisons
from .._variables.variable import live_variables, spec_of
from ..data._dataset import DistributedDataset, batch_rows

#: The version of the files' format.
_VERSION = 4


class Replica(NamedTuple):
    """The device of one replica."""

    number: int
    device: str  # such as gpu:0
    kind: str  # the maker's name
    worker: int
    in_use: int | None  # bytes of the device's memory; None if the device does not report them
    limit: int | None


class Split(NamedTuple):
    """A distributed dataset: its class, and how its rows reach the replicas."""

    name: str
    how: str
    num_rows: int | None  # of a global batch; None where only the iterator knows the number


class Exchange(NamedTuple):
    """The collectives of one kind that one line of the user's code makes in one program."""

    name: str  # such as all-reduce
    where: str
    count: int
    num_bytes: int  # that each replica sends, in all of them together


class Compiled(NamedTuple):
    """A program of a user's function: how many variables it writes and how many it only reads, and its collectives."""

    name: str
    num_written: int
    num_read: int
    cause: str  # why it was compiled; "" for its function's first program
    exchanges: tuple[Exchange, ...]


class StateEntry(NamedTuple):
    """A variable; `num_bytes` counts its bytes on each device, `division` says how they divide it, or is ""."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    is_on_read: bool
    division: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """A strategy's run at one moment.

    Attributes:
        title: the strategy's class.
        worker: the worker that collected the facts.
        versions: the versions of this library, JAX and Python.
        taken: the time of collection, in seconds since 1970.
        replicas: the replicas of all workers.
        num_workers: the number of processes.
        adds_up_by: the option whose function replaces sums over replicas; "" without one.
        datasets, programs, variables: those that are alive.
        num_compiled, compile_seconds: how many programs of steps were compiled, and the time of all compilations.
        num_steps, step_seconds, shares: the number of the last warm steps, the median of their times, and the parts of the time.
        profiled: the last profile of this process's devices; None without one.
        comparison: the last comparison of copies; None before the first.
        warnings: this process's warnings, and how often each came.
        plan: the plan of a strategy with a topology's devices, as text; "" for real devices.
    """

    title: str
    worker: int
    versions: str
    taken: float
    replicas: tuple[Replica, ...]
    num_workers: int
    adds_up_by: str
    datasets: tuple[Split, ...]
    programs: tuple[Compiled, ...]
    variables: tuple[StateEntry, ...]
    num_compiled: int
    compile_seconds: float
    num_steps: int
    step_seconds: float
    shares: dict[str, float]
    profiled: DeviceTime | None
    comparison: CopiesCompared | None
    warnings: tuple[tuple[str, int], ...]
    plan: str = ""


def facts_of(strategy: Strategy) -> Facts:
    """Collect the facts of a strategy, without communication."""
    mesh, steps, datasets, ops = parts_of(strategy)
    spent = steps.spent
    return Facts(
        title=type(strategy).__name__,
        worker=coordination_of(strategy).worker,
        versions=f"mirrored {version_of('mirrored')}, JAX {jax.__version__}, Python {platform.python_version()}",
        taken=time.time(),
        replicas=tuple(_replica(number, device) for number, device in enumerate(strategy.devices)),
        num_workers=strategy.num_workers,
        adds_up_by="" if ops is None else str(ops),
        datasets=tuple(map(_split, datasets)),
        programs=_programs([*steps.programs.causes(), *function_programs(mesh)]),
        variables=tuple(
            StateEntry(s.name, s.shape, str(s.dtype), s.bytes_on_device, s.is_on_read, str(s.division or ""))
            for s in map(spec_of, live_variables(mesh))
        ),
        num_compiled=spent.num_compiled,
        compile_seconds=spent.compiling,
        num_steps=len(spent.steps),
        step_seconds=spent.median(),
        shares=spent.shares(),
        profiled=last_profile(mesh, spent.since),
        comparison=last_comparisons.get(mesh),
        warnings=tuple(_process.warned.items()),
        plan=str(plan_of(mesh)) if isinstance(mesh, PlannedMesh) else "",
    )


def _replica(number: int, device: jax.Device) -> Replica:
    is_own = device.process_index == device.client.process_index() and not topologies.runs_nothing(device)
    stats = (device.memory_stats() if is_own else None) or {}
    name = f"{device.platform}:{device.id}"
    return Replica(number, name, device.device_kind, device.process_index, stats.get("bytes_in_use"), stats.get("bytes_limit"))


def _split(dataset: DistributedDataset) -> Split:
    name, _, how = dataset.describe().partition(": ")
    return Split(name, how, batch_rows(dataset))


def _programs(compiled: Sequence[tuple[Program, str]]) -> tuple[Compiled, ...]:
    found = []
    for program, cause in compiled:
        exchanges: dict[tuple[str, str], list[int]] = {}
        for collective in collectives_of(program):
            exchanges.setdefault((name_of_collective(collective), collective.where), []).append(collective.num_bytes)
        lifted = program.lifted
        made = tuple(Exchange(name, where, len(sizes), sum(sizes)) for (name, where), sizes in exchanges.items())
        found.append(Compiled(program.name, len(lifted.written), len(lifted.read_only), cause, made))
    order = [program.name for program in found]
    return tuple(sorted(found, key=lambda program: (order.index(program.name), program.cause != "")))


def file_of(path: Path, worker: int, num_workers: int) -> Path:
    """Return the path of a worker's file: `run/report.json`, or `run/report.2.json` for worker 2 of several."""
    return path if num_workers == 1 else path.with_suffix(f".{worker}{path.suffix}")


def save(facts: Facts, path: Path) -> None:
    """Write facts as JSON."""
    replace(path, json.dumps({"mirrored_report": _VERSION, **dataclasses.asdict(facts)}, indent=1))


def load(path: Path) -> Facts | None:
    """Read a file that `save` wrote; return None for another file, raise ValueError for another version or a damaged file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(data, dict) or "mirrored_report" not in data:
        return None
    version = data.pop("mirrored_report")
    if version != _VERSION:
        raise ValueError(f"{path} has version {describe(version)} of the facts of a report; this mirrored reads {_VERSION}")
    try:
        return _facts(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _facts(data: dict[str, Any]) -> Facts:
    comparison: list[Any] | None = data.pop("comparison")
    profiled: dict[str, Any] | None = data.pop("profiled")
    return Facts(
        replicas=tuple(Replica(*row) for row in data.pop("replicas")),
        datasets=tuple(Split(*row) for row in data.pop("datasets")),
        programs=tuple(Compiled(*row, exchanges=tuple(Exchange(*line) for line in made)) for *row, made in data.pop("programs")),
        variables=tuple(StateEntry(name, tuple(shape), *rest) for name, shape, *rest in data.pop("variables")),
        profiled=None if profiled is None else DeviceTime(seconds=dict(profiled.pop("seconds")), **profiled),
        comparison=None if comparison is None else CopiesCompared(*comparison),
        warnings=tuple((str(message), int(count)) for message, count in data.pop("warnings")),
        **data,
    )


def join_facts(every: Sequence[Facts]) -> Facts:
    """Join the workers' facts: each device's from its own worker, and the warnings of all workers."""
    first, by_worker = every[0], {facts.worker: facts for facts in every}
    warnings: Counter[str] = Counter()
    for facts in every:
        warnings.update(dict(facts.warnings))
    replicas = [by_worker.get(replica.worker, first).replicas[i] for i, replica in enumerate(first.replicas)]
    return dataclasses.replace(first, replicas=tuple(replicas), warnings=tuple(warnings.items()))


def replace(path: Path, text: str) -> None:
    """Replace a file by a rename, so that readers see the whole old or the whole new one; make its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
