"""How much does a gradient weigh that comes back through a sum over the replicas, as in a layer that normalizes over them?

Through such a layer each row has a part in the losses of all replicas, and their gradients come back to it added up. A mean by
rows multiplies each replica's gradient by its share of the rows at the end only, which would be too late for what the others
have added. So a gradient is multiplied by its replica's share before the sum, and divided by it behind. Then it is at each
place the true one divided by the share, and the mean by rows is that of the loss over all rows, exactly.
"""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction

from ..._errors import UnevenReplicasError
from ..._jax import jaxprs, user_code
from ..._jax.marks import Purpose, mark_p
from ..._jax.ways import Way, way_of
from .means import scale_input, scale_output
from .nodes import Node, Trace, Value
from .pairing import BEGINNING, DROP


class Use(enum.Flag):
    """For what a value is used, until the next sum over the replicas."""

    NONE = 0
    BY_ROWS = enum.auto()
    OTHER = enum.auto()


def has_means_by_rows(traces: Sequence[Trace]) -> bool:
    """Tell whether there is a mean by rows in a step."""
    return any(map(_is_by_rows, _all_nodes(traces)))


def weigh(traces: Sequence[Trace], shares: Sequence[Fraction]) -> bool:
    """Weigh the gradients that come through a sum over the replicas on their way to a mean by rows.

    Args:
        traces: the traces, compared.
        shares: what a replica of each kind has of all rows.

    Returns:
        Whether something was changed, so that the traces must be compared again.

    Raises:
        UnevenReplicasError: when it cannot be told how much such a gradient weighs, or it is used in another way besides.
    """
    uses = _Uses()
    for trace in traces:
        uses.look(trace, [Use.OTHER] * len(trace.outputs))
    of_rows = _Uses(stops_without_rows=True)
    for trace, share in zip(traces, shares, strict=True):
        if share == 0:
            of_rows.look(trace, [Use.OTHER] * len(trace.outputs))
    return _weigh(traces, shares, uses, of_rows)


def _weigh(traces: Sequence[Trace], shares: Sequence[Fraction], uses: _Uses, of_rows: _Uses) -> bool:
    changed = False
    for nodes in list(zip(*([node for node in trace.nodes if node.is_collective] for trace in traces), strict=True)):
        for bodies in zip(*(node.bodies for node in nodes), strict=True):
            changed |= _weigh(bodies, shares, uses, of_rows)
        way = _way(nodes[0])
        if nodes[0].bodies or way is Way.FORWARD:
            continue
        for position, outputs in enumerate(zip(*(node.outputs for node in nodes), strict=True)):
            use = Use.NONE
            for value in outputs:
                use |= uses.of[value]
            if Use.BY_ROWS not in use:
                continue
            has_part_without_rows = any(Use.BY_ROWS in of_rows.of[value] for value in outputs)
            if Use.OTHER in use or way is Way.UNCLEAR or has_part_without_rows:
                raise UnevenReplicasError(_unknown(nodes[0]))
            for trace, node, share in zip(traces, nodes, shares, strict=True):
                scale_input(trace, node, position, float(share))
                if share:
                    scale_output(trace, node, position, float(1 / share))
            changed = True
    return changed


class _Uses:
    """For what the values of traces are used.

    Args:
        stops_without_rows: leave out what goes through arrays without elements: on a replica without rows that is all that
            depends on them.

    Attributes:
        of: the use of each value.
    """

    def __init__(self, stops_without_rows: bool = False) -> None:
        self._stops = stops_without_rows
        self.of: dict[Value, Use] = defaultdict(lambda: Use.NONE)

    def look(self, trace: Trace, outputs: Sequence[Use]) -> None:
        """Find the uses of what a trace computes, from its end to its beginning, given those of its outputs."""
        for value, use in zip(trace.outputs, outputs, strict=True):
            self._add([value], use)
        for node in reversed(trace.nodes):
            each = [self.of[value] for value in node.outputs]
            every = Use.NONE
            for use in each:
                every |= use
            if node.bodies:
                self._add(node.inputs, self._look_into(node, every))
            elif _is_by_rows(node):
                self._add(node.inputs, Use.BY_ROWS)
            elif not node.is_collective:
                self._add(node.inputs, every)
            elif _way(node) is Way.BACKWARD:
                for value, use in zip(node.inputs, each, strict=True):
                    self._add([value], use)
            else:
                self._add(node.inputs, Use.OTHER)

    def _look_into(self, node: Node, use: Use) -> Use:
        """Return the uses of what goes into a loop; what a round carries on is used as in the next one."""
        while True:
            for body in node.bodies:
                self.look(body, [use] * len(body.outputs))
            found = use
            for value in (value for body in node.bodies for value in (*body.arguments, *body.taken)):
                found |= self.of[value]
            if found == use:
                return use
            use = found

    def _add(self, values: Sequence[Value], use: Use) -> None:
        for value in values:
            if not (self._stops and 0 in value.aval.shape):
                self.of[value] |= use


def _all_nodes(traces: Sequence[Trace]) -> Iterator[Node]:
    for node in itertools.chain.from_iterable(trace.nodes for trace in traces):
        yield node
        yield from _all_nodes(node.bodies)


def _is_by_rows(node: Node) -> bool:
    return node.equation.primitive is mark_p and node.equation.params["note"].purpose is Purpose.BY_ROWS


def _way(node: Node) -> Way:
    way = way_of(node.path, node.equation)
    is_known = node.equation.primitive.name == "psum" and not jaxprs.is_over_groups(node.equation)
    return way if is_known or way is Way.FORWARD else Way.UNCLEAR


def _unknown(node: Node) -> str:
    return (
        f"{BEGINNING}take a mean by rows of gradients that have come through a sum or a mean over the replicas, at "
        f"{user_code.equation_line(node.equation) or '<unknown>'}, of which it cannot be told how much each replica weighs: they "
        "are used in another way besides, or are gradients of gradients, or come out of a backward rule written by hand. Let the "
        "weights be in the loss: take mr.losses.compute_average_loss(per_example_loss) instead of its mean, and add the "
        "gradients up: ctx.all_reduce('sum', grads), or optimizer.apply_gradients(grads, aggregate='sum'). Or leave the odd rows "
        f"out: {DROP}."
    )
