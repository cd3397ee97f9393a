"""What a call sees: what the own code of its function names.

The own code is the function, the functions written in it, those that it closes over, has as defaults or bound arguments, and what
a wrapper such as `jax.jit` wraps. What other functions read is read when they are traced, as under `jax.jit`.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from .._models import nnx
from .code_names import MAX_CODES, Path, find_places, is_library, known_places

#: In place of a name that is no global, an empty cell, or an attribute that is not there.
ABSENT = object()
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_HOLDERS = (dict, list, tuple)
_BY_VALUE = (bool, int, str, bytes, type(None))
_BY_REPR = (float, complex)  # 0.0 and -0.0 differ, nan equals itself
_NESTS = (tuple, set, frozenset)

#: What a value's type says: that it is not a library's, that it has parts, that it can be called.
_OPEN, _PARTS, _CALLABLE = 1, 2, 4


class _Kinds(dict[type, int]):
    """The flags of a type; 0 of one whose values are compared as they are, whatever is read of them."""

    def __missing__(self, kind: type) -> int:
        is_open = issubclass(kind, (*FUNCTIONS, *_HOLDERS, types.ModuleType, type)) or not is_library(kind.__module__)
        is_of_nnx = any(base.__module__.startswith("flax.nnx") for base in kind.__mro__)
        has_parts = is_of_nnx or issubclass(kind, (set, types.MethodType))
        is_callable = any("__call__" in vars(base) for base in kind.__mro__)
        self[kind] = found = _OPEN * is_open | _PARTS * has_parts | _CALLABLE * is_callable
        return found


_kinds = _Kinds()


#: A piece of own code: a callable, the arguments that are bound to it, and whether the functions that it names count, too.
_Piece: TypeAlias = tuple[Any, Sequence[Any], dict[str, Any], bool]


def seen_by(function: Any, runs_steps: bool = False, paths: list[Path] | None = None) -> list[Any]:
    """Return the code of a function, and the values of all that its own code names now.

    Args:
        function: any callable.
        runs_steps: whether the functions that it names count as its own code, too: an `mr.function` names its steps.
        paths: gets the path to each value.
    """
    values: list[Any] = []
    pending: list[_Piece] = [(function, (), {}, runs_steps)]
    known: set[int] = set()
    for own, given, keywords, is_runner in pending:
        if id(own) in known:
            continue
        known.add(id(own))
        if type(own) is not types.FunctionType:
            _unwrap(own, given, keywords, is_runner, values, pending)
            if paths is not None:
                _label(paths, Path("the function"), values)
            continue
        code = own.__code__
        values.append(code)
        names, arguments, reads = (known_places.get(id(code)) or find_places(own))[1]
        roots = list(map(own.__globals__.get, names, itertools.repeat(ABSENT)))
        if own.__closure__:
            try:
                roots += [cell.cell_contents for cell in own.__closure__]
            except ValueError:  # one is not assigned yet
                roots += map(_content_of, own.__closure__)
        num_names, num_own = len(names), len(roots)
        if given or keywords or own.__defaults__ or own.__kwdefaults__:
            roots += _bind(own, given, keywords, arguments, is_runner, values, pending)
        if paths is not None:
            _label(paths, Path(f"the code or an argument of {own.__name__}"), values)
        for place, (root, read) in enumerate(zip(roots, reads, strict=False)):
            kind = type(root)
            if not _kinds[kind] or (kind is types.ModuleType and is_library(root.__name__)):
                values += (root,) if read else ()
            else:
                is_near = num_names <= place < num_own
                for path in read:
                    value = read_along(root, path)[0] if path.keys else root
                    flags, is_own = _kinds[type(value)], is_near and not path.keys
                    if flags & _PARTS or (flags & _CALLABLE and (is_own or is_runner)):
                        _expand(value, is_own, is_runner, values, pending)
                    else:
                        values.append(value)
                    if paths is not None:
                        _label(paths, path, values)
            if paths is not None and read:
                _label(paths, read[0], values)
    return values


def _label(paths: list[Path], path: Path, values: list[Any]) -> None:
    """Note the path to the values that have come since the last one."""
    paths += [path] * (len(values) - len(paths))


def _unwrap(
    own: Any, given: tuple[Any, ...], keywords: dict[str, Any], is_runner: bool, values: list[Any], pending: list[_Piece]
) -> None:
    """Look into a callable that is no function: a method, a partial, a wrapper such as `jax.jit` makes, or an object."""
    if isinstance(own, functools.partial):
        values += [len(own.args), *own.keywords]
        pending.append((own.func, (*own.args, *given), {**own.keywords, **keywords}, is_runner))
    elif isinstance(own, types.MethodType):
        pending.append((own.__func__, (own.__self__, *given), keywords, is_runner))
    else:
        _expand(own, False, False, values, pending)
        wrapped = _wrapped_by(own)
        method = None if wrapped is not None or is_library(type(own).__module__) else getattr(type(own), "__call__", None)  # noqa: B004
        if wrapped is not None or isinstance(method, types.FunctionType):
            bound = given if wrapped is not None else (own, *given)
            pending.append((method if wrapped is None else wrapped, bound, keywords, is_runner))


def _bind(
    own: types.FunctionType, given: Sequence[Any], keywords: dict[str, Any], names: Sequence[str], is_runner: bool,
    values: list[Any], pending: list[_Piece],
) -> list[Any]:  # fmt: skip
    """Note the defaults and bound arguments of a function, and return those that have certain names."""
    code, defaults, by_name = own.__code__, own.__defaults__ or (), own.__kwdefaults__ or {}
    values += [*by_name, *keywords]
    for value in (*defaults, *by_name.values(), *given, *keywords.values()):
        _expand(value, True, is_runner, values, pending)
    if not names:
        return []
    positional = code.co_varnames[: code.co_argcount]
    bound = dict(zip(positional[code.co_argcount - len(defaults) :], defaults, strict=True)) | by_name
    bound |= dict(zip(positional, given, strict=False)) | keywords
    return [bound.get(name, ABSENT) for name in names]


def _expand(value: Any, is_own: bool, is_runner: bool, values: list[Any], pending: list[_Piece]) -> None:
    """Note what stands for a value that has parts, or that is own code."""
    is_code = is_own or is_runner
    if isinstance(value, FUNCTIONS) and is_code and (not _is_librarys(value) or _wrapped_by(value) is not None):
        pending.append((value, (), {}, is_runner and is_own))
    elif isinstance(value, set):
        values.append(frozenset(value))  # may have changed in place
    elif isinstance(value, types.MethodType):
        values += (value.__self__, value.__func__)  # the method itself is made each time
    else:
        values.append(value)
        if _kinds[type(value)] & _PARTS and nnx.is_object(value):
            values += [array for _, array in nnx.variables_of(value)]
        elif is_code and (wrapped := _wrapped_by(value)) is not None:
            pending.append((wrapped, (), {}, is_runner and is_own))
        elif is_runner and not _is_librarys(value):
            pending.append((value, (), {}, False))


def _wrapped_by(value: Any) -> Any:
    """Return the function that a library's wrapper wraps; None when there is none."""
    wrapped = getattr(value, "__wrapped__", None) if _is_librarys(value) else None
    return wrapped if isinstance(wrapped, FUNCTIONS) else None


def _is_librarys(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return is_library(value.__globals__.get("__name__", ""))
    if isinstance(value, FUNCTIONS):
        return _is_librarys(value.func if isinstance(value, functools.partial) else value.__func__)
    return is_library(type(value).__module__)


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def read_along(value: Any, path: Path) -> tuple[Any, tuple[tuple[bool, Any], ...]]:
    """Return what is at the end of a path, and the keys up to there: the inside of what is a library's is not looked at."""
    for position, (is_item, key) in enumerate(path.keys):
        if _is_whole(value, is_item, key):
            return value, path.keys[:position]
        try:
            if is_item and isinstance(value, dict):
                value = dict.get(value, key, ABSENT)  # a `defaultdict` would make the item
            else:
                value = value[key] if is_item else getattr(value, key)
        except Exception:  # whatever a property raises, the step will
            return ABSENT, path.keys
    return value, path.keys


def _is_whole(value: Any, is_item: bool, key: Any) -> bool:
    """Tell whether an attribute or item of a value is a library's, so that the value itself is compared."""
    if not _kinds[type(value)] & _OPEN:
        return True
    if isinstance(value, types.ModuleType):
        return is_library(value.__name__)
    if isinstance(value, type):
        return is_library(value.__module__)
    return not is_item and _is_of_library(type(value), key)


@functools.lru_cache(maxsize=MAX_CODES)
def _is_of_library(kind: type, key: str) -> bool:
    owner = next((base for base in kind.__mro__ if key in vars(base)), None)
    return owner is not None and is_library(owner.__module__) and not issubclass(kind, FUNCTIONS)


# -- values in keys


@functools.lru_cache(maxsize=MAX_CODES)
def is_by_content(kind: type) -> bool:
    """Tell whether values of a type are compared by what they are, and not by their identity."""
    return issubclass(kind, (*_BY_VALUE, *_BY_REPR, *_NESTS, np.generic))


def content_key(value: Any) -> Any:
    """Return a hashable that is equal for values in whose place each other may be."""
    if not is_by_content(type(value)):
        return id(value)
    if isinstance(value, np.generic):
        return (type(value), value.tobytes())
    if isinstance(value, _BY_REPR):
        return (type(value), repr(value))
    if isinstance(value, _NESTS):
        return (type(value), type(value)(map(content_key, value)) if type(value) in _NESTS else tuple(map(content_key, value)))
    return (type(value), value)


def objects_in(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the objects whose identity is in the keys of values: while they live, no other object can have it."""
    for value in values:
        if isinstance(value, _NESTS):
            yield from objects_in(tuple(value))
        elif value is not ABSENT and not is_by_content(type(value)):
            yield value


def forget_made_anew(function: Any, runs_steps: bool = False) -> None:
    """Compare the object instead of an attribute, such as a property, that is another object each time it is read."""
    for _ in range(8):  # so many dots
        first: list[Path] = []
        second: list[Path] = []
        before, after = seen_by(function, runs_steps, first), seen_by(function, runs_steps, second)
        if len(before) == len(after):
            changing = [path for path, a, b in zip(second, before, after, strict=True) if content_key(a) != content_key(b)]
        else:
            changing = [path for path in second if path not in first]
        if not any(path.keys for path in changing):
            return
        for path in changing:
            path.keys = path.keys[:-1]
