"""Is the folder of the checkpoints the same on all hosts, and does it have room? `mirrored check --checkpoints DIR`."""

from __future__ import annotations

import functools
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .._text import bytes_in_words
from .check_lines import Finding, Lines

#: How long a file system may take, and how long a new file may be unseen elsewhere: NFS remembers for a while what a folder had.
_SECONDS, _UNSEEN_SECONDS = 30.0, 5.0
_FILE_BYTES, _LEAST_FREE = 32 << 20, 1 << 30


def check_folder(lines: Lines, folder: Path) -> None:
    """Let worker 0 write a file, which all others read; then remove it."""
    path = folder / f".mirrored-check-{secrets.token_hex(8)}"
    found = Finding("")
    try:
        if lines.worker == 0:
            found = within(_SECONDS, functools.partial(_write, path))
        name, problem = lines.exchange("file", [path.name, found.problem])[0]
        if lines.worker and not problem:
            found = within(_SECONDS, functools.partial(_read, folder / name, lines))
        lines.add("checkpoints", found)
    finally:
        if lines.worker == 0:
            within(_SECONDS, functools.partial(_remove, path))


def within(seconds: float, work: Callable[[], Finding]) -> Finding:
    """Use a file system in a thread of its own: if a server is gone, a call never returns."""
    answers: queue.SimpleQueue[Finding] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(work())
        except OSError as error:
            answers.put(Finding("", str(error)))

    threading.Thread(target=ask, name="mirrored-check-folder", daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return Finding("", f"the folder has not answered for {seconds:.0f} s: is the server of this file system there?")


def _write(path: Path) -> Finding:
    """Write a file, and measure it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with path.open("wb") as file:
        file.write(path.name.encode() + bytes(_FILE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    rate = _FILE_BYTES / (time.perf_counter() - start)
    free = shutil.disk_usage(path.parent).free
    if free < _LEAST_FREE:
        return Finding("", f"{path.parent} has only {bytes_in_words(free)} free")
    return Finding(f"{path.parent}: written at {rate / 1e6:.0f} MB/s, read by all, {bytes_in_words(free)} free")


def _read(path: Path, lines: Lines) -> Finding:
    """Read the file of worker 0."""
    until = time.monotonic() + _UNSEEN_SECONDS
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    if not path.exists():
        missing = f"the new file of {lines.call(0)} is not in it"
        return Finding("", f"{path.parent} is another folder, {missing}: mount the same one on all hosts")
    if path.read_bytes() != path.name.encode() + bytes(_FILE_BYTES):
        return Finding("", f"reads {path.name} otherwise than {lines.call(0)} has written it")
    return Finding("")


def _remove(path: Path) -> Finding:
    path.unlink(missing_ok=True)
    return Finding("")
