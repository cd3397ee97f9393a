"""Lets one program at a time write into a directory, by a file lock that ends with the process. No jax here."""

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
import time
import weakref
from pathlib import Path
from typing import Any

from .._errors import CheckpointError
from .._process import Lock
from .._text import escape

_logger = logging.getLogger("mirrored")

#: The locked file.
LOCK = ".writer"
#: How long to wait for a lock: of a process on this host, which may just be ending; of another host, because an NFS server
#: releases the locks of a lost host after 90 s.
_HERE_SECONDS, _ELSEWHERE_SECONDS = 1.0, 100.0
_MAX_BYTES = 1000

#: This process's locks by directory: a notebook whose cell is run twice writes as one program.
_held: weakref.WeakValueDictionary[Path, SoleWriter] = weakref.WeakValueDictionary()
_one_at_a_time = Lock()


class SoleWriter:
    """The right of this process to write into a directory, for as long as this object lives.

    It is a `flock`: the system releases it when the process ends, however that happens. A forked child closes its copy.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self.descriptor = path, descriptor
        self.end = weakref.finalize(self, _release, path, descriptor)

    def stands(self) -> bool:
        """Tell whether the lock still holds: somebody may have removed its file, or this process may be a fork."""
        return self.end.alive and _is_at(self._path, self.descriptor)


def sole_writer(root: Path) -> SoleWriter | None:
    """Make a directory and return the right to write into it; raise CheckpointError when another program has that right.

    Return None where the file system has no locks, or cannot be written to.
    """
    with _one_at_a_time:
        held = _held.get(root)
        if held is not None and held.stands():
            return held
        if held is not None and not root.exists():
            _logger.warning("%s has vanished since the last save, with the steps in it. It is made again.", root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(root / LOCK)
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


def _lock(path: Path) -> int:
    """Open and lock the file; wait some time for another process to release it."""
    began, is_said = time.monotonic(), False
    while True:
        holder: dict[str, Any] = {}
        with contextlib.ExitStack() as opened:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            opened.callback(os.close, descriptor)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", str(path))
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(path, descriptor):  # else its last holder has just removed the file
                    opened.pop_all()
                    return descriptor
            except BlockingIOError:
                holder = _read_note(descriptor)
            except OSError as error:
                if error.errno != errno.ESTALE:  # NFS: the file was removed
                    raise
        is_here = holder.get("host", socket.gethostname()) == socket.gethostname()
        patience, pause = (_HERE_SECONDS, 0.05) if is_here else (_ELSEWHERE_SECONDS, 1.0)
        if time.monotonic() - began >= patience:
            raise CheckpointError(
                f"another program writes checkpoints to {path.parent}: {_show(holder)} has the lock on {path.name}. Nothing was "
                f"saved or changed. Give each program a directory of its own: mr.Checkpoint({str(path.parent) + '-2'!r}, ...), "
                f"or end the other first. If it runs no more, and this stays: {shlex.join(['rm', str(path)])}"
            )
        if not (is_here or is_said):
            is_said = True
            _logger.warning("%s: waiting up to %.0f s until %s has ended", path.parent, _ELSEWHERE_SECONDS, _show(holder))
        time.sleep(pause)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False


def _read_note(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):  # anybody may have written into the file
        if isinstance(note := json.loads(os.pread(descriptor, _MAX_BYTES, 0)), dict):
            return note
    return {}


def _show(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    texts = [escape(str(holder.get(name)), 100) for name in ("process", "host", "since")]
    return "process {} on {}, since {},".format(*texts)


def _release(path: Path, descriptor: int) -> None:
    if _is_at(path, descriptor):
        with contextlib.suppress(OSError):
            path.unlink()  # before the lock ends, so that whoever waits for it sees that the file is gone
    os.close(descriptor)


def _forget() -> None:
    """Close the parent's locks in a forked child, where they would outlive the parent."""
    global _one_at_a_time
    _one_at_a_time = Lock()  # another thread may have held it
    for held in list(_held.values()):
        if held.end.detach() is not None:
            os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
