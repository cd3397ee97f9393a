"""Flax Linen in a step: BatchNorm sees the rows of all replicas."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from .._replicas.context import current_replica
from .._replicas.mesh import ReplicaMesh
from .._typing import REPLICA_AXIS
from .library import Library


def _traced(trace: Callable[[], Any], mesh: ReplicaMesh | None, may_repeat: bool) -> Any:
    if (linen := sys.modules.get("flax.linen")) is None:
        return trace()
    with linen.intercept_methods(_intercept):
        return trace()


def _intercept(method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], context: Any) -> Any:
    """Call a method of a Linen module; for a BatchNorm without an axis name, call a clone with the replicas' axis name."""
    layer = context.module
    is_own = isinstance(layer, sys.modules["flax.linen"].BatchNorm) and layer.axis_name is None
    if is_own and context.method_name == "__call__" and current_replica() is not None:
        return layer.clone(parent=layer.scope, axis_name=REPLICA_AXIS)(*args, **kwargs)
    return method(*args, **kwargs)


LINEN = Library(
    package="flax",
    name="Flax Linen",
    before="with strategy.scope(): variables = mr.Variable(model.init(key, x))",
    inside="model.apply(variables.value, x)",
    traced=_traced,
)
