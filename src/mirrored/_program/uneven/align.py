"""Which values of several traces of a step, made for different shapes, are alike, and which must wait for a collective.

docs/design/uneven-steps.md argues why equal numbers mean equal values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import UnevenReplicasError
from ..._jax import jaxprs, user_code
from ..._jax.jaxprs import ClosedJaxpr, Jaxpr, Literal
from ..._jax.primitives import INLINE_CALLS

#: What leaves the odd rows out, in messages.
DROP = "strategy.distribute_dataset(dataset, mr.InputOptions(drop_remainder=True))"
#: Cheaper to compute again wherever they are used than to carry from one part to the next.
_CHEAP = frozenset({"broadcast_in_dim", "iota"})
#: Functions that are also there as a jaxpr, which can be compared.
_SAID_TWICE = frozenset({("reduce", "computation")})
#: Device arrays up to this many bytes are compared by content, larger ones by identity.
_COMPARED_BYTES = 1 << 20
#: Calls whose parameters other than the jaxpr matter to derivatives only.
_CUSTOM_DERIVATIVE = frozenset({"custom_jvp_call", "custom_vjp_call"})


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value in one trace.

    Attributes:
        aval: its shape and dtype.
        number: equal to that of another trace's value iff both are computed alike; None: not compared.
        stage: after how many groups of collectives it is known.
        content: the array, for a constant.
    """

    aval: Any
    number: int | None = None
    stage: int = 0
    content: Any = None


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """An equation, with its trace's values in place of the jaxpr's variables."""

    equation: Any
    inputs: list[Value]
    outputs: list[Value]
    is_collective: bool
    stage: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether all traces compute it alike; known after `compare`."""
        return not self.is_collective and bool(self.outputs) and self.outputs[0].number is not None

    @property
    def is_cheap(self) -> bool:
        """Whether to compute it wherever it is used, because that costs less than to carry it there."""
        ready = all(value.content is not None or value.number is not None for value in self.inputs)
        return ready and self.equation.primitive.name in _CHEAP


@dataclasses.dataclass(eq=False, slots=True)
class Trace:
    """One trace: its arguments, its nodes in order, and its outputs."""

    name: str
    arguments: list[Value]
    nodes: list[Node]
    outputs: list[Value]


def read_trace(name: str, closed: ClosedJaxpr) -> Trace:
    """Turn a traced step into nodes, with calls put in line, so that what they compute can be told apart.

    Args:
        name: how messages call the replicas that run it, such as "the replicas with 3 rows".
        closed: the traced step.
    """
    arguments = [Value(variable.aval) for variable in closed.jaxpr.invars]
    nodes: list[Node] = []
    outputs = _append(nodes, closed.jaxpr, [_constant(c) for c in closed.consts], arguments)
    return Trace(name, arguments, nodes, outputs)


def _append(nodes: list[Node], jaxpr: Jaxpr, constants: Sequence[Value], arguments: Sequence[Value]) -> list[Value]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

    def read(atom: Any) -> Value:
        return _constant(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        has_collective = jaxprs.has_collective(equation)
        inner = jaxprs.callee(equation)
        if inner is not None and (equation.primitive.name in INLINE_CALLS or has_collective):
            outputs = _append(nodes, inner.jaxpr, [_constant(c) for c in inner.consts], inputs)
        else:
            outputs = [Value(variable.aval) for variable in equation.outvars]
            nodes.append(Node(equation, inputs, outputs, has_collective))
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _constant(content: Any, aval: Any = None) -> Value:
    return Value(aval if aval is not None else jax.typeof(content), content=content)


# -- which values are alike


def compare(traces: Sequence[Trace], is_common: Sequence[bool]) -> int:
    """Number the values of all traces, put them in stages, and return the number of stages.

    Args:
        traces: the traces; they must reach the same collectives in the same order.
        is_common: for each argument, whether it has one shape in all traces.

    Raises:
        UnevenReplicasError: at the first collective in which the traces differ.
    """
    table: dict[Any, int] = {}
    for trace in traces:
        for position, (argument, common) in enumerate(zip(trace.arguments, is_common, strict=True)):
            argument.number = _number(table, ("argument", position)) if common else None
    parts = [_split_at_collectives(trace) for trace in traces]
    num_collectives = max(map(len, parts)) - 1
    stage = 0
    last_effects = [0] * len(traces)
    for k in range(num_collectives + 1):
        for kind, part in enumerate(parts):
            for node in part[k][0] if k < len(part) else ():
                last_effects[kind] = _number_node(table, node, last_effects[kind])
        if k < num_collectives:
            collectives = [part[k][1] if k < len(part) else None for part in parts]
            _check_same_collective(traces, collectives)
            stage = _number_collectives(table, k, stage, [node for node in collectives if node is not None])
    for value in (value for trace in traces for value in trace.outputs):
        _number_of(table, value)
    _forget_what_is_not_common(traces)
    return stage + 1


def _forget_what_is_not_common(traces: Sequence[Trace]) -> None:
    computed = [[value for node in trace.nodes for value in node.outputs] for trace in traces]
    common = set.intersection(*({value.number for value in values} for values in computed))
    for value in itertools.chain.from_iterable(computed):
        value.number = value.number if value.number in common else None


def _number(table: dict[Any, int], key: Any) -> int:
    return table.setdefault(key, len(table))


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


def _number_of(table: dict[Any, int], value: Value) -> int | None:
    if value.number is None and value.content is not None:
        value.number = _number(table, _content_key(value.content, value.aval))
    return value.number


def _number_node(table: dict[Any, int], node: Node, last_effect: int) -> int:
    """Number a node's outputs, and return the stage of the last effect, which the next one must not come before."""
    operands = [_number_of(table, value) for value in node.inputs]
    stage = max((value.stage for value in node.inputs), default=0)
    number = None
    if not jaxprs.is_function_of_operands(node.equation):
        if node.equation.effects:
            stage = last_effect = max(stage, last_effect)
    elif None not in operands:
        number = _number(table, (_equation_key(node.equation), tuple(operands)))
    node.stage = stage
    for position, value in enumerate(node.outputs):
        value.stage = stage
        value.number = None if number is None else _number(table, (number, position))
    return last_effect


def _number_collectives(table: dict[Any, int], k: int, stage: int, collectives: Sequence[Node]) -> int:
    """Number the k-th collective of all traces; return its stage, that of the one before if it need not wait."""
    for value in (value for node in collectives for value in node.inputs):
        _number_of(table, value)
    ready = max((value.stage for node in collectives for value in node.inputs), default=0)
    stage = max(stage, ready + 1)
    for node in collectives:
        node.stage = stage
        for position, value in enumerate(node.outputs):
            value.stage, value.number = stage, _number(table, ("collective", k, position))
    return stage


def _equation_key(equation: Any) -> Any:
    name, params = equation.primitive.name, equation.params
    if name in _CUSTOM_DERIVATIVE:
        params = {"call_jaxpr": params["call_jaxpr"]}
    compared = sorted(key for key in params if (name, key) not in _SAID_TWICE)
    return (name, tuple((key, _param_key(params[key])) for key in compared))


def _param_key(value: Any) -> Any:
    """Return a hashable that is equal for parameters that mean the same; in doubt, only for one object."""
    if isinstance(value, ClosedJaxpr):
        return (_jaxpr_key(value.jaxpr), tuple(_content_key(c, jax.typeof(c)) for c in value.consts))
    if isinstance(value, Jaxpr):
        return _jaxpr_key(value)
    if isinstance(value, tuple | list):
        return (type(value), tuple(map(_param_key, value)))
    if isinstance(value, np.ndarray | np.generic):
        return _content_key(value, jax.typeof(value))
    if isinstance(value, float | complex):
        return (type(value), repr(value))  # 0.0 and -0.0 differ
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return (type(value), value)


def _jaxpr_key(jaxpr: Jaxpr) -> Any:
    numbers: dict[Any, int] = {}

    def name(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return _content_key(atom.val, atom.aval)
        return (numbers.setdefault(atom, len(numbers)), str(atom.aval))

    first = tuple(map(name, (*jaxpr.constvars, *jaxpr.invars)))
    equations = tuple(
        (_equation_key(equation), tuple(map(name, equation.invars)), tuple(map(name, equation.outvars)))
        for equation in jaxpr.eqns
    )
    return (len(jaxpr.constvars), first, equations, tuple(map(name, jaxpr.outvars)))


def _content_key(content: Any, aval: Any) -> Any:
    if isinstance(content, jax.Array) and not _is_small(content):
        return ("array", id(content))
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        content = jax.random.key_data(content)
    array = np.asarray(content)
    return ("content", str(aval), array.dtype, array.shape, hashlib.sha256(array.tobytes()).digest())


def _is_small(array: jax.Array) -> bool:
    """Whether to compare an array by content; a larger one, that a step makes anew in each trace, is not worth the transfer."""
    is_here = not isinstance(array, jax.core.Tracer) and array.is_fully_addressable
    return is_here and array.nbytes <= _COMPARED_BYTES


# -- the collectives that all must share


def _check_same_collective(traces: Sequence[Trace], collectives: Sequence[Node | None]) -> None:
    first = collectives[0]
    for trace, node in zip(traces[1:], collectives[1:], strict=True):
        if first is not None and node is not None and _collective_key(first) == _collective_key(node):
            continue
        own, other = _describe(first), _describe(node)
        inside = " (alike from outside, but something inside differs, such as a number made of x.shape[0])"
        raise UnevenReplicasError(
            "the batch does not divide evenly among the replicas, and in this uneven step replicas with different numbers "
            f"of rows do not reach the same collectives: {traces[0].name} {own}, {trace.name} {other}"
            f"{inside if own == other else ''}. A collective needs one shape on all replicas, however many rows they have: "
            "sum over the rows first, for example ctx.all_reduce('sum', jnp.sum(x, axis=0)); join rows with "
            "ctx.all_gather(x, axis=0); keep loops around collectives independent of the number of rows, or put the loop "
            f"around strategy.run with mr.scan. Or leave the odd rows out: {DROP}."
        )


def _collective_key(node: Node) -> Any:
    return (_equation_key(node.equation), [(value.aval.shape, value.aval.dtype) for value in node.inputs])


def _describe(node: Node | None) -> str:
    if node is None:
        return "reach no further one"
    equation = node.equation
    operands = ", ".join(f"{value.aval.dtype}{list(value.aval.shape)}" for value in node.inputs)
    name = equation.primitive.name
    kind = f"`{name}`" if not list(jaxprs.inner_jaxprs(equation)) else f"a collective inside `{name}`"
    return f"reach {kind} of {operands} at {user_code.equation_line(equation) or '<unknown>'}"
