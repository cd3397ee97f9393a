"""Says what a strategy's programs would do on devices that are not here: memory, collectives, and estimated time."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from .. import _html
from .._errors import PlanError
from .._jax.costs import costs_of
from .._options import Storage
from .._program.memory import Memory
from .._replicas.mesh import PlannedMesh
from .._replicas.planned import CompiledOnly
from .._strategy.strategy import Strategy, parts_of
from .._text import bytes_in_words, counted, list_lines, shown
from . import chips
from .chips import Chip
from .modules import Sent, collectives_in

#: The numbers of devices for which a plan estimates the efficiency.
EFFICIENCY_AT = (1, 8, 64, 256)
_NEEDED = re.compile(r"\(([\d.]+[KMGT])\) exceeds available HBM \(([\d.]+[KMGT])\)")


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """The plan of one compiled program: what it would do on each device.

    Attributes:
        arguments: the kinds of its array arguments, with the rows of all replicas, such as `float32[2048,784]`.
        failure: why it does not compile, such as too little memory (all figures are zero then); "" if it compiles.
        flops: all operations; `convolution_flops`: those of convolutions; `bytes_moved`: bytes that operations read and write.
        collectives: its collectives, in the order of its schedule.
        compile_seconds: the seconds that XLA took here.
    """

    name: str
    arguments: tuple[str, ...]
    failure: str
    memory: Memory
    flops: float
    convolution_flops: float
    bytes_moved: float
    collectives: tuple[Sent, ...]
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated seconds of a program, by a chip's published rates; `seconds` is the time of the whole step."""

    compute: float
    memory: float
    links: float
    hidden: float  # the part of `links` that runs beside other work

    @property
    def seconds(self) -> float:
        """The seconds of the step: computing and memory overlap, and links do where the compiler lets them."""
        local = max(self.compute, self.memory)
        return local + self.links - min(self.hidden, local)

    @property
    def limit(self) -> str:
        """The name of the part that takes longest."""
        return max(("compute", "memory", "links"), key=lambda name: getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a strategy; `print(plan)` shows it, and `as_dict()` returns it as data.

    >>> print(mr.plan(strategy))  # doctest: +SKIP
    fits; plan for 256 replicas (planned: 256 x TPU v5 lite, 64 hosts)

    Attributes:
        devices: the number of devices, on `num_hosts` hosts, with `replicas` in all.
        chip: the devices' published rates; None if none are known.
        programs: the compiled programs, one for each step and each kind of its arguments.
    """

    title: str
    devices: int
    num_hosts: int
    chip: Chip | None
    programs: tuple[ProgramPlan, ...]
    replicas: int = 0

    def fits(self, program: ProgramPlan) -> bool:
        """Tell whether a program fits into a device's memory; if that is unknown, whether it compiles."""
        return not program.failure and (self.chip is None or program.memory.peak <= self.chip.usable)

    def _needs(self, program: ProgramPlan) -> str:
        """Say how much memory a program needs, and how much a device has for it."""
        if found := _NEEDED.search(program.failure):  # then XLA has made no program to measure
            return f"{found[1]} of {found[2]}"
        if self.chip is None:
            return bytes_in_words(program.memory.peak)
        needs = f"{bytes_in_words(program.memory.peak)} of {bytes_in_words(self.chip.usable)}"
        if self.chip.share < 1:
            needs += f" (JAX takes {self.chip.share:.0%} of {bytes_in_words(self.chip.memory)})"
        return needs

    def estimate(self, program: ProgramPlan, num_devices: int | None = None) -> Estimate:
        """Estimate a program's seconds on `num_devices`, by default all planned ones, with the same rows on each.

        Raises:
            PlanError: (a RuntimeError) for a device without known rates.
        """
        if self.chip is None:
            raise PlanError(f"no rates are known for {self.title}, so that nothing can be estimated for it.")
        count = self.devices if num_devices is None else num_devices
        convolutions = program.convolution_flops
        products = program.flops - convolutions
        times = [(sent.times * _seconds_of(sent, count, self.chip), sent.is_overlapped) for sent in program.collectives]
        return Estimate(
            compute=(products / chips.REACHED_PRODUCTS + convolutions / chips.REACHED_CONVOLUTIONS) / self.chip.flops,
            memory=program.bytes_moved / (self.chip.memory_rate * chips.REACHED_MEMORY),
            links=sum(seconds for seconds, _ in times),
            hidden=sum(seconds for seconds, is_overlapped in times if is_overlapped),
        )

    def efficiency(self, program: ProgramPlan, num_devices: int | None = None) -> float:
        """Estimate one device's step time divided by the step time on `num_devices`, with the same rows on each."""
        alone = self.estimate(program, 1).seconds
        return alone / self.estimate(program, num_devices).seconds if alone else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as dicts, lists, numbers and strings, ready for JSON."""
        made = dataclasses.asdict(self)
        for program, entry in zip(self.programs, made["programs"], strict=True):
            entry["memory"]["peak"] = program.memory.peak
            entry["fits"] = self.fits(program)
            if self.chip is not None and not program.failure:
                entry["estimate"] = dataclasses.asdict(self.estimate(program)) | {"seconds": self.estimate(program).seconds}
                entry["efficiency"] = {str(count): self.efficiency(program, count) for count in EFFICIENCY_AT}
        return made

    def __str__(self) -> str:
        verdict = "fits" if self.chip is not None else "compiles (this kind of device has no known memory)"
        if too_large := [program.name for program in self.programs if not self.fits(program)]:
            verdict = f"does not fit: {', '.join(dict.fromkeys(too_large))}"
        first = f"{verdict}; plan for {self.title}"
        return "\n".join([first, *(_describe(self, program) for program in self.programs)])

    def _repr_html_(self) -> str:
        return _html.element("pre", str(self))


def plan(strategy: Strategy) -> Plan:
    """Return the plan of a strategy's compiled programs: what they would do on devices that are not here.

    Make the strategy with `mr.topology`. Its variables have shapes and no values, `strategy.run` compiles and runs nothing,
    and reading a value raises `PlanError`: that is where a plan ends. Memory, operations and collectives come from the program
    that XLA compiled for the device; times are estimates from the chip's published rates.

    Args:
        strategy: a strategy on a topology's devices, whose steps have been called.

    Raises:
        PlanError: (a RuntimeError) for a strategy with real devices, and when it has compiled nothing.
        TypeError: for anything but a strategy.

    >>> strategy = mr.MirroredStrategy(mr.topology("v5e:16x16"))  # doctest: +SKIP
    >>> _ = strategy.run(step, args=(batch,))  # doctest: +SKIP
    >>> print(mr.plan(strategy))  # doctest: +SKIP
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"mr.plan got {shown(strategy)}; expected a strategy: mr.plan(strategy).")
    mesh = parts_of(strategy).mesh
    if not isinstance(mesh, PlannedMesh):
        right = "mr.MirroredStrategy(mr.topology('v5e:16x16'))"
        raise PlanError(f"mr.plan got {strategy!r}, whose devices are here and run its steps. A plan is made of {right}.")
    made = plan_of(mesh)
    if not made.programs:
        raise PlanError("mr.plan: no step was called, so nothing is compiled. Call strategy.run(step, args=(batch,)) first.")
    return made


def plan_of(mesh: PlannedMesh) -> Plan:
    """Make the plan of the programs that were compiled for a mesh of planned devices."""
    num_hosts = len({device.process_index for device in mesh.devices})
    num_copies = num_hosts if mesh.storage is Storage.PARTS_OF_WORKER else 1
    return Plan(
        title=str(mesh),
        devices=len(mesh.devices),
        num_hosts=num_hosts,
        chip=chips.chip_of(mesh.devices[0].device_kind),
        programs=tuple(_plan_of(program, num_copies) for program in mesh.programs if program.arguments),
        replicas=mesh.num_replicas,
    )


def _plan_of(program: CompiledOnly, num_copies: int) -> ProgramPlan:
    kinds = tuple(f"{array.dtype.name}{list(array.shape)}".replace(" ", "") for array in program.arguments[2])
    memory = Memory.of(program.compiled, program.is_trained, program.arguments, num_copies)
    if program.compiled is None:
        return ProgramPlan(program.name, kinds, program.failure, memory, 0.0, 0.0, 0.0, (), program.seconds)
    costs = costs_of(program.compiled)
    return ProgramPlan(
        name=program.name,
        arguments=kinds,
        failure="",
        memory=memory,
        flops=max(costs["flops"], program.work.dots + program.work.convolutions),
        convolution_flops=program.work.convolutions,
        bytes_moved=costs["bytes accessed"] * program.work.repeats,
        collectives=tuple(collectives_in(program.compiled.as_text())),
        compile_seconds=program.seconds,
    )


def _seconds_of(sent: Sent, num_devices: int, chip: Chip) -> float:
    """Estimate a collective's seconds in a ring (docs/design/scaling.md). Between hosts, each device sends its share."""
    if num_devices == 1:
        return 0.0
    near = num_devices if chip.per_host is None else min(num_devices, chip.per_host)
    hosts = math.ceil(num_devices / near)
    passes = 2 if sent.kind == "all-reduce" else 1
    ring = passes * sent.num_bytes * (near - 1) / near / chip.links + passes * chips.NEAR_LATENCY * math.log2(near)
    if hosts == 1:
        return ring
    share = sent.num_bytes / near
    return ring + passes * (share * (hosts - 1) / hosts / chip.network + chips.FAR_LATENCY * math.ceil(math.log2(hosts)))


# -- as text


def _describe(plan: Plan, program: ProgramPlan) -> str:
    named = f"{program.name} of {', '.join(program.arguments[:4])}" if program.arguments else program.name
    title = f"\n{named} (compiled in {program.compile_seconds:.1f} s)"
    memory = f"{plan._needs(program)}: {program.memory.in_words()}"
    if not plan.fits(program):
        return title + list_lines([f"does not fit into the memory of a device: it needs {memory}"])
    lines = [
        f"memory       {memory}",
        *[f"in parts     saves {bytes_in_words(program.memory.saved)} of variables on each device"] * bool(program.memory.saved),
        f"work         {program.flops / 1e12:.3g} TFLOP, {bytes_in_words(program.bytes_moved)} read and written",
        *map("{:12} {}".format, ["sends", *[""] * len(program.collectives)], _describe_sent(program.collectives)),
    ]
    if plan.chip is not None:
        times = plan.estimate(program)
        shares = ", ".join(f"{_milliseconds(getattr(times, name))} {name}" for name in ("compute", "memory", "links"))
        lines.append(f"estimated    {_milliseconds(times.seconds)} a step, limited by {times.limit} ({shares})")
        shown = ", ".join(f"{count}: {plan.efficiency(program, count):.0%}" for count in EFFICIENCY_AT)
        lines.append(f"efficiency   {shown} (estimated, devices with as many rows each)")
    return title + list_lines(lines, most=len(lines))


def _describe_sent(collectives: Sequence[Sent]) -> list[str]:
    """Describe each kind of collective: their number, their bytes together, and what the device does meanwhile."""
    kinds: dict[tuple[str, bool], list[Sent]] = {}
    for sent in collectives:
        kinds.setdefault((sent.kind, sent.is_overlapped), []).append(sent)
    described = []
    for (kind, is_overlapped), alike in kinds.items():
        number, size = sum(sent.times for sent in alike), sum(sent.times * sent.num_bytes for sent in alike)
        how = "computes" if is_overlapped else "waits"
        if not is_overlapped and alike[0].later:
            how += f"; it still has {counted(alike[0].later, 'matrix product')} to compute"
        described.append(f"{bytes_in_words(size)} in {counted(number, kind)}, while the device {how}")
    return described or ["nothing"]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
