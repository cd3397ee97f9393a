"""Parses batches of `tf.train.Example` into arrays, and makes Examples, without TensorFlow (docs/design/tfrecord.md)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._replicas.arrays import is_numeric, refuse_mask
from .feature import Feature, FixedLenFeature, VarLenFeature, cut, read
from .record_reader import needs
from .value_places import ValuePlaces, find_layout

#: For fewer records of one length, finding the places of their values costs more than parsing them.
MIN_RECORDS = 8
#: Limits of the kept layouts, 96 MiB together: record lengths; layouts tried for each length, as features may change their order
#: and records of one length may differ in more than their values; bytes of a record.
MAX_LENGTHS, MAX_LAYOUTS, MAX_RECORD_BYTES = 16, 6, 1 << 20
#: How many protobuf messages are held at a time; each is a copy of its record.
MESSAGES = 64


def parse_example(records: bytes | Sequence[bytes], spec: Mapping[str, Feature]) -> dict[str, Any]:
    """Parse a serialized `tf.train.Example`, or a whole batch of them, into numpy arrays.

    A whole batch is parsed many times faster than its records one by one, with the same results.

    Args:
        records: one record, or a list of records, as `mr.data.tfrecord_dataset(files).batch(n)` yields.
        spec: for the name of each feature to read, an `mr.data.FixedLenFeature` or `mr.data.VarLenFeature`; others are ignored.

    Returns:
        for each name, an array with the feature's shape; for a list of records it has a leading axis. A
        `VarLenFeature` gives an array with one axis for one record, and a list of such arrays for a list.

    Raises:
        ValueError: a record is not an Example, lacks a feature without a default, or has another kind or number of
            values. The message names the record's place in the batch and the feature.

    >>> examples = [mr.data.make_example({"image": np.full((2, 2), i, np.uint8).tobytes(), "label": i}) for i in range(3)]
    >>> spec = {"image": mr.data.FixedLenFeature((2, 2), np.uint8), "label": mr.data.FixedLenFeature((), np.int64)}
    >>> batch = mr.data.parse_example(examples, spec)
    >>> batch["image"].shape, batch["label"]
    ((3, 2, 2), array([0, 1, 2]))

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/io/parse_example
    """
    _check_spec(spec)
    if isinstance(records, bytes):
        parsed = _Batch([records], spec, "the record").parse()
        return {name: values[0, ...] if isinstance(values, np.ndarray) else values[0] for name, values in parsed.items()}
    return _Batch(_checked_records(records), spec, "record {} of the batch").parse()


def _check_spec(spec: object) -> None:
    if not isinstance(spec, Mapping):
        raise TypeError(
            f"spec is {type(spec).__name__}; expected a dict such as {{'label': mr.data.FixedLenFeature((), np.int64)}}."
        )
    for name, feature in spec.items():
        if not isinstance(name, str) or not isinstance(feature, FixedLenFeature | VarLenFeature):
            raise TypeError(
                f"spec has {name!r}: {feature!r}; expected a name: mr.data.FixedLenFeature((), np.int64), for example."
            )


def _checked_records(records: object) -> Sequence[bytes]:
    if not isinstance(records, list | tuple):
        raise TypeError(
            f"records is {type(records).__name__}; expected bytes or a list of bytes, which mr.data.tfrecord_dataset(files)."
            "batch(n) yields. After other steps of grain, such as a shuffle, write .batch(n, batch_fn=list)."
        )
    if not set(map(type, records)) <= {bytes}:
        row, wrong = next((row, record) for row, record in enumerate(records) if type(record) is not bytes)
        raise TypeError(f"record {row} of the batch is {wrong!r:.80} of type {type(wrong).__name__}; expected bytes.")
    return records


class _Batch:
    """Records to parse together, each into its own row of the results."""

    def __init__(self, records: Sequence[bytes], spec: Mapping[str, Feature], title: str) -> None:
        """Allocate the results; `title.format(row)` names a record in errors."""
        self._records, self._wanted, self._title = records, spec, title
        self._results = {name: _allocate(feature, len(records)) for name, feature in spec.items()}

    def parse(self) -> dict[str, Any]:
        left = np.sort(np.concatenate([self._parse_alike(rows) for rows in self._rows_by_length()]))
        for start in range(0, len(left), MESSAGES):
            self._parse_others(left[start : start + MESSAGES])
        return {
            name: values.reshape(len(values), *feature.shape) if isinstance(feature, FixedLenFeature) else values
            for (name, feature), values in zip(self._wanted.items(), self._results.values(), strict=True)
        }

    def _rows_by_length(self) -> list[np.ndarray]:
        lengths = np.fromiter(map(len, self._records), np.int64, len(self._records))
        if (lengths == lengths[:1]).all():  # a shortcut: half the time
            return [np.arange(len(lengths))]
        order = np.argsort(lengths, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1)

    def _records_of(self, rows: np.ndarray) -> Sequence[bytes]:
        return self._records if len(rows) == len(self._records) else [self._records[row] for row in rows]

    def _parse_others(self, rows: np.ndarray) -> None:
        """Let protobuf parse the records in these rows, and store their features."""
        messages = []
        for row in rows:
            features = _features_of(self._records[row])
            if features is None:
                which, size = self._title.format(row), len(self._records[row])
                raise ValueError(f"{which} is no tf.train.Example: protobuf cannot parse its {size} bytes.")
            messages.append(features)
        for name in self._wanted:
            self._assign(name, rows, self._read_all(rows, name, messages))

    def _read_all(self, rows: np.ndarray, name: str, messages: Sequence[Mapping[str, Any]]) -> Any:
        feature = self._wanted[name]
        if isinstance(feature, FixedLenFeature) and feature._size:
            with contextlib.suppress(ValueError):  # the records differ in kind, or one is wrong: read them one by one
                return read(feature, [message[name] for message in messages]).reshape(len(rows), feature._size)
        return [self._read(row, name, message) for row, message in zip(rows, messages, strict=True)]

    def _read(self, row: int, name: str, features: Mapping[str, Any]) -> np.ndarray:
        try:
            return read(self._wanted[name], [features.get(name)])
        except ValueError as problem:
            present = ", ".join(sorted(name for name in features if features[name].WhichOneof("kind"))) or "none"
            raise ValueError(f"{self._title.format(row)}, feature {name!r}: {problem} (Its features: {present}.)") from problem

    def _assign(self, name: str, rows: np.ndarray, values: np.ndarray | Sequence[np.ndarray]) -> None:
        """Store values, one for each row, in these rows of a result."""
        result = self._results[name]
        if isinstance(result, list):
            for row, value in zip(rows, values, strict=True):
                result[row] = value.copy()
        elif len(rows) == len(result):
            result[:] = values
        else:
            result[rows] = values

    def _parse_alike(self, rows: np.ndarray) -> np.ndarray:
        """Parse records of one length that differ only in their values; return the rows of the others."""
        if len(rows) < MIN_RECORDS or not 0 < len(self._records[rows[0]]) <= MAX_RECORD_BYTES:
            return rows
        length = len(self._records[rows[0]])
        matrix = np.frombuffer(b"".join(self._records_of(rows)), np.uint8).reshape(len(rows), length)
        bools = {name for name, feature in self._wanted.items() if feature.dtype == bool}
        known, tried = _layouts_of(length), 0
        while len(rows) >= MIN_RECORDS and tried < MAX_LAYOUTS:
            is_new = tried == len(known)
            record = self._records[rows[0]]
            layout = find_layout(record, _features_of(record)) if is_new else known[tried]
            tried += 1
            matching = np.zeros(len(rows), bool) if layout is None else layout.matches(matrix, bools)
            if is_new and matching.sum() < MIN_RECORDS:
                known.append(None)
                break
            if is_new:
                known.append(layout)
            if layout is not None and matching.any():
                chosen = slice(None) if matching.all() else matching  # a slice copies nothing
                self._cut(layout, matrix[chosen], rows[chosen])
                rows, matrix = rows[~matching], matrix[~matching]
        return rows

    def _cut(self, layout: ValuePlaces, matrix: np.ndarray, rows: np.ndarray) -> None:
        """Store the values of records that match a layout, given as the rows of `matrix`, in their rows of the results."""
        records = self._records_of(rows)
        for name, feature in self._wanted.items():
            values = self._read(rows[0], name, layout.features)
            if spans := layout.spans.get(name):
                values = cut(feature, layout.kinds[name], spans, matrix, records)
            else:  # all these records have the same value
                values = np.broadcast_to(values, (len(rows), *values.shape))
            self._assign(name, rows, values)


def _allocate(feature: Feature, num_records: int) -> Any:
    if isinstance(feature, VarLenFeature):
        return [None] * num_records
    return np.empty((num_records, feature._size), object if feature.dtype is bytes else feature.dtype)


@functools.lru_cache(maxsize=MAX_LENGTHS)
def _layouts_of(length: int) -> list[ValuePlaces | None]:
    """Return the list, to append to, of layouts tried for records of a length; None for one that fitted too few."""
    return []


def _features_of(record: bytes) -> Any:
    """Return a record's features, as protobuf reads them; None if it is no Example."""
    try:
        return example_class().FromString(record).features.feature
    except needs("google.protobuf.message").DecodeError:
        return None


def make_example(features: Mapping[str, Any]) -> bytes:
    """Serialize a `tf.train.Example`.

    Args:
        features: by name: bytes or a list of bytes (`image.tobytes()`, `text.encode()`) for a bytes_list; floats, rounded to
            float32, for a float_list; ints or bools for an int64_list. Arrays are flattened in row-major order.

    >>> record = mr.data.make_example({"label": 3, "weights": np.array([0.5, 0.25])})
    >>> mr.data.parse_example(record, {"weights": mr.data.FixedLenFeature((2,), np.float32)})
    {'weights': array([0.5 , 0.25], dtype=float32)}

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/train/Example
    """
    if not isinstance(features, Mapping):
        raise TypeError(f"features is {type(features).__name__}; expected a dict of values by name.")
    example = example_class()()
    for name, value in features.items():
        if not isinstance(name, str):
            raise TypeError(f"features has the key {name!r}; expected a string.")
        kind, elements = _elements(name, value)
        values = getattr(example.features.feature[name], kind)
        values.SetInParent()  # an empty list has a kind too
        values.value.extend(elements)
    return example.SerializeToString(deterministic=True)


def _elements(name: str, value: Any) -> tuple[str, list[Any]]:
    """Return the kind of list that a value needs, and the elements of the list."""
    refuse_mask(value, lambda: f"feature {name!r} is")
    is_list, holds_objects = isinstance(value, list | tuple), isinstance(value, np.ndarray) and value.dtype == object
    elements = list(value) if is_list else [value]
    if holds_objects:
        elements = value.ravel().tolist()
    if (elements or holds_objects) and all(isinstance(element, bytes) for element in elements):
        return "bytes_list", elements
    array = np.asarray(value)
    if array.dtype.kind in "biu" and array.size and int(array.max()) >= 2**63:
        raise ValueError(f"feature {name!r} has the value {array.max()}; expected at most 2**63 - 1, the largest int64.")
    if array.dtype.kind in "biu":
        return "int64_list", array.astype(np.int64).ravel().tolist()
    if not is_numeric(array.dtype) or array.dtype.kind == "c" or (is_list and not array.size):
        raise TypeError(
            f"feature {name!r} is {value!r:.80} of type {type(value).__name__}; expected bytes, ints or floats, a list of them, "
            "or an array: text.encode() for a string, np.zeros(0, np.float32) for an empty list of floats."
        )
    with np.errstate(over="ignore"):
        floats = array.astype(np.float32)
    if np.any(np.isinf(floats) & np.isfinite(array)):
        raise ValueError(f"feature {name!r} has values that float32 cannot hold, and a float_list holds float32.")
    return "float_list", floats.ravel().tolist()


#: The messages of tensorflow/core/example/example.proto and feature.proto, as a protobuf file descriptor.
_DESCRIPTION = """
name: "mirrored_example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tensorflow.Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".tensorflow.Features.FeatureEntry" }
  nested_type {
    name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.Feature" }
  }
}
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.Features" } }
"""


@functools.cache
def example_class() -> Any:
    """Return protobuf's class for Example, from our own pool, because TensorFlow's Example is in the default pool."""
    needs("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_DESCRIPTION, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))
