"""Draws the report's pictures: boxes that the page's style places and colours."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from .._html import Html, element, join
from .._text import bytes_in_words, counted
from ..data._sharing.rows import split_sizes
from .facts import Replica

#: The most devices that are drawn, and the most parts of a batch.
MAX_DEVICES, MAX_PARTS = 32, 32
#: The smallest shares of a batch whose box has room for the number of rows, and for the replica's number.
_ROWS_FIT, _NUMBER_FITS = 0.11, 0.04


def _box(kind: str, *parts: object, **attributes: str) -> Html:
    return element("div", join(parts), class_=kind, **attributes)


def topology(replicas: Sequence[Replica]) -> Html:
    """Draw the workers, their devices, and the all-reduce over all replicas."""
    drawn, parts = replicas[:MAX_DEVICES], []
    for worker, group in itertools.groupby(drawn, key=lambda replica: replica.worker):
        devices = [_box("card", element("b", f"replica {r.number}"), element("span", r.device)) for r in group]
        parts.append(_box("worker", f"worker {worker}", _box("cards", *devices)))
    if len(replicas) > len(drawn):
        parts.append(_box("quiet", f"and {len(replicas) - len(drawn)} more replicas"))
    if len(replicas) > 1:
        parts.append(_box("bus", f'all-reduce over the axis "replica", of {len(replicas)}'))
    return _box("picture", *parts)


def split(num_rows: int | None, num_replicas: int) -> Html:
    """Draw how the rows of a global batch are cut into one part for each replica."""
    if num_replicas > MAX_PARTS:
        return Html("")
    sizes, label, key = [1] * num_replicas, "a global batch", "replica"
    if num_rows is not None:
        sizes = split_sizes(num_rows, num_replicas)
        label, key = f"a global batch of {counted(num_rows, 'row')}", "replica: its rows"
    parts = []
    for number, size in enumerate(sizes):
        share = size / max(sum(sizes), 1)
        text = f"{number}" if num_rows is None or share < _ROWS_FIT else f"{number}: {size}"
        parts.append(_box("part", text if share >= _NUMBER_FITS else "", style=f"flex: {size}"))
    return _box("picture quiet", label, _box("split", *parts), key)


def shares(parts: Mapping[str, float]) -> Html:
    """Draw parts of a whole as bars: label -> a number from 0 to 1."""
    return _bars([(label, f"{share:.0%}", share) for label, share in parts.items()])


def bars(rows: Sequence[tuple[str, int, int | None]]) -> Html:
    """Draw bytes as bars: as parts of the whole where that is known, else relative to the largest."""
    largest = max([size for _, size, _ in rows], default=0) or 1
    drawn = []
    for label, size, whole in rows:
        numbers = bytes_in_words(size) + (f" of {bytes_in_words(whole)}" if whole else "")
        drawn.append((label, numbers, size / (whole or largest)))
    return _bars(drawn)


def _bars(rows: Sequence[tuple[str, str, float]]) -> Html:
    """Draw a bar for each row: its label, its numbers in words, and its part of the whole."""
    drawn = []
    for label, numbers, share in rows:
        drawn.append(_box("label", element("span", label), element("span", numbers, class_="quiet")))
        drawn.append(_box("rest", _box("part", style=f"width: {min(share, 1):.1%}")))
    return _box("picture", *drawn)
