"""Datasets of other libraries, and datasets made by a function: every row arrives, re-iterable, sized when they are."""

import itertools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import numpy as np
import pytest
from pipelines import OneBuffer, batches_of, resumed, rows_of

import mirrored as mr

pytestmark = pytest.mark.usefixtures("grains_threads_end")


def test_examples_that_nothing_batches_are_refused_where_that_is_known(strategy2: mr.MirroredStrategy, tmp_path: Path) -> None:
    """An image of four lines would be cut into four rows, and each replica get a half of it."""
    path = tmp_path / "a.tfrecord"
    mr.data.write_tfrecords(path, [mr.data.make_example({"x": np.full(4, float(n))}) for n in range(4)])
    spec = {"x": mr.data.FixedLenFeature((4,), np.float32)}
    vectors = grain.MapDataset.source(np.arange(16.0).reshape(4, 4))
    records = mr.data.tfrecord_dataset(path).map(lambda record: mr.data.parse_example(record, spec))
    images = [{"x": np.full((4, 2), float(number)), "label": np.eye(4)[number]} for number in range(4)]
    refused = [
        vectors, vectors.seed(0).shuffle().repeat(2)[:6], vectors.to_iter_dataset().filter(lambda row: row[0] > 1),
        grain.MapDataset.mix([vectors, vectors]), grain.MapDataset.source(images), records,
        grain.experimental.WindowShuffleIterDataset(records, window_size=4, seed=0),
    ]  # fmt: skip
    write = r"no `batch`: .*Write dataset\.batch\("
    for dataset in refused:
        with pytest.raises(ValueError, match=r"global batches, and \w+ has " + write + r"global_batch_size\)"):
            strategy2.distribute_dataset(dataset)
        by_replica = write + r"context\.get_per_replica_batch_size\(global_batch_size\)\)"
        with pytest.raises(ValueError, match=f"per-replica batches, .*{by_replica}"):
            strategy2.distribute_datasets_from_function(lambda context, dataset=dataset: dataset)
        each_is_a_batch = dataset.batch(1, batch_fn=lambda records: records[0])
        for batches, num_rows in ((dataset.batch(3), 3), (each_is_a_batch, 4)):
            batch = rows_of(next(iter(strategy2.distribute_dataset(batches))))
            assert len(batch["x"] if isinstance(batch, dict) else batch) == num_rows


def test_what_may_make_batches_is_taken_for_them(strategy2: mr.MirroredStrategy, tmp_path: Path) -> None:
    class Batches(grain.MapDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> np.ndarray:
            return np.arange(4.0)

    path = tmp_path / "a.tfrecord"
    mr.data.write_tfrecords(path, [bytes(4)] * 2)
    indices = grain.MapDataset.source(np.arange(8).reshape(2, 4))
    for dataset in (
        grain.MapDataset.range(2).map(lambda number: np.arange(4.0)), indices.map(lambda rows: np.ones(8)[rows]),
        grain.MapDataset.source([0, 1]).map(lambda number: np.arange(4.0)), [np.arange(4.0)] * 2, Batches(), Batches().repeat(1),
        mr.data.tfrecord_dataset(path).batch(1).map(lambda records: np.frombuffer(records[0], np.uint8)),
        indices.batch(2).map(lambda rows: rows[0]).repeat(2),
    ):  # fmt: skip
        assert [batch.shapes[0] for batch in strategy2.distribute_dataset(dataset)] == [(2,)] * 2


def test_examples_of_torch_and_hugging_face(strategy2: mr.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.ModuleType("torch.utils.data")
    torch.Dataset = type("Dataset", (), {})
    torch.IterableDataset = type("IterableDataset", (torch.Dataset,), {"__iter__": lambda self: iter([np.ones(4)])})
    monkeypatch.setitem(sys.modules, "torch.utils.data", torch)

    class Vectors(torch.Dataset):
        def __getitem__(self, index: int) -> np.ndarray:
            return np.ones(4) if index < 3 else [][index]

    with pytest.raises(
        ValueError, match=r"Vectors is a map-style dataset of torch.*DataLoader\(dataset, batch_size=global_batch_siz"
    ):
        strategy2.distribute_dataset(Vectors())
    assert len(list(strategy2.distribute_dataset(torch.IterableDataset()))) == 1, "as of webdataset, which makes batches itself"
    rows = HuggingFace({"x": [[1.0, 2.0, 3.0, 4.0]] * 2})
    Sequence, Array2D, Value = (type(name, (), {"length": 4}) for name in ("Sequence", "Array2D", "Value"))
    for feature in (Sequence(), Array2D()):
        rows.features = {"id": Value(), "x": feature}
        with pytest.raises(
            ValueError, match=r"HuggingFace has rows, not batches: in its column 'x' .*Write dataset\.batch\(global"
        ):
            strategy2.distribute_dataset(rows)
    Sequence.length = -1  # of a batch, or of rows of any length: nobody knows
    rows.features = {"x": Sequence()}
    assert len(list(strategy2.distribute_dataset(rows))) == 2


class HuggingFace:
    """As `datasets.Dataset`: rows of lists unless formatted, `batch` makes a dataset whose rows are batches."""

    def __init__(self, columns: dict[str, list[Any]], kind: str | None = None) -> None:
        self.columns, self.kind = columns, kind

    def with_format(self, kind: str | None) -> "HuggingFace":
        return HuggingFace(self.columns, kind)

    def batch(self, batch_size: int) -> "HuggingFace":
        cut = {k: [v[i : i + batch_size] for i in range(0, len(v), batch_size)] for k, v in self.columns.items()}
        return HuggingFace(cut, self.kind)

    def iter(self, batch_size: int) -> Iterator[Any]:
        yield from self.batch(batch_size)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {name: column[index] for name, column in self.columns.items()}
        return {name: np.asarray(value) for name, value in row.items()} if self.kind == "numpy" else row

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


def test_a_hugging_face_dataset_in_small(strategy2: mr.MirroredStrategy) -> None:
    dataset = HuggingFace({"x": list(range(7)), "v": [[float(n), 0.5] for n in range(7)]})
    distributed = strategy2.distribute_dataset(dataset.batch(3))
    assert len(distributed) == 3
    for batches in (batches_of(distributed), batches_of(distributed), resumed(distributed, 1, distributed)):
        assert [batch["x"] for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]] and batches[2]["v"] == [[6.0, 0.5]]
    with pytest.raises(ValueError, match=r"yielded a scalar at \['x'\].*\.batch\(global_batch_size\)"):
        list(strategy2.distribute_dataset(dataset))
    of_the_user = HuggingFace({"x": [np.zeros(2), np.ones(2)]}, "custom")
    of_the_user.format = {"type": "custom"}  # as after `with_transform`
    of_the_user.with_format = lambda kind: pytest.fail("the user's transform would be lost")
    assert [batch["x"] for batch in batches_of(strategy2.distribute_dataset(of_the_user))] == [[0, 0], [1, 1]]


class HuggingFaceStream:
    """As `datasets.IterableDataset`: its own state is used by every pass of that epoch; an index is the name of a column."""

    def __init__(self, num_batches: int = 3) -> None:
        self.num_batches, self.epoch, self.start, self.next = num_batches, 0, {}, 0

    def with_format(self, kind: str | None) -> "HuggingFaceStream":
        return HuggingFaceStream(self.num_batches)

    def batch(self, batch_size: int) -> Any: ...

    def iter(self, batch_size: int) -> Any: ...

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, column: str) -> Any:
        raise KeyError(column)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state

    def __iter__(self) -> Iterator[np.ndarray]:
        start = self.start["next"] if self.start and self.start["epoch"] == self.epoch else 0
        for number in range(start, self.num_batches):
            self.next = number + 1
            yield np.arange(2) + 10 * number + 100 * self.epoch


def test_a_hugging_face_stream_is_resumed_in_its_epoch_and_whole_in_the_next(strategy2: mr.MirroredStrategy) -> None:
    stream, one_pass = HuggingFaceStream(), [[0, 1], [10, 11], [20, 21]]
    distributed, again = (strategy2.distribute_dataset(dataset) for dataset in (stream, HuggingFaceStream()))
    assert batches_of(distributed) == one_pass
    stream.set_epoch(3)
    third = [[300 + n for n in rows] for rows in one_pass]
    assert batches_of(distributed) == third == resumed(distributed, 1, again) and batches_of(again) == one_pass


class FakeLoader(list[Any]):
    """As a torch DataLoader with a sampler, or with a sampler of batches around one."""

    def __init__(self, sampler: Any, is_of_batches: bool = False) -> None:
        super().__init__([np.arange(4)])
        batches = sampler if is_of_batches else SimpleNamespace(sampler=sampler)
        self.sampler, self.batch_sampler = (None, batches) if is_of_batches else (sampler, batches)


@pytest.mark.parametrize("is_of_batches", [True, False])
def test_a_loader_of_one_ranks_rows_is_refused(strategy2: mr.MirroredStrategy, is_of_batches: bool) -> None:
    message = r"FakeLoader gives 1/3 of the rows, those of rank 1, by its SimpleNamespace\. .* leave the sampler out, "
    part = FakeLoader(SimpleNamespace(num_replicas=3, rank=1), is_of_batches)
    with pytest.raises(ValueError, match=message):
        strategy2.distribute_dataset(part)
    assert len(list(strategy2.distribute_dataset(part, mr.InputOptions(auto_shard_policy="off")))) == 1
    assert len(list(strategy2.distribute_datasets_from_function(lambda context: part))) == 1
    for sampler in (SimpleNamespace(num_replicas=1, rank=0), SimpleNamespace(num_replicas=None, rank=None), object(), None):
        assert len(list(strategy2.distribute_dataset(FakeLoader(sampler, is_of_batches)))) == 1


@pytest.mark.filterwarnings("ignore:no step was made")
def test_each_replica_takes_the_next_element_and_none_is_dropped(strategy3: mr.MirroredStrategy) -> None:
    for num_elements, prefetch in itertools.product([0, 1, 3, 7], [0, 2]):
        contexts = []

        def make(context: mr.InputContext, contexts=contexts, num_elements=num_elements) -> list[Any]:
            contexts.append(context)
            return [{"x": np.full((2, 3), k, "float32")} for k in range(num_elements)]

        distributed = strategy3.distribute_datasets_from_function(make, mr.InputOptions(prefetch=prefetch))
        assert len(distributed) == -(-num_elements // 3)
        for _ in range(2):
            steps = [[np.asarray(row)[:, 0].tolist() for row in batch["x"].values] for batch in distributed]
            given = [[float(k)] * 2 for k in range(num_elements)]
            assert [row for step in steps for row in step if row] == given
            assert all(len(step) == 3 for step in steps)
            assert steps[-1:] == [[*given[len(steps) * 3 - 3 :], [], [], []][:3]] * bool(steps)
        assert contexts == [mr.InputContext(1, 0, 3)] and str(*contexts) == "mr.InputContext(input pipeline id 0, total: 1)"


def test_a_position_that_counts_per_replica_batches_of_another_size_is_refused(strategy2, strategy3) -> None:
    """The function divides a global batch, so that the fourth batch of two replicas begins elsewhere than that of three."""

    def make(context: mr.InputContext) -> Any:
        size = context.get_per_replica_batch_size(6)
        return [np.arange(start, start + size) for start in range(0, 24, size)]

    def of_rows(context: mr.InputContext) -> Any:
        return mr.data.NumpyDataset(np.arange(12)).batch(context.get_per_replica_batch_size(6)).repeat(2)

    def of_one_size(context: mr.InputContext) -> Any:
        return [np.array([k]) for k in range(24)]

    for function in (make, of_rows, of_one_size):
        two, three = (each.distribute_datasets_from_function(function) for each in (strategy2, strategy3))
        whole = [*range(12), *range(12)] if function is of_rows else list(range(24))
        for at, second in itertools.product((1, 4), (two, three) if function is not make else (two,)):
            assert np.concatenate(resumed(two, at, second)).tolist() == whole, "also from the end of the last epoch"
    with iter(strategy2.distribute_datasets_from_function(make)) as iterator:
        next(iterator)
        state = iterator.get_state()
    with iter(strategy3.distribute_datasets_from_function(make)) as other:
        with pytest.raises(ValueError, match=r"counts batches of \[3\] rows, and they have \[2\] here: rows would be"):
            other.set_state(state)
        assert rows_of(next(other)) == list(range(6))


def test_a_function_may_make_a_dataset_that_refills_one_buffer(strategy2: mr.MirroredStrategy) -> None:
    distributed = strategy2.distribute_datasets_from_function(lambda context: OneBuffer(3, 2))
    assert batches_of(distributed) == [[0, 1, 2, 3], [4, 5]]


def test_elements_of_one_step_must_fit_together(strategy2: mr.MirroredStrategy) -> None:
    distributed = strategy2.distribute_datasets_from_function(lambda context: [np.ones((2, 3)), np.ones((2, 4))])
    message = r"elements of one step have rows of different structure, dtype or shape: float64\[3\], and number 1 float64\[4\]"
    with pytest.raises(ValueError, match=message):
        list(distributed)
