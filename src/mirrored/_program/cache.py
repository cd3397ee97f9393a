"""The programs of one strategy: a cache, and a watch for functions that are compiled again and again."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from .._errors import RecompilationWarning
from .._jax import tracing, user_code
from .._text import shown
from .._typing import UserFunction
from .._variables.variable import Variable, spec_of
from .call import ArrayLeaf, Call, leaf_names, static_key
from .guards import FastPath, fast_path_to, match
from .own_code import Guards
from .program import Program

ProgramT = TypeVar("ProgramT", bound=Program)

#: Programs kept per strategy, least recently used first out; of more than `MAX_FORGOTTEN`, only those that were called lately.
MAX_PROGRAMS, MAX_FORGOTTEN, LATELY_SECONDS = 256, 64, 600.0
#: So many programs of one function are normal (a few shapes, training and not); more are reported once.
MAX_SILENT_RECOMPILATIONS = 8

#: Told of each program that is made, and why it is another than the function's last one ("" for the first).
listeners: list[Callable[[Any, str], None]] = []

_all: weakref.WeakSet[Programs[Any]] = weakref.WeakSet()


class _Pin:
    """An object that cannot be referred to weakly, such as a dict, and is therefore kept alive; one for all programs."""

    __slots__ = ("__weakref__", "target")

    def __init__(self, target: Any) -> None:
        self.target = target


_pins: weakref.WeakValueDictionary[int, _Pin] = weakref.WeakValueDictionary()


class _Kept(Generic[ProgramT]):
    """A program that is kept as long as the objects that its key or guards know by identity.

    Attributes:
        program, key, guards: for calls of which key.
        cause: why it is another than the one before of its function.
        alike: those of this key, of which it is one.
        used: when it was asked for last.
    """

    __slots__ = ("__weakref__", "_pinned", "_references", "alike", "cause", "guards", "key", "program", "used")

    def __init__(self, program: ProgramT, key: tuple[Any, ...], guards: Guards, cause: str) -> None:
        self.program, self.key, self.guards, self.cause = program, key, guards, cause
        self.alike: list[_Kept[ProgramT]] = []
        self.used = time.monotonic()
        self._references: list[weakref.ref[Any]] = []
        self._pinned: list[_Pin] = []

    def end_with(self, targets: Iterable[Any], ended: Callable[[Any], None]) -> None:
        """Call `ended` when the first of some objects is collected: no call sees it again, until another has its `id`."""
        for target in {id(target): target for target in targets}.values():
            try:
                self._references.append(weakref.ref(target, ended))
            except TypeError:
                self._pinned.append(_pins.get(id(target)) or _pins.setdefault(id(target), _Pin(target)))

    def has_ended(self) -> bool:
        """Tell whether some object is kept alive by pins only."""
        return any(sys.getrefcount(pin.target) <= 2 for pin in self._pinned)  # the pin's own, and the argument


class Programs(Generic[ProgramT]):
    """A cache of the programs of one strategy, which notices a function that is compiled again and again.

    A program is dropped when the first of its variables, or of the objects that its guards know by identity, is collected: a
    model that is dropped takes its programs with it. A function may be made anew for each step, so it is known by its code and
    what it closes over.

    Attributes:
        fast_path: to the program of a call that was made twice in a row, while it is kept; None also when there is none.
    """

    def __init__(self) -> None:
        self._by_key: dict[Hashable, list[_Kept[ProgramT]]] = {}
        self._kept: collections.OrderedDict[_Kept[ProgramT], None] = collections.OrderedDict()  # used least lately first
        self._seen: collections.OrderedDict[tuple[int, ...], _Seen] = collections.OrderedDict()
        self._last: _Kept[ProgramT] | None = None  # that was asked for last
        self._short: _Kept[ProgramT] | None = None  # to which a fast path was looked for
        self.fast_path: FastPath[ProgramT] | None = None
        _all.add(self)

    def __iter__(self) -> Iterator[ProgramT]:
        return iter([kept.program for kept in list(self._kept)])

    def causes(self) -> list[tuple[ProgramT, str]]:
        """Return the programs, each with why it is another than the one before of its function; "" for the first."""
        return [(kept.program, kept.cause) for kept in list(self._kept)]

    def get(
        self, key: tuple[Any, ...], functions: tuple[UserFunction, ...], args: Sequence[Any] | None = None
    ) -> ProgramT | None:
        """Return the program of a call, if there is one.

        Args:
            key, functions: of the call; see `key_of`.
            args: its arguments, if a call like it may take a fast path from the second one on.
        """
        if (last := self._last) is not None and key == last.key and match(last.guards, functions):  # need not hash its key
            if args is not None and self._short is not last:
                self._shorten(last, args)
            return last.program
        for kept in list(self._by_key.get(key, ())):
            if match(kept.guards, functions):
                self._last = kept
                self._touch(kept)
                return kept.program
        return None

    def _touch(self, kept: _Kept[ProgramT]) -> None:
        kept.used = time.monotonic()
        with contextlib.suppress(KeyError):  # it has just ended: garbage is collected at any time
            self._kept.move_to_end(kept)

    def _shorten(self, kept: _Kept[ProgramT], args: Sequence[Any]) -> None:
        """Look for a fast path to a program that is asked for twice in a row; once, for there may be none."""
        self._short = kept
        self.fast_path = fast_path_to(kept.key, kept.program, kept.guards, args, kept.program.mesh.stacked)
        if kept not in self._kept:  # it has just ended
            self._short = self.fast_path = None

    def add(
        self, call: Call, program: ProgramT, variables: Sequence[Variable], owner: Any = None, also: Sequence[Any] = ()
    ) -> Structure | None:
        """Keep a program, and return what the call was like for which the function's last one was made, if any.

        Args:
            call, program: the program, and the call that it was made for. What the call sees is read after its trace, which may
                have set globals, such as a count of traces.
            variables: those that it reads or writes. Compilations are counted for an owner and its variables, so that the
                folds of a cross-validation are silent.
            owner: the function. Default: its code, because a step is often a new function in each turn of a loop.
            also: further objects with which the program ends.
        """
        for programs in list(_all):
            programs._drop_unreachable()
        if owner is None:  # of what a decorator wraps: all that it makes have one code
            function = inspect.unwrap(call.function)
            owner = getattr(function, "__code__", function)
        sight = call.sees()
        leaves = [leaf if isinstance(leaf, ArrayLeaf) else (static_key(leaf[0]), shown(leaf[0])) for leaf in call.leaves]
        structure = Structure(call.treedef, leaves, sight.named, tracing.settings())
        before, count = self._count(owner, variables, structure)
        cause = "" if before is None else _reason(before, structure, leaf_names(call))
        for used in (self._last, self._short):
            if used is not None:  # their calls did not say so
                self._touch(used)
        kept = _Kept(program, call.key, sight.guards, cause)
        drop = functools.partial(_drop_from, weakref.ref(self), weakref.ref(kept))
        kept.end_with((*sight.objects, *variables, *also), drop)
        for made_meanwhile in [alike for alike in self._by_key.get(call.key, ()) if match(alike.guards, call.functions)]:
            self.drop(made_meanwhile)  # by another thread
        kept.alike = self._by_key.setdefault(call.key, [])
        kept.alike.insert(0, kept)
        self._kept[kept] = None
        self._last = kept
        while len(self._kept) > MAX_FORGOTTEN:
            oldest = next(iter(self._kept))
            if len(self._kept) <= MAX_PROGRAMS and oldest.used > time.monotonic() - LATELY_SECONDS:
                break
            self.drop(oldest)
        for tell in listeners:
            tell(program, cause)
        if count == MAX_SILENT_RECOMPILATIONS + 1:
            name = getattr(call.function, "__qualname__", None) or shown(call.function)
            user_code.warn(f"{name} has been compiled {count} times; this time because {cause}", RecompilationWarning)
        return before

    def _count(self, owner: Any, variables: Sequence[Variable], structure: Structure) -> tuple[Structure | None, int]:
        """Return what the call was like for which a function's last program was made, if any, and how many there are now."""
        key = (id(owner), *sorted(spec_of(variable).number for variable in variables))
        seen = self._seen.pop(key, None)
        if seen is None or seen.owner() is not owner:
            seen = _Seen(_refer_to(owner), 0, None)
        self._seen[key] = _Seen(seen.owner, seen.times + 1, structure)
        while len(self._seen) > 4 * MAX_PROGRAMS:
            self._seen.popitem(last=False)
        return seen.structure, seen.times + 1

    def drop(self, kept: _Kept[ProgramT]) -> None:
        """Keep a program no longer."""
        if self._kept.pop(kept, self) is self:
            return  # it was dropped before
        kept.alike.remove(kept)  # the hash of an argument in its key may be another by now
        if not kept.alike and self._by_key.get(kept.key) is kept.alike:
            del self._by_key[kept.key]
        if self._last is kept:
            self._last = None
        if self._short is kept:
            self._short = self.fast_path = None

    def _drop_unreachable(self) -> None:
        """Drop programs with an object in their guards that has no weak references, and that only the pin still holds."""
        for kept in [kept for kept in list(self._kept) if kept.has_ended()]:
            self.drop(kept)


def _drop_from(programs: weakref.ref[Programs[Any]], kept: weakref.ref[_Kept[Any]], _: object) -> None:
    if (found := programs()) is not None and (ended := kept()) is not None:
        found.drop(ended)


# -- functions that are compiled again and again


class Structure(NamedTuple):
    """What a call was like, without the objects in it, so that it keeps none of them alive.

    Attributes:
        treedef: of the arguments.
        leaves: each an ArrayLeaf, or what is in the key of a static value, and how it is shown.
        named: what the function's own code names, and for each what is in the key.
        settings: JAX's.
    """

    treedef: Any
    leaves: list[ArrayLeaf | tuple[Hashable, str]]
    named: dict[str, Hashable]
    settings: tuple[Any, ...]


class _Seen(NamedTuple):
    """How often a function has been compiled.

    Attributes:
        owner: returns the function, or its code; None when it is gone, and its `id` may be another's.
        times: how many programs it has had.
        structure: of the last call for which one was made.
    """

    owner: Callable[[], Any]
    times: int
    structure: Structure | None


def _refer_to(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: None


def _reason(before: Structure, after: Structure, names: Sequence[str]) -> str:
    """Say what in a call needs another program than a call before, and how it could be the same."""
    if before.treedef != after.treedef:
        return "the structure of its arguments changed. Pass arguments of one structure."
    for leaf_name, old, new in zip(names, before.leaves, after.leaves, strict=True):
        if old == new:
            continue
        if isinstance(old, ArrayLeaf) and isinstance(new, ArrayLeaf):
            is_kind = (old.shape, old.dtype, old.shapes) == (new.shape, new.dtype, new.shapes)
            remedy = "Pass values of one kind." if is_kind else "Give batches one shape, for example with drop_remainder=True."
            return f"the argument {leaf_name} changed from shape {_type_of(old)} to {_type_of(new)}. {remedy}"
        return (
            f"the argument {leaf_name} changed from {_shown(old)} to {_shown(new)}. Strings, bools, functions and other "
            "objects are compiled into the program. Pass a value that changes as a number or an array."
        )
    for name, new in after.named.items():
        if (old := before.named.get(name, new)) != new:
            return _reason_of_name(name, old, new)
    if before.settings != after.settings:
        return "a setting of JAX is another, as with jax.enable_x64. Leave JAX's settings as they are between steps."
    return "something that it closes over is another object. Define the step once, outside of the loop, and pass what changes."


def _reason_of_name(name: str, old: Hashable, new: Hashable) -> str:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return (
            f"{name}, which it reads, changed from {_content(old)} to {_content(new)}. What a step reads is compiled into it. "
            "Pass what changes as an argument: strategy.run(step, args=(batch, value))."
        )
    return (
        f"{name}, which it reads, is another object than before. Define functions once, outside of the loop, and pass an array "
        "that changes as an argument: strategy.run(step, args=(batch, array))."
    )


def _content(key: tuple[Any, Any]) -> str:
    """Show the value that a `content_key` is of, which has the text of numbers."""
    return key[1] if isinstance(key[1], str) and not issubclass(key[0], str) else shown(key[1])


def _type_of(leaf: ArrayLeaf) -> str:
    text = f"{leaf.shape} {leaf.dtype}"
    if leaf.shapes is not None:
        return f"{text} (of which the replicas have {', '.join(map(str, leaf.shapes))})"
    return text + " on each replica" * leaf.is_per_replica + " of a Python number" * leaf.is_weak


def _shown(leaf: ArrayLeaf | tuple[Hashable, str]) -> str:
    return f"an array of shape {leaf.shape}" if isinstance(leaf, ArrayLeaf) else leaf[1]
