"""The pictures of the report: inline SVG that takes its colours from the page."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from .._html import Html, element, join
from .._text import bytes_in_words, counted
from ..data._sharing.rows import split_sizes
from .facts import Replica

#: The width of all pictures in their own units: about the pixels of a narrow screen, where letters must stay readable.
WIDTH = 420
_ROW, _GAP, _MARGIN = 4, 8, 12
#: Further devices or parts are counted, not drawn.
MAX_DEVICES, MAX_PARTS = 32, 32


def _text(x: float, y: float, content: object, kind: str = "") -> Html:
    return element("text", content, x=round(x, 1), y=round(y, 1), class_=kind)


def _box(x: float, y: float, width: float, height: float, kind: str) -> Html:
    return element("rect", x=round(x, 1), y=round(y, 1), width=round(max(width, 0.5), 1), height=height, rx=5, class_=kind)


def _picture(title: str, height: float, parts: Sequence[Html]) -> Html:
    return element("svg", join([element("title", title), *parts]), viewBox=f"0 0 {WIDTH} {round(height)}", role="img")


def topology(replicas: Sequence[Replica]) -> Html:
    """Draw the workers, their devices, and the all-reduce over all replicas."""
    drawn, parts, y = replicas[:MAX_DEVICES], [], 4.0
    width = (WIDTH - 2 * _MARGIN - (_ROW - 1) * _GAP) / _ROW
    for worker, group in itertools.groupby(drawn, key=lambda replica: replica.worker):
        own = list(group)
        lines = -(-len(own) // _ROW)
        parts.append(_box(1, y, WIDTH - 2, 30 + lines * 54, "worker"))
        parts.append(_text(_MARGIN, y + 19, f"worker {worker}", "quiet"))
        for position, replica in enumerate(own):
            x = _MARGIN + (position % _ROW) * (width + _GAP)
            top = y + 28 + position // _ROW * 54
            parts += [_box(x, top, width, 46, "device"), _text(x + 8, top + 19, f"replica {replica.number}", "strong")]
            parts.append(_text(x + 8, top + 36, replica.device, "quiet"))
        y += 30 + lines * 54 + _GAP
    if len(replicas) > len(drawn):
        parts.append(_text(_MARGIN, y + 10, f"and {len(replicas) - len(drawn)} more replicas", "quiet"))
        y += 22
    if len(replicas) > 1:
        parts.append(element("path", d=f"M{WIDTH / 2} {y - _GAP} v{2 * _GAP}", class_="wire"))
        parts.append(_box(1, y + _GAP, WIDTH - 2, 28, "bus"))
        parts.append(_text(_MARGIN, y + _GAP + 19, f'all-reduce over the axis "replica", of {len(replicas)}', "onbus"))
        y += _GAP + 30
    return _picture(f"{counted(len(replicas), 'replica')} and their devices", y + 4, parts)


def split(num_rows: int | None, num_replicas: int) -> Html:
    """Draw how the rows of a global batch are cut into one part for each replica."""
    if num_replicas > MAX_PARTS:
        return Html("")
    sizes = [1] * num_replicas if num_rows is None else split_sizes(num_rows, num_replicas)
    parts, x, total = [], 1.0, max(sum(sizes), 1)
    label = "a global batch" if num_rows is None else f"a global batch of {counted(num_rows, 'row')}"
    parts.append(_text(2, 14, label, "quiet"))
    for number, size in enumerate(sizes):
        width = (WIDTH - 2) * size / total
        parts.append(_box(x, 22, width - 2, 30, "part"))
        shown = f"{number}" if num_rows is None or width < 46 else f"{number}: {size}"
        if width >= 18:
            parts.append(_text(x + 6, 42, shown, "onpart"))
        x += width
    parts.append(_text(2, 68, "replica" if num_rows is None else "replica: its rows", "quiet"))
    return _picture(f"{label}, cut into {num_replicas} parts", 74, parts)


def shares(title: str, parts: Mapping[str, float]) -> Html:
    """Draw parts of a whole as bars: label -> a number from 0 to 1."""
    return _bars(title, [(label, f"{share:.0%}", share) for label, share in parts.items()])


def bars(title: str, rows: Sequence[tuple[str, int, int | None]]) -> Html:
    """Draw bytes as bars, relative to the bytes of the whole where they are known, else to the largest."""
    largest = max([size for _, size, _ in rows], default=0) or 1
    drawn = []
    for label, size, whole in rows:
        numbers = bytes_in_words(size) + (f" of {bytes_in_words(whole)}" if whole else "")
        drawn.append((label, numbers, size / (whole or largest)))
    return _bars(title, drawn)


def _bars(title: str, rows: Sequence[tuple[str, str, float]]) -> Html:
    """Draw a bar for each label, its numbers in words, and its part of the whole."""
    drawn = []
    for position, (label, numbers, share) in enumerate(rows):
        y = position * 40
        drawn += [_text(2, y + 14, label), element("text", numbers, x=WIDTH - 2, y=y + 14, class_="quiet", text_anchor="end")]
        drawn += [_box(1, y + 20, WIDTH - 2, 9, "rest"), _box(1, y + 20, (WIDTH - 2) * min(share, 1), 9, "part")]
    return _picture(title, 40 * len(rows), drawn)
