"""The mirror proof: show from a traced step which values must be the same on every replica.

A dataflow pass finds a `State` of each value; what it does not know is VARYING. Each state has an `Advice`, on which no error of
the proof depends. docs/design/mirror-proof.md has the reasoning, and what "same" assumes of the hardware.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from .._errors import CollectiveHangError
from .._jax import jaxprs, primitives, user_code
from .._jax.interpreter import Analysis
from .._jax.marks import Mark, Purpose, mark_p
from . import advice
from .advice import Advice, Said


class Sameness(enum.IntEnum):
    """Whether a value is the same on every replica; a result has the highest member of its operands."""

    SAME = 0  # computed from mirrored values only: every replica computes the same bits
    REDUCED = 1  # made the same by a collective over all replicas
    VARYING = 2  # may differ


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The state of a value."""

    sameness: Sameness
    origin: str = ""  # the reason, when it is VARYING
    advice: Advice = advice.NOTHING
    of_uneven: bool = False  # of a result: whether the replicas of its step had different numbers of rows

    @property
    def is_mirrored(self) -> bool:
        return self.sameness is not Sameness.VARYING

    @property
    def is_same(self) -> bool:
        return self.sameness is Sameness.SAME

    def advised(self, new: Advice) -> State:
        """Return the same state with other advice."""
        return self if new is self.advice else dataclasses.replace(self, advice=new)


SAME = State(Sameness.SAME)
CONSTANT = State(Sameness.SAME, advice=Advice(Said.CONSTANT))
ZERO = State(Sameness.SAME, advice=Advice(Said.ZERO))


def varying(origin: str, said: Said = Said.NOTHING) -> State:
    """Make the state of a value that may differ by replica because of `origin`."""
    return State(Sameness.VARYING, origin, Advice(said))


def join(states: Sequence[State]) -> State:
    """Return the state of a value that is computed from values in these states."""
    highest = SAME
    for state in states:
        if state.sameness > highest.sameness:
            highest = state
    return State(highest.sameness, highest.origin, advice.join([state.advice for state in states]))


def either(states: Sequence[State]) -> State:
    """Return the state of a value that is one of several."""
    joined = join(states)
    return joined.advised(advice.either(states, joined.advice))


@dataclasses.dataclass
class Findings:
    """The results of the pass; marks, with their values' states, are in program order."""

    outputs: list[State] = dataclasses.field(default_factory=list)
    marks: list[tuple[Mark, State]] = dataclasses.field(default_factory=list)  # SHARE: only if one divides another share
    has_collective: bool = False
    drawn: advice.Drawn = dataclasses.field(default_factory=advice.Drawn)
    varying: set[jaxprs.Var] = dataclasses.field(default_factory=set)  # results, also of inner jaxprs, that may differ


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
    gradients: dict[int, advice.Gradient]  # number of an array -> its kind, from the SUM marks before a sum to the TOTAL marks
    within: str | None = None  # why the replicas may disagree on whether this code runs
    transforms: tuple[str, ...] = ()  # JAX's transformations of the code around this, outermost first
    around: tuple[Any, ...] = ()  # the equations around this code, innermost first

    def inside(self, equation: Any, decision: State | None = None, is_final: bool = True) -> _Pass:
        """Return the pass for a jaxpr inside an equation."""
        within, findings = self.within, self.findings if is_final else None
        if decision is not None and not decision.is_mirrored:
            within = decision.origin
        transforms = self.transforms + jaxprs.transforms_of(equation)
        return _Pass(findings, self.gradients, within, transforms, (equation, *self.around))

    def equation(self, equation: jaxprs.Equation, values: list[State]) -> Sequence[State]:
        results = super().equation(equation, values)
        if self.findings is not None:
            for variable, state in zip(equation.outvars, results, strict=True):
                if state.sameness is Sameness.VARYING:
                    self.findings.varying.add(variable)
        if not (self.transforms or jaxprs.names_around(equation)) or not jaxprs.is_backward(equation, self.transforms):
            return results
        return [result.advised(advice.backward(result.advice)) for result in results]

    def line(self, equation: Any) -> str:
        """Return the user's line of an equation, else of the equation around it."""
        return user_code.equation_line(equation, *self.around)

    def join(self, values: Sequence[State]) -> State:
        return join(values)

    def merged(self, values: Sequence[State]) -> State:
        return either(values)

    def chosen(self, decision: State, value: State) -> State:
        state = join((decision, value))
        return state.advised(advice.chosen(value.advice, state.advice))

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
            is_of_step = all(value.advice.is_operand for value in values)
            given = values[0] if len(values) == 1 else join(values)  # one keeps its gradient, which a join drops
            state = self.collective(equation, given, where, is_of_step)
            if not is_of_step:
                state = state.advised(dataclasses.replace(state.advice, came_back=where))
        else:  # a cast
            state = join(values)
        return [state] * len(equation.outvars)

    def operation(self, equation: Any, inputs: list[State]) -> State:
        """Return the state of the results of a primitive, which is VARYING unless it is known to be pure."""
        name = equation.primitive.name
        inside = () if name in primitives.SIMPLE else jaxprs.inside(equation)
        if inside:
            self.refuse_collectives(equation, inside)
        joined, drawn = join(inputs), None if self.findings is None else self.findings.drawn
        state = State(joined.sameness, joined.origin, advice.operation(equation, inputs, joined, self.line, drawn))
        if state.sameness is Sameness.VARYING:
            return state
        if name in primitives.PURE and all(map(jaxprs.is_plain, inside)):
            return state
        if all(0 in getattr(atom.aval, "shape", (1,)) for atom in equation.outvars):
            return state  # nothing can differ in arrays without elements, such as `jnp.empty((0,))`
        return varying(f"`{name}` at {self.line(equation)}, whose results the proof knows nothing about", state.advice.said)

    def refuse_collectives(self, equation: Any, inside: Sequence[Any]) -> None:
        """Refuse collectives inside an equation, because the pass does not know how often its inside runs."""
        for nested in inside:
            if jaxprs.is_collective(nested):
                raise CollectiveHangError(
                    f"the collective `{nested.primitive.name}` at {self.inside(equation).line(nested)} runs inside "
                    f"`{equation.primitive.name}`, and the proof does not know whether all replicas reach it there: one "
                    "that does not leaves the others waiting for ever. Move the collective out."
                )

    def mark(self, equation: Any, state: State) -> State:
        note = equation.params["note"]
        if note.purpose is Purpose.ROWS:
            return varying(note.name)
        if note.purpose is Purpose.ASSIGN and self.within is not None and state.is_mirrored:
            state = varying(self.within)  # only some replicas assign it
        is_backward, line = partial(jaxprs.is_backward, equation, self.transforms), partial(self.line, equation)
        new, is_judged = advice.marked(note, state, self.gradients, is_backward, line)
        if is_judged and self.findings is not None:
            located = note if note.where else dataclasses.replace(note, where=self.line(equation))
            self.findings.marks.append((located, state))
        if note.purpose is Purpose.ASSIGN and state.is_mirrored:
            return SAME  # it starts afresh, so that two updates in one step are judged like one in each of two
        return state.advised(new)

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
            return varying(f"`{name}` at {where}, which gives each replica its own part", given.advice.said)
        sameness = min(given.sameness, Sameness.REDUCED)
        return State(sameness, advice=advice.combined(name, given, is_of_step))
