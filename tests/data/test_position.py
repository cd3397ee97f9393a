"""The position of an iterator: JSON, counts what was delivered, survives another number of replicas."""

import collections
import dataclasses
import itertools
import json
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import hypothesis
import numpy as np
import pytest
from grain import experimental as gx
from hypothesis import strategies as st
from pipelines import STATE, STRATEGIES, Files, Reiterable, Tensor, batches_of, interleaved, make_files, resumed, rows_of

import mirrored as mr
from mirrored._checkpoint.state import Snapshot, restore_positions
from mirrored._testing.inputs import _make_workers, _run_together
from mirrored.data._iterator import DistributedIterator, joined
from mirrored.data._passes import Elements
from mirrored.data._sharing.agree import InputWorker
from mirrored.data._sharing.plan import make_plan
from mirrored.data._sharing.steps import LocalReplicas, Step

pytestmark = pytest.mark.usefixtures("grains_threads_end")


class WithStateDict:
    """The protocol of Hugging Face's IterableDataset and torchdata's StatefulDataLoader: the dataset holds the state."""

    next = start = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        start, self.start = self.start, 0
        for self.next in range(start + 1, 5):
            yield np.arange(3) + 10 * self.next

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = 99
        self.start = state["next"]


class WithEagerIterator:
    """As torchdata's StatefulDataLoader: an iterator takes the position when it is made; asking for one makes one."""

    class Iterator:
        def __init__(self, loader: "WithEagerIterator") -> None:
            self.next, loader.start = loader.start, 0
            if self.next > 4:
                raise IndexError(self.next)

        def __iter__(self) -> "WithEagerIterator.Iterator":
            return self

        def __next__(self) -> np.ndarray:
            if self.next >= 4:
                raise StopIteration
            self.next += 1
            return np.arange(3) + 10 * self.next

    start, is_fresh = 0, False
    current: Iterator | None = None

    def __iter__(self) -> Any:
        if self.current is None or not self.is_fresh or self.current.next >= 4:
            self.current = self.Iterator(self)
        self.is_fresh = False
        return self.current

    def state_dict(self) -> dict[str, int]:
        if self.current is None:
            self.current, self.is_fresh = self.Iterator(self), True
        return {"next": self.current.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.current, self.is_fresh, self.start = None, False, state["next"]


class Values(grain.transforms.Map):
    def map(self, element: int) -> np.int32:
        return np.int32(element)


def numpy_dataset(**options: Any) -> mr.data.NumpyDataset:
    return mr.data.NumpyDataset(np.arange(11, dtype="int32"), 4, **options)


SOURCES: dict[str, Callable[[], Any]] = {
    "numpy": numpy_dataset,
    "numpy, shuffled, two epochs": lambda: numpy_dataset(shuffle_seed=5, num_epochs=2),
    "numpy, drop_remainder": lambda: numpy_dataset(drop_remainder=True, num_epochs=2),
    "list": lambda: [np.arange(k, k + 5) for k in (0, 10, 20)],
    "grain map": lambda: grain.MapDataset.range(11).shuffle(seed=1).batch(4),
    "grain iter": lambda: interleaved(make_files([3, 5, 2])).filter(lambda n: n != 4).batch(4),
    "grain loader": lambda: grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 11, 1),
        sampler=grain.samplers.IndexSampler(11, shuffle=True, seed=2, num_epochs=1),
        operations=[Values(), grain.transforms.Batch(4)],
    ),
    "state_dict": WithStateDict,
    "state_dict, eager": WithEagerIterator,
}


@pytest.mark.parametrize("source", SOURCES)
def test_resuming_with_another_number_of_replicas_gives_every_example_once(source) -> None:
    whole = batches_of(STRATEGIES[1].distribute_dataset(SOURCES[source]()))
    for number, at in enumerate(sorted({source.startswith("state_dict"), 1, 2, len(whole)})):
        options, counts = mr.InputOptions(prefetch=2 * (number % 2)), (2, 3) if number % 2 else (3, 1)
        first, second = (STRATEGIES[count].distribute_dataset(SOURCES[source](), options) for count in counts)
        assert resumed(first, at, second) == whole


def test_a_position_in_rows_holds_for_batches_of_another_size() -> None:
    rows, distribute = mr.data.NumpyDataset(np.arange(8)), STRATEGIES[2].distribute_dataset
    for after, rest in (
        (rows.batch(3), [[4, 5, 6], [7]]), (rows.batch(3).take(2), [[4, 5]]), (rows.batch(3, drop_remainder=True), [[4, 5, 6]]),
        (rows.batch(3).take(2).repeat(2), [[4, 5], [0, 1, 2], [3, 4, 5]]),
        (rows.batch(3).repeat(2).take(4), [[4, 5, 6], [7], [0, 1, 2]]),
    ):  # fmt: skip
        assert resumed(distribute(rows.batch(2)), 2, distribute(after)) == [[0, 1], [2, 3], *rest]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n: grain.MapDataset.range(24).shuffle(seed=0).batch(n), r"of \[4\] rows, and they have \[8\] here: rows would"),
        (lambda n: grain.MapDataset.range(24).batch(n).to_iter_dataset(), r"of \[4\] rows, and they have \[8\] here: rows would"),
        (lambda n: list(np.arange(24).reshape(-1, n)), r"first had 4 rows, and here it has 8: rows .* use strategy\.make_nu"),
        (lambda n: grain.MapDataset.range(24).shuffle(seed=0).to_iter_dataset().batch(n), None),
    ],
)
def test_a_position_that_counts_batches_is_refused_for_batches_of_another_size(make, message) -> None:
    first, same, other = (iter(STRATEGIES[2].distribute_dataset(make(n))) for n in (4, 4, 8))
    with first, same, other:
        taken = [rows_of(next(first)) for _ in range(2)]
        state = first.get_state()
        old = {**state, "source": {name: n for name, n in state["source"].items() if name != "first_rows"}}
        old.pop("sizes", None)  # as saved before positions said so
        rest = batches_of(first)
        for each in (state, old):
            same.set_state(each)
            assert batches_of(same) == rest
        if message is None:
            other.set_state(state)
            assert np.sort(np.concatenate(taken + batches_of(other))).tolist() == list(range(24))
        else:
            with pytest.raises(ValueError, match=message):
                other.set_state(state)
            other.set_state(old)


def test_the_passes_after_a_restart_have_the_orders_of_the_unbroken_run() -> None:
    def make(count: int) -> mr.data.DistributedDataset:
        return STRATEGIES[count].distribute_dataset(numpy_dataset(shuffle_seed=1))

    unbroken, first, second = make(2), make(2), make(3)
    whole = [batches_of(unbroken) for _ in range(3)]
    assert batches_of(first) == whole[0] and resumed(first, 1, second) == whole[1] and batches_of(second) == whole[2]


class WithTensors:
    """As a shuffled StatefulDataLoader of torchdata: its state has the generator's as a tensor of bytes, among other things."""

    def __init__(self) -> None:
        self.at, self.generator = 0, np.random.default_rng(7).integers(0, 256, 16, np.uint8)

    def __iter__(self) -> Iterator[np.ndarray]:
        order = np.random.default_rng(self.generator).permutation(12).astype(np.int32)
        start, self.at = self.at, 0
        for self.at in range(start + 1, 4):
            yield order[4 * (self.at - 1) : 4 * self.at]

    def state_dict(self) -> dict[str, Any]:
        sampler = {"samples_yielded": 4 * self.at, "sampler_iter_state": {"generator": Tensor(self.generator), "yielded": 4}}
        return {"_sampler_iter_state": sampler, "_num_yielded": self.at, "dataset_state": None, "of_workers": [Tensor(np.eye(2))]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        generator = state["_sampler_iter_state"]["sampler_iter_state"]["generator"]
        assert isinstance(generator, Tensor) and generator.array.flags.writeable
        assert np.array_equal(state["of_workers"][0].array, np.eye(2))
        self.at, self.generator = state["_num_yielded"], generator.array


def test_a_shuffled_loader_whose_state_holds_tensors_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor, from_numpy=Tensor))
    whole = batches_of(STRATEGIES[1].distribute_dataset(WithTensors()))
    for at in (1, 2):
        other = WithTensors()
        other.generator = other.generator[::-1]  # as in another process, which draws another seed
        first, second = STRATEGIES[2].distribute_dataset(WithTensors()), STRATEGIES[3].distribute_dataset(other)
        assert resumed(first, at, second) == whole


def test_the_position_is_kept_when_the_iterator_goes_on_ends_or_is_closed() -> None:
    iterator = iter(STRATEGIES[2].distribute_dataset(numpy_dataset()))
    states = [iterator.get_state(), *(iterator.get_state() for _ in iterator)]
    assert [state["source"]["row"] for state in states] == [0, 4, 8, 11]
    assert iterator.get_state() == states[-1]
    iterator.set_state(states[1])
    assert rows_of(next(iterator)) == [4, 5, 6, 7]
    iterator.close()
    assert iterator.get_state() == states[2]
    with iter(STRATEGIES[2].distribute_dataset(numpy_dataset())) as iterator:
        pass
    with pytest.raises(ValueError, match="closed before it read anything"):
        iterator.get_state()


def test_a_position_that_cannot_be_saved_is_an_error_only_when_asked_for() -> None:
    no_position = r"Reiterable has no position that could be saved: .* Use strategy\.make_numpy_dataset"
    for state, error, message in (
        (None, TypeError, no_position), (object, TypeError, "which JSON cannot hold"), (lambda: 1 // 0, ZeroDivisionError, "div"),
        (lambda: {"done": [{0: 6}]}, TypeError, "has the key 0, which would come back from JSON as a text"),
    ):  # fmt: skip
        source = Reiterable(lambda: iter([np.arange(4), np.arange(4, 8)]))
        if state is not None:
            source.state_dict = state
        iterator = iter(STRATEGIES[2].distribute_dataset(source))
        next(iterator)
        with pytest.raises(error, match=message):
            iterator.get_state()
        if state is None:
            with pytest.raises(error, match=message):
                iterator.set_state({**STATE, "source": {}})
        assert rows_of(next(iterator)) == [4, 5, 6, 7]


def of_rows(**changes: Any) -> dict[str, Any]:
    return {**STATE, "source": {"pass": 0, "epoch": 0, "row": 4, "num_rows": 11, "seed": 1} | changes}


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    whole = [batch.tolist() for batch in numpy_dataset(shuffle_seed=1)]
    iterator = iter(STRATEGIES[2].distribute_dataset(numpy_dataset(shuffle_seed=1)))
    taken = [rows_of(next(iterator))]
    before = iterator.get_state()
    for state, error, message in [
        ({}, TypeError, r"state is \{\}; expected what get_state\(\)"),
        ({**STATE, "source": None}, TypeError, r"expected what get_state"),
        ({**of_rows(), "version": 2}, ValueError, r"the state has version 2, and this library reads version 1"),
        ({**of_rows(), "policy": "FILE"}, ValueError, r"saved under the policy FILE, and this dataset .* by DATA"),
        ({**of_rows(), "rows": -1}, ValueError, r"\{'rows': -1\}; expected numbers of rows"),
        ({**of_rows(), "rows": "a"}, ValueError, r"expected numbers of rows"),
        ({**STATE, "source": {"next": 1}}, ValueError, r"the state does not fit NumpyDataset: KeyError: 'pass'\. .* nothing has"),
        (of_rows(num_rows=12), ValueError, r"it is of a dataset of 12 rows, and this one has 11"),
        (of_rows(seed=2), ValueError, r"its rows are in the order of shuffle seed 2, and here of 1"),
        (of_rows(**{"pass": -1}), ValueError, r"no such position"),
        (of_rows(row="4"), ValueError, r"does not fit"),
        (of_rows(row=1.5), ValueError, r"no such position"),
        (of_rows(epoch=1), ValueError, r"it is in epoch 1, counted from 0, of rows that are repeated 1 times here"),
    ]:
        with pytest.raises(error, match=message):
            iterator.set_state(state)
        assert iterator.get_state() == before
    assert taken + batches_of(iterator) == whole


@pytest.mark.parametrize("dataset_class", [WithStateDict, WithEagerIterator])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_position_that_a_dataset_holds_is_changed_while_nothing_is_read_ahead(dataset_class: Any, prefetch: int) -> None:
    distributed = STRATEGIES[2].distribute_dataset(dataset_class(), mr.InputOptions(prefetch=prefetch))
    whole = batches_of(distributed)
    iterator = iter(distributed)
    with pytest.raises(ValueError, match=r"With\w+ tells its position only after the first batch"):
        iterator.get_state()  # the dataset may still hold that of the last pass
    states = [(next(iterator), iterator.get_state())[1] for _ in range(3)]
    for number, state in enumerate(states, 1):
        iterator.set_state(state)
        assert rows_of(next(iterator)) == whole[number]
        with pytest.raises(ValueError, match=r"the state does not fit With.*nothing has changed"):
            iterator.set_state({**STATE, "source": {"wrong": 1}})
        assert iterator.get_state()["source"] == {"next": number + 1}
        assert batches_of(iterator) == whole[number + 1 :] and batches_of(distributed) == whole
    distributed = STRATEGIES[2].distribute_dataset(dataset_class(), mr.InputOptions(prefetch=prefetch))
    with iter(distributed) as iterator, pytest.raises(ValueError, match=r"the state does not fit With"):
        iterator.set_state({**STATE, "source": {"wrong": 1}})
    assert batches_of(distributed) == whole


def test_the_position_of_a_worker_is_for_that_worker_and_says_how_much_of_a_batch_was_taken(monkeypatch) -> None:
    """By FILE a step may end in the middle of a batch; without it, rows would be used twice after a restart."""
    me = InputWorker(0, 2, lambda value: [value, value])
    elements = Elements(make_plan(Files([[1], [2]]).batch(1), "file", me, 2))
    first, second = (DistributedIterator(elements, LocalReplicas(2, me), STRATEGIES[2]._mesh, 0) for _ in range(2))
    with first, second:
        step = Step(None, (), first._open().start, {"batch_size": 4})
        monkeypatch.setattr(first, "_next", lambda: ("a batch", step))
        assert next(first) == "a batch"
        state = first.get_state()
        [part] = state["source"]["by_file"]
        assert (state["worker"], part["rows"], state["batch_size"]) == ([0, 2], 0, 4)
        taken = {**state, "source": {"by_file": [{**part, "rows": 3}]}}
        for same in (state, taken):
            second.set_state(same)
            assert second.get_state() == same
        second.set_state({**state, "source": {"position": 0}, "rows": 3})  # as saved before there were parts
        assert second.get_state()["source"]["by_file"] == [{**part, "rows": 3, "state": {"position": 0}}]
        for worker in ([1, 2], [0, 3], None):
            with pytest.raises(ValueError, match=r"each worker has a position of its own\. With mr\.InputOptions\(auto_shard"):
                second.set_state({**state, "worker": worker})
        with pytest.raises(ValueError, match=r"holds \[\{'files': 0\}\]; expected parts of a dataset's files"):
            second.set_state({**state, "source": {"by_file": [{"files": 0}]}})
        larger = dataclasses.replace(elements, plan=dataclasses.replace(elements.plan, dataset=elements.plan.dataset.batch(2)))
        with DistributedIterator(larger, LocalReplicas(2, me), STRATEGIES[2]._mesh, 0) as other:
            for saved, kept in ((taken, {}), ({**taken, "sizes": [2, 1]}, {"batch_size": 4})):
                other.set_state(saved)
                found = other.get_state()
                assert found["source"] == taken["source"]
                assert {name: n for name, n in found.items() if name == "batch_size"} == kept


def one_run(make: Callable[[], Any], num_workers: int, states: list[Any], most: int | None, passes: int = 1) -> tuple[Any, Any]:
    """Take some steps on so many workers, from the states of any number of workers on; return the rows and the new states."""

    def read(worker: InputWorker) -> tuple[list[int], Any]:
        plan, layout = make_plan(make(), "auto", worker, num_workers), LocalReplicas(num_workers, worker, lookahead=4)
        rows: list[int] = []
        with DistributedIterator(Elements(plan, limits=(("repeat", passes),)), layout, STRATEGIES[1]._mesh, 0) as iterator:
            if states:
                iterator.set_state(states[worker.index] if len(states) == num_workers else joined(iterator, states))
            for step in itertools.islice(iterator._open().steps(layout), most):
                iterator._position, iterator._extra = step.position, step.extra
                rows += step.stacked[0, : step.sizes[worker.index]].tolist()
            return rows, json.loads(json.dumps(iterator.get_state()))

    rows, after = zip(*_run_together(read, _make_workers(num_workers)), strict=True)
    return list(itertools.chain(*rows)), list(after)


def numbered(records: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(records), np.int32)


def shuffled(ds: Any) -> Any:
    ds = gx.WindowShuffleIterDataset(ds.map(lambda record: np.frombuffer(record, np.int32)[0]), window_size=3, seed=1)
    return ds.batch(3)


@hypothesis.settings(deadline=None, max_examples=8, derandomize=True)
@hypothesis.example(sizes=[5, 7, 3], runs=[(3, 2), (2, 1), (3, 9)], batch_size=6, pipeline="records")
@hypothesis.example(sizes=[4, 4], runs=[(1, 1), (2, 1), (3, 1), (1, 1)], batch_size=4, pipeline="records")
@hypothesis.given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    runs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=5),
    batch_size=st.integers(1, 7),
    pipeline=st.sampled_from(["records", "filtered", "shuffled", "in memory"]),
)
def test_any_number_of_workers_goes_on_with_files(sizes, runs, batch_size, pipeline) -> None:
    """Each record once in each of two passes, whatever the numbers of workers, and wherever they stopped."""
    total = sum(sizes)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, records in enumerate(make_files(sizes)):
            files.append(f"{folder}/{number}")
            mr.data.write_tfrecords(files[-1], [np.int32(record).tobytes() for record in records])
        makes = {
            "records": lambda: mr.data.tfrecord_dataset(files).batch(batch_size).map(numbered),
            "filtered": lambda: mr.data.tfrecord_dataset(files).filter(any).batch(batch_size, batch_fn=numbered),
            "shuffled": lambda: shuffled(mr.data.tfrecord_dataset(files)),
            "in memory": lambda: Files(make_files(sizes)).batch(batch_size),
        }
        found: list[int] = []
        states: list[Any] = []
        for num_workers, most in [*runs, (2, None)]:
            rows, states = one_run(makes[pipeline], num_workers, states, most, passes=2)
            found += rows
    assert collections.Counter(found) == dict.fromkeys(range(1, total + 1), 2)


@pytest.mark.parametrize("strategy", [*STRATEGIES.values()])
def test_a_restore_divides_the_files_anew(strategy: mr.MirroredStrategy, tmp_path: Path) -> None:
    """Three workers, then one process, by the iterators of a program, then two: under the default policy."""
    files = [tmp_path / str(number) for number in range(4)]
    for number, path in enumerate(files):
        mr.data.write_tfrecords(path, [np.int32(10 * number + k).tobytes() for k in range(5)])

    def make(names: list[Path] = files) -> Any:
        return mr.data.tfrecord_dataset(names).batch(4).map(numbered)

    def restored(dataset: Any, by_worker: list[Any]) -> DistributedIterator:
        iterator = iter(dataset)
        saved = Snapshot({"batches": {"kind": "position", "by_worker": by_worker}}, {})
        restore_positions({"batches": iterator}, saved, 0, 1)
        return iterator

    first, states = one_run(make, 3, [], 2)
    with restored(strategy.distribute_dataset(make()).repeat(2), [{**state, "places": [0]} for state in states]) as iterator:
        second = batches_of(iterator, 2)
        alone = iterator.get_state()
        assert [len(batch) for batch in second] == [4, 4] and (alone["policy"], alone["worker"]) == ("FILE", [0, 1])
        rest = batches_of(iterator)
        assert iterator.get_state()["policy"] == "DATA", "the next pass is as any other of one process"
    third, _ = one_run(make, 2, [{**alone, "places": [0]}], None)
    every = sorted(10 * number + k for number in range(4) for k in range(5))
    assert sorted([*first, *itertools.chain(*second), *third]) == every
    assert sorted([*first, *itertools.chain(*second, *rest)]) == sorted(every * 2)
    by_row = mr.InputOptions(auto_shard_policy="data")
    for dataset, error in (
        (strategy.distribute_dataset(make(), by_row), "saved under the policy FILE, and this dataset is shared out by DATA"),
        (strategy.distribute_dataset(numpy_dataset()), "saved under the policy FILE, and this dataset is shared out by DATA"),
        (
            strategy.distribute_dataset(make(files[:2])),
            "the state is of 4 files, and the dataset has 2; make the",
        ),
    ):
        with pytest.raises(ValueError, match=error):
            restored(dataset.repeat(2), states)
