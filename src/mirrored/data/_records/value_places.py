"""Finds the places of values in a serialized Example; docs/design/tfrecord.md argues why this is sound for any bytes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

#: Tags of the first and the second field of a message, whose payloads begin with their lengths.
FIRST, SECOND = 0x0A, 0x12
#: The tag of each kind of list in a Feature.
LISTS = {"bytes_list": 0x0A, "float_list": 0x12, "int64_list": 0x1A}
#: The last three bits of a tag whose payload is a length and that many bytes.
LENGTH = 2

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ValuePlaces:
    """The layout of a record: the bytes of values that may differ. All other bytes are structure, or constant."""

    features: Mapping[str, Any]  # as protobuf reads them; looking up a missing name would add it
    kinds: dict[str, str]  # feature -> the kind of list that holds its values
    #: Feature -> one span for all its numbers, or one for each element of a bytes_list; a feature without spans is constant.
    spans: dict[str, list[Span]]
    fixed: list[tuple[Span, np.ndarray]]  # the spans between the values, with the bytes that all matching records share

    def matches(self, records: np.ndarray, bools: Collection[str] = ()) -> np.ndarray:
        """Tell for each record, a row of `matrix`, whether the layout fits and the features `bools` are 0 or 1."""
        matching = np.ones(len(records), bool)
        for (start, stop), expected in self.fixed:
            matching &= (records[:, start:stop] == expected).all(axis=1)
        for name, spans in self.spans.items():
            if self.kinds[name] == "int64_list":  # one byte for each value
                [(start, stop)] = spans
                limit = 2 if name in bools else 0x80
                matching &= (records[:, start:stop] < limit).all(axis=1)
        return matching


class _UnusualError(Exception):
    """A record has a form that the format allows but no writer uses: only protobuf can parse it."""


def find_layout(record: bytes, features: Mapping[str, Any] | None) -> ValuePlaces | None:
    """Find the places of values in a record, parsed by protobuf into `features`; zero the ints there that have a place."""
    if features is None:  # no Example
        return None
    kinds = {name: kind for name, feature in features.items() if (kind := feature.WhichOneof("kind"))}
    try:
        spans = _find_spans(record, kinds)
    except _UnusualError:
        spans = {}
    for name in spans:
        if kinds[name] == "int64_list":  # zeros fit any dtype; this record's ints may not
            values = features[name].int64_list.value
            values[:] = [0] * len(values)
    size, array = len(record), np.frombuffer(record, np.uint8)
    places = [(0, 0), *sorted(itertools.chain(*spans.values())), (size, size)]
    between = [(stop, start) for (_, stop), (start, _) in itertools.pairwise(places) if stop < start]
    return ValuePlaces(features, kinds, spans, [((start, stop), array[start:stop]) for start, stop in between])


def _find_spans(record: bytes, kinds: Mapping[str, str]) -> dict[str, list[Span]]:
    """Return the spans of each feature's values: an Example holds Features, which hold an entry for each name."""
    found: dict[str, list[Span]] = {}
    parts = [payload for tag, payload in _fields(record, (0, len(record))) if tag == FIRST]
    for tag, entry in itertools.chain(*(_fields(record, features) for features in parts)):
        (start, stop), feature = _require(_fields(record, entry), [FIRST, SECOND])
        name = record[start:stop].decode()
        if tag != FIRST or name in found:
            raise _UnusualError
        found[name] = _find_values(record, feature, kinds.get(name))
    return {name: spans for name, spans in found.items() if spans}


def _find_values(record: bytes, feature: Span, kind: str | None) -> list[Span]:
    """Return the spans of a feature's values; none if it has no values, or their sizes may vary."""
    if kind is None:
        return []
    [values] = _require(_fields(record, feature), [LISTS[kind]])
    elements = _fields(record, values)
    num_fields = len(elements) if kind == "bytes_list" else 1
    spans = _require(elements, [FIRST] * num_fields)
    if not all(start < stop for start, stop in spans):
        return []
    if kind == "int64_list" and max(record[slice(*spans[0])]) >= 0x80:
        return []
    return spans


def _fields(record: bytes, message: Span) -> list[tuple[int, Span]]:
    """Return the tag and the payload of each field of a message."""
    fields = []
    start, stop = message
    while start < stop:
        tag = record[start]
        if tag >= 0x80 or tag & 7 != LENGTH:  # a tag of several bytes, or a payload without a length
            raise _UnusualError
        size, start = _read_varint(record, start + 1)
        fields.append((tag, (start, start + size)))
        start += size
    return fields


def _require(fields: list[tuple[int, Span]], tags: list[int]) -> list[Span]:
    """Return the payloads of a message's fields, which must have exactly these tags."""
    if [tag for tag, _ in fields] != tags:
        raise _UnusualError
    return [payload for _, payload in fields]


def _read_varint(record: bytes, start: int) -> tuple[int, int]:
    """Return a number that is stored as seven bits per byte, the lowest first, and the position after it."""
    number = shift = 0
    while record[start] >= 0x80:
        number |= (record[start] & 0x7F) << shift
        start, shift = start + 1, shift + 7
    return number | record[start] << shift, start + 1
