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
    """The objects of a library that hold arrays: a step takes the arrays, and the objects get their new values when it ends."""

    is_one: Callable[[object], bool]
    is_whole: Callable[[object], bool]  # whether a value is an object, or a tree of arrays that must not be looked into for them
    take_apart: Callable[[list[Any]], Apart]
    put_together: Callable[[Any, list[Any]], list[Any]]  # makes new objects, in a step's trace
    changed: str  # what is raised when the step at {where} has changed the structure of an object
    remedy: str = ""  # what to write, beside other lines, when the value of an array would differ by replica
    #: Around a step's function: random streams become a replica's own, metrics are combined at the end.
    on_replica: Callable[[list[Any], ReplicaContext], AbstractContextManager[None]] = lambda *_: contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Library:
    """A model library. It is asked only after the program has imported its `package`; what it leaves out needs nothing."""

    package: str  # with which the module names of its classes begin
    name: str
    before: str  # for messages: the lines before a step,
    inside: str  # and in it
    unbuilt: str = ""  # why a model may have no variables yet

    #: Around a strategy's scope, also if the library has not been imported yet.
    scope: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    #: In scopes and traces: a class, a method's name, and our method, which gets the old one as its first argument.
    replaced: Callable[[], Iterable[tuple[type, str, Callable[..., Any]]]] = tuple
    #: Calls a function that traces user code, or runs it eagerly, for variables on a mesh; whether it may do so again.
    traced: Callable[[Callable[[], Any], ReplicaMesh | None, bool], Any] = lambda trace, mesh, may_repeat: trace()
    #: Calls a function that may make variables, for which there are none yet.
    build: Callable[[Callable[[], Any]], None] = lambda call: None
    #: Whether a value is a variable of the library that has no `mr.Variable` behind it yet.
    is_stranger: Callable[[object], bool] = lambda value: False
    #: Returns the `mr.Variable` behind a variable, and any other value unchanged.
    own_variable: Callable[[object], Any] = lambda value: value
    #: Returns the `mr.Variable`s of a model or optimizer by name, and any other value unchanged.
    tree_of: Callable[[object], Any] = lambda value: value
    #: Which leaves of a tree, by number, are compiled in if they are numbers.
    static_leaves: Callable[[Any], frozenset[int]] | None = None
    objects: Objects | None = None
    #: What it has compiled itself for a mesh, for `strategy.explain()`.
    describe: Callable[[ReplicaMesh], list[str]] = lambda mesh: []
    #: Returns a better error for one raised in a trace, given the arguments by name, and the user's line.
    explain: Callable[[Exception, Iterable[tuple[str, PyTree]], str], Exception | None] = lambda error, arguments, where: None
