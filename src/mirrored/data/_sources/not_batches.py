"""Recognizes datasets that do not yield global batches, but single examples, or one process's share of the rows."""

from __future__ import annotations

import sys

from . import grain

#: grain's transformations that yield their source's elements unchanged, in some order.
_SAME_ELEMENTS = {
    "CacheIterDataset", "ConcatenateIterDataset", "ConcatenateMapDataset", "FilterIterDataset", "FilterMapDataset",
    "InterleaveIterDataset", "LimitIterDataset", "MixedIterDataset", "MixedMapDataset", "PrefetchIterDataset",
    "ProcessPrefetchIterDataset", "RepeatIterDataset", "RepeatMapDataset", "ShuffleMapDataset", "SliceMapDataset",
    "ThreadPrefetchIterDataset", "WindowShuffleIterDataset", "WindowShuffleMapDataset", "WithOptionsIterDataset",
    "_MpContextIterDataset", "_WithSeedIterDataset", "_WithSeedMapDataset",
}  # fmt: skip
#: grain's transformations that turn each element into another.
_MAPS = {
    "MapIterDataset", "MapMapDataset", "MapWithIndexIterDataset", "MapWithIndexMapDataset", "RandomMapIterDataset",
    "RandomMapMapDataset",
}  # fmt: skip
#: Columns of a Hugging Face dataset whose rows are arrays of one shape; after `batch`, lists of such arrays.
_ARRAYS_BY_ROW = {"Array2D", "Array3D", "Array4D", "Array5D", "Image"}


def why_single_rows(dataset: object, size: str) -> str | None:
    """Say why elements are single examples, and what to write, with `size` as batch size; None if they may be batches."""
    if grain.is_pipeline(dataset):
        return _why_grain(dataset, size)
    torch = sys.modules.get("torch.utils.data")
    is_torch = torch is not None and isinstance(dataset, torch.Dataset) and not isinstance(dataset, torch.IterableDataset)
    if is_torch and not hasattr(dataset, "with_format"):
        return (
            f"is a map-style dataset of torch, whose elements are single examples. Write torch.utils.data.DataLoader(dataset, "
            f"batch_size={size}), or batch_size=None if its elements are batches already."
        )
    features = getattr(dataset, "features", None) if hasattr(dataset, "with_format") else None
    for name, feature in features.items() if isinstance(features, dict) else ():
        kind, length = type(feature).__name__, getattr(feature, "length", -1)
        if kind in _ARRAYS_BY_ROW or (kind in ("Sequence", "List", "LargeList") and length > 0):
            return (
                f"has rows, not batches: in its column {name!r} each row is an array ({kind}), whose first axis would be cut. "
                f"Write dataset.batch({size})."
            )
    return None


def _why_grain(dataset: grain.Pipeline, size: str) -> str | None:
    nodes = list(grain.nodes(dataset))
    roots = [node for node in nodes if not node.parents]
    steps = {_kind(node) for node in nodes if node.parents}
    is_mapped = not steps.isdisjoint(_MAPS)
    if is_mapped:  # a function may make a batch of anything but a file's single record
        is_single = all(type(root).__name__ == "TFRecordDataset" and getattr(root, "batch_size", None) is None for root in roots)
    else:
        is_single = all(_kind(root) == "SourceMapDataset" for root in roots)
    if not is_single or not steps <= _SAME_ELEMENTS | _MAPS:
        return None
    return (
        f"has no `batch`: nothing in the pipeline makes batches of the records of {type(roots[0]).__name__}, so the features of "
        f"one record would be cut as if they were rows. Write dataset.batch({size}). If each record is a batch already, say so: "
        "dataset.batch(1, batch_fn=lambda records: records[0])."
    )


def _kind(node: object) -> str:
    """Return the name of one of grain's classes, or "" for a user's class."""
    return type(node).__name__ if type(node).__module__.startswith("grain.") else ""


def why_share(dataset: object) -> str | None:
    """Say which share of the rows a torch DataLoader yields, as with torch.distributed; None if it yields all."""
    batch_sampler = getattr(dataset, "batch_sampler", None)
    for sampler in (getattr(dataset, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        count, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if isinstance(count, int) and isinstance(rank, int) and count > 1:
            return (
                f"gives 1/{count} of the rows, those of rank {rank}, by its {type(sampler).__name__}. The strategy divides the "
                "rows among the replicas and workers itself, so leave the sampler out, and its set_epoch: "
                f"{type(dataset).__name__}(data, batch_size=global_batch_size, shuffle=True)."
            )
    return None
