"""Uneven steps: replicas with different numbers of rows run one compiled program, each on its true rows.

The step is traced once for each distinct set of shapes, and `_program/uneven/merge` makes one program of the traces.
docs/design/uneven-steps.md says how, and why copies still cannot diverge.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._errors import UnevenReplicasError
from ..._jax import tracing, user_code
from ..._jax.marks import Mark, Purpose, mark
from ..._replicas.frames import Frame
from ..._replicas.per_replica import stack_shapes
from ..._typing import Shape
from ..._variables.variable import spec_of
from .. import proof, refusals
from ..call import ArrayLeaf, Call, is_same
from ..lift import Lifted, ResultPlan, Traced, trace_step
from ..proof import Findings, State
from . import match_collectives, merge, nodes, value_numbering
from .kinds import Kinds, find_kinds


def lift_uneven(
    call: Call, frame_with: Callable[[Any], Frame], states_of: Callable[[Lifted], list[State]]
) -> tuple[Lifted, Findings]:
    """Make one pure function of a step in which replicas have different numbers of rows, and prove it.

    `frame_with` makes the context to trace in, given the `_AskedSizes` that knows the other replicas' sizes; `states_of` returns
    the proof's states of a lifted step's inputs.

    Raises:
        UnevenReplicasError: when replicas with different numbers of rows would not reach the same collectives,
            or return different structures, or values that depend on the replica's number of rows alone.
        ReplicasDivergeError: when already replicas with equal rows would diverge.
    """
    leaves = call.array_leaves()
    kinds = find_kinds(call, leaves)
    traces = _trace_all(call, kinds, frame_with)
    found = [proof.prove(lifted.shown.jaxpr, states_of(lifted)) for lifted in traces]
    for lifted, findings in zip(traces, found, strict=True):
        refusals.check_assignments(lifted, findings)
        refusals.check_means(findings)
    plan = _merge_plans(traces, kinds)
    with tracing.room_for(lifted.shown for lifted in traces):
        closed = _merge_traces(traces, kinds, leaves, plan, frame_with(None), call.function)
    largest = max(range(len(traces)), key=kinds.most_rows)
    refusals.check_gradients(found[largest].marks, len(kinds.of_replica))  # merged, all comes out of a switch
    refusals.check_noise(found[largest])
    lines_of = zip(*(lifted.write_lines for lifted in traces), strict=True)
    lines = tuple(next((line for line in lines if line != "<unknown>"), lines[0]) for lines in lines_of)
    merged = dataclasses.replace(traces[0], closed=closed, shown=closed, write_lines=lines, plan=plan)
    findings = proof.prove(closed.jaxpr, states_of(merged))
    of_kinds = zip(*(one.outputs[: merged.num_results] for one in found), strict=True)
    for position, (state, own) in enumerate(zip(findings.outputs, of_kinds, strict=False)):
        if not state.is_mirrored and all(one.is_mirrored for one in own):
            raise UnevenReplicasError(_other_type(plan, position, kinds, state.origin))
    findings.outputs = [dataclasses.replace(state, of_uneven=True) for state in findings.outputs]
    return merged, findings


# -- tracing for each kind


class _AskedSizes:
    """The sizes on all replicas that a step asks for while it is traced for one kind.

    A step asks in the same order whatever its rows, so the k-th question of every trace is the same one. The questions of all
    kinds in the traces before are known; the others are guessed.
    """

    def __init__(self, kinds: Kinds, kind: int, known: Sequence[tuple[int, ...]]) -> None:
        self._kinds = kinds
        self._kind = kind
        self._known = known
        self.asked: list[int] = []
        self._answers: list[tuple[int, ...]] = []
        self._renew_caches: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace inside this block, so that a function under an inner `jit` asks again each time it is called.

        For another kind its arguments may have other shapes the second time, and then it asks twice.
        """
        with tracing.separate_caches() as self._renew_caches:
            yield

    def rows(self) -> tuple[int, int]:
        return self._kinds.rows(self._kind)

    def examples(self, size: int) -> tuple[int, ...]:
        sizes = self.each(size)
        self._kinds.check_lengths(sizes)
        return sizes

    def each(self, size: int) -> tuple[int, ...]:
        self._renew_caches()
        is_known = len(self.asked) < len(self._known) and self._known[len(self.asked)][self._kind] == size
        sizes = self._known[len(self.asked)] if is_known else self._kinds.guess(self._kind, size)
        self.asked.append(size)
        self._answers.append(self._kinds.on_replicas(sizes))
        return self._answers[-1]

    def was_answered_by(self, known: Sequence[tuple[int, ...]]) -> bool:
        """Tell whether the answers are the sizes that the kinds have asked about."""
        return self._answers == list(map(self._kinds.on_replicas, known))


def _trace_all(call: Call, kinds: Kinds, frame_with: Callable[[Any], Frame]) -> list[Lifted]:
    """Trace the step for each kind with the right sizes, and with the variables that any kind touches.

    Guesses are nearly always right, and then each kind is traced once. A wrong one is found when all kinds have asked, and may
    even make the step fail; the next round has the right answer to one more question at least.
    """
    known: list[tuple[int, ...]] = []
    for num_sure in itertools.count():  # so many questions had the right answers
        sizes = [_AskedSizes(kinds, kind, known) for kind in range(len(kinds.shapes))]
        traces: list[Traced] = []
        errors: dict[int, Exception] = {}
        for kind, own in enumerate(sizes):
            try:
                with own.tracing():
                    traces.append(trace_step(call, kinds.shapes[kind], frame_with(own)))
            except Exception as error:
                errors[kind] = error
        asked = [own.asked for own in sizes]
        before, known = known, list(zip(*asked, strict=False))
        is_agreed = all(own.was_answered_by(known) for own in sizes)
        if is_agreed and not errors:
            break
        is_stuck = known == before or known[:num_sure] != before[:num_sure]
        if errors:
            kind = min(errors, key=lambda kind: len(asked[kind]) > 0)  # without a question, no answer was wrong
            if is_agreed or is_stuck or not asked[kind]:
                notes = getattr(errors[kind], "__notes__", [])
                errors[kind].__notes__ = [*([kinds.explain(kind)] if traces else []), *notes]  # before JAX's own
                raise errors[kind]
        elif is_stuck:
            raise UnevenReplicasError(_different_questions(kinds, asked))
    return [traced.lifted(traces) for traced in traces]


def _different_questions(kinds: Kinds, asked: Sequence[Sequence[int]]) -> str:
    fewest, most = (pick(range(len(asked)), key=lambda kind: len(asked[kind])) for pick in (min, max))
    if fewest == most:
        return (
            "the step asked for the sizes of other arrays (a mean over an axis, all_gather, compute_average_loss) when it was "
            "traced again. A step must do the same every time it is traced: look for code in it that depends on something "
            "outside that changes (a counter, a cache, random Python numbers)."
        )
    return (
        "the batch does not divide evenly among the replicas, and the step does different things for different numbers of "
        f"rows: {kinds.describe(fewest)} reach {len(asked[fewest])} operations that depend on all replicas' sizes (a mean "
        f"over an axis, all_gather, compute_average_loss), {kinds.describe(most)} reach {len(asked[most])}. Do the same "
        f"whatever x.shape[0] is, or leave the odd rows out: {match_collectives.DROP}."
    )


# -- one program and one result


def _merge_traces(
    traces: Sequence[Lifted], kinds: Kinds, leaves: Sequence[ArrayLeaf], plan: ResultPlan, frame: Frame, function: Any
) -> Any:
    variables = [jax.ShapeDtypeStruct(spec_of(v).shape, v.dtype) for v in traces[0].variables]
    arrays = [leaf.aval(leaf.shape) for leaf in leaves]
    is_common = [True] * len(variables) + [leaf.shapes is None for leaf in leaves]
    axis = frame.axis
    assert axis is not None
    aligned = [nodes.read_trace(kinds.describe(kind), lifted.shown) for kind, lifted in enumerate(traces)]
    value_numbering.compare(aligned, is_common)
    origin = _origin(kinds, nodes.find_loop(aligned[0].outputs))

    def merged(values: Sequence[jax.Array], arguments: Sequence[jax.Array]) -> list[jax.Array]:
        index = mark(jnp.asarray(kinds.of_replica)[axis.index()], Mark(Purpose.ROWS, origin, ""))
        return merge.run_merged(aligned, index, [*values, *arguments])

    return tracing.trace(merged, (variables, arrays), axis, function)


def _origin(kinds: Kinds, loop: nodes.Node | None) -> str:
    shapes = ", ".join(str(shapes[kinds.varied]) for shapes in kinds.shapes)
    text = (
        f"a replica's own number of rows, such as x.shape[0], which differs in this uneven step ({kinds.name} has shapes "
        f"{shapes}); the number on all replicas together is ctx.all_reduce('sum', x.shape[0])"
    )
    if loop is None:
        return text
    where = user_code.equation_line(loop.equation)
    return (
        f"{text}. JAX does not take apart what computes of rows at {where}, such as a call of `custom_vmap`, so all of it "
        "depends on their number. Compute what is assigned outside of it"
    )


def _merge_plans(traces: Sequence[Lifted], kinds: Kinds) -> ResultPlan:
    """Return the plan by which the result is rebuilt for all kinds of replicas, with the shapes that differ."""
    first = traces[0].plan
    for kind, lifted in enumerate(traces[1:], 1):
        if lifted.plan.treedef != first.treedef or not all(map(_is_same_static, lifted.plan.static, first.static)):
            raise UnevenReplicasError(
                "the batch does not divide evenly among the replicas, and replicas with different numbers of rows return "
                f"different things: {kinds.describe(0)} return {_shown(first)}, {kinds.describe(kind)} return "
                f"{_shown(lifted.plan)}. Return the same for any number of rows; their number on all replicas together is "
                f"ctx.all_reduce('sum', x.shape[0]). Or leave the odd rows out: {match_collectives.DROP}."
            )
    outputs = zip(*(lifted.closed.jaxpr.outvars[: lifted.num_results] for lifted in traces), strict=True)
    shapes = [_result_shapes([atom.aval for atom in row], kinds) for row in outputs]
    return dataclasses.replace(first, shapes=tuple(shapes))


def _other_type(plan: ResultPlan, position: int, kinds: Kinds, origin: str) -> str:
    """Return the message for a result that would be an array of a full batch and a PerReplica of this one."""
    return (
        f"the batch does not divide evenly among the replicas, and the result{plan.path_of(position)} of the step depends on "
        f"{origin}. That is one array of a batch that divides, and would be one value for each replica here. To have that "
        "in both cases return value + 0 * ctx.replica_id_in_sync_group. "
        f"Or leave the odd rows out: {match_collectives.DROP}."
    )


def _is_same_static(a: Callable[[], Any] | None, b: Callable[[], Any] | None) -> bool:
    if a is None or b is None:
        return a is b
    first, second = a(), b()
    if is_same(first, second):
        return True
    # A step may make an object anew in each trace. Equal numbers with different keys are 0.0 and -0.0, or True and 1.
    return type(first) is type(second) and not isinstance(first, int | float | complex) and bool(first == second)


def _shown(plan: ResultPlan) -> str:
    return str(plan.treedef.unflatten(["array" if leaf is None else leaf() for leaf in plan.static]))


def _result_shapes(avals: Sequence[Any], kinds: Kinds) -> tuple[Shape, ...] | None:
    if len({(aval.dtype, len(aval.shape)) for aval in avals}) > 1:
        listed = ", ".join(f"{kinds.describe(kind)} {aval.dtype}{list(aval.shape)}" for kind, aval in enumerate(avals))
        raise UnevenReplicasError(
            "the batch does not divide evenly among the replicas, and a result has another rank or dtype for another number "
            f"of rows: {listed}. Return arrays of one rank and dtype."
        )
    return stack_shapes([avals[kind].shape for kind in kinds.of_replica])[1]
