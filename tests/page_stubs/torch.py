"""So much of torch as the pages use: tensors of numpy's, and a DataLoader of rows; last on the path, so a real torch wins.

What it shows is that a page runs to its end, with batches that are no arrays of numpy. That mirrored takes a real loader,
`tests/data/test_sources.py` shows where torch is installed.
"""

import sys
import types
from collections.abc import Iterator

import numpy as np


class Tensor:
    """An array that only `np.asarray` understands."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype, copy=copy)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: object) -> "Tensor":
        return Tensor(self._array[index])


def from_numpy(array: np.ndarray) -> Tensor:
    return Tensor(array)


class Generator:
    def manual_seed(self, seed: int) -> "Generator":
        self.rng = np.random.default_rng(seed)
        return self


class Dataset:
    pass


class IterableDataset(Dataset):
    pass


class TensorDataset(Dataset):
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


class DataLoader:
    drop_last = False

    def __init__(self, dataset: TensorDataset, batch_size: int, shuffle: bool, generator: Generator) -> None:
        assert shuffle
        self.sampler = range(len(dataset.tensors[0]))
        self.dataset, self.batch_size, self._rng = dataset, batch_size, generator.rng

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[list[Tensor]]:
        order = self._rng.permutation(len(self.sampler))
        for start in range(0, len(order), self.batch_size):
            yield [tensor[order[start : start + self.batch_size]] for tensor in self.dataset.tensors]


utils = types.ModuleType("torch.utils")
utils.data = types.ModuleType("torch.utils.data")
for _kind in (Dataset, IterableDataset, TensorDataset, DataLoader):
    setattr(utils.data, _kind.__name__, _kind)
sys.modules |= {"torch.utils": utils, "torch.utils.data": utils.data}
