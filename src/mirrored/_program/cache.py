"""The programs of one strategy: a cache, and a watch for functions that are compiled again and again."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from .._errors import RecompilationWarning
from .._jax import user_code
from .call import ArrayLeaf, Call, leaf_names

#: Programs kept per strategy, least recently used first out.
MAX_PROGRAMS = 256
#: So many programs of one function are normal (a few shapes, training and not); more are reported once.
MAX_SILENT_RECOMPILATIONS = 8

#: Told of each program that is made, and why it is another than the function's last one ("" for the first).
listeners: list[Callable[[Any, str], None]] = []

ProgramT = TypeVar("ProgramT")


class Programs(Generic[ProgramT]):
    """A cache of the programs of one strategy, which notices a function that is compiled again and again."""

    def __init__(self) -> None:
        self._programs: collections.OrderedDict[Any, ProgramT] = collections.OrderedDict()
        self._last_calls: dict[Any, tuple[int, Call]] = {}
        self._reported: set[Any] = set()

    def __iter__(self) -> Iterator[ProgramT]:
        return iter(self._programs.values())

    def get(self, key: Any) -> ProgramT | None:
        program = self._programs.get(key)
        if program is not None:
            self._programs.move_to_end(key)
        return program

    def add(self, call: Call, program: ProgramT, counted: Any = None) -> None:
        """Keep a program.

        Args:
            call: the call it was made for.
            program: the program.
            counted: whose compilations are counted. Default: those of the function's code, because a step is often a
                new function in each turn of a loop.
        """
        self._programs[call.key] = program
        while len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)
        counted = id(getattr(call.function, "__code__", call.function)) if counted is None else counted
        count, before = self._last_calls.get(counted, (0, call))
        self._last_calls[counted] = (count + 1, call._replace(arrays=[]))
        self._warn(counted, before, call, count)
        for tell in listeners:
            tell(program, _reason(before, call) if count else "")

    def _warn(self, counted: Any, before: Call, call: Call, count: int) -> None:
        if count < MAX_SILENT_RECOMPILATIONS or counted in self._reported:
            return
        self._reported.add(counted)
        message = _recompilation_message(before, call, count + 1)
        warnings.warn(message, RecompilationWarning, stacklevel=user_code.user_stacklevel())


def _recompilation_message(before: Call, after: Call, count: int) -> str:
    name = getattr(after.function, "__qualname__", repr(after.function))
    return f"{name} has been compiled {count} times; this time because {_reason(before, after)}"


def _reason(before: Call, after: Call) -> str:
    """Say what in a call needs another program than a call before, and how it could be the same."""
    if before.treedef != after.treedef:
        return "the structure of its arguments changed. Pass arguments of one structure."
    for leaf_name, old, new in zip(leaf_names(after), before.leaves, after.leaves, strict=True):
        if isinstance(old, ArrayLeaf) and isinstance(new, ArrayLeaf) and old != new:
            is_kind = (old.shape, old.dtype, old.shapes) == (new.shape, new.dtype, new.shapes)
            remedy = "Pass values of one kind." if is_kind else "Give batches one shape, for example with drop_remainder=True."
            return f"the argument {leaf_name} changed from shape {_type_of(old)} to {_type_of(new)}. {remedy}"
        if isinstance(new, ArrayLeaf) and isinstance(old, tuple) and not isinstance(old, ArrayLeaf):
            return f"the argument {leaf_name} is no longer always {_shown(old)}: from now on it is passed to the program."
        if not isinstance(new, ArrayLeaf) and old != new:
            return (
                f"the argument {leaf_name} changed from {_shown(old)} to {_shown(new)}. Python numbers, strings and objects are "
                "compiled into the program. Pass a value that changes as an array: jnp.asarray(value)."
            )
    return (
        "something that it closes over is another object than before. Define the step once, outside the loop, and pass what "
        "changes as an argument."
    )


def _type_of(leaf: ArrayLeaf) -> str:
    text = f"{leaf.shape} {leaf.dtype}"
    if leaf.shapes is not None:
        return f"{text} (of which the replicas have {', '.join(map(str, leaf.shapes))})"
    return text + " on each replica" * leaf.is_per_replica + " of a Python number" * leaf.is_weak


def _shown(leaf: Any) -> str:
    return f"an array of shape {leaf.shape}" if isinstance(leaf, ArrayLeaf) else repr(leaf[0])
