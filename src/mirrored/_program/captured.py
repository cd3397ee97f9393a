"""What a trace has read of objects that its function closes over, and whether it is still there."""

from __future__ import annotations

import contextvars
import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._models import nnx
from .call import Call, identified, identified_by

#: What an object may hold that a trace reads as a number or array.
_READ = (bool, int, float, complex, np.ndarray, np.generic, jax.Array)
#: Objects whose attributes are not looked at, and the packages of others.
_FUNCTIONS = (types.FunctionType, types.MethodType, types.CodeType, functools.partial)
_NO_HOLDERS = (*_FUNCTIONS, type, types.ModuleType, np.ndarray, jax.Array)
_KNOWN_PACKAGES = frozenset({"mirrored", "jax", "jaxlib", "numpy", "optax"})
_MAX_OBJECTS, _MAX_DEPTH = 1000, 4


class Attribute(NamedTuple):
    """A number or array that a trace has read: where it was, and what.

    Attributes:
        root: returns the object that the function closes over; None when it is gone, since programs keep no model alive.
        path: from there through attributes, keys and indexes.
        value: what was there.
    """

    root: Callable[[], Any]
    path: tuple[Any, ...]
    value: Any

    def has_changed(self) -> bool:
        place = self.root()
        try:
            for key in self.path:
                holder: Any = _holder(place)
                place = holder[key]
        except (KeyError, IndexError, TypeError):
            return True
        if place is self.value:
            return False
        is_number = type(place) is type(self.value) and isinstance(place, bool | int | float | complex)
        return not (is_number and repr(place) == repr(self.value))


#: What the programs have read that became part of a larger one, while that is traced.
read_inside: contextvars.ContextVar[list[Attribute] | None] = contextvars.ContextVar("mirrored_read_inside", default=None)


def attributes_read(call: Call, constants: Sequence[Any]) -> tuple[Attribute, ...]:
    """Return what a trace has read of the objects that a function closes over, and of what they hold.

    Those are the arrays that became constants of the program, wherever they are, and the numbers and arrays that
    code names as attributes. Another value in their place needs another program.

    Args:
        call: the function, and its arguments.
        constants: the arrays that the traced function closes over.
    """
    targets = list(identified(call))
    names = {name for code in targets if isinstance(code, types.CodeType) for name in _attributes_in(code)}
    known = {id(constant) for constant in constants}
    visited: set[int] = set()
    is_object = nnx.is_object if "flax.nnx" in sys.modules else lambda _: False

    def look(value: Any, root: Callable[[], Any], path: tuple[Any, ...]) -> Iterator[Attribute]:
        if id(value) not in visited and is_object(value):  # as deep as it may be
            visited.add(id(value))
            found = ((path, array) for path, array in nnx.variables_of(value) if id(array) in known)
            yield from (Attribute(functools.partial(_array_at, _weakly(value), path), (), array) for path, array in found)
            return
        holder = _holder(value)
        if holder is None or id(value) in visited or len(path) >= _MAX_DEPTH or len(visited) > _MAX_OBJECTS:
            return
        visited.add(id(value))
        for key, part in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if id(part) in known or (key in names and isinstance(part, _READ) and not isinstance(part, jax.core.Tracer)):
                yield Attribute(root, (*path, key), part)
            else:
                yield from look(part, root, (*path, key))

    seen: set[int] = set()
    inside = [inner for target in targets for inner in _inside_wrapped(target, seen)]
    return tuple(attribute for target in (*targets, *inside) for attribute in look(target, _weakly(target), ()))


def _inside_wrapped(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield what the function closes over that is in a wrapper of it, such as `jax.jit` and `nnx.jit` make."""
    function = getattr(value, "__wrapped__", None) if callable(value) else None
    if isinstance(function, types.FunctionType) and id(function) not in seen:
        seen.add(id(function))
        for inner in identified_by(function):
            yield inner
            yield from _inside_wrapped(inner, seen)


def _holder(value: Any) -> dict[Any, Any] | list[Any] | None:
    """Return where an object has what it holds; None for one that is not looked at."""
    if isinstance(value, dict | list):
        return value
    is_other = isinstance(value, _NO_HOLDERS) or type(value).__module__.partition(".")[0] in _KNOWN_PACKAGES
    return None if is_other else getattr(value, "__dict__", None)


def _array_at(root: Callable[[], Any], path: tuple[Any, ...]) -> Any:
    return nnx.array_at(root(), path)


def _weakly(value: Any) -> Callable[[], Any]:
    """Return a function that returns the object; a dict or a list, of which there is no weak reference, is kept by it."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


@functools.lru_cache(maxsize=4096)
def _attributes_in(code: types.CodeType) -> tuple[str, ...]:
    own = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_ATTR"]
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _attributes_in(const)]
    return (*own, *inner)
