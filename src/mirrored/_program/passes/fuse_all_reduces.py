"""Independent sums over the replicas travel in one buffer, and carry the sums of small results.

A step that reduces its loss and its gradients sends one message, whoever asked for the sums. Small results that differ by
replica are added up in a buffer that is sent anyway: `strategy.reduce` of them is a look-up then, instead of a second program.
Where XLA combines sums (`_replicas/platforms`), the sums of results are one more for it to combine.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import jaxprs
from ..._jax.jaxprs import ClosedJaxpr, Equation, Var
from ..._replicas.collectives import MAX_ARRAYS_PER_PACK, PACK_BELOW_BYTES, sum_in_one_buffer
from ..._typing import REPLICA_AXIS
from .proven import Joined, Proven

#: The most results whose sums a step carries, and the most numbers of each.
MAX_CARRIED, MAX_CARRIED_NUMBERS = 4, 64
#: A full buffer still takes some more: the loss, and the sums that it carries.
MAX_ARRAYS_JOINED = MAX_ARRAYS_PER_PACK + MAX_CARRIED
#: The dtypes that also a MEAN adds up as they are.
_CARRIED_DTYPES = ("float32", "float64")


@dataclasses.dataclass
class _Buffer:
    """Arrays that are added up in one piece."""

    dtype: np.dtype
    arrays: dict[Var, Any]  # sum -> operand
    num_parts: int  # the number of arrays before any packing


def join_sums(step: Proven) -> Proven:
    """Join the small sums of a step, and let them carry the sums of small results."""
    axis, jaxpr = step.axis, step.closed.jaxpr
    levels = jaxprs.levels_of(jaxpr)
    if len(levels.equations) == 1:
        return step
    waiting = dict(itertools.islice(_carriable(step), MAX_CARRIED))
    if axis.size == 1:  # each is its own sum
        return _with(step, jaxpr.eqns, waiting, 0)
    totals: dict[int, Var] = {}
    equations: list[Equation] = []
    num_joined = 0
    for level, (plain, together) in enumerate(levels.equations):
        buffers: list[_Buffer] = []
        pairs = (zip(equation.invars, equation.outvars, strict=True) for equation in together)
        for atom, total in itertools.chain.from_iterable(pairs):
            num_parts = levels.parts.get(atom, 1) if isinstance(atom, Var) else 1
            if axis.packs and _may_join(atom.aval, num_parts):
                num_joined += _put(buffers, atom, total, num_parts, may_begin=True)
        for position, atom in waiting.items():
            if position not in totals and levels.ready_at[atom] <= level:
                total = Var(atom.aval)
                begins = bool(together) and not axis.packs
                if _put(buffers, atom, total, 1, begins) or begins:
                    totals[position] = total
        several = [buffer for buffer in buffers if len(buffer.arrays) > 1 or not axis.packs]
        moved = {total for buffer in several for total in buffer.arrays}
        equations += [*plain, *itertools.chain.from_iterable(_without(equation, moved) for equation in together)]
        equations += [_sum_of(buffer, together[0], axis.size) for buffer in several]
    if not num_joined and not totals:
        return step
    return _with(step, equations, totals, num_joined)


def _with(step: Proven, equations: list[Equation], totals: Mapping[int, Var], num_joined: int) -> Proven:
    """Return a step with other equations, and with the sums of results as further outputs: `totals` has them by position."""
    jaxpr, constants = step.closed.jaxpr, step.closed.consts
    closed = ClosedJaxpr(jaxpr.replace(eqns=equations, outvars=[*jaxpr.outvars, *totals.values()]), constants)
    return dataclasses.replace(step, closed=closed, joined=Joined(tuple(totals), num_joined))


def _carriable(step: Proven) -> Iterator[tuple[int, Any]]:
    """Yield the positions and atoms of results whose sums may be carried: small, even, and added in their own dtype."""
    results = zip(step.closed.jaxpr.outvars, step.lifted.plan.shapes, step.own_outputs, strict=False)
    for position, (atom, shapes, is_own) in enumerate(results):
        if not is_own or shapes is not None or not isinstance(atom, Var):
            continue
        aval: Any = atom.aval
        if str(aval.dtype) in _CARRIED_DTYPES and aval.size <= MAX_CARRIED_NUMBERS:
            yield position, atom


def _may_join(aval: Any, num_parts: int) -> bool:
    """Tell whether an array may share a buffer: it has real numbers, and is small or already a buffer of several arrays."""
    dtype = getattr(aval, "dtype", np.dtype(bool))
    is_real = jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer)
    return is_real and (num_parts > 1 or aval.size * dtype.itemsize < PACK_BELOW_BYTES)


def _put(buffers: list[_Buffer], atom: Any, total: Var, num_parts: int, may_begin: bool) -> bool:
    """Put an array into the first buffer with room, else into a new one if it `may_begin`; tell whether there was room."""
    for buffer in buffers:
        if buffer.dtype == atom.aval.dtype and buffer.num_parts + num_parts <= MAX_ARRAYS_JOINED:
            buffer.arrays[total] = atom
            buffer.num_parts += num_parts
            return True
    if may_begin:
        buffers.append(_Buffer(atom.aval.dtype, {total: atom}, num_parts))
    return False


def _without(equation: Equation, moved: set[Var]) -> list[Equation]:
    """Return a list with the sum of the arrays that were not moved; an empty list if none is left."""
    kept = {total: atom for atom, total in zip(equation.invars, equation.outvars, strict=True) if total not in moved}
    return [equation.replace(invars=list(kept.values()), outvars=list(kept))] if kept else []


def _sum_of(buffer: _Buffer, like: Equation, num_replicas: int) -> Equation:
    """Return the equation that adds up a buffer, with the user's line and the settings of `like`."""
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in buffer.arrays.values()]
    add_up = jax.jit(lambda *arrays: sum_in_one_buffer(arrays))
    with jax.disable_jit(False):  # a user may have set it, and it would take the call apart
        [call] = jax.make_jaxpr(add_up, axis_env=[(REPLICA_AXIS, num_replicas)])(*avals).eqns
    return call.replace(
        invars=list(buffer.arrays.values()), outvars=list(buffer.arrays), source_info=like.source_info, ctx=like.ctx
    )
