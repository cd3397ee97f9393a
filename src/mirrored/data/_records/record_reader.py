"""Reads the TFRecord format, and yields each record only after its checks (docs/design/tfrecord.md)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..._errors import TFRecordError

#: Bytes read at a time: enough to spread numpy's overhead, and few enough for the processor's caches.
CHUNK_BYTES = 1 << 19
#: The default limit of a record's length: no training example is longer, but a damaged length often is.
MAX_RECORD_BYTES = 256 << 20
#: From this many consecutive frames of one length on, numpy finds them faster than a loop.
MANY_FRAMES = 8
#: How many compressed bytes zlib gets at a time.
COMPRESSED_BYTES = 1 << 16

HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")
#: The most checked headers that are remembered for a file; this limits the memory that hostile files can take.
KNOWN_HEADERS = 1024
#: Compression -> zlib's number for it.
WINDOW_BITS = {"GZIP": 16 + zlib.MAX_WBITS, "ZLIB": zlib.MAX_WBITS}
#: The first bytes of a compressed file -> its compression.
MAGIC = {b"\x1f\x8b": "GZIP", **dict.fromkeys((b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), "ZLIB")}

#: The place of a record: the number of its file, its number in the file, its first byte there (decompressed).
Place: TypeAlias = tuple[int, int, int]


def read_files(
    files: Sequence[str], place: Place, compression: str | None, max_record_bytes: int
) -> Generator[tuple[Place, list[bytes], list[int]]]:
    """Yield chunks of records, file by file: the place of the first record, the records, and the byte where each ends."""
    first, record, offset = place
    for file, path in enumerate(files[first:], first):
        with contextlib.closing(_read_chunks(path, record, offset, compression, max_record_bytes)) as chunks:
            for records, ends in chunks:
                yield (file, record, offset), records, ends
                record, offset = record + len(records), ends[-1]
                del records  # before the next chunk, which may fill the memory
        record, offset = 0, 0


def _read_chunks(
    path: str, record: int, offset: int, compression: str | None, max_record_bytes: int
) -> Generator[tuple[list[bytes], list[int]]]:
    """Yield chunks of a file's records from a position on: the records, and the byte where each ends."""

    def fault(problem: str, or_later: str = "") -> TFRecordError:
        place = f"at byte {offset}{or_later}" + " of what it decompresses to" * bool(compression)
        return TFRecordError(f"{path}: record {record}, {place}: {problem}")

    known: dict[bytes, int] = {}
    buffer, count, missing, frame, long = b"", CHUNK_BYTES, 0, 0, b""
    with open(path, "rb", buffering=0) as file:
        stream = file if compression is None else _Inflated(file, compression)
        try:
            if not _skip(stream, offset):
                raise fault("the file ends before this position; it is not the file that it was when the state was saved.")
            while chunk := _read(stream, count):
                buffer += chunk
                records, ends, problem, missing = _check_data(buffer, _find_frames(buffer, known, max_record_bytes))
                if records:
                    yield records, [offset + end for end in ends]
                    record += len(records)
                    frame = HEADER.size + len(records[-1]) + FOOTER.size
                    offset, buffer = offset + ends[-1], buffer[ends[-1] :]
                if problem:
                    raise fault(problem)
                if missing > CHUNK_BYTES:
                    long, missing, problem = _read_long(stream, buffer, missing)
                    if problem:
                        raise fault(problem)
                    if missing:
                        break
                    frame, buffer = HEADER.size + len(long) + FOOTER.size, b""
                    yield [long], [offset + frame]
                    record, offset, long = record + 1, offset + frame, b""
                # If all records have one length, let the next read end with a record: then joining needs no copy.
                count = missing + CHUNK_BYTES // frame * frame if 0 < frame <= CHUNK_BYTES else max(CHUNK_BYTES, missing)
            if buffer:
                raise fault(
                    f"the file ends {missing or HEADER.size - len(buffer)} bytes too early, inside this record. It was cut short "
                    "while it was written or copied: write it again, or leave it out of files."
                )
        except zlib.error as error:
            raise fault(
                f"{error}; expected a whole {compression} stream and nothing after it. If the file is not compressed, leave out "
                "compression; else it was damaged or cut short: write it again, or leave it out of files.",
                or_later=" or later",
            ) from error


class _Frames(NamedTuple):
    """A buffer's whole records, the end of each frame, the fault after them, and how many bytes the next frame lacks."""

    records: list[bytes]
    ends: list[int]
    problem: str | None
    missing: int


def _find_frames(buffer: bytes, known: dict[bytes, int], max_record_bytes: int) -> _Frames:
    """Cut a buffer into records; `known` maps checked headers to their lengths: most files have only a few lengths."""
    records: list[bytes] = []
    ends: list[int] = []
    start, size = 0, len(buffer)
    while start + HEADER.size <= size:
        header = buffer[start : start + HEADER.size]
        length = known.get(header, -1)
        if length < 0:
            length, checksum = HEADER.unpack(header)
            if problem := _header_problem(header, length, checksum, max_record_bytes):
                return _Frames(records, ends, problem, 0)
            if len(known) < KNOWN_HEADERS:
                known[header] = length
        stop = start + HEADER.size + length
        if stop + FOOTER.size > size:
            return _Frames(records, ends, None, stop + FOOTER.size - size)
        frame = stop + FOOTER.size - start
        count = _count_equal(buffer, start, frame, header)
        first = start + HEADER.size
        start += count * frame
        records += [buffer[at : at + length] for at in range(first, start, frame)]
        ends += range(first + FOOTER.size + length, start + 1, frame)
    return _Frames(records, ends, None, 0)


def _count_equal(buffer: bytes, start: int, frame: int, header: bytes) -> int:
    """Count the consecutive whole frames from `start` on that begin with `header`; return 1 unless there are many."""
    ahead = start + (MANY_FRAMES - 1) * frame
    if buffer[start + frame : start + frame + HEADER.size] != header or buffer[ahead : ahead + HEADER.size] != header:
        return 1
    frames = np.frombuffer(buffer, np.uint8, count=(len(buffer) - start) // frame * frame, offset=start).reshape(-1, frame)
    seen = MANY_FRAMES
    while True:  # look at only a few times as many as are found: else bad patterns take quadratic time
        differ = (frames[:seen, : HEADER.size] != frames[0, : HEADER.size]).any(axis=1)
        if differ.any() or seen >= len(frames):
            return int(differ.argmax()) or len(frames)
        seen *= 8


def _header_problem(header: bytes, length: int, checksum: int, max_record_bytes: int) -> str | None:
    expected = masked(crc32c()(header[:8]))
    if checksum != expected:
        file = "The file"
        if header[:2] in MAGIC:
            file = f"This looks like the start of a compressed file: compression={MAGIC[header[:2]]!r}. Else it"
        return (
            f"its length is damaged: the checksum is {checksum:#010x}, expected {expected:#010x}. {file} is not a TFRecord file, "
            "or it was damaged: write it again, or leave it out of files."
        )
    if length > max_record_bytes:
        return (
            f"it claims to have {length} bytes; expected at most max_record_bytes={max_record_bytes}. If records are so long, "
            "pass a larger max_record_bytes; else the file is hostile or not a TFRecord file."
        )
    return None


def _check_data(buffer: bytes, frames: _Frames) -> _Frames:
    """Compare all records' checksums at once; keep the records before the first wrong one."""
    records, ends, _, _ = frames
    if not records:
        return frames
    footers = np.ndarray(len(buffer) - FOOTER.size + 1, "<u4", buffer, strides=(1,))  # a view of 4 bytes from every byte on
    stored = footers[np.array(ends) - FOOTER.size]
    computed = masked(np.fromiter(map(crc32c(), records), np.uint32, len(records)))
    wrong = np.flatnonzero(stored != computed)
    if not wrong.size:
        return frames
    first = int(wrong[0])
    damage = _damage(len(records[first]), int(computed[first]), int(stored[first]))
    return _Frames(records[:first], ends[:first], damage, 0)


def _damage(length: int, computed: int, stored: int) -> str:
    return (
        f"its data is damaged: its {length} bytes have the checksum {computed:#010x}, expected {stored:#010x}. Copy or write the "
        "file again, or leave it out of files."
    )


def masked(crc: Any) -> Any:
    """Mask checksums as the format does, by a rotation and an addition: an int, or an array of uint32."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def crc32c() -> Callable[[bytes], int]:
    """Return the C function that computes a checksum."""
    return needs("google_crc32c").value


def needs(package: str) -> ModuleType:
    """Import an optional package, or raise an error that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        message = f"mr.data needs {package}, which is not installed: pip install grain google-crc32c protobuf."
        raise ImportError(message) from error


class _Inflated:
    """The content of a gzip or zlib file. It decompresses no more than a caller asks for, whatever the file claims."""

    def __init__(self, file: io.FileIO, compression: str) -> None:
        self._file = file
        self._compression = compression
        self._inflate = zlib.decompressobj(WINDOW_BITS[compression])
        self._is_empty = True
        self._fault: zlib.error | None = None

    def read(self, count: int) -> bytes:
        """Return at most `count` bytes, none at the end of an intact stream; after a fault, every later call raises it again."""
        if self._fault is None:
            try:
                return self._inflated(count)
            except zlib.error as fault:
                self._fault = fault
        raise self._fault

    def _inflated(self, count: int) -> bytes:
        while True:
            compressed = self._inflate.unused_data or self._inflate.unconsumed_tail or self._file.read(COMPRESSED_BYTES)
            if not compressed and (self._inflate.eof or self._is_empty):
                return b""
            if not compressed:
                raise zlib.error(f"the {self._compression} stream was cut short")
            self._is_empty = False
            if self._inflate.eof:
                if self._compression == "ZLIB":
                    raise zlib.error("something follows the end of the ZLIB stream")
                self._inflate = zlib.decompressobj(WINDOW_BITS["GZIP"])  # a gzip file may have several members
            if data := self._inflate.decompress(compressed, count):
                return data


def _skip(stream: io.FileIO | _Inflated, count: int) -> bool:
    """Skip `count` bytes; tell whether the stream had that many."""
    if isinstance(stream, io.FileIO):
        return stream.seek(min(count, stream.seek(0, os.SEEK_END))) == count
    while count and (data := stream.read(min(CHUNK_BYTES, count))):
        count -= len(data)
    return not count


def _read(stream: io.FileIO | _Inflated, count: int, begun: bytes = b"") -> bytes:
    """Return `count` bytes, the first of them `begun`; fewer at the end or before a fault. The next call raises the fault."""
    # `BytesIO` copies neither its first bytes nor its result, and grows only with the content of the file.
    data = io.BytesIO(begun or stream.read(min(count, CHUNK_BYTES)))
    data.seek(0, os.SEEK_END)
    with contextlib.suppress(zlib.error):
        while data.tell() < count and (part := stream.read(min(count - data.tell(), CHUNK_BYTES))):
            data.write(part)
    return data.getvalue()


def _read_long(stream: io.FileIO | _Inflated, begun: bytes, missing: int) -> tuple[bytes, int, str | None]:
    """Return a record longer than a chunk, how many bytes its frame lacks at the end of the file, and its fault."""
    length = len(begun) - HEADER.size + missing - FOOTER.size
    record, footer = _read(stream, length, begun[HEADER.size :]), _read(stream, FOOTER.size)
    if missing := length + FOOTER.size - len(record) - len(footer):
        return b"", missing, None
    computed, (stored,) = masked(crc32c()(record)), FOOTER.unpack(footer)
    problem = None if computed == stored else _damage(length, computed, stored)
    return record, 0, problem
