"""Datasets and loaders of PyTorch, which is never imported."""

from __future__ import annotations

import sys
from typing import Any

from .counted import begin
from .kind import Cut, SourceKind


def _is_of_torch(dataset: object, *names: str) -> bool:
    torch = sys.modules.get("torch.utils.data")
    return isinstance(dataset, tuple(getattr(torch, name) for name in names if hasattr(torch, name)))


def _why_no_batches(dataset: object, verb: str, size: str) -> str | None:
    if not _is_of_torch(dataset, "Dataset") or _is_of_torch(dataset, "IterableDataset"):
        return None
    return (
        f"is a map-style dataset of torch, whose elements are single examples. Write torch.utils.data.DataLoader(dataset, "
        f"batch_size={size}), or batch_size=None if its elements are batches already."
    )


def _cut(loader: Any) -> Cut | None:
    if getattr(loader, "collate_fn", None) is not getattr(sys.modules["torch.utils.data"], "default_collate", None):
        return None  # a user's function may change the number of rows
    try:
        return Cut(len(loader.sampler), loader.batch_size, len(loader)) if loader.batch_size else None
    except (AttributeError, TypeError, RuntimeError):  # a stream, or a loader that does not know its length
        return None


TORCH = SourceKind(
    is_one=lambda dataset: _is_of_torch(dataset, "Dataset", "DataLoader"),
    start=begin,
    cut=_cut,
    why_no_batches=_why_no_batches,
)
