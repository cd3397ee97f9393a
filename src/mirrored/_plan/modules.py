"""Reads a compiled program's collectives from its text: their kinds, bytes, and whether other work runs meanwhile."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all")
_ARRAY = re.compile(r"\b(pred|bf|[fsuc])(\d*)(?:e\d\w*)?\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(\S+) = (.+?) ([a-z][a-z-]*)\(")
#: Fused computations: the text has their collectives a second time, so these do not count.
_FUSED = ("fused_computation", "async_collective_fusion")
#: The instruction that ends a TPU's sum which ran inside other fusions.
_ENDS_FUSED_SUM = "async-collective-done"
#: The instructions that count as work; `_PRODUCT` finds matrix products and convolutions among them.
_WORK = frozenset({"convolution", "custom-call", "dot", "fusion"})
_NAME = re.compile(r"%([\w.-]+)")
#: A loop, and how often it runs, if XLA says it; for a TPU, only a number in the loop's condition says it.
_LOOP = re.compile(r" while\(.*condition=%(?P<condition>[\w.-]+), body=%(?P<body>[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NUMBER = re.compile(r" s32\[\]\S* constant\((\d+)\)")
_PRODUCT = re.compile(r"kind=kOutput|gemm|\$conv| (?:dot|convolution)\(")
_USERS_NAMES = re.compile(r"metadata=\{[^}]*\}")  # of functions and files, which may have any word


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective of a compiled program.

    Attributes:
        num_bytes: bytes of the whole operand, on each device.
        is_overlapped: whether other work runs meanwhile.
        later: the number of matrix products and convolutions after it in the schedule.
        times: how often it runs; in a loop more than once.
    """

    kind: str
    num_bytes: int
    is_overlapped: bool
    later: int
    times: int = 1


def collectives_in(text: str) -> list[Sent]:
    """Return the collectives in a scheduled module's text, in the order of the schedule."""
    found: list[Sent] = []
    running: dict[str, int] = {}  # the instruction that begins a collective -> its position among those found
    lines = list(_lines_of(text))
    times = _times_in(lines)
    for computation, line in lines:
        if (match := _INSTRUCTION.match(line)) is None:
            continue
        name, result, operation = match.groups()
        if operation.endswith("-done"):
            running.pop(_operand(line), None)
        elif kind := _kind_of(name, operation, computation, line):
            if is_start := operation.endswith("-start"):
                running[name] = len(found)
            parts = _num_devices(line) if kind == "reduce-scatter" and not is_start else 1  # its result is a part
            is_overlapped = name.startswith(_ENDS_FUSED_SUM)
            found.append(Sent(kind, parts * _num_bytes(result), is_overlapped, 0, times.get(computation, 1)))
        elif operation in _WORK:
            for position in running.values():
                found[position] = dataclasses.replace(found[position], is_overlapped=True)
            if _PRODUCT.search(_USERS_NAMES.sub("", line)):
                found = [dataclasses.replace(sent, later=sent.later + 1) for sent in found]
    return found


def _lines_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line, after the name of its computation."""
    computation = ""
    for line in text.splitlines():
        if line[:1].strip():
            computation = line.removeprefix("ENTRY ").split()[0].lstrip("%")
        yield computation, line


def _times_in(lines: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return how often each computation runs: a loop's body as often as XLA says, or the number in the loop's condition."""
    limits: dict[str, int] = {}  # the largest number in each computation
    for computation, line in lines:
        limits[computation] = max([limits.get(computation, 1), *map(int, _NUMBER.findall(line))])
    times: dict[str, int] = {}
    for computation, line in reversed(lines):  # callers come after the computations that they call
        for callee in limits.keys() & set(_NAME.findall(line)):
            times[callee] = times.get(computation, 1)
        if loop := _LOOP.search(line):
            trips = _TRIPS.search(line)
            times[loop["body"]] *= int(trips[1]) if trips else limits.get(loop["condition"], 1)
    return times


def _kind_of(name: str, operation: str, computation: str, line: str) -> str:
    """Return the kind of a collective, or "" if the instruction is none."""
    kind = operation.removesuffix("-start")
    if name.startswith(_ENDS_FUSED_SUM) or (operation == "fusion-start" and '"__triton_collective"' in line):
        return "all-reduce"
    if kind not in _KINDS or computation.startswith(_FUSED):
        return ""
    return "reduce-scatter" if computation.startswith("all-reduce-scatter") else kind


def _num_devices(line: str) -> int:
    """Return how many devices take part in a collective."""
    match = re.search(r"replica_groups=(?:mesh\[[^]]*=(\d+)\]|\[\d+,(\d+)\]|\{\{([\d,]+)\})", line)
    if match is None:
        return 1
    return len(match[3].split(",")) if match[3] else int(match[1] or match[2])


def _operand(line: str) -> str:
    return line.rpartition("-done(")[2].split(")")[0].lstrip("%")


def _num_bytes(result: str) -> int:
    """Return the bytes of a collective's array; a `-start` instruction names operands and results, which count once."""
    if not result.startswith("(("):
        return _size(result)
    operands, _, results = result.partition("), ")
    return max(_size(operands), _size(results))


def _size(text: str) -> int:
    """Return the bytes of the arrays that a type names, such as `(f32[8,128], bf16[4])`."""
    total = 0
    for kind, bits, dims in _ARRAY.findall(text):
        width = 1 if kind == "pred" else max(int(bits or 8) // 8, 1)
        total += width * math.prod(int(size) for size in dims.split(",") if size)
    return total
