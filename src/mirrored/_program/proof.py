"""The mirror proof: show from a traced step which values must be the same on every replica.

A dataflow pass over the jaxpr. Each value is in one of three states; a value computed from several is in the
highest of theirs:

* SAME: computed from mirrored values only; every replica computes the same bits.
* REDUCED: the same on every replica, because a collective over all of them made it so.
* VARYING: may differ.

Beside that it notes what the losses have said of themselves (`Said`), which goes along with what is computed of them.

What the pass does not know is VARYING: sound before complete. The reasoning, and what "same" assumes of
the hardware, are in docs/design/mirror-proof.md.
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
    """The three states of a value, the lowest first. The module's docstring explains them."""

    SAME = 0
    REDUCED = 1
    VARYING = 2


class Said(enum.IntEnum):
    """What a loss has said of itself, for what is computed of it and its derivatives.

    In a product the highest of the factors holds, and in a sum the lowest of the operands, without constants.
    """

    ZERO = 0  # there is nothing to be said
    CONSTANT = 1  # computed from numbers in the program alone
    NOTHING = 2
    WHOLE = 3  # what is the same on all replicas was summed over them, as on the way back from a loss that was combined
    COMBINED = 4  # as below, and it was combined over the replicas
    SHARE = 5  # the loss is this replica's share: the shares of all add up to the whole, and so do their gradients


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The state of a value.

    Attributes:
        sameness: whether it is the same on every replica.
        origin: what made it differ, when it is VARYING.
        said: what the loss has said that it is, or is a derivative of, or is computed of.
        is_operand: whether the code of the step gives it, as it is, to a collective.
        came_back: the line of the collective through which it has come as a gradient; "" for none.
    """

    sameness: Sameness
    origin: str = ""
    said: Said = Said.NOTHING
    is_operand: bool = False
    came_back: str = ""

    @property
    def is_mirrored(self) -> bool:
        return self.sameness is not Sameness.VARYING

    @property
    def is_same(self) -> bool:
        return self.sameness is Sameness.SAME

    def saying(self, said: Said) -> State:
        """Return the state of a value of which this has been said."""
        return self if said is self.said else dataclasses.replace(self, said=said)


SAME = State(Sameness.SAME)
CONSTANT = State(Sameness.SAME, said=Said.CONSTANT)
ZERO = State(Sameness.SAME, said=Said.ZERO)

#: What is said of their results is not what is said of a product.
_SPECIAL = ADDITIONS | SPREADS | {"add_any", "div"}


def varying(origin: str) -> State:
    """Make the state of a value that may differ by replica because of `origin`."""
    return State(Sameness.VARYING, origin)


def join(states: Iterable[State]) -> State:
    """Return the state of a value that is computed from values in these states."""
    highest, said, came_back = ZERO, Said.CONSTANT, ""
    for state in states:
        said, came_back = max(said, state.said), came_back or state.came_back
        if state.sameness > highest.sameness:
            highest = state
    if highest.is_operand or highest.came_back != came_back:
        highest = dataclasses.replace(highest, is_operand=False, came_back=came_back)
    return highest.saying(said)


def either(states: Iterable[State]) -> State:
    """Return the state of a value that is a sum of values in these states, or one of them."""
    states = list(states)
    return join(states).saying(_lowest(states, above=Said.CONSTANT))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program: what it is, how many bytes each replica contributes, and where."""

    name: str
    num_bytes: int
    where: str
    in_loop: bool


@dataclasses.dataclass
class Findings:
    """What the pass found out about a program.

    Attributes:
        outputs: the state of each output.
        marks: each marked value's note and state, in program order.
        collectives: the collectives in program order.
    """

    outputs: list[State] = dataclasses.field(default_factory=list)
    marks: list[tuple[Mark, State]] = dataclasses.field(default_factory=list)
    collectives: list[Collective] = dataclasses.field(default_factory=list)


def prove(jaxpr: Jaxpr, inputs: Sequence[State]) -> Findings:
    """Find the state of every output, mark and collective of a step.

    Args:
        jaxpr: the step, traced with the replica axis bound; its constants are mirrored.
        inputs: the state of each argument.

    Raises:
        CollectiveHangError: when replicas may disagree on whether, or how often, they reach a collective.
    """
    findings = Findings()
    findings.outputs = _Pass(findings).run(jaxpr, (None,) * len(jaxpr.constvars), inputs)
    return findings


@dataclasses.dataclass(frozen=True)
class _Pass(Analysis[State]):
    """One pass of the proof over a jaxpr.

    Attributes:
        findings: where marks and collectives are noted; None while a loop's fixed point is searched.
        within: what makes the replicas disagree on whether this code runs, or None.
        in_loop: whether the code may run more than once.
        around: the equations that this code is inside of, innermost first.
    """

    findings: Findings | None
    within: str | None = None
    in_loop: bool = False
    around: tuple[Any, ...] = ()

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
        lines = map(user_code.equation_line, (equation, *self.around))
        return next((line for line in lines if line is not None), "<unknown>")

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
        state = self.crossing(equation, values)
        if jaxprs.is_collective(equation) and not all(given.is_operand for given in values):
            state = dataclasses.replace(state, came_back=self.line(equation))
        return [state] * len(equation.outvars)

    def operation(self, equation: Any, inputs: list[State]) -> State:
        """Handle a primitive that computes its results from its operands alone, if it is known to do so."""
        name = equation.primitive.name
        inside = list(jaxprs.inside(equation))
        self.refuse_collectives(equation, inside)
        state = join(inputs)
        if name in _SPECIAL:
            state = state.saying(_said(name, inputs))
        if any(getattr(atom.aval, "dtype", "") == "bool" for atom in equation.outvars):  # whether a loss is finite is no loss
            state = state.saying(min(state.said, Said.NOTHING))
        if not state.is_mirrored:
            return state
        if name in PURE and all(map(jaxprs.is_plain, inside)):
            return state
        if all(0 in getattr(atom.aval, "shape", (1,)) for atom in equation.outvars):
            return state  # nothing can differ in arrays without elements, such as `jnp.empty((0,))`
        return varying(f"`{name}` at {self.line(equation)}, whose results the proof knows nothing about").saying(state.said)

    def refuse_collectives(self, equation: Any, inside: Sequence[Any]) -> None:
        """Refuse collectives inside a construct of which the pass does not know when it runs what is inside."""
        for nested in inside:
            if jaxprs.is_collective(nested):
                raise CollectiveHangError(
                    f"the collective `{nested.primitive.name}` at {self.inside(equation).line(nested)} runs inside "
                    f"`{equation.primitive.name}`, and the proof does not know whether all replicas reach it there: one "
                    "that does not leaves the others waiting for ever. Move the collective out."
                )

    def mark(self, equation: Any, state: State) -> State:
        note = equation.params["note"]
        if note.purpose in (Purpose.SHARE, Purpose.TANGENT):
            return state.saying(Said.SHARE)
        if note.purpose is Purpose.COTANGENT and state.said is not Said.WHOLE:
            return state.saying(Said.SHARE if state.is_mirrored else Said.NOTHING)  # it varies where a loss is not linear in it
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

    def crossing(self, equation: Any, inputs: list[State]) -> State:
        """Handle the replica's number, and a collective."""
        name = equation.primitive.name
        where = self.line(equation)
        if jaxprs.is_replica_number(equation):
            return varying(f"the replica's own number (replica_id_in_sync_group, ctx.rng) at {where}")
        if not jaxprs.is_collective(equation):  # over an axis of some vmap, or a cast
            return join(inputs)
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
            origin = f"`{name}` at {where}, which gives each replica its own part"
            return varying(origin).saying(join(inputs).said)
        return _combined(join(inputs), is_sum=name in SUMS)


def _said(name: str, inputs: Sequence[State]) -> Said:
    """Return what is said of the result of a primitive that is no product."""
    if name in ADDITIONS:
        return _lowest(inputs, above=Said.CONSTANT)
    if name == "add_any":  # adds up derivatives, of which a constant is one too
        return _lowest(inputs, above=Said.ZERO)
    first = inputs[0].said if inputs else Said.CONSTANT
    if name == "div" and inputs[1].said is not Said.WHOLE:  # what is divided by a number of all rows is not multiplied by it
        return max(first, inputs[1].said, Said.CONSTANT)
    return first


def _lowest(states: Sequence[State], above: Said) -> Said:
    said = [state.said for state in states]
    return min((one for one in said if one > above), default=max(said, default=above))


def _combined(state: State, is_sum: bool) -> State:
    """Return the state of what a collective over all replicas makes of a value."""
    if not state.is_mirrored:
        return State(Sameness.REDUCED, said=min(state.said, Said.COMBINED))
    if is_sum and Said.ZERO < state.said <= Said.NOTHING:
        state = state.saying(Said.WHOLE)
    return dataclasses.replace(state, origin="")
