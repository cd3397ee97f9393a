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
    STATE = "kept in a model's object, which is one for all replicas"
    GRADIENT = "given to an optimizer that sums over the replicas"
    LOSS = "differentiated"
    ROWS = "depends on how many rows a replica has"


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a value is for, for which variable, and where the user wrote it."""

    purpose: Purpose
    name: str
    where: str

    def __str__(self) -> str:
        """Leave out what may differ between workers that run the same program: files have other paths there."""
        return self.purpose.name


mark_p = jex_core.Primitive("mirrored_mark")


def mark(value: jax.Array, note: Mark) -> jax.Array:
    """Return `value`, marked."""
    return mark_p.bind(value, note=note)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return mark_p.bind(*primals, **params), tangents[0]


def _batch(arguments: Any, dimensions: Any, **params: Any) -> Any:
    return mark_p.bind(*arguments, **params), dimensions[0]


mark_p.def_impl(lambda value, note: value)
mark_p.def_abstract_eval(lambda value, note: value)
ad.primitive_jvps[mark_p] = _jvp
batching.primitive_batchers[mark_p] = _batch
mlir.register_lowering(mark_p, lambda context, value, note: [value])
