"""The cache of programs: finds, evicts, says why a function was compiled again, and warns of many compilations."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import optax
from jax.tree_util import PyTreeDef

from .._errors import RecompilationWarning
from .._jax import tracing, user_code
from .._text import shown
from .._typing import PyTree, UserFunction
from .._variables.variable import Variable, spec_of
from .call import ArrayLeaf, Call, leaf_names, static_key
from .guards import FastPath, fast_path_to, match
from .own_code import Guards, Sight, content_key
from .program import Program

ProgramT = TypeVar("ProgramT", bound=Program)

#: Programs kept per strategy, least recently used first out; beyond `MAX_FORGOTTEN` only those that were called lately.
MAX_PROGRAMS, MAX_FORGOTTEN, LATELY_SECONDS = 256, 64, 600.0
MAX_FAST_PATHS = 128
#: So many programs of one function are normal (a few shapes, training and not); more are reported once.
MAX_SILENT_RECOMPILATIONS = 8

#: Called with each program that is made, and the reason why the function's last one did not fit ("" for the first).
listeners: list[Callable[[Any, str], None]] = []

_all: weakref.WeakSet[Programs[Any]] = weakref.WeakSet()
#: By `id`, what holds and returns an object without weak references, one for all programs. Such as a dict of parameters, which a
#: step closes over: it and its arrays may not live until the cache is full, so a pin that alone holds its object ends.
_pins: weakref.WeakValueDictionary[int, Callable[[], Any]] = weakref.WeakValueDictionary()


class CacheEntry(Generic[ProgramT]):
    """A program that is kept as long as the objects that its key or guards know by identity."""

    def __init__(self, program: ProgramT, key: tuple[Any, ...], guards: Guards, cause: str) -> None:
        self.program, self.key, self.guards = program, key, guards
        self.cause = cause  # why the program before of its function did not fit
        self.hash = hash(key)  # as it is now: later the key's objects may have another one, and may not be compared any more
        self.used = time.monotonic()
        self.fast_path: FastPath[ProgramT] | None = None
        self.is_found = False  # by a second call, which has looked for a fast path
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
        """Tell whether only its pin keeps some object alive."""
        return any(sys.getrefcount(pin()) <= 2 for pin in self._pinned)  # one of the pin, one of the argument


class Programs(Generic[ProgramT]):
    """A cache of the programs of one strategy.

    A program is dropped when the first of its variables, or of the objects that its guards know by identity, is collected: a
    model that is dropped takes its programs with it. A function may be made anew for each step, so its code and the values that
    it closes over stand for it.
    """

    def __init__(self) -> None:
        self._by_hash: dict[int, list[CacheEntry[ProgramT]]] = {}  # of their keys, which are compared for calls only
        #: Least recently used first.
        self._entries: collections.OrderedDict[CacheEntry[ProgramT], None] = collections.OrderedDict()
        self._seen: collections.OrderedDict[tuple[int, ...], _Seen] = collections.OrderedDict()
        self._last: CacheEntry[ProgramT] | None = None  # of the last call
        self.fast_paths: dict[int, FastPath[ProgramT]] = {}  # of the last calls, by the `id` of a function and of its code
        _all.add(self)

    def __iter__(self) -> Iterator[ProgramT]:
        return iter([entry.program for entry in list(self._entries)])

    def causes(self) -> list[tuple[ProgramT, str]]:
        """Return the programs, each with the reason why the one before of its function did not fit; "" for the first."""
        return [(entry.program, entry.cause) for entry in list(self._entries)]

    def get(
        self, key: tuple[Any, ...], functions: tuple[UserFunction, ...], args: Sequence[Any] | None = None
    ) -> ProgramT | None:
        """Return the program of a call, if there is one; with `args`, later calls may take a fast path.

        See `key_of` for a call's key and functions.
        """
        last = self._last
        found = last if last is not None and key == last.key else None  # need not hash its key
        if found is None or not match(found.guards, functions):
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

    def made_for_last(
        self, coming: PyTree | None, take_apart: Callable[..., Call], make: Callable[[Call], ProgramT]
    ) -> list[tuple[Call, ProgramT]]:
        """Make the program for a dataset's last batch, `coming`, unless that is unknown or has one; it compiles later."""
        later = None if coming is None else take_apart(*coming)
        if later is None or self.get(later.key, later.functions) is not None:
            return []
        try:
            return [(later, make(later))]
        except Exception as error:
            num_rows = next(sum(rows for rows, *_ in leaf.shapes) for leaf in later.array_leaves() if leaf.shapes is not None)
            note = (
                f"Nothing has run yet: this is about the last batch of the dataset, of {num_rows} rows, for which a new step is "
                "traced at once. If the loop ends before it, say so: dataset.take(steps)."
            )
            notes = getattr(error, "__notes__", [])
            error.__notes__ = [*notes[:1], note, *notes[1:]]  # after the replicas that it is about, before JAX's own
            raise

    def add(self, call: Call, program: ProgramT, sight: Sight, owner: Any = None, also: Sequence[Any] = ()) -> None:
        """Keep the program of a call that sees this, until the end of what it sees, of its variables or of `also`.

        Compilations are counted for an owner and its variables, so that the folds of a cross-validation are silent. The owner is
        by default the function's code, because a step is often a new function in each turn of a loop.
        """
        _drop_ended()
        if owner is None:
            function = inspect.unwrap(call.function)  # all functions that a decorator makes have one code
            owner = getattr(function, "__code__", function)
        leaves = [leaf if isinstance(leaf, ArrayLeaf) else (static_key(leaf[0]), shown(leaf[0])) for leaf in call.leaves]
        named = {name: content_key(value) for name, value in sight.named.items()}
        structure, variables = Structure(call.treedef, leaves, named, tracing.settings()), program.lifted.variables
        before, count = self._count(owner, variables, structure)
        cause = "" if before is None else _reason(before, structure, leaf_names(call))
        entry = CacheEntry(program, call.key, sight.guards, cause)
        entry.end_with((*sight.objects, *variables, *also), functools.partial(_drop_from, weakref.ref(self), weakref.ref(entry)))
        self._insert(entry, call.functions)
        self._make_room()
        for tell in listeners:
            tell(program, cause)
        if count == MAX_SILENT_RECOMPILATIONS + 1:
            name = getattr(call.function, "__qualname__", None) or shown(call.function)
            user_code.warn(f"{name} has been compiled {count} times; this time because {cause}", RecompilationWarning)

    def _insert(self, entry: CacheEntry[ProgramT], functions: tuple[UserFunction, ...]) -> None:
        """Make an entry that of the last call, in place of any that other threads have made meanwhile."""
        of_short = set(map(id, list(self.fast_paths.values())))
        for used in list(self._entries):  # lists, because garbage is collected at any time
            if used is self._last or id(used.fast_path) in of_short:
                self._touch(used)  # its calls have not, to be fast
        alike = [other for other in self._by_hash.get(entry.hash, ()) if other.key == entry.key]
        for made_meanwhile in [other for other in alike if match(other.guards, functions)]:
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

    def _count(self, owner: Any, variables: Sequence[Variable], structure: Structure) -> tuple[Structure | None, int]:
        """Return the structure of the call for which a function's last program was made, and the number of its programs."""
        key = (id(owner), *sorted(spec_of(variable).number for variable in variables))
        seen = self._seen.pop(key, None)
        if seen is None or seen.owner() is not owner:
            seen = _Seen(_refer_to(owner), 0, None)
        self._seen[key] = _Seen(seen.owner, seen.times + 1, structure)
        while len(self._seen) > 4 * MAX_PROGRAMS:
            self._seen.popitem(last=False)
        return seen.structure, seen.times + 1

    def drop(self, entry: CacheEntry[ProgramT]) -> None:
        """Keep a program no longer; it may have been dropped before."""
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
    """Drop the entries, of all strategies, of which only a pin keeps some object alive."""
    for programs in list(_all):
        for entry in [entry for entry in list(programs._entries) if entry.has_ended()]:
            programs.drop(entry)


# -- functions that are compiled again and again


class Structure(NamedTuple):
    """The structure of a call, without the objects in it, so that it keeps none of them alive."""

    treedef: Any
    leaves: list[ArrayLeaf | tuple[Hashable, str]]  # of a static value: its key, and how it is shown
    named: dict[str, Hashable]  # see `Sight`: name -> `content_key`
    settings: tuple[Any, ...]  # JAX's


class _Seen(NamedTuple):
    """The compilations of a function."""

    owner: Callable[[], Any]  # returns the function, or its code; None when it is gone, and another may have its `id`
    times: int
    structure: Structure | None  # of the last call for which a program was made


def _refer_to(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: None


def _structure_reason(before: PyTreeDef, after: PyTreeDef) -> str:
    """Say in which node two treedefs differ, where it is what the node has besides its children."""
    old, new = before.node_data(), after.node_data()
    if old == new:
        pairs = zip(before.children(), after.children(), strict=False)
        if (differing := next((pair for pair in pairs if pair[0] != pair[1]), None)) is not None:
            return _structure_reason(*differing)
    elif old and new and list(_transformations(old[1])) != list(_transformations(new[1])):
        return (
            "an optax transformation in its arguments is another object than before, and its functions are compiled into the "
            "program. Make it once, before the loop, and give it to each state: tx = optax.adam(0.1); TrainState.create(tx=tx, "
            "...). A rate that changes is a number of its state: optax.inject_hyperparams(optax.adam)(learning_rate=0.1)."
        )
    return "the structure of its arguments changed. Pass arguments of one structure."


def _transformations(fixed: object) -> Iterator[object]:
    """Yield the transformations of optax among what a node of a pytree has besides its children, as train states and NNX have."""
    if isinstance(fixed, optax.GradientTransformation):
        yield fixed
        return
    if dataclasses.is_dataclass(fixed):
        fixed = [getattr(fixed, field.name, None) for field in dataclasses.fields(fixed)]
    for part in fixed.values() if isinstance(fixed, dict) else fixed if isinstance(fixed, tuple | list) else ():
        yield from _transformations(part)


def _reason(before: Structure, after: Structure, names: Sequence[str]) -> str:
    """Say which difference between two calls needs another program, and how to avoid it."""
    if before.treedef != after.treedef:
        return _structure_reason(before.treedef, after.treedef)
    for leaf_name, old, new in zip(names, before.leaves, after.leaves, strict=True):
        if old == new:
            continue
        if isinstance(old, ArrayLeaf) and isinstance(new, ArrayLeaf):
            is_kind = (old.shape, old.dtype, old.shapes) == (new.shape, new.dtype, new.shapes)
            remedy = "Pass values of one kind." if is_kind else "Give batches one shape, for example with drop_remainder=True."
            if old.shape[1:] != new.shape[1:]:  # drop_remainder would not help
                remedy = (
                    "Rows of each shape need a program of their own. Pad them to a few lengths, such as powers of two: up to "
                    f"{MAX_SILENT_RECOMPILATIONS} programs are normal. If you want more, say so before the loop: "
                    "warnings.simplefilter('ignore', mr.RecompilationWarning)."
                )
            return f"the argument {leaf_name} changed from shape {_type_of(old)} to {_type_of(new)}. {remedy}"
        return (
            f"the argument {leaf_name} changed from {_shown(old)} to {_shown(new)}. Strings, bools, functions and other "
            "objects are compiled into the program. Pass a value that changes as a number or an array."
        )
    for name, new in after.named.items():
        if (old := before.named.get(name, new)) == new:
            continue
        if isinstance(old, tuple) and isinstance(new, tuple):
            return (
                f"{name}, which it reads, changed from {_content(old)} to {_content(new)}. What a step reads is compiled into "
                "it. Pass what changes as an argument: strategy.run(step, args=(batch, value))."
            )
        return (
            f"{name}, which it reads, is another object than before. Define functions once, outside of the loop, and pass an "
            "array that changes as an argument: strategy.run(step, args=(batch, array))."
        )
    if before.settings != after.settings:
        return "a setting of JAX is another, as with jax.enable_x64. Leave JAX's settings as they are between steps."
    return "something that it closes over is another object. Define the step once, outside of the loop, and pass what changes."


def _content(key: tuple[Any, Any]) -> str:
    """Show the value of a `content_key`, which has numbers as texts."""
    return key[1] if isinstance(key[1], str) and not issubclass(key[0], str) else shown(key[1])


def _type_of(leaf: ArrayLeaf) -> str:
    text = f"{leaf.shape} {leaf.dtype}"
    if leaf.shapes is not None:
        return f"{text} (of which the replicas have {', '.join(map(str, leaf.shapes))})"
    return text + " on each replica" * leaf.is_per_replica + " of a Python number" * leaf.is_weak


def _shown(leaf: ArrayLeaf | tuple[Hashable, str]) -> str:
    return f"an array of shape {leaf.shape}" if isinstance(leaf, ArrayLeaf) else leaf[1]
