"""How much does each replica weigh in a mean over the replicas, when they have different numbers of rows?

A mean over the replicas of a mean over each one's rows is the mean over all rows, so a replica weighs as much as it
has rows, and one without any does not count. Of anything else that depends on the rows nobody can tell, and it is refused.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import UnevenReplicasError
from ..._jax import jaxprs, means, user_code
from .nodes import Node, Trace, Value, append
from .pairing import BEGINNING, DROP

#: The value of each trace in one place of the program.
Row = Sequence[Value]
#: What each kind of replica has of all rows; None: nothing depends on the rows.
Shares = tuple[Fraction, ...] | None

#: They give each element of their first operand a place, and do nothing else.
_MOVES = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "imag", "neg", "optimization_barrier", "real",
    "reduce_precision", "reshape", "rev", "slice", "split", "squeeze", "transpose", "unstack",
})  # fmt: skip
#: A large number of rows is rounded when it becomes a float32.
_ROUNDING = Fraction(1, 10**6)
_SUMS = frozenset({"add", "add_any", "sub"})
_JOINS = frozenset({"complex", "concatenate", "stack"})


class _Unknown(Exception):
    """It cannot be told how much each replica weighs."""


def weigh(traces: Sequence[Trace], of_replica: Sequence[int]) -> bool:
    """Let each replica weigh what it has of all rows in the means over the replicas.

    Args:
        traces: the traces, compared.
        of_replica: which of them each replica runs.

    Returns:
        Whether something was changed, so that the traces must be compared again.

    Raises:
        UnevenReplicasError: for a mean of something that depends on the rows and is no mean over them.
    """
    own: set[Value] = set()
    for trace in traces:
        _find_own(trace, own)
    return _Weigher(of_replica, own).weigh(traces)


class _Weigher:
    """Weighs the means in the traces of a step, and in the bodies of its loops.

    Args:
        of_replica: which of the traces each replica runs.
        own: the values that may depend on how many rows a replica has.
    """

    def __init__(self, of_replica: Sequence[int], own: set[Value]) -> None:
        self._of_replica = of_replica
        self._own = own
        self._makers: dict[Value, Node] = {}
        self._users: dict[Value, list[Node]] = defaultdict(list)
        self._results: set[Value] = set()

    def weigh(self, traces: Sequence[Trace]) -> bool:
        self._results.update(value for trace in traces for value in trace.outputs)
        for node in (node for trace in traces for node in trace.nodes):
            self._makers.update((value, node) for value in node.outputs)
            for value in dict.fromkeys(node.inputs):
                self._users[value].append(node)
        changed = False
        for nodes in list(zip(*([node for node in trace.nodes if node.is_collective] for trace in traces), strict=True)):
            for bodies in zip(*(node.bodies for node in nodes), strict=True):
                changed |= self.weigh(bodies)
            if nodes[0].equation.primitive.name == "psum" and any(means.is_of_mean(node.equation) for node in nodes):
                for position in range(len(nodes[0].inputs)):
                    try:
                        changed |= self._weigh(traces, nodes, position)
                    except _Unknown:
                        raise UnevenReplicasError(_unknown(nodes[0])) from None
        return changed

    def _weigh(self, traces: Sequence[Trace], nodes: Sequence[Node], position: int) -> bool:
        inputs, outputs = [node.inputs[position] for node in nodes], [node.outputs[position] for node in nodes]
        if any(map(jaxprs.is_over_groups, (node.equation for node in nodes))) and not self._is_free(inputs):
            raise _Unknown
        before = [self._division_before(value) for value in inputs]
        is_turned_round = None not in before
        divisions = [node for node in before if node is not None]
        if not is_turned_round:
            divisions = [node for node in map(self._only_end, outputs) if node is not None and _is_division_of_mean(node)]
        if not any(self._users[value] for value in outputs) and self._results.isdisjoint(outputs):
            return False
        if len(divisions) < len(nodes):
            raise _Unknown
        sizes = [_number(node.inputs[1]) for node in divisions]
        if len(set(sizes)) > 1:  # over the replicas and over rows, by a vmap
            rows = sum(sizes[kind] for kind in self._of_replica) / len(self._of_replica)
            for node in divisions:
                dtype = node.inputs[1].aval.dtype
                node.inputs[1] = Value(node.inputs[1].aval, content=np.asarray(float(rows), dtype))
            return True
        shares = self._shares_after(outputs) if is_turned_round else self._shares_of(inputs)
        factors = [share * len(self._of_replica) for share in shares or ()]
        if all(factor == 1 for factor in factors):
            return False
        for trace, node, factor in zip(traces, nodes, factors, strict=True):
            (scale_output if is_turned_round else scale_input)(trace, node, position, float(factor))
        return True

    # -- what a value is

    def _is_free(self, row: Row) -> bool:
        """Whether a value is computed alike in all traces, from what does not depend on the rows."""
        alike = row[0].number is not None and len({value.number for value in row}) == 1
        return alike and self._own.isdisjoint(row)

    def _origin(self, value: Value) -> Value:
        """Return what a value is apart from the places of its elements."""
        while True:
            node = self._makers.get(value)
            if value.outer is not None:
                value = value.outer
            elif node is not None and node.equation.primitive.name in _MOVES:
                value = node.inputs[0]
            else:
                return value

    def _division_before(self, value: Value) -> Node | None:
        """Return the division that makes the operand of a sum which is a mean turned round, as in a gradient."""
        node = self._makers.get(self._origin(value))
        if node is None or not _is_division_of_mean(node):
            return None
        divided = self._origin(node.inputs[0])
        total = self._makers.get(divided)
        if total is None or not total.is_collective or not means.is_of_mean(total.equation):
            return node
        ends_a_mean = self._division_before(total.inputs[total.outputs.index(divided)]) is None
        return None if ends_a_mean else node

    def _ends(self, value: Value) -> Iterator[tuple[Node, Value]]:
        """Yield the uses of a value, also after its elements have been given other places."""
        if value in self._results:
            raise _Unknown
        for node in self._users[value]:
            if node.equation.primitive.name in _MOVES:
                for moved in node.outputs:
                    yield from self._ends(moved)
            else:
                yield node, value

    def _only_end(self, value: Value) -> Node | None:
        ends = list(self._ends(value))
        return ends[0][0] if len(ends) == 1 and ends[0][0].inputs[0] is ends[0][1] else None

    def _share(self, counts: Sequence[Fraction]) -> Shares:
        total = sum(counts[kind] for kind in self._of_replica)
        if total == 0:
            return None
        return tuple(count / total for count in counts)

    def _divisor(self, nodes: Sequence[Node]) -> list[Fraction] | None:
        """Return the numbers that the traces divide by, if they are known and not the same in all."""
        values = [self._origin(node.inputs[1]) for node in nodes]
        if any(value.content is None or value.aval.shape != () for value in values):
            return None
        numbers = [_number(value) for value in values]
        return numbers if len(set(numbers)) > 1 else None

    def _shares_of(self, row: Row) -> Shares:
        """Return what each kind has of the rows that a value is the mean of."""
        if self._is_free(row):
            return None
        row = [self._origin(value) for value in row]
        if self._is_free(row):
            return None
        if any(value not in self._makers for value in row):
            raise _Unknown
        nodes = [self._makers[value] for value in row]
        names = {node.equation.primitive.name for node in nodes}
        if len(names) > 1 or len({len(node.inputs) for node in nodes}) > 1 or any(node.is_collective for node in nodes):
            raise _Unknown
        [name] = names
        operands = list(zip(*(node.inputs for node in nodes), strict=True))
        if name == "div" and (divisor := self._divisor(nodes)) is not None:
            counts = self._counts_of_sum(operands[0])
            if not _are_proportional(counts, divisor):
                raise _Unknown
            return self._share(counts)
        rest = [operand for operand in operands if not self._is_free(operand)]
        is_scaled = name in ("mul", "div") and len(rest) == 1 and (name == "mul" or rest[0] is operands[0])
        is_joined = name in _JOINS and len(rest) == len(operands)
        if name in _SUMS or is_scaled or is_joined:
            found = list(map(self._shares_of, rest))
            if not found or any(share != found[0] for share in found):
                raise _Unknown
            return found[0]
        if name == "reduce_sum" and len(set(map(_num_added, nodes))) == 1:
            return self._shares_of(operands[0])
        raise _Unknown

    def _counts_of_sum(self, row: Row) -> list[Fraction]:
        """Return how many elements are added up in a value, in each trace."""
        values = [self._origin(value) for value in row]
        nodes = [self._makers[value] for value in values if value in self._makers]
        names = {node.equation.primitive.name for node in nodes}
        if len(nodes) < len(row) or len(names) > 1:
            raise _Unknown
        operands = list(zip(*(node.inputs for node in nodes), strict=True))
        if names == {"reduce_sum"}:
            counts = list(map(_num_added, nodes))
            return counts if len(set(counts)) > 1 else self._counts_of_sum(operands[0])
        rest = [operand for operand in operands if not self._is_free(operand)]
        if len(rest) == 1 and (names == {"mul"} or (names == {"div"} and rest[0] is operands[0])):
            return self._counts_of_sum(rest[0])
        raise _Unknown

    def _shares_after(self, row: Row) -> Shares:
        """Return what each kind has of the rows, where a gradient goes back through a mean over them: by what it divides."""
        ends = [list(self._ends(value)) for value in row]
        if len(set(map(len, ends))) > 1:
            raise _Unknown
        found: list[Shares] = []
        for uses in zip(*ends, strict=True):
            nodes = [node for node, _ in uses]
            if any(node.equation.primitive.name != "div" or node.inputs[0] is not value for node, value in uses):
                raise _Unknown
            divisor = self._divisor(nodes)
            if divisor is not None:
                found.append(self._share(divisor))
            elif self._is_free([node.inputs[1] for node in nodes]):
                found.append(self._shares_after([node.outputs[0] for node in nodes]))
            else:
                raise _Unknown
        if not found or any(share != found[0] for share in found):
            raise _Unknown
        return found[0]


def _is_division_of_mean(node: Node) -> bool:
    if node.equation.primitive.name != "div" or not means.is_of_mean(node.equation):
        return False
    divisor = node.inputs[1]
    return divisor.content is not None and divisor.aval.shape == ()


def _number(value: Value) -> Fraction:
    number = np.asarray(value.content).astype(np.complex128).item()
    if number.imag or not math.isfinite(number.real):
        raise _Unknown
    return Fraction(number.real)


def _num_added(node: Node) -> Fraction:
    shape = node.inputs[0].aval.shape
    return Fraction(math.prod(shape[axis] for axis in node.equation.params["axes"]))


def _are_proportional(a: Sequence[Fraction], b: Sequence[Fraction]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(abs(x * v - y * u) <= x * v * _ROUNDING for (x, y), (u, v) in itertools.combinations(pairs, 2))


# -- which values may depend on how many rows a replica has


def _find_own(trace: Trace, own: set[Value]) -> None:
    """Add the values of a trace to `own` that may depend on the replica's number of rows, given its arguments that do."""
    for value in (*trace.arguments, *trace.taken):
        if value.number is None or value.outer in own:
            own.add(value)
    for node in trace.nodes:
        if node.bodies:
            _find_own_in_loop(node, own)
        elif not node.is_collective and not own.isdisjoint(node.inputs):
            own.update(node.outputs)
        own.update(value for value in node.outputs if value.number is None)
    own.update(value for value in trace.outputs if value.number is None)


def _find_own_in_loop(node: Node, own: set[Value]) -> None:
    for body in node.bodies:
        own.update(inner for inner, outer in zip(body.arguments, node.handed, strict=False) if outer in own)
    num_carry = {"scan": lambda: jaxprs.scan_of(node.equation).num_carry, "while": lambda: len(node.outputs)}
    count = num_carry.get(node.equation.primitive.name, lambda: 0)()
    size = -1
    while size != len(own):
        size = len(own)
        for body in node.bodies:
            _find_own(body, own)
        carried = [i for i in range(count) if node.bodies[-1].outputs[i] in own]
        own.update(body.arguments[i] for body in node.bodies for i in carried)
    results = [body.outputs for body in node.giving]
    own.update(node.outputs[i] for outputs in results for i, value in enumerate(outputs) if value in own)
    own.update(node.outputs[i] for i in range(count) if node.handed[i] in own)


# -- what is changed


def scale_input(trace: Trace, node: Node, position: int, factor: float) -> None:
    """Multiply what goes into a collective by a number."""
    node.inputs[position] = node.handed[position] = _scaled(trace, trace.nodes.index(node), node.inputs[position], factor)


def scale_output(trace: Trace, node: Node, position: int, factor: float) -> None:
    """Multiply what comes out of a collective by a number."""
    known = node.outputs[position]
    node.outputs[position] = Value(known.aval)
    scaled = _scaled(trace, trace.nodes.index(node) + 1, node.outputs[position], factor)
    for other in trace.nodes:
        other.outputs = [known if value is scaled else value for value in other.outputs]


def _scaled(trace: Trace, position: int, value: Value, factor: float) -> Value:
    """Add the product of a value and a number to a trace. Times 0 is 0, also for a mean over no rows, which is NaN."""

    def scaled(array: Any) -> Any:
        return array * factor if factor else jnp.zeros_like(array)

    added = Trace(trace.name, [], [], [])
    [result] = append(added, jax.make_jaxpr(scaled)(jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)), [value])
    trace.nodes[position:position] = added.nodes
    return result


def _unknown(node: Node) -> str:
    return (
        f"{BEGINNING}take a mean over the replicas, at {user_code.equation_line(node.equation) or '<unknown>'}, of a value "
        "that depends on the rows and is not itself a mean over them, or that is used in another way besides, so that it cannot "
        "be told how much each replica weighs. For the mean over all rows write "
        "mr.get_strategy().reduce('mean', values, axis=0) in the step, with one value for each row; for what is a mean "
        "over own rows, or a gradient of one, ctx.all_reduce('mean', gradients, by_rows=True); for the "
        "mean of one value of each replica, however many rows it has: ctx.all_reduce('sum', value / ctx.num_replicas_in_sync). "
        f"Or leave the odd rows out: {DROP}."
    )
