"""Which values of several traces of a step, made for different shapes, are alike, and which must wait for a collective.

docs/design/uneven-steps.md argues why equal numbers mean equal values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from . import match_collectives
from .keys import content_key, equation_key
from .nodes import Node, Trace, Value


def compare(traces: Sequence[Trace], is_common: Sequence[bool]) -> None:
    """Number the values of all traces, also inside loops with collectives, and put them in stages.

    Args:
        traces: the traces; they must reach the same collectives in the same order.
        is_common: for each argument, whether it has one shape in all traces.

    Raises:
        UnevenReplicasError: at the first collective in which the traces differ.
    """
    comparison = _Comparison()
    comparison.number_arguments(traces, is_common)
    comparison.compare(traces)
    _forget_what_is_not_common(traces)


class _Comparison:
    """The numbers that have been given so far: two values have one number iff they have one key."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._new = itertools.count()

    def number_arguments(self, traces: Sequence[Trace], is_common: Sequence[bool]) -> None:
        for common, row in zip(is_common, zip(*(trace.arguments for trace in traces), strict=True), strict=True):
            self._number_alike(row, common)

    def compare(self, traces: Sequence[Trace]) -> None:
        """Number what traces compute, whose arguments have their numbers."""
        parts = [_split_at_collectives(trace) for trace in traces]
        match_collectives.check(traces, [[node for _, node in part if node is not None] for part in parts])
        stage, last_effects = 0, [0] * len(traces)
        for part_of_each in zip(*parts, strict=True):
            for kind, (nodes, _) in enumerate(part_of_each):
                for node in nodes:
                    last_effects[kind] = self._number_node(node, last_effects[kind])
            collectives = [node for _, node in part_of_each if node is not None]
            if collectives:
                stage = self._number_collectives(stage, collectives)
        for trace in traces:
            trace.num_stages = stage + 1
            for value in trace.outputs:
                self._number_of(value)

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _number_alike(self, row: Sequence[Value], is_alike: bool) -> None:
        number = self._number(("new", next(self._new))) if is_alike else None
        for value in row:
            value.number = number

    def _number_of(self, value: Value) -> int | None:
        if value.number is None and value.content is not None:
            value.number = self._number(content_key(value.content, value.aval))
        elif value.number is None and value.outer is not None:
            value.number = self._number_of(value.outer)
        return value.number

    def _number_node(self, node: Node, last_effect: int) -> int:
        """Number a node's outputs, and return the stage of the last effect, which the next one must not come before."""
        operands = [self._number_of(value) for value in node.inputs]
        stage = max([value.stage for value in node.inputs], default=0)
        number = None
        if not node.is_pure:
            if node.equation.effects:
                stage = last_effect = max(stage, last_effect)
        elif None not in operands:
            number = self._number((equation_key(node.equation), tuple(operands)))
        node.stage = stage
        for position, value in enumerate(node.outputs):
            value.stage = stage
            value.number = None if number is None else self._number((number, position))
        return last_effect

    def _number_collectives(self, stage: int, collectives: Sequence[Node]) -> int:
        """Number one collective of all traces; return its stage, that of the one before if it need not wait."""
        for value in (value for node in collectives for value in node.inputs):
            self._number_of(value)
        ready = max((value.stage for node in collectives for value in node.inputs), default=0)
        stage = max(stage, ready + 1)
        for bodies in zip(*(node.bodies for node in collectives), strict=True):
            for row in zip(*(body.arguments for body in bodies), strict=True):
                self._number_alike(row, _has_one_shape(row))
            self.compare(bodies)
        for row in zip(*(node.outputs for node in collectives), strict=True):
            self._number_alike(row, _has_one_shape(row))
            for value in row:
                value.stage = stage
        for node in collectives:
            node.stage = stage
        return stage


def _has_one_shape(row: Sequence[Value]) -> bool:
    return len({value.aval.shape for value in row}) == 1


def _split_at_collectives(trace: Trace) -> list[tuple[list[Node], Node | None]]:
    parts: list[tuple[list[Node], Node | None]] = []
    nodes: list[Node] = []
    for node in trace.nodes:
        if node.is_collective:
            parts.append((nodes, node))
            nodes = []
        else:
            nodes.append(node)
    return [*parts, (nodes, None)]


def _forget_what_is_not_common(traces: Sequence[Trace]) -> None:
    """Take the numbers away that not every trace has, and those of what is computed from such values."""
    for trace in traces:
        for value in trace.taken:
            value.number = value.outer.number if value.outer is not None else None
    computed = [[value for node in trace.nodes for value in node.outputs] for trace in traces]
    common = set.intersection(*[{value.number for value in values} for values in computed])
    for value in itertools.chain.from_iterable(computed):
        if value.number not in common:
            value.number = None
    for node in itertools.chain.from_iterable([trace.nodes for trace in traces]):
        if node.is_collective:
            continue
        if None in [value.number for value in node.inputs]:
            for value in node.outputs:
                value.number = None
        node.is_own = not node.outputs or node.outputs[0].number is None
    for nodes in zip(*([node for node in trace.nodes if node.is_collective] for trace in traces), strict=True):
        for bodies in zip(*(node.bodies for node in nodes), strict=True):
            _forget_what_is_not_common(bodies)
