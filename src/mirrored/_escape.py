"""How is text from another process shown, so that it can neither draw on a terminal nor look like a line of ours? No jax here."""

from __future__ import annotations

#: Begins each line of such a text in the log.
MARGIN = "  | "


def escape(text: str, limit: int) -> str:
    r"""Return at most about `limit` characters of one line, with what is not printable written out as in Python.

    >>> escape("a\x1b[2Kb\nc", 100)
    'a\\x1b[2Kb\\nc'
    """
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in text[:limit]
    )
    return shown if len(text) <= limit else f"{shown}..."


def escape_lines(text: str, limit: int) -> str:
    """Return the last `limit` characters of a text of several lines, each escaped and behind a margin."""
    lines = text[-limit:].split("\n")
    return "\n".join(MARGIN + escape(line, limit) for line in lines if line.strip())


def escape_titled(title: str, rest: str, limit: int) -> str:
    """Return a title, escaped, and below it the lines that belong to it, each behind a margin; `limit` characters of each."""
    lines = escape_lines(rest, limit)
    return escape(title, limit) + (f"\n{lines}" if lines else "")
