"""Opens and verifies the files of a step: any difference from the written bytes is damage."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import zipfile
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from . import array_files
from .array_files import InFiles

RECORD = "record.json"
#: The file of whole arrays, and the file of one worker's parts of divided arrays.
ARRAYS, PARTS = "arrays.npz", "parts-{}.npz"
#: Errors when there is no plain file: the name is absent, a link, or of another kind. Other errors, such as a disk that does
#: not answer or too many open files, do not prove damage.
_NO_FILE = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}


class DamagedStep(Exception):
    """A step on disk is damaged; `args` describe the damage, which users see in the log and in a CheckpointError."""


@contextlib.contextmanager
def plain_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a step's file for a `with` block; follow no link, and do not block on a FIFO."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DamagedStep(f"file {path.name} is not a plain file")
            yield file
    except OSError as error:
        if error.errno in _NO_FILE:
            raise DamagedStep(f"file {path.name} cannot be used: {one_line(error)}") from error
        error.filename = str(path)  # an error of `read` names no file
        raise


def find_damage(file: IO[bytes], record: Mapping[str, Any], name: str) -> list[str]:
    """Return the damage in a file: compare its arrays with its checksums, and these with the record's."""
    names = {str(key): path for path, leaf in record["leaves"].items() for key in (leaf.get("value"), leaf.get("copies"))}
    try:
        with zipfile.ZipFile(file) as zipped:
            wrong = array_files.find_damaged(zipped, _described(record, name))
    except OSError as error:
        if error.errno != errno.EINVAL:  # the error for a seek to before the file's begin
            raise
        return [f"file {name} is damaged: {one_line(error)}"]
    except Exception as error:  # `zipfile` raises many types, each for bytes that no writer writes
        return [f"file {name} is damaged: {type(error).__name__}: {one_line(error)}"]
    paths = [names.get(key) or names.get(key.partition(".")[0], key) for key in wrong]
    return [f"array {path} is damaged: its CRC-32 is not the one that was written" for path in paths]


def _described(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a record's entries of the arrays in one file."""
    return {key: about for key, about in record["arrays"].items() if about.get("file", ARRAYS) == name}


def load_whole(file: IO[bytes], record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    file.seek(0)
    with zipfile.ZipFile(file) as zipped:
        try:
            return {key: array_files.read(zipped, key, about) for key, about in _described(record, ARRAYS).items()}
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedStep(f"file {ARRAYS} does not hold the arrays that {RECORD} lists: {one_line(error)}") from error


def open_parts(
    directory: Path, record: Mapping[str, Any], opened: contextlib.ExitStack, verified: Container[int]
) -> tuple[list[str], dict[str, InFiles]]:
    """Open the files of arrays in parts, and verify those numbered in `verified`; return the damage, and the unread arrays."""
    problems: list[str] = []
    files: dict[str, zipfile.ZipFile] = {}
    for number, name in enumerate(sorted({about["file"] for about in record["arrays"].values() if "file" in about})):
        if not re.fullmatch(PARTS.format("[0-9]+"), name):
            raise DamagedStep(f"{RECORD} names a file {name!r}, which no save writes")
        file = opened.enter_context(plain_file(directory / name))
        if number in verified and (found := find_damage(file, record, name)):
            problems += found
            continue
        try:
            files[name] = opened.enter_context(zipfile.ZipFile(file))
        except Exception as error:
            problems.append(f"file {name} is damaged: {type(error).__name__}: {one_line(error)}")
    if problems:
        return problems, {}
    try:
        return [], _in_files(record, files)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedStep(f"{RECORD} says of parts what no save writes: {type(error).__name__}: {one_line(error)}") from error


def _in_files(record: Mapping[str, Any], files: Mapping[str, zipfile.ZipFile]) -> dict[str, InFiles]:
    """Return the arrays in parts, after comparing each part's size and header with the record."""
    arrays, held = dict[str, InFiles](), dict[str, np.ndarray]()
    for leaf in (leaf for leaf in record["leaves"].values() if "parts" in leaf):
        axis, shape = leaf["parts"]["axis"], list(leaf["parts"]["shape"])
        keys = [f"{leaf['value']}.{number}" for number in range(leaf["parts"]["count"])]
        parts = [(files[record["arrays"][key]["file"]], key, record["arrays"][key]) for key in keys]
        for zipped, key, about in parts:
            array_files.check_header(zipped, key, about)
            rest = [*about["shape"][:axis], *about["shape"][axis + 1 :]]
            if about["dtype"] != parts[0][2]["dtype"] or rest != shape[:axis] + shape[axis + 1 :]:
                raise ValueError(f"part {key} is not like the others")
        if sum(about["shape"][axis] for _, _, about in parts) != shape[axis]:
            raise ValueError(f"the parts of {leaf['value']} do not add up to its length")
        arrays[leaf["value"]] = InFiles(tuple(shape), np.dtype(parts[0][2]["dtype"]), axis, parts, held)
    return arrays


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
