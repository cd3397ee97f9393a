"""How many rows has the last batch of a dataset that knows its size?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .numpy_dataset import NumpyDataset


class LastBatch(NamedTuple):
    """The last batch of a pass, when it has other rows than those before."""

    num_rows: int
    rows_before: int  # of each batch before it
    step: int  # its number, counted from 1


def last_batch(dataset: Any) -> LastBatch | None:
    """Return what the last batch of a dataset is, without reading one; None where it is like the others, or nobody knows."""
    if isinstance(dataset, NumpyDataset):
        return _of_numpy(dataset)
    if isinstance(dataset, list | tuple):
        return _of_batches(dataset)
    torch = sys.modules.get("torch.utils.data")
    return _of_loader(dataset) if isinstance(dataset, getattr(torch, "DataLoader", ())) else None


def _of_numpy(dataset: NumpyDataset) -> LastBatch | None:
    return _of_rows(dataset.num_rows, dataset.batch_size, dataset._batches_until_end())


def _of_rows(num_rows: int, batch_size: int | None, num_batches: int | None) -> LastBatch | None:
    complete, rest = divmod(num_rows, batch_size) if batch_size else (0, 0)
    is_reached = num_batches is None or num_batches > complete
    return LastBatch(rest, batch_size, complete + 1) if batch_size and complete and rest and is_reached else None


def _of_batches(batches: Sequence[Any]) -> LastBatch | None:
    if len(batches) < 2:
        return None
    before, last = (_num_rows(batch) for batch in (batches[0], batches[-1]))
    return LastBatch(last, before, len(batches)) if before and last and last != before else None


def _num_rows(batch: Any) -> int:
    arrays = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return int(np.shape(arrays[0])[0]) if arrays else 0


def _of_loader(loader: Any) -> LastBatch | None:
    try:
        num_rows = len(loader.sampler)
    except TypeError:  # a stream
        return None
    return _of_rows(num_rows, loader.batch_size, len(loader) if loader.drop_last else None)
