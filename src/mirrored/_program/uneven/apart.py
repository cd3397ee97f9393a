"""What a loop, condition or call computes of values that do not depend on the rows, apart from what it computes of rows.

A loop over layers may carry rows and a counter. Replicas with different numbers of rows run different loops, but all count alike,
and the counter may be assigned to a mirrored variable.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import UnevenReplicasError
from ..._jax import jaxprs, tracing
from ..._jax.jaxprs import ClosedJaxpr, Jaxpr, Literal
from ..._jax.marks import Mark, Purpose, mark_p
from .keys import CUSTOM_DERIVATIVE


def needs(equation: Any, wanted: Sequence[bool]) -> list[bool]:
    """Tell of each operand of an equation whether the results that are wanted depend on it."""
    name, inner = equation.primitive.name, jaxprs.callee(equation)
    if name == "scan":
        body, num_consts, num_carry = jaxprs.scan_of(equation)
        carried, stacked = list(wanted[:num_carry]), wanted[num_carry:]
        return _until_all(carried, num_consts, lambda carried: _needs_in(body, [*carried, *stacked]))
    if name == "while":
        cond, body, num_cond_consts, num_body_consts = jaxprs.while_of(equation)
        of_cond = _needs_in(cond, [True])
        carried = [a or b for a, b in zip(wanted, of_cond[num_cond_consts:], strict=True)]
        return [*of_cond[:num_cond_consts], *_until_all(carried, num_body_consts, lambda carried: _needs_in(body, carried))]
    if name == "cond":
        branches = [_needs_in(branch, wanted) for branch in jaxprs.branches_of(equation)]
        return [True, *(any(row) for row in zip(*branches, strict=True))]
    return _needs_in(inner.jaxpr, wanted) if inner is not None else [True] * len(equation.invars)


def _until_all(carried: list[bool], num_consts: int, one_round: Callable[[list[bool]], list[bool]]) -> list[bool]:
    """Return what a loop needs, whose rounds take constants and then what is carried; `carried` grows to all that is needed."""
    while True:
        needed = one_round(carried)
        wider = [a or b for a, b in zip(carried, needed[num_consts:], strict=False)]
        if wider == carried:
            return [*needed[:num_consts], *carried, *needed[num_consts + len(carried) :]]
        carried = wider


def _needs_in(jaxpr: Jaxpr, wanted: Sequence[bool]) -> list[bool]:
    needed = _needed(jaxpr, wanted)[0]
    return [variable in needed for variable in jaxpr.invars]


def _needed(jaxpr: Jaxpr, wanted: Sequence[bool]) -> tuple[set[Any], list[tuple[Any, list[bool]]]]:
    """Return the variables that the wanted results need, and the equations, each with which of its results are."""
    needed = {atom for atom, own in zip(jaxpr.outvars, wanted, strict=True) if own and not isinstance(atom, Literal)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        results = [variable in needed for variable in equation.outvars]
        if any(results):
            equations.append((equation, results))
            operands = zip(equation.invars, needs(equation, results), strict=True)
            needed.update(atom for atom, own in operands if own and not isinstance(atom, Literal))
    return needed, equations[::-1]


def assignments(equations: Iterable[Any]) -> Counter[Mark]:
    """Count the marks, also inside equations, that say that a variable is assigned."""
    every = itertools.chain.from_iterable((equation, *jaxprs.inside(equation)) for equation in equations)
    notes = (equation.params["note"] for equation in every if equation.primitive is mark_p)
    return Counter(note for note in notes if note.purpose is Purpose.ASSIGN)


def judged_elsewhere(equation: Any, closed: ClosedJaxpr) -> Any:
    """Return an equation whose marks no longer say that a variable is assigned, where all that they say is computed apart."""
    there = assignments([equation])
    found = {note for note, count in assignments(closed.jaxpr.eqns).items() if count >= there[note]}
    return _judged_equation(equation, found) if found else equation


def _judged_equation(equation: Any, found: Collection[Mark]) -> Any:
    if equation.primitive is mark_p and equation.params["note"] in found:
        return equation.replace(params={"note": dataclasses.replace(equation.params["note"], purpose=Purpose.JUDGED)})
    return equation.replace(params={name: _judged(value, found) for name, value in equation.params.items()})


def _judged(value: Any, found: Collection[Mark]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_judged(inner, found) for inner in value)
    if not isinstance(value, Jaxpr | ClosedJaxpr):
        return value
    jaxpr = value.jaxpr if isinstance(value, ClosedJaxpr) else value
    inner = jaxpr.replace(eqns=[_judged_equation(equation, found) for equation in jaxpr.eqns])
    return ClosedJaxpr(inner, value.consts) if isinstance(value, ClosedJaxpr) else inner


def groups(equation: Any) -> list[tuple[list[int], list[bool]]]:
    """Return the results of an equation that are computed together, and of each operand whether they need it.

    What a loop carries stays together where each value needs all the others, such as the leaves of an optimizer's state: a loop
    for each would do all of the work again.
    """
    num_results = len(equation.outvars)
    num_carry = {"scan": lambda: jaxprs.scan_of(equation).num_carry, "while": lambda: num_results}
    count = num_carry.get(equation.primitive.name, lambda: 0)()
    found: dict[Any, tuple[list[int], list[bool]]] = {}
    for position in range(num_results):
        needed = needs(equation, [k == position for k in range(num_results)])
        key = tuple(needed) if position < count else position
        found.setdefault(key, ([], needed))[0].append(position)
    return list(found.values())


def alone(equation: Any, positions: Sequence[int], needed: Sequence[bool], axis: Any) -> tuple[ClosedJaxpr, list[int]] | None:
    """Return a function that computes some results of a loop, condition or call and nothing else, and the operands that it takes.

    None where they are not known to be computed from operands alone. What the equation does besides, such as a print, it
    does in its own place.
    """
    wanted = [k in positions for k in range(len(equation.outvars))]
    taken = [k for k, own in enumerate(needed) if own]
    avals = [equation.invars[k].aval for k in taken]
    if not all(type(aval) is jax.core.ShapedArray for aval in avals):
        return None

    def compute(*values: Any) -> list[Any]:
        given = dict(zip(taken, values, strict=True))
        return _kept(_compute(equation, [given.get(k) for k in range(len(equation.invars))], wanted), wanted)

    operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    closed = tracing.traced(compute, operands, axis)
    return (closed, taken) if all(map(jaxprs.is_function_of_operands, closed.jaxpr.eqns)) else None


def _compute(equation: Any, operands: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """Compute the wanted results of an equation, with None for the others and for the operands that they do not need."""
    name, inner = equation.primitive.name, jaxprs.callee(equation)
    needed = needs(equation, wanted)
    if all(wanted) and all(needed) and jaxprs.is_function_of_operands(equation):
        return tracing.bind(equation, operands)
    operands = [value if own else None for value, own in zip(operands, needed, strict=True)]
    if inner is not None:
        return _run(inner, list(map(_without_derivative, operands)) if name in CUSTOM_DERIVATIVE else operands, wanted)
    if name == "cond":
        branches = [_branch(closed, operands[1:], wanted) for closed in equation.params["branches"]]
        return _filled(jax.lax.switch(operands[0], branches), wanted)
    if name == "while":
        return _while(equation, operands)
    return _scan(equation, operands, wanted) if name == "scan" else tracing.bind(equation, operands)


def _without_derivative(operand: Any) -> Any:
    is_differentiable = operand is not None and jnp.issubdtype(jnp.result_type(operand), jnp.inexact)
    return _underived(operand) if is_differentiable else operand


@jax.custom_jvp
def _underived(value: jax.Array) -> jax.Array:
    """Return an operand of a call of which only a part is computed, while its own derivative is that of all of it."""
    return value


@_underived.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise UnevenReplicasError(
        "the batch does not divide evenly among the replicas, and this differentiates through strategy.run a function with a "
        "derivative of its own (jax.custom_jvp, jax.custom_vjp) that computes of rows and of what does not depend on them "
        "together: they are computed apart in such an uneven step, where that derivative is not known. "
        "Differentiate inside the step, with mr.grad or jax.grad, or write two functions."
    )


def _branch(closed: ClosedJaxpr, operands: Sequence[Any], wanted: Sequence[bool]) -> Callable[[], list[Any]]:
    return lambda: _kept(_run(closed, operands, wanted), wanted)


def _while(equation: Any, operands: Sequence[Any]) -> list[Any]:
    _, _, num_cond_consts, num_body_consts = jaxprs.while_of(equation)
    again, body = (equation.params[name] for name in ("cond_jaxpr", "body_jaxpr"))
    num_consts = num_cond_consts + num_body_consts
    of_cond, of_body, carry = operands[:num_cond_consts], operands[num_cond_consts:num_consts], operands[num_consts:]
    carried = [value is not None for value in carry]
    values = jax.lax.while_loop(
        lambda carry: _run(again, [*of_cond, *_filled(carry, carried)], [True])[0],
        lambda carry: _kept(_run(body, [*of_body, *_filled(carry, carried)], carried), carried),
        _kept(carry, carried),
    )
    return _filled(values, carried)


def _scan(equation: Any, operands: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    [closed] = jaxprs.inner_jaxprs(equation)
    _, num_consts, num_carry = jaxprs.scan_of(equation)
    constants, carry, rows = operands[:num_consts], operands[num_consts:][:num_carry], operands[num_consts + num_carry :]
    carried, sliced, stacked = [v is not None for v in carry], [v is not None for v in rows], wanted[num_carry:]

    def one_round(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        arguments = [*constants, *_filled(carry, carried), *_filled(rows, sliced)]
        results = _run(closed, arguments, [*carried, *stacked])
        return _kept(results[:num_carry], carried), _kept(results[num_carry:], stacked)

    options = {key: equation.params[key] for key in ("length", "reverse", "unroll")}
    new, collected = jax.lax.scan(one_round, _kept(carry, carried), _kept(rows, sliced), **options)
    return [*_filled(new, carried), *_filled(collected, stacked)]


def _kept(values: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    return [value for value, own in zip(values, wanted, strict=True) if own]


def _filled(values: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    given = iter(values)
    return [next(given) if own else None for own in wanted]


def _run(closed: ClosedJaxpr, arguments: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    jaxpr = closed.jaxpr
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True))
    read = lambda atom: _literal(atom) if isinstance(atom, Literal) else known.get(atom)  # noqa: E731
    for equation, results in _needed(jaxpr, wanted)[1]:
        known.update(zip(equation.outvars, _compute(equation, list(map(read, equation.invars)), results), strict=True))
    return [read(atom) if own else None for atom, own in zip(jaxpr.outvars, wanted, strict=True)]


def _literal(atom: Any) -> Any:
    """Return the value of a literal in its type, which a Python number has only where it meets the other operands."""
    return np.asarray(atom.val, atom.aval.dtype)
