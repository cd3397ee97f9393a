"""BatchNorm layers of Flax Linen and Equinox in a step: they see the rows of all replicas, as on one device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._replicas.context import current_replica
from .._typing import REPLICA_AXIS
from .replaced import in_place


@contextlib.contextmanager
def over_replicas() -> Iterator[None]:
    """Trace, or run, a step inside this block, whose BatchNorm layers normalize over the replicas too."""
    linen = sys.modules.get("flax.linen")
    with in_place(), contextlib.nullcontext() if linen is None else linen.intercept_methods(_intercept):
        yield


def _intercept(method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], context: Any) -> Any:
    """Call a method of a Linen module; a BatchNorm without an axis name is called as a clone with the replicas' name."""
    layer = context.module
    is_own = isinstance(layer, sys.modules["flax.linen"].BatchNorm) and layer.axis_name is None
    if is_own and context.method_name == "__call__" and current_replica() is not None:
        return layer.clone(parent=layer.scope, axis_name=REPLICA_AXIS)(*args, **kwargs)
    return method(*args, **kwargs)
