"""The sums over the replicas of a traced program: after which others each comes, and how some are made one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import core

from .._typing import REPLICA_AXIS
from .jaxprs import Atom, Equation, Jaxpr, Literal, Var, is_sum


class Levels(NamedTuple):
    """A program cut at its sums over the replicas: those of one level need no other's result, and could be one."""

    plain: list[list[Any]]  # for each level, the other equations that can run before its sums, in program order
    sums: list[list[Any]]  # for each level; the last one has none
    of: dict[Any, int]  # the level of what is computed; at this level's sums, or later ones, it can be added up
    parts: dict[Any, int]  # of how many arrays what is a concatenation consists


def levels_of(jaxpr: Jaxpr) -> Levels:
    """Cut a program at its sums; equations with effects stay in their order."""
    of: dict[Any, int] = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), 0)
    levels = Levels([[]], [[]], of, {})
    last_effect = 0
    for equation in jaxpr.eqns:
        level = max((of[atom] for atom in equation.invars if not isinstance(atom, Literal)), default=0)
        if _has_effects(equation):
            level = last_effect = max(level, last_effect)
        adds = is_sum(equation) and not _has_effects(equation)
        (levels.sums if adds else levels.plain)[level].append(equation)
        of.update(dict.fromkeys(equation.outvars, level + adds))
        if adds and level + 1 == len(levels.sums):
            levels.plain.append([])
            levels.sums.append([])
        if equation.primitive.name == "concatenate":
            levels.parts[equation.outvars[0]] = len(equation.invars)
    return levels


def _has_effects(equation: Equation) -> bool:
    """Tell whether an equation does more than compute; that it names the replica axis is an effect to JAX, but none here."""
    return any(not isinstance(effect, core.NamedAxisEffect) for effect in equation.effects)


def is_number(atom: Atom) -> bool:
    """Tell whether an atom of a program is an array of real numbers."""
    dtype = getattr(atom.aval, "dtype", np.dtype(bool))
    return jax.numpy.issubdtype(dtype, jax.numpy.floating) or jax.numpy.issubdtype(dtype, jax.numpy.integer)


def call(
    function: Callable[..., Any], operands: Sequence[Any], results: Sequence[Var], like: Equation, num_replicas: int
) -> Equation:
    """Make an equation that calls a function of a list of arrays, with collectives; `like` has the user's line and settings."""
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in operands]
    traced = jax.make_jaxpr(jax.jit(lambda *arrays: function(arrays)), axis_env=[(REPLICA_AXIS, num_replicas)])(*avals)
    [equation] = traced.eqns
    return equation.replace(invars=list(operands), outvars=list(results), source_info=like.source_info, ctx=like.ctx)


def without(equation: Equation, results: set[Var]) -> Equation | None:
    """Return a sum of several arrays without those of some results; None if none is left."""
    kept = [(atom, total) for atom, total in zip(equation.invars, equation.outvars, strict=True) if total not in results]
    return equation.replace(invars=[atom for atom, _ in kept], outvars=[total for _, total in kept]) if kept else None
