"""Reads a compiled program's collectives from its text: their kinds, bytes, and whether other work runs meanwhile."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_KINDS = (
    "all-reduce", "reduce-scatter", "all-gather", "collective-permute", "collective-broadcast", "all-to-all", "ragged-all-to-all",
)  # fmt: skip
_ARRAY = re.compile(r"\b(?:pred|bf|[fsuc])(\d*)(?:e\d\w*)?\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(\S+) = (.+?) ([a-z][a-z-]*)\(")
#: The instructions that count as work; `_PRODUCT` finds matrix products and convolutions among them.
_WORK = frozenset({"convolution", "custom-call", "dot", "fusion"})
_PRODUCT = re.compile(r"kind=kOutput|gemm|\$conv| (?:dot|convolution)\(")
#: A loop, and its trip count if XLA knows it; a TPU's text has the count only as a constant in the loop's condition.
_LOOP = re.compile(r"condition=%(?P<condition>[\w.-]+), body=%(?P<body>[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NUMBER = re.compile(r" s32\[\]\S* constant\((\d+)\)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|true_computation=(\S+), false_computation=([^\s,]+))")
_CALLEE = re.compile(r"(?:calls|to_apply)=%([\w.-]+)")
#: XLA's names: a TPU's all-reduce fused with a slice; and the middle, begin and end of a collective beside other work. The text
#: repeats the collective in all three, so only its end counts.
_SCATTERS, _GOES_ON = "all-reduce-scatter", "async_collective_fusion"
_BEGINS, _ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"
_USERS_NAMES = re.compile(r"metadata=\{[^}]*\}")  # names of functions and files, which may look like XLA's


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective of a compiled program.

    Attributes:
        num_bytes: bytes of the whole operand, on each device.
        is_overlapped: whether other work runs meanwhile.
        later: the number of matrix products and convolutions after it in the schedule.
        times: the number of its runs in one run of the program.
    """

    kind: str
    num_bytes: int
    is_overlapped: bool
    later: int
    times: int = 1


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    result: str
    operation: str
    line: str  # without the user's names


def collectives_in(text: str) -> list[Sent]:
    """Return the collectives in a scheduled module's text, in the order in which they begin."""
    module = _Module(text)
    found: list[Sent] = []
    running: dict[str, int] = {}  # the instruction that begins a collective -> its position among those found
    for instruction, times in module.run(module.entry):
        if instruction.operation.endswith("-done"):
            running.pop(_operand(instruction.line), None)
        elif sent := module.sent_by(instruction, times):
            if instruction.operation.endswith("-start"):
                running[instruction.name] = len(found)
            found.append(sent)
        elif instruction.operation in _WORK:
            for position in running.values():
                found[position] = dataclasses.replace(found[position], is_overlapped=True)
            if _PRODUCT.search(instruction.line):
                found = [dataclasses.replace(sent, later=sent.later + 1) for sent in found]
    return found


class _Module:
    """The computations of a module's text, each with its instructions in their order."""

    def __init__(self, text: str) -> None:
        self.entry = ""
        self._computations: dict[str, list[_Instruction]] = {"": []}
        self._ended: dict[str, str] = {}  # the instruction that begins a collective -> the type of its result
        name = ""
        for line in text.splitlines():
            if line[:1].strip():
                name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
                if line.startswith("ENTRY "):
                    self.entry = name
                self._computations[name] = []
            elif match := _INSTRUCTION.match(line):
                self._computations[name].append(_Instruction(match[1], match[2], match[3], _USERS_NAMES.sub("", line)))
                if match[3].endswith("-done"):
                    self._ended[_operand(line)] = match[2]

    def run(self, computation: str, times: int = 1) -> Iterator[tuple[_Instruction, int]]:
        """Yield each instruction that runs, and how often; of a conditional, the branch that sends most."""
        for instruction in self._computations[computation]:
            if instruction.operation == "while" and (loop := _LOOP.search(instruction.line)):
                for part in loop.groups():
                    yield from self.run(part, times * self._trips(instruction, loop["condition"]))
            elif instruction.operation == "conditional" and (match := _BRANCHES.search(instruction.line)):
                names = [name.strip("% ") for part in match.groups() if part for name in part.split(",")]
                yield from max(([*self.run(name, times)] for name in names), key=self._bytes_sent)
            elif instruction.operation == "call" and (match := _CALLEE.search(instruction.line)):
                yield from self.run(match[1], times)
            else:
                yield instruction, times

    def sent_by(self, instruction: _Instruction, times: int) -> Sent | None:
        """Return the collective that an instruction is, begins, or ends inside itself; None for other instructions."""
        if instruction.operation.removesuffix("-start") in _KINDS:
            return _sent(instruction, self._ended.get(instruction.name, instruction.result), times)
        callee = _CALLEE.search(instruction.line)
        if callee is None or callee[1].startswith(_GOES_ON):
            return None
        inside = self._computations.get(callee[1], [])
        collective = next((inner for inner in inside if inner.operation in _KINDS), None)
        if collective is None or any(_BEGINS in inner.line for inner in inside):
            return None
        sent = _sent(collective, collective.result, times)
        kind = "reduce-scatter" if callee[1].startswith(_SCATTERS) else sent.kind
        return dataclasses.replace(sent, kind=kind, is_overlapped=any(_ENDS in inner.line for inner in inside))

    def _trips(self, loop: _Instruction, condition: str) -> int:
        """Return a loop's trip count: XLA's, else the largest constant in the loop's condition."""
        if known := _TRIPS.search(loop.line):
            return int(known[1])
        numbers = (number for inner in self._computations[condition] for number in _NUMBER.findall(inner.line))
        return max([1, *map(int, numbers)])  # a loop that counts down to 0 runs too

    def _bytes_sent(self, branch: list[tuple[_Instruction, int]]) -> int:
        return sum(sent.num_bytes * times for inner, times in branch if (sent := self.sent_by(inner, times)))


def _sent(collective: _Instruction, result: str, times: int) -> Sent:
    kind = collective.operation.removesuffix("-start")
    parts = _num_devices(collective.line) if kind == "reduce-scatter" else 1  # its result is a part
    return Sent(kind, parts * _size(result), False, 0, times)


def _num_devices(line: str) -> int:
    """Return how many devices take part in a collective."""
    match = re.search(r"replica_groups=(?:mesh\[[^]]*=(\d+)\]|\[\d+,(\d+)\]|\{\{([\d,]+)\})", line)
    if match is None:
        return 1
    return int(match[1] or match[2] or len(match[3].split(",")))


def _operand(line: str) -> str:
    return line.rpartition("-done(")[2].split(")")[0].lstrip("%")


def _size(text: str) -> int:
    """Return the bytes of the arrays that a type names, such as `(f32[8,128], bf16[4])`."""
    total = 0
    for bits, dims in _ARRAY.findall(text):
        width = max(int(bits or 8) // 8, 1)  # `pred` names no bits
        total += width * math.prod(int(size) for size in dims.split(",") if size)
    return total
