"""The mirror proof: show from a traced step which values must be the same on every replica.

A dataflow pass over the jaxpr finds a `State` of each value, and with it what the losses have said of themselves (`Said`).
Values that the pass does not know are VARYING: sound before complete. docs/design/mirror-proof.md has the reasoning, and what
"same" assumes of the hardware.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from .._errors import CollectiveHangError
from .._jax import jaxprs, primitives, user_code
from .._jax.interpreter import Analysis
from .._jax.marks import Mark, Purpose, mark_p
from . import noise
from .noise import Noise


class Sameness(enum.IntEnum):
    """Whether a value is the same on every replica; a value computed from several has the highest of theirs."""

    SAME = 0  # computed from mirrored values only: every replica computes the same bits
    REDUCED = 1  # made the same by a collective over all replicas
    VARYING = 2  # may differ


class Said(enum.IntEnum):
    """The mark of a loss, and of the values and derivatives computed from it.

    A product has the highest mark of its factors, a sum the lowest of its operands, without constants.
    """

    ZERO = 0  # the number 0, and what it is multiplied with: it has no mark
    CONSTANT = 1  # computed from numbers in the program alone
    NOTHING = 2
    WHOLE = 3  # a value equal on all replicas was summed over them, as in the backward pass of a loss that was combined
    COMBINED = 4  # a share that was combined over the replicas
    SHARE = 5  # the loss is this replica's share: the shares of all add up to the whole, and so do their gradients


class Gradient(enum.IntEnum):
    """Whether a value is a gradient: the result of a backward pass, or a linear function of such results alone."""

    NONE = 0
    OWN = 1
    MIXED = 2  # one of the replica's own and a mirrored value were added, such as a weight decay: no gradient alone
    TOTAL = 3  # the step has combined it over the replicas


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The state of a value."""

    sameness: Sameness
    origin: str = ""  # the reason, when it is VARYING
    said: Said = Said.NOTHING
    is_operand: bool = False  # whether the step itself passes it, unchanged, to a collective
    came_back: str = ""  # the line of the collective through which it came as a gradient
    curved: str = ""  # the line of a share by which the derivative of the loss, from which it comes, differs by replica
    has_share: bool = False  # whether a share, or its gradient by a variable, is in it that was not combined
    gradient: Gradient = Gradient.NONE
    drifts: bool = False  # whether in it a gradient that was not combined was added to a mirrored value
    noise: Noise | None = None  # random numbers in it, the same on all replicas
    old: tuple[int, bool] | None = None  # the variable whose old value is in it, and whether all else was added to that
    of_uneven: bool = False  # of a result: whether the replicas of its step had different numbers of rows

    @property
    def is_mirrored(self) -> bool:
        return self.sameness is not Sameness.VARYING

    @property
    def is_same(self) -> bool:
        return self.sameness is Sameness.SAME

    def saying(self, said: Said) -> State:
        """Return the same state with this mark."""
        return self if said is self.said else dataclasses.replace(self, said=said)


SAME = State(Sameness.SAME)
CONSTANT = State(Sameness.SAME, said=Said.CONSTANT)
ZERO = State(Sameness.SAME, said=Said.ZERO)

#: The purposes of gradients that an optimizer combines over the replicas.
GIVEN_TO_OPTIMIZERS = frozenset({Purpose.GRADIENT, Purpose.SUMMED_GRADIENT, Purpose.MEAN_GRADIENT})


def varying(origin: str) -> State:
    """Make the state of a value that may differ by replica because of `origin`."""
    return State(Sameness.VARYING, origin)


def join(states: Iterable[State]) -> State:
    """Return the state of a value that is computed from values in these states."""
    highest, said, came_back, curved, has_share, drifts, noise, old = ZERO, Said.CONSTANT, "", "", False, False, None, None
    for state in states:
        said, came_back, has_share = max(said, state.said), came_back or state.came_back, has_share or state.has_share
        curved = curved or state.curved
        drifts, noise, old = drifts or state.drifts, noise or state.noise, old or state.old
        if state.sameness > highest.sameness:
            highest = state
    mixed = None if old is None else (old[0], False)
    ways = {"came_back": came_back, "curved": curved}
    return State(highest.sameness, highest.origin, said, **ways, has_share=has_share, drifts=drifts, noise=noise, old=mixed)


def either(states: Sequence[State]) -> State:
    """Return the state of a value that is one of several."""
    said, olds = _lowest([state.said for state in states], above=Said.CONSTANT), {state.old for state in states}
    joined = dataclasses.replace(join(states), said=said, gradient=_gradient_of_sum(states))
    return dataclasses.replace(joined, old=olds.pop()) if len(olds) == 1 else joined


@dataclasses.dataclass
class Findings:
    """The results of the pass; marks, with their values' states, are in program order."""

    outputs: list[State] = dataclasses.field(default_factory=list)
    marks: list[tuple[Mark, State]] = dataclasses.field(default_factory=list)  # of shares those that divide another one
    has_collective: bool = False
    noises: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # on rows: the lines of the draw and of the rows


def prove(jaxpr: jaxprs.Jaxpr, inputs: Sequence[State]) -> Findings:
    """Find the states in a step that was traced with the replica axis bound; its constants are mirrored.

    Raises:
        CollectiveHangError: when replicas may disagree on whether, or how often, they reach a collective.
    """
    findings, unknown = Findings(), np.nan
    findings.outputs = _Pass(findings, {}).run(jaxpr, (unknown,) * len(jaxpr.constvars), inputs)
    return findings


@dataclasses.dataclass(frozen=True)
class _Pass(Analysis[State]):
    """One pass of the proof over a jaxpr."""

    findings: Findings | None  # None while the fixed point of a loop is searched
    gradients: dict[int, Gradient]  # of the arrays of the sum over the replicas that comes next, by their numbers
    within: str | None = None  # why the replicas may disagree on whether this code runs
    transforms: tuple[str, ...] = ()  # JAX's transformations of the code around this, outermost first
    around: tuple[Any, ...] = ()  # the equations around this code, innermost first

    def inside(self, equation: Any, decision: State | None = None, is_final: bool = True) -> _Pass:
        """Return the pass for a jaxpr inside an equation."""
        return _Pass(
            findings=self.findings if is_final else None,
            gradients=self.gradients,
            within=self.within if decision is None or decision.is_mirrored else decision.origin,
            transforms=self.transforms + jaxprs.transforms_of(equation),
            around=(equation, *self.around),
        )

    def equation(self, equation: jaxprs.Equation, values: list[State]) -> Sequence[State]:
        results = super().equation(equation, values)
        if not (self.transforms or jaxprs.names_around(equation)) or not jaxprs.is_backward(equation, self.transforms):
            return results
        return [result if result.said is Said.ZERO else dataclasses.replace(result, gradient=Gradient.OWN) for result in results]

    def line(self, equation: Any) -> str:
        """Return the user's line of an equation, or of what it is inside of when JAX has lost it."""
        return user_code.equation_line(equation, *self.around)

    def join(self, values: Sequence[State]) -> State:
        return join(values)

    def merged(self, values: Sequence[State]) -> State:
        return either(values)

    def chosen(self, decision: State, value: State) -> State:
        state = join((decision, value))
        return dataclasses.replace(state, said=value.said, gradient=value.gradient, noise=value.noise, old=value.old or state.old)

    def constant(self, value: Any, aval: jax.core.AbstractValue) -> State:
        is_zero = not isinstance(value, jax.Array) and not np.any(value)
        return ZERO if is_zero else CONSTANT

    def plain(self, equation: Any, values: list[State]) -> Sequence[State]:
        if equation.primitive is mark_p:
            return [self.mark(equation, values[0])]
        if equation.primitive.name in primitives.ONE_TO_ONE:
            return values
        if equation.primitive.name in primitives.MAKE_SAME:  # over an axis of some vmap
            return [join(values)] * len(equation.outvars)
        return [self.operation(equation, values)] * len(equation.outvars)

    def over_replicas(self, equation: Any, values: list[State]) -> Sequence[State]:
        where = self.line(equation)
        if jaxprs.is_replica_number(equation):
            state = varying(f"the replica's own number (replica_id_in_sync_group, ctx.rng) at {where}")
        elif jaxprs.is_collective(equation):
            is_of_step = all(given.is_operand for given in values)
            given = dataclasses.replace(values[0], is_operand=False) if len(values) == 1 else join(values)
            state = self.collective(equation, given, where, is_of_step)
            if not is_of_step:
                state = dataclasses.replace(state, came_back=where)
        else:  # a cast
            state = join(values)
        return [state] * len(equation.outvars)

    def operation(self, equation: Any, inputs: list[State]) -> State:
        """Return the state of the results of a primitive, which is VARYING unless it is known to be pure."""
        name = equation.primitive.name
        inside = () if name in primitives.SIMPLE else jaxprs.inside(equation)
        if inside:
            self.refuse_collectives(equation, inside)
        state = join(inputs)
        if (places := jaxprs.linear_operands(equation)) is not None:
            state = _linear(name, [inputs[k] for k in places], state)
        # Whether a loss is finite is no loss, nor is its place.
        if not all(jax.numpy.issubdtype(getattr(atom.aval, "dtype", np.float32), np.inexact) for atom in equation.outvars):
            state = dataclasses.replace(state, said=min(state.said, Said.NOTHING), has_share=False)
        if name in primitives.DRAWS or state.noise is not None:
            state = dataclasses.replace(state, noise=self.noise(equation, inputs, state))
        if state.old is not None:
            state = dataclasses.replace(state, old=_old(name, inputs, state.old))
        if state.sameness is Sameness.VARYING:
            return state
        if name in primitives.PURE and all(map(jaxprs.is_plain, inside)):
            return state
        if all(0 in getattr(atom.aval, "shape", (1,)) for atom in equation.outvars):
            return state  # nothing can differ in arrays without elements, such as `jnp.empty((0,))`
        return varying(f"`{name}` at {self.line(equation)}, whose results the proof knows nothing about").saying(state.said)

    def noise(self, equation: jaxprs.Equation, inputs: list[State], state: State) -> Noise | None:
        """Return the noise in the result of an operation, or note that it meets a replica's own rows there."""
        name = equation.primitive.name
        if state.is_mirrored:
            is_drawn = name in primitives.DRAWS
            return (
                noise.drawn(equation, self.line(equation)) if is_drawn else noise.result_of(equation, [i.noise for i in inputs])
            )
        operands = list(zip(inputs, equation.invars, strict=True))
        own = [one for one, atom in operands if not one.is_mirrored and noise.has_rows(atom)]
        has_rows = not all(one.gradient for one in own)  # a gradient has none
        if self.findings is not None and name in primitives.ELEMENTWISE and has_rows:
            lines = [one.noise.where for one, atom in operands if one.noise is not None and one.noise.is_for_rows(atom)]
            self.findings.noises.extend((where, self.line(equation)) for where in lines)
        return None

    def refuse_collectives(self, equation: Any, inside: Sequence[Any]) -> None:
        """Refuse collectives inside a construct that runs its inside a number of times unknown to the pass."""
        for nested in inside:
            if jaxprs.is_collective(nested):
                raise CollectiveHangError(
                    f"the collective `{nested.primitive.name}` at {self.inside(equation).line(nested)} runs inside "
                    f"`{equation.primitive.name}`, and the proof does not know whether all replicas reach it there: one "
                    "that does not leaves the others waiting for ever. Move the collective out."
                )

    def mark(self, equation: Any, state: State) -> State:
        note, findings = equation.params["note"], self.findings
        match note.purpose:
            case Purpose.SHARE | Purpose.TANGENT:
                is_divided_again = note.name == "divided" and state.has_share and note.purpose is Purpose.SHARE
                if is_divided_again and findings is not None:
                    findings.marks.append((dataclasses.replace(note, where=self.line(equation)), state))
                has_share = state.has_share or note.purpose is Purpose.SHARE
                return dataclasses.replace(state, said=Said.SHARE, has_share=has_share)
            case Purpose.COTANGENT if state.said is not Said.WHOLE:  # it varies where a loss is not linear in it
                if state.is_mirrored:
                    return state.saying(Said.SHARE)
                return dataclasses.replace(state, said=Said.NOTHING, curved=self.line(equation))
            case Purpose.OWN_GRADIENT:  # by a replica's own rows it is no share
                is_share = state.said is Said.SHARE
                return dataclasses.replace(state, has_share=state.has_share or is_share, gradient=Gradient.OWN)
            case Purpose.ASSIGN if self.within is not None and state.is_mirrored:
                state = varying(self.within)  # only some replicas assign it
            case Purpose.ROWS:
                return varying(note.name)
            case Purpose.OLD:
                return dataclasses.replace(state, old=(note.number, True))
            case Purpose.OPERAND:
                return dataclasses.replace(state, is_operand=True)
            case Purpose.TOTAL:
                return dataclasses.replace(state, gradient=_combined(self.gradients.get(note.number, Gradient.NONE)))
            case Purpose.SUM | Purpose.MEAN:
                self.gradients[note.number] = state.gradient
                if jaxprs.is_backward(equation, self.transforms):
                    return state  # where a derivative of the user's own sums, or what a checkpoint computes again
        if findings is not None:
            findings.marks.append((note, state))
        if note.purpose in GIVEN_TO_OPTIMIZERS:
            return dataclasses.replace(state, gradient=Gradient.NONE)  # judged there, and no more where it is summed
        # A mirrored variable's new value starts afresh, so that two updates in one step are judged like one in each of two.
        return SAME if note.purpose is Purpose.ASSIGN and state.is_mirrored else state

    def collective(self, equation: Any, given: State, where: str, is_of_step: bool) -> State:
        name = equation.primitive.name
        if self.within is not None:
            raise CollectiveHangError(
                f"the collective `{name}` at {where} runs under a condition or loop that may differ by replica: it "
                f"depends on {self.within}. Replicas that skip it leave the others waiting for ever. Compute the "
                "condition from mirrored values (all_reduce it first), or move the collective out and choose "
                "between the results with jnp.where."
            )
        if self.findings is not None:
            self.findings.has_collective = True
        if name not in primitives.MAKE_SAME or jaxprs.is_over_groups(equation):
            return varying(f"`{name}` at {where}, which gives each replica its own part").saying(given.said)
        if not given.is_mirrored and name in primitives.SUMS:
            return State(Sameness.REDUCED, said=min(given.said, Said.COMBINED))
        if not given.is_mirrored:  # all_gather
            return State(Sameness.REDUCED, said=given.said, gradient=_combined(given.gradient))
        # In a backward pass also what was computed from a combined share, such as the derivative of its logarithm.
        highest = Said.NOTHING if is_of_step else Said.COMBINED
        is_multiplied = name in primitives.SUMS and Said.ZERO < given.said <= highest
        return dataclasses.replace(given, origin="", has_share=False, said=Said.WHOLE if is_multiplied else given.said)


def _old(name: str, inputs: Sequence[State], mixed: tuple[int, bool]) -> tuple[int, bool]:
    """Return which variable's old value is in a result, and whether all else was added to it."""
    first, *others = inputs
    if name in primitives.SELECTS:
        return others[0].old or mixed if len({one.old for one in others}) == 1 and first.old is None else mixed
    if name in primitives.COMMUTATIVE and first.old is None and len(others) == 1:
        first, others = others[0], [first]
    is_sum = name in primitives.SPREADS or name in primitives.ADD_TO_FIRST
    return first.old if is_sum and first.old is not None and all(one.old is None for one in others) else mixed


def _linear(name: str, given: Sequence[State], state: State) -> State:
    """Return the state of the result of an operation that is linear in its numbers, given that of any other operation."""
    if name in primitives.ADDITIONS or name in primitives.DERIVATIVE_SUMS:
        return _sum(given, state, name in primitives.DERIVATIVE_SUMS)
    is_quotient = name in primitives.DIVISIONS
    factors = given[:1] if is_quotient else given
    if any(one.said is Said.ZERO for one in factors):
        return state.saying(Said.ZERO)
    if is_quotient and given[1:] and given[1].said is Said.WHOLE:  # a sum over the replicas: this does not multiply by R
        state = state.saying(given[0].said)
    gradients = [one.gradient for one in factors if one.gradient]
    return dataclasses.replace(state, gradient=gradients[0]) if len(gradients) == 1 else state


def _sum(given: Sequence[State], state: State, of_derivatives: bool) -> State:
    """Return the state of a sum, or, `of_derivatives`, of JAX's sum of derivatives, of which a constant is one too."""
    said = [one.said for one in given]
    lowest = (
        Said.WHOLE if of_derivatives and Said.WHOLE in said else _lowest(said, Said.ZERO if of_derivatives else Said.CONSTANT)
    )
    gradient = _gradient_of_sum(given)
    return dataclasses.replace(state, said=lowest, gradient=gradient, drifts=state.drifts or gradient is Gradient.MIXED)


def _gradient_of_sum(states: Sequence[State]) -> Gradient:
    """Return what a sum of such values is, in which constants do not count."""
    gradients = [one for one in states if one.gradient]
    others = [one for one in states if not one.gradient and one.said > Said.CONSTANT]
    kind = max((one.gradient for one in gradients), default=Gradient.NONE)
    if not others:
        return kind
    is_own = kind is not Gradient.TOTAL and not all(one.is_mirrored for one in gradients)
    return Gradient.MIXED if is_own and all(one.is_mirrored for one in others) else Gradient.NONE


def _combined(kind: Gradient) -> Gradient:
    """Return what a gradient is after it was combined over the replicas."""
    return Gradient.TOTAL if kind in (Gradient.OWN, Gradient.TOTAL) else Gradient.NONE


def _lowest(said: Sequence[Said], above: Said) -> Said:
    return min([one for one in said if one > above], default=max(said, default=above))
