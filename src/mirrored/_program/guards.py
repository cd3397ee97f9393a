"""Comparisons before each call: whether its functions see the same as before, and a fast path for calls in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.sharding import Sharding

from .._jax import tracing
from .._replicas.per_replica import PerReplica, facts_of, stack_of
from .own_code import Guards, content_key

ProgramT = TypeVar("ProgramT")


def match(guards: Guards, functions: Sequence[Any]) -> bool:
    """Tell whether functions see what the guards have recorded."""
    found: list[Any] = [functions]
    try:
        for place, get, expected, content in guards.reads:
            value = get(found[place])
            found.append(value)
            if expected is not None and id(value) != expected and content_key(value) != content:
                return False
    except Exception:  # something is gone: a cell is empty, a property raises
        return False
    return not guards.same or all(found[first] is found[second] for first, second in guards.same)


class FastPath(NamedTuple, Generic[ProgramT]):
    """A short way to a call's program; the call's arguments are PerReplica values, or one tuple, list or dict of them."""

    key: tuple[Any, ...]
    program: ProgramT
    guards: Guards
    settings: tuple[Any, ...]  # JAX's
    kind: type | None  # of the one argument that holds all others
    names: list[str]  # the keys in it, if it is a dict, in JAX's order
    described: list[tuple[Any, ...]]  # what `facts_of` says of each value

    def arrays_of(self, function: object, args: Sequence[Any]) -> list[Any] | None:
        """Return the arrays of a call without keyword arguments; None if this program may not be the call's."""
        _, _, guards, settings, kind, names, described = self  # at once: each field by its name would be a lookup in every step
        if kind is not None:
            if len(args) != 1 or type(args[0]) is not kind:
                return None
            inner: Any = args[0]
            if kind is dict and len(inner) != len(names):
                return None
            args = inner if kind is not dict else [inner.get(name) for name in names]
        try:
            if [*map(facts_of, args)] != described or (tracing.context(), tracing.key_kind()) != settings:
                return None
        except AttributeError:  # of no PerReplica, or of one over which a user has mapped
            return None
        if not match(guards, (function,)):
            return None
        return [*map(stack_of, args)]


def fast_path_to(
    key: tuple[Any, ...], program: ProgramT, guards: Guards, args: Sequence[Any], placement: Sharding
) -> FastPath[ProgramT] | None:
    """Return the fast path to the program of a call without keyword arguments; None if there is none."""
    kind, names, values = None, [], args
    if len(args) == 1 and type(args[0]) in (tuple, list, dict):
        kind, values = type(args[0]), args[0]
    if isinstance(values, dict):
        if not all(type(name) is str for name in values):
            return None
        names = sorted(values)
        values = [values[name] for name in names]
    if not all(type(value) is PerReplica and isinstance(stack_of(value), jax.Array) for value in values):
        return None
    described = [*map(facts_of, values)]
    if any(facts[1:3] != (None, placement) for facts in described):  # an uneven one is padded, or it lies elsewhere
        return None
    return FastPath(key, program, guards, tracing.settings(), kind, names, described)
