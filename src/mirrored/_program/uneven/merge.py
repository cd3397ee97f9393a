"""Merge traces of a step that differ in shapes into one program, in which each replica runs its own.

What all traces compute alike is computed once. The rest is cut at the collectives, which all traces must
share, and each part becomes one `lax.switch`. docs/design/uneven-steps.md explains and argues why it is right.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._errors import UnevenReplicasError
from ..._jax import jaxprs, tracing
from ..._jax.interpreter import run_parts
from ..._jax.marks import mark_p
from ..._replicas.collectives import pad_to
from ..._replicas.per_replica import stack_shapes
from ..._typing import Shape
from .nodes import Node, Trace, Value

#: A value in each trace, such as an operand of a collective that all traces share.
Row = tuple[Value, ...]
#: An array that travels: its dtype, and how many of this dtype come before it.
Slot = tuple[Any, int]


def run_merged(
    traces: Sequence[Trace], index: jax.Array, arguments: Sequence[jax.Array], outer: _Run | None = None
) -> list[jax.Array]:
    """Run compared traces as one, each replica its own, that of its `index`, and return the outputs.

    Arguments and outputs that differ in shape are padded to one shape. `outer` is what runs around a body of a loop.
    """
    run = _Run(traces, index, outer)
    run.keep([trace.arguments for trace in traces], arguments)
    for stage in range(traces[0].num_stages):
        run.collectives(stage)
        run.shared(stage)
        run.own(stage)
    return run.outputs()


class _Run:
    """What is known while the one program is put together."""

    def __init__(self, traces: Sequence[Trace], index: jax.Array, outer: _Run | None) -> None:
        self._traces = traces
        self._index = index
        self._outer = outer
        self._live = [_live_nodes(trace) for trace in traces]
        self._joint = list(zip(*([node for node in nodes if node.is_collective] for nodes in self._live), strict=True))
        self._exports = _find_exports(traces, self._joint)
        self._last_use = [_find_last_uses(live, self._exports, kind) for kind, live in enumerate(self._live)]
        self._cheap = [{v: n for n in live if n.is_own and n.is_cheap for v in n.outputs} for live in self._live]
        #: What is computed once, by number.
        self.known: collections.ChainMap[int | None, Any] = collections.ChainMap({}, outer.known if outer else {})
        #: For each kind of replica, the arrays of one shape in which values lie that have another shape on other kinds.
        self.padded: list[dict[Value, jax.Array]] = [{} for _ in traces]
        #: For each kind, what its earlier parts computed and later parts need.
        self.carried: list[dict[Value, jax.Array]] = [{} for _ in traces]
        #: What is taken out of the parts, of one shape.
        self.exported: dict[Row, jax.Array] = {}

    def outputs(self) -> list[jax.Array]:
        """Return the outputs, after the last stage."""
        return self._exported_or_known([trace.outputs for trace in self._traces])

    def collectives(self, stage: int) -> None:
        """Run the collectives that begin a stage."""
        for nodes in self._joint:
            if nodes[0].stage == stage:
                operands = self._exported_or_known([node.handed for node in nodes])
                results = self._run_bodies(nodes, operands) if nodes[0].bodies else tracing.bind(nodes[0].equation, operands)
                self.keep([node.outputs for node in nodes], results)

    def _run_bodies(self, nodes: Sequence[Node], operands: Sequence[Any]) -> list[Any]:
        """Run a loop or condition whose bodies differ by kind of replica: each round is an uneven step of its own."""
        equation = nodes[0].equation
        parts, handed = jaxprs.parts_of(equation)

        def merged(part: jaxprs.Part, bodies: Sequence[Trace]) -> Callable[..., list[Any]]:
            return lambda *arguments: run_merged(bodies, self._index, arguments[len(part.fixed) :], self)

        values: list[Any] = [None] * len(nodes[0].inputs)  # a body knows itself what it takes from outside
        values[handed.start : handed.stop] = operands
        return run_parts(equation, values, list(map(merged, parts, zip(*(node.bodies for node in nodes), strict=True))))

    def shared(self, stage: int) -> None:
        """Run what all traces compute alike."""
        for node in itertools.chain.from_iterable(self._live):
            is_shared = node.stage == stage and not node.is_own and not node.is_collective
            if is_shared and node.outputs[0].number not in self.known:
                self.keep([node.outputs], tracing.bind(node.equation, list(map(self._known_or_constant, node.inputs))))

    def own(self, stage: int) -> None:
        """Run what each kind of replica computes for itself, as one switch."""
        rows = [row for row, taken_at in self._exports.items() if taken_at == stage]
        nodes = [[node for node in live if node.stage == stage and node.is_own and not node.is_cheap] for live in self._live]
        if not rows and not any(nodes):
            return
        leaving = [
            [value for node in own for value in node.outputs if last_use.get(value, 0) > stage]
            for own, last_use in zip(nodes, self._last_use, strict=True)
        ]
        avals = [[value.aval for value in values] for values in leaving]
        _refuse_references(avals)
        slots = Slots(avals)

        def part(kind: int) -> Callable[[], Any]:
            def run() -> Any:
                values = dict(self.carried[kind])
                for node in nodes[kind]:
                    operands = [self._read_own(kind, values, value) for value in node.inputs]
                    values.update(zip(node.outputs, tracing.bind(node.equation, operands), strict=True))
                taken = [padded(self._read_own(kind, values, row[kind]), row[kind].aval, _shape_of(row)) for row in rows]
                return taken, slots.pack(kind, [values[value] for value in leaving[kind]])

            return run

        exported, packed = jax.lax.switch(self._index, [part(kind) for kind in range(len(self._traces))])
        self.exported.update(zip(rows, exported, strict=True))
        for kind, values in enumerate(leaving):
            self.carried[kind].update(zip(values, slots.unpack(kind, packed), strict=True))

    def _read_own(self, kind: int, values: dict[Value, Any], value: Value) -> Any:
        """Read a value inside a part of one kind of replica, which may compute it only now."""
        if value in values:
            return values[value]
        if value.outer is not None and value.number is None:
            assert self._outer is not None
            values[value] = self._outer.read_carried(kind, value.outer)
        elif value in self.padded[kind]:
            values[value] = self.padded[kind][value][tuple(slice(size) for size in value.aval.shape)]
        elif value in (cheap := self._cheap[kind]):
            node = cheap[value]
            operands = [self._read_own(kind, values, operand) for operand in node.inputs]
            values.update(zip(node.outputs, tracing.bind(node.equation, operands), strict=True))
        else:
            return self._known_or_constant(value)
        return values[value]

    def read_carried(self, kind: int, value: Value) -> Any:
        """Read a value of one kind of replica in a loop around which it was computed."""
        return self._read_own(kind, dict(self.carried[kind]), value)

    def _exported_or_known(self, values: Sequence[Sequence[Value]]) -> list[Any]:
        rows = zip(*values, strict=True)
        return [self.exported[row] if row in self._exports else self._known_or_constant(row[0]) for row in rows]

    def _known_or_constant(self, value: Value) -> Any:
        if value.content is None:
            return self.known[value.number]
        return self.known.setdefault(value.number, value.content)  # one copy of a constant that several traces have

    def keep(self, values: Sequence[Sequence[Value]], arrays: Sequence[Any]) -> None:
        """Keep arrays, in which each kind of replica has its values."""
        for row, array in zip(zip(*values, strict=True), arrays, strict=True):
            if row[0].number is not None:
                self.known[row[0].number] = array
            else:
                for padded_values, value in zip(self.padded, row, strict=True):
                    padded_values[value] = array


def _shape_of(row: Row) -> Shape:
    """Return the shape to which each kind's value is padded."""
    return stack_shapes([value.aval.shape for value in row])[0]


def _refuse_references(avals: Sequence[Sequence[Any]]) -> None:
    if any(isinstance(aval, jax.ref.AbstractRef) for own in avals for aval in own):
        raise UnevenReplicasError(
            "the batch does not divide evenly among the replicas, and the step uses a jax.Ref before and after a collective. "
            "In such an uneven step only arrays are carried from one part to the next: read the Ref into an array, ref[...], "
            "before the collective, and make a new one after it."
        )


def _live_nodes(trace: Trace) -> list[Node]:
    """Return the nodes that outputs depend on, and those that are there for their effect: collectives, marks, prints."""
    needed = set(trace.outputs)
    live: list[Node] = []
    for node in reversed(trace.nodes):
        has_effect = not node.is_pure or mark_p in [one.primitive for one in (node.equation, *jaxprs.inside(node.equation))]
        if has_effect or not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            live.append(node)
    return live[::-1]


def _find_exports(traces: Sequence[Trace], joint: Sequence[Sequence[Node]]) -> dict[Row, int]:
    """Return the rows of values that are not common and are needed by collectives and as outputs: after which stage."""
    outputs = zip(*(trace.outputs for trace in traces), strict=True)
    needed = [(row, max(value.stage for value in row)) for row in outputs]
    for nodes in joint:
        needed += [(row, nodes[0].stage - 1) for row in zip(*(node.handed for node in nodes), strict=True)]
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


class Slots:
    """Common arrays that carry values of several kinds of replicas from one part of a program to a later one.

    The i-th value of a dtype of each kind travels in the i-th array of that dtype: as it is when all have
    one shape, else flat and padded.
    """

    def __init__(self, avals: Sequence[Sequence[Any]]) -> None:
        self._avals = avals
        plain = [[jax.eval_shape(functools.partial(_plain, aval=aval), aval) for aval in own] for own in avals]
        self._own = list(map(_numbered, plain))
        shapes: dict[Slot, set[Shape]] = collections.defaultdict(set)
        for slot, shape in itertools.chain.from_iterable(own.items() for own in self._own):
            shapes[slot].add(shape)
        self._shapes = {slot: own.pop() if len(own) == 1 else (max(map(math.prod, own)),) for slot, own in shapes.items()}

    def pack(self, kind: int, values: Sequence[Any]) -> list[jax.Array]:
        """Return all common arrays, with one kind's values in its own and zeros in the rest."""
        own = dict(zip(self._own[kind], map(_plain, values, self._avals[kind]), strict=True))
        return [_filled(own.get(slot), slot[0], shape) for slot, shape in self._shapes.items()]

    def unpack(self, kind: int, packed: Sequence[jax.Array]) -> list[Any]:
        """Return one kind's values."""
        arrays = dict(zip(self._shapes, packed, strict=True))
        plain = [_cut(arrays[slot], shape) for slot, shape in self._own[kind].items()]
        return list(map(_restored, plain, self._avals[kind]))


def _filled(plain: jax.Array | None, dtype: Any, shape: Shape) -> jax.Array:
    if plain is None:
        return jnp.zeros(shape, dtype)
    return plain if plain.shape == shape else pad_to(plain.reshape(-1), shape)


def _cut(array: jax.Array, shape: Shape) -> jax.Array:
    return array if array.shape == shape else array[: math.prod(shape)].reshape(shape)


def _numbered(plain: Sequence[jax.ShapeDtypeStruct]) -> dict[Slot, Shape]:
    counts: dict[Any, Iterator[int]] = collections.defaultdict(itertools.count)
    return {(one.dtype, next(counts[one.dtype])): one.shape for one in plain}


def padded(array: Any, aval: Any, shape: Shape) -> jax.Array:
    """Return a value as an array of exactly the shape, with zeros behind the real rows, as a switch must return it."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return pad_to(array if is_key else _plain(array, aval), shape)


def _plain(array: Any, aval: Any) -> jax.Array:
    """Turn a value into an array that can be padded: random keys into numbers, weak types into strong ones."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    return jax.lax.convert_element_type(array, aval.dtype)


def _restored(plain: jax.Array, aval: Any) -> jax.Array:
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return plain
    impl: list[Any] = []
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.random.wrap_key_data(plain, impl=impl[0])
