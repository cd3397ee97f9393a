"""The sums over the replicas of a traced program: after which others each comes."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax._src import core

from .jaxprs import Equation, Jaxpr, Var, is_sum


class Levels(NamedTuple):
    """A program cut at its sums over the replicas: those of one level need no other's result, and could be one."""

    equations: list[tuple[list[Equation], list[Equation]]]  # of each level: what can run before its sums, and these
    of: dict[Any, int]  # at which level's sums, or later ones, an array can be added up
    parts: dict[Any, int]  # of how many arrays what is a concatenation consists


def levels_of(jaxpr: Jaxpr) -> Levels:
    """Cut a program at its sums; equations with effects stay in their order."""
    of: dict[Any, int] = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), 0)
    levels = Levels([([], [])], of, {})
    last_effect = 0
    for equation in jaxpr.eqns:
        level = max((of[atom] for atom in equation.invars if isinstance(atom, Var)), default=0)
        has_effects = any(not isinstance(effect, core.NamedAxisEffect) for effect in equation.effects)  # to name an axis is none
        if has_effects:
            level = last_effect = max(level, last_effect)
        adds = is_sum(equation) and not has_effects
        levels.equations[level][adds].append(equation)
        of.update(dict.fromkeys(equation.outvars, level + adds))
        if adds and level + 1 == len(levels.equations):
            levels.equations.append(([], []))
        if equation.primitive.name == "concatenate":
            levels.parts[equation.outvars[0]] = len(equation.invars)
    return levels
