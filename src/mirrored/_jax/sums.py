"""The sums over the replicas of a traced program: after which others each comes, and how some are made one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import core

from .._typing import REPLICA_AXIS
from .jaxprs import Jaxpr, Literal, is_sum


class Levels(NamedTuple):
    """A program cut at its sums over the replicas: those of one level need no other's result, and could be one.

    Attributes:
        plain: for each level, the other equations that can run before its sums, in program order.
        sums: for each level, its sums; the last level has none.
        of: the level of what is computed; at this level's sums, or later ones, it can be added up.
        parts: of how many arrays what is a concatenation consists.
    """

    plain: list[list[Any]]
    sums: list[list[Any]]
    of: dict[Any, int]
    parts: dict[Any, int]


def levels_of(jaxpr: Jaxpr) -> Levels:
    """Cut a program at its sums; equations with effects stay in their order."""
    of: dict[Any, int] = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), 0)
    levels = Levels([[]], [[]], of, {})
    last_effect = 0
    for equation in jaxpr.eqns:
        level = max((of[atom] for atom in equation.invars if not isinstance(atom, Literal)), default=0)
        if _has_effects(equation):
            level = last_effect = max(level, last_effect)
        adds = _is_sum(equation)
        (levels.sums if adds else levels.plain)[level].append(equation)
        of.update(dict.fromkeys(equation.outvars, level + adds))
        if adds and level + 1 == len(levels.sums):
            levels.plain.append([])
            levels.sums.append([])
        if equation.primitive.name == "concatenate":
            levels.parts[equation.outvars[0]] = len(equation.invars)
    return levels


def _is_sum(equation: Any) -> bool:
    return is_sum(equation) and not _has_effects(equation)


def _has_effects(equation: Any) -> bool:
    """Tell whether an equation does more than compute; that it names the replica axis is an effect to JAX, but none here."""
    return any(not isinstance(effect, core.NamedAxisEffect) for effect in equation.effects)


def is_number(atom: Any) -> bool:
    """Tell whether an atom of a program is an array of real numbers."""
    dtype = getattr(atom.aval, "dtype", np.dtype(bool))
    return jax.numpy.issubdtype(dtype, jax.numpy.floating) or jax.numpy.issubdtype(dtype, jax.numpy.integer)


def call(function: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any], like: Any, num_replicas: int) -> Any:
    """Make an equation that calls a function with collectives.

    Args:
        function: takes a list of arrays and returns one.
        operands: the atoms that it is given.
        results: the variables that it computes.
        like: an equation that has the user's line, and the settings.
        num_replicas: R.
    """
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in operands]
    traced = jax.make_jaxpr(jax.jit(lambda *arrays: function(arrays)), axis_env=[(REPLICA_AXIS, num_replicas)])(*avals)
    [equation] = traced.eqns
    return equation.replace(invars=list(operands), outvars=list(results), source_info=like.source_info, ctx=like.ctx)


def without(equation: Any, results: set[Any]) -> Any | None:
    """Return a sum of several arrays without those of some results; None if none is left."""
    kept = [(atom, total) for atom, total in zip(equation.invars, equation.outvars, strict=True) if total not in results]
    return equation.replace(invars=[atom for atom, _ in kept], outvars=[total for _, total in kept]) if kept else None
