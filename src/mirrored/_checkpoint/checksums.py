"""How damage to what was written is found: checksums of arrays, of files, and of the record that lists them. No jax here."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

#: A record that is larger was not written here.
MAX_RECORD_BYTES = 256 * 1024 * 1024
_CHUNK_BYTES = 4 * 1024 * 1024


def array_checksum(name: str, array: np.ndarray) -> int:
    """Return the CRC-32 of an array's name, dtype, shape and bytes."""
    head = f"{name}\0{array.dtype.name}\0{array.shape}\0".encode()
    return zlib.crc32(as_bytes(array).data, zlib.crc32(head))


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return an array's bytes in memory, in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def file_checksums(
    directory: Path, recorded: Mapping[str, list[int]] | None = None
) -> tuple[dict[str, list[int]], dict[str, OSError]]:
    """Return the size and the CRC-32 of each file under a directory, and the error of each that cannot be read.

    Both by the path with slashes. What is neither a file nor a directory, such as a symbolic link or a FIFO, has the size -1
    and is not opened.

    Args:
        directory: its links are not followed.
        recorded: what was written; a file that is not in it, or not of its size there, is not read, and its CRC-32 is 0.

    Raises:
        OSError: when a directory cannot be listed: what is in it is not missing.
    """
    found: dict[str, list[int]] = {}
    unread: dict[str, OSError] = {}
    for path in _files(directory):
        name = path.relative_to(directory).as_posix()
        try:
            found[name] = _file_checksum(path, None if recorded is None else recorded.get(name, [-1])[0])
        except OSError as error:
            unread[name] = error
    return found, unread


def _files(directory: Path) -> list[Path]:
    """List all that is not a real folder, in all folders; `os.walk` passes over those that it cannot list.

    Without `.nfs...`: so NFS calls a file that was removed while somebody had it open.
    """
    files, folders = [], [directory]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if not entry.name.startswith(".nfs"):  # asked first: it may be gone already
                    is_folder = stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode)
                    (folders if is_folder else files).append(Path(entry.path))
    return sorted(files)


def _file_checksum(path: Path, recorded_size: int | None) -> list[int]:
    if not stat.S_ISREG(path.lstat().st_mode):
        return [-1, 0]
    with open(path, "rb", opener=open_plain) as file:
        size, checksum, status = 0, 0, os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return [-1, 0]
        if recorded_size not in (None, status.st_size):
            return [status.st_size, 0]
        while size <= status.st_size and (chunk := file.read(_CHUNK_BYTES)):  # no end of one that grows meanwhile
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return [size, checksum]


def open_plain(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file as `open` does, but no link, and without waiting for who writes to a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def file_problems(recorded: Mapping[str, list[int]], found: Mapping[str, list[int]]) -> list[str]:
    """Say for each file how it differs from what was recorded; an empty list when none does."""
    problems = []
    for name in sorted({*recorded, *found}):
        if name not in found:
            problems.append(f"file {name} is missing")
        elif name not in recorded:
            problems.append(f"file {name} does not belong there")
        elif found[name][0] != recorded[name][0]:
            problems.append(f"file {name} is {_size(found[name][0])}, was {_size(recorded[name][0])} when it was written")
        elif found[name][1] != recorded[name][1]:
            problems.append(f"file {name} is damaged: its CRC-32 is {found[name][1]:08x}, was {recorded[name][1]:08x}")
    return problems


def _size(size: int) -> str:
    return "not a plain file" if size < 0 else f"{size} bytes long"


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Write a record as JSON, with its own checksum."""
    return json.dumps({"crc32": record_checksum(record), "record": record}, indent=1, sort_keys=True).encode()


def decode_record(data: bytes) -> dict[str, Any]:
    """Read a record and verify its checksum.

    Raises:
        ValueError: when it is not what `encode_record` wrote.
    """
    try:
        outer = json.loads(data)
        record, recorded = outer["record"], outer["crc32"]
        computed = record_checksum(record)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it is not a record: {type(error).__name__}: {error}") from error
    if computed != recorded or not isinstance(record, dict):
        raise ValueError(f"its checksum is {computed}, was {recorded!r} when it was written")
    return record


def record_checksum(record: Any) -> str:
    """Return the CRC-32 of what a record says, however it is written."""
    return f"{zlib.crc32(json.dumps(record, sort_keys=True, separators=(',', ':')).encode()):08x}"
