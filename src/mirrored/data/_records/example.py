"""`tf.train.Example`: parsed into arrays, a batch at a time, and made, without TensorFlow (docs/design/tfrecord.md)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..._replicas.arrays import is_numeric
from .feature import Feature, FixedLenFeature, VarLenFeature, cut, read, read_all
from .record_reader import needs
from .value_places import ValuePlaces, find_layout

#: With fewer records of one length it costs more to find where their values lie than to parse them.
MIN_RECORDS = 8
#: Lengths that are remembered, layouts for each (the order of the features may differ), bytes of a record. They bound
#: what is remembered to 64 MiB.
MAX_LENGTHS = 16
MAX_LAYOUTS = 4
MAX_RECORD_BYTES = 1 << 20
#: Messages of protobuf that are held at a time; each is a copy of its record.
MESSAGES = 64
#: Layouts that fitted too few records before a length is given up: its records differ in more than their values.
MAX_MISSES = 3


def parse_example(records: bytes | Sequence[bytes], spec: Mapping[str, Feature]) -> dict[str, Any]:
    """Parse a serialized `tf.train.Example`, or a whole batch of them, into numpy arrays.

    Whole batches are many times faster than single records: where records of one length differ only in their values,
    these are cut out of all of them at once. The results are the same.

    Args:
        records: one record; or a list of them, as `mr.data.tfrecord_dataset(files).batch(n)` yields.
        spec: what to read: an `mr.data.FixedLenFeature` or an `mr.data.VarLenFeature` for each name. Other features of
            the records are ignored.

    Returns:
        an array for each name: of the feature's shape for one record, with a leading axis for a list. For a
        `VarLenFeature`, an array of one axis for one record, a list of such arrays for a list.

    Raises:
        ValueError: a record is not an Example, lacks a feature that has no default, or has it with another kind or
            number of values; with the record's place in the batch and the feature's name.

    >>> examples = [mr.data.make_example({"image": np.full((2, 2), i, np.uint8).tobytes(), "label": i}) for i in range(3)]
    >>> spec = {"image": mr.data.FixedLenFeature((2, 2), np.uint8), "label": mr.data.FixedLenFeature((), np.int64)}
    >>> batch = mr.data.parse_example(examples, spec)
    >>> batch["image"].shape, batch["label"]
    ((3, 2, 2), array([0, 1, 2]))

    Source: https://www.tensorflow.org/api_docs/python/tf/io/parse_example
    """
    _check_spec(spec)
    is_batch = not isinstance(records, bytes)
    batch = _checked_batch(records)
    results = {name: _allocate(feature, len(batch)) for name, feature in spec.items()}
    for rows in _rows_by_length(batch):
        left = _parse_alike(batch, rows, spec, results)
        for start in range(0, len(left), MESSAGES):
            _parse_others(batch, left[start : start + MESSAGES], spec, results, is_batch)
    shaped = {name: _shaped(spec[name], values) for name, values in results.items()}
    return shaped if is_batch else {name: _only(values) for name, values in shaped.items()}


def _check_spec(spec: Any) -> None:
    if not isinstance(spec, Mapping):
        raise TypeError(
            f"spec is {type(spec).__name__}; expected a dict such as {{'label': mr.data.FixedLenFeature((), np.int64)}}."
        )
    for name, feature in spec.items():
        if not isinstance(name, str) or not isinstance(feature, FixedLenFeature | VarLenFeature):
            raise TypeError(
                f"spec has {name!r}: {feature!r}; expected a name: mr.data.FixedLenFeature((), np.int64), for example."
            )


def _checked_batch(records: Any) -> Sequence[bytes]:
    if isinstance(records, bytes):
        return [records]
    if not isinstance(records, list | tuple):
        raise TypeError(
            f"records is {type(records).__name__}; expected bytes or a list of bytes, which mr.data.tfrecord_dataset(files)."
            "batch(n) yields. After other steps of grain, such as a shuffle, write .batch(n, batch_fn=list)."
        )
    if not set(map(type, records)) <= {bytes}:
        row, wrong = next((row, record) for row, record in enumerate(records) if type(record) is not bytes)
        raise TypeError(f"record {row} of the batch is {wrong!r:.80} of type {type(wrong).__name__}; expected bytes.")
    return records


def _allocate(feature: Feature, num_records: int) -> Any:
    if isinstance(feature, VarLenFeature):
        return [None] * num_records
    return np.empty((num_records, feature._size), object if feature.dtype is bytes else feature.dtype)


def _shaped(feature: Feature, values: Any) -> Any:
    return values if isinstance(feature, VarLenFeature) else values.reshape(len(values), *feature.shape)


def _only(values: Any) -> Any:
    """Return the value of the only record, as an array also if it is a scalar."""
    return values[0, ...] if isinstance(values, np.ndarray) else values[0]


def _rows_by_length(batch: Sequence[bytes]) -> Iterator[np.ndarray]:
    lengths = np.fromiter(map(len, batch), np.int64, len(batch))
    if (lengths == lengths[:1]).all():
        if batch:
            yield np.arange(len(batch))
    else:
        order = np.argsort(lengths, kind="stable")
        yield from np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1)


def _parse_others(
    batch: Sequence[bytes], rows: np.ndarray, spec: Mapping[str, Feature], results: dict[str, Any], is_batch: bool
) -> None:
    """Let protobuf parse records, and put their features into their rows."""
    names = [f"record {row} of the batch" if is_batch else "the record" for row in rows]
    parse, messages = example_class().FromString, []
    for row, which in zip(rows, names, strict=True):
        try:
            messages.append(parse(batch[row]).features.feature)
        except _decode_error() as error:
            raise ValueError(f"{which} is no tf.train.Example: protobuf cannot parse its {len(batch[row])} bytes.") from error
    for name, feature in spec.items():
        values = read_all(feature, [message[name] for message in messages])
        if values is None:
            values = [_read(which, name, feature, message) for which, message in zip(names, messages, strict=True)]
        _assign(results[name], rows, values)


def _read(which: str, name: str, feature: Feature, features: Any) -> np.ndarray:
    try:
        return read(feature, features.get(name))
    except ValueError as problem:
        present = ", ".join(sorted(other for other in features if features[other].WhichOneof("kind"))) or "none"
        raise ValueError(f"{which}, feature {name!r}: {problem} (Its features: {present}.)") from problem


def _assign(result: Any, rows: np.ndarray, values: Any) -> None:
    """Put values, one for each row, into these rows of a result."""
    if isinstance(result, np.ndarray) and len(rows) == len(result):
        result[:] = values
    elif isinstance(result, np.ndarray):
        result[rows] = values
    else:
        for row, value in zip(rows, values, strict=True):
            result[row] = value.copy()


def _parse_alike(batch: Sequence[bytes], rows: np.ndarray, spec: Mapping[str, Feature], results: dict[str, Any]) -> np.ndarray:
    """Parse those records of one length that differ only in their values; return the rows that are left."""
    length = len(batch[rows[0]])
    if len(rows) < MIN_RECORDS or not 0 < length <= MAX_RECORD_BYTES:
        return rows
    joined = b"".join(batch if len(rows) == len(batch) else [batch[row] for row in rows])
    matrix = np.frombuffer(joined, np.uint8).reshape(len(rows), length)
    known, tried = _known_of(length), 0
    while len(rows) >= MIN_RECORDS:
        is_new = tried == len(known.layouts)
        layout = known.find_more(batch[rows[0]]) if is_new else known.layouts[tried]
        if layout is None:
            break
        matching = layout.matches(matrix) & _are_bools(layout, matrix, spec)
        if is_new and matching.sum() < MIN_RECORDS:
            known.misses += 1
            break
        if is_new:
            known.layouts.append(layout)
        tried += 1
        if matching.all():
            _put(layout, matrix, batch, rows, spec, results)
            return rows[:0]
        if matching.any():
            _put(layout, matrix[matching], batch, rows[matching], spec, results)
            rows, matrix = rows[~matching], matrix[~matching]
    return rows


def _are_bools(layout: ValuePlaces, matrix: np.ndarray, spec: Mapping[str, Feature]) -> np.ndarray:
    """Tell for each record whether what is wanted as bool is 0 or 1; if not, the error is left to the other path."""
    fits = np.ones(len(matrix), bool)
    for name, feature in spec.items():
        if feature.dtype == bool and name in layout.spans and layout.kind(name) == "int64_list":
            start, stop = layout.spans[name][0]
            fits &= (matrix[:, start:stop] <= 1).all(axis=1)
    return fits


def _put(
    layout: ValuePlaces,
    matrix: np.ndarray,
    batch: Sequence[bytes],
    rows: np.ndarray,
    spec: Mapping[str, Feature],
    results: dict[str, Any],
) -> None:
    """Put the values of the records that match a layout, which are the rows of the matrix, into their rows."""
    records = batch if len(rows) == len(batch) else [batch[row] for row in rows]
    for name, feature in spec.items():
        constant = _read(f"record {rows[0]} of the batch", name, feature, layout.features)
        spans = layout.spans.get(name)
        values = (
            cut(feature, layout.kind(name), spans, matrix, records)
            if spans
            else np.broadcast_to(constant, (len(rows), *constant.shape))
        )
        _assign(results[name], rows, values)


@dataclasses.dataclass
class _Length:
    """What is known of the records of one length: layouts, and how many more were of no use."""

    layouts: list[ValuePlaces] = dataclasses.field(default_factory=list)
    misses: int = 0

    def find_more(self, record: bytes) -> ValuePlaces | None:
        """Find the layout of a record that matches none, unless that has been of no use, or it is no Example."""
        if len(self.layouts) >= MAX_LAYOUTS or self.misses >= MAX_MISSES:
            return None
        try:
            return find_layout(record, example_class())
        except _decode_error():
            return None


@functools.lru_cache(maxsize=MAX_LENGTHS)
def _known_of(length: int) -> _Length:
    """Return what is known of the records of a length, to be read and added to."""
    return _Length()


def _decode_error() -> type[Exception]:
    return needs("google.protobuf.message").DecodeError


def make_example(features: Mapping[str, Any]) -> bytes:
    """Serialize a `tf.train.Example`.

    Args:
        features: by name: bytes or a list of bytes for a bytes_list (an image is `image.tobytes()`, a string
            `text.encode()`); floats for a float_list, rounded to float32; ints or bools for an int64_list. Arrays are
            flattened in row-major order.

    >>> record = mr.data.make_example({"label": 3, "weights": np.array([0.5, 0.25])})
    >>> mr.data.parse_example(record, {"weights": mr.data.FixedLenFeature((2,), np.float32)})
    {'weights': array([0.5 , 0.25], dtype=float32)}

    Source: https://www.tensorflow.org/api_docs/python/tf/train/Example
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
    """Return the kind of list and its elements."""
    are_objects = isinstance(value, np.ndarray) and value.dtype == object
    elements = value.ravel().tolist() if are_objects else value if isinstance(value, list | tuple) else [value]
    if (elements or are_objects) and all(isinstance(element, bytes) for element in elements):
        return "bytes_list", list(elements)
    array = np.asarray(value)
    if array.dtype.kind in "biu" and array.size and int(array.max()) >= 2**63:
        raise ValueError(f"feature {name!r} has the value {array.max()}; expected at most 2**63 - 1, the largest int64.")
    if array.dtype.kind in "biu":
        return "int64_list", array.astype(np.int64).ravel().tolist()
    if not is_numeric(array.dtype) or array.dtype.kind == "c" or (isinstance(value, list | tuple) and not array.size):
        raise TypeError(
            f"feature {name!r} is {value!r:.80} of type {type(value).__name__}; expected bytes, ints or floats, a list of them, "
            "or an array: text.encode() for a string, np.zeros(0, np.float32) for an empty list of floats."
        )
    with np.errstate(over="ignore"):
        floats = array.astype(np.float32)
    if np.any(np.isinf(floats) & np.isfinite(array)):
        raise ValueError(f"feature {name!r} has values that float32 cannot hold, and a float_list holds float32.")
    return "float_list", floats.ravel().tolist()


@functools.cache
def example_class() -> Any:
    """Return protobuf's class for Example: from a pool of our own, for TensorFlow has its own in the default pool."""
    needs("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="mirrored_example.proto", package="tensorflow", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto

    def add(fields: Any, name: str, number: int, kind: int, message: str | None = None, **more: Any) -> None:
        type_name = f".tensorflow.{message}" if message else None
        fields.add(name=name, number=number, type=kind, type_name=type_name, **{"label": field.LABEL_OPTIONAL, **more})

    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    lists = (("Bytes", field.TYPE_BYTES), ("Float", field.TYPE_FLOAT), ("Int64", field.TYPE_INT64))
    for number, (name, kind) in enumerate(lists, 1):
        add(file.message_type.add(name=f"{name}List").field, "value", 1, kind, label=field.LABEL_REPEATED)
        add(feature.field, f"{name.lower()}_list", number, field.TYPE_MESSAGE, f"{name}List", oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry.field, "key", 1, field.TYPE_STRING)
    add(entry.field, "value", 2, field.TYPE_MESSAGE, "Feature")
    add(features.field, "feature", 1, field.TYPE_MESSAGE, "Features.FeatureEntry", label=field.LABEL_REPEATED)
    add(file.message_type.add(name="Example").field, "features", 1, field.TYPE_MESSAGE, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))
