"""The record of a model library: all that the house asks of one. docs/design/doors.md shows how to add one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from .._replicas.context import ReplicaContext
from .._replicas.mesh import ReplicaMesh
from .._typing import PyTree

#: The path of an array in a list of objects: first the number of the object.
Path = tuple[Any, ...]


class Apart(NamedTuple):
    """A list of objects, taken apart."""

    structure: Hashable  # all but the arrays: objects of equal structures share a program
    arrays: dict[Path, Any]  # in the order in which `put_together` takes them
    give_back: Callable[[Mapping[Path, Any]], None]  # puts new arrays, by path, into these objects


@dataclasses.dataclass(frozen=True, eq=False)  # it is part of programs' keys: compared by identity, without a call
class Objects:
    """A library's objects that hold arrays. A step takes their arrays; when it ends, they get the new values."""

    is_one: Callable[[object], bool]
    is_whole: Callable[[object], bool]  # whether a value is an object, or a tree of arrays that the step gets unchanged
    take_apart: Callable[[list[Any]], Apart]
    put_together: Callable[[Any, list[Any]], list[Any]]  # makes new objects, in a step's trace
    changed: str  # the error when the step at {where} has changed an object's structure
    remedy: str = ""  # one more remedy in the error when an array's new value differs by replica
    #: A block around a step's function: random streams differ by replica in it, metrics are combined at its end.
    on_replica: Callable[[list[Any], ReplicaContext], AbstractContextManager[None]] = lambda *_: contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Library:
    """A model library. Its functions are called only after the program has imported `package`; the defaults do nothing."""

    package: str  # the module names of its classes begin with it
    name: str
    before: str  # for messages: what to write before a step
    inside: str  # for messages: what to write in a step
    unbuilt: str = ""  # for messages: why a model may have no variables yet

    #: A block around a strategy's scope, also before the library is imported.
    scope: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    #: Yields what to replace in scopes and traces: a class, a method's name, and our method, which gets the old one first.
    replaced: Callable[[], Iterable[tuple[type, str, Callable[..., Any]]]] = tuple
    #: Calls `trace`, which traces user code or runs it eagerly; puts new variables on a mesh; may call `trace` again or not.
    traced: Callable[[Callable[[], Any], ReplicaMesh | None, bool], Any] = lambda trace, mesh, may_repeat: trace()
    #: Calls a function that may make the first variables.
    build: Callable[[Callable[[], Any]], None] = lambda call: None
    #: Tells whether a value is a variable of the library without a `mr.Variable` behind it.
    is_stranger: Callable[[object], bool] = lambda value: False
    #: Returns the `mr.Variable` behind a variable, and any other value unchanged.
    own_variable: Callable[[object], Any] = lambda value: value
    #: Returns the `mr.Variable`s of a model or optimizer by name, and any other value unchanged.
    tree_of: Callable[[object], Any] = lambda value: value
    #: Returns the positions of a tree's leaves that are constants of the program if they are Python numbers.
    static_leaves: Callable[[Any], frozenset[int]] | None = None
    objects: Objects | None = None
    #: Returns lines for `strategy.explain()` about programs that the library itself has compiled for a mesh.
    describe: Callable[[ReplicaMesh], list[str]] = lambda mesh: []
    #: Returns a better error for one raised in a trace, given the arguments by name, and the user's line.
    explain: Callable[[Exception, Iterable[tuple[str, PyTree]], str], Exception | None] = lambda error, arguments, where: None
