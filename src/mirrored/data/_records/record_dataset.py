"""TFRecord files as a grain dataset; grain is optional, so this is imported only when a program reads such files."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from .record_reader import Place, read_files

#: The fields of a state that locate the next record.
_PLACE = ("file", "record", "offset")


class TFRecordDataset(grain.IterDataset):
    """A dataset of records, or of lists of records after `batch`, made by `mr.data.tfrecord_dataset`."""

    def __init__(self, files: Sequence[str], compression: str | None, max_record_bytes: int) -> None:
        super().__init__()
        self.files = tuple(files)
        self.compression = compression
        self.max_record_bytes = max_record_bytes
        self.batch_size: int | None = None
        self.drop_remainder = False

    def batch(self, batch_size: int, *, drop_remainder: bool = False, batch_fn: Callable[..., Any] | None = None) -> Any:
        """Make lists of `batch_size` records; the last list holds the rest, or is dropped with `drop_remainder`."""
        if batch_fn is not None or self.batch_size is not None:
            return super().batch(batch_size, drop_remainder=drop_remainder, batch_fn=batch_fn or list)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ValueError(f"batch_size is {batch_size!r}; expected an int, the number of records, at least 1.")
        batched = copy.copy(self)
        batched.batch_size, batched.drop_remainder = int(batch_size), bool(drop_remainder)
        return batched

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Keep only `files[sl]`, in place: with this, grain and `distribute_dataset` divide the files among workers."""
        self.files = self.files[sl]

    def __iter__(self) -> TFRecordIterator:
        return TFRecordIterator(self)

    def __repr__(self) -> str:
        batched = f", batch_size={self.batch_size}, drop_remainder={self.drop_remainder}" * (self.batch_size is not None)
        return f"TFRecordDataset({len(self.files)} files{batched})"


class TFRecordIterator(grain.DatasetIterator):
    """An iterator over a TFRecordDataset. Its state is the position of the next record."""

    def __init__(self, dataset: TFRecordDataset) -> None:
        super().__init__()
        self._is_closed = False
        self._files, self._options = dataset.files, (dataset.compression, dataset.max_record_bytes)
        self._batch_size, self._drop_remainder = dataset.batch_size, dataset.drop_remainder
        self._chunks = read_files(self._files, (0, 0, 0), *self._options)
        self._hold((0, 0, 0), [], [])

    def __next__(self) -> bytes | list[bytes]:
        if self._is_closed:
            raise ValueError("the iterator is closed; call iter(dataset) for a new one.")
        count = self._batch_size or 1
        records = self._take(count)
        if not records or (self._drop_remainder and len(records) < count):
            raise StopIteration
        return records[0] if self._batch_size is None else records

    def _take(self, count: int) -> list[bytes]:
        """Return the next `count` records, fewer at the end of the last file; an error leaves the position as it was."""
        start, stop = self._next, self._next + count
        if stop <= len(self._found):
            self._next = stop
            return self._found[start:stop]
        before = self._position()
        taken = self._found[start:]
        try:
            while len(taken) < count:
                self._hold(self._position(), [], [])  # to free the last chunk's memory
                self._hold(*next(self._chunks, ((len(self._files), 0, 0), [], [])))
                self._next = min(count - len(taken), len(self._found))
                if not self._next:
                    break
                taken += self._found[: self._next]
        except BaseException:
            self._go_to(before)
            raise
        return taken

    def _hold(self, start: Place, records: list[bytes], ends: list[int]) -> None:
        """Keep a chunk's records, the place of the first, and the first byte of each and of the next chunk."""
        self._start, self._found, self._offsets = start, records, [start[2], *ends]
        self._next = 0

    def _position(self) -> Place:
        """Return the place of the next record that will be handed out."""
        file, record, _ = self._start
        return file, record + self._next, self._offsets[self._next]

    def _go_to(self, place: Place) -> None:
        self._chunks.close()
        self._chunks = read_files(self._files, place, *self._options)
        self._hold(place, [], [])

    def get_state(self) -> dict[str, Any]:
        """Return the position of the next record: its file, its number in the file, its first byte, the file's name."""
        place = self._position()
        return {**dict(zip(_PLACE, place, strict=True)), "name": self._name(place[0])}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position that `get_state` returned for a dataset of the same files."""
        fields = state if isinstance(state, dict) else {}
        numbers: list[Any] = [fields.get(key) for key in _PLACE]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"the state is {state!r}; expected what get_state() returned: a dict with {', '.join(_PLACE)}.")
        file, same = numbers[0], "make the dataset of the same files, in the same order, as when the state was saved."
        if file > len(self._files):
            raise ValueError(f"the state is in file {file}, but the dataset has {len(self._files)} files; {same}")
        name = self._name(file)
        if fields.get("name", name) != name:
            raise ValueError(f"the state has {fields['name']!r} as file {file}, and the dataset {name!r}; {same}")
        self._go_to(tuple(numbers))

    def _name(self, file: int) -> str | None:
        """Return a file's name without its folder, which may change between runs; None after the last file."""
        return os.path.basename(self._files[file]) if file < len(self._files) else None

    def close(self) -> None:
        """Close the open file."""
        self._is_closed = True
        if hasattr(self, "_chunks"):  # grain also closes it after __init__ failed
            self._chunks.close()
        super().close()
