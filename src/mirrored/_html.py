"""Writes HTML, for notebooks and the report page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

import numpy as np


class Html(str):
    """A text that is already HTML; every other text gets escaped."""

    __slots__ = ()


def element(tag: str, content: object = "", **attributes: object) -> Html:
    """Write one element; in attribute names, `class_` stands for `class`, and `_` for `-`.

    >>> element("p", "a < b", class_="quiet")
    '<p class="quiet">a &lt; b</p>'
    """
    written = "".join(f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"' for name, value in attributes.items())
    return Html(f"<{tag}{written}>{join([content])}</{tag}>")


def join(parts: Iterable[object]) -> Html:
    """Join parts, and escape each that is not already HTML.

    >>> join(["<b>", Html("<b>")])
    '&lt;b&gt;<b>'
    """
    return Html("".join(part if isinstance(part, Html) else html.escape(str(part)) for part in parts))


def table(headings: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """Write a table with a line of headings."""
    head = element("tr", join(element("th", heading, scope="col") for heading in headings))
    body = join(element("tr", join(element("td", cell) for cell in row)) for row in rows)
    return element("table", join([element("thead", head), element("tbody", body)]))


def outline(text: str) -> Html:
    """Write a text for a notebook: its first line as the title, the others as list items."""
    title, *lines = text.split("\n")
    points = join(element("li", line.strip()) for line in lines)
    return join([element("b", title), *[element("ul", points)] * bool(lines)])


def copies(title: str, arrays: Sequence[tuple[int, np.ndarray]], is_on_read: bool) -> Html:
    """Write a variable's (replica, copy) pairs for a notebook; show equal copies once."""
    are_equal = len({array.tobytes() for _, array in arrays}) == 1
    values = [(number, element("code", np.array2string(array, threshold=20))) for number, array in arrays]
    shown = table(("replica", "value"), values)
    if is_on_read:
        kind = "sync-on-read, one value for each replica"
    elif are_equal:
        kind = f"{len(arrays)} equal copies" if len(arrays) > 1 else "1 copy"
        shown = element("div", values[0][1])
    else:
        kind = "copies that differ"
    return join([element("b", title), f", {kind}", shown])
