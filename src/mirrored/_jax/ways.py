"""Does an equation compute forwards, or does it carry a gradient backwards?

JAX writes on each equation which transformations have made it. Inside a call or a loop it writes only what is inside, so the
writing of what is around comes in front.
"""

from __future__ import annotations

import enum
from typing import Any


class Way(enum.Enum):
    """On which way an equation is."""

    FORWARD = "computes the loss"
    BACKWARD = "carries a gradient back"
    UNCLEAR = "is in a gradient of a gradient, or in a backward rule that was written by hand"


def path_of(outer: str, equation: Any) -> str:
    """Return the transformations that have made an equation, the outer ones first.

    Args:
        outer: the path of the call or loop that it is in; "" for none.
        equation: of a jaxpr.
    """
    return f"{outer}/{equation.source_info.name_stack}"


def way_of(path: str, equation: Any) -> Way:
    """Tell on which way an equation is, given its path."""
    around = path.split("rematted_computation")[-1]  # what `jax.checkpoint` computes again goes forwards
    if "transpose(" not in around:
        return Way.FORWARD
    [backwards] = parts if len(parts := [part for part in path.split("/") if "transpose(" in part]) == 1 else [""]
    is_first_gradient = backwards.startswith("transpose(") and backwards.count("transpose(") == 1
    return Way.BACKWARD if is_first_gradient and not _is_in_rule(equation) else Way.UNCLEAR


def _is_in_rule(equation: Any) -> bool:
    """Tell whether an equation was made in a function with a backward rule by hand, which may compute anything."""
    traceback = equation.source_info.traceback
    return traceback is not None and any(frame.function_name == "custom_vjp.__call__" for frame in traceback.frames)
