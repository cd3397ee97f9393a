"""Which collectives of the traces of an uneven step are the same one?

They are paired in the order in which they are reached. Their dtypes and shapes must agree; where several in a step have
one dtype and as many axes, so must the lines of the user's code.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..._errors import UnevenReplicasError
from ..._jax import jaxprs, user_code
from ..._jax.marks import Mark, Purpose
from .nodes import Node, Trace, Value
from .structural_hash import equation_key

#: What leaves the odd rows out, in messages.
DROP = "strategy.distribute_dataset(dataset, mr.InputOptions(drop_remainder=True))"
#: How messages begin.
BEGINNING = (
    "the batch does not divide evenly among the replicas, and in this uneven step replicas with different numbers of rows "
)


def check(traces: Sequence[Trace]) -> None:
    """Refuse traces, or one loop's bodies in all of them, that do not reach the same collectives in the same order.

    Raises:
        UnevenReplicasError: with the first difference.
    """
    first, name = traces[0].collectives, traces[0].name
    count = Counter(map(_kind, first))
    for trace in traces[1:]:
        for own, other in itertools.zip_longest(first, trace.collectives):
            if own is None or other is None or _key(own) != _key(other):
                explain = _different
            elif count[_kind(own)] > 1 and user_code.equation_line(own.equation) != user_code.equation_line(other.equation):
                explain = _in_other_places
            else:
                continue
            differing = f"{name} {_describe(own)}, {trace.name} {_describe(other)}"
            raise UnevenReplicasError(_without_gradient(traces, differing) or explain(differing))


def _kind(node: Node) -> Any:
    """Return the dtypes and numbers of axes, not the sizes: an `all_gather` pads its operand to the largest."""
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
    kind = f"`{name}`" if not list(jaxprs.inner_jaxprs(node.equation)) else f"a collective inside `{name}`"
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
    """Return the message for a loss that has no gradient where there are no rows; empty if there is no such loss."""
    notes = [node.equation.params.get("note") for trace in traces for node in trace.nodes]
    for note in notes:
        if isinstance(note, Mark) and note.purpose is Purpose.NO_ROWS and note.name:
            return (
                f"{BEGINNING}do not reach the same collectives: {differing}. A replica without rows takes no gradient of "
                f"{note.name}, at {note.where}, and reaches none of the collectives in it. Keep one loss for each example, of "
                f"no rows there, and write mr.losses.compute_average_loss(per_example_loss). Or leave the odd rows out: {DROP}."
            )
    return ""
