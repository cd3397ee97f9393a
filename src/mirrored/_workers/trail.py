"""What has this worker done, in which order, and since when have others done something else? No jax here.

All workers must do the same, in one order, but at no common time: each may be ahead of another by many programs. So each
keeps a checksum after each of the last things it did, and compares its own with what another has said of the same number.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .._text import escape, numbered
from .messages import parse, read

#: Of how many things a worker keeps the checksum: more than any does between two looks at the others.
SIZE = 4096
#: How many of them it tells when they differ, and how many names are shown.
_NUM_TOLD, _NUM_SHOWN = 500, 8
_MAX_NAME, _MAX_SHOWN = 200, 500


class Entry(NamedTuple):
    """One thing that a worker has done."""

    number: int  # from 1 on
    checksum: int  # of all that was done up to it, in order
    step: int  # how many programs of several workers had been started before
    what: str


class ProgramTrail:
    """All that this worker has done and that the others must do alike, of which the last is kept.

    One thread adds, with every program; others may ask at the same time.
    """

    def __init__(self) -> None:
        self._last = (0, 0, 0, "")  # the fields of an Entry, which would take twice the time to make
        self._ring = [self._last] * SIZE

    def add(self, what: str, digest: bytes, step: int) -> None:
        """Note something; `digest` is equal for equal things only."""
        number, checksum, _, _ = self._last
        self._ring[number % SIZE] = self._last = (number + 1, zlib.crc32(digest, checksum), step, what)

    @property
    def last(self) -> Entry:
        """What was done last."""
        return Entry(*self._last)

    def contradicts(self, number: int, checksum: int) -> bool:
        """Tell whether this worker had another checksum after the thing of that number; False where that is not known."""
        own_number, own_checksum, _, _ = self._ring[(number - 1) % SIZE]
        return own_number == number and own_checksum != checksum

    def encode(self) -> str:
        """Return the last entries as what `decode` takes."""
        known = sorted(entry for entry in self._ring if entry[0])[-_NUM_TOLD:]
        return json.dumps([(*numbers, what[:_MAX_NAME]) for *numbers, what in known])


def decode(text: str) -> list[Entry] | None:
    """Return the entries in a text of another worker; None when it is none, as of a worker that has not answered."""
    told = parse(text)
    entries = [read(Entry, one) for one in told] if isinstance(told, list) else [None]
    return None if None in entries else [entry for entry in entries if entry]


def contradict(trails: Mapping[int, Sequence[Entry]]) -> bool:
    """Tell whether two workers are known to have done different things; one that has done less may only be behind."""
    return any(_contradicts(row) for row in _rows(trails))


def parting(trails: Mapping[int, Sequence[Entry]]) -> str:
    """Say since when workers have done different things, and what each did first that another did not.

    Args:
        trails: of some workers, the last entries of each, in order.
    """
    rows = _rows(trails)
    found = _first_other(rows)
    if found is None:
        return "at a step that is not known any more"
    number, step = min((entry.number, 1 + entry.step) for entry in found.values() if entry)
    if found is rows[0] and number > 1:
        return f"before step {step}"
    after = next((row for row in rows if any(entry and entry.number == number + 1 for entry in row.values())), {})
    return f"since step {step} ({_sides(found, after)})"


def parted_in(trails: Mapping[int, Sequence[Entry]]) -> set[str]:
    """Return the names of the first things in which workers have parted; empty when that is not known any more."""
    found = _first_other(_rows(trails)) or {}
    return {entry.what if entry else "" for entry in found.values()}


def _first_other(rows: Sequence[Mapping[int, Entry | None]]) -> Mapping[int, Entry | None] | None:
    return next(iter([row for row in rows if _contradicts(row)] or [row for row in rows if None in row.values()]), None)


def _rows(trails: Mapping[int, Sequence[Entry]]) -> list[dict[int, Entry | None]]:
    """Return for each number that all workers still know what each of them did, None for one that has not come to it."""
    by_number = {worker: {entry.number: entry for entry in entries} for worker, entries in trails.items()}
    first = max((min(entries) for entries in by_number.values() if entries), default=1)
    last = max((max(entries) for entries in by_number.values() if entries), default=0)
    return [{worker: entries.get(number) for worker, entries in by_number.items()} for number in range(first, last + 1)]


def _contradicts(row: Mapping[int, Entry | None]) -> bool:
    return len({entry.checksum for entry in row.values() if entry}) > 1


def _sides(found: Mapping[int, Entry | None], after: Mapping[int, Entry | None]) -> str:
    groups: dict[int | None, list[int]] = {}
    for worker, entry in sorted(found.items()):
        groups.setdefault(entry.checksum if entry else None, []).append(worker)
    sides: list[str] = []
    seen: set[str] = set()
    for workers in groups.values():
        entry, then = found[workers[0]], after.get(workers[0])
        what = escape(entry.what, _MAX_NAME) if entry else "nothing more"
        other = ", another of this name" if what in seen else ""
        sides.append(f"{numbered(workers)}: {what}{other}" + (f", then {escape(then.what, _MAX_NAME)}" if then else ""))
        seen.add(what)
    return "; ".join(sides)


def listed(trails: Mapping[int, Sequence[Entry]]) -> str:
    """Return the names of the last things that each worker has done."""
    names = {worker: ", ".join(entry.what for entry in entries[-_NUM_SHOWN:]) for worker, entries in sorted(trails.items())}
    return "; ".join(f"worker {worker}: {escape(shown, _MAX_SHOWN)}" for worker, shown in names.items())
