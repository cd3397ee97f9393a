"""A trace of an uneven step as values and the nodes that compute them, also inside loops with collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ..._jax import jaxprs
from ..._jax.interpreter import Flattening
from ..._jax.jaxprs import ClosedJaxpr, Equation, Literal
from ..._jax.primitives import FILLS


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value in one trace."""

    aval: Any
    number: int | None = None  # equal to that of another trace's value iff both are computed alike; None: not compared
    stage: int = 0  # after how many groups of collectives it is known
    content: Any = None  # the array, for a constant
    outer: Value | None = None  # of a value that a loop's body captures: the one outside of the loop


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """An equation, with values in place of the jaxpr's variables."""

    equation: Equation
    inputs: list[Value]
    outputs: list[Value]
    is_collective: bool
    #: The bodies of a loop or condition with collectives inside; else none.
    bodies: list[Trace] = dataclasses.field(default_factory=list)
    #: The inputs of a collective that are one array for all traces; of a loop, the carry and the rows.
    handed: list[Value] = dataclasses.field(default_factory=list)
    stage: int = 0
    is_pure: bool = False  # whether it is known to compute its outputs from its inputs alone
    is_own: bool = False  # whether it is not common to all traces; known after `compare`

    @property
    def is_cheap(self) -> bool:
        """Whether to compute it wherever it is used, because that costs less than to carry it there."""
        is_known = lambda value: value.content is not None or value.number is not None  # noqa: E731
        return self.equation.primitive.name in FILLS and all(map(is_known, self.inputs))


@dataclasses.dataclass(eq=False, slots=True)
class Trace:
    """One trace, or a body of a loop in it."""

    name: str  # how messages call the replicas that run it, such as "the replicas with 3 rows"
    arguments: list[Value]
    nodes: list[Node]  # in order
    outputs: list[Value]
    captured: list[Value] = dataclasses.field(default_factory=list)  # the values that a body takes from outside unchanged
    num_stages: int = 1  # known after `compare`

    @property
    def collectives(self) -> list[Node]:
        return [node for node in self.nodes if node.is_collective]


def read_trace(name: str, closed: ClosedJaxpr, captured: Sequence[Value] = ()) -> Trace:
    """Turn a traced step into nodes, or a body of a loop, whose first arguments are captured. Calls are inlined."""
    arguments = [Value(variable.aval) for variable in closed.jaxpr.invars[len(captured) :]]
    trace = Trace(name, arguments, [], [], [value for value in captured if value.outer is not None])
    trace.outputs = _Reading(trace).run_closed(closed, [*captured, *arguments])
    return trace


@dataclasses.dataclass
class _Reading(Flattening[Value]):
    """A walk that adds nodes to a trace."""

    trace: Trace

    def constant(self, value: Any) -> Value:
        return Value(jax.typeof(value), content=value)

    def literal(self, literal: Literal) -> Value:
        return Value(literal.aval, content=literal.val)

    def plain(self, equation: Equation, values: list[Value]) -> list[Value]:
        node = Node(equation, values, [Value(variable.aval) for variable in equation.outvars], jaxprs.has_collective(equation))
        if node.is_collective:
            parts, handed = jaxprs.parts_of(equation)
            node.handed = [values[k] for k in handed]
            from_outside = lambda value: value if value.content is not None else Value(value.aval, outer=value)  # noqa: E731
            captured = [[from_outside(values[k]) for k in part.fixed] for part in parts]
            node.bodies = [read_trace(self.trace.name, part.closed, own) for part, own in zip(parts, captured, strict=True)]
        else:
            node.is_pure = jaxprs.is_function_of_operands(equation)
        self.trace.nodes.append(node)
        return node.outputs


def find_loop(trace: Trace, values: Sequence[Value]) -> Node | None:
    """Return a loop, condition or call that is not common to all traces and on which a value depends; after `compare`."""
    makers = {value: node for node in trace.nodes if node.is_own for value in node.outputs}
    seen: set[Value] = set()
    waiting = [value for value in values if value.number is None]
    while waiting:
        value = waiting.pop()
        if value in seen or value not in makers:
            continue
        seen.add(value)
        node = makers[value]
        if list(jaxprs.inner_jaxprs(node.equation)):
            return node
        waiting += node.inputs
    return None
