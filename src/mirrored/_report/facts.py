"""What is known of a strategy's run at one moment, as plain data."""

from __future__ import annotations

import dataclasses
import platform
import time
from typing import NamedTuple

import jax

from .. import _process
from .._program.program import collectives_of, name_of_collective
from .._replicas.device_time import DeviceTime, last_profile
from .._strategy.adding_up import ops_of
from .._strategy.strategy import Strategy, coordination_of, datasets_of, mesh_of_strategy, programs_of, spent_in, variables_of
from .._text import version_of
from .._transforms.function import function_programs
from .._variables.equal_copies import CopiesCompared, last_comparisons
from .._variables.variable import spec_of
from ..data._dataset import DistributedDataset, batch_rows


class Replica(NamedTuple):
    """One replica's device.

    Attributes:
        number: the replica's.
        device: such as `gpu:0`.
        kind: what the maker calls it.
        worker: the number of the process that it belongs to.
        in_use, limit: bytes of the device's memory, None where it does not say so.
    """

    number: int
    device: str
    kind: str
    worker: int
    in_use: int | None
    limit: int | None


class Split(NamedTuple):
    """A distributed dataset.

    Attributes:
        name: the dataset's class.
        how: how its rows reach the replicas.
        num_rows: rows of a global batch, None where only its iterator knows them.
    """

    name: str
    how: str
    num_rows: int | None


class Exchange(NamedTuple):
    """Collectives of one kind in one program, at one line.

    Attributes:
        name: such as all-reduce.
        where: the user's line.
        count: how many there are.
        num_bytes: what each replica contributes, all together.
    """

    name: str
    where: str
    count: int
    num_bytes: int


class Compiled(NamedTuple):
    """A program.

    Attributes:
        name: of the user's function.
        num_written, num_read: how many variables it writes, and how many it only reads.
        cause: why it was compiled although its function had a program; "" for the first.
        exchanges: what it communicates.
    """

    name: str
    num_written: int
    num_read: int
    cause: str
    exchanges: tuple[Exchange, ...]


class StateEntry(NamedTuple):
    """A variable: its name, shape, dtype and bytes on each device, and whether each replica has its own value."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    is_on_read: bool


@dataclasses.dataclass(frozen=True)
class Facts:
    """A strategy's run at one moment.

    Attributes:
        title: the strategy's class.
        worker: the number of the process that knows this.
        versions: of this library, JAX and Python.
        taken: when, in seconds since 1970.
        replicas: all of them, also those of other workers.
        num_workers: how many processes there are.
        adds_up_by: what has the user's function in the place of sums; "" without one.
        datasets, programs, variables: those that are alive.
        num_steps, step_seconds, shares: of the warm steps: how many, what one took, and which part of it went where.
        profiled: what the last profile has of this process's devices, None without one.
        comparison: the last one of the copies, None before the first.
        warnings: what this process has warned of, and how often.
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
    num_steps: int
    step_seconds: float
    shares: dict[str, float]
    profiled: DeviceTime | None
    comparison: CopiesCompared | None
    warnings: tuple[tuple[str, int], ...]


def facts_of(strategy: Strategy) -> Facts:
    """Collect what is known of a strategy, without communication."""
    mesh, spent = mesh_of_strategy(strategy), spent_in(strategy)
    return Facts(
        title=type(strategy).__name__,
        worker=coordination_of(strategy).worker,
        versions=f"mirrored {version_of('mirrored')}, JAX {jax.__version__}, Python {platform.python_version()}",
        taken=time.time(),
        replicas=tuple(_replica(number, device) for number, device in enumerate(strategy.devices)),
        num_workers=strategy.num_workers,
        adds_up_by="" if (ops := ops_of(strategy)) is None else str(ops),
        datasets=tuple(map(_split, datasets_of(strategy))),
        programs=_programs(strategy),
        variables=tuple(
            StateEntry(spec.name, spec.shape, str(spec.dtype), _bytes_of(spec.shape, spec.dtype), spec.is_on_read)
            for spec in map(spec_of, variables_of(strategy))
        ),
        num_steps=spent.num_steps,
        step_seconds=spent.wall / max(spent.num_steps, 1),
        shares=spent.shares(),
        profiled=last_profile(mesh, spent.since),
        comparison=last_comparisons.get(mesh),
        warnings=tuple(_process.warned.items()),
    )


def _replica(number: int, device: jax.Device) -> Replica:
    is_own = device.process_index == device.client.process_index()
    stats = (device.memory_stats() if is_own else None) or {}
    name = f"{device.platform}:{device.id}"
    return Replica(number, name, device.device_kind, device.process_index, stats.get("bytes_in_use"), stats.get("bytes_limit"))


def _split(dataset: DistributedDataset) -> Split:
    name, _, how = dataset.describe().partition(": ")
    return Split(name, how, batch_rows(dataset))


def _programs(strategy: Strategy) -> tuple[Compiled, ...]:
    found = []
    for program, cause in [*programs_of(strategy), *function_programs(mesh_of_strategy(strategy))]:
        exchanges: dict[tuple[str, str], list[int]] = {}
        for collective in collectives_of(program):
            exchanges.setdefault((name_of_collective(collective), collective.where), []).append(collective.num_bytes)
        lifted = program.lifted
        made = tuple(Exchange(name, where, len(sizes), sum(sizes)) for (name, where), sizes in exchanges.items())
        found.append(Compiled(program.name, len(lifted.written), len(lifted.read_only), cause, made))
    order = [program.name for program in found]
    return tuple(sorted(found, key=lambda program: (order.index(program.name), program.cause != "")))


def _bytes_of(shape: tuple[int, ...], dtype: object) -> int:
    count = getattr(dtype, "itemsize", 0)
    for size in shape:
        count *= size
    return count
