"""Plans a script again in other ways, each in its own process: with other rows, with parts of a batch, with divided state."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .._text import counted

#: The changes by which a device stores less: the command's flag, and the line that a user writes.
STORED_LESS = (
    ("--shard-state", "mr.Optimizer(..., shard_state=True)"),
    ("--storage=parts", 'mr.MirroredStrategy(storage="parts")'),
)
#: The numbers of parts to try for a device's rows; and a number of rows that no device needs, at which a search ends.
_PARTS, _TOO_MANY_ROWS = (2, 4, 8), 2**20


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of planning a script.

    Attributes:
        needs: the memory that its largest program needs, in words.
        rows: the rows of each replica in a batch of a distributed dataset; 0 without such a dataset.
        arguments: the kinds of arguments of its programs.
        text: the whole plan.
    """

    fits: bool
    needs: str
    rows: int
    replicas: int
    arguments: list[list[str]]
    text: str

    @property
    def verdict(self) -> str:
        result = "fits" if self.fits else "does not fit"
        return f"it needs {self.needs}: {result}"


class Command(NamedTuple):
    """What follows `mirrored plan`: its flags, and the script with its arguments."""

    flags: Sequence[str]
    script: Sequence[str]


def plan_with(command: Command, *flags: object) -> Trial | None:
    """Plan a script with more flags; None if the script fails with them."""
    more = [str(flag) for flag in flags]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trial.json")
        whole = [sys.executable, "-m", "mirrored", "plan", *command.flags, *more, "--trial", str(path), *command.script]
        done = subprocess.run(whole, capture_output=True, text=True, check=False)
        if path.exists():
            return Trial(**json.loads(path.read_text()))
    sys.stderr.write(f"mirrored plan: the script fails{' with ' if more else ''}{' '.join(more)}:\n{done.stderr[-2000:]}")
    return None


def remedies(command: Command, first: Trial) -> Iterator[str]:
    """Try changes that make a script fit; yield a line for each: what a user writes, and what the program needs then."""
    for flag, line in STORED_LESS:
        if trial := plan_with(command, flag):
            yield f"with {line} {trial.verdict}"
    for parts in (parts for parts in _PARTS if parts <= first.rows):
        rows = -(-first.rows // parts)  # a script may give each replica as many as before
        trial = plan_with(command, "--parts", parts, "--rows", rows)
        if trial is None or trial.replicas == first.replicas:  # the strategy takes no parts
            break
        if trial.fits or 2 * parts > min(_PARTS[-1], first.rows):
            line = f'mr.MirroredStrategy(num_replicas={trial.replicas}, schedule="one_by_one")'
            yield f"with {line} and {counted(rows, 'row')} on each, the same batch in {parts} parts, {trial.verdict}"
            break
    rows = first.rows // 2
    while rows and (trial := plan_with(command, "--rows", rows)):
        if trial.fits or rows == 1:
            yield f"with {counted(rows, 'row')} on each replica, in place of {first.rows}, {trial.verdict}"
            break
        rows //= 2


def most_rows(fits_with: Callable[[int], bool], rows: int) -> tuple[int, int]:
    """Return the most rows that fit, or 0, and the fewest that do not fit, at most an eighth more.

    Double or halve from `rows` on, then bisect, in multiples of a power of two.
    """
    most, too_many = 0, 0
    while True:
        if fits_with(rows):
            most = rows
        else:
            too_many = rows
        step = max(1, 2 ** most.bit_length() // 16)  # an eighth of the largest power of two in `most`
        is_close = most and too_many and too_many - most <= step
        if is_close or too_many == 1 or most >= _TOO_MANY_ROWS:
            return most, too_many
        if not most:
            rows //= 2
        elif not too_many:
            rows *= 2
        else:
            rows = max(most + 1, (most + too_many) // 2 // step * step)
