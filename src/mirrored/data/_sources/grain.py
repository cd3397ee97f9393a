"""Pipelines of grain: facts about them, read from their public attributes and texts; never imports grain."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from ..._typing import PyTree
from .kind import ENDLESS, SourceKind, length_of
from .verbs import rows_of

if TYPE_CHECKING:
    import grain

    Pipeline: TypeAlias = grain.MapDataset[PyTree] | grain.IterDataset[PyTree]

#: grain reads 500 elements ahead by default; here each is a global batch.
_NUM_BATCHES_AHEAD = 16

#: Transformations whose result for a record does not depend on other files; with others, only the user can choose `FILE`.
_FILE_BY_FILE = {
    "BatchIterDataset", "BestFitPackIterDataset", "CacheIterDataset", "ConcatThenSplitIterDataset", "FilterIterDataset",
    "FirstFitPackIterDataset", "FlatMapIterDataset", "MapIterDataset", "ProcessPrefetchIterDataset", "RandomMapIterDataset",
    "RebatchIterDataset", "RepeatIterDataset", "ThreadPrefetchIterDataset", "WindowShuffleIterDataset", "WithOptionsIterDataset",
    "_MpContextIterDataset", "_WithSeedIterDataset",
}  # fmt: skip

#: Transformations that keep nothing of a record for a later one: their state is that of the dataset before them.
_BY_RECORD = {"BatchIterDataset", "FilterIterDataset", "MapIterDataset", "ThreadPrefetchIterDataset", "WithOptionsIterDataset"}

#: Transformations that keep the rows of each element of their sources; they repeat all equally often, or leave some out.
_KEEP_ROWS = {
    "ConcatenateMapDataset", "MapMapDataset", "MapWithIndexMapDataset", "RandomMapMapDataset", "RepeatMapDataset",
    "ShuffleMapDataset", "WindowShuffleMapDataset", "WithOptionsMapDataset", "_WithSeedMapDataset",
}  # fmt: skip
_LEAVE_OUT = {"MixedMapDataset", "SliceMapDataset"}

#: Transformations that yield their source's elements unchanged, in some order.
_SAME_ELEMENTS = {
    "CacheIterDataset", "ConcatenateIterDataset", "ConcatenateMapDataset", "FilterIterDataset", "FilterMapDataset",
    "InterleaveIterDataset", "LimitIterDataset", "MixedIterDataset", "MixedMapDataset", "PrefetchIterDataset",
    "ProcessPrefetchIterDataset", "RepeatIterDataset", "RepeatMapDataset", "ShuffleMapDataset", "SliceMapDataset",
    "ThreadPrefetchIterDataset", "WindowShuffleIterDataset", "WindowShuffleMapDataset", "WithOptionsIterDataset",
    "_MpContextIterDataset", "_WithSeedIterDataset", "_WithSeedMapDataset",
}  # fmt: skip
#: Transformations that turn each element into another.
_MAPS = {
    "MapIterDataset", "MapMapDataset", "MapWithIndexIterDataset", "MapWithIndexMapDataset", "RandomMapIterDataset",
    "RandomMapMapDataset",
}  # fmt: skip

#: Transformations whose results would change if each worker applied them to its own files.
_ACROSS_FILES = {
    "LimitIterDataset": "takes the first records of all files together",
    "MapWithIndexIterDataset": "numbers the records of all files together",
}


def _is_pipeline(dataset: object) -> TypeGuard[Pipeline]:
    """Tell whether an object is a grain dataset, without importing grain."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(dataset, grain.MapDataset | grain.IterDataset)


def _start(dataset: Pipeline) -> Iterator[PyTree]:
    """Start an iterator over a grain dataset whose elements are global batches."""
    grain = sys.modules["grain"]
    if isinstance(dataset, grain.MapDataset):
        return iter(dataset.to_iter_dataset(grain.ReadOptions(prefetch_buffer_size=_NUM_BATCHES_AHEAD)))
    return iter(dataset)


def _why_no_batches(dataset: Pipeline, verb: str, size: str) -> str | None:
    every = list(_nodes(dataset))
    roots = [node for node in every if not node.parents]
    steps = {_kind(node) for node in every if node.parents}
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


def _num_smaller(dataset: grain.MapDataset[PyTree], num_rows: int) -> int | None:
    """Return how many elements have fewer than `num_rows` rows, by the pipeline's last `batch`; None if it does not tell."""
    name, parents, count = type(dataset).__name__, dataset.parents, len(dataset)
    if name in _KEEP_ROWS | _LEAVE_OUT:
        found = [number for parent in parents if (number := _num_smaller(parent, num_rows)) is not None]
        if len(found) < len(parents) or (any(found) and name in _LEAVE_OUT):
            return None
        return sum(found) * count // max(1, sum(map(len, parents)))
    if name != "BatchMapDataset" or not count:
        return None if count else 0
    [size], rest = _batch_sizes(dataset, of_all=False)[:1], 0
    if count < ENDLESS and "drop_remainder=False" in str(dataset):
        rest = len(parents[0]) % size
    if size < num_rows:  # a `batch_fn` may join records that are batches themselves
        return count if rows_of(dataset[0]) < num_rows else None
    return int(0 < rest < num_rows and rows_of(dataset[count - 1]) < num_rows)  # reads these few records


def _nodes(dataset: Pipeline) -> Iterator[Pipeline]:
    """Yield a grain dataset and all its ancestors."""
    yield dataset
    for parent in dataset.parents:
        yield from _nodes(parent)


def _batch_sizes(dataset: Pipeline, of_all: bool) -> list[int]:
    """Return a pipeline's batch sizes: all, or only those of MapDatasets, because a position counts their elements."""
    counted = [node for node in _nodes(dataset) if of_all or isinstance(node, sys.modules["grain"].MapDataset)]
    return [int(size) for node in counted for size in re.findall(r"batch_size=(\d+)", str(node))]


def _why_not_by_file(dataset: Pipeline, num_workers: int, is_certain: bool) -> str | None:
    """Return why workers cannot divide a pipeline's files, or None; with `is_certain`, an unknown step is a reason."""
    if is_certain and any("drop_remainder=True" in str(node) for node in _nodes(dataset)):
        return "drop_remainder=True leaves records out once, and by file each worker would leave out some of its own"
    node = dataset
    while not _reads_files(node):
        name = type(node).__name__
        if not node.parents:
            return f"{name} reads no files that can be shared out"
        if len(node.parents) > 1:
            return f"{name} combines several datasets, whose files would no longer match"
        if name in _ACROSS_FILES:
            return f"{name} {_ACROSS_FILES[name]}"
        if is_certain and not (name in _FILE_BY_FILE and type(node).__module__.startswith("grain.")):
            return f"{name} is not known to work file by file"
        node = node.parents[0]
    files = getattr(node, "files", None)
    if files is not None:
        return None if len(files) >= num_workers else f"there are {len(files)} files for {num_workers} workers"
    # grain's own sources do not count their files. With too few of them the last worker gets none: an IndexError of grain.
    last = iter(_only_files(node, slice(num_workers - 1, None, num_workers)))
    with contextlib.closing(last), contextlib.suppress(StopIteration, IndexError):
        next(last)
        return None
    return f"{type(node).__name__} has no file, or no record, for the last of {num_workers} workers"


def _root(dataset: Pipeline) -> Any:
    """Return the dataset at a pipeline's root that reads the files."""
    return next(node for node in _nodes(dataset) if _reads_files(node))


def _num_files(dataset: Pipeline) -> int | None:
    files = getattr(_root(dataset), "files", None)
    return None if files is None else len(files)


def _only_files(dataset: Pipeline, these: slice | list[int]) -> Pipeline:
    mine = copy.deepcopy(dataset)  # set_slice changes a dataset in place
    root = _root(mine)
    if isinstance(these, slice):
        root.set_slice(these)
    else:
        root.files = tuple(root.files[number] for number in these)
    return mine


def _num_begun(dataset: Pipeline, state: dict[str, int] | None) -> int | None:
    """Return how many files a pass has begun; None if the pipeline's position is more than the place of the next record."""
    *steps, root = _nodes(dataset)
    is_plain = {_kind(node) for node in steps} <= _BY_RECORD and type(root).__name__ == "TFRecordDataset"
    if not is_plain or any("drop_remainder=True" in str(node) for node in [*steps, root]):
        return None
    if state is None:
        return 0
    is_place = isinstance(state, dict) and {"file", "record"} <= state.keys()
    return state["file"] + (state["record"] > 0) if is_place else None


def _reads_files(node: object) -> bool:
    grain = sys.modules["grain"]
    return hasattr(node, "set_slice") and isinstance(node, grain.IterDataset) and not node.parents


GRAIN = SourceKind(
    is_one=_is_pipeline,
    start=_start,
    why_no_batches=_why_no_batches,
    # A filter drops some elements, and does not say how many.
    length=lambda dataset: length_of(dataset, all(type(node).__name__ != "FilterMapDataset" for node in _nodes(dataset))),
    num_smaller=_num_smaller,
    sample=_start,
    counted_sizes=lambda dataset, is_by_file, asked: asked or _batch_sizes(dataset, of_all=is_by_file),
    why_not_by_file=_why_not_by_file,
    num_files=_num_files,
    only_files=_only_files,
    num_begun=_num_begun,
)
