"""Finds damage to a saved step: checksums of arrays, of files, and of the record that lists them. No jax here."""

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
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, zlib.crc32(head))


def compare_files(directory: Path, recorded: Mapping[str, list[int]], besides: str) -> tuple[list[str], bool]:
    """Compare all files under a directory, except `besides`, with their recorded sizes and CRC-32s, by their paths with slashes.

    Return the differences in words, and whether the directory holds exactly the recorded files in their sizes, so that they can
    be opened. No link is followed, and no file is opened that was not recorded or has another size. An OSError is raised for a
    directory that cannot be listed, whose files may all be there, and for a file that cannot be read where nothing else differs.
    """
    paths = {path.relative_to(directory).as_posix(): path for path in _files(directory)}
    paths.pop(besides, None)
    problems = [f"file {name} is missing" for name in sorted(recorded.keys() - paths.keys())]
    problems += [f"file {name} does not belong there" for name in sorted(paths.keys() - recorded.keys())]
    is_readable, unread = not problems, None
    for name in sorted(recorded.keys() & paths.keys()):
        size, checksum = recorded[name]
        try:
            found_size, found = file_checksum(paths[name], size)
        except OSError as error:
            error.filename, unread = str(paths[name]), error
            continue
        if found_size != size:
            problems.append(f"file {name} is {_describe(found_size)}, was {_describe(size)} when it was written")
            is_readable = False
        elif found != checksum:
            problems.append(f"file {name} is damaged: its CRC-32 is {found:08x}, was {checksum:08x}")
    if unread is not None and not problems:
        raise unread
    return problems, is_readable


def _files(directory: Path) -> list[Path]:
    """List all that is not a real folder, in all folders; `os.walk` would skip folders that it cannot list.

    Left out are `.nfs...` files: NFS renames a file so that is removed while a process has it open.
    """
    files, folders = [], [directory]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if not entry.name.startswith(".nfs"):  # before its status is asked for: it may be gone already
                    is_folder = stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode)
                    (folders if is_folder else files).append(Path(entry.path))
    return sorted(files)


def file_checksum(path: Path, recorded_size: int | None = None) -> list[int]:
    """Return a file's size and CRC-32: -1 and 0 for a link or a FIFO; CRC-32 0, unread, for another size than recorded."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return [-1, 0]
    with open(path, "rb", opener=open_plain) as file:
        size, checksum, status = 0, 0, os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return [-1, 0]
        if recorded_size not in (None, status.st_size):
            return [status.st_size, 0]
        while size <= status.st_size and (chunk := file.read(_CHUNK_BYTES)):  # a file may grow without end meanwhile
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return [size, checksum]


def open_plain(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file as `open` does, but refuse links, and do not wait for a writer of a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _describe(size: int) -> str:
    return "not a plain file" if size < 0 else f"{size} bytes long"


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Write a record as JSON, with its own checksum."""
    return json.dumps({"crc32": record_checksum(record), "record": record}, indent=1, sort_keys=True).encode()


def decode_record(data: bytes) -> dict[str, Any]:
    """Read a record, or raise ValueError when it is not what `encode_record` wrote."""
    try:
        outer = json.loads(data)
        record, recorded = outer["record"], outer["crc32"]
        computed = record_checksum(record)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it is not a record: {type(error).__name__}: {error}") from error
    if computed != recorded or not isinstance(record, dict):
        raise ValueError(f"its checksum is {computed}, was {recorded!r} when it was written")
    return record


def record_checksum(record: object) -> str:
    """Return the CRC-32 of a record, independent of its order and spaces."""
    return f"{zlib.crc32(json.dumps(record, sort_keys=True, separators=(',', ':')).encode()):08x}"
