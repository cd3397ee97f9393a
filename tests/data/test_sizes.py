"""What is known of a dataset before its batches are read: the number of steps, and why there are none."""

import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from pipelines import WITHOUT_THREAD, Reiterable

import mirrored as mr

DROP = mr.InputOptions(drop_remainder=True)
X = np.ones((2, 3), "float32")


def count(distributed: Any) -> int:
    return sum(1 for _ in distributed)  # the line that is warned of


def said(do: Callable[[], object]) -> tuple[object, list[str]]:
    """Call a function; return its result, and the warnings at lines of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = do()
    assert {Path(warning.filename) for warning in caught} <= {Path(__file__)}, "the user's line"
    return result, [str(warning.message) for warning in caught]


def rows(num_rows: int) -> np.ndarray:
    return np.ones((num_rows, 3), "float32")


def source(num_rows: int) -> grain.MapDataset:
    return grain.MapDataset.source(list(rows(num_rows)))


WITHOUT_STEPS: dict[str, tuple[Callable[[Any], Any], mr.InputOptions, str]] = {
    "fewer rows than a batch": (lambda s: s.make_numpy_dataset(X).batch(8, drop_remainder=True), WITHOUT_THREAD,
        r"NumpyDataset has 2 rows, fewer than a batch of 8, which drop_remainder=True drops\. Make smaller batches, or leave"),
    "no rows": (lambda s: s.make_numpy_dataset(X[:0]).batch(8).repeat(), WITHOUT_THREAD, "The NumpyDataset is empty, or its b"),
    "a map that keeps none": (lambda s: s.make_numpy_dataset(X).batch(2).map(lambda x: x[:0]), DROP, "The NumpyDataset is empty"),
    "fewer rows than replicas": (lambda s: s.make_numpy_dataset(X).batch(8), DROP,
        r"InputOptions\(drop_remainder=True\) drops a batch in which some of the 3 replicas .*; here it dropped 2 rows, and"),
    "the same, again and again": (lambda s: [X] * 3, DROP, "here it dropped 6 rows"),
    "an empty list": (lambda s: [], DROP, r"The list is empty, or its batches have no rows\."),
    "without a thread": (lambda s: [X[:0]], WITHOUT_THREAD, r"The list is empty, or its batches have no rows\."),
    "an empty stream": (lambda s: Reiterable(lambda: iter([])), DROP, "Reiterable gave no batch with rows"),
    "grain": (lambda s: source(2).batch(8, drop_remainder=True).repeat(), DROP, r"gave no batch with rows\. .* its own drop_rem"),
    "a filter": (lambda s: source(2).to_iter_dataset().filter(lambda x: False).batch(2), DROP, "a filter may leave all of them"),
    "a function": (lambda s: lambda context: [X[:0]] * 4, WITHOUT_THREAD, "The list is empty"),
    "a function's last": (lambda s: lambda context: [X, X], DROP, "here it dropped 4 rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_STEPS)
def test_a_pass_without_a_step_says_why(strategy3: mr.MirroredStrategy, name: str) -> None:
    make, options, why = WITHOUT_STEPS[name]
    dataset = make(strategy3)
    verb = strategy3.distribute_datasets_from_function if callable(dataset) else strategy3.distribute_dataset
    distributed = verb(dataset, options).repeat()
    with pytest.warns(UserWarning, match=rf"^no step was made in a pass over the dataset\. .*{why}") as found:
        assert count(distributed) == 0
    assert [(warning.filename, warning.category) for warning in found] == [(__file__, UserWarning)]
    iterator = iter(distributed)
    (first, second), messages = said(lambda: (next(iterator, None), next(iterator, None)))
    assert first is second is None and len(messages) == 1, "once for an iterator"


def test_a_pass_that_made_steps_before_or_was_ended_by_the_program_says_nothing(strategy3: mr.MirroredStrategy) -> None:
    one, none = strategy3.distribute_dataset([X]), strategy3.distribute_dataset([])

    def at_the_end(distributed: Any) -> int:
        with iter(distributed) as iterator:
            states = [iterator.get_state() for _ in iterator]
        with iter(distributed) as again:
            again.set_state(states[-1])
            return count(again)

    def left_early() -> int:
        for _ in one:
            break
        with iter(one) as iterator:
            iterator.close()
            return count(iterator)

    taken = strategy3.make_numpy_dataset(X).batch(2).take(0)
    for asked in (none.take(0), strategy3.distribute_dataset(taken), strategy3.distribute_dataset(taken.repeat())):
        assert said(lambda asked=asked: count(asked)) == (0, [])
    for do in (lambda: at_the_end(one), lambda: at_the_end(one.repeat(2)), left_early):
        assert said(do) == (0, [])
    thread_said: list[str] = []
    thread = threading.Thread(target=lambda: thread_said.extend(said(lambda: count(none))[1]))
    thread.start()
    thread.join()
    assert len(thread_said) == 1, "of a thread of the program, too"


@pytest.mark.parametrize("make", [lambda s: s.make_numpy_dataset(X).batch(2).repeat(), lambda s: source(2).repeat().batch(2)])
def test_an_endless_dataset_whose_batches_are_all_dropped_is_an_error(strategy3: mr.MirroredStrategy, make: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^1001 batches in a row made no step, and the dataset may have no end\. mr\.InputOptions"
    ):
        count(strategy3.distribute_dataset(make(strategy3), DROP))
    batches = [rows(3), *[X] * 999] * 2
    assert count(strategy3.distribute_dataset(batches, DROP)) == 2, "others were used in between"


PIPELINES: list[Callable[[grain.MapDataset], grain.MapDataset]] = [
    lambda m: m.batch(4).repeat(3), lambda m: m.seed(1).shuffle().batch(4).map(lambda x: x).shuffle(seed=2).repeat(2),
    lambda m: m.batch(4, drop_remainder=True).repeat(2)[:3], lambda m: m.batch(2), lambda m: m.repeat().batch(6)[:5],
    lambda m: m.batch(4, batch_fn=lambda records: np.concatenate([records, records, records])), lambda m: m[:0].batch(4),
    lambda m: grain.MapDataset.concatenate([m.batch(4), m[:4].batch(3)]).seed(0).shuffle().repeat(2),
    lambda m: grain.MapDataset.mix([m[:4].batch(4), m[:3].batch(3)])[:1],
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:no step was made")
@pytest.mark.usefixtures("grains_threads_end")
def test_the_length_is_the_number_of_steps(strategy3: mr.MirroredStrategy) -> None:
    """Of arrays, lists and grain's pipelines; `drop_remainder` drops a batch with fewer rows than replicas whole."""
    for num_rows, options in ((5, DROP), (7, DROP), (6, WITHOUT_THREAD)):
        parts = [rows(num_rows)[start : start + 4] for start in range(0, num_rows, 4)]
        datasets = [
            strategy3.make_numpy_dataset(rows(num_rows)).batch(4),
            strategy3.make_numpy_dataset(rows(num_rows)).batch(2),
            strategy3.make_numpy_dataset(rows(num_rows)).batch(4).repeat(3),
            parts,
            tuple([part] for part in parts),
            [*parts, X[:0]],
        ]
        for number, dataset in enumerate([*datasets, *(make(source(num_rows)) for make in PIPELINES)]):
            distributed = strategy3.distribute_dataset(dataset, options)
            assert len(distributed) == count(distributed), (num_rows, options, number)
        for elements in (parts, [X, X[:0], *parts], [X[:0]] * 3, source(num_rows).batch(4)):
            distributed = strategy3.distribute_datasets_from_function(lambda context, elements=elements: elements, options)
            assert len(distributed) == count(distributed)


@pytest.mark.usefixtures("grains_threads_end")
def test_a_length_that_only_reading_would_tell_is_none(strategy3: mr.MirroredStrategy) -> None:
    class Sized(Reiterable):
        def __len__(self) -> int:
            return 2

    dataset = Sized(lambda: iter([X, X]))
    assert len(strategy3.distribute_dataset(dataset)) == 2
    mine = source(5).map(lambda x: np.ones((4, 3))).batch(1, batch_fn=lambda records: records[0])  # records that are batches
    for unknown in (dataset, source(5).batch(4)[:2], grain.MapDataset.mix([source(5).batch(4)] * 2), mine):
        with pytest.raises(
            TypeError, match=r"is known when they are read: .* drops batches of fewer than 3 rows, one for each replica"
        ):
            len(strategy3.distribute_dataset(unknown, DROP))
    for longer in (source(5).batch(4).repeat(), source(5).repeat().batch(4), source(5).batch(4).filter(lambda batch: True)):
        with pytest.raises(TypeError, match="is not known before it ends"):
            len(strategy3.distribute_dataset(longer))


def test_a_loader_of_torch_tells_its_rows(strategy3: mr.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    class DataLoader(Reiterable):
        batch_size, sampler, collate_fn = 4, range(9), staticmethod(np.stack)

        def __len__(self) -> int:
            return len(list(self.begin()))

    torch = types.ModuleType("torch.utils.data")
    torch.Dataset = torch.IterableDataset = type("Dataset", (), {})
    torch.DataLoader, torch.default_collate = DataLoader, DataLoader.collate_fn
    monkeypatch.setitem(sys.modules, "torch.utils.data", torch)
    for given in ([rows(4), rows(4), rows(1)], [rows(4), rows(4)]):  # the second with drop_last
        distributed = strategy3.distribute_dataset(DataLoader(lambda given=given: iter(given)), DROP)
        assert len(distributed) == 2 == count(distributed)
    torch.default_collate = "not the loader's"
    with pytest.raises(TypeError, match="of DataLoader is known when they are read"):
        len(distributed)
