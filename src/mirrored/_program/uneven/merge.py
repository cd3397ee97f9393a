"""Merge traces of a step that differ in shapes into one program, in which each replica runs its own.

Values common to all traces are computed once. The rest is cut at the collectives, which all traces must share, and each
part becomes one `lax.switch`. docs/design/uneven-steps.md explains and argues why it is right.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ..._errors import UnevenReplicasError
from ..._jax import jaxprs, tracing
from ..._jax.interpreter import run_parts
from ..._jax.marks import Purpose, mark_p
from ..._jax.primitives import SIMPLE
from ..._replicas.collectives import pad_to
from ..._replicas.per_replica import stack_shapes
from ..._typing import Shape
from .nodes import Node, Trace, Value, stages_of

#: A value in each trace, such as an operand of a collective that all traces share.
Row = tuple[Value, ...]
#: An array that travels: its dtype, and how many of this dtype come before it.
Slot = tuple[Any, int]


def run_merged(
    traces: Sequence[Trace], index: jax.Array, arguments: Sequence[jax.Array], outer: _Run | None = None
) -> list[jax.Array]:
    """Run compared traces as one program, in which `index` chooses the trace of each replica, and return the outputs.

    Arguments and outputs that differ in shape are padded to one shape. `outer` is the run around the body of a loop.
    """
    run = _Run(traces, index, outer)
    run.keep([trace.arguments for trace in traces], arguments)
    for stage, nodes in enumerate(zip(*map(stages_of, run.live), strict=True)):
        run.run_collectives(nodes)
        run.run_common(nodes)
        run.run_own(stage, nodes)
    return run.read_rows([trace.outputs for trace in traces])


class _Run:
    """The arrays that are known while the one program is put together."""

    def __init__(self, traces: Sequence[Trace], index: jax.Array, outer: _Run | None) -> None:
        self._traces = traces
        self._index = index
        self._outer = outer
        self.live = [_live_nodes(trace) for trace in traces]
        self._exports = _find_exports(traces)
        self._last_use = [_find_last_uses(live, self._exports, kind) for kind, live in enumerate(self.live)]
        self._cheap = [{v: n for n in live if n.is_own and n.is_cheap for v in n.outputs} for live in self.live]
        #: By number, the arrays that are computed once.
        self.known: collections.ChainMap[int | None, Any] = collections.ChainMap({}, outer.known if outer else {})
        #: For each kind of replica: value -> the array, padded to one shape for all kinds, that holds it.
        self.padded: list[dict[Value, jax.Array]] = [{} for _ in traces]
        #: For each kind, the values of its earlier parts that later parts need.
        self.carried: list[dict[Value, jax.Array]] = [{} for _ in traces]
        #: The arrays that come out of the parts in one shape, for collectives and outputs.
        self.exported: dict[Row, jax.Array] = {}

    def run_collectives(self, of_stage: Sequence[Sequence[Node]]) -> None:
        """Run the collectives that begin a stage, given its nodes in each trace."""
        for nodes in zip(*([node for node in of_kind if node.is_collective] for of_kind in of_stage), strict=True):
            operands = self.read_rows([node.joint_inputs for node in nodes])
            results = self._run_bodies(nodes, operands) if nodes[0].bodies else tracing.bind(nodes[0].equation, operands)
            self.keep([node.outputs for node in nodes], results)

    def _run_bodies(self, nodes: Sequence[Node], operands: Sequence[Any]) -> list[Any]:
        """Run a loop or condition whose bodies differ by kind of replica: each round is an uneven step."""
        equation, loop = nodes[0].equation, jaxprs.loop_of(nodes[0].equation)

        def merged(part: jaxprs.Part, bodies: Sequence[Trace]) -> Callable[..., list[Any]]:
            return lambda *arguments: run_merged(bodies, self._index, arguments[len(part.fixed) :], self)

        values: list[Any] = [None] * len(nodes[0].inputs)  # a body reads captured values from this run
        values[loop.not_fixed.start : loop.not_fixed.stop] = operands
        return run_parts(equation, values, list(map(merged, loop.parts, zip(*(node.bodies for node in nodes), strict=True))))

    def run_common(self, of_stage: Sequence[Sequence[Node]]) -> None:
        for node in itertools.chain.from_iterable(of_stage):
            is_common = not node.is_own and not node.is_collective
            if is_common and any(value.number not in self.known for value in node.outputs):
                self.keep([node.outputs], tracing.bind(node.equation, list(map(self._known_or_constant, node.inputs))))

    def run_own(self, stage: int, of_stage: Sequence[Sequence[Node]]) -> None:
        """Run the nodes of each kind of replica, as one switch."""
        rows = [row for row, taken_at in self._exports.items() if taken_at == stage]
        nodes = [[node for node in of_kind if node.is_own and not node.is_cheap] for of_kind in of_stage]
        if not rows and not any(nodes):
            return
        leaving = [
            [value for node in of_kind for value in node.outputs if last_use.get(value, 0) > stage]
            for of_kind, last_use in zip(nodes, self._last_use, strict=True)
        ]
        avals = [[value.aval for value in values] for values in leaving]
        _refuse_references(avals)
        slots = Slots(avals)
        shapes = [stack_shapes([value.aval.shape for value in row])[0] for row in rows]

        def part(kind: int) -> Callable[[], Any]:
            def run_nodes() -> Any:
                values = dict(self.carried[kind])
                for node in nodes[kind]:
                    self._run_node(kind, values, node)
                leaving_now = [row[kind] for row in rows]
                taken = [
                    _padded(self._read_own(kind, values, value), value.aval.dtype, shape)
                    for value, shape in zip(leaving_now, shapes, strict=True)
                ]
                return taken, slots.pack(kind, [values[value] for value in leaving[kind]])

            return run_nodes

        exported, packed = jax.lax.switch(self._index, [part(kind) for kind in range(len(self._traces))])
        self.exported.update(zip(rows, exported, strict=True))
        for kind, values in enumerate(leaving):
            self.carried[kind].update(zip(values, slots.unpack(kind, packed), strict=True))

    def _run_node(self, kind: int, values: dict[Value, Any], node: Node) -> None:
        operands = [self._read_own(kind, values, value) for value in node.inputs]
        values.update(zip(node.outputs, tracing.bind(node.equation, operands), strict=True))

    def _read_own(self, kind: int, values: dict[Value, Any], value: Value) -> Any:
        """Read a value in the part of one kind of replica; compute it there if that is cheap."""
        if value in values:
            return values[value]
        if value.outer is not None and value.number is None:
            outer = self._outer
            assert outer is not None
            values[value] = outer._read_own(kind, dict(outer.carried[kind]), value.outer)
        elif value in self.padded[kind]:
            values[value] = self.padded[kind][value][tuple(slice(size) for size in value.aval.shape)]
        elif value in self._cheap[kind]:
            self._run_node(kind, values, self._cheap[kind][value])
        else:
            return self._known_or_constant(value)
        return values[value]

    def read_rows(self, values: Sequence[Sequence[Value]]) -> list[Any]:
        """Read values that every kind of replica has, padded to one shape where the shapes differ."""
        rows = zip(*values, strict=True)
        return [self.exported[row] if row in self._exports else self._known_or_constant(row[0]) for row in rows]

    def _known_or_constant(self, value: Value) -> Any:
        if value.content is None:
            return self.known[value.number]
        return self.known.setdefault(value.number, value.content)  # one copy of a constant that several traces have

    def keep(self, values: Sequence[Sequence[Value]], arrays: Sequence[Any]) -> None:
        """Keep arrays as the values of all kinds of replicas."""
        for row, array in zip(zip(*values, strict=True), arrays, strict=True):
            if row[0].number is not None:
                self.known[row[0].number] = array
            else:
                for padded_values, value in zip(self.padded, row, strict=True):
                    padded_values[value] = array


def _refuse_references(avals: Sequence[Sequence[Any]]) -> None:
    if any(isinstance(aval, jax.ref.AbstractRef) for of_kind in avals for aval in of_kind):
        raise UnevenReplicasError(
            "the batch does not divide evenly among the replicas, and the step uses a jax.Ref before and after a collective. "
            "In such an uneven step only arrays are carried from one part to the next: read the Ref into an array, ref[...], "
            "before the collective, and make a new one after it."
        )


def _live_nodes(trace: Trace) -> list[Node]:
    """Return the nodes that outputs depend on, and nodes with effects: collectives, marks, prints."""
    needed = set(trace.outputs)
    live: list[Node] = []
    for node in reversed(trace.nodes):
        inside = () if node.equation.primitive.name in SIMPLE else jaxprs.inside(node.equation)
        marks = [e.params["note"].purpose for e in (node.equation, *inside) if e.primitive is mark_p]
        is_told = any(purpose is not Purpose.NO_DERIVATIVE for purpose in marks)  # to the proof
        if is_told or not node.is_pure or not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            live.append(node)
    return live[::-1]


def _find_exports(traces: Sequence[Trace]) -> dict[Row, int]:
    """Return the rows of uncommon values that collectives and outputs need, each with the stage after which it is taken."""
    outputs = zip(*(trace.outputs for trace in traces), strict=True)
    needed = [(row, max(value.stage for value in row)) for row in outputs]
    for nodes in zip(*(trace.collectives for trace in traces), strict=True):
        needed += [(row, nodes[0].stage - 1) for row in zip(*(node.joint_inputs for node in nodes), strict=True)]
    exports: dict[Row, int] = {}
    for row, stage in needed:
        if row[0].number is None or len({value.number for value in row}) > 1:
            exports[row] = min(stage, exports.get(row, stage))
    return exports


def _find_last_uses(live: Sequence[Node], exports: dict[Row, int], kind: int) -> dict[Value, int]:
    uses = [(value, node.stage) for node in live if node.is_own or node.bodies for value in node.inputs]
    uses += [(row[kind], stage) for row, stage in exports.items()]
    last: dict[Value, int] = {}
    for value, stage in uses:
        last[value] = max(stage, last.get(value, 0))
    return last


def _common_shape(shapes: set[Shape]) -> Shape:
    """Return the shape if all are equal; else a flat shape that is large enough for each."""
    if len(shapes) == 1:
        return next(iter(shapes))
    return (max(map(math.prod, shapes)),)


class Slots:
    """Arrays that carry each kind of replica's values from one part of the program to a later one.

    The i-th value of a dtype of each kind travels in the i-th array of that dtype: unchanged if all have one shape, else flat
    and padded.
    """

    def __init__(self, avals: Sequence[Sequence[Any]]) -> None:
        self._own = list(map(_number_slots, avals))
        shapes: dict[Slot, set[Shape]] = collections.defaultdict(set)
        for slot, shape in itertools.chain.from_iterable(of_kind.items() for of_kind in self._own):
            shapes[slot].add(shape)
        self._shapes = {slot: _common_shape(of_slot) for slot, of_slot in shapes.items()}

    def pack(self, kind: int, values: Sequence[Any]) -> list[jax.Array]:
        """Return all common arrays, with one kind's values in its own and zeros in the rest."""
        by_slot = dict(zip(self._own[kind], values, strict=True))
        return [
            _padded(by_slot[slot], slot[0], shape) if slot in by_slot else jax.lax.full(shape, 0, slot[0])
            for slot, shape in self._shapes.items()
        ]

    def unpack(self, kind: int, packed: Sequence[jax.Array]) -> list[jax.Array]:
        arrays = dict(zip(self._shapes, packed, strict=True))
        parts = [(arrays[slot], shape) for slot, shape in self._own[kind].items()]
        return [array if array.shape == shape else array[: math.prod(shape)].reshape(shape) for array, shape in parts]


def _number_slots(avals: Sequence[Any]) -> dict[Slot, Shape]:
    counts: dict[Any, Iterator[int]] = collections.defaultdict(itertools.count)
    return {(aval.dtype, next(counts[aval.dtype])): aval.shape for aval in avals}


def _padded(value: Any, dtype: Any, shape: Shape) -> jax.Array:
    """Pad a value with zeros to the shape that all branches of a switch return; flatten a value of another rank first."""
    array = jax.lax.convert_element_type(value, dtype)  # of a weak type otherwise
    if array.ndim != len(shape):
        array = array.reshape(-1)
    return pad_to(array, shape)
