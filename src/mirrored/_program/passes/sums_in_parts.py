"""Finds the sums over the replicas whose results are stored in parts, and what is used only in such a sum."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..._jax import jaxprs, primitives
from ..._jax.jaxprs import Atom, Equation, Jaxpr, Var
from ..._replicas.division import Division
from ..._typing import Shape
from .flat import flattened
from .on_parts import shape_of
from .order_sums import large, terms_of

ADDS = primitives.COMMUTATIVE | primitives.DERIVATIVE_SUMS
#: Operations that make a multiple of their first operand, if the others are factors.
_MULTIPLIES = primitives.DIVISIONS | primitives.MOVES & primitives.ELEMENTWISE


class Known(NamedTuple):
    """What is known of a step before it runs."""

    axis: str  # of the mesh
    divisions: Mapping[Shape, Division]  # by shape, of the stored arrays: sums of these shapes are stored in parts, too

    def division_of(self, atom: Atom) -> Division | None:
        """Return how arrays of a variable's shape are stored; XLA scatters no complex numbers on CPU."""
        dtype = getattr(atom.aval, "dtype", bool)
        is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
        return self.divisions.get(shape_of(atom)) if is_real else None


class SumsInParts(NamedTuple):
    """The operands of a program's sums in parts, the variables with no other use, and the terms that they are made of."""

    operands: frozenset[Var] = frozenset()
    only: frozenset[Var] = frozenset()
    terms: frozenset[Var] = frozenset()


def find_sums(
    known: Known, equations: Sequence[Equation], results: Iterable[Any], varying: Set[Var], carried: Set[Var]
) -> SumsInParts:
    """Find a program's sums in parts; what is added to a sum that a loop carries (`carried`) is summed over the replicas, too."""
    used = collections.Counter(atom for equation in equations for atom in equation.invars if isinstance(atom, Var))
    used.update(atom for atom in results if isinstance(atom, Var))
    sums = [e for e in equations if jaxprs.is_sum(e) or any(atom in carried for atom in e.invars if isinstance(atom, Var))]
    added = {atom for equation in sums for atom in equation.invars if isinstance(atom, Var)}
    operands = {var for var in added - carried if var in varying and known.division_of(var)}
    only = {var for var in operands if used[var] == 1}
    made_otherwise = {var for equation in equations if equation.primitive.name not in ADDS for var in equation.outvars}
    for equation in reversed(equations):
        is_only = equation.outvars and only.issuperset(equation.outvars)  # a callback may have no results
        before = _summed_before(equation, varying) if is_only else []
        if any(used[var] > 1 for var in before):
            continue
        if len(before) == 2:  # both are summed: of a tied embedding, but not of a weight that is used many times
            if not made_otherwise.issuperset(before) or len(large(before)) < 2:
                continue
            operands.update(before)
        only.update(before)
    return SumsInParts(*map(frozenset, (operands, only, terms_of(operands, equations, varying))))


def _summed_before(equation: Equation, varying: Set[Var]) -> list[Var]:
    """Return the operands that may be summed over the replicas first: the one that is scaled, or the two that are added."""
    dtype: Any = getattr(equation.outvars[0].aval, "dtype", np.dtype(bool))
    # Integers are divided without a rest, and a sum of float16 may be infinite before it is scaled.
    if not jnp.issubdtype(dtype, jnp.inexact) or dtype == jnp.float16:
        return []
    name, own = equation.primitive.name, [atom for atom in equation.invars if isinstance(atom, Var) and atom in varying]
    is_scaled = name in _MULTIPLIES and own == [equation.invars[0]]
    is_product = name in primitives.BILINEAR & primitives.ELEMENTWISE and len(own) == 1
    is_addition = name in ADDS and len(own) == 2
    if (is_scaled or is_product or is_addition) and all(shape_of(var) == shape_of(equation.outvars[0]) for var in own):
        return own
    return []


def is_added_to(jaxpr: Jaxpr, argument: int, result: int) -> bool:
    """Tell whether a program uses an argument only to add to it, and returns the sum as this result."""
    equations, results = flattened(jaxpr)
    atoms = [*(atom for equation in equations for atom in equation.invars), *results]
    users = [equation for equation in equations if jaxpr.invars[argument] in equation.invars]
    if len(users) != 1 or users[0].primitive.name not in ADDS:
        return False
    [added] = users[0].outvars
    if any(shape_of(atom) != shape_of(added) for atom in users[0].invars):  # a row or a number is added to all rows
        return False
    return results[result] is added and atoms.count(added) == 1 == atoms.count(jaxpr.invars[argument])
