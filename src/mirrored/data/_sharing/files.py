"""Divides a dataset by file: each worker reads its parts, one after the other, and any number of workers can go on.

A part is a pass over some files: their numbers (or the first, None, and the step), its state (None: not begun), how many rows
of the next batch are taken, and how many of its files are begun (None: the pipeline cannot be cut between files).
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from ..._typing import PyTree
from .._sources.kinds import kind_of
from .._sources.open import Position, Source, open_source
from .rows import copied, count_rows, to_numpy

#: As JSON: "files", "of" how many, "state", "rows" and "begun".
Part: TypeAlias = dict[str, Any]
#: The key of the parts in the position of a source.
BY_FILE = "by_file"


def share_of(dataset: object, first: int, step: int, state: object = None, rows: int = 0) -> Part:
    """Return the part of the files `first`, `first + step`, ..., perhaps from a state on, after so many rows."""
    kind = kind_of(dataset)
    begun = None if rows else kind.num_begun(dataset, state)  # the batch of these rows may end in a later file
    return {"files": [first, None, step], "of": kind.num_files(dataset), "state": state, "rows": rows, "begun": begun}


def parts_of(dataset: object, state: dict[str, Any]) -> list[Part]:
    """Return the parts in an iterator's state; it may be from before there were parts, or from one that read all files."""
    source, (first, step) = state["source"], state["worker"] or (0, 1)
    if not isinstance(source, dict) or BY_FILE not in source:
        return [share_of(dataset, first, step, source, state.get("rows", 0))]
    if not all(isinstance(part, dict) and {"files", "of", "state", "rows", "begun"} <= set(part) for part in source[BY_FILE]):
        raise ValueError(f"the state holds {source[BY_FILE]}; expected parts of a dataset's files, as get_state() returned.")
    return source[BY_FILE]


def dealt(dataset: object, parts: Iterable[Part], worker: int, num_workers: int) -> list[Part]:
    """Return a worker's parts, of all that some other number of workers had: begun ones stay whole, other files are dealt."""
    count = kind_of(dataset).num_files(dataset)
    whole: list[Part] = []
    free: list[int] = []
    for part in parts:
        _check_files(dataset, part)
        if part["begun"] is None or count is None:
            whole.append(part)
            continue
        files = list(range(count))[slice(*part["files"])] if None in part["files"] else part["files"]
        if part["begun"]:
            whole.append({**part, "files": files[: part["begun"]]})
        free += files[part["begun"] :]
    shares = [whole[number::num_workers] for number in range(num_workers)]
    loads = [len(share) for share in shares]
    mine = []
    for file in sorted(free):
        least = loads.index(min(loads))
        loads[least] += 1
        mine += [file] * (least == worker)
    return shares[worker] + [{"files": mine, "of": count, "state": None, "rows": 0, "begun": 0}] * bool(mine)


def _check_files(dataset: object, part: Part) -> None:
    if part["of"] != (count := kind_of(dataset).num_files(dataset)):
        raise ValueError(
            f"the state is of {part['of']} files, and the dataset has {count}; make the dataset of the same files, in the same "
            "order, as when the state was saved."
        )


@dataclasses.dataclass
class _OpenPart:
    """A part that is being read, or comes later; the rest as JSON."""

    source: Source
    dataset: Any
    files: str
    of: int | None
    after: Position  # the state after the last batch
    skip: int  # so many of the next rows are taken
    begun: int | None
    before: Position = "null"  # the state before the last batch

    def place(self, rows: int) -> Position:
        """Return the position after the last batch, or after so many rows of it."""
        state = self.before if rows else self.after
        if isinstance(state, Exception):
            return state
        rest = json.dumps({"of": self.of, "rows": rows or self.skip, "begun": self.begun})
        return f'{{"files": {self.files}, "state": {state}, {rest[1:]}'


class OwnFiles:
    """A worker's parts of a dataset's files, opened as one source of batches."""

    def __init__(self, dataset: Any, parts: Sequence[Part], maps: Sequence[Callable[..., PyTree]] = ()) -> None:
        self._open: collections.deque[_OpenPart] = collections.deque()
        for part in parts:
            files, state = part["files"], part["state"]
            if None not in files:
                _check_files(dataset, part)
            mine = kind_of(dataset).only_files(dataset, slice(*files) if None in files else files)
            source = open_source(mine, state, maps)
            self._open.append(
                _OpenPart(source, mine, json.dumps(files), part["of"], json.dumps(state), part["rows"], part["begun"])
            )

    def batches(self) -> Iterator[tuple[PyTree, int]]:
        """Yield each batch with rows, and how many of its rows were taken before."""
        while self._open:
            part = self._open[0]
            part.after = part.source.position()
            for batch in part.source:
                arrays = copied(to_numpy(batch))
                taken = min(part.skip, count_rows(arrays))
                part.skip -= taken
                part.before, part.after = part.after, part.source.position()
                if isinstance(part.after, str):
                    part.begun = kind_of(part.dataset).num_begun(part.dataset, json.loads(part.after))
                if count_rows(arrays):
                    yield arrays, taken
            self._open.popleft().source.close()

    def position(self, rows: int = 0) -> Position:
        """Return the position after the last batch, or after so many rows of it, as JSON."""
        places = [part.place(rows * (number == 0)) for number, part in enumerate(self._open)]
        errors = [place for place in places if isinstance(place, Exception)]
        return errors[0] if errors else f'{{"{BY_FILE}": [{", ".join(map(str, places))}]}}'

    def close(self) -> None:
        """Free files and threads."""
        while self._open:
            self._open.popleft().source.close()
