"""One record is the door for a source: a made-up store of columns, entered in `KINDS`, does all that the others do."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pipelines import STRATEGIES, batches_of, resumed
from simulated_workers import run_workers

import mirrored as mr
from mirrored import testing
from mirrored.data._sources import kinds
from mirrored.data._sources.kind import Cut, SourceKind


@dataclasses.dataclass(frozen=True)
class ColumnStore:
    """Columns in shards, which can be read from any row on."""

    shards: tuple[dict[str, np.ndarray], ...]
    rows: int | None = None  # of a batch

    def by(self, rows: int) -> "ColumnStore":
        return dataclasses.replace(self, rows=rows)

    @property
    def num_rows(self) -> int:
        return sum(len(shard["x"]) for shard in self.shards)

    def read(self, row: int) -> Any:
        columns = {name: np.concatenate([shard[name] for shard in self.shards]) for name in ("x", "y")}
        return {name: column[row : row + (self.rows or 1)] for name, column in columns.items()}


class Reader(Iterator[Any]):
    def __init__(self, store: ColumnStore) -> None:
        self.store, self.row = store, 0

    def __next__(self) -> Any:
        if self.row >= self.store.num_rows:
            raise StopIteration
        batch = self.store.read(self.row)
        self.row += len(batch["x"])
        return batch

    def get_state(self) -> dict[str, int]:
        return {"row": self.row, "of": self.store.num_rows}

    def set_state(self, state: dict[str, int]) -> None:
        if state["of"] != self.store.num_rows:
            raise ValueError(f"it has {state['of']} rows")
        self.row = state["row"]


def num_batches(store: ColumnStore) -> int:
    return -(-store.num_rows // store.rows)


def why_not_by_file(store: ColumnStore, num_workers: int, is_certain: bool) -> str | None:
    return None if len(store.shards) >= num_workers else f"there are {len(store.shards)} shards"


COLUMN_STORE = SourceKind(
    is_one=lambda dataset: isinstance(dataset, ColumnStore),
    start=Reader,
    sample=Reader,
    why_not_by_file=why_not_by_file,
    num_files=lambda store: len(store.shards),
    only_files=lambda store, these: dataclasses.replace(store, shards=store.shards[these]),
    length=num_batches,
    cut=lambda store: Cut(store.num_rows, store.rows, num_batches(store)),
    why_no_batches=lambda store, verb, size: None if store.rows else f"has rows. Write store.by({size}).",
    why_empty=lambda store: "Is the store written?",
)


def store(*sizes: int) -> ColumnStore:
    ends = np.cumsum([0, *sizes])
    return ColumnStore(tuple({"x": np.arange(a, b), "y": np.ones((b - a, 2))} for a, b in itertools.pairwise(ends)))


@pytest.fixture(autouse=True)
def entered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", (COLUMN_STORE, *kinds.KINDS))


def xs(batches: list[Any]) -> list[Any]:
    return [batch["x"] for batch in batches]


def test_it_is_iterated_counted_and_resumed_on_another_number_of_replicas() -> None:
    distributed = STRATEGIES[3].distribute_dataset(store(5, 2).by(3))
    assert distributed.element_spec["y"].shape == (None, 2)
    assert xs(batches_of(distributed)) == [[0, 1, 2], [3, 4, 5], [6]] and len(distributed) == 3
    assert len(STRATEGIES[2].distribute_dataset(store(5, 2).by(3), mr.InputOptions(drop_remainder=True))) == 2
    other = STRATEGIES[2].distribute_dataset(store(5, 2).by(3)).repeat(2)
    assert xs(resumed(distributed.repeat(2), 4, other)) == xs(batches_of(distributed)) * 2
    [first, *_] = distributed.map(lambda batch: {**batch, "x": batch["x"] + 10})
    assert first["x"].values[0][0] == 10


def test_the_state_of_another_store_is_refused_in_its_words() -> None:
    iterators = [iter(STRATEGIES[2].distribute_dataset(store(size).by(2))) for size in (7, 4)]
    with (
        iterators[0],
        iterators[1],
        pytest.raises(ValueError, match="the state does not fit ColumnStore: ValueError: it has 7 rows"),
    ):
        iterators[1].set_state(iterators[0].get_state())


def test_workers_share_it_by_shard_or_by_row() -> None:
    found = testing.input_of_workers(lambda: store(5, 2, 4).by(3), num_workers=2)
    found.assert_each_row_once(store(5, 2, 4).by(3))
    assert found.how.startswith("AUTO chose FILE: worker i of 2 reads the files i, i + 2, ... of 3 and")
    by_row = testing.input_of_workers(lambda: store(5).by(3), num_workers=2)
    by_row.assert_each_row_once(store(5).by(3))
    assert by_row.how.startswith("AUTO chose DATA, because there are 1 shards: every one of")
    first = run_workers(lambda worker: store(5, 2, 4).by(3), 2, max_steps=2)
    positions = [(steps[-1].position, steps[-1].extra) for steps in first.steps]
    rest = run_workers(lambda worker: store(5, 2, 4).by(3), 2, positions=positions)
    rows = [row for run in (first, rest) for batch in run.global_batches() for row in batch["x"].tolist()]
    assert sorted(rows) == list(range(11))


def rows_of_none(strategy: mr.MirroredStrategy) -> object:
    return list(strategy.distribute_dataset(store(0).by(2)))


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda s: s.distribute_dataset(store(5)), ValueError,
         r"expected global batches, and ColumnStore has rows\. Write store\.by\(global_batch_size\)\."),
        (rows_of_none, UserWarning, r"no step was made in a pass over the dataset\. Is the store written\?"),
        (lambda s: len(s.distribute_dataset(store(9).by(1), mr.InputOptions(drop_remainder=True))), TypeError,
         "the number of steps of ColumnStore is known when they are read"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_its_own_words(misuse: Callable[[Any], object], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        misuse(STRATEGIES[2])
