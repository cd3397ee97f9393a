"""The fast path: recognize a repeated call by a few comparisons, without its key."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from .._jax import tracing
from .._replicas.per_replica import PerReplica, stack_of, uneven_shapes
from .._typing import Shape, UserFunction
from .guards import ABSENT, CODE, Keys, is_by_content, seen_by

ProgramT = TypeVar("ProgramT")

#: Values that are compared by what they are: as long as a fast path keeps them, nothing else has their `id`.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
#: So a function is that has no defaults, and is no method.
_BARE: dict[str, Any] = {"__class__": types.FunctionType, "__defaults__": None, "__kwdefaults__": None}


class _Check(NamedTuple):
    """A look at one thing that a call sees.

    Attributes:
        place: where what it is read from is, among the function and what was read before.
        get: reads it.
        expected: its `id`; None if it is only read from.
    """

    place: int
    get: Callable[[Any], Any]
    expected: int | None


class FastPath(NamedTuple, Generic[ProgramT]):
    """The way to the program of a call whose arguments are PerReplica values, or one tuple, list or dict of them.

    Attributes:
        key, program: of the call.
        checks: of all that the call sees. The objects end no later than the program, so no others have their ids.
        kept: the plain values among them.
        settings: JAX's.
        kind: the type of the one argument that holds all others; None when there is none.
        names: the keys in it, if it is a dict, in JAX's order.
        described: the shape, with the axis of the replicas, and the dtype of each array.
        placement: where all of them are.
    """

    key: tuple[Any, ...]
    program: ProgramT
    checks: list[_Check]
    kept: list[Any]
    settings: tuple[Any, ...]
    kind: type | None
    names: list[str]
    described: list[tuple[Shape, np.dtype[Any]]]
    placement: Sharding

    def arrays_of(self, function: object, args: Sequence[Any]) -> list[Any] | None:
        """Return the arrays of a call without keyword arguments if it has the same key, else None: then it may have it, too."""
        _, _, checks, _, settings, kind, names, described, placement = self
        if kind is not None:
            if len(args) != 1 or type(args[0]) is not kind:
                return None
            inner: Any = args[0]
            if kind is dict and len(inner) != len(names):
                return None
            args = inner if kind is not dict else [inner.get(name) for name in names]
        if len(args) != len(described) or (tracing.context(), tracing.key_kind()) != settings:
            return None
        arrays = []
        try:
            for value, (shape, dtype) in zip(args, described, strict=False):
                if type(value) is not PerReplica:
                    return None
                array = stack_of(value)
                if array.sharding is not placement or array.shape != shape or array.dtype is not dtype or uneven_shapes(value):
                    return None
                arrays.append(array)
            found: list[Any] = [function]
            for place, get, expected in checks:
                found.append(get(found[place]))
                if expected is not None and id(found[-1]) != expected:
                    return None
            return arrays
        except Exception:  # a PerReplica that a user has mapped over, a cell that is empty, an attribute that is not there
            return None


def fast_path_to(
    key: tuple[Any, ...], program: ProgramT, function: UserFunction, args: Sequence[Any], placement: Sharding, runs_steps: bool
) -> FastPath[ProgramT] | None:
    """Return the fast path to the program of a call; None if there is none.

    Args:
        key, program: of the call.
        function, args: the call, which has no keyword arguments.
        placement: where its arrays must be.
        runs_steps: whether it is an `mr.function`.
    """
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
    if any(map(uneven_shapes, values)):  # padded, they look as even ones do
        return None
    if (expected := _expected_of(function, runs_steps)) is None or (checks := _checks_of(function, expected)) is None:
        return None
    kept = [value for value in expected.values() if type(value) in _PLAIN]
    described = [(stack_of(value).shape, stack_of(value).dtype) for value in values]
    return FastPath(key, program, checks, kept, tracing.settings(), kind, names, described, placement)


def _expected_of(function: UserFunction, runs_steps: bool) -> dict[Keys, Any] | None:
    """Return what must be found where in a function; None if ids do not tell, as of bound arguments and tuples."""
    expected: dict[Keys, Any] = {}
    for _, value, way in seen_by(function, runs_steps):
        if not way or (is_by_content(type(value)) and type(value) not in _PLAIN):
            return None
        expected[way] = value
        if way[-1] == CODE:
            for name, bare in _BARE.items():
                expected[*way[:-1], (False, name)] = bare
    return expected


def _checks_of(function: UserFunction, expected: dict[Keys, Any]) -> list[_Check] | None:
    """Return the checks of what is expected in a function; None if it is not there each time."""
    checks: list[_Check] = []
    places: dict[Keys, int] = {(): 0}
    found: list[Any] = [function]
    for way in expected:
        for end in range(1, len(way) + 1):
            if (read := way[:end]) in places:
                continue
            place = places[way[: end - 1]]
            get = _getter(found[place], way[end - 1])
            try:
                found.append(get(found[place]))
            except Exception:  # an attribute that is not there, whatever a property raises
                return None
            if read in expected and found[-1] is not expected[read]:
                return None
            places[read] = len(found) - 1
            checks.append(_Check(place, get, id(found[-1]) if read in expected else None))
    return checks


def _getter(owner: object, read: tuple[bool, Any]) -> Callable[[Any], Any]:
    """Return what reads an attribute or item; of a dict also one that is not there, such as a global that is a builtin."""
    is_item, key = read
    if is_item and isinstance(owner, dict):
        return operator.methodcaller("get", key, ABSENT)
    return operator.itemgetter(key) if is_item else operator.attrgetter(key)
