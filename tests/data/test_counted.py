"""A function that makes an iterator is a dataset: called once for each pass, its position is the number of batches taken."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pipelines import STRATEGIES, batches_of, resumed
from simulated_workers import run_workers

import mirrored as mr
from mirrored import testing
from mirrored.data._sources.open import adapted

EPOCH = [[*range(8)], [*range(8, 16)], [16, 17, 18]]


def rows(num_rows: int = 19, size: int = 8) -> Iterator[np.ndarray]:
    for start in range(0, num_rows, size):
        yield np.arange(start, min(start + size, num_rows))


def endless() -> Iterator[np.ndarray]:
    return (np.full(4, number) for number in itertools.count())


@pytest.mark.parametrize(("count", "prefetch"), [(1, 2), (3, 0)])
def test_each_pass_calls_the_function_once(count: int, prefetch: int) -> None:
    calls: list[Any] = []

    def batches() -> Iterator[np.ndarray]:
        calls.append(1)
        return rows()

    distributed = STRATEGIES[count].distribute_dataset(batches, mr.InputOptions(prefetch=prefetch))
    assert not calls and batches_of(distributed) == EPOCH == batches_of(distributed) and len(calls) == 2
    doubled = distributed.map(lambda x: 2 * x).take(2).repeat(2)
    assert batches_of(doubled) == [[2 * row for row in batch] for batch in EPOCH[:2]] * 2 and len(calls) == 4
    with pytest.raises(TypeError, match="the length of FunctionDataset is not known before it ends"):
        len(distributed)
    with pytest.raises(TypeError, match="the elements of FunctionDataset are like is known when an iterator has given one"):
        _ = STRATEGIES[count].distribute_dataset(batches).element_spec
    assert len(calls) == 4, "nothing is read to learn these"


@pytest.mark.parametrize("function", [rows, functools.partial(rows, 19)])
def test_a_resume_passes_over_the_batches_taken(function: Callable[[], Any]) -> None:
    one, two, three = (strategy.distribute_dataset(function).repeat(2) for strategy in STRATEGIES.values())
    for at in range(7):
        assert resumed(two, at, three) == EPOCH * 2
    assert resumed(one, 4, one.map(lambda x: x)) == EPOCH * 2
    stream = STRATEGIES[3].distribute_dataset(endless)
    assert resumed(stream, 5, stream, most=2) == batches_of(stream, 7)


@pytest.mark.parametrize(
    ("other", "message"),
    [(lambda: rows(8), "batch 2 of 1"), (lambda: rows(19, 4), "first had 8 rows, and here it has 4")],
)
def test_a_position_in_another_iterator_is_refused_and_changes_nothing(other: Callable[[], Any], message: str) -> None:
    with iter(STRATEGIES[2].distribute_dataset(rows)) as iterator:
        batches_of(iterator, 2)
        state = iterator.get_state()
    with iter(STRATEGIES[3].distribute_dataset(other)) as iterator:
        first = batches_of(iterator, 1)
        with pytest.raises(ValueError, match=message):
            iterator.set_state(state)
        assert first + batches_of(iterator) == batches_of(STRATEGIES[3].distribute_dataset(other))


def test_several_workers_see_one_order_or_are_told() -> None:
    seeds = itertools.count()

    def shuffled() -> Iterator[np.ndarray]:
        yield np.random.default_rng(next(seeds)).permutation(8)

    found = testing.input_of_workers(lambda: rows, num_workers=3)
    assert found.how.startswith("AUTO chose DATA, because FunctionDataset is no dataset of files")
    found.assert_each_row_once(rows)
    run = run_workers(lambda worker: adapted(rows), 2, 2, limits=[("repeat", 2)])
    assert [batch.tolist() for batch in run.global_batches()] == EPOCH * 2
    with pytest.raises(ValueError, match="worker 0 and worker 1 hold different records"):
        testing.input_of_workers(lambda: shuffled, num_workers=2)
    own = testing.input_of_workers(lambda: shuffled, num_workers=2, options=mr.InputOptions(auto_shard_policy="off"))
    assert len(own.steps) == 1
    parts = testing.input_of_workers(lambda context: rows, num_workers=2, from_function=True)
    assert len(parts.steps) == 3, "each replica takes an element of its own worker"


def begun() -> Iterator[np.ndarray]:
    iterator = rows()
    next(iterator)
    return iterator


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda: [np.ones(4)], TypeError, r"returned \[.*\] of type list; .*Of this result write lambda: iter\(function\(\)\)"),
        (lambda: np.ones(4), TypeError, r"returned array.* of type ndarray; .*`yield batch` makes one\.$"),
        (lambda: None, TypeError, "returned None of type NoneType; expected a new iterator over global batches"),
        (begun, ValueError, r"<function begun .*returned <generator object rows .*>, which has begun already"),
        (lambda: next(iter([])), RuntimeError, "raised StopIteration: an iterator that it calls `next` on has ended"),
    ],
)
def test_what_is_no_new_iterator_is_said(function: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        next(iter(STRATEGIES[2].distribute_dataset(function)))


@pytest.mark.parametrize("iterator", [rows(), iter([np.arange(8)] * 3), endless()])
def test_one_iterator_for_two_passes_is_refused(iterator: Iterator[Any]) -> None:
    distributed = STRATEGIES[2].distribute_dataset(lambda: iterator)
    for again in (distributed.take(1).repeat(2), distributed):
        with pytest.raises(ValueError, match=r"has begun already.*Make the iterator inside of the function"):
            batches_of(again)


def test_what_cannot_be_called_without_arguments_is_refused_at_once() -> None:
    distribute = STRATEGIES[2].distribute_dataset
    with pytest.raises(
        TypeError, match=r"missing a required argument: 'n'. Give .*functools\.partial\(needs, \.\.\.\), or lambda"
    ):
        distribute(needs)
    with pytest.raises(TypeError, match=r"got <class 'list'> of type type; .*or a function that makes an iterator"):
        distribute(list)
    with pytest.raises(TypeError, match=r"used only once.* without calling it: rows; or with arguments lambda: rows\(\.\.\.\)"):
        distribute(rows())


def needs(n: int) -> Iterator[np.ndarray]:
    return rows(n)
