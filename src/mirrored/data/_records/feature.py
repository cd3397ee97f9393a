"""The features to read from an Example, and their values as numpy arrays (docs/design/tfrecord.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._replicas.arrays import is_numeric
from .value_places import Span


@dataclasses.dataclass(frozen=True)
class FixedLenFeature:
    """A feature with `prod(shape)` values in each record: an entry of the spec of `mr.data.parse_example`.

    Attributes:
        shape: the feature's shape in one record; the values are in row-major order.
        dtype: `bytes` for the elements of a bytes_list, in an array of objects; np.float32 for a float_list; an integer dtype or
            bool, which must hold the values, for an int64_list. A numeric dtype decodes a bytes_list of one element, the bytes
            of an array of this shape and dtype, as of `array.tobytes()` (`tf.io.decode_raw`).
        default_value: a number or an array of `shape`, for records without the feature. Without it they are an error.

    >>> mr.data.FixedLenFeature((28, 28, 1), np.uint8).shape
    (28, 28, 1)

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/io/FixedLenFeature
    """

    shape: tuple[int, ...]
    dtype: Any
    default_value: Any = None

    def __post_init__(self) -> None:
        is_size = lambda size: isinstance(size, int | np.integer) and not isinstance(size, bool) and bool(size >= 0)  # noqa: E731
        if not isinstance(self.shape, list | tuple) or not all(map(is_size, self.shape)):
            raise TypeError(f"shape is {self.shape!r}; expected a tuple of ints, 0 or more; () for one value.")
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        object.__setattr__(self, "dtype", _checked_dtype(self.dtype, is_decoded=True))
        if self.default_value is not None:
            _ = self._default

    @functools.cached_property
    def _size(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def _default(self) -> np.ndarray:
        dtype, values = self.dtype, np.array(self.default_value, object if self.dtype is bytes else None)
        try:
            flat = np.broadcast_to(values, self.shape).ravel()
        except ValueError as error:
            raise ValueError(f"default_value is {self.default_value!r}; expected a value of shape {self.shape}.") from error
        if dtype is bytes:
            fits = all(type(value) is bytes for value in flat)
        elif dtype.kind in "biu":
            fits = values.dtype.kind in "biu" and bool((flat == flat.astype(dtype)).all())
        else:
            fits = values.dtype.kind in "biuf"
        if not fits:
            raise TypeError(f"default_value is {self.default_value!r}; expected {_show(dtype)}, the feature's dtype.")
        return flat if dtype is bytes else flat.astype(dtype)


@dataclasses.dataclass(frozen=True)
class VarLenFeature:
    """A feature with any number of values in each record, none if it is missing. Each record gives its own array.

    Attributes:
        dtype: `bytes`, np.float32, an integer dtype or bool, as in `mr.data.FixedLenFeature`, but nothing is decoded.

    >>> example = mr.data.make_example({"words": [b"to", b"be"]})
    >>> mr.data.parse_example([example], {"words": mr.data.VarLenFeature(bytes)})
    {'words': [array([b'to', b'be'], dtype=object)]}

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/io/RaggedFeature
    """

    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _checked_dtype(self.dtype, is_decoded=False))


Feature = FixedLenFeature | VarLenFeature


def read(feature: Feature, column: Sequence[Any]) -> np.ndarray:
    """Return a feature of similar records as one flat array. `column` has protobuf's values, None if records lack the feature."""
    kind = column[0].WhichOneof("kind") if column[0] is not None else None
    if kind is None:
        return _default_of(feature)
    dtype, lists = feature.dtype, [getattr(values, kind).value for values in column]  # lists of another kind are empty
    if kind == "bytes_list" and dtype is not bytes and isinstance(feature, FixedLenFeature):
        return _decoded(feature, lists)
    if kind != _kind_of(dtype):
        raise ValueError(f"the record has it as {kind}; expected {_kind_of(dtype)}, which holds {_show(dtype)}.")
    if isinstance(feature, FixedLenFeature) and set(map(len, lists)) != {feature._size}:
        raise ValueError(f"the record has {len(lists[0])} values; expected {feature._size}, for the shape {feature.shape}.")
    return _convert(lists[0][:] if len(lists) == 1 else list(itertools.chain(*lists)), dtype)


def _convert(elements: Sequence[Any], dtype: Any) -> np.ndarray:
    """Make an array of a list's elements; raise ValueError if an integer dtype cannot hold one of them."""
    if dtype is bytes:
        return _objects(elements)
    if dtype.kind not in "biu":
        return np.array(elements, dtype)
    values = np.array(elements, np.int64)
    if dtype != np.int64:
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        wrong = values[(values < low) | (values > high)]
        if wrong.size:
            raise ValueError(f"the record has the value {wrong[0]}; expected {low} to {high}, which {_show(dtype)} can hold.")
    return values.astype(dtype, copy=False)


def cut(feature: Feature, kind: str, spans: Sequence[Span], matrix: np.ndarray, records: Sequence[bytes]) -> np.ndarray:
    """Return the values at these spans, a row for each record; `matrix` has the bytes of each record as a row."""
    start, stop = spans[0]
    if feature.dtype is bytes:
        columns = [_objects([record[start:stop] for record in records]) for start, stop in spans]
        return np.stack(columns, axis=1)
    if kind == "int64_list":
        return matrix[:, start:stop].astype(feature.dtype)
    return matrix[:, start:stop].view("<f4" if kind == "float_list" else feature.dtype)


def _default_of(feature: Feature) -> np.ndarray:
    if isinstance(feature, VarLenFeature):
        return np.zeros(0, object if feature.dtype is bytes else feature.dtype)
    if feature.default_value is None:
        raise ValueError(
            f"the record does not have it, and it has no default. Write mr.data.FixedLenFeature({feature.shape}, "
            f"{_show(feature.dtype)}, default_value=...) if records may lack it."
        )
    return feature._default


def _decoded(feature: FixedLenFeature, lists: Sequence[Sequence[bytes]]) -> np.ndarray:
    """Decode the only element of each bytes_list as the bytes of an array."""
    if feature.dtype.kind == "b":
        raise ValueError("the record has it as bytes, which are not decoded to bool; use np.uint8.")
    if set(map(len, lists)) != {1}:
        raise ValueError(f"the record has {len(lists[0])} elements of bytes; expected one, the bytes of an array.")
    arrays = [elements[0] for elements in lists]
    expected = feature._size * feature.dtype.itemsize
    if set(map(len, arrays)) != {expected}:
        raise ValueError(
            f"the record has {len(arrays[0])} bytes; expected {expected}, for an array of shape {feature.shape} and dtype "
            f"{feature.dtype}. (To take the bytes as they are, give the feature the dtype bytes.)"
        )
    return np.frombuffer(b"".join(arrays), feature.dtype)


def _objects(elements: Sequence[bytes]) -> np.ndarray:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def _kind_of(dtype: Any) -> str:
    if dtype is not bytes and dtype.kind in "biu":
        return "int64_list"
    return "float_list" if dtype == np.float32 else "bytes_list"


def _show(dtype: object) -> str:
    return "bytes" if dtype is bytes else f"np.{dtype}"


def _checked_dtype(dtype: Any, is_decoded: bool) -> Any:
    if dtype is bytes:
        return bytes
    with contextlib.suppress(TypeError):
        found = np.dtype(dtype)
        is_of_list = found == np.float32 or found.kind in "biu"
        if dtype is not None and (is_of_list or (is_decoded and is_numeric(found))):
            return found
    also = ", or, for bytes to be decoded, another dtype of numbers" * is_decoded
    raise TypeError(f"dtype is {dtype!r}; expected bytes, np.float32, np.int64 or another integer dtype, bool{also}.")
