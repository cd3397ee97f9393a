"""Datasets that tests of the input read, and drivers that read them."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from grain import experimental as gx

import mirrored as mr

STRATEGIES = {count: mr.MirroredStrategy([f"cpu:{i}" for i in range(count)]) for count in (1, 2, 3)}
WITHOUT_THREAD = mr.InputOptions(prefetch=0)
#: What the position of one process has beside that of its source.
STATE = {"version": 1, "policy": "DATA", "worker": None}


def rows_of(batch: Any) -> Any:
    """Return the rows of each PerReplica of a batch, joined in replica order."""
    return jax.tree.map(_rows, batch, is_leaf=lambda leaf: isinstance(leaf, mr.PerReplica))


def _rows(value: mr.PerReplica) -> list[Any]:
    return [row for part in value.values for row in np.asarray(part).tolist()]


def batches_of(distributed: Iterable[Any], most: int | None = None) -> list[Any]:
    return [rows_of(batch) for batch in itertools.islice(distributed, most)]


def resumed(first: mr.data.DistributedDataset, at: int, second: mr.data.DistributedDataset, most: int | None = None) -> list[Any]:
    """Take some batches of one dataset, and the others of a second one from the position on, which passes through JSON."""
    with iter(first) as iterator:
        begun = batches_of(iterator, at)
        state = iterator.get_state()
    assert json.loads(json.dumps(state)) == state
    with iter(second) as iterator:
        iterator.set_state(state)
        assert iterator.get_state() == state
        return begun + batches_of(iterator, most)


class Files(grain.IterDataset):
    """Files of numbers, with the interface of our TFRecord source."""

    def __init__(self, files: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.files = tuple(files)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        self.files = self.files[sl]

    def __iter__(self) -> grain.DatasetIterator:
        return _FilesIterator(self.files)


class _FilesIterator(grain.DatasetIterator):
    def __init__(self, files: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.records = list(itertools.chain(*files))
        self.position = 0

    def __next__(self) -> int:
        if self.position == len(self.records):
            raise StopIteration
        self.position += 1
        return self.records[self.position - 1]

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def make_files(sizes: Sequence[int]) -> list[list[int]]:
    numbers = itertools.count(1)
    return [[next(numbers) for _ in range(size)] for size in sizes]


def pairs(ds: Any) -> Any:
    return ds.map(lambda n: {"x": np.int32(n), "y": np.full(2, 10 * n, "int32")})


def interleaved(files: Sequence[Sequence[int]]) -> grain.IterDataset:
    return gx.InterleaveIterDataset([Files([file]) for file in files], cycle_length=3)


class Tensor:
    """A tensor of another library, as numpy sees it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype, copy=copy)


class OneBuffer:
    """Batches of numbers, each in the memory of the one before."""

    def __init__(self, num_batches: int, num_rows: int, dtype: str = "int32") -> None:
        self.num_batches, self.num_rows, self.dtype = num_batches, num_rows, dtype

    def __iter__(self) -> Iterator[np.ndarray]:
        buffer = np.empty(self.num_rows, self.dtype)
        for number in range(self.num_batches):
            buffer[:] = np.arange(self.num_rows) + number * self.num_rows
            yield buffer


class Reiterable:
    """Batches that can only be iterated, by a function that makes an iterator; counts the passes."""

    def __init__(self, begin: Any) -> None:
        self.begin, self.num_passes = begin, 0

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        return self.begin()
