"""What a trace of an uneven step consists of: values, and the nodes that compute them, also inside loops with collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ..._jax import jaxprs, tracing
from ..._jax.jaxprs import ClosedJaxpr, Literal
from ..._jax.primitives import INLINE_CALLS, PURE

#: Cheaper to compute again wherever they are used than to carry from one part to the next.
_CHEAP = frozenset({"broadcast_in_dim", "iota"})


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value in one trace.

    Attributes:
        aval: its shape and dtype.
        number: equal to that of another trace's value iff both are computed alike; None: not compared.
        stage: after how many groups of collectives it is known.
        content: the array, for a constant.
        outer: the value outside of the loop, for one that a loop's body takes from there.
    """

    aval: Any
    number: int | None = None
    stage: int = 0
    content: Any = None
    outer: Value | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """An equation, with its trace's values in place of the jaxpr's variables.

    Attributes:
        bodies: what a loop or condition with collectives inside runs; empty for everything else.
        handed: the inputs that are handed over as one array of all traces, when it is a collective: those of a loop that its
            bodies do not take as they are.
        is_pure: whether it is known to compute its outputs from its inputs alone.
        is_own: whether each trace computes it for itself; known after `compare`.
    """

    equation: Any
    inputs: list[Value]
    outputs: list[Value]
    is_collective: bool
    bodies: list[Trace] = dataclasses.field(default_factory=list)
    handed: list[Value] = dataclasses.field(default_factory=list)
    stage: int = 0
    is_pure: bool = False
    is_own: bool = False

    @property
    def is_cheap(self) -> bool:
        """Whether to compute it wherever it is used, because that costs less than to carry it there."""
        is_known = lambda value: value.content is not None or value.number is not None  # noqa: E731
        return self.equation.primitive.name in _CHEAP and all(map(is_known, self.inputs))


@dataclasses.dataclass(eq=False, slots=True)
class Trace:
    """One trace, or a body of a loop in it: its arguments, its nodes in order, and its outputs.

    Attributes:
        name: how messages call the replicas that run it, such as "the replicas with 3 rows".
        taken: what it takes from outside as it is, for a body of a loop.
        num_stages: the number of stages, after `compare`.
    """

    name: str
    arguments: list[Value]
    nodes: list[Node]
    outputs: list[Value]
    taken: list[Value] = dataclasses.field(default_factory=list)
    num_stages: int = 1


def read_trace(name: str, closed: ClosedJaxpr) -> Trace:
    """Turn a traced step into nodes, with calls put in line, so that what they compute can be told apart.

    Args:
        name: how messages call the replicas that run it.
        closed: the traced step.
    """
    return _read(name, closed, [], [Value(variable.aval) for variable in closed.jaxpr.invars])


def _read(name: str, closed: ClosedJaxpr, taken: list[Value], arguments: list[Value]) -> Trace:
    trace = Trace(name, arguments, [], [], [value for value in taken if value.outer is not None])
    trace.outputs = append(trace, closed, [*taken, *arguments])
    return trace


def constant(content: Any, aval: Any = None) -> Value:
    """Return the value of an array that is known."""
    return Value(aval if aval is not None else jax.typeof(content), content=content)


def append(trace: Trace, closed: ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
    """Add what a traced function computes to a trace, and return its results."""
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(constant, closed.consts), *inputs), strict=True))

    def read(atom: Any) -> Value:
        return constant(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        outputs = _read_equation(trace, equation, list(map(read, equation.invars)))
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _read_equation(trace: Trace, equation: Any, inputs: list[Value]) -> list[Value]:
    name, has_bodies = equation.primitive.name, bool(jaxprs.inner_jaxprs(equation))
    has_collective = jaxprs.has_collective(equation) if has_bodies else jaxprs.is_collective(equation)
    inner = jaxprs.callee(equation) if has_bodies else None
    if inner is not None and (name in INLINE_CALLS or has_collective):
        return append(trace, inner, inputs)
    if has_collective and name == "custom_linear_solve":
        solver = jaxprs.solver_of(equation)
        return append(trace, ClosedJaxpr(solver.jaxpr, ()), [inputs[k] for k in solver.operands])
    if has_collective and jaxprs.adds_own_axes(equation):
        first, equation = tracing.own_axes_first(equation)
        inputs = append(trace, first, inputs)
    outputs = [Value(variable.aval) for variable in equation.outvars]
    node = Node(equation, inputs, outputs, has_collective)
    if has_collective:
        parts, handed = jaxprs.parts_of(equation)
        node.handed = [inputs[k] for k in handed]
        node.bodies = [_read_body(trace, part, inputs) for part in parts]
    else:
        node.is_pure = (name in PURE and not has_bodies) or jaxprs.is_function_of_operands(equation)
    trace.nodes.append(node)
    return outputs


def _read_body(trace: Trace, part: jaxprs.Part, inputs: Sequence[Value]) -> Trace:
    taken = [_taken(inputs[k]) for k in part.fixed]
    rest = part.closed.jaxpr.invars[len(taken) :]  # none of a branch
    return _read(trace.name, part.closed, taken, [Value(variable.aval) for variable in rest])


def _taken(value: Value) -> Value:
    return value if value.content is not None else Value(value.aval, outer=value)


def find_loop(trace: Trace, values: Sequence[Value]) -> Node | None:
    """Return a loop, condition or call, of each replica's own, from which a value is computed; known after `compare`."""
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
