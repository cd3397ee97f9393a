"""The cache of programs: which program does a call run, and how long is it kept?"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from .._typing import UserFunction
from .call import Call
from .guards import FastPath, fast_path_to, match
from .own_code import Guards, Sight
from .program import Program

ProgramT = TypeVar("ProgramT", bound=Program)

#: Programs kept per strategy, least recently used first out; beyond `MAX_FORGOTTEN` only those that were called lately.
MAX_PROGRAMS, MAX_FORGOTTEN, LATELY_SECONDS = 256, 64, 600.0
MAX_FAST_PATHS = 128

_all: weakref.WeakSet[Programs[Any]] = weakref.WeakSet()
#: `id` -> a function that holds and returns an object without weak references, such as a dict of parameters. It is held so that
#: no other object gets its `id`. Nothing tells when others drop it, so `_drop_ended` counts references, or its arrays would live
#: until the cache is full. All programs share one pin, because two pins would hold the object for each other.
_pins: weakref.WeakValueDictionary[int, Callable[[], Any]] = weakref.WeakValueDictionary()


class CacheEntry(Generic[ProgramT]):
    """A cached program. It is evicted when an object that its key or guards compare by identity is collected."""

    def __init__(self, program: ProgramT, key: tuple[Any, ...], guards: Guards, cause: str) -> None:
        self.program, self.key, self.guards = program, key, guards
        self.cause = cause  # why the function's last program did not fit
        self.hash = hash(key)  # kept, because the key's objects may change their hash, and may not be comparable later
        self.used = time.monotonic()
        self.fast_path: FastPath[ProgramT] | None = None
        self.is_found = False  # whether a second call has looked for a fast path
        self._references: list[weakref.ref[Any]] = []
        self._pinned: list[Callable[[], Any]] = []

    def end_with(self, targets: Iterable[Any], ended: Callable[[Any], None]) -> None:
        """Call `ended` when the first of some objects is collected, before another object can get its `id`."""
        for target in {id(target): target for target in targets}.values():
            try:
                self._references.append(weakref.ref(target, ended))
            except TypeError:
                self._pinned.append(_pins.setdefault(id(target), lambda target=target: target))

    def has_ended(self) -> bool:
        """Tell whether some object of the key is kept alive by this entry's pin alone."""
        return any(sys.getrefcount(pin()) <= 2 for pin in self._pinned)  # one of the pin, one of the argument


class Programs(Generic[ProgramT]):
    """A cache of the programs of one strategy.

    A program is evicted when one of its variables is collected, or an object that its guards compare by identity. So a model's
    programs end with the model. Functions are compared by code and closed-over values, because a loop may define them anew.
    """

    def __init__(self) -> None:
        self._by_hash: dict[int, list[CacheEntry[ProgramT]]] = {}  # of their keys, which are compared for calls only
        #: Least recently used first.
        self._entries: collections.OrderedDict[CacheEntry[ProgramT], None] = collections.OrderedDict()
        self._last: CacheEntry[ProgramT] | None = None  # of the last call
        self.fast_paths: dict[int, FastPath[ProgramT]] = {}  # of the last calls, by the `id` of a function and of its code
        _all.add(self)

    def __iter__(self) -> Iterator[ProgramT]:
        return iter([entry.program for entry in list(self._entries)])

    def causes(self) -> list[tuple[ProgramT, str]]:
        """Return each program with the reason for its compilation; "" for the first program of a function."""
        return [(entry.program, entry.cause) for entry in list(self._entries)]

    def get(
        self, key: tuple[Any, ...], functions: tuple[UserFunction, ...], args: Sequence[Any] | None = None
    ) -> ProgramT | None:
        """Return the program of a call (see `key_of`), if there is one; with `args`, later calls may take a fast path."""
        found = self._last  # first, because it need not hash its key
        if found is None or key != found.key or not match(found.guards, functions):
            alike = [entry for entry in list(self._by_hash.get(hash(key), ())) if entry.key == key]
            found = next((entry for entry in alike if match(entry.guards, functions)), None)
            if found is None:
                return None
            self._last = found
            self._touch(found)
        if args is not None:
            self._shorten(found, functions[0], args)
        return found.program

    def _shorten(self, entry: CacheEntry[ProgramT], function: UserFunction, args: Sequence[Any]) -> None:
        """Let later calls like this one take the entry's fast path, if it has one."""
        if not entry.is_found:
            entry.is_found = True
            entry.fast_path = fast_path_to(entry.key, entry.program, entry.guards, args, entry.program.mesh.stacked)
        if entry.fast_path is not None:
            if len(self.fast_paths) > MAX_FAST_PATHS:  # functions that are made anew for each call have new ones
                self.fast_paths.clear()
            for known in (function, getattr(function, "__code__", None)):
                self.fast_paths[id(known)] = entry.fast_path
            if entry not in self._entries:  # it was just dropped
                self._forget(entry)

    def _forget(self, entry: CacheEntry[ProgramT]) -> None:
        known = list(self.fast_paths.items())  # at once: another thread may add one
        self.fast_paths = {key: path for key, path in known if path is not entry.fast_path}

    def _touch(self, entry: CacheEntry[ProgramT]) -> None:
        entry.used = time.monotonic()
        with contextlib.suppress(KeyError):  # it was just dropped: garbage is collected at any time
            self._entries.move_to_end(entry)

    def add(self, call: Call, program: ProgramT, sight: Sight, cause: str) -> None:
        """Cache a program until one of its variables, or of the objects that the call sees, is collected."""
        _drop_ended()
        entry = CacheEntry(program, call.key, sight.guards, cause)
        targets = (*sight.objects, *program.lifted.variables)
        entry.end_with(targets, functools.partial(_drop_from, weakref.ref(self), weakref.ref(entry)))
        self._insert(entry, call.functions)
        self._make_room()

    def _insert(self, entry: CacheEntry[ProgramT], functions: tuple[UserFunction, ...]) -> None:
        """Add an entry, as that of the last call; drop equal entries that other threads have made meanwhile."""
        of_short = set(map(id, list(self.fast_paths.values())))
        for used in list(self._entries):  # lists, because garbage is collected at any time
            if used is self._last or id(used.fast_path) in of_short:
                self._touch(used)  # its calls have not, to be fast
        alike = [known for known in self._by_hash.get(entry.hash, ()) if known.key == entry.key]
        for made_meanwhile in [known for known in alike if match(known.guards, functions)]:
            self.drop(made_meanwhile)
        self._by_hash.setdefault(entry.hash, []).insert(0, entry)
        self._entries[entry] = None
        self._last = entry

    def _make_room(self) -> None:
        """Drop the entries that were used least recently, if there are too many."""
        while len(self._entries) > MAX_FORGOTTEN:
            oldest = next(iter(self._entries))
            if len(self._entries) <= MAX_PROGRAMS and oldest.used > time.monotonic() - LATELY_SECONDS:
                break
            self.drop(oldest)

    def drop(self, entry: CacheEntry[ProgramT]) -> None:
        """Evict a program, unless that has happened before."""
        if self._entries.pop(entry, self) is self:
            return
        self._by_hash[entry.hash].remove(entry)
        if not self._by_hash[entry.hash]:
            del self._by_hash[entry.hash]
        if self._last is entry:
            self._last = None
        self._forget(entry)


def _drop_from(programs: weakref.ref[Programs[Any]], entry: weakref.ref[CacheEntry[Any]], _: object) -> None:
    if (found := programs()) is not None and (ended := entry()) is not None:
        found.drop(ended)


def _drop_ended() -> None:
    """Evict, for all strategies, the entries that have ended: see `has_ended`."""
    for programs in list(_all):
        for entry in [entry for entry in list(programs._entries) if entry.has_ended()]:
            programs.drop(entry)
