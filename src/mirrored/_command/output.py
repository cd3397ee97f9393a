"""Passes on workers' output: line by line to the launcher's streams, raw to log files, the last lines to the summary.

Nothing here blocks on a reader: up to a limit, output that a stream does not take is kept; beyond it, the workers wait.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import io
import os
import re
import select
import stat
from pathlib import Path

from .. import _env
from .._errors import RESTART
from .._text import escape

#: How many bytes may wait for a slow reader before the workers must wait.
PENDING_BYTES = 1 << 20
#: A longer line is cut into pieces.
LINE_BYTES = 1 << 16
#: How much of the end of a worker's output the summary shows: lines, characters of each, characters in all.
TAIL_LINES, TAIL_LINE_CHARACTERS, TAIL_CHARACTERS = 20, 400, 4096
#: The verdict, the library's reason for ending a worker: the summary shows it first and whole, without the stacks after it.
_VERDICT = re.compile(rb"worker \d+ leaves with code %d: " % RESTART)
_STACKS = re.compile(rb"worker \d+ was here:$")
_OF_STACKS = re.compile(rb"  |.*:$")
#: A worker writes fewer lines after a verdict; if more follow, the line was the program's own.
_VERDICT_LINES = 200
#: Seconds between two states of a progress bar in a file or a pipe; a terminal shows every state, in place of the last.
STATE_SECONDS = 10.0
_ERASE_LINE = b"\r\x1b[K"
# A carriage return alone ends a state of a progress bar; after one at the end of the text, a newline may still come.
_LINE_END = re.compile(rb"\r?\n|\r(?=[^\n])")


class BarState(bytes):
    """A state of a progress bar: a line ended by a carriage return alone."""


class Outlet:
    """One of the launcher's own streams; a write to it never blocks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pending = bytearray()
        self._is_open = True
        self.is_terminal = os.isatty(fd)
        self._chunk = 1 << 20 if stat.S_ISREG(os.fstat(fd).st_mode) else select.PIPE_BUF  # a ready pipe takes this many bytes
        if self.is_terminal:
            self._chunk = 256  # a ready terminal takes at least this many
        self.has_colour = self.is_terminal and not _env.NO_COLOR.get()
        self._shows_state = self._has_told = False

    @property
    def is_waiting(self) -> bool:
        """Whether some output is not written yet."""
        return bool(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether the workers must wait before they write more."""
        return len(self._pending) > PENDING_BYTES

    def write(self, data: bytes) -> None:
        """Keep bytes until the stream takes them; drop them if its reader is gone."""
        if self._is_open:
            self._pending += _ERASE_LINE * self._shows_state + data
            self._shows_state = False

    def show(self, start: bytes, state: bytes) -> None:
        """Show a state of a progress bar on a terminal, until the next state or a line replaces it."""
        width = 0
        with contextlib.suppress(OSError):
            width = os.get_terminal_size(self.fd).columns
        text = state.decode(errors="replace")[: max((width or 80) - len(start) - 1, 0)]  # a wrapped line cannot be erased
        self._shows_state = True
        self.write(start + text.encode())
        self._shows_state = True

    def end(self) -> None:
        """End the line of a progress bar's last state, which stays on the terminal."""
        if self._shows_state:
            self._shows_state = False
            self.write(b"\n")

    def flush(self) -> None:
        """Write a piece of the waiting output; the stream must be ready."""
        try:
            del self._pending[: os.write(self.fd, self._pending[: self._chunk])]
        except BlockingIOError:  # the pipe is full again
            return
        except OSError as error:  # training goes on
            self._pending.clear()
            self._is_open = error.errno in (errno.ENOSPC, errno.EDQUOT)  # else the reader or the terminal is gone
            with contextlib.suppress(OSError):
                if self._is_open and not self._has_told and select.select([], [2], [], 0)[1]:  # this write must not block either
                    self._has_told = True
                    os.write(2, f"mirrored launch: output is lost: {error.strerror}\n".encode())


class Tail:
    """The last lines of a worker's output; after a verdict of the library, the lines from it on, without stacks."""

    def __init__(self) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_VERDICT_LINES + 1)
        self._is_in_stacks = False

    def add(self, line: bytes) -> None:
        """Add a line, and drop the oldest when there are too many."""
        if not line.strip():
            return
        goes_on = self._is_in_stacks and _OF_STACKS.match(line) and not _VERDICT.search(line)
        self._is_in_stacks = bool(goes_on or _STACKS.search(line))
        if self._is_in_stacks:
            return
        if isinstance(line, BarState) and self._lines and isinstance(self._lines[-1], BarState):
            self._lines.pop()  # only the last state is kept
        self._lines.append(type(line)(line[: 4 * TAIL_LINE_CHARACTERS]))

    def lines(self) -> list[str]:
        """Return the last lines, escaped."""
        texts = [line.decode(errors="backslashreplace") for line in self._lines]
        begin = max((i + 1 for i, line in enumerate(self._lines) if _VERDICT.search(line)), default=0)
        verdict = [escape(texts[begin - 1], 4 * TAIL_LINE_CHARACTERS)] if begin else []
        kept: list[str] = []
        left = TAIL_CHARACTERS - sum(map(len, verdict))
        for text in reversed(texts[begin:][len(verdict) - TAIL_LINES :]):
            shown = escape(text, TAIL_LINE_CHARACTERS)
            left -= len(shown)
            if left < 0:
                break
            kept.append(shown)
        return verdict + kept[::-1]


class LogFile(io.FileIO):
    """A new file for a worker's raw output that only its owner can read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x", opener=lambda path, flags: os.open(path, flags, 0o600))

    def append(self, data: bytes) -> str | None:
        """Write all data. On a failure return the reason, and raise nothing: a full disk does not end the training."""
        try:
            while data and not self.closed:
                data = data[self.write(data) :]
        except OSError as error:
            self.close()
            return f"cannot write {escape(str(self.name), 400)} any more: {error.strerror}"
        return None


class LineCutter:
    """A cutter of a pipe's output into lines, which keeps the unfinished rest."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return complete lines without their ends, and pieces of a line that is too long. "\\r" alone ends a `BarState`."""
        text, start, lines = self._rest + data, 0, []
        for end in _LINE_END.finditer(text):
            line = text[start : end.start()]
            if line or end[0] != b"\r":
                lines.append(BarState(line) if end[0] == b"\r" else line)
            start = end.end()
        while len(text) - start > LINE_BYTES:
            lines.append(text[start : start + LINE_BYTES])
            start += LINE_BYTES
        self._rest = text[start:]
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line if it has no newline."""
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        return [rest] * bool(rest)


def prefix(index: int, num_workers: int, colour: bool) -> bytes:
    """Return the text before each line of a worker, equally wide for all workers."""
    name = f"[{index}]"
    space = " " * (len(f"[{num_workers - 1}] ") - len(name))
    if colour:
        name = f"\x1b[{31 + (index + 1) % 6}m{name}\x1b[0m"
    return (name + space).encode()


def make_log_folder(root: Path, attempt: int, node: str) -> Path:
    """Make a new folder for one attempt, numbered after those of earlier runs with the same root."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)  # again, because a user may have removed it
    while True:
        folder = root / f"attempt-{attempt}{node}"
        try:
            folder.mkdir(mode=0o700)
            return folder
        except FileExistsError:
            attempt += 1
