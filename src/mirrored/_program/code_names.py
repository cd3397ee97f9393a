"""The names that code reads, with the dots and constant subscripts behind them: found once for each code, in its bytecode."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

#: Packages whose modules, classes and methods are not looked into: what is in them does not change.
_PACKAGES = "builtins equinox flax functools jax jaxlib keras math mirrored numpy optax tensorflow torch typing"
_LIBRARIES = frozenset(_PACKAGES.split(" "))
#: Of so much code the names are kept, and with them the code.
MAX_CODES = 4096
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_SILENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "RESUME"})


@functools.lru_cache(maxsize=MAX_CODES)
def is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


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
