"""Which program may write into a directory: a lock on a file in it, which ends with the process. No jax here."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import socket
import stat
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from .._errors import CheckpointError
from .._text import escape

_logger = logging.getLogger("mirrored")

#: The file that is locked, for as long as a program may write.
LOCK = ".writer"
#: How long a lock is waited for: a process of this host that has just ended, and one of another host that was lost, whose locks
#: a server of NFS gives up when it has not heard of it for 90 s.
_HERE_SECONDS, _ELSEWHERE_SECONDS = 1.0, 100.0
_MAX_BYTES = 1000

#: Of this process, by directory: a notebook whose cell is run twice writes as one program.
_held: weakref.WeakValueDictionary[Path, SoleWriter] = weakref.WeakValueDictionary()
_one_at_a_time = threading.RLock()


class SoleWriter:
    """The right of this process to write into a directory, for as long as somebody in it holds this object.

    `flock`, because the system ends it with the process, however that ends; a forked child closes its copy.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self.descriptor = path, descriptor
        self.end = weakref.finalize(self, _release, path, descriptor)

    def stands(self) -> bool:
        """Tell whether the lock is still what other programs ask: the file may have been removed, or this process forked."""
        return self.end.alive and _is_at(self._path, self.descriptor)


def sole_writer(root: Path) -> SoleWriter | None:
    """Return what to hold while writing into a directory, which is made, or raise CheckpointError when another program has it.

    None where the file system knows no locks, or nothing can be written anyway.
    """
    with _one_at_a_time:
        held = _held.get(root)
        if held is not None and held.stands():
            return held
        if held is not None and not root.exists():
            _logger.warning("%s has vanished since the last save, with the steps in it. It is made again.", root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            descriptor = _locked(root / LOCK)
        except OSError as error:
            _logger.warning("whether another program writes to %s cannot be found out: %s", root, error)
            return None
        held = _held[root] = SoleWriter(root / LOCK, descriptor)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        me = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(me).encode(), 0)
        return held


def _locked(path: Path) -> int:
    """Open the file with a lock on it."""
    began, is_said = time.monotonic(), False
    while True:
        descriptor, other = _try(path)
        if descriptor is not None:
            return descriptor
        is_here = other.get("host", socket.gethostname()) == socket.gethostname()
        if time.monotonic() - began >= (_HERE_SECONDS if is_here else _ELSEWHERE_SECONDS):
            raise _refusal(path, other)
        if not (is_here or is_said):
            is_said = True
            _logger.warning("%s: waiting up to %.0f s until %s has ended", path.parent, _ELSEWHERE_SECONDS, _show(other))
        time.sleep(0.05 if is_here else 1.0)


def _try(path: Path) -> tuple[int | None, dict[str, Any]]:
    """Return the locked file, or what its holder says of itself, if there is one."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    other: dict[str, Any] = {}
    is_mine = False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_mine = _is_at(path, descriptor)  # else its holder has just removed it
    except BlockingIOError:
        other = _read(descriptor)
    except OSError as error:
        if error.errno != errno.ESTALE:  # on NFS: it was removed
            raise
    finally:
        if not is_mine:
            os.close(descriptor)
    return (descriptor if is_mine else None), other


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False


def _read(descriptor: int) -> dict[str, Any]:
    try:
        other = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        other = None
    return other if isinstance(other, dict) else {}


def _show(other: dict[str, Any]) -> str:
    if not other:
        return "another process"
    texts = [escape(str(other.get(name)), 100) for name in ("process", "host", "since")]
    return "process {} on {}, since {},".format(*texts)


def _refusal(path: Path, other: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"another program writes checkpoints to {path.parent}: {_show(other)} has the lock on {path.name}. Nothing was saved or "
        f"changed. Give each program a directory of its own: mr.Checkpoint({str(path.parent) + '-2'!r}, ...), or end the other "
        f"first. If it runs no more, and this stays: {shlex.join(['rm', str(path)])}"
    )


def _release(path: Path, descriptor: int) -> None:
    if _is_at(path, descriptor):
        with contextlib.suppress(OSError):
            path.unlink()  # before the lock ends: who waits for it finds that it is another file
    os.close(descriptor)


def _forget() -> None:
    """Leave the locks to the process that this one was forked from: a copy would outlive it."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()  # another thread may have held it
    for held in list(_held.values()):
        if held.end.detach() is not None:
            os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
