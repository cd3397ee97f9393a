"""Reads the collectives of a compiled program: their kinds, bytes, and whether other work runs meanwhile."""

from __future__ import annotations

import dataclasses
import math
import re

_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all")
_ARRAY = re.compile(r"\b(pred|bf|[fsuc])(\d*)(?:e\d\w*)?\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(\S+) = (.+?) ([a-z][a-z-]*)\(")
#: A collective that was fused with what is computed beside it; it stands in the text again, inside of the fusion.
_FUSED = ("fused_computation", "async_collective_fusion")
#: The end of a sum on a TPU that other fusions have carried.
_CARRIED = "async-collective-done"
#: Instructions that are work, and the marks of matrix products and convolutions among them.
_WORK = frozenset({"convolution", "custom-call", "dot", "fusion"})
_PRODUCTS = ("kind=kOutput", "gemm", "conv", " dot(")


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective of a compiled program.

    Attributes:
        num_bytes: of the whole operand, on each device.
        is_overlapped: whether it runs beside other work.
        later: matrix products and convolutions that come after it in the schedule.
    """

    kind: str
    num_bytes: int
    is_overlapped: bool
    later: int


def collectives_in(text: str) -> list[Sent]:
    """Return the collectives in the text of a scheduled module, in the order of the schedule."""
    found: list[Sent] = []
    running: dict[str, int] = {}  # the instruction that begins a collective -> its position among those found
    computation = ""
    for line in text.splitlines():
        if line[:1].strip():
            computation = line.split()[0].lstrip("%")
        if (match := _INSTRUCTION.match(line)) is None:
            continue
        name, result, operation = match.groups()
        if operation.endswith("-done"):
            running.pop(_operand(line), None)
        elif kind := _kind_of(name, operation, computation, line):
            if operation.endswith("-start"):
                running[name] = len(found)
            times = _group(line) if kind == "reduce-scatter" and not operation.endswith("-start") else 1  # its result is a part
            found.append(Sent(kind, times * _num_bytes(result), name.startswith(_CARRIED), 0))
        elif operation in _WORK:
            for position in running.values():
                found[position] = dataclasses.replace(found[position], is_overlapped=True)
            if any(mark in line for mark in _PRODUCTS):
                found = [dataclasses.replace(sent, later=sent.later + 1) for sent in found]
    return found


def _kind_of(name: str, operation: str, computation: str, line: str) -> str:
    """Return the kind of a collective; "" for another instruction."""
    kind = operation.removesuffix("-start")
    if name.startswith(_CARRIED) or (operation == "fusion-start" and '"__triton_collective"' in line):
        return "all-reduce"
    if kind not in _KINDS or computation.startswith(_FUSED):
        return ""
    return "reduce-scatter" if computation.startswith("all-reduce-scatter") else kind


def _group(line: str) -> int:
    """Return how many devices take part in a collective."""
    match = re.search(r"replica_groups=(?:mesh\[[^]]*=(\d+)\]|\[\d+,(\d+)\]|\{\{([\d,]+)\})", line)
    if match is None:
        return 1
    return len(match[3].split(",")) if match[3] else int(match[1] or match[2])


def _operand(line: str) -> str:
    return line.rpartition("-done(")[2].split(")")[0].lstrip("%")


def _num_bytes(result: str) -> int:
    """Return the bytes of the whole array of a collective; the result of one that begins names operands and results."""
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
