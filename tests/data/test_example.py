"""`tf.train.Example`: whole batches give what protobuf reads from each record, whatever is in them; errors say where."""

import itertools
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirrored.data import FixedLenFeature, VarLenFeature, make_example, parse_example
from mirrored.data._records import example as _example
from mirrored.data._records import value_places
from mirrored.data._records.feature import cut, read

IMAGES = {"image": FixedLenFeature((4, 3), np.uint8), "label": FixedLenFeature((), np.int64)}


def image_record(i: int, **more: Any) -> bytes:
    return make_example({"image": bytes(range(i, i + 12)), "label": i % 10, **more})


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Each test finds its layouts anew."""
    _example._layouts_of.cache_clear()
    yield
    _example._layouts_of.cache_clear()


def test_a_batch_has_a_leading_axis_of_records_and_a_single_record_has_none() -> None:
    for num_records in (0, 1, 5, 100):
        batch = parse_example([image_record(i) for i in range(num_records)], IMAGES)
        assert batch["image"].shape == (num_records, 4, 3) and batch["image"].dtype == np.uint8
        assert batch["image"].reshape(num_records, 12)[:, 0].tolist() == list(range(num_records))
        assert batch["label"].tolist() == [i % 10 for i in range(num_records)] and batch["label"].dtype == np.int64
        assert all(values.flags.writeable and values.flags.c_contiguous for values in batch.values())
    spec = {**IMAGES, "name": FixedLenFeature((), bytes), "words": VarLenFeature(bytes)}
    parsed = parse_example(image_record(3, name=b"n\0", words=[b"a", b""]), spec)
    assert parsed["image"].tolist() == np.arange(3, 15).reshape(4, 3).tolist()
    assert all(isinstance(value, np.ndarray) for value in parsed.values())
    assert (parsed["label"].item(), parsed["name"].item(), parsed["words"].tolist()) == (3, b"n\0", [b"a", b""])


VALUES = [
    (1.5, FixedLenFeature((), np.float32), np.float32(1.5)),
    ([1.0, np.nan, np.inf], FixedLenFeature([3], "float32"), np.array([1, np.nan, np.inf], np.float32)),
    (np.arange(6.0).reshape(2, 3), FixedLenFeature((3, 2), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2)),
    (7, FixedLenFeature((), np.int64), np.int64(7)),
    (-7, FixedLenFeature((), np.int8), np.int8(-7)),
    (2**63 - 1, FixedLenFeature((), np.int64), np.int64(2**63 - 1)),
    ([3, 200], FixedLenFeature((2,), np.uint8), np.array([3, 200], np.uint8)),
    ([True, False], FixedLenFeature((2,), bool), np.array([True, False])),
    (b"\0a\0", FixedLenFeature((), bytes), np.array(b"\0a\0", object)),
    ([b"a", b"", b"ccc"], FixedLenFeature((3, 1), bytes), np.array([[b"a"], [b""], [b"ccc"]], object)),
    (np.arange(6, dtype=">i2").tobytes(), FixedLenFeature((2, 3), ">i2"), np.arange(6, dtype=">i2").reshape(2, 3)),
    (np.ones(2, np.float64).tobytes(), FixedLenFeature((2,), np.float64), np.ones(2)),
    (b"", FixedLenFeature((0, 3), np.uint8), np.zeros((0, 3), np.uint8)),
    ([1.5, 2.5], VarLenFeature(np.float32), np.array([1.5, 2.5], np.float32)),
    ([1, 2, 300], VarLenFeature(np.int16), np.array([1, 2, 300], np.int16)),
    (np.zeros(0, np.int64), VarLenFeature(np.int64), np.zeros(0, np.int64)),
    ([b"a", b"bc"], VarLenFeature(bytes), np.array([b"a", b"bc"], object)),
    (np.zeros(0, object), VarLenFeature(bytes), np.zeros(0, object)),
    ([1, 300], VarLenFeature(">i4"), np.array([1, 300], ">i4")),
]


def test_every_kind_of_value_comes_back() -> None:
    for (value, feature, expected), num_records in itertools.product(VALUES, (1, 20)):
        parsed = parse_example([make_example({"x": value, "y": 1})] * num_records, {"x": feature})
        for found in (*parsed["x"], parse_example(make_example({"x": value}), {"x": feature})["x"]):
            found = np.asarray(found, np.asarray(expected).dtype)
            np.testing.assert_array_equal(found, expected, strict=True)
        assert feature.dtype is bytes or parsed["x"][0].dtype == feature.dtype


def test_missing_features_take_the_default() -> None:
    spec = {
        "label": FixedLenFeature((), np.uint8, default_value=7),
        "weights": FixedLenFeature((2,), np.float32, default_value=[1, 2.5]),
        "name": FixedLenFeature((2,), bytes, default_value=b"none"),
        "words": VarLenFeature(bytes),
    }
    without, with_one = make_example({}), make_example({"label": 1})
    for num_records in (1, 20):
        batch = parse_example([without] * num_records + [with_one], spec)
        assert batch["label"].tolist() == [7] * num_records + [1] and batch["label"].dtype == np.uint8
        assert batch["weights"][0].tolist() == [1, 2.5]
        assert batch["name"][0].tolist() == [b"none", b"none"]
        assert [words.shape for words in batch["words"]] == [(0,)] * (num_records + 1)
        batch["weights"][:] = 0  # the default is not a view that everybody shares
        assert parse_example(without, spec)["weights"].tolist() == [1, 2.5]


def layout_of(record: bytes) -> value_places.ValuePlaces:
    return value_places.find_layout(record, _example.example_class().FromString(record).features.feature)


def varint(number: int, num_bytes: int = 0) -> bytes:
    """Encode a number; with `num_bytes`, in more bytes than it needs."""
    number %= 2**64
    digits = [number & 0x7F]
    while number := number >> 7:
        digits.append(number & 0x7F)
    digits += [0] * (num_bytes - len(digits))
    return bytes([digit | 0x80 for digit in digits[:-1]] + digits[-1:])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def entry(name: bytes, *features: bytes) -> bytes:
    return field(1, field(1, name) + b"".join(field(2, feature) for feature in features))


def example(*entries: bytes) -> bytes:
    return field(1, b"".join(entries))


def bytes_list(*values: bytes) -> bytes:
    return field(1, b"".join(field(1, value) for value in values))


def float_list(*values: float, packed: bool = True) -> bytes:
    words = [struct.pack("<f", value) for value in values]
    return field(2, field(1, b"".join(words)) if packed else b"".join(b"\x0d" + word for word in words))


def int64_list(*values: int, packed: bool = True, num_bytes: int = 0) -> bytes:
    words = [varint(value, num_bytes) for value in values]
    return field(3, field(1, b"".join(words)) if packed else b"".join(b"\x08" + word for word in words))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records protobuf parsed in each call, apart from those that layouts are made of."""
    counts: list[int] = []

    def counting(batch, rows, parse=_example._Batch._parse_others):
        counts.append(len(rows))
        return parse(batch, rows)

    monkeypatch.setattr(_example._Batch, "_parse_others", counting)
    return counts


def test_rows_that_differ_in_more_are_left_to_protobuf(counted: list[int]) -> None:
    records = [image_record(i) for i in range(64)]
    records[5] = image_record(5, more=1)  # longer
    records[9] = make_example({"image": bytes(11), "label": 400})  # as long, with a number of two bytes
    assert len(records[9]) == len(records[0])
    spec = {**IMAGES, "image": VarLenFeature(bytes)}
    batch = parse_example(records, spec)
    assert sum(counted) == 2
    assert batch["label"][9] == 400 and batch["image"][9].tolist() == [bytes(11)]
    assert batch["label"][5] == 5 and all(batch["label"][i] == i % 10 for i in range(10, 64))


def test_what_is_written_is_what_tensorflow_writes() -> None:
    values = {"b": [b"x", b"yz"], "f": [1.5, -2.0], "i": [1, -1, 300]}
    by_hand = example(
        entry(b"b", bytes_list(b"x", b"yz")), entry(b"f", float_list(1.5, -2.0)), entry(b"i", int64_list(1, -1, 300))
    )
    assert make_example(values) == by_hand
    assert by_hand.hex() == FROM_TENSORFLOW


#: `tf.train.Example(...).SerializeToString(deterministic=True)` of the same, by TensorFlow 2.21.
FROM_TENSORFLOW = (
    "0a3b0a0e0a016212090a070a01780a02797a0a110a0166120c120a0a080000c03f000000c00a160a016912111a0f0a0d01ffffffffffffffffff01ac02"
)


#: Records that no writer writes so: all that the wire format allows.
UNUSUAL = [
    example(entry(b"x", int64_list(1, 2)), entry(b"x", int64_list(3))),  # the last of equal names
    example(entry(b"x", int64_list(1, 2), int64_list(3))),  # two messages of one entry are merged
    example(entry(b"x", int64_list(1, 2), float_list(1))),  # the last kind
    example(entry(b"x", int64_list(5, 6, packed=False))),
    example(entry(b"x", int64_list(5, packed=False))),
    example(entry(b"x", float_list(5, 6, packed=False))),
    example(entry(b"x", field(3, field(1, b"\x05") + b"\x08\x06" + field(1, b"\x07")))),
    example(entry(b"x", field(3, field(1, b"\x05") + field(1, b"\x07")))),
    example(entry(b"x", int64_list(5, 6, num_bytes=3))),  # longer than it needs to be
    example(entry(b"x", int64_list(5))) + example(entry(b"x", int64_list(6))),
    example(entry(b"x", bytes_list(b"ab") + bytes_list(b"c"))),
    example(entry(b"x", bytes_list(b"ab") + float_list(1))),
    example(field(1, field(2, int64_list(5)) + field(1, b"x"))),  # the name after the value
    example(entry(b"x", int64_list(5)), field(2, field(1, b"y") + field(2, int64_list(6)))),  # an entry in another field
    b"\x8a\x00" + example(entry(b"x", int64_list(5)))[1:],  # a tag longer than it needs to be
    example(entry(b"x", int64_list(5))) + field(16, b""),  # a tag of two bytes
    *(
        example(entry(b"x", int64_list(5))) + more
        for more in (b"\x13\x14", b"\x18\x80\x01", b"\x19" + bytes(8), b"\x1d" + bytes(4))
    ),
    example(entry(b"x", int64_list())),
    example(entry(b"x")),
]
USUAL = [
    example(entry(b"x", int64_list(5)), entry(b"y", field(9, b"\x05\x05"))),  # an unknown field
    example(entry(b"x", int64_list(5))) + example(entry(b"y", int64_list(5))),
    example(entry(b"x", int64_list(*[1] * 100, 0, 127))),
]


def test_what_no_writer_writes_has_no_places() -> None:
    assert [record for record in UNUSUAL if layout_of(record).spans] == []
    assert [record for record in USUAL if not layout_of(record).spans] == []
    kinds = {
        "bytes": bytes_list(b"ab", b"c"), "empty": bytes_list(b"ab", b""), "floats": float_list(1, 2),
        "small": int64_list(1, 127), "large": int64_list(1, 128), "none": b"", "no floats": float_list(),
        "no ints": field(3, field(1, b"")), "long": bytes_list(bytes(128)),
    }  # fmt: skip
    places = {}
    for name, values in kinds.items():
        places |= layout_of(example(entry(name.encode(), values)) + field(3, b"")).spans
    assert set(places) == {"bytes", "floats", "small", "long"} and [stop - start for start, stop in places["bytes"]] == [2, 1]


NAMES = st.sampled_from([b"a", b"b", b"label", b"x", b"\x01"])
SMALL = st.sampled_from([0, 1, 2, 5, 8, 10, 18, 127])
BYTES = st.binary(max_size=3) | st.sampled_from(
    [b"\x08\x01", b"\x0a\x01\x05", b"\0" * 12, b"\xbf" * 4, b"abcdefgh", bytes(range(40))]
)
FLOATS = st.sampled_from([0.0, -0.0, 1.0, -1.498046875, float("nan"), float("inf"), 1e-40]) | st.floats(width=32)
FEATURES = st.one_of(
    st.builds(lambda values: bytes_list(*values), st.lists(BYTES, max_size=3)),
    st.builds(lambda values, packed: float_list(*values, packed=packed), st.lists(FLOATS, max_size=3), st.booleans()),
    st.builds(
        lambda values, packed, num_bytes: int64_list(*values, packed=packed, num_bytes=num_bytes),
        st.lists(SMALL | st.sampled_from([128, 300, -1, 2**62]), max_size=4),
        st.booleans(),
        st.sampled_from([0, 0, 0, 2]),
    ),
    st.just(b""),
    st.just(b"\x2a\x02\x08\x05"),  # an unknown field
)
ENTRIES = st.builds(lambda name, features: entry(name, *features), NAMES, st.lists(FEATURES, max_size=2))
RECORDS = st.builds(
    lambda entries, tail: example(*entries) + tail, st.lists(ENTRIES, max_size=4), st.sampled_from([b"", b"\x12\x01x"])
) | st.sampled_from(UNUSUAL)
FUZZ = settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))


def everything_read(layout: value_places.ValuePlaces, row: bytes) -> dict[str, bytes]:
    """What a layout says of a record that matches it, against what protobuf says: of every feature, exactly."""
    parsed = _example.example_class().FromString(row).features.feature
    assert set(parsed) == set(layout.features)
    for name, values in parsed.items():
        kind = values.WhichOneof("kind")
        assert kind == layout.kinds.get(name)
        if kind is None:
            continue
        feature = VarLenFeature({"bytes_list": bytes, "float_list": np.float32, "int64_list": np.int64}[kind])
        expected = read(feature, [values])
        if name in layout.spans:
            (found,) = cut(feature, kind, layout.spans[name], np.frombuffer(row, np.uint8)[None], [row])
        else:
            found = read(feature, [layout.features[name]])
        np.testing.assert_array_equal(found, expected)


@FUZZ
@given(RECORDS, st.randoms(use_true_random=False))
def test_no_record_that_matches_a_layout_is_read_in_another_way_than_protobuf_does(record: bytes, random) -> None:
    layout = layout_of(record)
    everything_read(layout, record)
    rows = [bytearray(record) for _ in range(40)]
    for row in rows:
        for spans in layout.spans.values():  # values, which may be anything
            for start, stop in spans:
                for at in range(start, stop):
                    if random.random() < 0.5:
                        row[at] = random.choice([0, 1, 8, 10, 18, 127, 128, 255, random.randrange(256)])
        for _ in range(random.choice([0, 0, 1, 2]) if row else 0):  # structure, which may not
            row[random.randrange(len(row))] = random.randrange(256)
    matrix = np.array([list(row) for row in rows], np.uint8).reshape(len(rows), len(record))
    for row, matches in zip(rows, layout.matches(matrix), strict=True):
        if matches:
            everything_read(layout, bytes(row))


@FUZZ
@given(st.lists(RECORDS, min_size=1, max_size=3), st.data())
def test_batches_are_what_the_records_are(kinds: list[bytes], data: st.DataObject) -> None:
    """Of any records in any order, with spec of any kind: the same arrays, or an error in both cases."""
    dtypes = st.sampled_from([bytes, np.float32, np.int64, np.uint8, bool])
    features = st.one_of(
        st.builds(VarLenFeature, dtypes),
        st.builds(lambda dtype, size: FixedLenFeature((size,), dtype), dtypes, st.integers(0, 3)),
        st.builds(lambda size: FixedLenFeature((size,), np.float32, default_value=2), st.integers(1, 3)),
    )
    spec = data.draw(st.dictionaries(st.sampled_from(["a", "b", "label", "x"]), features, max_size=2))
    batch = data.draw(st.lists(st.sampled_from(kinds), min_size=10, max_size=40))
    try:
        singles = [parse_example(record, spec) for record in batch]
    except ValueError:
        with pytest.raises(ValueError, match=r"record \d+ of the batch"):
            parse_example(batch, spec)
        return
    parsed = parse_example(batch, spec)
    for name in spec:
        for found, single in zip(parsed[name], singles, strict=True):
            np.testing.assert_array_equal(found, single[name])
            assert getattr(found, "dtype", object) == single[name].dtype


MISFITS = [
    ({}, FixedLenFeature((), np.int64), r"does not have it, and it has no default\. .*default_value=\.\.\.\) .*: y\.\)"),
    ({"x": 1.0}, FixedLenFeature((), np.int64), "has it as float_list; expected int64_list, which holds np.int64"),
    ({"x": 1}, FixedLenFeature((), np.float32), "has it as int64_list; expected float_list, which holds np.float32"),
    ({"x": 1}, FixedLenFeature((), bytes), "has it as int64_list; expected bytes_list, which holds bytes"),
    ({"x": 1.0}, FixedLenFeature((), np.float64), "has it as float_list; expected bytes_list, which holds np.float64"),
    ({"x": b"a"}, VarLenFeature(np.int64), "has it as bytes_list; expected int64_list"),
    ({"x": [1, 2]}, FixedLenFeature((), np.int64), r"has 2 values; expected 1, for the shape \(\)"),
    ({"x": [b"a"]}, FixedLenFeature((2, 2), bytes), r"has 1 values; expected 4, for the shape \(2, 2\)"),
    ({"x": b"abc"}, FixedLenFeature((2,), np.uint8), r"has 3 bytes; expected 2, .* give the feature the dtype bytes"),
    ({"x": [b"ab", b"ab"]}, FixedLenFeature((2,), np.uint8), "has 2 elements of bytes; expected one"),
    ({"x": b"\1"}, FixedLenFeature((1,), bool), r"not decoded to bool; use np\.uint8"),
    ({"x": [1, 256]}, FixedLenFeature((2,), np.uint8), "has the value 256; expected 0 to 255, which np.uint8 can hold"),
    ({"x": -1}, FixedLenFeature((), np.uint64), "has the value -1; expected 0 to 18446744073709551615"),
    ({"x": 2}, FixedLenFeature((), bool), "has the value 2; expected 0 to 1, which np.bool can hold"),
    ({"x": 200}, VarLenFeature(np.int8), "has the value 200; expected -128 to 127"),
]


def test_records_that_do_not_fit_the_spec() -> None:
    for (values, feature, message), num_good in itertools.product(MISFITS, (0, 3, 30)):
        good = make_example({"x": ok(feature), "y": 1})
        batch = [good] * num_good + [make_example({**values, "y": 1})] * 12
        with pytest.raises(ValueError, match=rf"record {num_good} of the batch, feature 'x': the record .*{message}"):
            parse_example(batch, {"x": feature})
        with pytest.raises(ValueError, match=rf"the record, feature 'x': the record .*{message}"):
            parse_example(batch[-1], {"x": feature})


def ok(feature: Any) -> Any:
    """A value that fits."""
    count = getattr(feature, "shape", None) and int(np.prod(feature.shape))
    if feature.dtype is bytes:
        return [b"a"] * (count or 1)
    if feature.dtype in (np.float32, np.int64, np.int8, bool) or isinstance(feature, VarLenFeature):
        return np.zeros(count or 1, np.float32 if feature.dtype == np.float32 else np.int64)
    return np.zeros(count or 1, feature.dtype).tobytes()


def test_a_value_that_does_not_fit_is_no_fault_of_later_batches() -> None:
    """The layout of a wrong record is known from then on."""
    spec, wrong, good = {"x": FixedLenFeature((), bool)}, make_example({"x": 2}), make_example({"x": 1})
    with pytest.raises(ValueError, match="record 0 of the batch, feature 'x': the record has the value 2"):
        parse_example([wrong, *[good] * 20], spec)
    assert parse_example([good] * 20, spec)["x"].all()


def test_bytes_that_are_no_example() -> None:
    for record in (b"\xff", b"\x0a\x05abc", example(b"\x0a\x06\x0a\x02\xff\xfe\x12\x00"), image_record(1)[:-1]):
        for num_records in (1, 20):
            with pytest.raises(ValueError, match=rf"record 1 of the batch is no tf\.train\.Example: .* its {len(record)} bytes"):
                parse_example([image_record(1), *[record] * num_records], IMAGES)
        with pytest.raises(ValueError, match=r"the record is no tf\.train\.Example"):
            parse_example(record, IMAGES)
