"""Shows values, workers and other people's texts in messages."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
from collections.abc import Mapping, Sequence

from ._libraries import lines_for

#: The beginning of each line of another worker's text.
MARGIN = "  | "
#: The version of a package that is not installed.
NO_VERSION = "not installed"


def escape(text: str, limit: int) -> str:
    r"""Return at most about `limit` characters of one line, with unprintable ones escaped as in Python.

    >>> escape("a\x1b[2Kb\nc", 100)
    'a\\x1b[2Kb\\nc'
    """
    line = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in text[:limit])
    return line + "..." * (len(text) > limit)


def escape_lines(text: str, limit: int) -> str:
    """Return the last `limit` characters of a text, with every line escaped and indented."""
    lines = text[-limit:].split("\n")
    return "\n".join(MARGIN + escape(line, limit) for line in lines if line.strip())


def escape_titled(title: str, rest: str, limit: int) -> str:
    """Return the escaped title and, below it, the escaped and indented lines of `rest`; each has at most `limit` characters."""
    lines = escape_lines(rest, limit)
    return escape(title, limit) + f"\n{lines}" * bool(lines)


def version_of(package: str) -> str:
    """Return the version of a package; NO_VERSION if it is not installed, even if it is on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NO_VERSION


def describe(value: object, length: int = 60) -> str:
    """Show a value from the command line or the environment, escaped and cut to a length."""
    if isinstance(value, str):
        return ascii(value[:length]) + "..." * (len(value) > length)
    if isinstance(value, Mapping):
        return f"an object with {', '.join(describe(key, 20) for key in itertools.islice(value, 4)) or 'nothing'}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a huge number"
    if isinstance(value, float):
        return ascii(value)[:length]
    return f"a {type(value).__name__}"


#: The most characters that show an object.
_SHOWN = 300


def shown(value: object) -> str:
    """Show a user's value: its `repr` if that is short, else its type in words, without numbers."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None and getattr(value, "size", 0) > 20:
        return f"an array of shape {shape} and dtype {dtype}"
    kind = type(value)
    try:
        text = repr(value)
    except Exception:  # the `__repr__` of a user's class
        text = ""
    if 0 < len(text) <= _SHOWN and not lines_for(value):
        return text
    if isinstance(value, str | bytes):
        return f"{text[:_SHOWN]}..."
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return f"a {kind.__name__} of {len(value)}"
    return f"an object of type {kind.__module__}.{kind.__qualname__}"


def call_it(value: object) -> str:
    """Return a hint if the user passed a function in place of its result; "" for other values."""
    return " It is a function: call it, as in mr.grad(loss_fn, variables)()." * callable(value)


def list_lines(lines: Sequence[str], most: int = 5) -> str:
    """Write indented lines; of more than `most`, only the first, and "and 3 more"."""
    more = [f"and {len(lines) - most} more"] * (len(lines) > most)
    return "".join(f"\n  {line}" for line in (*lines[:most], *more))


def counted(number: int, noun: str) -> str:
    """Return "1 worker" or "2 workers"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def numbered(workers: Sequence[int]) -> str:
    """Return "worker 1" or "workers 1, 2"."""
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"


def named(workers: Sequence[int]) -> str:
    """Return "worker 1 has" or "workers 1, 2 have"."""
    return f"{numbered(workers)} ha{'ve' if len(workers) > 1 else 's'}"


def bytes_in_words(count: float) -> str:
    """Return a number of bytes in words, such as "4 B" or "1.0 KiB".

    >>> bytes_in_words(4), bytes_in_words(1024), bytes_in_words(5 * 2**40)
    ('4 B', '1.0 KiB', '5120.0 GiB')
    """
    if count < 1024:
        return f"{count} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"
