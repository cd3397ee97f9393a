"""Counts the batches of a dataset and their rows, without reading them."""

from __future__ import annotations

import collections.abc
import sys
from typing import NamedTuple

from ..._text import counted
from . import grain
from .numpy_dataset import NumpyDataset
from .open import is_sequence
from .verbs import num_steps, rows_of


class LastBatch(NamedTuple):
    """The last batch of a pass, if its number of rows differs from the others'."""

    num_rows: int
    rows_before: int  # the rows of each earlier batch
    step: int  # its number, from 1


def last_batch(dataset: object) -> LastBatch | None:
    """Return the last batch of a dataset, without reading any; None if it is like the others, or unknown."""
    if isinstance(dataset, list | tuple) and is_sequence(dataset) and len(dataset) > 1:
        before, last = rows_of(dataset[0]), rows_of(dataset[-1])
        return LastBatch(last, before, len(dataset)) if before and last and last != before else None
    if isinstance(dataset, NumpyDataset):
        is_of_rows = all(is_by_row for _, is_by_row in dataset.maps)  # a function of batches may change their number of rows
        num_rows, size = dataset.num_rows, (dataset.batch_size or 0) * is_of_rows
        num_batches = num_steps(dataset._num_batches_of_epoch(), (("take", dataset.batches_per_pass),))
    else:
        num_rows, size, num_batches = _rows_of_loader(dataset) or (0, 0, 0)
    complete, rest = divmod(num_rows, size) if size else (0, 0)
    return LastBatch(rest, size, complete + 1) if complete and rest and num_batches > complete else None


def _rows_of_loader(dataset: object) -> tuple[int, int, int] | None:
    """Return the rows of a torch DataLoader, those of each batch but the last, and the number of batches; None if unknown."""
    if not isinstance(dataset, getattr(torch := sys.modules.get("torch.utils.data"), "DataLoader", ())):
        return None
    if getattr(dataset, "collate_fn", None) is not getattr(torch, "default_collate", None):
        return None  # a user's function may change the number of rows
    try:
        return len(dataset.sampler), dataset.batch_size or 0, len(dataset)
    except (TypeError, RuntimeError):  # a stream, or a loader that does not know its length
        return None


def num_batches(dataset: object, at_least: int) -> int:
    """Return how many batches of at least so many rows one pass yields.

    Raises:
        TypeError: when the dataset has no length, or only reading the batches would tell how many rows they have.
    """
    if isinstance(dataset, NumpyDataset):
        return dataset._num_batches(at_least)
    if isinstance(dataset, list | tuple):
        return sum(rows_of(batch) >= at_least for batch in dataset)
    count = _length_of(dataset)
    if at_least == 1:
        return count
    smaller = grain.num_smaller(dataset, at_least) if grain.is_pipeline(dataset) else None  # pyrefly: ignore[bad-argument-type]
    if loader := _rows_of_loader(dataset):
        num_rows, size, _ = loader
        smaller = int(count * size > num_rows and num_rows % size < at_least) if size >= at_least else None
    if smaller is None:
        raise TypeError(
            f"the number of steps of {type(dataset).__name__} is known when they are read: mr.InputOptions(drop_remainder=True) "
            f"drops batches of fewer than {at_least} rows, one for each replica. Count as you go, or leave drop_remainder out."
        )
    return count - smaller


def num_groups(dataset: object, size: int, drop_remainder: bool) -> int:
    """Return in how many steps `size` replicas take one element each; raise TypeError as `num_batches` does."""
    is_in_memory = isinstance(dataset, list | tuple)
    sizes = [rows_of(element) for element in dataset] if is_in_memory else [1] * _length_of(dataset)
    groups = [sizes[i : i + size] for i in range(0, len(sizes), size)]
    return sum(min(group) > 0 and len(group) == size if drop_remainder else any(group) for group in groups)


def _length_of(dataset: object) -> int:
    """Return the length of a dataset; raise TypeError if it has none, or no end."""
    is_known = isinstance(dataset, collections.abc.Sized) and not (grain.is_pipeline(dataset) and not grain.has_length(dataset))
    if not is_known or len(dataset) >= grain.ENDLESS:
        raise TypeError(f"the length of {type(dataset).__name__} is not known before it ends.")
    return len(dataset)


def why_no_batch(dataset: object, gave_some: bool) -> str:
    """Say why a dataset gave no batch in a pass, and perhaps `gave_some` in an earlier one; "" if that was asked for."""
    name = type(dataset).__name__
    if isinstance(dataset, NumpyDataset):
        if 0 in (dataset.batches_per_epoch, dataset.batches_per_pass):
            return ""
        if dataset.drop_remainder and dataset.num_rows < (dataset.batch_size or 0):
            return (
                f"{name} has {counted(dataset.num_rows, 'row')}, fewer than a batch of {dataset.batch_size}, which "
                "drop_remainder=True drops. Make smaller batches, or leave drop_remainder out: then every row is used."
            )
    if isinstance(dataset, list | tuple | NumpyDataset):
        return f"The {name} is empty, or its batches have no rows."
    if gave_some:
        return (
            f"{name} gave no batch in this pass, and gave some in an earlier one: it can be gone through only once. Let its "
            "__iter__, or the function, begin anew each time: open the files, or call the generator function, in there."
        )
    return (
        f"{name} gave no batch with rows. It may have no files or records, a filter may leave all of them out, or they are fewer "
        "than a batch, and its own drop_remainder=True drops them."
    )
