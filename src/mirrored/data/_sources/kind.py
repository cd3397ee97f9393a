"""The record of a kind of datasets: its answers to the input's questions. docs/design/doors.md says how to add a kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple

from ..._typing import PyTree

#: The length of a dataset that repeats without end is a number beyond all others, or a part of it.
ENDLESS = 2**48


class Cut(NamedTuple):
    """Rows that are cut into batches of one size, and a last batch of the rest."""

    num_rows: int
    batch_size: int
    num_batches: int

    @property
    def rest(self) -> int:
        """The rows of the last batch, if it has fewer than the others; else 0."""
        complete, rest = divmod(self.num_rows, self.batch_size)
        return rest if 0 < complete < self.num_batches else 0


def _name(dataset: object) -> str:
    return type(dataset).__name__


def nothing(*_: object) -> None:
    """Return None: the default answer of a dataset kind to a question that does not concern it."""


def length_of(dataset: object, is_known: bool = True) -> int:
    """Return the length of a dataset; raise TypeError if it has none, or no end."""
    if not is_known or not isinstance(dataset, Sized) or len(dataset) >= ENDLESS:
        raise TypeError(f"the length of {_name(dataset)} is not known before it ends.")
    return len(dataset)


@dataclasses.dataclass(frozen=True)
class SourceKind:
    """The answers of a kind of datasets to the input's questions; the defaults are those of any iterable of batches."""

    is_one: Callable[[Any], bool]  # recognizes a dataset, without importing its library
    start: Callable[[Any], Iterator[PyTree]]  # begins a pass; its `get_state` and `set_state`, if any, are the position
    adapt: Callable[[Any], Any] = lambda dataset: dataset  # once, when it is distributed
    keeps_arrays: bool = False  # the dataset holds what it yields: a function that may change its argument gets a copy
    yields_new_arrays: Callable[[Any], bool] = lambda dataset: False  # nobody else holds what it yields
    sample: Callable[[Any], Iterator[PyTree] | None] = nothing  # yields a batch, and leaves later passes as they are
    for_later: Callable[[Any, int], Any] = lambda dataset, num_passes: dataset  # the dataset of the `num_passes` passes to come
    # The batch sizes on which a position depends, given those that the user's function asked for.
    counted_sizes: Callable[[Any, bool, list[int]], list[int]] = lambda dataset, is_by_file, asked: asked
    # How workers divide its files. Why this number of workers cannot; if the answer must be certain, an unknown step is a reason.
    why_not_by_file: Callable[[Any, int, bool], str | None] = lambda dataset, *_: f"{_name(dataset)} is no dataset of files"
    num_files: Callable[[Any], int | None] = nothing  # None: the dataset does not tell
    # The same pipeline over these files: a list if `num_begun` knows.
    only_files: Callable[[Any, slice | list[int]], Any] = nothing
    num_begun: Callable[[Any, Any], int | None] = nothing  # at a state; None: a pass cannot be cut between two files
    # What is known before the dataset is read.
    length: Callable[[Any], int] = length_of
    cut: Callable[[Any], Cut | None] = nothing
    num_rows: Callable[[Any], list[int] | None] = nothing  # of each batch
    num_smaller: Callable[[Any, int], int | None] = nothing  # how many batches have fewer rows
    # The dataset's faults.
    why_no_batches: Callable[[Any, str, str], str | None] = nothing  # given the verb, and the batch size to write; or it raises
    why_empty: Callable[[Any], str | None] = nothing  # "" if a pass without batches was asked for

    def num_batches(self, dataset: object, at_least: int) -> int:
        """Return how many batches of at least `at_least` rows a pass yields; raise TypeError if nobody knows."""
        if (rows := self.num_rows(dataset)) is not None:
            return sum(number >= at_least for number in rows)
        count, cut = self.length(dataset), self.cut(dataset)
        smaller = 0 if at_least == 1 else self.num_smaller(dataset, at_least)
        if smaller is None and cut is not None and cut.batch_size >= at_least:
            smaller = int(0 < cut.rest < at_least)
        if smaller is None:
            raise TypeError(
                f"the number of steps of {_name(dataset)} is known when they are read: mr.InputOptions("
                f"drop_remainder=True) drops batches of fewer than {at_least} rows, one for each replica. Count as you go, or "
                "leave drop_remainder out."
            )
        return count - smaller
