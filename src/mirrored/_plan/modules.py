"""Reads a compiled program's collectives from its text: their kinds, bytes, and whether other work runs meanwhile."""

from __future__ import annotations

import dataclasses
import math
import re

_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all")
_ARRAY = re.compile(r"\b(pred|bf|[fsuc])(\d*)(?:e\d\w*)?\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(\S+) = (.+?) ([a-z][a-z-]*)\(")
#: Fused computations: the text has their collectives a second time, so these do not count.
_FUSED = ("fused_computation", "async_collective_fusion")
#: The instruction that ends a TPU's sum which ran inside other fusions.
_CARRIED = "async-collective-done"
#: The instructions that count as work, and the texts that mark matrix products and convolutions among them.
_WORK = frozenset({"convolution", "custom-call", "dot", "fusion"})
_PRODUCTS = ("kind=kOutput", "gemm", "conv", " dot(")


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective of a compiled program.

    Attributes:
        num_bytes: bytes of the whole operand, on each device.
        is_overlapped: whether other work runs meanwhile.
        later: the number of matrix products and convolutions after it in the schedule.
    """

    kind: str
    num_bytes: int
    is_overlapped: bool
    later: int


def collectives_in(text: str) -> list[Sent]:
    """Return the collectives in a scheduled module's text, in the order of the schedule."""
    found: list[Sent] = []
    running: dict[str, int] = {}  # the instruction that begins a collective -> its position in `found`
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
    """Return the kind of a collective, or "" if the instruction is none."""
    kind = operation.removesuffix("-start")
    if name.startswith(_CARRIED) or (operation == "fusion-start" and '"__triton_collective"' in line):
        return "all-reduce"
    if kind not in _KINDS or computation.startswith(_FUSED):
        return ""
    return "reduce-scatter" if computation.startswith("all-reduce-scatter") else kind


def _group(line: str) -> int:
    """Return how many devices take part in a collective."""
    match = re.search(r"replica_groups=(?:mesh\[[^]]*=(\d+)\]|\[\d+,(\d+)\])", line)
    return int(match[1] or match[2]) if match else 1


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
