"""Where do the values lie in a serialized Example? Records of one length that differ only there need not be parsed one by one.

The argument that this is sound, whatever the bytes: docs/design/tfrecord.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

#: Tags of the first and the second field of a message, whose payloads begin with their length.
FIRST, SECOND = 0x0A, 0x12
#: The tag of each kind of list in a Feature.
LISTS = {"bytes_list": 0x0A, "float_list": 0x12, "int64_list": 0x1A}
#: The last three bits of a tag, which say how long the payload is: a number, or so many bytes.
VARINT, LENGTH = 0, 2
FIXED = {1: 8, 5: 4}

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ValuePlaces:
    """The bytes of a record that are values which may differ. All others are its structure, or constant."""

    features: Mapping[str, Any]  # as protobuf reads them; no name outside is to be looked up, which would add it
    kinds: dict[str, str]  # which list holds the values of each feature
    #: By the name of their feature: one span for all numbers, one for each element of a bytes_list. A feature without any is the
    #: same in all records that match.
    spans: dict[str, list[Span]]
    fixed: list[tuple[Span, np.ndarray]]  # the spans between, whose bytes all matching records share, and these bytes

    def matches(self, records: np.ndarray, bools: Collection[str] = ()) -> np.ndarray:
        """Tell for each row of uint8[num_records, size] whether the layout holds for it, and what is wanted as bool is 0 or 1."""
        matching = np.ones(len(records), bool)
        for (start, stop), expected in self.fixed:
            matching &= (records[:, start:stop] == expected).all(axis=1)
        for name, spans in self.spans.items():
            if self.kinds[name] == "int64_list":  # one byte for each value
                [(start, stop)] = spans
                matching &= (records[:, start:stop] < (2 if name in bools else 0x80)).all(axis=1)
        return matching


class _UnusualError(Exception):
    """A record is written in a way that the format allows and writers do not use: it has no places, and protobuf reads it."""


def find_layout(record: bytes, features: Mapping[str, Any]) -> ValuePlaces:
    """Find where the values of a record lie that protobuf has parsed to these features."""
    kinds = {name: kind for name, feature in features.items() if (kind := feature.WhichOneof("kind"))}
    try:
        spans = _find_spans(record, kinds)
    except _UnusualError:
        spans = {}
    size, array = len(record), np.frombuffer(record, np.uint8)
    values = [(0, 0), *sorted(span for places in spans.values() for span in places), (size, size)]
    between = [(stop, start) for (_, stop), (start, _) in itertools.pairwise(values) if stop < start]
    fixed = [((start, stop), array[start:stop]) for start, stop in between]
    return ValuePlaces(features, kinds, spans, fixed)


def _find_spans(record: bytes, kinds: Mapping[str, str]) -> dict[str, list[Span]]:
    """Walk through a record that protobuf has parsed: an Example holds Features, and these an entry for each name."""
    found: dict[str, list[Span]] = {}
    for example_tag, part in _fields(record, (0, len(record))):
        for tag, entry in _fields(record, part) if example_tag == FIRST else ():
            (_, (start, stop)), (_, feature) = _require(_fields(record, entry), [FIRST, SECOND])
            name = record[start:stop].decode()
            if tag != FIRST or name in found:
                raise _UnusualError
            found[name] = _find_values(record, feature, kinds.get(name))
    return {name: spans for name, spans in found.items() if spans}


def _find_values(record: bytes, feature: Span, kind: str | None) -> list[Span]:
    """Return the spans of the values of a feature; none when there are no values, or they do not always take so many bytes."""
    if kind is None:
        return []
    [(_, values)] = _require(_fields(record, feature), [LISTS[kind]])
    elements = _fields(record, values)
    spans = [span for _, span in _require(elements, [FIRST] * (len(elements) if kind == "bytes_list" else 1))]
    has_fixed_size = all(start < stop for start, stop in spans)
    if kind == "int64_list":
        has_fixed_size = has_fixed_size and max(record[slice(*spans[0])]) < 0x80
    return spans if has_fixed_size else []


def _fields(record: bytes, message: Span) -> list[tuple[int, Span]]:
    """Return the tag and the payload of each field of a message."""
    fields = []
    start, stop = message
    while start < stop:
        tag, start = record[start], start + 1
        if tag >= 0x80 or tag & 7 not in (VARINT, LENGTH, *FIXED):  # a number of several bytes, or a group
            raise _UnusualError
        number, end = _read_varint(record, start) if tag & 7 in (VARINT, LENGTH) else (0, start)
        if tag & 7 == LENGTH:
            start, end = end, end + number
        elif tag & 7 != VARINT:
            end += FIXED[tag & 7]
        fields.append((tag, (start, end)))
        start = end
    return fields


def _require(fields: list[tuple[int, Span]], tags: list[int]) -> list[tuple[int, Span]]:
    if [tag for tag, _ in fields] != tags:
        raise _UnusualError
    return fields


def _read_varint(record: bytes, start: int) -> tuple[int, int]:
    """Return a number of seven bits in each byte, the lowest first, and where it ends."""
    number = shift = 0
    while record[start] >= 0x80:
        number |= (record[start] & 0x7F) << shift
        start, shift = start + 1, shift + 7
    return number | record[start] << shift, start + 1
