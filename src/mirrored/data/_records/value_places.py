"""Where the values lie in a serialized Example: found by changing bytes and asking protobuf what became of them.

Records of one length that differ only there need not be parsed one by one. The argument that this is sound, whatever
the bytes: docs/design/tfrecord.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .record_reader import needs

#: Places tried for one value; a value that is found in more places is taken to be constant.
MAX_PLACES = 64
#: Markers tried for one place.
MAX_MARKERS = 256
#: Found values are overwritten with this byte, so that they are not mistaken for others: no varint of one byte, and
#: four of them are an ordinary float.
FILLER = b"\xbf"

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ValuePlaces:
    """The bytes of a record that are values which may differ. All others are its structure, or constant.

    Attributes:
        features: what protobuf reads from the record that the layout was made from, by name; no name outside is to be
            looked up, which would add it.
        spans: where the values lie, by the name of their feature; a float_list or int64_list has one span, a
            bytes_list one for each element. A feature without spans is the same in all records that match.
        size: bytes of a record.
        fixed: the spans between, whose bytes all matching records share, and these bytes.
        varints: the spans of int64 values: one byte below 128 each.
    """

    features: Any
    spans: dict[str, list[Span]]
    size: int
    fixed: list[tuple[Span, np.ndarray]]
    varints: list[Span]

    def kind(self, name: str) -> str:
        """Return which list of a feature holds its values."""
        return self.features[name].WhichOneof("kind")

    def matches(self, records: np.ndarray) -> np.ndarray:
        """Tell for each row of uint8[num_records, size] whether the layout holds for it: bool[num_records]."""
        matching = np.ones(len(records), bool)
        for (start, stop), expected in self.fixed:
            matching &= (records[:, start:stop] == expected).all(axis=1)
        for start, stop in self.varints:
            matching &= (records[:, start:stop] < 0x80).all(axis=1)
        return matching


@dataclasses.dataclass(frozen=True)
class _FoundValue:
    """A value to be found: the elements of a feature that lie together.

    Attributes:
        name: of its feature.
        elements: protobuf's list, which holds the value and is changed with the bytes.
        index: of the only element that is meant, or None for all.
        encoded: the value's bytes.
        word: the number of bytes of an element.
    """

    name: str
    elements: Any
    index: int | None
    encoded: bytes
    word: int
    is_varint: bool = False
    is_float: bool = False

    def set(self, data: bytes) -> None:
        """Give the message the value that these bytes stand for."""
        if self.index is not None:
            self.elements[self.index] = data
        else:
            self.elements[:] = list(data) if self.is_varint else np.frombuffer(data, "<f4").tolist()


def find_layout(record: bytes, example_class: Any) -> ValuePlaces:
    """Find where the values of a record lie; raise protobuf's DecodeError if it cannot be parsed."""
    message = example_class.FromString(record)
    values = list(_values(message))
    data = bytearray(record)
    found: dict[str, list[Span]] = {}
    for value in sorted(values, key=lambda value: -len(value.encoded)):
        start = _locate(value, data, message)
        if start is not None:
            found.setdefault(value.name, []).append((start, start + len(value.encoded)))
    wanted = {name: sum(value.name == name for value in values) for name in found}
    spans = {name: sorted(places) for name, places in found.items() if len(places) == wanted[name]}
    varints = [spans[value.name][0] for value in values if value.is_varint and value.name in spans]
    fixed = list(_between([span for places in spans.values() for span in places], np.frombuffer(record, np.uint8)))
    return ValuePlaces(example_class.FromString(record).features.feature, spans, len(record), fixed, varints)


def _values(message: Any) -> Iterator[_FoundValue]:
    """List the values that can be found by their bytes."""
    for name, feature in message.features.feature.items():
        kind = feature.WhichOneof("kind")
        elements = getattr(feature, kind).value if kind else ()
        if kind == "bytes_list" and all(elements):
            yield from (_FoundValue(name, elements, index, element, len(element)) for index, element in enumerate(elements))
        elif kind == "float_list" and elements:
            yield _FoundValue(name, elements, None, np.array(elements, "<f4").tobytes(), 4, is_float=True)
        elif kind == "int64_list" and elements and all(0 <= element < 0x80 for element in elements):
            yield _FoundValue(name, elements, None, bytes(elements), 1, is_varint=True)


def _locate(value: _FoundValue, data: bytearray, message: Any) -> int | None:
    """Find the bytes that protobuf reads as this value, and overwrite both with filler; None if they cannot be told."""
    size = len(value.encoded)
    for start in _places(data, value.encoded, MAX_PLACES):
        changed = bytearray(data)
        for marker in _markers(value):
            changed[start : start + size] = marker * (size // value.word)
            if _is_unmistakable(value, marker, changed, start):
                break
        else:
            continue
        value.set(bytes(changed[start : start + size]))
        if _reads_as(changed, message):
            data[start : start + size] = changed[start : start + size] if value.is_varint else FILLER * size
            value.set(bytes(data[start : start + size]))
            return start
    value.set(value.encoded)
    return None


def _is_unmistakable(value: _FoundValue, marker: bytes, changed: bytearray, start: int) -> bool:
    """Tell whether only the changed bytes can be read as the marker, so that whoever reads the marker reads them."""
    count = len(value.encoded) // value.word
    expected = [start + index * value.word for index in range(count)]
    is_overlong_possible = value.is_varint and changed.find(marker[0] | 0x80) >= 0  # a longer varint of the same number
    return not is_overlong_possible and list(_places(changed, marker, count + 1)) == expected


def _reads_as(data: bytearray, message: Any) -> bool:
    """Tell whether protobuf reads exactly this message, NaNs included."""
    try:
        read = type(message).FromString(bytes(data))
    except needs("google.protobuf.message").DecodeError:  # the bytes were structure, and what is left is no Example
        return False
    return read.SerializeToString(deterministic=True) == message.SerializeToString(deterministic=True)


def _markers(value: _FoundValue) -> Iterator[bytes]:
    """Propose words to mark a place with."""
    if value.word == 1:
        yield from (bytes([byte]) for byte in range(0x80 if value.is_varint else 0x100))
        return
    generator = np.random.default_rng(0)
    for _ in range(MAX_MARKERS):
        marker = generator.bytes(value.word)
        if not value.is_float or np.isfinite(np.frombuffer(marker, "<f4")[0]):
            yield marker


def _places(data: bytearray, part: bytes, limit: int) -> Iterator[int]:
    """List the first places where a part occurs, overlapping ones too."""
    start = data.find(part)
    while start >= 0 and limit:
        yield start
        start, limit = data.find(part, start + 1), limit - 1


def _between(spans: Sequence[Span], record: np.ndarray) -> Iterator[tuple[Span, np.ndarray]]:
    """Yield what lies outside of the spans."""
    start = 0
    for span in [*sorted(spans), (len(record), len(record))]:
        if span[0] > start:
            yield (start, span[0]), record[start : span[0]]
        start = span[1]
