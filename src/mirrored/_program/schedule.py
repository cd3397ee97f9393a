"""The operations of a step on a device with several replicas, in levels between the meetings of all replicas.

A traced step becomes nodes: its equations, with calls opened. A node is *shared* if it computes the same on every replica,
*own* if each replica has its own values, and a *meeting* if the replicas exchange values in it: a collective, or a loop or
condition with one inside. A value's level is the number of meetings on the longest way to it, so the nodes of one level need no
meeting between them. docs/design/several-replicas-on-a-device.md.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from .._errors import ContextError
from .._jax import jaxprs, user_code
from .._jax.interpreter import Analysis, Flattening
from .._jax.jaxprs import Equation, Jaxpr
from .._jax.primitives import MAKE_SAME


class Kind(enum.Enum):
    """Who computes a node; the module's docstring explains it."""

    SHARED = "once for all replicas of a device"
    OWN = "by each replica"
    MEETING = "by all replicas together"


@dataclasses.dataclass(eq=False)
class Quantity:
    """A value of the program."""

    is_own: bool = False  # whether each replica has its own
    level: int = 0  # the number of meetings before it
    maker: Operation | None = None  # the node that computes it; None for arguments and constants
    constant: Any = None  # the array, if it is a constant
    aval: Any = None  # its type, if a node computes it


@dataclasses.dataclass(eq=False)
class Operation:
    """An equation, with the values that it takes and makes."""

    equation: Equation
    inputs: list[Quantity]
    outputs: list[Quantity]
    kind: Kind
    level: int

    @property
    def is_sum(self) -> bool:
        """Whether it adds values up over all replicas, and nothing else."""
        return jaxprs.is_sum(self.equation)


class Agenda(Flattening[Quantity]):
    """The nodes of a step, or of a body in it, in their order, and its outputs.

    Raises:
        ContextError: when several replicas of one device cannot run an operation.
    """

    def __init__(self, jaxpr: Jaxpr, constants: Sequence[Any], inputs: Sequence[Quantity]) -> None:
        self.nodes: list[Operation] = []
        self.outputs = self.run(jaxpr, constants, inputs)

    @property
    def num_levels(self) -> int:
        return 1 + max((node.level for node in self.nodes), default=0)

    def at(self, level: int, kind: Kind) -> list[Operation]:
        return [node for node in self.nodes if node.level == level and node.kind is kind]

    def needed(self, nodes: Sequence[Operation]) -> tuple[list[Quantity], list[Quantity]]:
        """Return those results of some nodes that others add up over the replicas, and those that others use otherwise."""
        own = set(nodes)
        others = [node for node in self.nodes if node not in own]
        added = {value for node in others if node.is_sum for value in node.inputs}
        used = {*self.outputs, *(value for node in others if not node.is_sum for value in node.inputs)}
        made = [value for node in nodes for value in node.outputs]
        return [value for value in made if value in added], [value for value in made if value in used]

    def constant(self, value: Any) -> Quantity:
        return Quantity(constant=value)

    def plain(self, equation: Equation, values: list[Quantity]) -> Sequence[Quantity]:
        level, flags = max((value.level for value in values), default=0), [value.is_own for value in values]
        if is_meeting := jaxprs.has_collective(equation):
            kind, results = Kind.MEETING, list(_Ownership().equation(equation, flags))
        else:
            kind = Kind.OWN if _is_own(equation, flags) else Kind.SHARED
            results = [kind is Kind.OWN] * len(equation.outvars)
        node = Operation(equation, values, [], kind, level)
        node.outputs = [
            Quantity(flag, level + is_meeting, node, aval=variable.aval)
            for flag, variable in zip(results, equation.outvars, strict=True)
        ]
        self.nodes.append(node)
        return node.outputs


def _is_own(equation: Equation, flags: Sequence[bool]) -> bool:
    """Tell whether each replica computes an equation without a meeting for itself."""
    return any(flags) or not jaxprs.is_function_of_operands(equation) or jaxprs.has_replica_number(equation)


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
            f"a collective runs inside `{equation.primitive.name}`, at {user_code.equation_line(equation) or '<unknown>'}, which "
            "several replicas of one device cannot do. Move it out, or give each replica a device: leave num_replicas out."
        )
