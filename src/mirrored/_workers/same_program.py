"""Do all workers run the same programs in the same order? Compared before a program that is new, or not expected. No jax here.

Different programs compute wrong numbers in silence, or their workers wait for ever: docs/design/same-programs.md.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _env
from .._errors import ProgramMismatchError
from .._text import escape, escape_lines, numbered
from .coordination import Coordination, digest
from .messages import read_all
from .progress import BATCH, COMPARISON, UNKNOWN, Entry, Progress, progress

#: Lines shown before and after the first that differs, and characters of them.
_LINES_BEFORE, _LINES_AFTER = 2, 5
_MAX_LINE, _MAX_EXCERPT = 300, 2000
_MAX_NAME = 200
#: How many of a worker's last entries are shown, and characters of them.
_NUM_SHOWN, _MAX_SHOWN = 8, 500
_ADVICE = (
    "Every worker must run the same programs in the same order, with arrays of the same shapes and dtypes.\n"
    "Look for what differs by worker: a Python number that the step uses, such as a rank, a learning rate, the time or a "
    "random number (it is a constant of the program, so make it equal: the same seed, the chief's time), an `if` such as "
    "`if strategy.is_chief:` around strategy.run, batches of other shapes, other versions of the code, variables that are "
    "created or used in an order that differs, such as that of a set."
)
#: Ends an error about batches that all workers read.
ONE_DATASET = (
    "Under AutoShardPolicy.DATA every worker reads the same batches and takes its rows of each; now rows would be lost and "
    "others used twice. Give what shuffles one seed on all workers, read the same files in the same order, and go through the "
    "same datasets, none of them under `if strategy.is_chief:` alone; or let each worker read records of its own: "
    "auto_shard_policy='file' or 'off', or distribute_datasets_from_function."
)


def data_ended(worker: int, other: int) -> str:
    """Say that one worker's data is shorter than another's."""
    return f"the data of worker {worker} has ended, and worker {other} has more"


class Agreement:
    """The comparison of a new or unexpected program with the other workers' programs, before it starts."""

    def __init__(self, coordination: Coordination, progress: Progress = progress) -> None:
        self._coordination, self._progress = coordination, progress
        self.checks_order = _env.DEBUG.get() == "detail"  # compare every start

    def check(self, name: str, text: str, own: bytes, where: str = "") -> None:
        """Compare a program with those of the other workers; all call this. Raise ProgramMismatchError if they differ.

        Texts are equal exactly for programs that workers can run together: no addresses, no places in files. `own` is the text's
        digest. The name and the place, which are shown, may differ.
        """
        this = self._progress
        before = this.trail.last
        with this.phase(COMPARISON, repr(name), waits=True):
            try:
                # First, so that the guards tell it to a worker that runs the expected program, and does not come here.
                this.did(name, own, where)
                self._compare([f"{name[:_MAX_NAME]} ({where})", own.decode(), *this.history()], text)
            except BaseException as error:  # such as Ctrl-C, after which the call may be made again
                this.trail.take_back(before, is_refused=isinstance(error, ProgramMismatchError))
                raise
        this.habits.next = own

    def _compare(self, entry: list[str], text: str) -> None:
        seen = [_words(answer, len(entry), "?") for answer in self._coordination.exchange("agreement", entry)]
        if any(key != seen[0][1] for _, key, *_ in seen):
            raise ProgramMismatchError(_mismatch([shown for shown, *_ in seen], self._exchange_excerpts(text)))
        trails = functools.partial(self._coordination.exchange, "agreement", self._progress.tell())
        require_same_history([history for _, _, *history in seen], trails)

    def _exchange_excerpts(self, text: str) -> list[str]:
        """Return each worker's lines around the first difference; few bytes are sent, however long the programs are."""

        def differ(count: int) -> bool:
            digests = self._coordination.exchange("agreement", digest(text[:count]))
            return any(answer != digests[0] for answer in digests)

        longest = max(map(_count, self._coordination.exchange("agreement", len(text))))
        num_equal = bisect.bisect_left(range(1, longest), True, key=differ)  # the first characters, on all workers
        return [str(excerpt) for excerpt in self._coordination.exchange("agreement", _excerpt(text, num_equal))]


def _excerpt(text: str, position: int) -> str:
    """Return the line of a position and the lines around it, each cut so that the position can be seen."""
    if position >= len(text):
        return "it has ended before the others"
    lines, number = text.split("\n"), text.count("\n", 0, position)
    column = position - (text.rfind("\n", 0, position) + 1)
    shown = [f"line {number + 1} of {len(lines)}:"]
    for near in range(max(0, number - _LINES_BEFORE), min(len(lines), number + 1 + _LINES_AFTER)):
        begin = max(0, column - _MAX_LINE // 2) if near == number else 0
        line = lines[near][begin : begin + _MAX_LINE]
        shown.append("..." * (begin > 0) + line + "..." * (begin + _MAX_LINE < len(lines[near])))
    return "\n".join(shown)


def require_same_history(histories: Sequence[Sequence[str]], trails: Callable[[], Sequence[Any]]) -> bool:
    """Refuse workers with different numbers of batches, or different histories; tell whether all histories are known.

    Takes each worker's `Progress.history`, and a function to call if histories differ: it returns each worker's `Progress.tell`.
    """
    batches, done = zip(*(_words(history, 2, UNKNOWN) for history in histories), strict=True)
    if UNKNOWN not in batches and len(set(batches)) > 1:
        listed = "; ".join(f"worker {worker}: {escape(text, _MAX_NAME)}" for worker, text in enumerate(batches))
        raise ProgramMismatchError(_other_number(listed))
    if UNKNOWN not in done and len(set(done)) > 1:
        raise ProgramMismatchError(other_order(list(map(str, trails()))))
    return UNKNOWN not in (*batches, *done)


def _other_number(where: str) -> str:
    return (
        f"the workers have taken different numbers of batches of their distributed datasets: {where}. So a step would pair rows "
        "of different batches. Every worker must take every batch: let no `if` that differs by worker, such as `if "
        "strategy.is_chief:`, stand around next(iterator) or a loop over a distributed dataset."
    )


def other_order(texts: Sequence[str]) -> str:
    """Say since when the workers' histories differ, given each worker's `Progress.tell`."""
    trails = _trails(texts)
    since, parted = parting(trails)
    if parted == {BATCH}:
        return f"the workers have read different batches, so that results are wrong {since}. {ONE_DATASET}"
    if BATCH in parted:
        return _other_number(since)
    # A program that was first compared and then started is named once.
    done = {worker: [*dict.fromkeys((entry.step, entry.what) for entry in entries)] for worker, entries in trails.items()}
    last = {worker: ", ".join(name for _, name in entries[-_NUM_SHOWN:]) for worker, entries in done.items()}
    listed = "; ".join(f"worker {worker}: {escape(names, _MAX_SHOWN)}" for worker, names in last.items())
    return (
        "the workers have run programs in different orders, or with other variables, so that results are wrong "
        f"{since}. The last things each has done: {listed}.\n{_ADVICE}\nMIRRORED_DEBUG=detail in the "
        "environment of all workers shows both programs, before they start."
    )


def is_other_order(texts: Sequence[str]) -> bool:
    """Tell whether the workers' histories differ; not so if one is only behind."""
    return any(map(_contradicts, _rows(_trails(texts))))


def _trails(texts: Sequence[str]) -> dict[int, list[Entry]]:
    """Return the histories of the workers that have told one."""
    return {worker: entries for worker, text in enumerate(texts) if (entries := read_all(Entry, text)) is not None}


def parting(trails: Mapping[int, Sequence[Entry]]) -> tuple[str, set[str]]:
    """Say since when histories differ, and name each worker's first different entry; return this text and the names."""
    rows = _rows(trails)
    found = next(iter([row for row in rows if _contradicts(row)] or [row for row in rows if None in row.values()]), None)
    if found is None:
        return "at a step that is not known any more", set()
    names = {entry.what if entry else "" for entry in found.values()}
    number, step = min((entry.number, 1 + entry.step) for entry in found.values() if entry)
    if found is rows[0] and number > 1:
        return f"before step {step}", names
    after = next((row for row in rows if any(entry and entry.number == number + 1 for entry in row.values())), {})
    return f"since step {step} ({_sides(found, after)})", names


def _rows(trails: Mapping[int, Sequence[Entry]]) -> list[dict[int, Entry | None]]:
    """Return all workers' entries, number by number, from the first that all still know; None if a worker is behind."""
    by_number = {worker: {entry.number: entry for entry in entries} for worker, entries in trails.items()}
    first = max((min(entries) for entries in by_number.values() if entries), default=1)
    last = max((max(entries) for entries in by_number.values() if entries), default=0)
    return [{worker: entries.get(number) for worker, entries in by_number.items()} for number in range(first, last + 1)]


def _contradicts(row: Mapping[int, Entry | None]) -> bool:
    return len({entry.checksum for entry in row.values() if entry}) > 1


def _sides(found: Mapping[int, Entry | None], after: Mapping[int, Entry | None]) -> str:
    groups: dict[int | None, list[int]] = {}
    for worker, entry in found.items():
        groups.setdefault(entry.checksum if entry else None, []).append(worker)
    sides: list[str] = []
    seen: set[str] = set()
    for workers in groups.values():
        entry, then = found[workers[0]], after.get(workers[0])
        what = _shown(entry) if entry else "nothing more"
        following = f", then {_shown(then)}" if then else ""
        sides.append(f"{numbered(workers)}: {what}{', another of this name' * (what in seen)}{following}")
        seen.add(what)
    return "; ".join(sides)


def _shown(entry: Entry) -> str:
    return escape(entry.what + f" ({entry.where})" * bool(entry.where), _MAX_NAME)


def _mismatch(names: Sequence[str], excerpts: Sequence[str]) -> str:
    groups: dict[tuple[str, str], list[int]] = {}
    for worker, side in enumerate(zip(names, excerpts, strict=True)):
        groups.setdefault(side, []).append(worker)
    parts = ["the workers have come to different programs:"]
    for (name, excerpt), workers in groups.items():
        parts.append(f"{numbered(workers)}: {escape(name, _MAX_NAME)}\n{escape_lines(excerpt, _MAX_EXCERPT)}")
    return "\n".join([*parts, _ADVICE])


def _words(value: object, count: int, unknown: str) -> list[str]:
    """Return the `count` words of another worker; `unknown` for each if it has sent something else."""
    if not isinstance(value, list) or len(value) != count:
        return [unknown] * count
    return list(map(str, value))


def _count(value: object) -> int:
    return value if isinstance(value, int) else 1
