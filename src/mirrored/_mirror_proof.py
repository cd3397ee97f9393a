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
from collections.abc import Iterable, Sequence
from typing import Any

from . import _tracing
from ._errors import CollectiveHangError
from ._marks import Mark, mark_p
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
    findings.outputs = _Pass(findings, within=None, in_loop=False).run(jaxpr, inputs)
    return findings


def join(states: Iterable[State]) -> State:
    """Return the state of a value that is computed from values in these states."""
    highest = SAME
    for state in states:
        if state.sameness > highest.sameness:
            highest = state
    return highest


# Pure functions of their operands, whatever their parameters; those with a jaxpr as a parameter are also checked inside.
_PURE = frozenset(
    """
    abs acos acosh add add_any after_all and approx_top_k argmax argmin asin asinh atan atan2 atanh bessel_i0e
    bessel_i1e bitcast_convert_type broadcast_in_dim cbrt ceil cholesky cholesky_update clamp clz complex concatenate
    conj conv_general_dilated convert_element_type copy copy_p cos cosh create_token cumlogsumexp cummax cummin cumprod
    cumsum custom_lin custom_linear_solve device_put digamma div dot_general dynamic_slice dynamic_update_slice eig
    eigh eq eq_to erf erf_inv erfc exp exp2 expm1 fft floor gather ge gt hessenberg householder_product
    igamma igamma_grad_a igammac imag integer_pow iota is_finite le le_to lgamma log log1p logistic lt lt_to lu
    lu_pivots_to_permutation max min mirrored_mark mul mulhi name ne neg nextafter not optimization_barrier or ormqr
    pad pbroadcast pcast polygamma population_count pow pvary qr random_bits random_clone random_fold_in random_gamma
    random_seed random_split random_unwrap random_wrap real reduce reduce_and reduce_max reduce_min reduce_or
    reduce_precision reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_min reduce_window_sum
    reduce_xor regularized_incomplete_beta rem reshape rev rng_bit_generator round rsqrt scatter scatter-add
    scatter-max scatter-min scatter-mul scatter-sub scatter_add scatter_max scatter_min scatter_mul scatter_sub schur
    select_and_gather_add select_and_scatter select_and_scatter_add select_n sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt square squeeze stack stop_gradient
    sub svd symmetric_product tan tanh threefry2x32 tile top_k transpose triangular_solve tridiagonal
    tridiagonal_solve unstack xor zeta
    """.split()
)
# Called once, with all the equation's operands, in order.
_CALLS = frozenset({
    "jit", "pjit", "closed_call", "core_call", "call", "remat2", "remat", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call",
})  # fmt: skip
# The same result on every replica, when they run over the whole axis.
_MAKE_SAME = frozenset({"psum", "pmax", "pmin", "all_gather", "psum_invariant", "all_gather_invariant"})
# Different results even for the same operands; still collectives that all replicas must reach.
_EXCHANGE = frozenset({
    "all_to_all", "ppermute", "reduce_scatter", "psum_scatter", "pgather", "ragged_all_to_all", "collective_permute",
    "psend", "precv",
})  # fmt: skip


class _Pass:
    """Walk a jaxpr once.

    Attributes:
        findings: where marks and collectives are noted; None while a loop's fixed point is searched.
        within: what makes the replicas disagree on whether this code runs, or None.
        in_loop: whether the code may run more than once.
    """

    def __init__(self, findings: Findings | None, within: str | None, in_loop: bool) -> None:
        self.findings = findings
        self.within = within
        self.in_loop = in_loop

    def run(self, jaxpr: Jaxpr, inputs: Sequence[State]) -> list[State]:
        states: dict[Any, State] = dict(zip(jaxpr.invars, inputs, strict=True))
        states.update((variable, SAME) for variable in jaxpr.constvars)

        def read(atom: Any) -> State:
            return SAME if hasattr(atom, "val") else states[atom]

        for equation in jaxpr.eqns:
            outputs = self.equation(equation, [read(atom) for atom in equation.invars])
            states.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, inputs: list[State]) -> list[State]:
        name = equation.primitive.name
        special = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(name)
        if special is not None:
            return special(equation, inputs)
        if name in _MAKE_SAME or name in _EXCHANGE or name == "axis_index":
            return [self.axis_primitive(equation, inputs)] * len(equation.outvars)
        if name in _CALLS:
            inner = self.call(equation, inputs)
            if inner is not None:
                return inner
        if equation.primitive is mark_p and self.findings is not None:
            self.findings.marks.append((equation.params["note"], inputs[0]))
        return [self.plain(equation, inputs)] * len(equation.outvars)

    def plain(self, equation: Any, inputs: list[State]) -> State:
        """Handle a primitive that computes its results from its operands alone, if it is known to do so."""
        name = equation.primitive.name
        state = join(inputs)
        if not state.is_mirrored:
            self.refuse_collectives_inside(equation)
            return state
        if name not in _PURE or any(not _is_plain(inner) for inner in _inner_jaxprs(equation)):
            self.refuse_collectives_inside(equation)
            return varying(f"`{name}` at {_tracing.equation_line(equation)}, whose results the proof knows nothing about")
        return state

    def refuse_collectives_inside(self, equation: Any) -> None:
        """Follow no collective into a construct whose control flow is unknown."""
        if self.within is None:
            return
        for inner in _inner_jaxprs(equation):
            for nested in _all_equations(inner):
                if _is_collective(nested):
                    self.axis_primitive(nested, [])

    def axis_primitive(self, equation: Any, inputs: list[State]) -> State:
        name = equation.primitive.name
        where = _tracing.equation_line(equation)
        if REPLICA_AXIS not in _axis_names(equation):  # the axis of some vmap: no replica is involved
            return join(inputs) if name != "axis_index" else varying(f"`{name}` at {where}")
        if name == "axis_index":
            return varying(f"the replica's own number (replica_id_in_sync_group, ctx.rng) at {where}")
        if self.within is not None:
            raise CollectiveHangError(
                f"the collective `{name}` at {where} runs under a condition or loop that may differ by replica: it "
                f"depends on {self.within}. Replicas that skip it leave the others waiting for ever. Compute the "
                "condition from mirrored values (all_reduce it first), or move the collective out and choose "
                "between the results with jnp.where."
            )
        if self.findings is not None:
            self.findings.collectives.append(Collective(name, _num_bytes(equation), where, self.in_loop))
        if name in _EXCHANGE or equation.params.get("axis_index_groups") is not None:
            return varying(f"`{name}` at {where}, which gives each replica its own part")
        return REDUCED if join(inputs).sameness is not Sameness.SAME else SAME

    def call(self, equation: Any, inputs: list[State]) -> list[State] | None:
        inner = next(iter(_inner_jaxprs(equation)), None)
        if inner is None or len(inner.invars) != len(inputs) or len(inner.outvars) != len(equation.outvars):
            return None  # not the calling convention this pass knows: let `plain` decide
        if not any(_is_collective(e) for i in list(_inner_jaxprs(equation))[1:] for e in _all_equations(i)):
            return self.run(inner, inputs)
        return None

    def cond(self, equation: Any, inputs: list[State]) -> list[State]:
        predicate, *operands = inputs
        within = self.within if predicate.is_mirrored else predicate.origin
        branches = [
            _Pass(self.findings, within, self.in_loop).run(branch.jaxpr, operands)
            for branch in equation.params["branches"]
        ]
        return [join((predicate, *states)) for states in zip(*branches, strict=True)]

    def scan(self, equation: Any, inputs: list[State]) -> list[State]:
        num_consts, num_carry = equation.params["num_consts"], equation.params["num_carry"]
        constants, carry, rows = inputs[:num_consts], inputs[num_consts : num_consts + num_carry], inputs[num_consts + num_carry :]
        body = equation.params["jaxpr"].jaxpr
        quiet = _Pass(None, self.within, in_loop=True)
        while True:
            after = quiet.run(body, [*constants, *carry, *rows])[:num_carry]
            wider = [join(pair) for pair in zip(carry, after, strict=True)]
            if _sameness(wider) == _sameness(carry):
                break
            carry = wider
        outputs = _Pass(self.findings, self.within, in_loop=True).run(body, [*constants, *carry, *rows])
        return [*carry, *outputs[num_carry:]]

    def while_loop(self, equation: Any, inputs: list[State]) -> list[State]:
        cond_count, body_count = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        cond_constants, body_constants = inputs[:cond_count], inputs[cond_count : cond_count + body_count]
        carry = inputs[cond_count + body_count :]
        cond, body = equation.params["cond_jaxpr"].jaxpr, equation.params["body_jaxpr"].jaxpr
        quiet = _Pass(None, None, in_loop=True)
        while True:
            [again] = quiet.run(cond, [*cond_constants, *carry])
            after = quiet.run(body, [*body_constants, *carry])
            reach = [again] if not again.is_mirrored else []
            wider = [join((old, new, *reach)) for old, new in zip(carry, after, strict=True)]
            if _sameness(wider) == _sameness(carry):
                break
            carry = wider
        within = self.within if again.is_mirrored else again.origin
        loud = _Pass(self.findings, within, in_loop=True)
        loud.run(cond, [*cond_constants, *carry])
        loud.run(body, [*body_constants, *carry])
        return carry


def _sameness(states: Sequence[State]) -> list[Sameness]:
    return [state.sameness for state in states]


def _inner_jaxprs(equation: Any) -> Iterable[Jaxpr]:
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, _tracing.ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, Jaxpr):
                yield inner


def _all_equations(jaxpr: Jaxpr) -> Iterable[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner_jaxprs(equation):
            yield from _all_equations(inner)


def _is_plain(jaxpr: Jaxpr) -> bool:
    """Tell whether everything inside is a known pure function."""
    names = {equation.primitive.name for equation in _all_equations(jaxpr)}
    return names <= (_PURE | _CALLS | {"scan", "while", "cond"})


def _is_collective(equation: Any) -> bool:
    name = equation.primitive.name
    return (name in _MAKE_SAME or name in _EXCHANGE) and REPLICA_AXIS in _axis_names(equation)


def _axis_names(equation: Any) -> tuple[Any, ...]:
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    return names if isinstance(names, tuple) else (names,)


def _num_bytes(equation: Any) -> int:
    avals = [atom.aval for atom in equation.invars]
    return sum(aval.size * aval.dtype.itemsize for aval in avals if hasattr(aval.dtype, "itemsize"))
