"""Counts the programs that a block of code compiles, with the reasons."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .._jax import compilations
from .._options import check_int
from .._program import recompilations
from .._program.program import program_compiled
from .._text import counted

_AGAIN = "the same program again, because jax.clear_caches() was called, or some arrays lie on other devices than before."


class ProgramCount:
    """The programs that a block of `testing.count_programs` compiled.

    Attributes:
        count: their number.
        names: the functions passed to `strategy.run` and `mr.function`, in the order of compilation.
        reasons: for each program, why the function's last program did not fit; "" for its first.
        others: JAX's names of all other compiled programs, such as `strategy.reduce`, and operations outside of steps.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.reasons: list[str] = []
        self.others: list[str] = []
        self._reasons: dict[int, str] = {}  # id of a program -> why it is compiled; a new program may have an old id

    @property
    def count(self) -> int:
        """The number of compiled programs."""
        return len(self.names)

    def __repr__(self) -> str:
        return f"ProgramCount(count={self.count}, names={self.names})"

    def describe(self) -> str:
        """List the programs, one a line, with the reasons."""
        return "\n".join(
            f"  {number}. {name}" + f": {reason}" * bool(reason)
            for number, (name, reason) in enumerate(zip(self.names, self.reasons, strict=True), 1)
        )

    def _note_made(self, program: Any, reason: str) -> None:
        self._reasons[id(program)] = reason

    def _note_compiled(self, name: str) -> None:
        program = program_compiled(name)
        if program is None:
            self.others.append(name)
            return
        self.reasons.append(self._reasons.get(id(program), ""))
        self._reasons[id(program)] = _AGAIN
        self.names.append(program.name)


@contextlib.contextmanager
def count_programs() -> Iterator[ProgramCount]:
    """Count the programs that are compiled inside this block.

    `strategy.run` and `mr.function` compile a program for each function, structure, and set of shapes and static values. A step
    inside an `mr.function` is part of its program, and `mr.eager()` compiles none. Programs that were compiled before the block
    are not compiled again. The programs of all threads count.

    Returns:
        A `testing.ProgramCount` that grows while the block runs.

    >>> from mirrored import testing
    >>> def step(x):
    ...     return x * 2
    >>> with testing.count_programs() as programs:
    ...     for size in (4, 4, 3):
    ...         _ = strategy.run(step, args=(np.zeros(size),))
    >>> programs.count, programs.names
    (2, ['step', 'step'])
    """
    found = ProgramCount()
    recompilations.listeners.append(found._note_made)
    try:
        with compilations.heard(found._note_compiled):
            yield found
    finally:
        recompilations.listeners.remove(found._note_made)


@contextlib.contextmanager
def assert_compiles(count: int) -> Iterator[ProgramCount]:
    """Fail unless an exact number of programs is compiled inside this block.

    Args:
        count: the expected number, 0 for a loop that is warm. See `testing.count_programs`.

    Raises:
        AssertionError: for another number; it lists the programs, and why each was compiled.
        TypeError, ValueError: when `count` is no number of programs.

    >>> from mirrored import testing
    >>> def step(x):
    ...     return x * 2
    >>> with testing.assert_compiles(1):
    ...     for _ in range(3):
    ...         _ = strategy.run(step, args=(np.zeros(4),))
    """
    check_int("count", count, 0, "programs that the block compiles")
    with count_programs() as programs:
        yield programs
    if programs.count == count:
        return
    hint = ":"
    if programs.count < count:
        hint = ". What was compiled before the block is not compiled again: make the strategy, or the step, inside of it."
    lines = [f"expected {count}{hint}", *filter(None, [programs.describe()])]
    verb = "was" if programs.count == 1 else "were"
    raise AssertionError(f"{counted(programs.count, 'program')} {verb} compiled in the block, " + "\n".join(lines))
