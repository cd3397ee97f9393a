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
from .guards import ABSENT, Keys, is_by_content, places_of, read_along, seen_by

ProgramT = TypeVar("ProgramT")

#: Values that are compared by what they are: as long as a fast path keeps them, nothing else has their `id`.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
#: Functions in a function's closure are looked at so many levels deep.
_MAX_DEPTH = 4
#: What a function has; in one call, because each of them alone is slow.
_parts_of = operator.attrgetter("__code__", "__globals__", "__closure__", "__defaults__", "__kwdefaults__")


class _Look(NamedTuple):
    """The ids of a function's code, globals, closed-over values and what it reads of them: equal ids, equal key.

    The objects end no later than the program, so no others take their ids.

    Attributes:
        code: the id of its code.
        names: of the globals that it reads.
        ids: of these globals, and of what it closes over.
        reads: of attributes and items: the place of the global or closed-over value, what gets the end, and the end's id.
        inner: the functions that it closes over: the place, and the look at it.
        kept: the plain values among all of them.
    """

    code: int
    names: tuple[str, ...]
    ids: list[int]
    reads: list[tuple[int, Callable[[Any], Any], int]]
    inner: list[tuple[int, _Look]]
    kept: list[Any]

    def is_of(self, function: object) -> bool:
        """Tell whether a function has all this, and nothing else; an error when it closes over what is not there yet."""
        if type(function) is not types.FunctionType:
            return False
        code, named, closure, defaults, by_name = _parts_of(function)
        if id(code) != self.code or defaults or by_name:
            return False
        roots = [named.get(name, ABSENT) for name in self.names]
        if closure:
            roots += [cell.cell_contents for cell in closure]
        if list(map(id, roots)) != self.ids:
            return False
        for place, get, identity in self.reads:
            if id(get(roots[place])) != identity:
                return False
        return not self.inner or all(look.is_of(roots[place]) for place, look in self.inner)


class FastPath(NamedTuple, Generic[ProgramT]):
    """The way to the program of a call whose arguments are PerReplica values, or one tuple, list or dict of them.

    Attributes:
        key, program: of the call.
        look: at its function.
        settings: JAX's.
        kind: the type of the one argument that holds all others; None when there is none.
        names: the keys in it, if it is a dict, in JAX's order.
        described: the shape, with the axis of the replicas, and the dtype of each array.
        placement: where all of them are.
    """

    key: tuple[Any, ...]
    program: ProgramT
    look: _Look
    settings: tuple[Any, ...]
    kind: type | None
    names: list[str]
    described: list[tuple[Shape, np.dtype[Any]]]
    placement: Sharding

    def arrays_of(self, function: object, args: Sequence[Any]) -> list[Any] | None:
        """Return the arrays of a call without keyword arguments if it has the same key, else None: then it may have it, too."""
        _, _, look, settings, kind, names, described, placement = self
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
            return arrays if look.is_of(function) else None
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
    looked: set[int] = set()
    look = _look_at(function, _MAX_DEPTH, looked)
    if look is None or not all(id(value) in looked for _, value in seen_by(function, runs_steps)):
        return None
    described = [(stack_of(value).shape, stack_of(value).dtype) for value in values]
    return FastPath(key, program, look, tracing.settings(), kind, names, described, placement)


def _look_at(function: object, depth: int, looked: set[int]) -> _Look | None:
    """Return a look at a function, and note its ids; None if ids do not tell, as of defaults of arguments and methods."""
    if not depth or type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
        return None
    places = places_of(function)
    roots = [function.__globals__.get(name, ABSENT) for name in places.named]
    try:
        roots += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # one is not assigned yet
        return None
    inner = [
        (place, look)
        for place, root in enumerate(roots)
        if place >= len(places.named) and (look := _look_at(root, depth - 1, looked)) is not None
    ]
    values = list(roots)
    reads: list[tuple[int, Callable[[Any], Any], int]] = []
    for place, paths in enumerate([*places.named.values(), *places.closed_over]):
        for path in paths:
            end, keys = read_along(roots[place], path)
            if keys and end is ABSENT:
                return None
            # A method is made each time: its object and its function are looked at.
            ends = ("__self__", "__func__") if keys and isinstance(end, types.MethodType) else ()
            ways = [(*keys, (False, name)) for name in ends] or [keys]
            for get in map(_getter, filter(None, ways)):
                values.append(get(roots[place]))
                reads.append((place, get, id(values[-1])))
    if any(is_by_content(type(value)) and type(value) not in _PLAIN for value in values):
        return None  # numpy's numbers, and tuples, are made again
    looked.update([id(places.code), *map(id, values)])
    kept = [value for value in values if type(value) in _PLAIN]
    return _Look(id(places.code), tuple(places.named), list(map(id, roots)), reads, inner, kept)


def _getter(keys: Keys) -> Callable[[Any], Any]:
    if not any(is_item for is_item, _ in keys):
        return operator.attrgetter(".".join(key for _, key in keys))
    steps = [operator.itemgetter(key) if is_item else operator.attrgetter(key) for is_item, key in keys]

    def get(value: Any) -> Any:
        for step in steps:
            value = step(value)
        return value

    return get
