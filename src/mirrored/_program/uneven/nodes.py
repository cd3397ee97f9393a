"""What a trace of an uneven step consists of: values, and the nodes that compute them, also inside loops with collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ..._jax import jaxprs, means, tracing, ways
from ..._jax.jaxprs import ClosedJaxpr, Literal
from ..._jax.primitives import INLINE_CALLS
from . import apart

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
        of_rows: whether it depends on arguments that have another shape in other traces, and no collective is between.
    """

    aval: Any
    number: int | None = None
    stage: int = 0
    content: Any = None
    outer: Value | None = None
    of_rows: bool = False


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """An equation, with its trace's values in place of the jaxpr's variables.

    Attributes:
        bodies: what a loop or condition with collectives inside runs; empty for everything else.
        handed: the inputs that are handed over as one array of all traces, when it is a collective: those of a loop that its
            bodies do not take as they are.
        path: the transformations that have made it, see `_jax/ways`.
    """

    equation: Any
    inputs: list[Value]
    outputs: list[Value]
    is_collective: bool
    bodies: list[Trace] = dataclasses.field(default_factory=list)
    handed: list[Value] = dataclasses.field(default_factory=list)
    path: str = ""
    stage: int = 0

    @property
    def giving(self) -> list[Trace]:
        """Those of its bodies that give its outputs: all branches of a condition, and not the condition of a loop."""
        return self.bodies if self.equation.primitive.name == "cond" else self.bodies[-1:]

    @property
    def is_shared(self) -> bool:
        """Whether all traces compute it alike; known after `compare`."""
        return not self.is_collective and bool(self.outputs) and self.outputs[0].number is not None

    @property
    def is_own(self) -> bool:
        """Whether each trace computes it for itself."""
        return not self.is_collective and not self.is_shared

    @property
    def is_cheap(self) -> bool:
        """Whether to compute it wherever it is used, because that costs less than to carry it there."""
        ready = all(value.content is not None or value.number is not None for value in self.inputs)
        return ready and self.equation.primitive.name in _CHEAP


@dataclasses.dataclass(eq=False, slots=True)
class Trace:
    """One trace, or a body of a loop in it: its arguments, its nodes in order, and its outputs.

    Attributes:
        name: how messages call the replicas that run it, such as "the replicas with 3 rows".
        taken: what it takes from outside as it is, for a body of a loop.
        num_stages: the number of stages, after `compare`.
        axis: that of the replicas.
    """

    name: str
    arguments: list[Value]
    nodes: list[Node]
    outputs: list[Value]
    taken: list[Value] = dataclasses.field(default_factory=list)
    num_stages: int = 1
    axis: Any = None


def read_trace(name: str, closed: ClosedJaxpr, is_common: Sequence[bool], axis: Any) -> Trace:
    """Turn a traced step into nodes, with calls put in line, so that what they compute can be told apart.

    Args:
        name: how messages call the replicas that run it.
        closed: the traced step.
        is_common: for each argument, whether it has one shape in all traces.
        axis: that of the replicas.
    """
    arguments = zip(closed.jaxpr.invars, is_common, strict=True)
    return _read(name, closed, [], [Value(variable.aval, of_rows=not common) for variable, common in arguments], axis)


def _read(name: str, closed: ClosedJaxpr, taken: list[Value], arguments: list[Value], axis: Any, path: str = "") -> Trace:
    trace = Trace(name, arguments, [], [], [value for value in taken if value.outer is not None], axis=axis)
    trace.outputs = append(trace, closed, [*taken, *arguments], path)
    return trace


def constant(content: Any, aval: Any = None) -> Value:
    """Return the value of an array that is known."""
    return Value(aval if aval is not None else jax.typeof(content), content=content)


def append(trace: Trace, closed: ClosedJaxpr, inputs: Sequence[Value], path: str = "") -> list[Value]:
    """Add what a traced function computes to a trace, and return its results; `path` is that of what calls it."""
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(constant, closed.consts), *inputs), strict=True))

    def read(atom: Any) -> Value:
        return constant(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        outputs = _read_equation(trace, equation, list(map(read, equation.invars)), ways.path_of(path, equation))
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _read_equation(trace: Trace, equation: Any, inputs: list[Value], path: str) -> list[Value]:
    has_collective = jaxprs.has_collective(equation)
    inner = jaxprs.callee(equation)
    if inner is not None and (equation.primitive.name in INLINE_CALLS or has_collective):
        return append(trace, inner, inputs, path)
    if has_collective and equation.primitive.name == "custom_linear_solve":
        solver = jaxprs.solver_of(equation)
        return append(trace, ClosedJaxpr(solver.jaxpr, ()), [inputs[k] for k in solver.operands], path)
    if jaxprs.adds_own_axes(equation):
        first, equation = tracing.own_axes_first(equation)
        inputs = append(trace, first, inputs)
    if (spread := _spread_before_mean(trace, equation, inputs)) is not None:
        total = Value(spread.inputs[0].aval)
        outputs = [Value(variable.aval) for variable in equation.outvars]
        trace.nodes.append(Node(equation, list(spread.inputs), [total], True, [], list(spread.inputs), path))
        trace.nodes.append(Node(spread.equation, [total], outputs, False))
        return outputs
    of_rows = not jaxprs.is_collective(equation) and any(value.of_rows for value in inputs)
    outputs = [Value(variable.aval, of_rows=of_rows) for variable in equation.outvars]
    node = Node(equation, inputs, list(outputs), has_collective, path=path)
    if has_collective:
        parts, handed = jaxprs.parts_of(equation)
        node.handed = [inputs[k] for k in handed]
        node.bodies = [_read_body(trace, part, inputs, node.handed, path) for part in parts]
        for value, *given in zip(outputs, *(body.outputs for body in node.giving), strict=True) if node.bodies else ():
            value.of_rows = any(one.of_rows for one in given)
    trace.nodes.append(node)
    if of_rows and not has_collective and list(jaxprs.inner_jaxprs(equation)):
        for positions, needed in apart.groups(equation):
            for position, value in _apart(trace, node, equation, positions, needed, path):
                outputs[position] = value
    return outputs


def _apart(
    trace: Trace, node: Node, equation: Any, positions: Sequence[int], needed: Sequence[bool], path: str
) -> Iterable[tuple[int, Value]]:
    """Compute results of a loop, condition or call by themselves, if they depend on no rows, and return them."""
    if any(value.of_rows for value, own in zip(node.inputs, needed, strict=True) if own):
        return ()
    if (found := apart.alone(equation, positions, needed, trace.axis)) is None:
        return ()
    closed, taken = found
    node.equation = apart.judged_elsewhere(node.equation, closed)
    return zip(positions, append(trace, closed, [node.inputs[k] for k in taken], path), strict=True)


def _spread_before_mean(trace: Trace, equation: Any, inputs: Sequence[Value]) -> Node | None:
    """Return what repeats the operand of a mean's sum, such as for each row.

    The gradient of a mean over the replicas and a `vmap` over rows is first repeated for each row, and then summed over the
    replicas, which have different numbers of them. It may as well be summed first.
    """
    if equation.primitive.name != "psum" or len(inputs) != 1 or not means.is_of_mean(equation):
        return None
    maker = next((node for node in reversed(trace.nodes) if inputs[0] in node.outputs), None)
    return maker if maker is not None and maker.equation.primitive.name == "broadcast_in_dim" else None


def _read_body(trace: Trace, part: jaxprs.Part, inputs: Sequence[Value], handed: Sequence[Value], path: str) -> Trace:
    taken = [_taken(inputs[k]) for k in part.fixed]
    rest = part.closed.jaxpr.invars[len(taken) :]  # none of a branch
    arguments = [Value(variable.aval, of_rows=value.of_rows) for variable, value in zip(rest, handed, strict=False)]
    return _read(trace.name, part.closed, taken, arguments, trace.axis, path)


def renew(traces: Sequence[Trace]) -> None:
    """Forget what was found out by comparing traces."""
    for trace in traces:
        for value in (*trace.arguments, *trace.taken, *trace.outputs):
            value.number, value.stage = None, 0
        for node in trace.nodes:
            for value in (*node.inputs, *node.outputs):
                value.number, value.stage = None, 0
            renew(node.bodies)


def _taken(value: Value) -> Value:
    return value if value.content is not None else Value(value.aval, outer=value, of_rows=value.of_rows)
