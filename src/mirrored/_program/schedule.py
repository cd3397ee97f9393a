"""The operations of a step on a device with several replicas, in stages, each from a meeting of all replicas to the next.

A traced step becomes nodes: its equations, with calls opened. A node is *shared* if it computes the same on every replica,
*own* if each replica has its own values, and a *meeting* if the replicas exchange values in it: a collective, or a loop or
condition with one inside. A node's stage is the number of meetings on the longest way to it, itself included, so the nodes of one
stage need no meeting between them. docs/design/several-replicas-on-a-device.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._errors import ContextError
from .._jax import jaxprs, tracing, user_code
from .._jax.interpreter import Analysis
from .._jax.jaxprs import ClosedJaxpr, Equation, Jaxpr
from .._jax.primitives import CONVOLUTIONS, ELEMENTWISE, MAKE_SAME, ONE_TO_ONE
from .uneven.nodes import Node, Reading, Value


class Agenda(Reading):
    """The nodes of a step, or of a body in it, in their order, and its outputs.

    Each replica has its own of all results of a node, unless it is taken apart (`splits`): then some may be shared, such as the
    counter of a scan, from the next stage on.

    Raises:
        ContextError: when several replicas of one device cannot run an operation.
    """

    def __init__(
        self, jaxpr: Jaxpr, constants: Sequence[Any], inputs: Sequence[Value], splits: Callable[[Equation], bool]
    ) -> None:
        super().__init__()
        self.splits = splits
        self.outputs = self.run(jaxpr, constants, inputs)

    def needed(self, nodes: Sequence[Node]) -> tuple[list[Value], list[Value]]:
        """Return those results of some nodes that others add up over the replicas, and those that others use otherwise."""
        own = set(nodes)
        others = [node for node in self.nodes if node not in own]
        added = {value for node in others if jaxprs.is_sum(node.equation) for value in node.inputs}
        used = {*self.outputs, *(value for node in others if not jaxprs.is_sum(node.equation) for value in node.inputs)}
        made = [value for node in nodes for value in node.outputs]
        return [value for value in made if value in added], [value for value in made if value in used]

    def call(self, equation: Equation, inner: ClosedJaxpr, values: list[Value]) -> Sequence[Value]:
        held = jaxprs.held_operands(equation)
        if held is None or not self.splits(equation):
            return super().call(equation, inner, values)
        behind = dict(enumerate(values))
        if held:
            kept = self.plain(tracing.barrier([values[k].aval for k in held]), [values[k] for k in held])
            for k, value in zip(held, kept, strict=True):
                behind[k], value.maker = value, None  # no sum over the replicas looks behind it either
        return self.run_closed(inner, list(behind.values()))

    def plain(self, equation: Equation, values: list[Value]) -> list[Value]:
        outputs, node, flags = super().plain(equation, values), self.nodes[-1], [value.is_own for value in values]
        node.stage = max((value.stage for value in values), default=0) + node.is_collective
        node.is_own = not node.is_collective and _is_own(equation, flags)
        results = [node.is_own] * len(outputs)
        if node.is_collective:
            results = _Ownership().equation(equation, flags)
        elif node.is_own and self.splits(equation):
            results = flags if equation.primitive.name in ONE_TO_ONE else _Ownership().loop(equation, flags)
        for value, is_own in zip(outputs, results, strict=True):
            value.is_own, value.stage = is_own, node.stage + (node.is_own and not is_own)
        node.by_rows = node.is_own and _follows_convolution(node)
        return outputs


def _is_own(equation: Equation, flags: Sequence[bool]) -> bool:
    """Tell whether each replica computes an equation without a meeting for itself."""
    return any(flags) or not jaxprs.is_function_of_operands(equation) or jaxprs.has_replica_number(equation)


def _follows_convolution(node: Node) -> bool:
    """Tell whether a node is elementwise behind a convolution, which JAX makes of the rows of all replicas.

    XLA makes both as one if nothing stands between, not even a reshape.
    """
    if node.equation.primitive.name not in ELEMENTWISE:
        return False
    makers, shape = [value.maker for value in node.inputs if value.maker is not None], node.outputs[0].aval.shape
    follows = any(maker.by_rows or maker.equation.primitive.name in CONVOLUTIONS for maker in makers)
    return follows and all(value.aval.shape == shape or not (value.is_own or value.aval.shape) for value in node.inputs)


class _Ownership(Analysis[bool]):
    """Whether each replica has its own value; loops and conditions are entered where replicas meet in them."""

    def join(self, values: Sequence[bool]) -> bool:
        return any(values)

    def chosen(self, decision: bool, value: bool) -> bool:
        return value  # the proof has shown that all replicas take the same way to a meeting

    def equation(self, equation: Equation, values: list[bool]) -> Sequence[bool]:
        if jaxprs.has_collective(equation):
            return super().equation(equation, values)
        return [_is_own(equation, values)] * len(equation.outvars)

    def over_replicas(self, equation: Equation, values: list[bool]) -> Sequence[bool]:
        is_own = equation.primitive.name not in MAKE_SAME or jaxprs.is_over_groups(equation)
        return [is_own] * len(equation.outvars)

    def plain(self, equation: Equation, values: list[bool]) -> Sequence[bool]:
        raise ContextError(
            f"a collective runs inside `{equation.primitive.name}`, at {user_code.equation_line(equation)}, which "
            "several replicas of one device cannot do. Move it out, or give each replica a device: leave num_replicas out."
        )
