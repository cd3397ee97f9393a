"""Finds what a step's own code names: globals, closures, `self.lr`, `cfg["lr"]`. The program is valid while these are the same.

Own code is a function; those that it defines, closes over, or has as defaults or bound arguments; those in a `jax.jit`.
State that other functions read is read at trace time, as under `jax.jit`.
"""

from __future__ import annotations

import dis
import functools
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._models import objects
from .._models.libraries import LIBRARIES

#: Stands for a name that is no global, an empty cell, or a missing attribute.
ABSENT = object()
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_BY_REPR = (float, complex, np.generic)  # 0.0 and -0.0 differ, nan equals itself
_NESTS = (tuple, set, frozenset)
#: Types of values that hold no others, and are compared by their content.
_PLAIN = (bool, int, str, bytes, type(None), *_BY_REPR)
#: Packages whose modules, classes and methods are not looked into, because they do not change; nor are model libraries.
_WHOLE = ["builtins", "functools", "jax", "jaxlib", "math", "mirrored", "numpy", "optax", "tensorflow", "typing"]
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
#: Instructions that do nothing; some versions of Python put them between a name and its keys.
_SILENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "RESUME"})
_HOLDERS = (dict, list, tuple)
#: A path of attributes and items, each with whether it is an item.
Keys = tuple[tuple[bool, Any], ...]


class Read(NamedTuple):
    """The reading of one value that a call sees."""

    place: int  # the position of its owner in the list of all values read so far; first are the call's functions
    get: Callable[[Any], Any]  # reads it of its owner
    expected: int | None  # its `id`; 0 if only the content tells, None if it is only an owner and not compared
    content: Hashable  # see `content_key`: a value with another `id` may be equal


class Guards(NamedTuple):
    """The comparisons of what functions see with what they saw before."""

    reads: list[Read]
    same: list[tuple[int, int]]  # pairs of positions at which one object must be
    kept: list[Any]  # plain values, kept alive so that no other object gets their `id`


class Sight(NamedTuple):
    """The values that functions see at some time."""

    guards: Guards
    named: dict[str, Any]  # names as the code has them -> value
    objects: list[Any]  # those known by their `id`: a program ends with the first of them


def look_at(functions: Sequence[Callable[..., Any]], runs_steps: bool = False) -> Sight:
    """Look at a callable, and at others among its arguments.

    With `runs_steps`, the functions that the first one names count as its own code, too: an `mr.function` names its steps.
    """
    look = _Look(functions)
    for number, function in enumerate(functions):
        name = getattr(function, "__name__", type(function).__name__)
        look.enter(f"the code or an argument of {name}", look.read(0, number, is_item=True), runs_steps and not number)
    return look.sight()


class _Look:
    """A look at all that the own code of functions names."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.found: list[Any] = [functions]  # then the values read from these; a place is a position in this list
        self.compared: dict[int, str] = {}  # place -> name of the value that is compared there
        self._reads: list[tuple[int, Callable[[Any], Any]]] = [(0, lambda functions: functions)]
        self._places: dict[tuple[Hashable, ...], int] = {}
        self._entered: dict[tuple[int, ...], list[int]] = {}
        self._same: list[tuple[int, int]] = []

    def sight(self) -> Sight:
        """Return what was found: the compared values, and the reads that lead to them."""
        needed = {0}
        for place in {*self.compared, *(place for pair in self._same for place in pair)}:
            while place not in needed:
                needed.add(place)
                place = self._reads[place][0]
        new = {old: number for number, old in enumerate(sorted(needed))}
        reads = []
        for place in sorted(needed - {0}):
            (owner, get), value = self._reads[place], self.found[place]
            read = Read(new[owner], get, None, None)
            if place in self.compared:
                expected = 0 if isinstance(value, _NESTS) else id(value)  # a set may change in place
                read = read._replace(expected=expected, content=content_key(value))
            reads.append(read)
        same = [(new[first], new[second]) for first, second in self._same]
        values = [self.found[place] for place in self.compared]
        named = dict(zip(self.compared.values(), values, strict=True))
        kept = [value for value in values if isinstance(value, _PLAIN)]
        return Sight(Guards(reads, same, kept), named, _objects_in(values))

    # -- reading

    def read(self, owner: int, key: Hashable, is_item: bool = False) -> int:
        """Read an attribute, an item (a dict may lack it), or the result of our function `key`; return the value's place."""
        known = (owner, is_item, type(key), key)
        if known in self._places:
            return self._places[known]
        get: Callable[[Any], Any] = operator.itemgetter(key)
        if is_item and isinstance(self.found[owner], dict):  # `get`, because a `defaultdict` would make the item
            get = operator.methodcaller("get", key, ABSENT)
        elif not is_item:
            get = key if callable(key) else operator.attrgetter(str(key))
        try:
            value = get(self.found[owner])
        except Exception:  # a cell is empty; whatever a property raises, the step will
            value, get = ABSENT, functools.partial(_absent_if_raised, get)
        self._places[known] = len(self.found)
        self.found.append(value)
        self._reads.append((owner, get))
        return self._places[known]

    def _read_along(self, root: int, keys: Keys) -> tuple[int, Keys]:
        """Return the place at the end of a path, and the path; stop before a value that belongs to a library or is made anew."""
        places, again = [root], [self.found[root]]
        for is_item, key in keys:
            owner = self.found[places[-1]]
            if owner is ABSENT or _is_whole(owner, is_item, key):
                break
            places.append(self.read(places[-1], key, is_item))
            again.append(self._reads[places[-1]][1](again[-1]))
        while len(places) > 1 and _is_made_anew(self.found[places[-1]], again[len(places) - 1]):  # as by a property
            places.pop()  # it cannot be compared, so its owner is
        return places[-1], keys[: len(places) - 1]

    # -- own code

    def enter(
        self, name: str, place: int, is_runner: bool, args: tuple[int, ...] = (), keywords: Mapping[str, int] | None = None
    ) -> None:
        """Look into own code, given the places of its bound arguments; with `is_runner`, what it names is own code, too."""
        keywords = keywords or {}
        while isinstance(function := self.found[place], (functools.partial, types.MethodType)):
            self.compared[self.read(place, "__class__")] = name
            if isinstance(function, types.MethodType):
                place, args = self.read(place, "__func__"), (self.read(place, "__self__"), *args)
            else:
                self.compared[self.read(place, _bound_names)] = name
                bound, by_name = self.read(place, "args"), self.read(place, "keywords")
                args = (*(self.read(bound, position, is_item=True) for position in range(len(function.args))), *args)
                keywords = {**{key: self.read(by_name, key, is_item=True) for key in function.keywords}, **keywords}
                place = self.read(place, "func")
        places = [place, *args, *keywords.values()]
        known = self._entered.setdefault(tuple(id(self.found[part]) for part in places), places)
        if known is not places:
            self._same += zip(known, places, strict=True)
            return
        if isinstance(function, types.FunctionType):
            self._read_function(name, place, args, keywords, is_runner)
        else:
            self._compare(name, place)
        kind = type(function)
        if _wrapped_by(function) is not None:  # JAX's closures may hide what they wrap, those of `jax.vmap` do
            self.enter(name, self.read(place, "__wrapped__"), is_runner, args, keywords)
        elif not _is_library(kind.__module__) and isinstance(getattr(kind, "__call__", None), FUNCTIONS):  # noqa: B004
            call = self.read(self.read(place, "__class__"), "__call__")
            self.enter(name, call, is_runner, (place, *args), keywords)

    def _read_function(self, name: str, place: int, args: tuple[int, ...], keywords: Mapping[str, int], is_runner: bool) -> None:
        """Compare the code of a function, its defaults and bound arguments, and the values that the code names."""
        for attribute in ("__class__", "__code__"):
            self.compared[self.read(place, attribute)] = name
        bound = self._bind(name, place, args, keywords, is_runner)
        free = self.found[place].__code__.co_freevars
        for scope, root_name, keys in _names_in(self.found[place]):
            if scope == "global":
                root = self.read(self.read(place, "__globals__"), root_name, is_item=True)
            elif scope == "free":
                root = self.read(self.read(self.read(place, "__closure__"), free.index(root_name), is_item=True), "cell_contents")
            elif root_name in bound:
                root = bound[root_name]
            else:
                continue
            end, read = self._read_along(root, keys)
            text = root_name + "".join(f"[{key!r}]" if is_item else f".{key}" for is_item, key in read)
            self._look_at(text, end, scope == "free" and not keys, is_runner)

    def _bind(self, name: str, place: int, args: tuple[int, ...], keywords: Mapping[str, int], is_runner: bool) -> dict[str, int]:
        """Look at the defaults and bound arguments of a function, and return argument -> place."""
        defaults, by_name = self.read(place, "__defaults__"), self.read(place, "__kwdefaults__")
        positional, named = self.found[defaults], self.found[by_name]
        if positional is None and named is None:  # compared by `id`, without a call in Python
            self.compared.update({defaults: name, by_name: name})
        else:
            self.compared[self.read(place, _names_of_defaults)] = name
        of_defaults = [self.read(defaults, position, is_item=True) for position in range(len(positional or ()))]
        of_names = {key: self.read(by_name, key, is_item=True) for key in named or ()}
        for value in (*of_defaults, *of_names.values(), *args, *keywords.values()):
            self._look_at(name, value, True, is_runner)
        code = self.found[place].__code__
        arguments = code.co_varnames[: code.co_argcount]
        by_default = dict(zip(arguments[len(arguments) - len(of_defaults) :], of_defaults, strict=True))
        return {**by_default, **of_names, **dict(zip(arguments, args, strict=False)), **keywords}

    def _look_at(self, name: str, place: int, is_near: bool, is_runner: bool) -> None:
        """Enter a value that is own code, or compare it; a function is own if it is near: closed over, a default or bound."""
        value = self.found[place]
        if (is_near or is_runner) and callable(value) and _is_code(value, is_runner):
            self.enter(name, place, is_runner and is_near)
        elif isinstance(value, types.MethodType):  # which is a new object at each read
            self.compared[self.read(place, "__self__")] = name
            self.compared[self.read(place, "__func__")] = name
        else:
            self._compare(name, place)

    def _compare(self, name: str, place: int) -> None:
        self.compared[place] = name
        if objects.is_object(self.found[place]):
            self.compared[self.read(place, objects.arrays_in)] = name


def _is_made_anew(value: object, again: object) -> bool:
    return not isinstance(value, types.MethodType) and content_key(value) != content_key(again)


def _absent_if_raised(get: Callable[[Any], Any], owner: object) -> object:
    try:
        return get(owner)
    except Exception:
        return ABSENT


def _bound_names(function: functools.partial[Any]) -> tuple[Any, ...]:
    return (len(function.args), *function.keywords)


def _names_of_defaults(function: types.FunctionType) -> tuple[int, tuple[str, ...]]:
    return len(function.__defaults__ or ()), tuple(function.__kwdefaults__ or ())


def _is_code(value: object, is_runner: bool) -> bool:
    """Tell whether a value is a user's function or a wrapper of one; if `is_runner`, whether it is any callable of the user."""
    if _is_librarys(value):
        return _wrapped_by(value) is not None
    return is_runner or isinstance(value, FUNCTIONS)


def _wrapped_by(value: object) -> object:
    """Return the function that a library's wrapper wraps; None when there is none."""
    if not _is_librarys(value):
        return None
    wrapped = getattr(value, "__wrapped__", None)
    return wrapped if isinstance(wrapped, FUNCTIONS) else None


def _is_librarys(value: object) -> bool:
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if isinstance(value, types.FunctionType):
        return _is_library(value.__globals__.get("__name__", ""))
    return _is_library(type(value).__module__)


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _WHOLE or any(f"{module}.".startswith(f"{library.package}.") for library in LIBRARIES)


def _is_whole(value: object, is_item: bool, key: Hashable) -> bool:
    """Tell whether an attribute or item of a value is a library's, so that the value itself is compared."""
    if isinstance(value, types.ModuleType):
        return _is_library(value.__name__)
    if isinstance(value, type):
        return _is_library(value.__module__)
    if isinstance(value, FUNCTIONS):
        return False
    if _is_library(type(value).__module__) and not isinstance(value, _HOLDERS):
        return True
    owner = next((base for base in type(value).__mro__ if key in vars(base)), None)
    return not is_item and owner is not None and _is_library(owner.__module__)


# -- values that are compared


def content_key(value: object) -> Hashable:
    """Return a hashable that is equal for values that give the same program."""
    if not isinstance(value, (*_PLAIN, *_NESTS)):
        return id(value)
    if isinstance(value, _BY_REPR):
        return (type(value), repr(value))
    if isinstance(value, tuple):
        return (type(value), tuple(map(content_key, value)))
    if isinstance(value, _NESTS):  # sets, whose order may differ
        return (type(value), frozenset(map(content_key, value)))
    return (type(value), value)


def _objects_in(values: Iterable[Any]) -> list[Any]:
    """Return the objects whose `id` is in the content of values: while they live, no other object can have it."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, _NESTS):
            found += _objects_in(value)
        elif value is not ABSENT and not isinstance(value, _PLAIN):
            found.append(value)
    return found


# -- the names in code


def _names_in(function: types.FunctionType) -> Iterable[tuple[str, str, Keys]]:
    """Return the names of `_reads_in` for a function; for a library's function only the names that it closes over."""
    code = function.__code__
    if _is_library(function.__globals__.get("__name__", "")):
        return [("free", name, ()) for name in code.co_freevars]
    return dict.fromkeys([(scope, name, keys) for scope, name, keys in _reads_in(code) if scope != "local" or keys])


def _reads_in(code: types.CodeType) -> list[tuple[str, str, Keys]]:
    """Return each name that code reads: whether it is "global", "free" or "local", the name, and the keys that follow it."""
    found: list[tuple[str, str, Keys]] = []
    scope: str = ""
    name: Any = ""
    keys: Keys = ()
    subscript: tuple[Any, ...] = ()  # the constant loaded after the path so far, which may become its next key
    # `self.model.lr` and `cfg["lr"]` are the load of a name, then attributes, or constants each with a subscript. Any other
    # instruction ends the path: what it computes is read at trace time.
    for instruction in dis.get_instructions(code):
        operation, value = instruction.opname, instruction.argval
        if operation in _SILENT:
            continue
        if scope and operation in ("LOAD_ATTR", "LOAD_METHOD") and not subscript:
            keys += ((False, value),)
        elif scope and operation in _CONSTANTS and not isinstance(value, types.CodeType | slice) and not subscript:
            subscript = (value,)
        elif scope and subscript and (operation == "BINARY_SUBSCR" or instruction.argrepr == "[]"):
            keys, subscript = (*keys, (True, *subscript)), ()
        else:
            if scope:
                found.append((scope, name, keys))
            scope, name, keys, subscript = "", value, (), ()
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                scope = "global"
            elif operation.startswith("LOAD") and "DEREF" in operation:
                scope = "free" if name in code.co_freevars else "local"
            elif "LOAD_FAST" in operation:
                scope = "local"
                if isinstance(value, tuple):  # one instruction loads two names, and keys follow the second
                    name = value[-1]
    for inner in [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]:
        for scope, name, keys in _reads_in(inner):
            if scope == "global" or name in code.co_freevars:
                found.append((scope, name, keys))
            elif scope == "free":
                found.append(("local", name, keys))
    return found
