"""Where do random numbers that are the same on all replicas meet a replica's own rows?

Then examples on different replicas get the same noise; on one device each row gets its own. Noise of other shapes (of a weight,
a feature, one number for the batch) is the same for all rows on one device too. The first axis of rows counts examples, so noise
that was drawn along the first axis of its partner is meant for examples; no sizes are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from .._jax.jaxprs import Atom, Equation
from .._jax.primitives import AXIS_SUMS, BROADCASTS, DOT_PRODUCTS, KEEP_AXES, RESHAPES, TRANSPOSES


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers, or values computed from them."""

    axes: frozenset[int]  # with independent draws; in a scan also the scanned axis
    where: str  # the user's line of the draw

    def is_for_rows(self, atom: Atom) -> bool:
        """Tell whether each row of the value has its own numbers."""
        return 0 in self.axes and has_rows(atom)


def has_rows(atom: Atom) -> bool:
    return 0 in _long_axes(atom)


def drawn(equation: Equation, where: str) -> Noise:
    return Noise(frozenset(_long_axes(equation.outvars[0])), where)


def result_of(equation: Equation, noises: Sequence[Noise | None]) -> Noise | None:
    """Return the noise in the result of an operation, given the noise in its operands."""
    given = [(position, noise) for position, noise in enumerate(noises) if noise is not None]
    axes = {axis for k, noise in given for axis in _moved(equation, k, noise.axes & _long_axes(equation.invars[k]))}
    axes &= _long_axes(equation.outvars[0])
    return Noise(frozenset(axes), given[0][1].where) if axes else None


def _shape(atom: Atom) -> Sequence[int]:
    return getattr(atom.aval, "shape", ())


def _long_axes(atom: Atom) -> set[int]:
    return {axis for axis, size in enumerate(_shape(atom)) if size > 1}


def _moved(equation: Equation, position: int, axes: Collection[int]) -> Collection[int]:
    """Return where the axes of an operand are in the result."""
    name, params = equation.primitive.name, equation.params
    if name in KEEP_AXES:
        return axes
    places: dict[int, int] = {}
    if name in BROADCASTS:
        places = dict(enumerate(params["broadcast_dimensions"]))
    elif name in TRANSPOSES:
        places = {axis: place for place, axis in enumerate(params["permutation"])}
    elif name in RESHAPES:
        before, after = (sorted(_long_axes(atom)) for atom in (equation.invars[0], equation.outvars[0]))
        if len(before) == len(after):  # axes of size 1 come or go; else all are lost
            places = dict(zip(before, after, strict=True))
    elif name in AXIS_SUMS:
        kept = [axis for axis in range(len(_shape(equation.invars[0]))) if axis not in params["axes"]]
        places = {axis: place for place, axis in enumerate(kept)}
    elif name in DOT_PRODUCTS:
        places = _places_in_product(equation, position)
    return [places[axis] for axis in axes if axis in places]


def _places_in_product(equation: Equation, position: int) -> dict[int, int]:
    contracted, batch = equation.params["dimension_numbers"]
    ranks = [len(_shape(atom)) for atom in equation.invars]
    free = [[axis for axis in range(ranks[i]) if axis not in (*contracted[i], *batch[i])] for i in range(2)]
    first = len(batch[0]) + position * len(free[0])
    return {axis: k for k, axis in enumerate(batch[position])} | {axis: first + k for k, axis in enumerate(free[position])}
