"""Files of arrays in the format of `np.savez`: written one array at a time, verified, and read one array at a time."""

from __future__ import annotations

import dataclasses
import math
import queue
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

#: Bytes of arrays in parts that the host holds at most while it writes them; one part may exceed them.
MAX_HELD_BYTES = 2**31


def write(file: IO[bytes], arrays: Iterable[tuple[str, np.ndarray]]) -> dict[str, dict[str, Any]]:
    """Write arrays, and return a record's entry of each: its dtype, shape and CRC-32."""
    written: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(file, "w") as zipped:
        for key, array in arrays:
            stored = array
            if array.dtype.isbuiltin != 1:  # NumPy's format does not know bfloat16 and others: write their bits
                stored = array.view(f"u{array.dtype.itemsize}")
            with zipped.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, stored, allow_pickle=False)
            crc32 = zipped.getinfo(f"{key}.npy").CRC
            written[key] = {"dtype": array.dtype.name, "shape": list(array.shape), "crc32": crc32}
    return written


def find_damaged(zipped: zipfile.ZipFile, described: Mapping[str, Any]) -> list[str]:
    """Return the keys of arrays whose bytes do not have the record's checksums."""
    if any(info.compress_type != zipfile.ZIP_STORED for info in zipped.infolist()):  # may be larger than any disk
        raise zipfile.BadZipFile("it is compressed, which no save does")
    bad = zipped.testzip()  # the first file whose bytes do not have the checksum beside them
    sums = {info.filename.removesuffix(".npy"): info.CRC for info in zipped.infolist()}
    wrong = {key for key, about in described.items() if sums.get(key) != about.get("crc32")}
    if bad is not None:
        wrong.add(bad.removesuffix(".npy"))
    return sorted(wrong)


def check_header(zipped: zipfile.ZipFile, key: str, about: Mapping[str, Any]) -> np.dtype[Any]:
    """Compare an array's size and header with the record, because a wrong one may claim any size; return its dtype."""
    dtype, shape, name = np.dtype(about["dtype"]), tuple(about["shape"]), f"{key}.npy"
    with zipped.open(name) as file:
        np.lib.format.read_magic(file)
        stored_shape, _, stored = np.lib.format.read_array_header_1_0(file)
        num_bytes = zipped.getinfo(name).file_size - file.tell()
    if (stored_shape, stored.itemsize, num_bytes) != (shape, dtype.itemsize, math.prod(shape) * dtype.itemsize):
        raise ValueError(f"{name} is {stored}{list(stored_shape)} in {num_bytes} bytes, and was {dtype}{list(shape)}")
    return dtype


def read(zipped: zipfile.ZipFile, key: str, about: Mapping[str, Any]) -> np.ndarray:
    """Read an array whose header is as the record says."""
    dtype = check_header(zipped, key, about)
    with zipped.open(f"{key}.npy") as file:
        return np.lib.format.read_array(file).view(dtype)


class Pieces:
    """A bounded queue of array parts, from the thread that reads devices to the thread that writes; its waits survive Ctrl-C."""

    def __init__(self) -> None:
        self._coming: queue.SimpleQueue[tuple[str, np.ndarray] | BaseException | None] = queue.SimpleQueue()
        self._gone: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._held = 0.0

    def put(self, key: str, array: np.ndarray) -> None:
        """Queue a piece; first wait until the queued pieces that are not yet written leave room for it."""
        while self._held > 0 and self._held + array.nbytes > MAX_HELD_BYTES:
            self._held -= self._gone.get()
        self._held += array.nbytes
        self._coming.put((key, array))

    def end(self, error: BaseException | None = None) -> None:
        """End the iteration over the pieces, or raise `error` in it."""
        self._coming.put(error)

    def abandon(self) -> None:
        """Unblock `put` for good, because nobody writes the pieces any more."""
        self._gone.put(math.inf)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        while (piece := self._coming.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
            self._gone.put(piece[1].nbytes)


@dataclasses.dataclass(frozen=True)
class InFiles:
    """An array on disk in parts along an axis; a slice reads only the parts that it overlaps.

    Attributes:
        parts: the file, the key and the record's entry of each part.
        held: key -> part, a cache of one array's parts; all arrays of a step share it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axis: int
    parts: Sequence[tuple[zipfile.ZipFile, str, Mapping[str, Any]]]
    held: dict[str, np.ndarray]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of the array; all steps are 1."""
        first, last, _ = index[self.axis].indices(self.shape[self.axis])
        rest = (*index[: self.axis], slice(None), *index[self.axis + 1 :])
        found, start = [], 0
        for zipped, key, about in self.parts:
            end = start + about["shape"][self.axis]
            is_last = end == self.shape[self.axis] == last  # of an empty slice, nothing of it
            if is_last or max(start, first) < min(end, last):
                wanted = slice(max(start, first) - start, min(end, last) - start)
                found.append(self._read(zipped, key, about)[rest][(*[slice(None)] * self.axis, wanted)])
            start = end
        if len(found) == 1:  # without a copy
            return found[0]
        return np.concatenate(found, self.axis)

    def _read(self, zipped: zipfile.ZipFile, key: str, about: Mapping[str, Any]) -> np.ndarray:
        if key not in self.held:
            if not self.held.keys() <= {key for _, key, _ in self.parts}:
                self.held.clear()
            self.held[key] = read(zipped, key, about)
        return self.held[key]

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[tuple(slice(None) for _ in self.shape)], dtype)
