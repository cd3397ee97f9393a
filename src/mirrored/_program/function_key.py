"""When two functions give the same program."""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import types
from typing import Any, NamedTuple

BY_REPR = (float, complex)  # 0.0 and -0.0 differ, nan equals itself
_BY_VALUE = (bool, int, str, bytes, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def static_key(value: Any) -> Any:
    """Return a hashable that is equal for static values which give the same program."""
    if isinstance(value, BY_REPR):
        return (type(value), repr(value))
    if isinstance(value, _BY_VALUE):
        return (type(value), value)
    if isinstance(value, _FUNCTIONS):
        return function_key(value)
    try:
        hash(value)
    except TypeError:
        return (type(value), id(value))
    return (type(value), value)


def function_key(function: Any, depth: int = 4) -> Any:
    """Return a hashable that is equal for functions which give the same program.

    A function that is defined again and again in a loop keeps its code; it is the same program while the
    things that it closes over are the same objects, or equal numbers and strings.
    """
    if isinstance(function, types.FunctionType):
        code, scope = function.__code__, function.__globals__
        named = tuple([_content_key(scope[name], 0) for name in _names_in(code) if name in scope])
        identity = (id(code), id(scope), named)
        if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
            return identity
        return (
            identity,
            tuple([captured_key(cell, depth) for cell in function.__closure__ or ()]),
            tuple([_content_key(value, depth) for value in function.__defaults__ or ()]),
            tuple([(name, _content_key(value, depth)) for name, value in (function.__kwdefaults__ or {}).items()]),
        )
    if isinstance(function, types.MethodType):
        return (function_key(function.__func__, depth), id(function.__self__))
    if isinstance(function, functools.partial):
        content = (*function.args, *function.keywords.values())
        return (function_key(function.func, depth), tuple(function.keywords), tuple(_content_key(v, depth) for v in content))
    return id(function)


class KnownFunctions:
    """The keys of the steps of a loop, with the objects that each key was made of.

    Whether those are still the same objects is looked up faster than the key is made.
    """

    #: So many steps alternate in a loop at most; with more, all are forgotten and learned again.
    MAX = 16

    def __init__(self) -> None:
        self._known: dict[types.FunctionType, _Known] = {}

    def key_of(self, function: Any) -> Any:
        """Return `function_key(function)`."""
        if type(function) is not types.FunctionType:
            return function_key(function)
        known = self._known.get(function)
        if known is not None and known.is_unchanged(function):
            return known.key
        key = function_key(function)
        self._known.pop(function, None)
        if (fresh := _remember(function, key)) is not None:
            if len(self._known) >= self.MAX:
                self.forget()
            self._known[function] = fresh
        return key

    def forget(self) -> None:
        """Let go of everything: what the steps close over may be large."""
        self._known.clear()


class _Known(NamedTuple):
    """A function's key, and the places that it was made of with the objects that were there."""

    key: Any
    code: types.CodeType
    cells: list[types.CellType]
    contents: list[Any]
    names: tuple[str, ...]
    values: list[Any]

    def is_unchanged(self, function: types.FunctionType) -> bool:
        if function.__code__ is not self.code or function.__defaults__ or function.__kwdefaults__:
            return False
        if not all(map(operator.is_, map(function.__globals__.get, self.names, _absent), self.values)):
            return False
        try:
            return all(map(operator.is_, map(_content_of, self.cells), self.contents))
        except ValueError:  # a cell was emptied
            return False


_content_of = operator.attrgetter("cell_contents")
_absent = itertools.repeat(object())  # in place of what is no global, such as a built-in function


def _remember(function: types.FunctionType, key: Any) -> _Known | None:
    """Note what `function_key` looks at; None when that is more than one plain function's closure and globals."""
    cells, names = list(function.__closure__ or ()), _names_in(function.__code__)
    if function.__defaults__ or function.__kwdefaults__ or None in [captured_key(cell, 0) for cell in cells]:
        return None
    contents = [cell.cell_contents for cell in cells]
    if any(isinstance(content, _FUNCTIONS) for content in contents):
        return None  # what these close over is part of the key too
    values = list(map(function.__globals__.get, names, _absent))
    return _Known(key, function.__code__, cells, contents, names, values)


def globals_of(function: types.FunctionType) -> list[Any]:
    """Return the module-level objects that a function names, which a notebook or a loop in a script may rebind."""
    names = function.__globals__
    return [names[name] for name in _names_in(function.__code__) if name in names]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that code reads, without those that it sets itself, such as a count of its traces."""
    instructions = list(dis.get_instructions(code))
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names_in(const)]
    read = [i.argval for i in instructions if i.opname == "LOAD_GLOBAL"]
    written = {i.argval for i in instructions if i.opname == "STORE_GLOBAL"}
    return tuple(name for name in dict.fromkeys((*read, *inner)) if name not in written)


def captured_key(cell: Any, depth: int) -> Any:
    try:
        return _content_key(cell.cell_contents, depth)
    except ValueError:  # not assigned yet
        return None


@functools.lru_cache(maxsize=4096)
def _is_by_content(kind: type) -> bool:
    return issubclass(kind, (*BY_REPR, *_BY_VALUE, *_FUNCTIONS))


def _content_key(value: Any, depth: int) -> Any:
    if not _is_by_content(type(value)):
        return id(value)
    if isinstance(value, BY_REPR):
        return (type(value), repr(value))
    if isinstance(value, _BY_VALUE):
        return (type(value), value)
    if depth:
        return function_key(value, depth - 1)
    return id(value)
