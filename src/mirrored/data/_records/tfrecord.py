"""Reads TFRecord files as a grain dataset of bytes, and writes such files (docs/design/tfrecord.md)."""

from __future__ import annotations

import collections.abc
import contextlib
import glob
import importlib
import io
import os
import struct
import uuid
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .record_reader import FOOTER, MAX_RECORD_BYTES, WINDOW_BITS, crc32c, masked, needs

if TYPE_CHECKING:
    import grain


def tfrecord_dataset(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    compression: str | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> grain.IterDataset[bytes]:
    """Read the records of TFRecord files as a grain dataset of bytes, and check every checksum.

    `dataset.batch(n)` yields lists of n records, also across files, for `mr.data.parse_example`. Everything else is grain's:
    `.map`, `.filter`, `.seed`, `.mp_prefetch`, and iterators with `get_state()` and `set_state()`.

    Args:
        files: a path, a list of paths, or a pattern such as `"train-*.tfrecord"` or `"**/*.tfrecord"`, read in sorted order.
        compression: None, "GZIP" or "ZLIB": how each file was written. It is never guessed.
        max_record_bytes: a longer record is an error, raised before memory is allocated: a damaged or hostile file can claim
            any length. Beside the records that it has handed out, the reader needs little more memory than this.

    Raises:
        FileNotFoundError: a file does not exist, or no file matches.
        TFRecordError: while reading, when a file is damaged or cut short; it names the file, the record and the byte.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "train-0.tfrecord")
    ...     mr.data.write_tfrecords(path, [b"one", b"two", b"three"])
    ...     list(mr.data.tfrecord_dataset(path).batch(2))
    3
    [[b'one', b'two'], [b'three']]

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/data/TFRecordDataset
    """
    if isinstance(max_record_bytes, bool) or not isinstance(max_record_bytes, int) or max_record_bytes < 0:
        raise ValueError(f"max_record_bytes is {max_record_bytes!r}; expected a number of bytes, for example {MAX_RECORD_BYTES}.")
    needs("grain")
    dataset_class = importlib.import_module(".record_dataset", __package__).TFRecordDataset  # this imports grain
    return dataset_class(_find_files(files), _checked_compression(compression), max_record_bytes)


def write_tfrecords(path: str | os.PathLike[str], records: Iterable[bytes], compression: str | None = None) -> int:
    """Write records to a TFRecord file, which appears under its name only when it is complete.

    Args:
        path: the file to write; an existing file is replaced.
        records: the records, for example from `mr.data.make_example`; they are taken one at a time.
        compression: None, "GZIP" or "ZLIB".

    Returns:
        the number of records.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mr.data.write_tfrecords(os.path.join(folder, "train-0.tfrecord"), (bytes([i]) for i in range(5)))
    5

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/io/TFRecordWriter
    """
    compression = _checked_compression(compression)
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"path is {path!r} of type {type(path).__name__}; expected a path such as 'train-0.tfrecord'.")
    if isinstance(records, bytes | str) or not isinstance(records, collections.abc.Iterable):
        raise TypeError(f"records is {type(records).__name__}; expected an iterable of bytes, for example [example].")
    folder, name = os.path.split(os.fspath(path))
    partial = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.partial")  # hidden, so that no pattern matches it
    try:
        with open(partial, "xb") as file:
            count = _write(file, records, compression)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)
        raise
    return count


def _write(file: io.BufferedWriter, records: Iterable[bytes], compression: str | None) -> int:
    deflate = zlib.compressobj(wbits=WINDOW_BITS[compression]) if compression else None
    count = 0
    for count, record in enumerate(records, 1):
        if not isinstance(record, bytes):
            raise TypeError(
                f"record {count - 1} is {record!r:.80} of type {type(record).__name__}; expected bytes, for example from "
                "mr.data.make_example."
            )
        length = struct.pack("<Q", len(record))
        framed = b"".join((length, FOOTER.pack(masked(crc32c()(length))), record, FOOTER.pack(masked(crc32c()(record)))))
        file.write(deflate.compress(framed) if deflate else framed)
    if deflate:
        file.write(deflate.flush())
    return count


def _find_files(files: object) -> tuple[str, ...]:
    """Return the paths of the files that a user names, in order."""
    if isinstance(files, str | os.PathLike):
        path = os.fspath(files)
        is_pattern = glob.has_magic(path) and not os.path.exists(path)
        files = sorted(glob.glob(path, recursive=True)) if is_pattern else [path]
        if not files:
            raise FileNotFoundError(f"no file matches {path!r} (working directory: {os.getcwd()}).")
    if not isinstance(files, list | tuple):
        raise TypeError(
            f"files is {files!r} of type {type(files).__name__}; expected a path, a pattern such as 'train-*.tfrecord', or a "
            "list of paths in the order in which they are to be read."
        )
    if not files:
        raise ValueError("files is empty; expected at least one path.")
    return tuple(map(_checked_file, files))


def _checked_file(file: object) -> str:
    if not isinstance(file, str | os.PathLike) or isinstance(os.fspath(file), bytes):
        raise TypeError(f"files contains {file!r} of type {type(file).__name__}; expected paths.")
    path = os.fspath(file)
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path!r} is a directory; name its files: {os.path.join(path, '*.tfrecord')!r}.")
    if not os.path.exists(path):
        hint = " In a list each file is named; expand a pattern with sorted(glob.glob(pattern))." * glob.has_magic(path)
        raise FileNotFoundError(f"there is no file {path!r} (working directory: {os.getcwd()}).{hint}")
    raise ValueError(f"{path!r} is a pipe or a device, which cannot be read again from a position; write its bytes to a file.")


def _checked_compression(compression: object) -> str | None:
    if compression is None:
        return None
    if not isinstance(compression, str) or compression.upper() not in WINDOW_BITS:
        raise ValueError(f"compression is {compression!r}; expected None, 'GZIP' or 'ZLIB'.")
    return compression.upper()
