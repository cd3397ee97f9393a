"""The mirror proof: show from a traced step which values must be the same on every replica.

A dataflow pass over the jaxpr. Each value is in one of three states; a value computed from several is in the
highest of theirs:

* SAME: computed from mirrored values only; every replica computes the same bits.
* REDUCED: the same on every replica, because a collective over all of them made it so.
* VARYING: may differ.

What the pass does not know is VARYING: sound before complete. The reasoning, and what "same" assumes of
the hardware, are in docs/design/mirror-proof.md.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import _tracing
from ._errors import CollectiveHangError
from ._marks import Mark, Purpose, mark_p
from ._tracing import Jaxpr
from ._typing import REPLICA_AXIS


class Sameness(enum.IntEnum):
    """Order the states; see the module's docstring."""

    SAME = 0
    REDUCED = 1
    VARYING = 2


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Say in which state a value is and, when it is VARYING, what made it so."""

    sameness: Sameness
    origin: str = ""

    @property
    def is_mirrored(self) -> bool:
        return self.sameness is not Sameness.VARYING


SAME = State(Sameness.SAME)
REDUCED = State(Sameness.REDUCED)


def varying(origin: str) -> State:
    """Make the state of a value that may differ by replica because of `origin`."""
    return State(Sameness.VARYING, origin)


@dataclasses.dataclass(frozen=True)
class Collective:
    """Describe one collective of a program: what it is, how many bytes each replica contributes, and where."""

    name: str
    num_bytes: int
    where: str
    in_loop: bool


@dataclasses.dataclass
class Findings:
    """Hold what the pass found out about a program.

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
    findings.outputs = _Pass(findings).run(jaxpr, inputs)
    return findings


def join(states: Iterable[State]) -> State:
    """Return the state of a value that is computed from values in these states."""
    highest = SAME
    for state in states:
        if state.sameness > highest.sameness:
            highest = state
    return highest


# Pure functions of their operands, whatever their parameters; those with a jaxpr as a parameter are also checked inside.
_PURE_NAMES = """
abs acos acosh add add_any after_all and approx_top_k argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type broadcast_in_dim cbrt ceil cholesky cholesky_update clamp clz complex concatenate conj
conv_general_dilated convert_element_type copy cos cosh create_token cumlogsumexp cummax cummin cumprod cumsum
custom_linear_solve device_put digamma div dot_general dynamic_slice dynamic_update_slice eig eigh empty2 eq eq_to erf erf_inv
erfc exp exp2 expm1 fft floor from_edtype gather ge geqp3 geqrf gt hessenberg householder_product igamma igamma_grad_a igammac
imag integer_pow iota iota_2x32_shape is_finite layout_constraint le le_to lgamma log log1p logistic lt lt_to lu
lu_pivots_to_permutation max min mul mulhi name ne neg nextafter not optimization_barrier or ormqr pad philox2x32 philox4x32
platform_index polygamma population_count pow pvary qr ragged_dot_general random_bits random_clone random_fold_in random_gamma
random_seed random_split random_unwrap random_wrap real reduce reduce_and reduce_max reduce_min reduce_or reduce_precision
reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor
regularized_incomplete_beta rem reshape reshard rev rng_bit_generator round rsqrt scaled_dot scatter scatter-add scatter-max
scatter-min scatter-mul scatter-sub schur select_and_gather_add select_and_scatter select_and_scatter_add select_n
sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt square squeeze
stack stop_gradient sub svd symmetric_product tan tanh threefry2x32 threefry4x32 tie tile to_edtype top_k transpose
triangular_solve tridiagonal tridiagonal_solve unstack with_memory_space_constraint xor zeta
"""
_PURE = frozenset(_PURE_NAMES.split())
# Run the only jaxpr among their parameters once, with all operands in order.
_CALLS = frozenset({
    "closed_call", "composite", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "jit", "linear_call", "remat2",
    "remat_opt",
})  # fmt: skip
# Collectives with the same result on every replica, when they run over the whole axis.
_MAKE_SAME = frozenset({"psum", "pmax", "pmin", "all_gather", "pbroadcast", "psum_invariant", "all_gather_invariant"})
# Name the replica axis, but reach no other replica. Whatever else names it is a collective.
_LOCAL = frozenset({"axis_index", "pvary"})


@dataclasses.dataclass(frozen=True)
class _Pass:
    """Walk a jaxpr once.

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

    def inside(self, equation: Any, **changes: Any) -> _Pass:
        """Return the pass for a jaxpr inside an equation."""
        return dataclasses.replace(self, around=(equation, *self.around), **changes)

    def line(self, equation: Any) -> str:
        """Return the user's line of an equation, or of what it is inside of when JAX has lost it."""
        lines = map(_tracing.equation_line, (equation, *self.around))
        return next((line for line in lines if line is not None), "<unknown>")

    def run(self, jaxpr: Jaxpr, inputs: Sequence[State]) -> list[State]:
        states: dict[Any, State] = dict(zip(jaxpr.invars, inputs, strict=True))
        states.update((variable, SAME) for variable in jaxpr.constvars)

        def read(atom: Any) -> State:
            return SAME if isinstance(atom, _tracing.Literal) else states[atom]

        for equation in jaxpr.eqns:
            outputs = self.equation(equation, [read(atom) for atom in equation.invars])
            states.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

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
        if (inner := callee(equation)) is not None:
            return self.inside(equation).run(inner.jaxpr, inputs)
        if equation.primitive is mark_p:
            return [self.mark(equation.params["note"], inputs[0])]
        if name in _MAKE_SAME or REPLICA_AXIS in _axis_names(equation):
            return [self.axis_primitive(equation, inputs)] * len(equation.outvars)
        return [self.plain(equation, inputs)] * len(equation.outvars)

    def plain(self, equation: Any, inputs: list[State]) -> State:
        """Handle a primitive that computes its results from its operands alone, if it is known to do so."""
        name = equation.primitive.name
        inside = [nested for inner in inner_jaxprs(equation) for nested in _all_equations(inner.jaxpr)]
        self.refuse_collectives(equation, inside)
        state = join(inputs)
        if not state.is_mirrored:
            return state
        if name in _PURE and all(_is_plain(nested) for nested in inside):
            return state
        return varying(f"`{name}` at {self.line(equation)}, whose results the proof knows nothing about")

    def refuse_collectives(self, equation: Any, inside: Sequence[Any]) -> None:
        """Refuse collectives inside a construct of which the pass does not know when it runs what is inside."""
        for nested in inside:
            if _is_collective(nested):
                raise CollectiveHangError(
                    f"the collective `{nested.primitive.name}` at {self.inside(equation).line(nested)} runs inside "
                    f"`{equation.primitive.name}`, and the proof does not know whether all replicas reach it there: one "
                    "that does not leaves the others waiting for ever. Move the collective out."
                )

    def mark(self, note: Mark, state: State) -> State:
        if note.purpose is Purpose.ASSIGN and self.within is not None and state.is_mirrored:
            state = varying(self.within)  # only some replicas assign it
        if note.purpose is Purpose.ROWS:
            return varying(note.name)
        if self.findings is not None:
            self.findings.marks.append((note, state))
        # A mirrored variable's new value starts afresh, so that two updates in one step are judged like one in each of two.
        return SAME if note.purpose is Purpose.ASSIGN and state.is_mirrored else state

    def axis_primitive(self, equation: Any, inputs: list[State]) -> State:
        name = equation.primitive.name
        where = self.line(equation)
        if name == "axis_index":
            return varying(f"the replica's own number (replica_id_in_sync_group, ctx.rng) at {where}")
        if not _is_collective(equation):  # over an axis of some vmap, or a cast
            return join(inputs)
        if self.within is not None:
            raise CollectiveHangError(
                f"the collective `{name}` at {where} runs under a condition or loop that may differ by replica: it "
                f"depends on {self.within}. Replicas that skip it leave the others waiting for ever. Compute the "
                "condition from mirrored values (all_reduce it first), or move the collective out and choose "
                "between the results with jnp.where."
            )
        if self.findings is not None:
            self.findings.collectives.append(Collective(name, _num_bytes(equation), where, self.in_loop))
        if name not in _MAKE_SAME or equation.params.get("axis_index_groups") is not None:
            return varying(f"`{name}` at {where}, which gives each replica its own part")
        return REDUCED if join(inputs).sameness is not Sameness.SAME else SAME

    def linear_solve(self, equation: Any, inputs: list[State]) -> list[State]:
        """Run the solver; the equation's other functions are only for its derivatives."""
        counts = equation.params["const_lengths"]
        before = counts.matvec + counts.vecmat
        right_side = inputs[sum(counts) :]
        solver = equation.params["jaxprs"].solve.jaxpr
        return self.inside(equation).run(solver, [*inputs[before : before + counts.solve], *right_side])

    def cond(self, equation: Any, inputs: list[State]) -> list[State]:
        predicate, *operands = inputs
        inside = self.inside(equation, within=self.within if predicate.is_mirrored else predicate.origin)
        branches = [inside.run(branch.jaxpr, operands) for branch in equation.params["branches"]]
        return [join((predicate, *states)) for states in zip(*branches, strict=True)]

    def scan(self, equation: Any, inputs: list[State]) -> list[State]:
        num_consts, num_carry = equation.params["num_consts"], equation.params["num_carry"]
        constants, rest = inputs[:num_consts], inputs[num_consts:]
        carry, rows = rest[:num_carry], rest[num_carry:]
        body = equation.params["jaxpr"].jaxpr
        inside = self.inside(equation, in_loop=True)
        quiet = dataclasses.replace(inside, findings=None)
        carry = _fixed_point(carry, lambda carry: quiet.run(body, [*constants, *carry, *rows])[:num_carry])
        outputs = inside.run(body, [*constants, *carry, *rows])
        return [*carry, *outputs[num_carry:]]

    def while_loop(self, equation: Any, inputs: list[State]) -> list[State]:
        cond_count, body_count = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        cond_constants, body_constants = inputs[:cond_count], inputs[cond_count : cond_count + body_count]
        cond, body = equation.params["cond_jaxpr"].jaxpr, equation.params["body_jaxpr"].jaxpr
        quiet = self.inside(equation, findings=None, in_loop=True)

        def one_round(carry: list[State]) -> list[State]:
            [again] = quiet.run(cond, [*cond_constants, *carry])
            return [join((again, new)) for new in quiet.run(body, [*body_constants, *carry])]

        carry = _fixed_point(inputs[cond_count + body_count :], one_round)
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
        if _sameness(wider) == _sameness(carry):
            return carry
        carry = wider


def _sameness(states: Sequence[State]) -> list[Sameness]:
    return [state.sameness for state in states]


def callee(equation: Any) -> _tracing.ClosedJaxpr | None:
    """Return what an equation calls; None if it is no call, or not in the way that the pass knows."""
    inner = list(inner_jaxprs(equation)) if equation.primitive.name in _CALLS else []
    if len(inner) != 1:
        return None
    [closed] = inner
    fits = len(closed.jaxpr.invars) == len(equation.invars) and len(closed.jaxpr.outvars) == len(equation.outvars)
    return closed if fits else None


def is_function_of_operands(equation: Any) -> bool:
    """Tell whether an equation is known to compute its results from its operands and the replica's number alone."""
    inside = (nested for inner in inner_jaxprs(equation) for nested in _all_equations(inner.jaxpr))
    return all(map(_is_local_and_plain, itertools.chain([equation], inside)))


def _is_local_and_plain(equation: Any) -> bool:
    if equation.primitive is mark_p or equation.primitive.name == "axis_index":
        return True
    return _is_plain(equation) and not _is_collective(equation)


def has_collective(equation: Any) -> bool:
    """Tell whether an equation is, or has inside, a collective over the replicas."""
    inside = (nested for inner in inner_jaxprs(equation) for nested in _all_equations(inner.jaxpr))
    return any(map(_is_collective, itertools.chain([equation], inside)))


def inner_jaxprs(equation: Any) -> Iterable[_tracing.ClosedJaxpr]:
    """Yield the jaxprs among an equation's parameters."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, _tracing.ClosedJaxpr):
                yield inner
            elif isinstance(inner, Jaxpr):
                yield _tracing.ClosedJaxpr(inner, ())


def _all_equations(jaxpr: Jaxpr) -> Iterable[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from _all_equations(inner.jaxpr)


def _is_plain(equation: Any) -> bool:
    """Tell whether an equation inside another one is known to be pure, apart from what is inside itself."""
    return equation.primitive.name in _PURE | _CALLS | {"scan", "while", "cond"}


def _is_collective(equation: Any) -> bool:
    return REPLICA_AXIS in _axis_names(equation) and equation.primitive.name not in _LOCAL


def _axis_names(equation: Any) -> tuple[Any, ...]:
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    return names if isinstance(names, tuple) else (names,)


def _num_bytes(equation: Any) -> int:
    avals = [atom.aval for atom in equation.invars]
    return sum(aval.size * aval.dtype.itemsize for aval in avals if hasattr(aval.dtype, "itemsize"))
