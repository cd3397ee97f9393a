"""Which leaves of the arguments are in Equinox modules: Python numbers there are settings, compiled in as by `eqx.filter_jit`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any


def places_in_modules(structure: Any) -> frozenset[int]:
    """Return the numbers of the leaves of a tree that are in an Equinox module; none before Equinox is imported."""
    return _places_in(structure) if "equinox" in sys.modules else frozenset()


@functools.lru_cache(maxsize=256)
def _places_in(structure: Any) -> frozenset[int]:
    return frozenset(place for place, is_inside in enumerate(_are_inside(structure, False)) if is_inside)


def _are_inside(structure: Any, is_inside: bool) -> Iterator[bool]:
    node = structure.node_data()
    if node is None:
        yield from [is_inside] * structure.num_leaves
    elif issubclass(node[0], sys.modules["equinox"].Module):
        is_inside = True
    for child in structure.children():
        yield from _are_inside(child, is_inside)
