"""What a call sees: what the own code of its function names.

The own code is the function, the functions written in it, those that it closes over, has as defaults or bound arguments, and what
a wrapper such as `jax.jit` wraps. What other functions read is read when they are traced, as under `jax.jit`.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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
_BY_REPR = (float, complex, np.generic)  # 0.0 and -0.0 differ, nan equals itself
_NESTS = (tuple, set, frozenset)
#: The end of the way to a function's code, behind the way to the function.
CODE = (False, "__code__")


#: Attributes and items that are read one after the other, each with whether it is an item.
Keys = tuple[tuple[bool, Any], ...]


class Path:
    """A name in code, with the attributes and items that the code reads of it.

    Attributes:
        place: what to read of a function for the value of the name.
        keys: fewer than in the code where an attribute is another object each time it is read.
        text: as it is written, such as `self.lr`.
    """

    __slots__ = ("keys", "place", "text")

    def __init__(self, name: str, keys: Keys = (), place: Keys = ()) -> None:
        self.place, self.keys = place, keys
        self.text = name + "".join(f"[{key!r}]" if is_item else f".{key}" for is_item, key in keys)


class Places(NamedTuple):
    """What code reads: the paths that begin at each name.

    Attributes:
        code: the code, kept alive, because it is known by its `id`.
        itself: the path to the function and its arguments.
        named: global -> paths.
        closed_over: the paths of each variable that it closes over, in their order.
        bound: argument of which it reads attributes or items -> paths.
    """

    code: types.CodeType
    itself: Path
    named: dict[str, list[Path]]
    closed_over: list[list[Path]]
    bound: dict[str, list[Path]]


#: The path to a value that own code names now, the value, and what to read of the function for it: None where that does not tell.
Seen = tuple[Path, Any, Keys | None]
_UNNAMED = Path("the function")
_NO_KEYWORDS: Mapping[str, Any] = types.MappingProxyType({})


def seen_by(function: Callable[..., Any], runs_steps: bool = False) -> list[Seen]:
    """Return the code of a function, and the values of all that its own code names now.

    Args:
        function: any callable.
        runs_steps: whether the functions that it names count as its own code, too: an `mr.function` names its steps.
    """
    walk = _Walk([], {})
    walk.enter(_UNNAMED, function, runs_steps, ())
    return walk.seen


class _Walk(NamedTuple):
    """A walk over a function's own code.

    Attributes:
        seen: the values that it names.
        known: the functions that were entered, with their bound arguments; held, so that no other object takes their `id`.
    """

    seen: list[Seen]
    known: dict[tuple[int, ...], Any]

    def enter(
        self,
        path: Path,
        own: Any,
        is_runner: bool,
        way: Keys | None,
        args: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] = _NO_KEYWORDS,
    ) -> None:
        """Look into own code with its bound arguments; of a runner the functions that it names count as own code, too."""
        while isinstance(own, (functools.partial, types.MethodType)):
            if isinstance(own, types.MethodType):
                own, args = own.__func__, (own.__self__, *args)
            else:
                self.seen.append((path, (len(own.args), *own.keywords), None))
                own, args, keywords = own.func, (*own.args, *args), {**own.keywords, **keywords}
        key = (id(own), *map(id, args), *map(id, keywords.values()))
        if key in self.known:
            self.seen.append((path, ABSENT, None))  # what was known in its place may be made anew
            return
        self.known[key] = own, args, keywords
        if isinstance(own, types.FunctionType):
            self._read_function(own, args, keywords, is_runner, way)
            return
        self._note(path, own, way)
        call = _wrapped_by(own)
        if call is None and not is_library(type(own).__module__):
            call, args = getattr(type(own), "__call__", None), (own, *args)  # noqa: B004
        if isinstance(call, FUNCTIONS):
            self.enter(path, call, is_runner, None if way is None else (*way, (False, "__wrapped__")), args, keywords)

    def _read_function(
        self, own: types.FunctionType, args: tuple[Any, ...], keywords: Mapping[str, Any], is_runner: bool, way: Keys | None
    ) -> None:
        """Note the code of a function, its defaults and bound arguments, and what the code reads."""
        places = _places_of(own)
        self.seen.append((places.itself, places.code, None if way is None else (*way, CODE)))
        named, cells = own.__globals__, own.__closure__ or ()
        roots = [(named.get(name, ABSENT), paths, False) for name, paths in places.named.items()]
        roots += [(_content_of(cell), paths, True) for cell, paths in zip(cells, places.closed_over, strict=True)]
        if args or keywords or own.__defaults__ or own.__kwdefaults__:
            bound = self._bind(places.itself, own, args, keywords, is_runner)
            roots += [(bound.get(name, ABSENT), paths, False) for name, paths in places.bound.items()]
        for root, paths, is_closed_over in roots:
            kind = type(root)
            is_whole = is_library(root.__name__) if kind is types.ModuleType else _is_simple(kind) and _is_closed(kind)
            for path in paths[:1] if is_whole else paths:
                value, keys = (root, ()) if is_whole or not path.keys else _read_along(root, path)
                further = None if way is None else (*way, *path.place, *keys)
                if _is_simple(type(value)):
                    self.seen.append((path, value, further))
                else:
                    self._look_at(path, value, is_closed_over and not path.keys, is_runner, further)

    def _bind(
        self, path: Path, own: types.FunctionType, args: tuple[Any, ...], keywords: Mapping[str, Any], is_runner: bool
    ) -> dict[str, Any]:
        """Look at the defaults and bound arguments of a function, and return name -> value."""
        code, defaults, by_name = own.__code__, own.__defaults__ or (), own.__kwdefaults__ or {}
        self.seen.append((path, (*by_name, *keywords), None))
        for value in (*defaults, *by_name.values(), *args, *keywords.values()):
            if _is_simple(type(value)):
                self.seen.append((path, value, None))
            else:
                self._look_at(path, value, True, is_runner, None)
        positional = code.co_varnames[: code.co_argcount]
        by_default = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
        return {**by_default, **by_name, **dict(zip(positional, args, strict=False)), **keywords}

    def _look_at(self, path: Path, value: Any, is_near: bool, is_runner: bool, way: Keys | None) -> None:
        """Enter a value that is own code, or note it; a function is own if it is near: closed over, a default or bound."""
        if (is_near or is_runner) and _is_code(value, is_runner):
            self.enter(path, value, is_runner and is_near, way)
        elif isinstance(value, types.MethodType):  # the method itself is made each time
            for name in ("__self__", "__func__"):
                self.seen.append((path, getattr(value, name), None if way is None else (*way, (False, name))))
        else:
            self._note(path, value, way)

    def _note(self, path: Path, value: Any, way: Keys | None) -> None:
        if isinstance(value, set):
            value, way = frozenset(value), None  # may have changed in place
        self.seen.append((path, value, way))
        if "flax.nnx" in sys.modules and nnx.is_object(value):
            self.seen.extend([(path, array, None) for _, array in nnx.variables_of(value)])


def _is_code(value: Any, is_runner: bool) -> bool:
    """Tell whether a value is a function of the user's, a wrapper of one, or, in what runs steps, any callable of the user's."""
    if _is_librarys(value):
        return _wrapped_by(value) is not None
    return is_runner or isinstance(value, FUNCTIONS)


def _wrapped_by(value: Any) -> Any:
    """Return the function that a library's wrapper wraps; None when there is none."""
    wrapped = getattr(value, "__wrapped__", None) if _is_librarys(value) else None
    return wrapped if isinstance(wrapped, FUNCTIONS) else None


def _is_librarys(value: Any) -> bool:
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    is_function = isinstance(value, types.FunctionType)
    return is_library(value.__globals__.get("__name__", "") if is_function else type(value).__module__)


@functools.lru_cache(maxsize=MAX_CODES)
def is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=MAX_CODES)
def _is_simple(kind: type) -> bool:
    """Tell whether values of a type have neither code nor parts: they are no callables, no sets and nothing of NNX."""
    of_nnx = any(base.__module__.startswith("flax.nnx") for base in kind.__mro__)
    return not (of_nnx or issubclass(kind, set) or any("__call__" in vars(base) for base in kind.__mro__))


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not assigned yet
        return ABSENT


def _read_along(value: Any, path: Path) -> tuple[Any, Keys]:
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
    if isinstance(value, types.ModuleType):
        return is_library(value.__name__)
    if isinstance(value, type):
        return is_library(value.__module__)
    return _is_closed(type(value)) or (not is_item and _is_of_library(type(value), key))


@functools.lru_cache(maxsize=MAX_CODES)
def _is_closed(kind: type) -> bool:
    return is_library(kind.__module__) and not issubclass(kind, (*FUNCTIONS, *_HOLDERS))


@functools.lru_cache(maxsize=MAX_CODES)
def _is_of_library(kind: type, key: str) -> bool:
    owner = next((base for base in kind.__mro__ if key in vars(base)), None)
    return owner is not None and is_library(owner.__module__) and not issubclass(kind, FUNCTIONS)


# -- values in keys


@functools.lru_cache(maxsize=MAX_CODES)
def is_by_content(kind: type) -> bool:
    """Tell whether values of a type are compared by what they are, and not by their identity."""
    return issubclass(kind, (*_BY_VALUE, *_BY_REPR, *_NESTS))


def content_key(value: Any) -> Hashable:
    """Return a hashable that is equal for values in whose place each other may be."""
    if not is_by_content(type(value)):
        return id(value)
    if isinstance(value, _BY_REPR):
        return (type(value), repr(value))
    if isinstance(value, _NESTS):
        return (type(value), type(value)(map(content_key, value)) if type(value) in _NESTS else tuple(map(content_key, value)))
    return (type(value), value)


def objects_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the objects whose identity is in the keys of values: while they live, no other object can have it."""
    for value in values:
        if isinstance(value, _NESTS):
            yield from objects_in(value)
        elif value is not ABSENT and not is_by_content(type(value)):
            yield value


def forget_made_anew(function: Callable[..., Any], runs_steps: bool = False) -> None:
    """Compare the object instead of an attribute, such as a property, that is another object each time it is read."""
    while True:
        before, after = seen_by(function, runs_steps), seen_by(function, runs_steps)  # both are held: no `id` comes twice
        known = {(path, content_key(value)) for path, value, _ in before}
        changing = {path for path, value, _ in after if path.keys and (path, content_key(value)) not in known}
        if not changing:
            return
        for path in changing:
            path.keys = path.keys[:-1]


# -- the names in code

#: By `id`: the hash of code is of all its instructions.
_known_places: dict[int, Places] = {}


def _places_of(function: types.FunctionType) -> Places:
    """Return what a function's code reads; of a library's only what it closes over."""
    code = function.__code__
    if (known := _known_places.get(id(code))) is not None:
        return known
    named: dict[str, list[Path]] = {}
    closed_over: dict[str, list[Path]] = {name: [] for name in code.co_freevars}
    bound: dict[str, list[Path]] = {}
    if is_library(function.__globals__.get("__name__", "")):
        closed_over = {name: [Path(name, (), _place(code, name))] for name in code.co_freevars}
    else:
        for scope, name, keys in dict.fromkeys(_reads_in(code)):
            if scope != "local" or keys:
                found = {"global": named, "free": closed_over, "local": bound}[scope]
                found.setdefault(name, []).append(Path(name, keys, _place(code, name)))
    if len(_known_places) >= MAX_CODES:
        _known_places.clear()
    itself = Path(f"the code or an argument of {function.__name__}")
    _known_places[id(code)] = places = Places(code, itself, named, list(closed_over.values()), bound)
    return places


def _place(code: types.CodeType, name: str) -> Keys:
    """Return what to read of a function for a name in its code."""
    if name in code.co_freevars:
        return ((False, "__closure__"), (True, code.co_freevars.index(name)), (False, "cell_contents"))
    return ((False, "__globals__"), (True, name))


def _reads_in(code: types.CodeType) -> Iterator[tuple[str, str, Keys]]:
    """Yield each name that code reads: whether it is a global, free or local, and the keys that follow."""
    scope, name = "", ""
    keys: Keys = ()
    constant: Any = None  # on top of what has been read so far: may be subscripted with
    for instruction in dis.get_instructions(code):
        operation, value = instruction.opname, instruction.argval
        if operation in _SILENT:
            continue
        if scope and operation in ("LOAD_ATTR", "LOAD_METHOD") and constant is None:
            keys += ((False, value),)
        elif scope and operation in _CONSTANTS and isinstance(value, int | str) and constant is None:
            constant = value
        elif scope and constant is not None and (operation == "BINARY_SUBSCR" or instruction.argrepr == "[]"):
            keys, constant = (*keys, (True, constant)), None
        else:
            if scope:
                yield scope, name, keys
            scope, name = _name_in(instruction, code)
            keys, constant = (), None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for scope, name, keys in _reads_in(inner):
                if scope == "global" or name in code.co_freevars:
                    yield scope, name, keys
                elif scope == "free":
                    yield "local", name, keys


def _name_in(instruction: dis.Instruction, code: types.CodeType) -> tuple[str, str]:
    """Return whether an instruction reads a global, a free or a local variable, and which; two "" where it reads none."""
    operation, name = instruction.opname, instruction.argval
    if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
        return "global", name
    if operation.startswith("LOAD") and "DEREF" in operation:
        return "free" if name in code.co_freevars else "local", name
    if "LOAD_FAST" in operation:
        return "local", name[-1] if isinstance(name, tuple) else name
    return "", ""
