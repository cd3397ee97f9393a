"""Does a call have the key of the last one? A few looks tell, where a loop calls one step again and again."""

from __future__ import annotations

import operator
import types
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from .._replicas.per_replica import PerReplica, stack_of, uneven_shapes
from .call import ABSENT, FUNCTIONS, is_by_content, names_in

ProgramT = TypeVar("ProgramT")

#: Values that are compared by what they are: as long as a shortcut keeps them, nothing else has their `id`.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
#: Functions in a function's closure are looked at so many levels deep.
_MAX_DEPTH = 4
#: What a function has; in one call, because each of them alone is slow.
_parts_of = operator.attrgetter("__code__", "__globals__", "__closure__", "__defaults__", "__kwdefaults__")


class _Look(NamedTuple):
    """What a function has, by `id`: when it has the same, it has the same key. What it has ends no later than the program.

    Attributes:
        code, module: the ids of its code and of its module's globals.
        names: of the globals that it reads.
        ids: of these globals, and of what it closes over.
        inner: of the functions that it closes over, their places there, and what they have.
        kept: the plain values among all of them.
    """

    code: int
    module: int
    names: tuple[str, ...]
    ids: list[int]
    inner: tuple[tuple[int, _Look], ...]
    kept: tuple[Any, ...]

    def is_of(self, function: Any) -> bool:
        """Tell whether a function has all this, and nothing else; ValueError when it closes over what is not there yet."""
        if type(function) is not types.FunctionType:
            return False
        code, named, closure, defaults, by_name = _parts_of(function)
        if id(code) != self.code or id(named) != self.module or defaults or by_name:
            return False
        ids = [id(named.get(name, ABSENT)) for name in self.names]
        if closure:
            ids += [id(cell.cell_contents) for cell in closure]
        if ids != self.ids:
            return False
        return not self.inner or all(look.is_of(closure[place].cell_contents) for place, look in self.inner)


class Shortcut(NamedTuple, Generic[ProgramT]):
    """The way to the program of a call whose arguments are PerReplica values, or one tuple, list or dict of them.

    Attributes:
        key, program: of the call.
        look: its function.
        kind: the type of the one argument that holds all others; None when there is none.
        names: the keys in it, if it is a dict, in JAX's order.
        described: the shape, with the axis of the replicas, and the dtype of each array.
        placement: where all of them are.
    """

    key: Any
    program: ProgramT
    look: _Look
    kind: type | None
    names: list[str]
    described: list[tuple[Any, Any]]
    placement: Any

    def arrays_of(self, function: Any, args: Sequence[Any]) -> list[Any] | None:
        """Return the arrays of a call without keyword arguments if it has the same key, else None: then it may have it, too."""
        _, _, look, kind, names, described, placement = self
        if kind is not None:
            if len(args) != 1 or type(args[0]) is not kind:
                return None
            inner: Any = args[0]
            if kind is dict and len(inner) != len(names):
                return None
            args = inner if kind is not dict else [inner.get(name) for name in names]
        if len(args) != len(described):
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
        except (AttributeError, ValueError):  # a PerReplica that a user has mapped over; a cell that is empty
            return None


def shortcut_to(key: Any, program: ProgramT, function: Any, args: Sequence[Any], placement: Any) -> Shortcut[ProgramT] | None:
    """Return the shortcut to the program of a call; None if there is none.

    Args:
        key, program: of the call.
        function, args: the call, which has no keyword arguments.
        placement: where its arrays must be.
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
    look = _look_at(function, _MAX_DEPTH)
    described = [(stack_of(value).shape, stack_of(value).dtype) for value in values]
    return None if look is None else Shortcut(key, program, look, kind, names, described, placement)


def _look_at(function: Any, depth: int) -> _Look | None:
    """Return what a function has; None if a look would not do, as at defaults of arguments, methods, and numpy's numbers."""
    if not depth or type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
        return None
    names = names_in(function.__code__)
    named = [function.__globals__.get(name, ABSENT) for name in names]
    try:
        closed = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        return None
    inner: list[tuple[int, _Look]] = []
    for place, value in enumerate((*named, *closed)):
        if not is_by_content(type(value)) or type(value) in _PLAIN:
            continue
        is_global = place < len(named)
        if is_global and isinstance(value, FUNCTIONS):
            continue  # known by identity
        look = None if is_global else _look_at(value, depth - 1)
        if look is None:
            return None
        inner.append((place - len(named), look))
    kept = tuple([value for value in (*named, *closed) if type(value) in _PLAIN])
    ids = list(map(id, (*named, *closed)))
    return _Look(id(function.__code__), id(function.__globals__), names, ids, tuple(inner), kept)
