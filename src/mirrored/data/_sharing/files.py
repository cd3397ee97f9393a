"""Divides a dataset by file: each worker reads its parts one after the other, and any number of workers can resume.

A part is a pass over some files: their numbers (or first, None, step: a slice), its state (None: not begun), how many rows
of the next batch are taken, and how many of its files are begun (None: the pipeline cannot be cut between files).
"""

from __future__ import annotations

import collections
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
    """Return a part: the files `first`, `first + step`, ..., from a state on, without the first `rows` rows of the next batch."""
    kind = kind_of(dataset)
    begun = None if rows else kind.num_begun(dataset, state)  # the batch of these rows may end in a later file
    return {"files": [first, None, step], "of": kind.num_files(dataset), "state": state, "rows": rows, "begun": begun}


def parts_of(dataset: object, state: dict[str, Any]) -> list[Part]:
    """Return the parts in an iterator's state; an older state, or that of an iterator over all files, is one part."""
    source, (first, step) = state["source"], state["worker"] or (0, 1)
    if not isinstance(source, dict) or BY_FILE not in source:
        return [share_of(dataset, first, step, source, state.get("rows", 0))]
    if not all(isinstance(part, dict) and {"files", "of", "state", "rows", "begun"} <= set(part) for part in source[BY_FILE]):
        raise ValueError(f"the state holds {source[BY_FILE]}; expected parts of a dataset's files, as get_state() returned.")
    return source[BY_FILE]


def dealt(dataset: object, parts: Iterable[Part], worker: int, num_workers: int) -> list[Part]:
    """Deal the former workers' parts anew, and return one worker's. Begun parts stay whole; other files are dealt one by one."""
    count = kind_of(dataset).num_files(dataset)
    whole: list[Part] = []
    free: list[int] = []
    for part in parts:
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


class OwnFiles:
    """A worker's parts of a dataset's files, opened as one source of batches."""

    def __init__(self, dataset: object, parts: Iterable[Part], maps: Sequence[Callable[..., PyTree]] = ()) -> None:
        kind = kind_of(dataset)
        self._num_begun = kind.num_begun
        self._open: collections.deque[tuple[Part, Any, Source]] = collections.deque()
        self._before: Any = None  # the state of the first part before its last batch
        for part in parts:
            files, count = part["files"], kind.num_files(dataset)
            if None in files:
                files = slice(*files)
            elif part["of"] != count:
                raise ValueError(
                    f"the state is of {part['of']} files, and the dataset has {count}; make the dataset of the same files, in "
                    "the same order, as when the state was saved."
                )
            mine = kind.only_files(dataset, files)
            self._open.append((dict(part), mine, open_source(mine, part["state"], maps)))

    def batches(self) -> Iterator[tuple[PyTree, int]]:
        """Yield each batch that has rows, and how many of its rows were taken before."""
        while self._open:
            part, mine, source = self._open[0]
            part["state"] = _state_of(source)
            for batch in source:
                arrays = copied(to_numpy(batch))
                taken = min(part["rows"], count_rows(arrays))
                self._before, part["state"] = part["state"], _state_of(source)
                part["rows"] -= taken
                part["begun"] = self._num_begun(mine, part["state"])
                if count_rows(arrays):
                    yield arrays, taken
            self._open.popleft()
            source.close()

    def position(self, rows: int = 0) -> Position:
        """Return the position after the last batch, or after its first `rows` rows, as JSON."""
        parts = [part for part, *_ in self._open]
        if rows:
            parts[0] = {**parts[0], "state": self._before, "rows": rows}
        errors = [part["state"] for part in parts if isinstance(part["state"], Exception)]
        return errors[0] if errors else json.dumps({BY_FILE: parts})

    def close(self) -> None:
        """Free files and threads."""
        while self._open:
            self._open.popleft()[2].close()


def _state_of(source: Source) -> Any:
    position = source.position()
    return json.loads(position) if isinstance(position, str) else position
