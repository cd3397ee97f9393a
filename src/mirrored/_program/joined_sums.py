"""Sums over the replicas that a step makes at one time travel in one buffer, and take small results' sums along.

A step that reduces its loss and its gradients sends one message, whoever asked for the sums. And where it sends one anyway,
a small result that differs by replica is added up in it too: `strategy.reduce` of this result is a look-up then, instead of
a second program. Nothing is sent that was not sent before: what is carried only ever joins a buffer that is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._jax import sums
from .._jax.jaxprs import ClosedJaxpr, Literal, Var
from .._jax.sums import Levels
from .._replicas.collectives import MAX_ARRAYS_PER_PACK, PACK_BELOW_BYTES, ReplicaAxis, sum_in_one_buffer
from .lift import Lifted

#: Results whose sums a step carries, and how many numbers each may have.
MAX_CARRIED, MAX_CARRIED_NUMBERS = 4, 64
#: A buffer that is full by itself still takes along so many: the loss, and what is carried.
MAX_ARRAYS_JOINED = MAX_ARRAYS_PER_PACK + MAX_CARRIED
#: What is added up in its own dtype also for a MEAN.
_CARRIED_DTYPES = ("float32", "float64")


@dataclasses.dataclass(frozen=True)
class Joined:
    """A step whose sums are joined.

    Attributes:
        closed: the step; after its own results it gives the sums that it carries.
        carried: the positions of the results whose sums these are.
        num_arrays: how many sums have joined others.
    """

    closed: ClosedJaxpr
    carried: tuple[int, ...] = ()
    num_arrays: int = 0

    def describe(self) -> str:
        """Say what travels together, in a part of a sentence; "" if nothing does."""
        text = f", {self.num_arrays} in the buffer of another" if self.num_arrays else ""
        if self.carried:
            noun = "1 result" if len(self.carried) == 1 else f"{len(self.carried)} results"
            text += f"; carries the sum of {noun}, which strategy.reduce looks up"
        return text


@dataclasses.dataclass
class _Buffer:
    """What is added up in one piece: for each array, the atom, and the variable that is its sum."""

    dtype: Any
    like: Any
    operands: list[Any]
    results: list[Any]
    num_parts: int

    def has_room(self, atom: Any, num_parts: int) -> bool:
        return self.dtype == atom.aval.dtype and self.num_parts + num_parts <= MAX_ARRAYS_JOINED

    def add(self, atom: Any, total: Any, num_parts: int) -> None:
        self.operands.append(atom)
        self.results.append(total)
        self.num_parts += num_parts


def join_sums(lifted: Lifted, is_mirrored: Sequence[bool], axis: ReplicaAxis) -> Joined:
    """Join the small sums of a step, and let them carry the sums of small results.

    Args:
        lifted: the step, proven.
        is_mirrored: for each result array, whether it is the same on every replica.
        axis: the replicas; where the user has said what travels together, or what takes the place of sums, nothing is joined.
    """
    jaxpr = lifted.closed.jaxpr
    levels = sums.levels_of(jaxpr)
    if len(levels.sums) == 1 or axis.is_by_hand:
        return Joined(lifted.closed)
    waiting = _carriable(lifted, is_mirrored, levels)
    if axis.size == 1:  # each is its own sum
        closed = ClosedJaxpr(jaxpr.replace(outvars=[*jaxpr.outvars, *[jaxpr.outvars[p] for p in waiting]]), lifted.closed.consts)
        return Joined(closed, tuple(waiting))
    totals: dict[int, Any] = {}
    equations: list[Any] = []
    num_joined = 0
    for level, (plain, together) in enumerate(zip(levels.plain, levels.sums, strict=True)):
        equations += plain
        buffers = _buffers(together, levels.parts)
        num_joined += sum(len(buffer.operands) - 1 for buffer in buffers)
        for position in [p for p in waiting if levels.of[jaxpr.outvars[p]] <= level and p not in totals]:
            atom = jaxpr.outvars[position]
            if (buffer := next((b for b in buffers if b.has_room(atom, 1)), None)) is not None:
                totals[position] = Var(atom.aval)
                buffer.add(atom, totals[position], 1)
        equations += _sum_equations(together, [b for b in buffers if len(b.operands) > 1], axis.size)
    if not num_joined and not totals:
        return Joined(lifted.closed)
    outvars = [*jaxpr.outvars, *totals.values()]
    return Joined(ClosedJaxpr(jaxpr.replace(eqns=equations, outvars=outvars), lifted.closed.consts), tuple(totals), num_joined)


def _carriable(lifted: Lifted, is_mirrored: Sequence[bool], levels: Levels) -> list[int]:
    """Return the positions of the results whose sums may be carried: small, even, and added in their own dtype."""
    found = [
        position
        for position, (atom, shapes) in enumerate(zip(lifted.closed.jaxpr.outvars, lifted.plan.shapes, strict=False))
        if not is_mirrored[position]
        and shapes is None
        and not isinstance(atom, Literal)
        and atom in levels.of
        and str(atom.aval.dtype) in _CARRIED_DTYPES
        and atom.aval.size <= MAX_CARRIED_NUMBERS
    ]
    return found[:MAX_CARRIED]


def _buffers(together: Sequence[Any], parts: dict[Any, int]) -> list[_Buffer]:
    """Divide the small arrays of sums at one level among buffers."""
    buffers: list[_Buffer] = []
    for equation in together:
        for atom, total in zip(equation.invars, equation.outvars, strict=True):
            if not sums.is_number(atom) or atom.aval.size * atom.aval.dtype.itemsize >= _limit(atom, parts):
                continue
            num_parts = 1 if isinstance(atom, Literal) else parts.get(atom, 1)
            buffer = next((b for b in buffers if b.has_room(atom, num_parts)), None)
            if buffer is None:
                buffers.append(buffer := _Buffer(atom.aval.dtype, equation, [], [], 0))
            buffer.add(atom, total, num_parts)
    return buffers


def _limit(atom: Any, parts: dict[Any, int]) -> float:
    """Return the size from which an array travels alone; one that is packed already is copied anyway."""
    return float("inf") if not isinstance(atom, Literal) and atom in parts else PACK_BELOW_BYTES


def _sum_equations(together: Sequence[Any], buffers: Sequence[_Buffer], num_replicas: int) -> list[Any]:
    """Make the equations of one level: the sums that stay as they were, then one for each buffer."""
    moved = {total for buffer in buffers for total in buffer.results}
    stay = [sums.without(equation, moved) for equation in together]
    calls = [sums.call(sum_in_one_buffer, b.operands, b.results, b.like, num_replicas) for b in buffers]
    return [*(equation for equation in stay if equation is not None), *calls]


def mean_of(total: Any, num_replicas: int) -> Any:
    """Return the MEAN over the replicas of what is carried, of its SUM."""
    return (total / jnp.asarray(float(num_replicas), total.dtype)).astype(total.dtype)
