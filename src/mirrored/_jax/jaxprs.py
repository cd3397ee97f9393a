"""What a traced program consists of: its equations, what they call, and which of them are collectives.

Jaxprs are read by what both ends of JAX's tried versions offer. The parts of a loop are counted by shapes, since the
names of its parameters move: `scan` has lost `num_consts` and `num_carry` with jax 0.11.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import numpy as np
from jax._src import core

from .._typing import REPLICA_AXIS
from .marks import mark_p
from .primitives import CALLS, CONTROL_FLOW, HOST_CALLBACKS, LOCAL, PURE

Jaxpr = jex_core.Jaxpr
#: The same class as Jaxpr since jax 0.11; before, a pair of a Jaxpr and its constants.
ClosedJaxpr = jex_core.ClosedJaxpr
Equation = jex_core.JaxprEqn
Literal = jex_core.Literal
Var = jex_core.Var
Atom = Var | Literal
#: The types of parameters that are looked into.
_MAY_HOLD_JAXPRS = frozenset({ClosedJaxpr, Jaxpr, tuple, list})


def inner_jaxprs(equation: Equation) -> list[ClosedJaxpr]:
    """Return the jaxprs among an equation's parameters."""
    found: list[ClosedJaxpr] = []
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, ClosedJaxpr):
                found.append(inner)
            elif isinstance(inner, Jaxpr):
                found.append(ClosedJaxpr(inner, ()))
    return found


def all_equations(jaxpr: Jaxpr) -> list[Equation]:
    """Return the equations of a program, also those inside others, each followed by what is inside it."""
    found: list[Equation] = []
    waiting = list(reversed(jaxpr.eqns))
    while waiting:
        equation = waiting.pop()
        found.append(equation)
        if _MAY_HOLD_JAXPRS.isdisjoint(map(type, equation.params.values())):
            continue
        for inner in reversed(inner_jaxprs(equation)):
            waiting.extend(reversed(inner.jaxpr.eqns))
    return found


def inside(equation: Equation) -> list[Equation]:
    """Return the equations inside an equation, at any depth."""
    return [found for inner in inner_jaxprs(equation) for found in all_equations(inner.jaxpr)]


def callee(equation: Equation) -> ClosedJaxpr | None:
    """Return what an equation calls; None if it is no call, or not in the way that we know."""
    inner = inner_jaxprs(equation) if equation.primitive.name in CALLS else []
    if len(inner) != 1:
        return None
    [closed] = inner
    fits = len(closed.jaxpr.invars) == len(equation.invars) and len(closed.jaxpr.outvars) == len(equation.outvars)
    return closed if fits else None


# -- loops and conditions


def scan_of(equation: Equation) -> tuple[int, int]:
    """Return how many operands of a `scan` are constants, and how many its carry; what is behind them are rows.

    An operand with one axis more than what the body takes in its place is sliced into rows; a result with one axis more
    than what the body gives is stacked of them.
    """
    [closed] = inner_jaxprs(equation)
    num_rows = _num_longer(equation.invars, closed.jaxpr.invars)
    num_carry = len(equation.outvars) - _num_longer(equation.outvars, closed.jaxpr.outvars)
    return len(equation.invars) - num_carry - num_rows, num_carry


def _num_longer(outer: Sequence[Atom], inner: Sequence[Atom]) -> int:
    return sum(_rank(a) > _rank(b) for a, b in zip(outer, inner, strict=True))


def _rank(atom: Atom) -> int:
    return len(getattr(atom.aval, "shape", ()))  # a token has no shape


def while_of(equation: Equation) -> tuple[int, int]:
    """Return how many operands of a `while` are constants of its condition, and how many of its body; it carries the rest."""
    cond, body = (len(equation.params[name].jaxpr.invars) for name in ("cond_jaxpr", "body_jaxpr"))
    return cond - len(equation.outvars), body - len(equation.outvars)


def solver_of(equation: Equation) -> tuple[Jaxpr, list[int]]:
    """Return what a `custom_linear_solve` runs, and on which operands. Its other functions are for derivatives only."""
    counts = equation.params["const_lengths"]
    first, after_all = counts.matvec + counts.vecmat, sum(counts)
    operands = [*range(first, first + counts.solve), *range(after_all, len(equation.invars))]
    return equation.params["jaxprs"].solve.jaxpr, operands


class Part(NamedTuple):
    """What a loop or condition runs, and which operands of the equation it takes as they are: its first arguments."""

    closed: ClosedJaxpr
    fixed: range


def parts_of(equation: Equation) -> tuple[list[Part], range]:
    """Take a `scan`, `while` or `cond` apart: what it runs, and the operands that are handed over in another way.

    Those of a `scan` are its carry and what is sliced into rows, those of a `while` what it carries, that of a `cond` its
    index. Of any other equation there are no parts, and all operands are handed over.
    """
    name, num_operands = equation.primitive.name, len(equation.invars)
    if name == "scan":
        num_consts, _ = scan_of(equation)
        [closed] = inner_jaxprs(equation)
        return [Part(closed, range(num_consts))], range(num_consts, num_operands)
    if name == "while":
        middle, num_consts = itertools.accumulate(while_of(equation))
        cond, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
        return [Part(cond, range(middle)), Part(body, range(middle, num_consts))], range(num_consts, num_operands)
    if name == "cond":
        return [Part(closed, range(1, num_operands)) for closed in equation.params["branches"]], range(1)
    return [], range(num_operands)


# -- collectives


def axis_names(equation: Equation) -> tuple[Any, ...]:
    """Return the mesh axes that an equation names; those of a `vmap` are numbers."""
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    return names if isinstance(names, tuple) else (names,)


def is_collective(equation: Equation) -> bool:
    """Tell whether an equation itself reaches other replicas."""
    return REPLICA_AXIS in axis_names(equation) and equation.primitive.name not in LOCAL


def has_collective(equation: Equation) -> bool:
    """Tell whether an equation is, or has inside, a collective over the replicas."""
    return any(map(is_collective, (equation, *inside(equation))))


def is_sum(equation: Equation) -> bool:
    """Tell whether an equation adds up over all replicas, and over nothing else."""
    is_psum = equation.primitive.name == "psum" and axis_names(equation) == (REPLICA_AXIS,)
    return is_psum and not is_over_groups(equation)


def is_replica_number(equation: Equation) -> bool:
    """Tell whether an equation asks for the replica's number."""
    return equation.primitive.name == "axis_index" and REPLICA_AXIS in axis_names(equation)


def has_replica_number(equation: Equation) -> bool:
    """Tell whether an equation asks for the replica's number, or one inside it does."""
    return any(map(is_replica_number, [equation, *inside(equation)]))


def adds_own_axes(equation: Equation) -> bool:
    """Tell whether an equation is a sum over the replicas and over axes of its operands: what a `vmap` makes of two names."""
    if equation.primitive.name != "psum" or not is_collective(equation):
        return False
    return any(isinstance(axis, int | np.integer) for axis in axis_names(equation))


def is_over_groups(equation: Equation) -> bool:
    """Tell whether a collective joins groups of replicas only, and not all of them."""
    return equation.params.get("axis_index_groups") is not None


def num_bytes(equation: Equation) -> int:
    """Return how many bytes each replica gives to a collective."""
    avals: list[Any] = [atom.aval for atom in equation.invars]
    return sum(aval.size * aval.dtype.itemsize for aval in avals if hasattr(aval.dtype, "itemsize"))


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


# -- what an equation depends on


def is_plain(equation: Equation) -> bool:
    """Tell whether an equation is known to be pure, apart from what is inside it."""
    return equation.primitive.name in PURE | CALLS | CONTROL_FLOW


def is_function_of_operands(equation: Equation) -> bool:
    """Tell whether an equation is known to compute its results from its operands and the replica's number alone."""
    return all(map(_is_local_and_plain, (equation, *inside(equation))))


def _is_local_and_plain(equation: Equation) -> bool:
    if equation.primitive is mark_p or equation.primitive.name == "axis_index":
        return True
    return is_plain(equation) and not is_collective(equation)


def has_host_callback(jaxpr: Jaxpr) -> bool:
    """Tell whether a program calls a user's function on the host, which may raise; `jax.debug.print` calls none."""
    return not HOST_CALLBACKS.isdisjoint([equation.primitive.name for equation in all_equations(jaxpr)])


# -- what a program holds


def meshes_in(jaxpr: Jaxpr) -> Iterator[jax.sharding.Mesh]:
    """Yield the meshes that a traced cross-replica function maps over or places results on."""
    for equation in all_equations(jaxpr):
        if equation.primitive.name == "shard_map":
            yield equation.params["mesh"]
        for placement in equation.params.get("out_shardings", ()):
            if isinstance(placement, jax.sharding.NamedSharding) and isinstance(placement.mesh, jax.sharding.Mesh):
                yield placement.mesh


def inner_constants(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the arrays that functions inside a traced function close over: their text shows no more than shapes of them."""
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(tuple(equation.params.values())):
            if isinstance(inner, ClosedJaxpr):
                yield from inner.consts
                yield from inner_constants(inner.jaxpr)
            elif isinstance(inner, Jaxpr):
                yield from inner_constants(inner)
            elif isinstance(inner, np.ndarray | jax.Array):
                yield inner
