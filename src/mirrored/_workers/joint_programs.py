"""Programs that several workers run together: all agree on each before it runs for the first time, and the guard sees each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._jax import user_code
from . import runtime
from .coordination import digest
from .progress import progress
from .runtime import Runtime

#: A compiled program: of a `jax.jit`, so it has `lower`.
Compiled = Any


def agree(name: str, text: str) -> None:
    """Compare a new program with the other workers'; raise ProgramMismatchError unless all workers give the same text."""
    _required().agreement.check(name, text, digest(text).encode(), _line())


def exchange(name: str, value: Any) -> Sequence[Any]:
    """Give a JSON value to all workers, and return all workers' values; the guard sees that this worker waits."""
    with progress.phase(name, waits=True):
        return _required().coordination.exchange(name, value)


def of_chief(name: str, value: Any) -> Any:
    """Return worker 0's JSON value, after an `exchange`; the guard sees that this worker waits."""
    with progress.phase(name, waits=True):
        return _required().coordination.of_chief(name, value)


def note(what: str, text: str) -> None:
    """Add to the history an operation other than a program, which all workers must do alike and in the same order."""
    key, where = text.encode(), _line()
    if (agreement := _required().agreement).checks_order:
        agreement.check(what, text, key, where)
    progress.did(what, key, where)


@dataclasses.dataclass(frozen=True, slots=True)
class Announced:
    """A program that is announced before each start. A caller can run its parts one by one, to hold a lock in the last only."""

    program: Callable[..., Any]
    compare: Callable[[], None]  # waits for the other workers, if they may have come to another program
    announce: Callable[..., None]  # takes the program's arguments

    def __call__(self, *arguments: Any) -> Any:
        self.compare()
        self.announce(*arguments)
        return self.program(*arguments)


def prepared(name: str, text: str, program: Compiled, *, is_run: bool = False, is_update: bool = False) -> Announced:
    """Agree on a program, and return one that tells the guard when it is compiled and when it starts.

    A run is a step or `mr.function` of the user's; an update is a run that writes mirrored variables, as training does.
    """
    agree(name, text)
    start, is_compiled = started(name, text, program, is_run, is_update), False

    def announce(*arguments: Any) -> None:
        nonlocal is_compiled
        if not is_compiled:
            with progress.phase(f"compiling {name}", is_patient=True):
                program.lower(*arguments).compile()  # the call that follows finds it
            is_compiled = True
        start.announce(*arguments)

    return Announced(program, start.compare, announce)


def started(name: str, text: str, program: Callable[..., Any], is_run: bool = False, is_update: bool = False) -> Announced:
    """Return a program that tells the guard when it starts; an unexpected one is first compared with the other workers'."""
    agreement, key, where, habits = _required().agreement, digest(text).encode(), f"first at {_line()}", progress.habits

    def compare() -> None:
        if key != habits.next or agreement.checks_order:
            agreement.check(name, text, key, _line())

    def announce(*arguments: Any) -> None:
        progress.enter(name, key, is_run, where)
        progress.runs += is_run
        progress.updates += is_update

    return Announced(program, compare, announce)


def agreed(name: str, text: str, program: Compiled) -> Callable[..., Any]:
    """Return a program of one array or a list of arrays that is `prepared` for each new shape and dtype."""
    known: dict[Any, Callable[..., Any]] = {}

    def call(given: jax.Array | list[jax.Array]) -> Any:
        arrays = given if isinstance(given, list) else [given]
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            return program(given)
        kinds = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        if kinds not in known:
            known[kinds] = prepared(name, f"{name}{text} of {kinds}", program)
        return known[kinds](given)

    return call


def _line() -> str:
    """Return the user's line, without folders, which may differ by worker."""
    return user_code.user_line().rpartition(os.sep)[2]


def _required() -> Runtime:
    found = runtime.current()
    assert found is not None, "a program of several workers, and no cluster"
    return found
