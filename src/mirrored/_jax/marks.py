"""Marks: identity operations that tell the mirror proof what a value is used for.

A mark keeps its place in the traced program, even inside loops, so the proof sees exactly the value that was
assigned. It costs nothing when the program runs.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.interpreters import ad, batching, mlir

from .._errors import UnevenReplicasError


class Purpose(enum.Enum):
    """The use of a marked value."""

    ASSIGN = "assigned to a mirrored variable"
    SUM = "added up over the replicas by the code of a step"
    SUM_OF_ALL = "summed in merge_call, where every replica has the values of all"
    MEAN = "averaged over the replicas"
    TOTAL = "the sum or mean over the replicas of the value with the same number"
    KEPT_MEAN = "assigned to a sync-on-read MEAN variable in an uneven step: all replicas weigh the same"
    OLD = "read from a variable that is summed over the replicas when it is read"
    ADDED = "assigned to a variable that is summed over the replicas when it is read"
    REGULARIZATION = "divided by the number of replicas, as it is the same on each"
    BY_ROWS = "averaged with the weight of each replica's rows"
    NO_ROWS = "computed from no rows: its gradient is zero"
    OPERAND = "given to a collective by the step's own code, not by JAX for a gradient"
    STATE = "assigned to a model object, of which there is one for all replicas"
    GRADIENT = "given to an optimizer that combines it as the loss says"
    SUMMED_GRADIENT = "given to an optimizer that is told to sum over the replicas"
    MEAN_GRADIENT = "given to an optimizer that is told to average over the replicas"
    LOSS = "summed over the replicas as a share of a loss"
    SHARE = "this replica's share of a loss: the shares of all replicas add up to the whole"
    TANGENT = "the derivative of a share"
    COTANGENT = "the derivative of a loss by its share"
    OWN_GRADIENT = "the gradient of this replica's loss by a variable"
    ROWS = "depends on how many rows a replica has"
    NO_DERIVATIVE = "computed by a call with a custom derivative, but without that derivative"


@dataclasses.dataclass(frozen=True)
class Mark:
    """The use of a value, the variable that it is for, and the user's line."""

    purpose: Purpose
    name: str
    where: str
    number: int = 0  # which optimizer, for a gradient; which array, in a sum; which variable, for a state
    message: str = ""  # a model library's remedy, for the error if the proof refuses the value

    def __str__(self) -> str:
        """Show the mark without its line, whose path may differ between workers that run the same program."""
        return self.purpose.name


mark_p = jex_core.Primitive("mirrored_mark")


def mark(value: jax.Array, note: Mark) -> jax.Array:
    """Return `value` with a mark."""
    return mark_p.bind(value, note=note)


#: Purpose of a value -> purpose of its derivative.
_STAYS = (Purpose.TANGENT, Purpose.COTANGENT, Purpose.OPERAND, Purpose.NO_ROWS)
_OF_TANGENTS = {Purpose.SHARE: Purpose.TANGENT, **{purpose: purpose for purpose in _STAYS}}
_TRANSPOSED = {Purpose.TANGENT: Purpose.COTANGENT, Purpose.COTANGENT: Purpose.TANGENT}


_NO_DERIVATIVE = (
    "the batch does not divide evenly among the replicas, and a derivative is taken of the whole step, from outside of it, "
    "through the call at {where}, which has a derivative of its own. Those results of the call that need no rows are computed "
    "once for all replicas, without that derivative. Take the derivative inside of the step: strategy.run(lambda x: "
    "jax.grad(loss)(w, x), args=(x,)). Or leave the odd rows out: "
    "strategy.distribute_dataset(dataset, mr.InputOptions(drop_remainder=True))."
)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], note: Mark) -> tuple[jax.Array, Any]:
    [tangent] = tangents
    if note.purpose is Purpose.NO_DERIVATIVE and type(tangent) is not ad.Zero:
        raise UnevenReplicasError(_NO_DERIVATIVE.format(where=note.where))
    if note.purpose in _OF_TANGENTS and type(tangent) is not ad.Zero:
        tangent = mark_p.bind(tangent, note=dataclasses.replace(note, purpose=_OF_TANGENTS[note.purpose]))
    return mark_p.bind(*primals, note=note), tangent


def _transpose(cotangent: jax.Array | ad.Zero, _: object, note: Mark) -> list[Any]:
    if note.purpose is Purpose.NO_ROWS:
        return [ad.Zero(jax.typeof(cotangent))]
    if type(cotangent) is ad.Zero or note.purpose not in _TRANSPOSED:  # the step's code gave no gradient to a collective
        return [cotangent]
    return [mark_p.bind(cotangent, note=dataclasses.replace(note, purpose=_TRANSPOSED[note.purpose]))]


mark_p.def_impl(lambda value, note: value)
mark_p.def_abstract_eval(lambda value, note: value)
ad.primitive_jvps[mark_p] = _jvp
ad.primitive_transposes[mark_p] = _transpose
batching.primitive_batchers[mark_p] = lambda values, dimensions, note: (mark_p.bind(*values, note=note), dimensions[0])
mlir.register_lowering(mark_p, lambda context, value, note: [value])
