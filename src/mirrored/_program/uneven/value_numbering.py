"""Which values are common to several traces of a step, made for different shapes, and which must wait for a collective?

The collectives are paired in the order in which they are reached. docs/design/uneven-steps.md argues why equal numbers mean
equal values.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ..._errors import UnevenReplicasError
from ..._jax import dead_code, jaxprs, user_code
from ..._jax.marks import Mark, Purpose
from ..._jax.primitives import SIMPLE
from .nodes import Node, Trace, Value, content_key, equation_key

#: What leaves the odd rows out, in messages.
DROP = "strategy.distribute_dataset(dataset, mr.InputOptions(drop_remainder=True))"
#: How messages begin.
BEGINNING = (
    "the batch does not divide evenly among the replicas, and in this uneven step replicas with different numbers of rows "
)


def compare(traces: Sequence[Trace], is_common: Sequence[bool]) -> None:
    """Number the values of all traces, also inside loops with collectives, and put them in stages.

    `is_common` tells of each argument whether it has one shape in all traces.

    Raises:
        UnevenReplicasError: at the first collective in which the traces differ.
    """
    numbering = _Numbering()
    for common, row in zip(is_common, zip(*(trace.arguments for trace in traces), strict=True), strict=True):
        numbering.number_row(row, common)
    numbering.compare(traces)
    _drop_uncommon_numbers(traces)


class _Numbering:
    """The numbers given so far: two values have one number iff they have one key."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def compare(self, traces: Sequence[Trace]) -> None:
        """Number the values of traces whose arguments are numbered."""
        check_collectives(traces)
        stage = 0
        walks = [self._number_nodes(trace) for trace in traces]
        for collectives in [*zip(*(trace.collectives for trace in traces), strict=True), ()]:
            before = [itertools.takewhile(lambda node: not node.is_collective, walk) for walk in walks]
            for loops in itertools.zip_longest(*before):
                self._number_loops([loop for loop in loops if loop is not None], None not in loops)
            if collectives:
                stage = self._number_collectives(stage, collectives)
        for trace in traces:
            for value in trace.outputs:
                self._number_of(value)

    def number_row(self, row: Sequence[Value], is_common: bool) -> None:
        """Give a row of values, one from each trace, one new number, or none."""
        number = self._number(object()) if is_common else None
        for value in row:
            value.number = number

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _number_of(self, value: Value) -> int | None:
        if value.number is None and value.content is not None:
            value.number = self._number(content_key(value.content, value.aval))
        elif value.number is None and value.outer is not None:
            value.number = self._number_of(value.outer)
        return value.number

    def _number_nodes(self, trace: Trace) -> Iterator[Node]:
        """Number the nodes of a trace in order; yield collectives and nodes with jaxprs inside, for the caller to number."""
        last_effect = 0  # its stage; the next one must not come before it
        for node in trace.nodes:
            is_simple = node.equation.primitive.name in SIMPLE
            if node.is_collective or (node.is_pure and not is_simple and jaxprs.inner_jaxprs(node.equation)):
                yield node
            else:
                last_effect = self._number_node(node, last_effect)

    def _number_node(self, node: Node, last_effect: int, by_results: bool = False) -> int:
        """Number a node's outputs; return the stage of the last effect: the next effect cannot have an earlier one."""
        operands = [self._number_of(value) if value.number is None else value.number for value in node.inputs]
        stage = max([value.stage for value in node.inputs], default=0)
        number = None
        if not node.is_pure:
            if node.equation.effects:
                stage = last_effect = max(stage, last_effect)
        elif None not in operands and not by_results:
            number = self._number((equation_key(node.equation), tuple(operands)))
        node.stage = stage
        for position, value in enumerate(node.outputs):
            value.stage, value.number = stage, number
            if number is not None and position:  # the first result has the number of the node
                value.number = self._number((number, position))
        return last_effect

    def _number_loops(self, nodes: Sequence[Node], is_in_all: bool) -> None:
        """Number the next loop, condition or call of each trace: as a whole if all traces have the same, else by results."""
        keys = {(equation_key(node.equation), *map(self._number_of, node.inputs)) for node in nodes}
        for node in nodes:
            self._number_node(node, 0, by_results=not is_in_all or len(keys) > 1)
            if node.outputs and node.outputs[0].number is None:
                self._number_each(node)

    def _number_each(self, node: Node) -> None:
        """Number each result of a loop, condition or call by the least code that computes it: a counter may be common."""
        whole = dead_code.opened(node.equation)
        for position, value in enumerate(node.outputs):
            alone = dead_code.computing(whole, [position]) or dead_code.all_of(whole)
            operands = tuple([node.inputs[k].number for k in alone.operands])
            if None not in operands and jaxprs.is_function_of_operands(alone.equation):
                value.number = self._number((equation_key(alone.equation), operands, alone.results.index(position)))

    def _number_collectives(self, stage: int, collectives: Sequence[Node]) -> int:
        """Number one collective of all traces. Return its stage: the last one's, or the next if it must wait for that."""
        for value in (value for node in collectives for value in node.inputs):
            self._number_of(value)
        ready = max((value.stage for node in collectives for value in node.inputs), default=0)
        stage = max(stage, ready + 1)
        for bodies in zip(*(node.bodies for node in collectives), strict=True):
            for row in zip(*(body.arguments for body in bodies), strict=True):
                self.number_row(row, _has_one_shape(row))
            self.compare(bodies)
        for row in zip(*(node.outputs for node in collectives), strict=True):
            self.number_row(row, _has_one_shape(row))
            for value in row:
                value.stage = stage
        for node in collectives:
            node.stage = stage
        return stage


def _has_one_shape(row: Sequence[Value]) -> bool:
    return len({value.aval.shape for value in row}) == 1


def _drop_uncommon_numbers(traces: Sequence[Trace]) -> None:
    """Drop numbers that are missing in some trace, and those of all values computed from such values."""
    for trace in traces:
        for value in trace.captured:
            value.number = value.outer.number if value.outer is not None else None
    computed = [[value for node in trace.nodes for value in node.outputs] for trace in traces]
    common = set.intersection(*[{value.number for value in values} for values in computed])
    for value in itertools.chain.from_iterable(computed):
        if value.number not in common:
            value.number = None
    for trace in traces:
        parts = [[node] if node.equation.primitive.name in SIMPLE else _take_common_out(node) for node in trace.nodes]
        trace.nodes = list(itertools.chain.from_iterable(parts))
    for node in itertools.chain.from_iterable([trace.nodes for trace in traces]):
        if node.is_collective:
            continue
        if None in [value.number for value in (*node.inputs, *node.outputs)]:
            for value in node.outputs:
                value.number = None
        node.is_own = not node.outputs or node.outputs[0].number is None
    for nodes in zip(*(trace.collectives for trace in traces), strict=True):
        for bodies in zip(*(node.bodies for node in nodes), strict=True):
            _drop_uncommon_numbers(bodies)


def _take_common_out(node: Node) -> list[Node]:
    """Split a loop, condition or call in two: one for the common results, one for the rest, which repeats some work."""
    common = [k for k, value in enumerate(node.outputs) if value.number is not None]
    is_common = len(common) == len(node.outputs) and None not in [value.number for value in node.inputs]
    if node.is_collective or not common or is_common:
        return [node]
    smaller = dead_code.computing(dead_code.opened(node.equation), common)
    if smaller is None:
        return [node]
    outputs = [node.outputs[k] for k in smaller.results]
    taken = Node(smaller.equation, [node.inputs[k] for k in smaller.operands], outputs, False, True, stage=node.stage)
    for value in outputs:
        value.maker = taken
    others = [k for k in range(len(node.outputs)) if k not in smaller.results]
    if not others:
        return [taken]
    rest = dead_code.computing(node.equation, others) or dead_code.all_of(node.equation)
    node.equation, node.inputs = rest.equation, [node.inputs[k] for k in rest.operands]
    node.outputs = [Value(node.outputs[k].aval, node) if k in smaller.results else node.outputs[k] for k in rest.results]
    return [taken, node]


# -- which collectives of the traces are the same one?


def check_collectives(traces: Sequence[Trace]) -> None:
    """Refuse traces (or one loop's bodies in each trace) that do not reach the same collectives in the same order.

    Their dtypes and shapes must agree. If several have the same dtype and number of axes, the user's lines must agree too.

    Raises:
        UnevenReplicasError: with the first difference.
    """
    first, name = traces[0].collectives, traces[0].name
    count = Counter(map(_kind, first))
    for trace in traces[1:]:
        for node, pair in itertools.zip_longest(first, trace.collectives):
            if node is None or pair is None or _key(node) != _key(pair):
                explain = _different
            elif count[_kind(node)] > 1 and user_code.equation_line(node.equation) != user_code.equation_line(pair.equation):
                explain = _in_other_places
            else:
                continue
            differing = f"{name} {_describe(node)}, {trace.name} {_describe(pair)}"
            raise UnevenReplicasError(_without_gradient(traces, differing) or explain(differing))


def _kind(node: Node) -> Any:
    """Return the name, and the operands' dtypes and numbers of axes. Sizes may differ: an `all_gather` pads to the largest."""
    return (node.equation.primitive.name, _types_of(node.joint_inputs))


def _types_of(values: Sequence[Value]) -> tuple[Any, ...]:
    return tuple((value.aval.dtype, len(value.aval.shape)) for value in values)


def _key(node: Node) -> Any:
    if not node.bodies:
        return (equation_key(node.equation), tuple((value.aval.shape, value.aval.dtype) for value in node.inputs))
    params = node.equation.params
    rounds = tuple(params.get(name) for name in ("length", "reverse"))
    return (node.equation.primitive.name, rounds, len(node.bodies), _types_of(node.joint_inputs), _types_of(node.outputs))


def _describe(node: Node | None) -> str:
    if node is None:
        return "reach no further one"
    operands = ", ".join(f"{value.aval.dtype}{list(value.aval.shape)}" for value in node.joint_inputs)
    name = node.equation.primitive.name
    kind = f"a collective inside `{name}`" if jaxprs.inner_jaxprs(node.equation) else f"`{name}`"
    return f"reach {kind} of {operands} at {user_code.equation_line(node.equation)}"


def _different(differing: str) -> str:
    return (
        f"{BEGINNING}do not reach the same collectives: {differing}. A collective needs one shape on all replicas, however many "
        "rows they have, and a loop with one inside needs one number of rounds: sum over the rows first, for example "
        "ctx.all_reduce('sum', jnp.sum(x, axis=0)); join rows with ctx.all_gather(x, axis=0); loop over something else than the "
        f"rows. Or leave the odd rows out: {DROP}."
    )


def _in_other_places(differing: str) -> str:
    return (
        f"{BEGINNING}reach collectives of one kind in different orders, or in different places of the code, so that it cannot "
        f"be told which belong together: {differing}. Values that have nothing to do with each other would be combined. Reach "
        "them in one order, whatever x.shape[0] is: compute what goes in under the `if`, and call ctx.all_reduce(...) behind it, "
        f"once for all. Or leave the odd rows out: {DROP}."
    )


def _without_gradient(traces: Sequence[Trace], differing: str) -> str:
    """Return the message about a loss that has no gradient on replicas without rows; "" if there is no such loss."""
    notes = [node.equation.params.get("note") for trace in traces for node in trace.nodes]
    for note in notes:
        if isinstance(note, Mark) and note.purpose is Purpose.NO_ROWS and note.name:
            return (
                f"{BEGINNING}do not reach the same collectives: {differing}. A replica without rows takes no gradient of "
                f"{note.name}, at {note.where}, and reaches none of the collectives in it. Keep one loss for each example, of "
                f"no rows there, and write mr.losses.compute_average_loss(per_example_loss). Or leave the odd rows out: {DROP}."
            )
    return ""
