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
from .._jax import jaxprs, user_code
from .._jax.interpreter import Analysis
from .._jax.jaxprs import Jaxpr
from .._jax.marks import Mark, Purpose, mark_p
from .._jax.primitives import ADDITIONS, LOOPS, MAKE_SAME, PURE, SPREADS, SUMS


class Sameness(enum.IntEnum):
    """Whether a value is the same on every replica; a value computed from several has the highest of theirs."""

    SAME = 0  # computed from mirrored values only: every replica computes the same bits
    REDUCED = 1  # made the same by a collective over all replicas
    VARYING = 2  # may differ


class Said(enum.IntEnum):
    """The mark of a loss, and of the values and derivatives computed from it.

    A product has the highest mark of its factors, a sum the lowest of its operands, without constants.
    """

    ZERO = 0  # the number 0, which has no mark
    CONSTANT = 1  # computed from numbers in the program alone
    NOTHING = 2
    WHOLE = 3  # a value equal on all replicas was summed over them, as in the backward pass of a loss that was combined
    COMBINED = 4  # a share that was combined over the replicas
    SHARE = 5  # the loss is this replica's share: the shares of all add up to the whole, and so do their gradients


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The state of a value."""

    sameness: Sameness
    origin: str = ""  # the reason, when it is VARYING
    said: Said = Said.NOTHING
    is_operand: bool = False  # whether the step itself passes it, unchanged, to a collective
    came_back: str = ""  # the line of the collective through which it came as a gradient
    has_share: bool = False  # whether a share, or its gradient by a variable, is in it that was not combined

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

#: Primitives whose results have other marks than a product.
_SPECIAL = ADDITIONS | SPREADS | {"add_any", "div"}


def varying(origin: str) -> State:
    """Make the state of a value that may differ by replica because of `origin`."""
    return State(Sameness.VARYING, origin)


def join(states: Iterable[State]) -> State:
    """Return the state of a value that is computed from values in these states."""
    highest, said, came_back, has_share = ZERO, Said.CONSTANT, "", False
    for state in states:
        said, came_back, has_share = max(said, state.said), came_back or state.came_back, has_share or state.has_share
        if state.sameness > highest.sameness:
            highest = state
    if highest.is_operand or (highest.came_back, highest.has_share) != (came_back, has_share):
        highest = dataclasses.replace(highest, is_operand=False, came_back=came_back, has_share=has_share)
    return highest.saying(said)


def either(states: Iterable[State]) -> State:
    """Return the state of a sum of values in these states, or of one of them."""
    states = list(states)
    return join(states).saying(_lowest(states, above=Said.CONSTANT))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    name: str
    num_bytes: int  # that each replica contributes
    where: str  # the user's line
    in_loop: bool


@dataclasses.dataclass
class Findings:
    """The results of the pass; marks, with their values' states, and collectives are in program order."""

    outputs: list[State] = dataclasses.field(default_factory=list)
    marks: list[tuple[Mark, State]] = dataclasses.field(default_factory=list)  # of shares those that divide another one
    collectives: list[Collective] = dataclasses.field(default_factory=list)


def prove(jaxpr: Jaxpr, inputs: Sequence[State]) -> Findings:
    """Find the states in a step that was traced with the replica axis bound; its constants are mirrored.

    Raises:
        CollectiveHangError: when replicas may disagree on whether, or how often, they reach a collective.
    """
    findings = Findings()
    findings.outputs = _Pass(findings).run(jaxpr, (None,) * len(jaxpr.constvars), inputs)
    return findings


@dataclasses.dataclass(frozen=True)
class _Pass(Analysis[State]):
    """One pass of the proof over a jaxpr."""

    findings: Findings | None  # None while the fixed point of a loop is searched
    within: str | None = None  # why the replicas may disagree on whether this code runs
    in_loop: bool = False
    around: tuple[Any, ...] = ()  # the equations around this code, innermost first

    def inside(self, equation: Any, decision: State | None = None, is_final: bool = True) -> _Pass:
        """Return the pass for a jaxpr inside an equation."""
        return _Pass(
            findings=self.findings if is_final else None,
            within=self.within if decision is None or decision.is_mirrored else decision.origin,
            in_loop=self.in_loop or equation.primitive.name in LOOPS,
            around=(equation, *self.around),
        )

    def line(self, equation: Any) -> str:
        """Return the user's line of an equation, or of what it is inside of when JAX has lost it."""
        return user_code.equation_line(equation, *self.around)

    def join(self, values: Sequence[State]) -> State:
        return join(values)

    def merged(self, values: Sequence[State]) -> State:
        return either(values)

    def chosen(self, decision: State, value: State) -> State:
        return join((decision, value)).saying(value.said)

    def constant(self, value: Any) -> State:
        is_zero = not isinstance(value, jax.Array) and np.ndim(value) == 0 and value == 0
        return ZERO if is_zero else CONSTANT

    def plain(self, equation: Any, values: list[State]) -> Sequence[State]:
        if equation.primitive is mark_p:
            return [self.mark(equation, values[0])]
        if equation.primitive.name in MAKE_SAME:  # over an axis of some vmap
            return [join(values)] * len(equation.outvars)
        return [self.operation(equation, values)] * len(equation.outvars)

    def over_replicas(self, equation: Any, values: list[State]) -> Sequence[State]:
        where = self.line(equation)
        if jaxprs.is_replica_number(equation):
            state = varying(f"the replica's own number (replica_id_in_sync_group, ctx.rng) at {where}")
        elif jaxprs.is_collective(equation):
            is_of_step = all(given.is_operand for given in values)
            state = self.collective(equation, join(values), where, is_of_step)
            if not is_of_step:
                state = dataclasses.replace(state, came_back=where)
        else:  # a cast
            state = join(values)
        return [state] * len(equation.outvars)

    def operation(self, equation: Any, inputs: list[State]) -> State:
        """Return the state of the results of a primitive, which is VARYING unless it is known to be pure."""
        name, inside = equation.primitive.name, jaxprs.inside(equation)
        self.refuse_collectives(equation, inside)
        state = join(inputs)
        if name in _SPECIAL:
            state = state.saying(_said(name, inputs))
        # Whether a loss is finite is no loss, nor is its place.
        if not all(jax.numpy.issubdtype(getattr(atom.aval, "dtype", np.float32), np.inexact) for atom in equation.outvars):
            state = dataclasses.replace(state, said=min(state.said, Said.NOTHING), has_share=False)
        if not state.is_mirrored:
            return state
        if name in PURE and all(map(jaxprs.is_plain, inside)):
            return state
        if all(0 in getattr(atom.aval, "shape", (1,)) for atom in equation.outvars):
            return state  # nothing can differ in arrays without elements, such as `jnp.empty((0,))`
        return varying(f"`{name}` at {self.line(equation)}, whose results the proof knows nothing about").saying(state.said)

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
        note = equation.params["note"]
        if note.purpose is Purpose.SHARE and note.name == "divided" and state.has_share and self.findings is not None:
            self.findings.marks.append((dataclasses.replace(note, where=self.line(equation)), state))
        if note.purpose in (Purpose.SHARE, Purpose.TANGENT):
            return dataclasses.replace(state, said=Said.SHARE, has_share=state.has_share or note.purpose is Purpose.SHARE)
        if note.purpose is Purpose.COTANGENT and state.said is not Said.WHOLE:
            return state.saying(Said.SHARE if state.is_mirrored else Said.NOTHING)  # it varies where a loss is not linear in it
        if note.purpose is Purpose.OWN_GRADIENT:  # by a replica's own rows it is no share
            return dataclasses.replace(state, has_share=state.has_share or state.said is Said.SHARE)
        if note.purpose is Purpose.ASSIGN and self.within is not None and state.is_mirrored:
            state = varying(self.within)  # only some replicas assign it
        if note.purpose is Purpose.ROWS:
            return varying(note.name)
        if note.purpose is Purpose.OPERAND:
            return dataclasses.replace(state, is_operand=True)
        if self.findings is not None:
            self.findings.marks.append((note, state))
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
            self.findings.collectives.append(Collective(name, jaxprs.num_bytes(equation), where, self.in_loop))
        if name not in MAKE_SAME or jaxprs.is_over_groups(equation):
            return varying(f"`{name}` at {where}, which gives each replica its own part").saying(given.said)
        if not given.is_mirrored:
            return State(Sameness.REDUCED, said=min(given.said, Said.COMBINED))
        # In a backward pass also what was computed from a combined share, such as the derivative of its logarithm.
        highest = Said.NOTHING if is_of_step else Said.COMBINED
        is_multiplied = name in SUMS and Said.ZERO < given.said <= highest
        return dataclasses.replace(given, origin="", has_share=False, said=Said.WHOLE if is_multiplied else given.said)


def _said(name: str, inputs: Sequence[State]) -> Said:
    """Return the mark of the result of a `_SPECIAL` primitive."""
    if name in ADDITIONS:
        return _lowest(inputs, above=Said.CONSTANT)
    if name == "add_any":  # adds up derivatives, of which a constant is one too
        is_whole = any(state.said is Said.WHOLE for state in inputs)
        return Said.WHOLE if is_whole else _lowest(inputs, above=Said.ZERO)
    first = inputs[0].said if inputs else Said.CONSTANT
    if name == "div" and inputs[1].said is not Said.WHOLE:  # division by a sum over the replicas does not multiply by R
        return max(first, inputs[1].said, Said.CONSTANT)
    return first


def _lowest(states: Sequence[State], above: Said) -> Said:
    said = [state.said for state in states]
    return min((one for one in said if one > above), default=max(said, default=above))
