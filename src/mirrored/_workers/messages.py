"""Parses the texts of other workers, and checks them before they are believed. No jax here."""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Callable
from typing import Any, TypeVar

Record = TypeVar("Record")

#: A longer text is no message.
MAX_TEXT = 1_000_000


def parse(text: str) -> Any:
    """Return the JSON value in a text; None if it has none, is too long or nested too deeply."""
    try:
        return json.loads(text) if len(text) <= MAX_TEXT else None
    except (ValueError, RecursionError):
        return None


def read(kind: Callable[..., Record], text: str) -> Record | None:
    """Return the named tuple in a text; None unless the text is a list of its fields, of the right types."""
    return _made(kind, parse(text))


def read_all(kind: Callable[..., Record], text: str) -> list[Record] | None:
    """Return the list of named tuples in a text; None unless the text is such a list."""
    values = parse(text)
    if not isinstance(values, list):
        return None
    records = [_made(kind, value) for value in values]
    return None if None in records else typing.cast(list[Record], records)


def _made(kind: Callable[..., Record], value: object) -> Record | None:
    if isinstance(value, list) and list(map(type, value)) == _types_of(kind):
        return kind(*value)
    return None


@functools.cache
def _types_of(kind: Callable[..., Any]) -> list[type]:
    return [typing.get_origin(hint) or hint for hint in typing.get_type_hints(kind).values()]
