"""What a checkpoint is on disk: a file of NumPy's, a record of it, and one rename that makes a step count.

Why there is no library for checkpoints here: docs/checkpoints.md, "On disk".
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from .._errors import CheckpointError
from .._text import version_of
from . import checksums, format_1
from .sole_writer import LOCK, SoleWriter, sole_writer

_logger = logging.getLogger("mirrored")

#: Of what is written here. A library reads its own format and older ones.
FORMAT = 2
RECORD = "record.json"
_ARRAYS = "arrays.npz"
_PACKAGES = ("mirrored", "jax", "numpy")
_STEP = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
_SAVING, _REMOVED, _MARK = ".saving-", ".removed-", ".shared-"
#: How long a file that another host has made may take to be seen, and how old one is that no running program waits for.
_SEEN_SECONDS, _STALE_SECONDS = 5.0, 3600.0
#: What the system says of a name where there is no file: nothing, a link, or something of another kind. All else that it says,
#: such as of a disk that does not answer or of too many open files, says nothing of what was written.
_NO_FILE = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}

#: By this process: another checkpoint of it may be in the same directory.
_being_written: set[str] = set()


class DamagedStep(Exception):
    """A step on disk is damaged; its `args` are all that is wrong, which users see in the log and in a CheckpointError."""


def checked_directory(directory: object) -> Path:
    """Return the path of a directory that steps can be in, or say why it cannot."""
    if not isinstance(directory, str | os.PathLike) or not str(directory):
        raise TypeError(f"mr.Checkpoint: directory is {directory!r}; expected a path.")
    if "://" in str(directory):
        raise ValueError(
            f"mr.Checkpoint: directory is {str(directory)!r}; expected a directory of a file system, where a rename happens at "
            "once. Mount the bucket, or save to a shared disk."
        )
    path = Path(os.path.realpath(directory))
    if path.exists() and not path.is_dir():
        raise ValueError(f"mr.Checkpoint: {path} is not a directory.")
    return path


class StepFiles:
    """The steps in one directory, each a directory of its own that is named after its number.

    Nothing is written outside it: arrays are numbered, and what users call them is in the record only.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._right: SoleWriter | None = None

    def claim(self) -> None:
        """Take the right to write here, which is kept until `release`, or raise CheckpointError when another program has it."""
        self._right = sole_writer(self.root)

    def release(self) -> None:
        """Let other programs write here, unless this one still does by another object."""
        self._right = None

    def look(self) -> tuple[list[int], list[str]]:
        """Return the steps that are there, in order, and what else looks like one but is not, with the reason."""
        steps, strays = [], []
        try:
            entries = sorted(os.scandir(self.root), key=lambda entry: entry.name)
        except FileNotFoundError:
            return [], []
        for entry in entries:
            if _STEP.fullmatch(entry.name):
                try:
                    reason = _why_no_step(entry)
                except FileNotFoundError:  # another process has just removed it
                    continue
                if reason is None:
                    steps.append(int(entry.name))
                else:
                    strays.append(f"{entry.name} {reason}")
            elif not entry.name.startswith((_REMOVED, _MARK)) and entry.name != LOCK:
                strays.append(f"{entry.name} {'is a save that was cut short' if _is_leftover(entry) else 'is not a step'}")
        return sorted(steps), strays

    @contextlib.contextmanager
    def mark(self) -> Iterator[str | None]:
        """Keep a file in the directory for a `with` block, which gets its random name, or None where nothing can be written."""
        path = self.root / f"{_MARK}{secrets.token_hex(8)}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_stale_marks()
            path.touch(exist_ok=False)
        except OSError as error:
            _logger.warning("whether all workers see %s cannot be found out: %s", self.root, error)
            yield None
            return
        try:
            yield path.name
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def sees(self, mark: str) -> bool:
        """Tell whether this worker sees a mark that another one has made, as soon as its file system shows it."""
        deadline = time.monotonic() + _SEEN_SECONDS
        while not os.path.exists(self.root / mark):  # which raises nothing, as for a directory that may not be read
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
            for folder in (self.root.parent, self.root):
                with contextlib.suppress(OSError):  # to open it makes NFS ask the server anew
                    os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        return True

    def _remove_stale_marks(self) -> None:
        """Remove the marks of programs that were killed."""
        for entry in os.scandir(self.root):
            if entry.name.startswith(_MARK) and _is_old(entry):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

    def _sweep(self) -> None:
        """Remove what saves and removals that were cut short have left behind; another program may be at it without a lock."""
        for entry in os.scandir(self.root):
            is_dead = self._right is not None or _is_old(entry)
            if is_dead and _is_leftover(entry) and entry.path not in _being_written:
                shutil.rmtree(entry.path, ignore_errors=True)

    def write(self, step: int, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> int:
        """Write a step, let it take its place at once, so that it is there whole or not at all, and return its bytes.

        A damaged step of that number is replaced. To the record, which is JSON, checksums, the time and the versions are added.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        new = self.root / f"{_SAVING}{step}-{os.getpid()}-{secrets.token_hex(4)}"
        _being_written.add(str(new))
        try:
            new.mkdir()
            with _synced(new / _ARRAYS) as file:
                stored = {key: _in_numpys_dtype(array) for key, array in arrays.items()}
                np.savez(file, **stored)  # pyrefly: ignore[bad-argument-type]
            files = {_ARRAYS: checksums.file_checksum(new / _ARRAYS)}
            whole = {
                **record,
                "format": FORMAT,
                "step": step,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "versions": {name: version_of(name) for name in _PACKAGES},
                "arrays": {
                    key: {"dtype": array.dtype.name, "shape": list(array.shape), "crc32": checksums.array_checksum(key, array)}
                    for key, array in arrays.items()
                },
                "files": files,
            }
            with _synced(new / RECORD) as file:
                file.write(checksums.encode_record(whole))
            _sync(new)
            if step in self.look()[0]:
                self.remove(step)
            os.rename(new, self.root / str(step))
            _sync(self.root)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        finally:
            _being_written.discard(str(new))
        return sum(size for size, _ in files.values())

    def remove(self, step: int) -> None:
        """Remove a step; it is gone at once, whatever happens while its files are deleted."""
        removed = self.root / f"{_REMOVED}{step}-{os.getpid()}"
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(self.root / str(step), removed)
        shutil.rmtree(removed, ignore_errors=True)

    def read(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return a step's record and its arrays, all verified: a DamagedStep when anything differs from what was written.

        A CheckpointError when a newer version of the library wrote it, and when no damage is found, but not all can be read.
        """
        directory = self.root / str(step)
        try:
            record = _read_record(directory, step)
            problems, unread, is_readable = checksums.compare_files(directory, record["files"], RECORD)
        except OSError as error:
            raise self._not_read(step, directory, error) from error
        for path, error in {} if problems else unread.items():
            raise self._not_read(step, path, error) from error
        if not is_readable:
            raise DamagedStep(*problems)  # what is opened may never end
        arrays, described = {}, record["arrays"]
        where = directory / (format_1.ARRAYS if record["format"] == 1 else _ARRAYS)
        read = format_1.read if record["format"] == 1 else _read_arrays
        try:
            for key, array in read(where, described):
                arrays[key] = array.view(np.dtype(described[key]["dtype"])).reshape(described[key]["shape"])
        except Exception as error:
            if not problems:  # its files are those that were written
                raise self._not_read(step, where, error) from error
            problems.append(f"the arrays cannot be read: {type(error).__name__}: {_one_line(error)}")
        problems += _array_problems(record, arrays)
        if problems:
            raise DamagedStep(*problems)
        return record, arrays

    def _not_read(self, step: int, path: Path, error: Exception) -> CheckpointError:
        """Return what to raise when a step could not be read, and nothing says that it is damaged."""
        if not (self.root / str(step)).exists():
            return CheckpointError(
                f"step {step} was removed while it was read, by another process that keeps only its newest steps. Nothing was "
                "restored: call restore_latest() again, and let the other keep more steps: max_to_keep."
            )
        where = "" if getattr(error, "filename", None) else f": {str(path)!r}"
        away = shlex.join(["mv", str(self.root / str(step)), str(self.root / f"unread-{step}")])
        return CheckpointError(
            f"step {step} could not be read: {type(error).__name__}: {_one_line(error)}{where}. No damage was found, so nothing "
            "was restored or removed. Run the program again; if this stays, and an older step will do, move this one away: "
            f"{away}"
        )


def _why_no_step(entry: os.DirEntry[str]) -> str | None:
    if entry.is_symlink():
        return "is a symbolic link"
    if not entry.is_dir(follow_symlinks=False):
        return "is not a directory"
    if not (names := os.listdir(entry.path)):
        return "is an empty directory"
    return None if {RECORD, _ARRAYS, format_1.ARRAYS} & set(names) else "was not written by mr.Checkpoint"


def _is_leftover(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith((_SAVING, _REMOVED)) and entry.is_dir(follow_symlinks=False)


def _is_old(entry: os.DirEntry[str]) -> bool:
    return entry.stat(follow_symlinks=False).st_mtime < time.time() - _STALE_SECONDS


def _in_numpys_dtype(array: np.ndarray) -> np.ndarray:
    """Return an array as a file of NumPy's can hold it: of a dtype such as bfloat16, which NumPy does not know, the bits."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _read_record(directory: Path, step: int) -> dict[str, Any]:
    try:
        with open(directory / RECORD, "rb", opener=checksums.open_plain) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > checksums.MAX_RECORD_BYTES:
                raise ValueError(f"it is not a file of at most {checksums.MAX_RECORD_BYTES} bytes")
            record = checksums.decode_record(file.read())
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_FILE:
            error.filename = str(directory / RECORD)  # which one of reading lacks
            raise
        raise DamagedStep(f"file {RECORD} cannot be used: {_one_line(error)}") from error
    if record.get("step") != step:
        raise DamagedStep(f"file {RECORD} is that of step {record.get('step')!r}")
    if not isinstance(record.get("format"), int) or record["format"] > FORMAT:
        raise CheckpointError(
            f"{directory} has format {record.get('format')!r}, and this version of mirrored reads formats up to {FORMAT}. It was "
            f"written by {record.get('versions')}: install that version."
        )
    return record


def _read_arrays(path: Path, keys: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    with open(path, "rb", opener=checksums.open_plain) as file, np.load(file) as arrays:
        for key in keys:
            yield key, arrays[key]


def _array_problems(record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[str]:
    names = {key: name for name, leaf in record["leaves"].items() for key in (leaf.get("value"), leaf.get("copies"))}
    wrong = [key for key, array in arrays.items() if checksums.array_checksum(key, array) != record["arrays"][key]["crc32"]]
    return [f"array {names.get(key, key)} is damaged: its CRC-32 is not the one that was written" for key in wrong]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file for a `with` block, whose data is on the disk afterwards."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Make the names in a directory survive a power failure, where the file system can."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
