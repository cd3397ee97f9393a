"""Trace a call of the user's step as one replica's program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ._replicas import context
from ._replicas.frames import Frame
from ._signature import Call
from ._typing import Shape

ResultT = TypeVar("ResultT")


def trace_step(trace: Callable[..., ResultT], call: Call, shapes: Sequence[Shape], frame: Frame, **more: Any) -> ResultT:
    """Call `_lift.lift` or `_lift.discover` for a step.

    Args:
        trace: one of the two.
        call: the step and its arguments.
        shapes: of each array argument, on the replica whose program is traced.
        frame: the replica context in which to trace.
        more: further arguments of `trace`.
    """
    avals = [leaf.aval(shape) for leaf, shape in zip(call.array_leaves(), shapes, strict=True)]
    assert frame.replica is not None
    with context.explained(frame.replica):
        return trace(
            lambda arrays: call.apply(arrays, lambda _, array: array),
            avals,
            frame,
            lambda variable: variable.shape,
            call.function,
            **more,
        )
