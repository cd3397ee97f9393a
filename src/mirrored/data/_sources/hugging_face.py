"""Datasets and streams of Hugging Face, which is never imported; by default their rows are lists."""

from __future__ import annotations

from typing import Any

from .counted import BatchesByNumber, OwnPosition, is_by_number
from .kind import SourceKind

#: Columns whose rows are arrays of one shape; after `batch`, lists of such arrays.
_ARRAYS_BY_ROW = {"Array2D", "Array3D", "Array4D", "Array5D", "Image"}


class _StreamPass(OwnPosition):
    """A pass over a copy of a stream: after `load_state_dict` a stream begins every pass at that position."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream.with_format("numpy"))
        if hasattr(stream, "epoch"):
            self._dataset.set_epoch(stream.epoch)

    def set_state(self, state: object) -> None:
        if isinstance(state, dict) and "epoch" in state and hasattr(self._dataset, "epoch"):
            self._dataset.set_epoch(state["epoch"])
        super().set_state(state)


def _is_one(dataset: object) -> bool:
    return all(callable(getattr(type(dataset), name, None)) for name in ("with_format", "iter", "batch"))


def _has_format(dataset: object) -> bool:
    return (getattr(dataset, "format", None) or {}).get("type") is not None


def _why_no_batches(dataset: object, verb: str, size: str) -> str | None:
    features = getattr(dataset, "features", None) or {}  # a stream may not know them
    for name, feature in features.items():
        kind, length = type(feature).__name__, getattr(feature, "length", -1)
        if kind in _ARRAYS_BY_ROW or (kind in ("Sequence", "List", "LargeList") and length > 0):
            return (
                f"has rows, not batches: in its column {name!r} each row is an array ({kind}), whose first axis would be cut. "
                f"Write dataset.batch({size})."
            )
    return None


STREAM = SourceKind(
    is_one=lambda dataset: _is_one(dataset) and hasattr(dataset, "load_state_dict"),
    start=_StreamPass,
    why_no_batches=_why_no_batches,
)
ROWS = SourceKind(
    is_one=lambda dataset: _is_one(dataset) and is_by_number(dataset),
    start=BatchesByNumber,
    adapt=lambda rows: rows if _has_format(rows) else rows.with_format("numpy"),
    keeps_arrays=True,
    sample=BatchesByNumber,
    why_no_batches=_why_no_batches,
)
