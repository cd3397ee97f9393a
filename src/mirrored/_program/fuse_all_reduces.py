"""Sums over the replicas that a step makes at one time travel in one buffer, and take small results' sums along.

A step that reduces its loss and its gradients sends one message, whoever asked for the sums. And where it sends one anyway,
a small result that differs by replica is added up in it too: `strategy.reduce` of this result is a look-up then, instead of
a second program. Nothing is sent that was not sent before: what is carried only ever joins a buffer that is there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import jaxprs
from .._jax.jaxprs import ClosedJaxpr, Equation, Var
from .._replicas.collectives import MAX_ARRAYS_PER_PACK, PACK_BELOW_BYTES, ReplicaAxis, sum_in_one_buffer
from .._typing import REPLICA_AXIS
from .lift import Lifted

#: Results whose sums a step carries, and how many numbers each may have.
MAX_CARRIED, MAX_CARRIED_NUMBERS = 4, 64
#: A buffer that is full by itself still takes along so many: the loss, and what is carried.
MAX_ARRAYS_JOINED = MAX_ARRAYS_PER_PACK + MAX_CARRIED
#: What is added up in its own dtype also for a MEAN.
_CARRIED_DTYPES = ("float32", "float64")


@dataclasses.dataclass(frozen=True)
class Joined:
    """A step whose sums are joined."""

    closed: ClosedJaxpr  # after its own results it gives the sums that it carries
    carried: tuple[int, ...] = ()  # the positions of the results whose sums these are
    num_arrays: int = 0  # how many sums have joined others

    def describe(self) -> str:
        """Say what travels together, in a part of a sentence; "" if nothing does."""
        text = f", {self.num_arrays} in the buffer of another" if self.num_arrays else ""
        if self.carried:
            noun = "1 result" if len(self.carried) == 1 else f"{len(self.carried)} results"
            text += f"; carries the sum of {noun}, which strategy.reduce looks up"
        return text


@dataclasses.dataclass
class _Buffer:
    """What is added up in one piece."""

    dtype: np.dtype
    arrays: dict[Var, Any]  # by the variable that is the sum
    num_parts: int  # of how many arrays these consist


def join_sums(lifted: Lifted, is_mirrored: Sequence[bool], axis: ReplicaAxis) -> Joined:
    """Join the small sums of a step that is proven, and let them carry the sums of small results.

    Where the user has said what travels together, or what takes the place of sums, nothing is joined.
    """
    jaxpr, constants = lifted.closed.jaxpr, lifted.closed.consts
    levels = jaxprs.levels_of(jaxpr)
    if len(levels.equations) == 1 or axis.is_by_hand:
        return Joined(lifted.closed)
    waiting = dict(itertools.islice(_carriable(lifted, is_mirrored), MAX_CARRIED))
    if axis.size == 1:  # each is its own sum
        return Joined(ClosedJaxpr(jaxpr.replace(outvars=[*jaxpr.outvars, *waiting.values()]), constants), tuple(waiting))
    totals: dict[int, Var] = {}
    equations: list[Equation] = []
    num_joined = 0
    for level, (plain, together) in enumerate(levels.equations):
        buffers: list[_Buffer] = []
        for atom, total in itertools.chain.from_iterable(zip(one.invars, one.outvars, strict=True) for one in together):
            num_parts = levels.parts.get(atom, 1) if isinstance(atom, Var) else 1
            if _may_join(atom.aval, num_parts):
                num_joined += _put(buffers, atom, total, num_parts, may_begin=True)
        for position, atom in waiting.items():
            if position not in totals and levels.of[atom] <= level:
                total = Var(atom.aval)
                if _put(buffers, atom, total, 1, may_begin=False):
                    totals[position] = total
        several = [buffer for buffer in buffers if len(buffer.arrays) > 1]
        moved = {total for buffer in several for total in buffer.arrays}
        equations += [*plain, *itertools.chain.from_iterable(_without(equation, moved) for equation in together)]
        equations += [_sum_of(buffer, together[0], axis.size) for buffer in several]
    if not num_joined and not totals:
        return Joined(lifted.closed)
    outvars = [*jaxpr.outvars, *totals.values()]
    return Joined(ClosedJaxpr(jaxpr.replace(eqns=equations, outvars=outvars), constants), tuple(totals), num_joined)


def _carriable(lifted: Lifted, is_mirrored: Sequence[bool]) -> Iterator[tuple[int, Any]]:
    """Yield the results whose sums may be carried, and their positions: small, even, and added in their own dtype."""
    results = zip(lifted.closed.jaxpr.outvars, lifted.plan.shapes, is_mirrored, strict=False)
    for position, (atom, shapes, is_same) in enumerate(results):
        if is_same or shapes is not None or not isinstance(atom, Var):
            continue
        aval: Any = atom.aval
        if str(aval.dtype) in _CARRIED_DTYPES and aval.size <= MAX_CARRIED_NUMBERS:
            yield position, atom


def _may_join(aval: Any, num_parts: int) -> bool:
    """Tell whether an array may travel with others: one of real numbers that is small, or is copied anyway, as it is packed."""
    dtype = getattr(aval, "dtype", np.dtype(bool))
    is_real = jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer)
    return is_real and (num_parts > 1 or aval.size * dtype.itemsize < PACK_BELOW_BYTES)


def _put(buffers: list[_Buffer], atom: Any, total: Var, num_parts: int, may_begin: bool) -> bool:
    """Put an array into the first buffer that has room for it, and tell whether there was one; else it may begin another."""
    for buffer in buffers:
        if buffer.dtype == atom.aval.dtype and buffer.num_parts + num_parts <= MAX_ARRAYS_JOINED:
            buffer.arrays[total] = atom
            buffer.num_parts += num_parts
            return True
    if may_begin:
        buffers.append(_Buffer(atom.aval.dtype, {total: atom}, num_parts))
    return False


def _without(equation: Equation, moved: set[Var]) -> list[Equation]:
    """Return a sum of several arrays without some results, in a list that is empty if none is left."""
    kept = {total: atom for atom, total in zip(equation.invars, equation.outvars, strict=True) if total not in moved}
    return [equation.replace(invars=list(kept.values()), outvars=list(kept))] if kept else []


def _sum_of(buffer: _Buffer, like: Equation, num_replicas: int) -> Equation:
    """Return the equation that adds up a buffer; `like` has the user's line, and the settings."""
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in buffer.arrays.values()]
    add_up = jax.jit(lambda *arrays: sum_in_one_buffer(arrays))
    [call] = jax.make_jaxpr(add_up, axis_env=[(REPLICA_AXIS, num_replicas)])(*avals).eqns
    return call.replace(
        invars=list(buffer.arrays.values()), outvars=list(buffer.arrays), source_info=like.source_info, ctx=like.ctx
    )


def mean_of(total: jax.Array, num_replicas: int) -> jax.Array:
    """Return the MEAN over the replicas of what is carried, of its SUM."""
    return (total / jnp.asarray(float(num_replicas), total.dtype)).astype(total.dtype)
