"""BatchNorm layers of Flax Linen and Equinox in a step: they see the rows of all replicas, as on one device."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .._replicas import frames
from .._typing import REPLICA_AXIS
from .keras_layers import replace


def over_replicas() -> contextlib.AbstractContextManager[Any]:
    """Trace, or run, a step inside this block, in which such layers normalize over the replicas too."""
    if (equinox := sys.modules.get("equinox.nn")) is not None:
        _prepare(equinox)
    linen = sys.modules.get("flax.linen")
    return contextlib.nullcontext() if linen is None else linen.intercept_methods(_intercept)


def _is_in_step() -> bool:
    frame = frames.current()
    return frame is not None and frame.replica is not None


def _intercept(method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], context: Any) -> Any:
    """Call a method of a Linen module; of a BatchNorm without an axis name, that of one with ours and the same variables."""
    layer = context.module
    is_own = isinstance(layer, sys.modules["flax.linen"].BatchNorm) and layer.axis_name is None
    if is_own and context.method_name == "__call__" and _is_in_step():
        return layer.clone(parent=layer.scope, axis_name=REPLICA_AXIS)(*args, **kwargs)
    return method(*args, **kwargs)


@functools.cache
def _prepare(equinox: ModuleType) -> None:
    replace(equinox.BatchNorm, "__call__", _call_norm)


def _call_norm(old: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call Equinox' BatchNorm, whose axis name is that of a `jax.vmap` over rows, with the name of the replicas besides."""
    names = layer.axis_name if isinstance(layer.axis_name, tuple | list) else (layer.axis_name,)
    if _is_in_step() and REPLICA_AXIS not in names:
        layer = copy.copy(layer)
        object.__setattr__(layer, "axis_name", (*names, REPLICA_AXIS))
    return old(layer, *args, **kwargs)
