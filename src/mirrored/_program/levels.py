"""What of a step each replica of a device computes for itself, and between which meetings of all replicas.

A traced step becomes nodes: its equations, with calls taken apart. A node is *shared*, when it computes the same on every
replica; *own*, when each replica has its own values; or a *meeting*, where the replicas exchange values: a collective, or a
loop or condition with one inside. A value's level is the number of meetings on the longest way to it, so the nodes of one
level need no meeting between them. docs/design/several-replicas-on-a-device.md.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

from .._errors import ContextError
from .._jax import jaxprs, user_code
from .._jax.jaxprs import Jaxpr
from .._jax.primitives import CONTROL_FLOW, INLINE_CALLS, MAKE_SAME
from .._typing import REPLICA_AXIS


class Kind(enum.Enum):
    """Who computes a node; the module's docstring explains it."""

    SHARED = "once for all replicas of a device"
    OWN = "by each replica"
    MEETING = "by all replicas together"


@dataclasses.dataclass(eq=False)
class Quantity:
    """A value of the program.

    Attributes:
        is_own: whether each replica has its own.
        level: the number of meetings before it.
        maker: the node that computes it; None for arguments and constants.
        constant: the array itself, of a constant.
        aval: its type, of what a node makes.
    """

    is_own: bool = False
    level: int = 0
    maker: Operation | None = None
    constant: Any = None
    aval: Any = None


@dataclasses.dataclass(eq=False)
class Operation:
    """An equation, with the values that it takes and makes."""

    equation: Any
    inputs: list[Quantity]
    outputs: list[Quantity]
    kind: Kind
    level: int

    @property
    def is_sum(self) -> bool:
        """Whether it adds values up over all replicas, and nothing else."""
        is_sum = self.kind is Kind.MEETING and self.equation.primitive.name == "psum"
        return is_sum and not jaxprs.is_over_groups(self.equation) and not jaxprs.adds_own_axes(self.equation)


@dataclasses.dataclass
class Agenda:
    """The nodes of a program in their order, its outputs, and who uses each value; None stands for the outputs."""

    nodes: list[Operation]
    outputs: list[Quantity]
    users: dict[Quantity, list[Operation | None]]

    @property
    def num_levels(self) -> int:
        return 1 + max((node.level for node in self.nodes), default=0)

    def at(self, level: int, kind: Kind) -> list[Operation]:
        return [node for node in self.nodes if node.level == level and node.kind is kind]


def agenda_of(jaxpr: Jaxpr, inputs: Sequence[Quantity]) -> Agenda:
    """Find the nodes of a program.

    Args:
        jaxpr: of a step, traced with the replica axis bound, or of a body in it.
        inputs: its constants and arguments.

    Raises:
        ContextError: when it does what several replicas of one device cannot do.
    """
    nodes: list[Operation] = []
    outputs = _flatten(jaxpr, inputs, nodes)
    users: dict[Quantity, list[Operation | None]] = collections.defaultdict(list)
    for node in nodes:
        for value in node.inputs:
            users[value].append(node)
    for value in outputs:
        users[value].append(None)
    return Agenda(nodes, outputs, users)


def _flatten(jaxpr: Jaxpr, inputs: Sequence[Quantity], nodes: list[Operation]) -> list[Quantity]:
    known: dict[Any, Quantity] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def read(atom: Any) -> Quantity:
        return Quantity(constant=atom.val) if isinstance(atom, jaxprs.Literal) else known[atom]

    for equation in jaxpr.eqns:
        operands = list(map(read, equation.invars))
        if equation.primitive.name == "custom_linear_solve" and jaxprs.has_collective(equation):
            solver = jaxprs.solver_of(equation)  # its jaxpr has no constants
            outputs = _flatten(solver.jaxpr, [operands[i] for i in solver.operands], nodes)
        elif (inner := _call_in(equation)) is not None:
            constants = [Quantity(constant=constant) for constant in inner.consts]
            outputs = _flatten(inner.jaxpr, [*constants, *operands], nodes)
        else:
            node = _node(equation, operands)
            nodes.append(node)
            outputs = node.outputs
        known.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def _call_in(equation: Any) -> jaxprs.ClosedJaxpr | None:
    """Return what stands for a call: what it calls, unless the call means more than that and has no meeting inside."""
    is_taken = equation.primitive.name in INLINE_CALLS or jaxprs.has_collective(equation)
    return jaxprs.callee(equation) if is_taken else None


def _node(equation: Any, operands: list[Quantity]) -> Operation:
    level = max((value.level for value in operands), default=0)
    if jaxprs.has_collective(equation):
        flags = _own_after_meeting(equation, [value.is_own for value in operands])
        node = Operation(equation, operands, [], Kind.MEETING, level)
        node.outputs = [Quantity(flag, level + 1, node, aval=v.aval) for flag, v in zip(flags, equation.outvars, strict=True)]
        return node
    is_own = any(value.is_own for value in operands) or not jaxprs.is_function_of_operands(equation) or has_number(equation)
    node = Operation(equation, operands, [], Kind.OWN if is_own else Kind.SHARED, level)
    node.outputs = [Quantity(is_own, level, node, aval=variable.aval) for variable in equation.outvars]
    return node


def has_number(equation: Any) -> bool:
    """Tell whether an equation asks for the replica's number, or one inside it does."""
    return is_number(equation) or any(map(is_number, jaxprs.inside(equation)))


def is_number(equation: Any) -> bool:
    return equation.primitive.name == "axis_index" and REPLICA_AXIS in jaxprs.axis_names(equation)


# -- what a meeting makes


def _own_after_meeting(equation: Any, flags: Sequence[bool]) -> list[bool]:
    """Tell of each result of a meeting whether each replica has its own."""
    if jaxprs.is_collective(equation):
        is_own = equation.primitive.name not in MAKE_SAME or jaxprs.is_over_groups(equation)
        return [is_own] * len(equation.outvars)
    if equation.primitive.name not in CONTROL_FLOW - {"custom_linear_solve"}:
        raise ContextError(
            f"a collective runs inside `{equation.primitive.name}`, at {user_code.equation_line(equation) or '<unknown>'}, which "
            "several replicas of one device cannot do. Move it out, or give each replica a device: leave num_replicas out."
        )
    return own_in_carry(equation, flags)[1]


def own_in_carry(equation: Any, flags: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Tell what of a loop's carry, and what of a loop's or condition's results, each replica has for itself."""
    name, flags = equation.primitive.name, list(flags)
    if name == "cond":
        rows = [_own_after(closed, flags[1:]) for closed in equation.params["branches"]]
        return [], list(map(any, zip(*rows, strict=True)))
    [*_, (body, fixed)], _ = jaxprs.parts_of(equation)
    constants = [flags[i] for i in fixed]
    num_consts = fixed.stop
    num_carry = len(equation.outvars) if name == "while" else jaxprs.scan_of(equation).num_carry
    carry, rows = flags[num_consts : num_consts + num_carry], flags[num_consts + num_carry :]
    while True:
        results = _own_after(body, [*constants, *carry, *rows])
        wider = [a or b for a, b in zip(carry, results[:num_carry], strict=True)]
        if wider == carry:
            return carry, [*carry, *results[num_carry:]]
        carry = wider


def _own_after(closed: jaxprs.ClosedJaxpr, flags: Sequence[bool]) -> list[bool]:
    inputs = [Quantity() for _ in closed.consts] + [Quantity(flag) for flag in flags]
    return [value.is_own for value in agenda_of(closed.jaxpr, inputs).outputs]


def made_by(nodes: Sequence[Operation]) -> Iterator[Quantity]:
    """Yield what some nodes make."""
    for node in nodes:
        yield from node.outputs
