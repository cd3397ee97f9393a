"""A traced step as values, and nodes that compute them; loops with collectives inside have bodies of nodes.

Beside them are the keys by which the equations and constants of several traces are compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import dead_code, jaxprs
from ..._jax.interpreter import Flattening
from ..._jax.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Literal
from ..._jax.primitives import CUSTOM_DERIVATIVE, FILLS, LOOPS, SAID_TWICE, SIMPLE

#: Device arrays up to this many bytes are compared by content, larger ones, which are not worth the transfer, by identity.
_COMPARED_BYTES = 1 << 20


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value in one trace."""

    aval: Any
    maker: Node | None = None  # the node that computes it; None for arguments and constants
    number: int | None = None  # equal to that of another trace's value iff both are computed alike; None: not compared
    stage: int = 0  # from which stage on it is known
    is_own: bool = False  # whether each replica of a device has its own; only `virtual` tells
    content: Any = None  # the array, for a constant
    outer: Value | None = None  # for a value that a loop's body captures: its value outside of the loop


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """An equation, with values in place of the jaxpr's variables."""

    equation: Equation
    inputs: list[Value]
    outputs: list[Value]
    is_collective: bool
    is_pure: bool  # whether it is known to compute its outputs from its inputs alone
    #: The bodies of a loop or condition with collectives inside; else none.
    bodies: list[Trace] = dataclasses.field(default_factory=list)
    #: The inputs of a collective that are one array for all traces; of a loop, the carry and the rows.
    joint_inputs: list[Value] = dataclasses.field(default_factory=list)
    stage: int = 0  # the number of groups of collectives before it; a collective begins its stage
    is_own: bool = False  # whether it is not common to all traces, or to all replicas; known after `compare`, or in an `Agenda`
    by_rows: bool = False  # whether the replicas' rows are one axis in it; only `virtual` tells

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

    @property
    def collectives(self) -> list[Node]:
        return [node for node in self.nodes if node.is_collective]


def read_trace(name: str, closed: ClosedJaxpr, captured: Sequence[Value] = ()) -> Trace:
    """Turn a traced step, or a loop's body whose first arguments are captured, into nodes; inline calls."""
    arguments = [Value(variable.aval) for variable in closed.jaxpr.invars[len(captured) :]]
    reading = Reading()
    outputs = reading.run_closed(closed, [*captured, *arguments])
    trace = Trace(name, arguments, reading.nodes, outputs, [value for value in captured if value.outer is not None])
    from_outside = lambda value: value if value.content is not None else Value(value.aval, outer=value)  # noqa: E731
    for node in trace.collectives:
        loop = jaxprs.loop_of(node.equation)
        node.joint_inputs = [node.inputs[k] for k in loop.not_fixed]
        node.bodies = [read_trace(name, part.closed, [from_outside(node.inputs[k]) for k in part.fixed]) for part in loop.parts]
    return trace


class Reading(Flattening[Value]):
    """A walk that makes nodes."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []  # in order

    def constant(self, value: Any, aval: jax.core.AbstractValue) -> Value:
        return Value(aval, content=value)

    def plain(self, equation: Equation, values: list[Value]) -> list[Value]:
        is_simple = equation.primitive.name in SIMPLE
        is_collective = not is_simple and jaxprs.has_collective(equation)
        node = Node(equation, values, [], is_collective, is_simple or jaxprs.is_function_of_operands(equation))
        node.outputs = [Value(variable.aval, node) for variable in equation.outvars]
        self.nodes.append(node)
        return node.outputs


def stages_of(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the nodes of each stage: its collectives, and what runs before the next ones."""
    last = max((node.stage for node in nodes), default=0)
    return [[node for node in nodes if node.stage == stage] for stage in range(last + 1)]


def find_undivided(values: Sequence[Value]) -> Node | None:
    """Return a node that JAX cannot cut, if an uncommon one of these values depends on it; call this after `compare`."""
    seen: set[Value] = set()
    waiting = [value for value in values if value.number is None]
    while waiting:
        value = waiting.pop()
        node = value.maker
        if value in seen or node is None or not node.is_own:
            continue
        seen.add(value)
        if jaxprs.inner_jaxprs(node.equation) and (not node.is_pure or dead_code.is_undivided(node.equation)):
            return node
        waiting += node.inputs
    return None


# -- keys: when do two equations, or two constants, of different traces mean the same?


def equation_key(equation: Equation) -> Any:
    """Return a hashable that is equal for equations that compute the same from equal operands."""
    name, params = equation.primitive.name, equation.params
    if name in CUSTOM_DERIVATIVE:
        params = {"call_jaxpr": params["call_jaxpr"]}
    compared = sorted([key for key in params if (name, key) not in SAID_TWICE])
    parts = jaxprs.loop_of(equation)[1:] if name in LOOPS else ()  # which operands are carried, and which are rows
    return (name, parts, tuple([(key, param_key(params[key])) for key in compared]))


def param_key(value: Any) -> Any:
    """Return a hashable that is equal for parameters that mean the same; in doubt, only for one object."""
    if isinstance(value, ClosedJaxpr):
        return (_jaxpr_key(value.jaxpr), tuple(content_key(c, jax.typeof(c)) for c in value.consts))
    if isinstance(value, Jaxpr):
        return _jaxpr_key(value)
    if isinstance(value, tuple | list):
        return (type(value), tuple(map(param_key, value)))
    if isinstance(value, np.ndarray | np.generic):
        return content_key(value, jax.typeof(value))
    if isinstance(value, float | complex):
        return (type(value), repr(value))  # 0.0 and -0.0 differ
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return (type(value), value)


def _jaxpr_key(jaxpr: Jaxpr) -> Any:
    numbers: dict[Any, int] = {}

    def name(atom: Atom) -> Any:
        if isinstance(atom, Literal):
            return content_key(atom.val, atom.aval)
        return (numbers.setdefault(atom, len(numbers)), str(atom.aval))

    first = tuple(map(name, (*jaxpr.constvars, *jaxpr.invars)))
    equations = tuple(
        (equation_key(equation), tuple(map(name, equation.invars)), tuple(map(name, equation.outvars))) for equation in jaxpr.eqns
    )
    return (len(jaxpr.constvars), first, equations, tuple(map(name, jaxpr.outvars)))


def content_key(content: Any, aval: Any) -> Any:
    """Return a hashable that is equal for constants of equal type and bits."""
    if isinstance(content, jax.Array):
        is_here = not isinstance(content, jax.core.Tracer) and content.is_fully_addressable
        if not is_here or content.nbytes > _COMPARED_BYTES:
            return ("array", id(content))
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        content = jax.random.key_data(content)
    array = np.asarray(content)
    bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return ("content", str(aval), array.dtype, array.shape, hashlib.sha256(bits).digest())
