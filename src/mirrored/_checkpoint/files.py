"""What a checkpoint is on disk: orbax's files, a record of them, and one rename that makes a step count.

The only module that imports orbax, and only when it is used. Why there is no orbax manager here:
docs/checkpoints.md, "On disk".
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import re
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._errors import CheckpointError
from .._text import version_of
from . import checksums
from .sole_writer import LOCK, SoleWriter, sole_writer

_logger = logging.getLogger("mirrored")

#: Of what is written here. A library reads its own format and older ones.
FORMAT = 1
RECORD = "record.json"
_ARRAYS = "arrays"
_PACKAGES = ("mirrored", "jax", "numpy", "orbax-checkpoint")
_STEP = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
_SAVING, _REMOVED, _MARK = ".saving-", ".removed-", ".shared-"
#: How long a file that another host has made may take to be seen, and how old one is that no running program waits for.
_SEEN_SECONDS, _STALE_SECONDS = 5.0, 3600.0
#: What orbax's files hold as such; arrays of other dtypes, such as float8, are written as their bytes.
_STORABLE = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bfloat16", "float16", "float32", "float64",
    "complex64", "complex128",
}  # fmt: skip


#: What the system says of a name where there is no file: nothing, a link, or something of another kind. All else that it says,
#: such as of a disk that does not answer or of too many open files, says nothing of what was written.
_NO_FILE = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}

#: By this process: another checkpoint of it may be in the same directory.
_being_written: set[str] = set()


class DamagedStep(Exception):
    """A step on disk is damaged. Users see all that is wrong with it in the log, and in a CheckpointError."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def orbax() -> Any:
    """Import orbax, or say how to install it."""
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise ImportError(
            "mr.Checkpoint needs orbax-checkpoint, which is not installed: pip install orbax-checkpoint."
        ) from error


def checked_directory(directory: Any) -> Path:
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
        """Take the right to write here, which is kept until `release`.

        Raises:
            CheckpointError: when another program has it.
        """
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
        """Keep a file of a random name in the directory for the duration of a `with` block.

        Its name is what the block gets; None where nothing can be written.
        """
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
        """Write a step, and then let it take its place at once, so that it is there whole or not at all.

        Args:
            step: its number. A damaged step of that number is replaced.
            arrays: by their key in the record; keys are letters and digits.
            record: JSON; checksums, the time and the versions are added.

        Returns:
            The number of bytes on disk.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        new = self.root / f"{_SAVING}{step}-{os.getpid()}-{secrets.token_hex(4)}"
        _being_written.add(str(new))
        try:
            new.mkdir()
            stored = {key: _storable(array) for key, array in arrays.items() if array.size}
            if stored:
                absl, is_another = logging.getLogger("absl"), lambda entry: "orbax" not in entry.pathname
                with _checkpointer() as checkpointer, contextlib.ExitStack() as log:
                    absl.addFilter(is_another)  # orbax logs a traceback for each thread that fails; the error is raised, too
                    log.callback(absl.removeFilter, is_another)
                    checkpointer.save(new / _ARRAYS, args=orbax().args.PyTreeSave(stored))
            files, unread = checksums.file_checksums(new)
            for error in unread.values():
                raise error
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
            _write_synced(new / RECORD, checksums.encode_record(whole))
            for folder, _, _ in os.walk(new):
                _sync(Path(folder))
            self._replace(step, new)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        finally:
            _being_written.discard(str(new))
        return sum(size for size, _ in files.values())

    def _replace(self, step: int, new: Path) -> None:
        target = self.root / str(step)
        if step in self.look()[0]:
            self.remove(step)
        os.rename(new, target)
        _sync(self.root)

    def remove(self, step: int) -> None:
        """Remove a step; it is gone at once, whatever happens while its files are deleted."""
        removed = self.root / f"{_REMOVED}{step}-{os.getpid()}"
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(self.root / str(step), removed)
        shutil.rmtree(removed, ignore_errors=True)

    def read(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return a step's record and its arrays, all verified.

        Raises:
            DamagedStep: when anything differs from what was written.
            CheckpointError: when a newer version of the library wrote it, and when nothing that could be read differs, but
                not all could be.
        """
        directory = self.root / str(step)
        try:
            record = _read_record(directory, step)
            found, unread = checksums.file_checksums(directory, record["files"])
        except OSError as error:
            raise self._not_read(step, directory, error) from error
        found.pop(RECORD, None)
        unread.pop(RECORD, None)
        written = {name: about for name, about in record["files"].items() if name not in unread}
        problems = checksums.file_problems(written, found)
        sizes = {name: size for name, (size, _) in written.items()}
        for name, error in {} if problems else unread.items():
            raise self._not_read(step, directory / name, error) from error
        if unread or not {name: size for name, (size, _) in found.items()}.items() <= sizes.items():
            raise DamagedStep(problems)  # orbax would open all that is there, also what never ends
        arrays: dict[str, np.ndarray] = {}
        try:
            # One by one from damaged files, to name the arrays: orbax does not end well with several reads of which some fail.
            for keys in [[key] for key in record["arrays"]] if problems else [list(record["arrays"])]:
                arrays |= _read_arrays(directory / _ARRAYS, {key: record["arrays"][key] for key in keys})
        except Exception as error:
            if not problems:  # its files are those that were written
                raise self._not_read(step, directory / _ARRAYS, error) from error
            problems.append(f"orbax cannot read the arrays: {type(error).__name__}: {_one_line(error)}")
        problems += _array_problems(record, arrays)
        if problems:
            raise DamagedStep(problems)
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
    return None if RECORD in names or _ARRAYS in names else "was not written by mr.Checkpoint"


def _is_leftover(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith((_SAVING, _REMOVED)) and entry.is_dir(follow_symlinks=False)


def _is_old(entry: os.DirEntry[str]) -> bool:
    return entry.stat(follow_symlinks=False).st_mtime < time.time() - _STALE_SECONDS


def _checkpointer() -> Any:
    """Make a checkpointer that waits for no other process, as one that all processes share would."""
    ocp, me = orbax(), jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"mirrored-worker-{me}"
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone)


def _storable(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.name in _STORABLE else checksums.as_bytes(array)


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
        raise DamagedStep([f"file {RECORD} cannot be used: {_one_line(error)}"]) from error
    if record.get("step") != step:
        raise DamagedStep([f"file {RECORD} is that of step {record.get('step')!r}"])
    if not isinstance(record.get("format"), int) or record["format"] > FORMAT:
        raise CheckpointError(
            f"{directory} has format {record.get('format')!r}, and this version of mirrored reads formats up to {FORMAT}. It was "
            f"written by {record.get('versions')}: install that version."
        )
    return record


def _read_arrays(directory: Path, described: Mapping[str, Any]) -> dict[str, np.ndarray]:
    with_data = [key for key, about in described.items() if 0 not in about["shape"]]
    stored: dict[str, np.ndarray] = {}
    if with_data:
        ocp = orbax()
        as_numpy = {key: ocp.RestoreArgs(restore_type=np.ndarray) for key in with_data}
        with _checkpointer() as checkpointer:
            wanted = ocp.args.PyTreeRestore(item=dict.fromkeys(with_data, 0), restore_args=as_numpy, partial_restore=True)
            stored = checkpointer.restore(directory, args=wanted)
    return {key: _array_of(stored.get(key), about) for key, about in described.items()}


def _array_of(stored: np.ndarray | None, about: Mapping[str, Any]) -> np.ndarray:
    dtype, shape = np.dtype(about["dtype"]), tuple(about["shape"])
    if stored is None:
        return np.zeros(shape, dtype)
    return np.asarray(stored) if about["dtype"] in _STORABLE else np.asarray(stored).view(dtype).reshape(shape)


def _array_problems(record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[str]:
    names = {key: name for name, leaf in record["leaves"].items() for key in (leaf.get("value"), leaf.get("copies"))}
    wrong = [key for key, array in arrays.items() if checksums.array_checksum(key, array) != record["arrays"][key]["crc32"]]
    return [f"array {names.get(key, key)} is damaged: its CRC-32 is not the one that was written" for key in wrong]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
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
