"""The mirror proof: show from a traced step which values must be the same on every replica.

A dataflow pass over the jaxpr. Each value is in one of three states; a value computed from several is in the
highest of theirs:

* SAME: computed from mirrored values only; every replica computes the same bits.
* REDUCED: the same on every replica, because a collective over all of them made it so.
* VARYING: may differ.

Beside that it notes how losses were divided before they were differentiated (`_program/divisors`).

What the pass does not know is VARYING: sound before complete. The reasoning, and what "same" assumes of
the hardware, are in docs/design/mirror-proof.md.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._errors import CollectiveHangError
from .._jax import jaxprs, user_code, ways
from .._jax.jaxprs import Jaxpr
from .._jax.marks import Mark, Purpose, mark_p
from .._jax.primitives import MAKE_SAME, PURE
from .._typing import REPLICA_AXIS
from . import divisors
from .divisors import NO_TRAILS, Trail, Trails


class Sameness(enum.IntEnum):
    """The three states of a value, the lowest first. The module's docstring explains them."""

    SAME = 0
    REDUCED = 1
    VARYING = 2


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The state of a value.

    Attributes:
        sameness: whether it is the same on every replica.
        origin: what made it differ, when it is VARYING.
        trails: the ways from losses to it, when it is part of a gradient.
        is_share: whether it was divided for a sum over the replicas after they were combined.
        summed: 1 for a sum over the replicas of which only the shape has changed since, 2 for one that was also divided once.
        is_operand: whether the code of the step gives it, as it is, to a collective.
        came_back: the line of the collective through which it has come as a gradient; "" for none.
    """

    sameness: Sameness
    origin: str = ""
    trails: Trails = NO_TRAILS
    is_share: bool = False
    summed: int = 0
    is_operand: bool = False
    came_back: str = ""

    @property
    def is_mirrored(self) -> bool:
        return self.sameness is not Sameness.VARYING

    @property
    def is_same(self) -> bool:
        return self.sameness is Sameness.SAME

    def on(self, trails: Trails) -> State:
        """Return the state of a value that these ways lead to."""
        return self if trails == self.trails else dataclasses.replace(self, trails=trails)


SAME = State(Sameness.SAME)
REDUCED = State(Sameness.REDUCED)
SUMMED = State(Sameness.REDUCED, summed=1)

#: Change the shape of an array, or add up its elements.
_RESHAPING = frozenset({"broadcast_in_dim", "convert_element_type", "reduce_sum", "reshape", "slice", "squeeze", "transpose"})


def varying(origin: str) -> State:
    """Make the state of a value that may differ by replica because of `origin`."""
    return State(Sameness.VARYING, origin)


def join(states: Iterable[State]) -> State:
    """Return the state of a value that is computed from values in these states."""
    highest, trails, came_back = SAME, NO_TRAILS, ""
    for state in states:
        came_back = came_back or state.came_back
        trails = trails | state.trails if state.trails else trails
        if (state.sameness, highest.is_share) > (highest.sameness, state.is_share):
            highest = state
    if highest.summed or highest.is_operand or highest.came_back != came_back:
        highest = dataclasses.replace(highest, summed=0, is_operand=False, came_back=came_back)
    return highest.on(trails)


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
    purposes = {e.params["note"].purpose for e in jaxprs.all_equations(jaxpr) if e.primitive is mark_p}
    has_seeds = Purpose.SEED in purposes or not purposes & {Purpose.GRADIENT, Purpose.MEAN_GRADIENT}
    findings.outputs = _Pass(findings, has_seeds=has_seeds).run(jaxpr, inputs)
    return findings


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One pass of the proof over a jaxpr.

    Attributes:
        findings: where marks and collectives are noted; None while a loop's fixed point is searched.
        within: what makes the replicas disagree on whether this code runs, or None.
        in_loop: whether the code may run more than once.
        around: the equations that this code is inside of, innermost first.
        has_seeds: whether marks say where gradients begin, as those of `mr.grad` do. Else each constant 1.0 may be one.
    """

    findings: Findings | None
    within: str | None = None
    in_loop: bool = False
    around: tuple[Any, ...] = ()
    has_seeds: bool = True

    def inside(self, equation: Any, **changes: Any) -> _Pass:
        """Return the pass for a jaxpr inside an equation."""
        return dataclasses.replace(self, around=(equation, *self.around), **changes)

    def line(self, equation: Any) -> str:
        """Return the user's line of an equation, or of what it is inside of when JAX has lost it."""
        lines = map(user_code.equation_line, (equation, *self.around))
        return next((line for line in lines if line is not None), "<unknown>")

    def run(self, jaxpr: Jaxpr, inputs: Sequence[State]) -> list[State]:
        states: dict[Any, State] = dict(zip(jaxpr.invars, inputs, strict=True))
        states.update((variable, SAME) for variable in jaxpr.constvars)

        def read(atom: Any, equation: Any = None) -> State:
            return self.literal(atom, equation) if isinstance(atom, jaxprs.Literal) else states[atom]

        for equation in jaxpr.eqns:
            outputs = self.equation(equation, [read(atom, equation) for atom in equation.invars])
            states.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def literal(self, atom: Any, equation: Any) -> State:
        """Return the state of a constant: a 1.0 in what may be a gradient's first operation is taken for its beginning."""
        if self.has_seeds or equation is None or equation.primitive.name in divisors.NEVER_FIRST or atom.aval.shape:
            return SAME
        is_one = atom.aval.dtype.kind in "fV" and atom.val == 1
        if not is_one or (equation.primitive.name == "div" and atom is not equation.invars[0]):
            return SAME
        return SAME.on(self.seed(equation, ""))

    def seed(self, equation: Any, where: str) -> Trails:
        return frozenset({Trail((id(equation), *map(id, self.around)), where)})

    def equation(self, equation: Any, inputs: list[State]) -> list[State]:
        name = equation.primitive.name
        special = {
            "scan": self.scan,
            "while": self.while_loop,
            "cond": self.cond,
            "custom_linear_solve": self.linear_solve,
        }.get(name)
        if special is not None:
            return special(equation, inputs)
        if (inner := jaxprs.callee(equation)) is not None:
            return self.inside(equation).run(inner.jaxpr, inputs)
        if equation.primitive is mark_p:
            return [self.mark(equation, inputs[0])]
        if name in MAKE_SAME or REPLICA_AXIS in jaxprs.axis_names(equation):
            return [self.axis_primitive(equation, inputs)] * len(equation.outvars)
        return [self.plain(equation, inputs)] * len(equation.outvars)

    def plain(self, equation: Any, inputs: list[State]) -> State:
        """Handle a primitive that computes its results from its operands alone, if it is known to do so."""
        name = equation.primitive.name
        inside = list(jaxprs.inside(equation))
        self.refuse_collectives(equation, inside)
        state = join(inputs)
        if state.trails:
            state = state.on(divisors.passed(equation, inputs))
        if not state.is_mirrored:
            return state
        if inputs and inputs[0].summed:
            state = dataclasses.replace(state, summed=_still_summed(name, inputs[0].summed))
        if name in PURE and all(map(jaxprs.is_plain, inside)):
            return state
        if all(0 in getattr(atom.aval, "shape", (1,)) for atom in equation.outvars):
            return state  # nothing can differ in arrays without elements, such as `jnp.empty((0,))`
        return varying(f"`{name}` at {self.line(equation)}, whose results the proof knows nothing about")

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
        if note.purpose is Purpose.SEED:
            return state.on(self.seed(equation, note.where))
        if note.purpose in (Purpose.SHARE, Purpose.GIVEN_SHARE):
            is_share = note.purpose is Purpose.SHARE and not (note.number and state.summed == 2)
            trails = frozenset(t._replace(is_whole=True, counted=note.number, is_share=is_share) for t in state.trails)
            return dataclasses.replace(state, trails=trails, is_share=is_share and state.sameness is Sameness.REDUCED)
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

    def combined(self, equation: Any, trails: Trails) -> Trails:
        """Return the ways through a collective of a gradient that has met no data: the loss itself was combined by it."""
        path = functools.reduce(ways.path_of, (*reversed(self.around), equation), "")
        if not equation.primitive.name.startswith("psum") or ways.way_of(path, equation) is not ways.Way.BACKWARD:
            return NO_TRAILS
        return frozenset(trail._replace(is_combined=True) for trail in trails)

    def axis_primitive(self, equation: Any, inputs: list[State]) -> State:
        state = self.collective_or_index(equation, inputs)
        if not jaxprs.is_collective(equation) or all(given.is_operand for given in inputs):
            return state
        return dataclasses.replace(state, came_back=self.line(equation))

    def collective_or_index(self, equation: Any, inputs: list[State]) -> State:
        name = equation.primitive.name
        where = self.line(equation)
        if name == "axis_index":
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
            return varying(f"`{name}` at {where}, which gives each replica its own part")
        if (state := join(inputs)).is_same:
            return SAME.on(self.combined(equation, state.trails)) if state.trails else SAME
        return SUMMED if name in ("psum", "psum_invariant") else REDUCED

    def linear_solve(self, equation: Any, inputs: list[State]) -> list[State]:
        solver = jaxprs.solver_of(equation)
        return self.inside(equation).run(solver.jaxpr, [inputs[k] for k in solver.operands])

    def cond(self, equation: Any, inputs: list[State]) -> list[State]:
        predicate, *operands = inputs
        inside = self.inside(equation, within=self.within if predicate.is_mirrored else predicate.origin)
        branches = [inside.run(branch, operands) for branch in jaxprs.branches_of(equation)]
        return [join((predicate, *states)) for states in zip(*branches, strict=True)]

    def scan(self, equation: Any, inputs: list[State]) -> list[State]:
        body, num_consts, num_carry = jaxprs.scan_of(equation)
        constants, rest = inputs[:num_consts], inputs[num_consts:]
        carry, rows = rest[:num_carry], rest[num_carry:]
        inside = self.inside(equation, in_loop=True)
        quiet = dataclasses.replace(inside, findings=None)
        carry = _fixed_point(carry, lambda carry: quiet.run(body, [*constants, *carry, *rows])[:num_carry])
        outputs = inside.run(body, [*constants, *carry, *rows])
        length = jaxprs.length_of(equation)
        states = (*carry, *outputs[num_carry:])
        return [s.on(divisors.looped(inputs, s.trails, length)) if s.trails else s for s in states]

    def while_loop(self, equation: Any, inputs: list[State]) -> list[State]:
        cond, body, num_cond_consts, num_body_consts = jaxprs.while_of(equation)
        num_consts = num_cond_consts + num_body_consts
        cond_constants, body_constants = inputs[:num_cond_consts], inputs[num_cond_consts:num_consts]
        quiet = self.inside(equation, findings=None, in_loop=True)

        def one_round(carry: list[State]) -> list[State]:
            [again] = quiet.run(cond, [*cond_constants, *carry])
            return [join((again, new)) for new in quiet.run(body, [*body_constants, *carry])]

        carry = _fixed_point(inputs[num_consts:], one_round)
        [again] = quiet.run(cond, [*cond_constants, *carry])
        within = self.within if again.is_mirrored else again.origin
        loud = self.inside(equation, within=within, in_loop=True)
        loud.run(cond, [*cond_constants, *carry])
        loud.run(body, [*body_constants, *carry])
        return carry


def _fixed_point(carry: list[State], one_round: Callable[[list[State]], list[State]]) -> list[State]:
    """Widen the states of what a loop carries until another round changes nothing."""
    while True:
        wider = [join(pair) for pair in zip(carry, one_round(carry), strict=True)]
        if _kinds(wider) == _kinds(carry):
            return carry
        carry = wider


def _still_summed(name: str, summed: int) -> int:
    if name in _RESHAPING:
        return summed
    return 2 if name == "div" and summed == 1 else 0


def _kinds(states: Sequence[State]) -> list[tuple[Sameness, Trails, bool, bool]]:
    return [(state.sameness, state.trails, state.is_share, bool(state.came_back)) for state in states]
