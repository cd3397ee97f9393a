"""Uneven steps: replicas with different numbers of rows run one compiled program, each on its true rows.

The step is traced once for each distinct set of shapes, and `_program/uneven/merge` makes one program of the traces.
docs/design/uneven-steps.md says how, and why copies still cannot diverge.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
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
from ..call import ArrayLeaf, Call, argument_names, is_same
from ..lift import Lifted, ResultPlan, Traced, trace_step
from ..proof import Findings, State
from . import merge, nodes, value_numbering
from .value_numbering import DROP


def lift_uneven(
    call: Call, frame_with: Callable[[Any], Frame], states_of: Callable[[Lifted], list[State]]
) -> tuple[Lifted, Findings]:
    """Make one pure function of a step in which replicas have different numbers of rows, and prove it.

    `frame_with` makes the context to trace in, given the `_AskedSizes` that knows the other replicas' sizes; `states_of` returns
    the proof's states of a lifted step's inputs.

    Raises:
        UnevenReplicasError: when replicas with different numbers of rows would not reach the same collectives,
            or return different structures, or values that depend on the replica's number of rows alone.
        ReplicasDivergeError: when replicas would diverge even with equal rows.
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
    findings = dataclasses.replace(proof.prove(closed.jaxpr, states_of(merged)), drawn=found[largest].drawn)
    of_kinds = zip(*(proven.outputs[: merged.num_results] for proven in found), strict=True)
    for position, (state, states) in enumerate(zip(findings.outputs, of_kinds, strict=False)):
        if not state.is_mirrored and all(of_kind.is_mirrored for of_kind in states):
            raise UnevenReplicasError(  # it would be an array of a full batch and a PerReplica of this one
                f"the batch does not divide evenly among the replicas, and the result{plan.path_of(position)} of the step "
                f"depends on {state.origin}. That is one array of a batch that divides, and would be one value for each replica "
                "here. To have that in both cases return value + 0 * ctx.replica_id_in_sync_group. "
                f"Or leave the odd rows out: {DROP}."
            )
    findings.outputs = [dataclasses.replace(state, of_uneven=True) for state in findings.outputs]
    return merged, findings


# -- the kinds of replicas: replicas whose arguments have the same shapes are of one kind


@dataclasses.dataclass(frozen=True)
class Kinds:
    """The kinds of the replicas, by the shapes of their arguments."""

    shapes: tuple[tuple[Shape, ...], ...]  # for each kind, the shape of each array argument
    of_replica: tuple[int, ...]  # the kind of each replica
    varied: int  # an argument whose shape differs, by position; messages speak of it
    name: str  # its name
    batches: tuple[int, ...]  # the arguments that are batches of datasets

    def describe(self, kind: int) -> str:
        """Name the replicas of a kind in a message."""
        return f"the replicas whose {self.name} has shape {self.shapes[kind][self.varied]}"

    def explain(self, kind: int) -> str:
        """Say in a note which replicas an error is about."""
        if self.most_rows(kind):
            return (
                f"This is about {self.describe(kind)}: the batch does not divide evenly among the replicas. To leave odd rows "
                f"out: {DROP}."
            )
        numbers = [replica for replica, kind_of in enumerate(self.of_replica) if kind_of == kind]
        who = f"Replica {numbers[0]} has" if len(numbers) == 1 else f"The replicas {', '.join(map(str, numbers))} have"
        return (
            f"{who} no rows of this batch: `{self.name.strip('`')}` has shape {self.shapes[kind][self.varied]} there. A step "
            "must work without rows. jnp.max(x) has no value: write jnp.max(x, initial=-jnp.inf). Or choose a batch size of "
            f"which each replica gets a row, or leave the odd rows out: {DROP}."
        )

    def on_replicas(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return each replica's size, given each kind's."""
        return tuple(sizes[kind] for kind in self.of_replica)

    def guess(self, kind: int, size: int) -> tuple[int, ...]:
        """Guess each kind's size, given one kind's: it is taken for a number of rows, or a multiple of one."""
        for sizes in self._row_counts():
            rows = sizes[kind]
            if size == rows or (rows > 1 and size % rows == 0):
                times = size // rows if rows else 1
                return tuple(num_rows * times for num_rows in sizes)
        return (size,) * len(self.shapes)

    def rows(self, kind: int) -> tuple[int, int]:
        """Return the rows of a replica of a kind, and of all replicas: their ratio is its weight in a mean.

        Raises:
            UnevenReplicasError: when the ratio differs between arguments.
        """
        counts = [*self._row_counts(), *(tuple(shapes[i][0] for shapes in self.shapes) for i in self.batches)]
        totals = [sum(self.on_replicas(sizes)) for sizes in counts]
        shares = {tuple(Fraction(size, total) for size in sizes) for sizes, total in zip(counts, totals, strict=True)}
        if len(shares) > 1:
            raise UnevenReplicasError(
                "a mean over the replicas weighs them by their rows, but the arguments divide differently among the replicas: "
                f"{', '.join(str(self.on_replicas(sizes)) for sizes in dict.fromkeys(counts))} rows. For one "
                "weight for all write ctx.all_reduce('mean', value, by_rows=False). Divide a loss by its own rows on all "
                "replicas, mr.losses.compute_average_loss(per_example_loss), and let the gradients be summed: aggregate='sum'. "
                f"Or leave the odd rows out: {DROP}."
            )
        return counts[0][kind], totals[0]

    def check_lengths(self, lengths: tuple[int, ...]) -> None:
        """Refuse losses unless their lengths are in the ratio of the replicas' rows, or each is the number of all rows.

        Rows are counted along axes that differ, along the first axes of batches and of arguments with an axis that differs,
        and as sums of up to four such counts, for `jnp.concatenate`.

        Raises:
            UnevenReplicasError: for other lengths.
        """
        arguments = enumerate(zip(*self.shapes, strict=True))
        first = [tuple(shape[0] for shape in shapes) for i, shapes in arguments if len(set(shapes)) > 1 or i in self.batches]
        counts = list(dict.fromkeys(self.on_replicas(sizes) for sizes in (*self._row_counts(), *first)))
        for rows in counts:
            is_gathered = set(lengths) == {sum(rows)}
            pairs = zip(lengths, rows, strict=True)
            if is_gathered or all(length * sum(rows) == sum(lengths) * num_rows for length, num_rows in pairs):
                return
        of_several = (itertools.combinations_with_replacement(counts, number) for number in range(2, 5))
        for added in itertools.chain.from_iterable(of_several):
            rows = tuple([sum(sizes) for sizes in zip(*added, strict=True)])
            times = sum(lengths) // max(1, sum(rows))
            if lengths == tuple([times * num_rows for num_rows in rows]):
                return
        raise UnevenReplicasError(_LENGTHS.format(lengths=lengths, rows=counts[0]))

    def most_rows(self, kind: int) -> int:
        return max(sizes[kind] for sizes in self._row_counts())

    def _row_counts(self) -> Iterator[tuple[int, ...]]:
        for shapes in zip(*self.shapes, strict=True):
            yield from (sizes for sizes in zip(*shapes, strict=True) if len(set(sizes)) > 1)


_LENGTHS = (
    "the batch does not divide evenly among the replicas, and a loss that shall be one number for each example, shape [n], has "
    "the lengths {lengths} on the replicas, which have {rows} rows. A mean over the rows, such as losses.mean(axis=0), and a "
    "vector of several terms have such a length, and their mean would change with the number of replicas. Write one of these "
    "lines:\n"
    "    losses.mean(axis=1)                                       # of shape [n, m], the mean of each example's own elements\n"
    "    mr.losses.mean_over_own_rows(jnp.mean(losses))            # a scalar, of terms that are means over own rows\n"
    "    mr.losses.weighted_mean(losses, jnp.ones(losses.shape))   # a scalar, divided by the elements on all replicas"
)


def find_kinds(call: Call, leaves: Sequence[ArrayLeaf]) -> Kinds:
    """Tell which replicas have arguments of the same shapes."""
    varied = next(i for i, leaf in enumerate(leaves) if leaf.shapes is not None)
    num_replicas = len(leaves[varied].shapes or ())
    of_each = list(zip(*(leaf.shapes or (leaf.shape,) * num_replicas for leaf in leaves), strict=True))
    shapes = tuple(dict.fromkeys(of_each))
    of_replica = tuple(map(shapes.index, of_each))
    batches = tuple(i for i, leaf in enumerate(leaves) if leaf.is_batch)
    return Kinds(shapes, of_replica, varied, argument_names(call)[varied], batches)


# -- tracing for each kind


class _AskedSizes:
    """The sizes on all replicas that a step asks for while it is traced for one kind.

    A step asks in the same order whatever its rows, so the k-th question of every trace is the same one. The questions of all
    kinds in the traces before are known; the others are guessed.
    """

    def __init__(self, kinds: Kinds, kind: int, known: Sequence[tuple[int, ...]]) -> None:
        self._kinds, self._kind, self._known = kinds, kind, known
        self.asked: list[int] = []
        self.answers: list[tuple[int, ...]] = []
        self._renew_caches: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace inside this block, so that a function under an inner `jit` is traced, and asks, at each of its calls.

        JAX caches its trace by shape: calls whose shapes are equal for one kind only would ask once there, and twice elsewhere.
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
        self.answers.append(self._kinds.on_replicas(sizes))
        return self.answers[-1]


def _trace_all(call: Call, kinds: Kinds, frame_with: Callable[[Any], Frame]) -> list[Lifted]:
    """Trace the step for each kind with the right sizes, and with the variables that any kind touches.

    Guesses are nearly always right, and then each kind is traced once. A wrong guess may even make the step fail. It is found
    when all kinds have asked, and the next round has the right answer to at least one more question.
    """
    known: list[tuple[int, ...]] = []
    for num_sure in itertools.count():  # so many questions had the right answers
        sizes = [_AskedSizes(kinds, kind, known) for kind in range(len(kinds.shapes))]
        traces: list[Traced] = []
        errors: dict[int, Exception] = {}
        for kind, of_kind in enumerate(sizes):
            try:
                with of_kind.tracing():
                    traces.append(trace_step(call, kinds.shapes[kind], frame_with(of_kind)))
            except Exception as error:
                errors[kind] = error
        asked = [of_kind.asked for of_kind in sizes]
        before, known = known, list(zip(*asked, strict=False))
        is_agreed = all(of_kind.answers == list(map(kinds.on_replicas, known)) for of_kind in sizes)
        if is_agreed and not errors:
            break
        is_stuck = known == before or known[:num_sure] != before[:num_sure]
        if errors:
            kind = min(errors, key=lambda kind: len(asked[kind]) > 0)  # without a question, no answer was wrong
            if is_agreed or is_stuck or not asked[kind]:
                notes = list(getattr(errors[kind], "__notes__", []))
                if traces:
                    notes.insert(0, kinds.explain(kind))  # before JAX's own
                errors[kind].__notes__ = notes
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
        f"whatever x.shape[0] is, or leave the odd rows out: {DROP}."
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
    origin = _origin(kinds, nodes.find_undivided(aligned[0].outputs))

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
        f"{text}. JAX does not take apart what computes of rows at {where}, such as a call of `custom_vmap` or a loop that "
        "prints, so all of it depends on their number. Compute what is assigned outside of it"
    )


def _merge_plans(traces: Sequence[Lifted], kinds: Kinds) -> ResultPlan:
    """Return one plan for the results of all kinds of replicas, with the shapes that differ."""
    first = traces[0].plan
    for kind, lifted in enumerate(traces[1:], 1):
        if lifted.plan.treedef != first.treedef or not all(map(_is_same_static, lifted.plan.static, first.static)):
            raise UnevenReplicasError(
                "the batch does not divide evenly among the replicas, and replicas with different numbers of rows return "
                f"different things: {kinds.describe(0)} return {_shown(first)}, {kinds.describe(kind)} return "
                f"{_shown(lifted.plan)}. Return the same for any number of rows; their number on all replicas together is "
                f"ctx.all_reduce('sum', x.shape[0]). Or leave the odd rows out: {DROP}."
            )
    outputs = zip(*(lifted.closed.jaxpr.outvars[: lifted.num_results] for lifted in traces), strict=True)
    shapes = [_result_shapes([atom.aval for atom in row], kinds) for row in outputs]
    return dataclasses.replace(first, shapes=tuple(shapes))


def _is_same_static(a: Callable[[], Any] | None, b: Callable[[], Any] | None) -> bool:
    if a is None or b is None:
        return a is b
    first, second = a(), b()
    if is_same(first, second):
        return True
    # A step may make an object anew in each trace. Equal numbers with different keys are 0.0 and -0.0, or True and 1.
    return type(first) is type(second) and not isinstance(first, int | float | complex) and bool(first == second)


def _shown(plan: ResultPlan) -> str:
    return str(plan.rebuild(["array"] * len(plan.shapes)))


def _result_shapes(avals: Sequence[Any], kinds: Kinds) -> tuple[Shape, ...] | None:
    if len({(aval.dtype, len(aval.shape)) for aval in avals}) > 1:
        listed = ", ".join(f"{kinds.describe(kind)} {aval.dtype}{list(aval.shape)}" for kind, aval in enumerate(avals))
        raise UnevenReplicasError(
            "the batch does not divide evenly among the replicas, and a result has another rank or dtype for another number "
            f"of rows: {listed}. Return arrays of one rank and dtype."
        )
    return stack_shapes([avals[kind].shape for kind in kinds.of_replica])[1]
