"""What a loop, condition or call computes of values that do not depend on the rows, apart from what it computes of rows.

A loop over layers may carry rows and a counter. Replicas with different numbers of rows run different loops, but all count alike,
and the counter may be assigned to a mirrored variable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ..._jax import jaxprs, tracing
from ..._jax.jaxprs import ClosedJaxpr, Jaxpr, Literal
from ..._jax.marks import Purpose, mark_p


def depends(equation: Any, differs: Sequence[bool]) -> list[bool]:
    """Tell of each result of an equation whether it depends on operands that differ: what replicas have combined does not."""
    name = equation.primitive.name
    if jaxprs.is_collective(equation) or (not any(differs) and not jaxprs.has_axis_index(equation)):
        return [False] * len(equation.outvars)
    parts = _parts(equation, differs)
    if name == "scan":
        return _in_jaxpr(*parts[0])
    if name == "while":
        [again], carry = (_in_jaxpr(*part) for part in parts)
        return [again or own for own in carry]
    if name == "cond":
        return [differs[0] or any(row) for row in zip(*(_in_jaxpr(*part) for part in parts), strict=True)]
    return _in_jaxpr(*parts[0]) if parts else [True] * len(equation.outvars)


def _parts(equation: Any, differs: Sequence[bool]) -> list[tuple[Jaxpr, list[bool]]]:
    """Return what a loop, condition or call runs, each with which of its arguments differ, in any round."""
    name, inner = equation.primitive.name, jaxprs.callee(equation)
    if name == "scan":
        body, num_consts, num_carry = jaxprs.scan_of(equation)
        constants, carry, rows = differs[:num_consts], differs[num_consts:][:num_carry], differs[num_consts + num_carry :]
        return [(body, [*constants, *_carried(body, constants, carry, rows), *rows])]
    if name == "while":
        cond, body, num_cond_consts, num_body_consts = jaxprs.while_of(equation)
        num_consts = num_cond_consts + num_body_consts
        constants = differs[num_cond_consts:num_consts]
        carry = _carried(body, constants, differs[num_consts:], [])
        return [(cond, [*differs[:num_cond_consts], *carry]), (body, [*constants, *carry])]
    if name == "cond":
        return [(branch, list(differs[1:])) for branch in jaxprs.branches_of(equation)]
    return [(inner.jaxpr, list(differs))] if inner is not None else []


def _carried(body: Jaxpr, constants: Sequence[bool], carry: Sequence[bool], rows: Sequence[bool]) -> list[bool]:
    while True:
        after = _in_jaxpr(body, [*constants, *carry, *rows])
        wider = [before or own for before, own in zip(carry, after, strict=False)]  # after the carry, what is stacked
        if wider == list(carry):
            return wider
        carry = wider


def _in_jaxpr(jaxpr: Jaxpr, differs: Sequence[bool]) -> list[bool]:
    known = {**dict.fromkeys(jaxpr.constvars, False), **dict(zip(jaxpr.invars, differs, strict=True))}
    read = lambda atom: not isinstance(atom, Literal) and known[atom]  # noqa: E731
    for equation in jaxpr.eqns:
        known.update(zip(equation.outvars, depends(equation, list(map(read, equation.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def judged_elsewhere(equation: Any) -> Any:
    """Return an equation in which no mark says that a variable is assigned.

    What depends on rows was judged in the trace, and what does not is assigned where all replicas do it.
    """
    if equation.primitive is mark_p and equation.params["note"].purpose is Purpose.ASSIGN:
        return equation.replace(params={"note": dataclasses.replace(equation.params["note"], purpose=Purpose.JUDGED)})
    return equation.replace(params={name: _judged(value) for name, value in equation.params.items()})


def _judged(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_judged, value))
    if not isinstance(value, Jaxpr | ClosedJaxpr):
        return value
    jaxpr = value.jaxpr if isinstance(value, ClosedJaxpr) else value
    inner = jaxpr.replace(eqns=[judged_elsewhere(equation) for equation in jaxpr.eqns])
    return ClosedJaxpr(inner, value.consts) if isinstance(value, ClosedJaxpr) else inner


def without_rows(equation: Any, differs: Sequence[bool], results: Sequence[bool]) -> ClosedJaxpr | None:
    """Return what an equation computes of the operands that do not differ: a function of these, for the results that do not.

    Args:
        equation: a loop, condition or call.
        differs: of each operand, whether it differs.
        results: of each result, whether it does, as `depends` tells.

    Returns:
        None where there is nothing to take apart: all results differ or none, or there is more to do than to compute them.
    """
    if all(results) or not any(results) or tracing.keeps_a_mesh(equation) or not jaxprs.is_function_of_operands(equation):
        return None
    avals = [atom.aval for atom, own in zip(equation.invars, differs, strict=True) if not own]
    operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]

    def same(*operands: Any) -> list[Any]:
        given = iter(operands)
        computed = _apart(equation, [None if own else next(given) for own in differs])
        return [value for value, own in zip(computed, results, strict=True) if not own]

    return jax.make_jaxpr(same)(*operands)


def _apart(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Compute those results of an equation that do not differ, with None for what does."""
    name, inner = equation.primitive.name, jaxprs.callee(equation)
    results = depends(equation, [value is None for value in operands])
    if all(results):
        return [None] * len(results)
    if not any(results) and None not in operands:
        return tracing.bind(equation, operands)
    if inner is not None:
        return _run(inner.jaxpr, inner.consts, operands)
    if name == "cond":
        branches = [_picked(closed, operands[1:], results) for closed in equation.params["branches"]]
        return _filled(jax.lax.switch(operands[0], branches), results)
    if name == "while":
        return _while(equation, operands, results)
    return _scan(equation, operands, results)


def _picked(closed: ClosedJaxpr, operands: Sequence[Any], results: Sequence[bool]) -> Any:
    return lambda: [v for v, own in zip(_run(closed.jaxpr, closed.consts, operands), results, strict=True) if not own]


def _filled(values: Sequence[Any], results: Sequence[bool]) -> list[Any]:
    given = iter(values)
    return [None if own else next(given) for own in results]


def _while(equation: Any, operands: Sequence[Any], results: Sequence[bool]) -> list[Any]:
    _, _, num_cond_consts, num_body_consts = jaxprs.while_of(equation)
    again, body = (equation.params[name] for name in ("cond_jaxpr", "body_jaxpr"))
    num_consts = num_cond_consts + num_body_consts
    of_cond, of_body = operands[:num_cond_consts], operands[num_cond_consts:num_consts]
    kept = lambda values: [value for value, own in zip(values, results, strict=True) if not own]  # noqa: E731
    values = jax.lax.while_loop(
        lambda carry: _run(again.jaxpr, again.consts, [*of_cond, *_filled(carry, results)])[0],
        lambda carry: kept(_run(body.jaxpr, body.consts, [*of_body, *_filled(carry, results)])),
        kept(operands[num_consts:]),
    )
    return _filled(values, results)


def _scan(equation: Any, operands: Sequence[Any], results: Sequence[bool]) -> list[Any]:
    [closed] = jaxprs.inner_jaxprs(equation)
    _, num_consts, num_carry = jaxprs.scan_of(equation)
    constants, carry, rows = operands[:num_consts], operands[num_consts:][:num_carry], operands[num_consts + num_carry :]
    is_own_carry, is_own_row = results[:num_carry], [value is None for value in rows]

    def one_round(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        arguments = [*constants, *_filled(carry, is_own_carry), *_filled(rows, is_own_row)]
        values = list(zip(_run(closed.jaxpr, closed.consts, arguments), results, strict=True))
        new, stacked = ([value for value, own in part if not own] for part in (values[:num_carry], values[num_carry:]))
        return new, stacked

    kept = [value for value, own in zip(carry, is_own_carry, strict=True) if not own]
    options = {key: equation.params[key] for key in ("length", "reverse", "unroll")}
    new, stacked = jax.lax.scan(one_round, kept, [value for value in rows if value is not None], **options)
    return _filled([*new, *stacked], results)


def _run(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else known[atom]  # noqa: E731
    for equation in jaxpr.eqns:
        known.update(zip(equation.outvars, _apart(equation, list(map(read, equation.invars))), strict=True))
    return list(map(read, jaxpr.outvars))
