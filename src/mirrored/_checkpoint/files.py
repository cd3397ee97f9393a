"""Writes and reads steps on disk: an `np.savez` file, a JSON record of it, and one rename that completes the step.

docs/design/checkpoints.md describes the files, docs/design/dependencies.md why no checkpoint library is used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from .._cluster.spec import MAX_WORKERS
from .._errors import CheckpointError
from .._text import version_of
from . import array_files
from .sole_writer import SoleWriter, sole_writer
from .verify import ARRAYS, PARTS, RECORD, DamagedStep, find_damage, load_whole, one_line, open_parts, plain_file

_logger = logging.getLogger("mirrored")

#: The formats of a step without and with arrays in parts: versions that do not know a format refuse it.
FORMAT, FORMAT_IN_PARTS = 3, 4
#: A larger record counts as damage: this library writes none.
MAX_RECORD_BYTES = 256 * 1024 * 1024
_PACKAGES = ("mirrored", "jax", "numpy")
_STEP = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
_MAX_STEP = 10**18 - 1
_SAVING, _REMOVED, _MARK = ".saving-", ".removed-", ".shared-"
#: Seconds until another host's new file must be visible, and the age at which a temporary file counts as left behind.
_SEEN_SECONDS, _STALE_SECONDS = 5.0, 3600.0
#: With the process id, the mark of this process's unfinished steps, which its other checkpoints do not remove as leftovers.
_TOKEN = secrets.token_hex(4)


def checked_step(step: Any, verb: str) -> int:
    """Return a step number as an int, or raise TypeError."""
    try:
        number = int(step.__index__())
    except (AttributeError, TypeError):
        number = -1
    if isinstance(step, bool) or not 0 <= number <= _MAX_STEP:
        raise TypeError(f"{verb}: step is {step!r}; expected an int of at least 0.")
    return number


def checked_directory(directory: object) -> Path:
    """Return the resolved path of a directory for steps; raise TypeError or ValueError when it cannot hold any."""
    if not isinstance(directory, str | os.PathLike) or not str(directory):
        expected = "a path as the first argument, without a name: mr.Checkpoint('checkpoints', w=w)"
        raise TypeError(f"mr.Checkpoint: directory is {directory!r}; expected {expected}.")
    if "://" in str(directory):
        raise ValueError(
            f"mr.Checkpoint: directory is {str(directory)!r}; expected a directory of a file system, where a rename happens at "
            "once. Mount the bucket, or save to a shared disk."
        )
    path = Path(os.path.realpath(directory))
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest.is_dir():
        raise ValueError(f"mr.Checkpoint: {nearest} is not a directory.")
    return path


class StepFiles:
    """The steps in one directory, each in a subdirectory named after its number.

    No user's name becomes part of a path: arrays are numbered, and only the record holds their names.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._right: SoleWriter | None = None

    def claim(self) -> None:
        """Become the sole writer until `release`, or raise CheckpointError when another program is."""
        self._right = sole_writer(self.root)

    def release(self) -> None:
        """Let other programs write here, unless another `StepFiles` of this program still holds the claim."""
        self._right = None

    def scan(self) -> tuple[list[int], list[str]]:
        """Return the steps in order, and every other folder, each with the reason why it is no step."""
        steps, strays = [], []
        try:
            entries = sorted(os.scandir(self.root), key=lambda entry: entry.name)
        except FileNotFoundError:
            return [], []
        for entry in entries:
            if _STEP.fullmatch(entry.name):
                try:
                    reason = _why_no_step(entry)
                except FileNotFoundError:  # another process has just removed it, perhaps because it had saved a newer one
                    return self.scan()
                if reason is None:
                    steps.append(int(entry.name))
                else:
                    strays.append(f"{entry.name} {reason}")
            elif not entry.name.startswith(_REMOVED) and entry.is_dir(follow_symlinks=False):
                what = "a save that was cut short" if _is_leftover(entry) else "not a step"
                strays.append(f"{entry.name} is {what}")
        return sorted(steps), strays

    @contextlib.contextmanager
    def mark(self) -> Iterator[str | None]:
        """Keep a file with a random name in the directory during a `with` block; yield its name, or None if it cannot be made."""
        path = self.root / f"{_MARK}{secrets.token_hex(8)}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
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
        """Tell whether another worker's mark becomes visible to this worker within some seconds."""
        deadline = time.monotonic() + _SEEN_SECONDS
        while not os.path.exists(self.root / mark):  # False, not an error, where the directory may not be read
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
            for folder in (self.root.parent, self.root):
                with contextlib.suppress(OSError):  # opening makes NFS ask its server anew
                    os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        return True

    def _sweep(self) -> None:
        """Remove what killed programs left behind: marks, and unfinished saves and removals."""
        for entry in os.scandir(self.root):
            with contextlib.suppress(OSError):  # another program may remove it first
                if entry.name.startswith(_MARK) and _is_old(entry):
                    os.unlink(entry.path)
                elif _is_leftover(entry) and f"-{os.getpid()}-{_TOKEN}" not in entry.name:
                    is_dead = self._right is not None or _is_old(entry)  # without the lock another program may be writing
                    if is_dead:
                        shutil.rmtree(entry.path, ignore_errors=True)

    def new_folder(self, step: int) -> str:
        """Return the name of a folder in which a step is written."""
        return f"{_SAVING}{step}-{os.getpid()}-{_TOKEN}{secrets.token_hex(2)}"

    def write(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray],
        record: Mapping[str, Any],
        write_parts: Callable[[Path], Mapping[str, Any]] | None = None,
        folder: str = "",
    ) -> int:
        """Write a step and return its size in bytes; a rename at the end makes it visible, so it is complete or absent.

        A damaged step of that number is replaced. Checksums, the time and the versions are added to the record, which is JSON.

        Args:
            write_parts: writes the arrays in parts into a folder, and returns their entries for the record.
            folder: the name of the folder, from `new_folder`; other workers may write there too.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        new = self.root / (folder or self.new_folder(step))
        try:
            new.mkdir()
            with _synced(new / ARRAYS) as file:
                described = array_files.write(file, arrays.items())
            if write_parts is not None:
                described |= write_parts(new)
            whole = {
                **record,
                "format": FORMAT if write_parts is None else FORMAT_IN_PARTS,
                "step": step,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "versions": {name: version_of(name) for name in _PACKAGES},
                "arrays": described,
            }
            with _synced(new / RECORD) as file:
                file.write(_encode(whole))
            num_bytes = sum(entry.stat().st_size for entry in os.scandir(new))
            _sync(new)
            if step in self.scan()[0]:  # a rename does not replace a directory with files
                self.remove(step)
            os.rename(new, self.root / str(step))
            _sync(self.root)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        return num_bytes

    def remove(self, step: int) -> None:
        """Remove a step: rename it first, so that it no longer counts even if deleting its files is interrupted."""
        removed = self.root / f"{_REMOVED}{step}-{os.getpid()}"
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(self.root / str(step), removed)
        shutil.rmtree(removed, ignore_errors=True)
        if removed.exists():
            _logger.warning("step %s was removed, but its files could not be deleted; delete %s", step, removed)

    def read(
        self, step: int, opened: contextlib.ExitStack | None = None, worker: int = 0, num_workers: int = 1
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a step's verified record and arrays; raise DamagedStep when anything differs from the written bytes.

        Arrays in parts are `InFiles`: they are read later, until `opened` closes their files. Each of the `num_workers` verifies
        some of these files.

        Raise CheckpointError for a step in another format, and for a step that cannot be read although no damage is found.
        """
        directory = self.root / str(step)
        try:
            record = _read_record(directory, step)
            with plain_file(directory / ARRAYS) as file:
                problems = find_damage(file, record, ARRAYS)
                arrays: dict[str, Any] = {} if problems else load_whole(file, record)
            if opened is not None and not problems:
                problems, in_parts = open_parts(directory, record, opened, range(worker, MAX_WORKERS, num_workers))
                arrays |= in_parts
            if problems:
                raise DamagedStep(*problems)
            return record, arrays
        except CheckpointError:
            raise
        except Exception as error:
            if isinstance(error, DamagedStep) and directory.exists():
                raise
            raise self._not_read(step, directory, error) from error

    def _not_read(self, step: int, path: Path, error: Exception) -> CheckpointError:
        """Return the error for a step that cannot be read although nothing proves damage."""
        if not (self.root / str(step)).exists():
            return CheckpointError(
                f"step {step} was removed while it was read, by another process that keeps only its newest steps. Nothing was "
                "restored: call restore_latest() again, and let the other keep more steps: max_to_keep."
            )
        where = "" if getattr(error, "filename", None) else f": {str(path)!r}"
        away = shlex.join(["mv", str(self.root / str(step)), str(self.root / f"unread-{step}")])
        return CheckpointError(
            f"step {step} could not be read: {type(error).__name__}: {one_line(error)}{where}. No damage was found, so nothing "
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
    return "was not written by mr.Checkpoint" if {RECORD, ARRAYS}.isdisjoint(names) else None


def _is_leftover(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith((_SAVING, _REMOVED)) and entry.is_dir(follow_symlinks=False)


def _is_old(entry: os.DirEntry[str]) -> bool:
    return entry.stat(follow_symlinks=False).st_mtime < time.time() - _STALE_SECONDS


def _read_record(directory: Path, step: int) -> dict[str, Any]:
    with plain_file(directory / RECORD) as file:
        data = file.read(MAX_RECORD_BYTES + 1)
    try:
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"it has more than {MAX_RECORD_BYTES} bytes")
        record = _decode(data)
    except ValueError as error:
        raise DamagedStep(f"file {RECORD} cannot be used: {one_line(error)}") from error
    if record.get("step") != step:
        raise DamagedStep(f"file {RECORD} is that of step {record.get('step')!r}")
    if record.get("format") not in (FORMAT, FORMAT_IN_PARTS):
        raise CheckpointError(
            f"{directory} has format {record.get('format')!r}, and this version of mirrored reads formats {FORMAT} and "
            f"{FORMAT_IN_PARTS}. It was written by {record.get('versions')}; this is mirrored {version_of('mirrored')}. Read it "
            "with what has written it."
        )
    for table in (record.get("leaves"), record.get("arrays")):
        if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
            raise DamagedStep(f"file {RECORD} has no list of the leaves or of the arrays")
    return record


def _encode(record: Mapping[str, Any]) -> bytes:
    """Write a record as JSON, with its own checksum."""
    return json.dumps({"crc32": digest(record), "record": record}, indent=1, sort_keys=True).encode()


def _decode(data: bytes) -> dict[str, Any]:
    """Read a record, or raise ValueError when it is not what `_encode` wrote."""
    try:
        outer = json.loads(data)
        record, recorded = outer["record"], outer["crc32"]
        computed = digest(record)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it is not a record: {type(error).__name__}: {error}") from error
    if computed != recorded or not isinstance(record, dict):
        raise ValueError(f"its checksum is {computed}, was {recorded!r} when it was written")
    return record


def digest(record: object) -> str:
    """Return the CRC-32 of a record, independent of its order and spaces."""
    return f"{zlib.crc32(json.dumps(record, sort_keys=True, separators=(',', ':')).encode()):08x}"


def write_parts(folder: Path, worker: int, pieces: Iterable[tuple[str, np.ndarray]]) -> dict[str, Any]:
    """Write the parts on a worker's devices, and return their entries for the record."""
    name = PARTS.format(worker)
    with _synced(folder / name) as file:
        described = array_files.write(file, pieces)
    return {key: {**about, "file": name} for key, about in described.items()}


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file for a `with` block, and flush it to the disk at its end."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Flush a directory to the disk, where the file system can, so that its names survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
