"""Reads traced programs: their equations, the jaxprs inside them, and which equations are collectives.

It uses only what the oldest and the newest tried version of JAX both offer. It counts the parts of a loop by shapes,
because the names of parameters change: those of `scan` did in jax 0.11.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import numpy as np
from jax._src import core, source_info_util
from jax._src.interpreters import ad

from .._typing import DEVICE_AXIS, REPLICA_AXIS
from .marks import mark_p
from .primitives import AGAIN, CALLS, CONTROL_FLOW, DEVICE_MAPS, LOCAL, POWERS, PRINTS, PURE, SIMPLE, SUMS

Jaxpr = jex_core.Jaxpr
#: The same class as Jaxpr, under another name: a jaxpr has its constants.
ClosedJaxpr = jex_core.ClosedJaxpr
Equation = jex_core.JaxprEqn
Literal = jex_core.Literal
Var = jex_core.Var
Atom = Var | Literal
#: The parameters in which a program names devices.
_PLACEMENTS = frozenset({"devices", "in_shardings", "out_shardings", "sharding"})


def inner_jaxprs(equation: Equation) -> list[ClosedJaxpr]:
    """Return the jaxprs among an equation's parameters."""
    found: list[ClosedJaxpr] = []
    for value in equation.params.values():
        values = value if isinstance(value, tuple | list) else (value,)
        for inner in values:
            if isinstance(inner, ClosedJaxpr):
                found.append(inner)
            elif isinstance(inner, Jaxpr):
                found.append(ClosedJaxpr(inner, ()))
    return found


def all_equations(jaxpr: Jaxpr) -> list[Equation]:
    """Return the equations of a program at any depth, each followed by those inside it."""
    found: list[Equation] = []
    for equation in jaxpr.eqns:
        found.append(equation)
        if equation.primitive.name not in SIMPLE:
            for inner in inner_jaxprs(equation):
                found += all_equations(inner.jaxpr)
    return found


def inside(equation: Equation) -> list[Equation]:
    """Return the equations inside an equation, at any depth."""
    return [found for inner in inner_jaxprs(equation) for found in all_equations(inner.jaxpr)]


def callee(equation: Equation) -> ClosedJaxpr | None:
    """Return the jaxpr that an equation calls with its operands, or None if the equation is no call."""
    if equation.primitive.name not in CALLS or len(inner := inner_jaxprs(equation)) != 1:
        return None
    [closed] = inner
    fits = len(closed.jaxpr.invars) == len(equation.invars) and len(closed.jaxpr.outvars) == len(equation.outvars)
    return closed if fits else None


def held_operands(equation: Equation) -> list[int] | None:
    """Return the positions of a `jax.checkpoint`'s operands that need a barrier, so that XLA recomputes; None for other calls."""
    if equation.primitive.name not in AGAIN:
        return None
    held = equation.params["prevent_cse"]
    flags = held if isinstance(held, tuple) else (held,) * len(equation.invars)
    avals: list[Any] = [atom.aval for atom in equation.invars]
    are_numbers = [isinstance(aval, core.ShapedArray) and isinstance(aval.dtype, np.dtype) for aval in avals]
    return [k for k, flag in enumerate(flags) if flag and equation.params["differentiated"] and are_numbers[k]]


def linear_operands(equation: Equation) -> list[int] | None:
    """Return the positions of the floating point and complex operands of an equation that JAX knows to be linear; else None.

    It is linear in all of them together, in each of them (a product), or in the first (a quotient).
    """
    primitive = equation.primitive
    is_first_power = primitive.name in POWERS and equation.params["y"] == 1  # as optax writes the first moment of Adam
    if not (is_first_power or primitive in ad.primitive_transposes or primitive in ad.fancy_transposes):
        return None
    avals: list[Any] = [atom.aval for atom in equation.invars]
    return [i for i, aval in enumerate(avals) if jax.numpy.issubdtype(getattr(aval, "dtype", bool), np.inexact)]


#: The names and transformations of JAX's around an equation; most have none.
names_around = operator.attrgetter("source_info.name_stack.stack")


def transforms_of(equation: Equation) -> tuple[str, ...]:
    """Return JAX's names of the transformations that have made an equation, outermost first, such as `transpose` and `jvp`."""
    return tuple([step.name for step in names_around(equation) if isinstance(step, source_info_util.Transform)])


def inside_of(outer: Equation | None, equation: Equation) -> Equation:
    """Return an equation to which the names and transformations of the call around it are added."""
    if outer is None:
        return equation
    source = equation.source_info
    return equation.replace(source_info=source.replace(name_stack=outer.source_info.name_stack + source.name_stack))


def is_backward(equation: Equation, around: tuple[str, ...]) -> bool:
    """Tell whether an equation is part of a backward pass: the transpose of a derivative, which has `jvp` behind `transpose`.

    `jax.linear_transpose` alone makes no derivative. `around` names the transformations of the equations around it.
    """
    transforms = around + transforms_of(equation)
    return "transpose" in transforms and "jvp" in transforms[transforms.index("transpose") :]


# -- loops and conditions


class Part(NamedTuple):
    """A jaxpr of a loop or condition. Its arguments are fixed operands, the carry, and a row of each array of rows."""

    closed: ClosedJaxpr
    fixed: range  # the operands that it takes unchanged, as its first arguments
    decides: bool = False  # whether its result decides if there is another round


class Loop(NamedTuple):
    """The parts of a `scan`, `while` or `cond`: its jaxprs, and the positions of its index, carry and rows among the operands."""

    parts: list[Part]
    index: range  # the operand that chooses the jaxpr
    carry: range
    rows: range

    @property
    def not_fixed(self) -> range:
        """The positions of the index, the carry and the rows: all operands but the fixed ones."""
        return range(self.index.start, self.rows.stop)


def loop_of(equation: Equation) -> Loop:
    """Take a `scan`, `while` or `cond` apart; for any other equation, return no parts, and all operands as rows.

    A `scan` slices an operand into rows if it has one more axis than the body's argument, and stacks rows into a result if
    that has one more axis than the body's result.
    """
    name, num_operands = equation.primitive.name, len(equation.invars)
    parts, start, end = list[Part](), 0, 0
    if name == "scan":
        [closed] = inner_jaxprs(equation)
        end = num_operands - _num_longer(equation.invars, closed.jaxpr.invars)
        start = end - (len(equation.outvars) - _num_longer(equation.outvars, closed.jaxpr.outvars))
        parts = [Part(closed, range(start))]
    elif name == "while":
        cond, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
        middle, start, end = len(cond.jaxpr.invars) - len(equation.outvars), num_operands - len(equation.outvars), num_operands
        parts = [Part(cond, range(middle), decides=True), Part(body, range(middle, start))]
    elif name == "cond":
        parts = [Part(closed, range(1, num_operands)) for closed in equation.params["branches"]]
        return Loop(parts, range(1), range(1, 1), range(1, 1))
    return Loop(parts, range(start, start), range(start, end), range(end, num_operands))


def is_scan(equation: Equation) -> bool:
    """Tell whether an equation is a `scan`: a loop over rows, or with a known number of rounds."""
    return equation.primitive.name == "scan"


def _num_longer(outer: Sequence[Atom], inner: Sequence[Atom]) -> int:
    return sum(_rank(a) > _rank(b) for a, b in zip(outer, inner, strict=True))


def _rank(atom: Atom) -> int:
    return len(getattr(atom.aval, "shape", ()))  # a token has no shape


def solver_of(equation: Equation) -> tuple[Jaxpr, list[int]]:
    """Return the solver of a `custom_linear_solve`, and its operands. Its other functions serve only derivatives."""
    counts = equation.params["const_lengths"]
    first, after_all = counts.matvec + counts.vecmat, sum(counts)
    operands = [*range(first, first + counts.solve), *range(after_all, len(equation.invars))]
    return equation.params["jaxprs"].solve.jaxpr, operands


# -- collectives


def axis_names(equation: Equation) -> tuple[Any, ...]:
    """Return the mesh axes that an equation names, all devices as all replicas; a `vmap`'s axes are numbers."""
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    names = names if isinstance(names, tuple) else (names,)
    return tuple([REPLICA_AXIS if str(name).startswith(DEVICE_AXIS) else name for name in names])


def is_collective(equation: Equation) -> bool:
    """Tell whether an equation itself communicates with other replicas."""
    return REPLICA_AXIS in axis_names(equation) and equation.primitive.name not in LOCAL


def has_collective(equation: Equation) -> bool:
    """Tell whether an equation is a collective over the replicas, or has one inside."""
    return any(map(is_collective, (equation, *inside(equation))))


def is_sum(equation: Equation) -> bool:
    """Tell whether an equation is a sum over all replicas, and over nothing else."""
    is_psum = equation.primitive.name == "psum" and axis_names(equation) == (REPLICA_AXIS,)
    return is_psum and not is_over_groups(equation)


def is_replica_number(equation: Equation) -> bool:
    """Tell whether an equation asks for the replica's number."""
    return equation.primitive.name == "axis_index" and REPLICA_AXIS in axis_names(equation)


def has_replica_number(equation: Equation) -> bool:
    """Tell whether an equation, or one inside it, asks for the replica's number."""
    return any(map(is_replica_number, [equation, *inside(equation)]))


def adds_own_axes(equation: Equation) -> bool:
    """Tell whether an equation sums over the replicas and over axes of its operands, like a `psum` of two names under `vmap`."""
    if equation.primitive.name != "psum" or not is_collective(equation):
        return False
    return any(isinstance(axis, int | np.integer) for axis in axis_names(equation))


def is_over_groups(equation: Equation) -> bool:
    """Tell whether a collective is over groups of replicas, not over all of them."""
    return equation.params.get("axis_index_groups") is not None


def num_bytes(equation: Equation) -> int:
    """Return how many bytes each replica gives to a collective."""
    avals: list[Any] = [atom.aval for atom in equation.invars]
    return sum(aval.size * aval.dtype.itemsize for aval in avals if hasattr(aval.dtype, "itemsize"))


class Levels(NamedTuple):
    """A program cut at its sums over the replicas. Sums of one level are independent, so one collective could do them all."""

    equations: list[tuple[list[Equation], list[Equation]]]  # for each level: the equations before its sums, and its sums
    ready_at: dict[Any, int]  # array -> the first level whose sums can add it up
    parts: dict[Any, int]  # a concatenation -> its number of arrays


def levels_of(jaxpr: Jaxpr) -> Levels:
    """Cut a program at its sums; keep equations with effects in order."""
    ready_at: dict[Any, int] = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), 0)
    levels = Levels([([], [])], ready_at, {})
    last_effect = 0
    for equation in jaxpr.eqns:
        level = max((ready_at[atom] for atom in equation.invars if isinstance(atom, Var)), default=0)
        has_effects = any(not isinstance(effect, core.NamedAxisEffect) for effect in equation.effects)  # an axis is none
        if has_effects:
            level = last_effect = max(level, last_effect)
        adds = equation.primitive.name in SUMS and not has_effects and is_sum(equation)
        levels.equations[level][adds].append(equation)
        ready_at.update(dict.fromkeys(equation.outvars, level + adds))
        if adds and level + 1 == len(levels.equations):
            levels.equations.append(([], []))
        if equation.primitive.name == "concatenate":
            levels.parts[equation.outvars[0]] = len(equation.invars)
    return levels


# -- purity


def is_plain(equation: Equation) -> bool:
    """Tell whether an equation is known to be pure, provided that its inner equations are."""
    return equation.primitive.name in PURE | CALLS | CONTROL_FLOW


def is_function_of_operands(equation: Equation) -> bool:
    """Tell whether an equation is known to compute its results only from its operands and the replica's number."""
    return all(map(_is_local_and_plain, (equation, *inside(equation))))


def _is_local_and_plain(equation: Equation) -> bool:
    is_known = equation.primitive is mark_p or equation.primitive.name == "axis_index"
    return is_known or (is_plain(equation) and not is_collective(equation))


def donated_inputs(jaxpr: Jaxpr) -> tuple[int, ...]:
    """Return the positions of the inputs that a program gives to a `jax.jit` with `donate_argnums`, but of no numbers."""
    calls = [equation for equation in jaxpr.eqns if True in equation.params.get("donated_invars", ())]
    pairs = [pair for call in calls for pair in zip(call.invars, call.params["donated_invars"], strict=True)]
    donated = {id(atom) for atom, is_donated in pairs if is_donated}
    return tuple(position for position, var in enumerate(jaxpr.invars) if id(var) in donated and _rank(var))


def is_ordered_print(equation: Equation) -> bool:
    """Tell whether an equation is a `jax.debug.print` or `jax.debug.callback` that keeps its place among the others."""
    return equation.primitive.name in PRINTS and any("Ordered" in type(effect).__name__ for effect in equation.effects)


# -- meshes and constants


def meshes_in(jaxpr: Jaxpr) -> Iterator[jax.sharding.Mesh]:
    """Yield the meshes that a traced cross-replica function maps over or places arrays on."""
    equations = all_equations(jaxpr)
    for equation in equations:
        if equation.primitive.name in DEVICE_MAPS:
            yield equation.params["mesh"]
    yield from (place.mesh for place in placements_in(equations) if hasattr(place, "mesh"))


def placements_in(equations: Iterable[Equation]) -> list[Any]:
    """Return the devices and shardings that operations name: `device_put`, a constraint, a `jit`, a callback on the host."""
    named = [equation.params[name] for equation in equations for name in _PLACEMENTS & equation.params.keys()]
    given = [value for value in jax.tree.leaves(named) if isinstance(value, jax.Device | jax.sharding.Sharding)]
    return [value for value in given if not isinstance(getattr(value, "mesh", None), jax.sharding.AbstractMesh)]


def inner_constants(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the arrays that functions inside a traced function close over; the function's text shows only their shapes."""
    for equation in all_equations(jaxpr):
        for inner in jax.tree.leaves(tuple(equation.params.values())):
            if isinstance(inner, ClosedJaxpr):
                yield from inner.consts
            elif isinstance(inner, np.ndarray | jax.Array):
                yield inner
