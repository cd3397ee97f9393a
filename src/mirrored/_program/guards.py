"""What a call sees: what the own code of its function names.

The own code is the function, the functions written in it, those that it closes over, has as defaults or bound arguments, and what
a wrapper such as `jax.jit` wraps. What other functions read is read when they are traced, as under `jax.jit`.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .._models import nnx

#: Packages whose modules, classes and methods are not looked into: what is in them does not change.
_PACKAGES = "builtins equinox flax functools jax jaxlib keras math mirrored numpy optax tensorflow torch typing"
_LIBRARIES = frozenset(_PACKAGES.split(" "))
#: Of so much code the names are kept, and with them the code.
MAX_CODES = 4096
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_SILENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "RESUME"})
#: In place of a name that is no global, an empty cell, or an attribute that is not there.
ABSENT = object()
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_HOLDERS = (dict, list, tuple)
_BY_VALUE = (bool, int, str, bytes, type(None))
_BY_REPR = (float, complex)  # 0.0 and -0.0 differ, nan equals itself
_NESTS = (tuple, set, frozenset)

#: What a value's type says: that it is not a library's, that it has parts, that it can be called.
_OPEN, _PARTS, _CALLABLE = 1, 2, 4


class _TypeFlags(dict[type, int]):
    """The flags of a type; 0 of one whose values are compared as they are, whatever is read of them."""

    def __missing__(self, kind: type) -> int:
        is_open = issubclass(kind, (*FUNCTIONS, *_HOLDERS, types.ModuleType, type)) or not is_library(kind.__module__)
        is_of_nnx = any(base.__module__.startswith("flax.nnx") for base in kind.__mro__)
        has_parts = is_of_nnx or issubclass(kind, (set, types.MethodType))
        is_callable = any("__call__" in vars(base) for base in kind.__mro__)
        self[kind] = found = _OPEN * is_open | _PARTS * has_parts | _CALLABLE * is_callable
        return found


_kinds = _TypeFlags()


class Path:
    """A name in code, with the attributes and items that the code reads of it.

    Attributes:
        keys: each with whether it is an item; fewer than in the code where an attribute is another object each time it is read.
        text: as it is written, such as `self.lr`.
    """

    __slots__ = ("keys", "text")

    def __init__(self, name: str, keys: tuple[tuple[bool, Any], ...] = ()) -> None:
        self.keys = keys
        self.text = name + "".join(f"[{key!r}]" if is_item else f".{key}" for is_item, key in keys)


class Places(NamedTuple):
    """What code reads.

    Attributes:
        names: of the globals.
        arguments: of the arguments of which it reads attributes or items.
        paths: of each global, then of each variable that it closes over, then of these arguments.
    """

    names: tuple[str, ...]
    arguments: tuple[str, ...]
    paths: tuple[tuple[Path, ...], ...]


#: A piece of own code: a callable, the arguments that are bound to it, and whether the functions that it names count, too.
_Piece: TypeAlias = tuple[Any, tuple[Any, ...], dict[str, Any], bool]


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


@functools.lru_cache(maxsize=MAX_CODES)
def is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _wrapped_by(value: Any) -> Any:
    """Return the function that a library's wrapper wraps; None when there is none."""
    wrapped = getattr(value, "__wrapped__", None) if _is_librarys(value) else None
    return wrapped if isinstance(wrapped, FUNCTIONS) else None


def _is_librarys(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return is_library(value.__globals__.get("__name__", ""))
    if isinstance(value, functools.partial):
        return _is_librarys(value.func)
    if isinstance(value, types.MethodType):
        return _is_librarys(value.__func__)
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


# -- the names in code

#: By `id`: the hash of code is of all its instructions.
known_places: dict[int, tuple[types.CodeType, Places]] = {}


def find_places(function: types.FunctionType) -> tuple[types.CodeType, Places]:
    """Return a function's code, and what it reads; of a library's only what it closes over."""
    code = function.__code__
    if (known := known_places.get(id(code))) is not None:
        return known
    reads: dict[tuple[str, str], dict[Any, None]] = {("free", name): {} for name in code.co_freevars}
    if is_library(function.__globals__.get("__name__", "")):
        for read in reads.values():
            read[()] = None
    else:
        for scope, name, keys in _reads_in(code):
            reads.setdefault((scope, name), {})[keys] = None
    names = tuple(name for scope, name in reads if scope == "global")
    arguments = tuple(name for (scope, name), read in reads.items() if scope == "local" and any(read))
    order = [*(("global", n) for n in names), *(("free", n) for n in code.co_freevars), *(("local", n) for n in arguments)]
    paths = tuple(tuple(Path(name, keys) for keys in reads[scope, name]) for scope, name in order)
    if len(known_places) >= MAX_CODES:
        known_places.clear()
    known_places[id(code)] = found = code, Places(names, arguments, paths)
    return found


def _reads_in(code: types.CodeType) -> Iterator[tuple[str, str, tuple[tuple[bool, Any], ...]]]:
    """Yield each name that code reads: whether it is a global, free or local, and the keys that follow."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _SILENT]
    for position, instruction in enumerate(instructions):
        operation, name = instruction.opname, instruction.argval
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            scope = "global"
        elif operation.startswith("LOAD") and "DEREF" in operation:
            scope = "free" if name in code.co_freevars else "local"
        elif "LOAD_FAST" in operation:
            scope, name = "local", name[-1] if isinstance(name, tuple) else name
        else:
            continue
        yield scope, name, tuple(_keys_at(instructions, position + 1))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for scope, name, keys in _reads_in(inner):
                if scope != "local":
                    yield scope if scope == "global" or name in code.co_freevars else "local", name, keys


def _keys_at(instructions: Sequence[dis.Instruction], position: int) -> Iterator[tuple[bool, Any]]:
    while position < len(instructions):
        one, other = instructions[position], instructions[min(position + 1, len(instructions) - 1)]
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield False, one.argval
            position += 1
        elif one.opname in _CONSTANTS and _is_subscript(other) and isinstance(one.argval, int | str):
            yield True, one.argval
            position += 2
        else:
            return


def _is_subscript(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or (instruction.opname == "BINARY_OP" and instruction.argrepr == "[]")
