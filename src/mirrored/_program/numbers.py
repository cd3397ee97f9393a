"""Which Python numbers among the arguments change from call to call, and may be arguments of the program?

A number is compiled in. The second value of one makes it an argument, if the program is the same then, to the bit: not where
Python computes with it or branches on it. docs/design/lifting.md has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from .._jax import jaxprs
from .._jax.jaxprs import Jaxpr
from .call import ArrayLeaf, Call

#: Functions whose numbers are remembered.
_MAX_SEEN = 1024
_MOVING = """
broadcast_in_dim clamp concatenate convert_element_type copy dynamic_slice dynamic_update_slice expand_dims gather mirrored_mark
pad reshape select_n slice squeeze stop_gradient transpose
"""
#: Copy or choose values.
_MOVES = frozenset(_MOVING.split())
_WITH_INTEGERS = "abs add and div eq ge gt le lt max min ne neg not or rem sign sub xor"
#: Give the same of an integer as Python does, unless it grows too large.
_OF_INTEGERS = frozenset(_WITH_INTEGERS.split())
#: Are rounded as they should be, also when the compiler computes them.
_ROUNDED = frozenset({"add", "add_any", "div", "max", "min", "mul", "neg", "sub"})
#: Give the same with a number that is an argument as with one that is compiled in, when the other operands are no numbers.
_WITH_ARRAYS = _MOVES | _OF_INTEGERS | _ROUNDED | {"atan2", "nextafter", "random_fold_in", "random_seed"}
#: Run their only jaxpr on all operands.
_INSIDE = frozenset({"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2"})


class NumberIsNeededError(Exception):
    """A program would be another one if a number were its argument. Users never see it."""


class Numbers:
    """The Python numbers among the arguments of a strategy's steps, and which of them are arguments of programs."""

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[Any, ...]] = {}  # the first value of each, by function and structure
        self._passed: dict[Any, frozenset[int]] = {}
        self._refused: dict[Any, frozenset[int]] = {}

    def known(self, call: Call) -> Call:
        """Return a call with those numbers as arguments that have become such."""
        passed = self._passed.get(call.key[:2])
        return with_numbers(call, passed) if passed else call

    def candidates(self, call: Call) -> list[frozenset[int]]:
        """Return which numbers may become arguments, now that the call needs another program: sets of positions to try."""
        group, values = call.key[:2], tuple(map(_number_of, call.leaves))
        before = self._seen.get(group, values)
        if len(self._seen) > _MAX_SEEN:
            for known in (self._seen, self._passed, self._refused):
                known.clear()
        self._seen[group] = tuple(new if old is None else old for old, new in zip(before, values, strict=True))
        passed, refused = self._passed.get(group, frozenset()), self._refused.get(group, frozenset())
        pairs = enumerate(zip(before, values, strict=True))
        changed = {i for i, (old, new) in pairs if old is not None and type(old) is type(new) and repr(old) != repr(new)}
        changed = frozenset(i for i in changed - refused | passed if values[i] is not None)
        if not changed or not all(_fits(values[i]) for i in changed):
            return []
        return [changed, *(frozenset({i}) for i in sorted(changed) if len(changed) > 1)]

    def keep(self, call: Call, tried: frozenset[int], is_right: bool) -> None:
        """Note whether these numbers may be arguments."""
        group = call.key[:2]
        if is_right:
            self._passed[group] = tried
        elif len(tried) == 1:
            self._refused[group] = self._refused.get(group, frozenset()) | tried
            self._passed[group] = self._passed.get(group, frozenset()) - tried


def _number_of(leaf: Any) -> int | float | None:
    if isinstance(leaf, ArrayLeaf):
        return None
    return leaf[0] if type(leaf[0]) in (int, float) else None


def _fits(value: int | float | None) -> bool:
    """Tell whether JAX holds a number as Python does."""
    if isinstance(value, int):
        limits = jnp.iinfo(jnp.result_type(int))
        return limits.min <= value <= limits.max
    return value is not None and not (math.isfinite(value) and abs(value) > jnp.finfo(jnp.result_type(float)).max)


def with_numbers(call: Call, positions: Iterable[int]) -> Call:
    """Return a call in which the numbers at these leaves are arrays, of the weak type that a Python number has."""
    if not all(_fits(_number_of(call.leaves[i])) for i in positions if not isinstance(call.leaves[i], ArrayLeaf)):
        return call
    arrays, leaves, kinds, numbers = iter(call.arrays), list(call.leaves), list(call.key[2]), []
    given: list[Any] = []
    for position, leaf in enumerate(call.leaves):
        if isinstance(leaf, ArrayLeaf):
            given.append(next(arrays))
        elif position in positions and (value := _number_of(leaf)) is not None:
            array = jnp.asarray(value)
            leaves[position] = kinds[position] = ArrayLeaf((), array.dtype, True, False)
            numbers.append(len(given))
            given.append(array)
    return call._replace(key=(*call.key[:2], tuple(kinds)), arrays=given, leaves=leaves, numbers=tuple(numbers))


def check(jaxpr: Jaxpr, num_before: int, numbers: Sequence[int]) -> None:
    """Stop unless a program computes the same bits with these arguments as with the numbers compiled in.

    Raises:
        NumberIsNeededError: when Python would compute something with a number itself, in double precision.
    """
    _check(jaxpr, {jaxpr.invars[num_before + number] for number in numbers})


def _check(jaxpr: Jaxpr, numbers: set[Any]) -> list[bool]:
    """Check the equations of a jaxpr, and tell for each result whether it is made of numbers alone."""
    for equation in jaxpr.eqns:
        is_number = [not isinstance(atom, jaxprs.Literal) and atom in numbers for atom in equation.invars]
        if not any(is_number):
            continue
        alone = all(number or isinstance(atom, jaxprs.Literal) for atom, number in zip(equation.invars, is_number, strict=True))
        for variable, is_made in zip(equation.outvars, _check_equation(equation, is_number, alone), strict=True):
            if is_made:
                numbers.add(variable)
    return [not isinstance(atom, jaxprs.Literal) and atom in numbers for atom in jaxpr.outvars]


def _check_equation(equation: Any, is_number: list[bool], alone: bool) -> list[bool]:
    name = equation.primitive.name
    inner = [closed.jaxpr for closed in jaxprs.inner_jaxprs(equation)]
    if name in _INSIDE and len(inner) == 1 and len(inner[0].invars) == len(is_number):
        return _check(inner[0], _chosen(inner[0].invars, is_number))
    if name == "cond":
        found = [_check(branch, _chosen(branch.invars, is_number[1:])) for branch in inner]
        return [False for _ in found[0]]
    if name == "scan":
        loop = jaxprs.scan_of(equation)
        _check(loop.body, _chosen(loop.body.invars[: loop.num_consts], is_number[: loop.num_consts]))
        return [False for _ in equation.outvars]
    avals = [atom.aval for atom in (*equation.invars, *equation.outvars)]
    if name == "convert_element_type" and _rounds_twice(*avals):
        raise NumberIsNeededError
    if alone:
        # Of weak types only, it is Python that computes when the number is compiled in, and in double precision.
        in_program = name in _ROUNDED and not all(getattr(atom.aval, "weak_type", False) for atom in equation.invars)
        is_exact = name in _MOVES or in_program or (name in _OF_INTEGERS and all(_is_integer(aval) for aval in avals))
        if not (is_exact or name.startswith("random_")):
            raise NumberIsNeededError
        return [not name.startswith("random_")] * len(equation.outvars)
    if not (name in _WITH_ARRAYS or name.startswith("scatter")):
        raise NumberIsNeededError
    return [False] * len(equation.outvars)


def _chosen(variables: Sequence[Any], flags: Sequence[bool]) -> set[Any]:
    return {variable for variable, flag in zip(variables, flags, strict=True) if flag}


def _is_integer(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == jnp.bool_


def _rounds_twice(given: Any, result: Any) -> bool:
    """Tell whether a number is rounded to JAX's precision first and to a lower one then: Python's own would be rounded once."""
    is_real = jnp.issubdtype(given.dtype, jnp.floating) and jnp.issubdtype(result.dtype, jnp.floating)
    return is_real and given.dtype == jnp.float32 and jnp.finfo(result.dtype).bits < 32
