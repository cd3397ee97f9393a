"""Marks: identity operations that tell the mirror proof what a value is for.

A mark stays at its place in the traced program, also inside loops, so the proof sees exactly the value that
was assigned. It costs nothing when the program runs.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.interpreters import ad, batching, mlir


class Purpose(enum.Enum):
    """What a marked value is used for."""

    ASSIGN = "assigned to a mirrored variable"
    BY_ROWS = "averaged with the weight of each replica's rows"
    NO_ROWS = "of no rows, so that its gradient is none"
    OPERAND = "given to a collective by the code of a step, and not by JAX for a gradient"
    STATE = "kept in a model's object, which is one for all replicas"
    GRADIENT = "given to an optimizer that sums over the replicas"
    MEAN_GRADIENT = "given to an optimizer that averages over the replicas"
    LOSS = "differentiated"
    SEED = "the gradient of a loss by itself, where gradients begin"
    SHARE = "scaled for a sum over the replicas, and so is its gradient"
    GIVEN_SHARE = "divided by a number that the user says is that of all replicas, and so is its gradient"
    ROWS = "depends on how many rows a replica has"


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a value is for, for which variable, and where the user wrote it.

    Attributes:
        purpose, name, where: that.
        number: which optimizer, of a gradient; of a share, how many rows of the replica were counted, or 0.
    """

    purpose: Purpose
    name: str
    where: str
    number: int = 0

    def __str__(self) -> str:
        """Leave out what may differ between workers that run the same program: files have other paths there."""
        return self.purpose.name


mark_p = jex_core.Primitive("mirrored_mark")


def mark(value: jax.Array, note: Mark) -> jax.Array:
    """Return `value`, marked."""
    return mark_p.bind(value, note=note)


#: The marks that a derivative has too, where it comes by.
_OF_GRADIENTS = {
    Purpose.OPERAND: Purpose.OPERAND,
    Purpose.NO_ROWS: Purpose.NO_ROWS,
    Purpose.LOSS: Purpose.SEED,
    Purpose.SEED: Purpose.SEED,
    Purpose.SHARE: Purpose.SHARE,
    Purpose.GIVEN_SHARE: Purpose.GIVEN_SHARE,
}


def _jvp(primals: Any, tangents: Any, note: Mark) -> Any:
    [tangent] = tangents
    if note.purpose in _OF_GRADIENTS and type(tangent) is not ad.Zero:
        tangent = mark_p.bind(tangent, note=dataclasses.replace(note, purpose=_OF_GRADIENTS[note.purpose]))
    return mark_p.bind(*primals, note=note), tangent


def _transpose(cotangent: Any, _: Any, note: Mark) -> Any:
    if note.purpose is Purpose.NO_ROWS and type(cotangent) is not ad.Zero:
        return [ad.Zero(jax.typeof(cotangent))]
    is_plain = type(cotangent) is ad.Zero or note.purpose is Purpose.OPERAND  # no code has given a gradient to a collective
    return [cotangent if is_plain else mark_p.bind(cotangent, note=note)]


def _batch(arguments: Any, dimensions: Any, **params: Any) -> Any:
    return mark_p.bind(*arguments, **params), dimensions[0]


mark_p.def_impl(lambda value, note: value)
mark_p.def_abstract_eval(lambda value, note: value)
ad.primitive_jvps[mark_p] = _jvp
ad.primitive_transposes[mark_p] = _transpose
batching.primitive_batchers[mark_p] = _batch
mlir.register_lowering(mark_p, lambda context, value, note: [value])
