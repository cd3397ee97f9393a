"""Which collectives of the traces of an uneven step are the same one?

They are paired in the order in which they are reached, if nothing speaks against it. Two that follow one another could
have changed places in the code for another number of rows, and then a sum would be one of values that have nothing to do with
each other.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ..._errors import UnevenReplicasError
from ..._jax import jaxprs, user_code
from ..._typing import Shape
from .keys import content_key, equation_key
from .nodes import Node, Trace, Value

#: What leaves the odd rows out, in messages.
DROP = "strategy.distribute_dataset(dataset, mr.InputOptions(drop_remainder=True))"
#: How messages begin.
BEGINNING = (
    "the batch does not divide evenly among the replicas, and in this uneven step replicas with different numbers of rows "
)
#: What JAX puts in, or leaves out, for some shapes.
_FOR_SHAPES = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "pad", "reshape", "slice", "squeeze"})


def check(traces: Sequence[Trace], collectives: Sequence[Sequence[Node]]) -> None:
    """Refuse traces that do not reach the same collectives in the same order.

    Args:
        traces: the traces, or one loop's bodies in all of them.
        collectives: those of each trace.

    Raises:
        UnevenReplicasError: with the first difference.
    """
    for trace, others in zip(traces[1:], collectives[1:], strict=True):
        pairs = list(itertools.zip_longest(collectives[0], others))
        for own, other in pairs:
            if own is None or other is None or _key(own) != _key(other):
                raise UnevenReplicasError(_different(traces[0], own, trace, other))
        _check_order(traces[0], trace, pairs)


def _key(node: Node) -> Any:
    if not node.bodies:
        return (equation_key(node.equation), [(value.aval.shape, value.aval.dtype) for value in node.inputs])
    params = node.equation.params
    rounds = [params.get(name) for name in ("length", "reverse")]
    return (node.equation.primitive.name, rounds, len(node.bodies), _type_of(node.handed), _type_of(node.outputs))


def _type_of(values: Sequence[Value]) -> tuple[Any, ...]:
    return tuple((value.aval.dtype, len(value.aval.shape)) for value in values)


def _different(first: Trace, own: Node | None, trace: Trace, other: Node | None) -> str:
    return (
        f"{BEGINNING}do not reach the same collectives: {first.name} {_describe(own)}, {trace.name} {_describe(other)}. A "
        "collective needs one shape on all replicas, however many rows they have, and a loop with one inside needs one number "
        "of rounds: sum over the rows first, for example ctx.all_reduce('sum', jnp.sum(x, axis=0)); join rows with "
        f"ctx.all_gather(x, axis=0); loop over something else than the rows. Or leave the odd rows out: {DROP}."
    )


def _describe(node: Node | None) -> str:
    if node is None:
        return "reach no further one"
    operands = ", ".join(f"{value.aval.dtype}{list(value.aval.shape)}" for value in node.handed)
    name = node.equation.primitive.name
    kind = f"`{name}`" if not list(jaxprs.inner_jaxprs(node.equation)) else f"a collective inside `{name}`"
    return f"reach {kind} of {operands} at {_line(node)}"


def _line(node: Node) -> str:
    return user_code.equation_line(node.equation) or "<unknown>"


# -- collectives of one type, which could have changed places


def _check_order(first: Trace, trace: Trace, pairs: Sequence[tuple[Node, Node]]) -> None:
    alike: dict[Any, list[tuple[Node, Node]]] = defaultdict(list)
    for own, other in pairs:
        alike[own.equation.primitive.name, _type_of(own.handed)].append((own, other))
    for members in alike.values():
        if len(members) > 1:
            _check_lines(first, trace, members)
    at_one_line = defaultdict(list)
    for own, other in pairs:
        at_one_line[_line(own), own.equation.primitive.name, _type_of(own.handed), _shapes_of_sum(own)].append((own, other))
    for members in at_one_line.values():
        if len(members) > 1:
            _check_what_goes_in(first, trace, members)


def _shapes_of_sum(node: Node) -> tuple[Shape, ...] | None:
    """Return the shapes that a sum is made of: of others it is another one. What is gathered has been padded to one shape."""
    is_sum = node.equation.primitive.name == "psum"
    return tuple(value.aval.shape for value in node.handed) if is_sum else None


def _check_lines(first: Trace, trace: Trace, pairs: Sequence[tuple[Node, Node]]) -> None:
    for own, other in pairs:
        if _line(own) != _line(other):
            raise UnevenReplicasError(_changed_places(first, own, trace, other))


def _check_what_goes_in(first: Trace, trace: Trace, pairs: Sequence[tuple[Node, Node]]) -> None:
    """Refuse collectives of one line, such as those of a Python loop, that would be more alike the other way round."""
    of_first, of_other = _Origins(first), _Origins(trace)
    named = [(own, other, of_first.of(own), of_other.of(other)) for own, other in pairs]
    differing = [row for row in named if row[2] != row[3]]
    for (own, other, a, b), (_, _, c, d) in itertools.combinations(differing, 2):
        if _distance(a, b) + _distance(c, d) > _distance(a, d) + _distance(c, b):
            raise UnevenReplicasError(_changed_places(first, own, trace, other))


def _distance(a: Counter[Any], b: Counter[Any]) -> int:
    return ((a - b) + (b - a)).total()


class _Origins:
    """What each collective of a trace combines: the operations, constants and arguments since the collectives before."""

    def __init__(self, trace: Trace) -> None:
        self._makers = {value: node for node in trace.nodes for value in node.outputs}
        collectives = [node.outputs for node in trace.nodes if node.is_collective]
        begins = [[*trace.taken, *trace.arguments], *collectives]
        self._places = {value: (k, i) for k, values in enumerate(begins) for i, value in enumerate(values)}

    def of(self, collective: Node) -> Counter[Any]:
        return Counter(self._found(collective))

    def _found(self, collective: Node) -> Iterator[Any]:
        seen: set[Any] = set()
        waiting = list(collective.inputs)
        while waiting:
            value = waiting.pop()
            if value in self._places:
                yield self._places[value]
            elif value.content is not None:
                yield content_key(value.content, value.aval) if value.aval.shape == () else "constant"
            elif (maker := self._makers[value]) not in seen:
                seen.add(maker)
                waiting += maker.inputs
                if maker.equation.primitive.name not in _FOR_SHAPES:
                    yield maker.equation.primitive.name


def _changed_places(first: Trace, own: Node, trace: Trace, other: Node) -> str:
    return (
        f"{BEGINNING}reach collectives of one kind in different orders, or in different places of the code, so that it cannot "
        f"be told which belong together: {first.name} {_describe(own)}, {trace.name} {_describe(other)}. Values that have "
        "nothing to do with each other would be combined. Reach them in one order, whatever x.shape[0] is: compute what goes "
        "in under the `if`, and call ctx.all_reduce(...) behind it, once for all. "
        f"Or leave the odd rows out: {DROP}."
    )
