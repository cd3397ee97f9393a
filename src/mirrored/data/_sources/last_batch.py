"""How many rows has the last batch of a dataset that knows its size?"""

from __future__ import annotations

import sys
from typing import NamedTuple

import jax
import numpy as np

from ..._typing import PyTree
from .numpy_dataset import NumpyDataset


class LastBatch(NamedTuple):
    """The last batch of a pass, when it has other rows than those before."""

    num_rows: int
    rows_before: int  # of each batch before it
    step: int  # its number, counted from 1


def last_batch(dataset: object) -> LastBatch | None:
    """Return what the last batch of a dataset is, without reading one; None where it is like the others, or nobody knows."""
    if isinstance(dataset, NumpyDataset):
        return _of_rows(dataset.num_rows, dataset.batch_size, dataset._batches_until_end())
    if isinstance(dataset, list | tuple) and len(dataset) > 1:
        before, last = _num_rows(dataset[0]), _num_rows(dataset[-1])
        return LastBatch(last, before, len(dataset)) if before and last and last != before else None
    torch = sys.modules.get("torch.utils.data")
    if not isinstance(dataset, getattr(torch, "DataLoader", ())):
        return None
    try:
        num_rows = len(dataset.sampler)
    except TypeError:  # a stream
        return None
    return _of_rows(num_rows, dataset.batch_size, len(dataset) if dataset.drop_last else None)


def _of_rows(num_rows: int, batch_size: int | None, num_batches: int | None) -> LastBatch | None:
    complete, rest = divmod(num_rows, batch_size) if batch_size else (0, 0)
    is_reached = num_batches is None or num_batches > complete
    return LastBatch(rest, batch_size, complete + 1) if batch_size and complete and rest and is_reached else None


def _num_rows(batch: PyTree) -> int:
    arrays = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return int(np.shape(arrays[0])[0]) if arrays else 0
