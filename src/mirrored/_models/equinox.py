"""Equinox modules in a step: numbers are compiled in, as in `eqx.filter_jit`; BatchNorm sees the rows of all replicas."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .._replicas.context import current_replica
from .._typing import REPLICA_AXIS
from .library import Library


@functools.lru_cache(maxsize=256)
def _places_in(structure: Any) -> frozenset[int]:
    """Return the positions of a tree's leaves that are inside an Equinox module."""
    return frozenset(place for place, is_inside in enumerate(_are_inside(structure, False)) if is_inside)


def _are_inside(structure: Any, is_inside: bool) -> list[bool]:
    node = structure.node_data()
    if node is None:
        return [is_inside] * structure.num_leaves
    is_inside = is_inside or issubclass(node[0], sys.modules["equinox"].Module)
    return [is_leaf_inside for child in structure.children() for is_leaf_inside in _are_inside(child, is_inside)]


def _replaced() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    if (layers := sys.modules.get("equinox.nn")) is not None:
        yield layers.BatchNorm, "__call__", _call_norm


def _call_norm(old: Callable[..., Any], layer: Any, *args: object, **kwargs: object) -> Any:
    """Call Equinox' BatchNorm with the replicas' axis name beside its own name, which belongs to a `jax.vmap` over rows."""
    names = layer.axis_name if isinstance(layer.axis_name, tuple | list) else (layer.axis_name,)
    if current_replica() is not None and REPLICA_AXIS not in names:
        layer = copy.copy(layer)
        object.__setattr__(layer, "axis_name", (*names, REPLICA_AXIS))
    return old(layer, *args, **kwargs)


EQUINOX = Library(
    package="equinox",
    name="Equinox",
    before="with strategy.scope(): variables = mr.Variable(model)",
    inside="variables.value(x), and variables.assign(eqx.apply_updates(variables.value, updates))",
    replaced=_replaced,
    static_leaves=_places_in,
)
