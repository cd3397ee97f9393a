"""TFRecord files: every record, in every coding, from any position; and every damage is one error that says where."""

import contextlib
import copy
import gc
import gzip
import itertools
import json
import os
import pickle
import struct
import tracemalloc
import zlib
from pathlib import Path

import google_crc32c
import grain
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mirrored as mr
from mirrored.data._records import record_reader

CODINGS = (None, "GZIP", "ZLIB")
COMPRESS = {None: bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}
DECOMPRESS = {None: bytes, "GZIP": gzip.decompress, "ZLIB": zlib.decompress, "gzip": gzip.decompress}
#: Records of many lengths, and runs of one length.
RECORDS = [b"", b"a", *[bytes([i]) * 20 for i in range(30)], *[os.urandom(i * 37 % 501) for i in range(60)], b"end"]


def framed(record: bytes, length: int | None = None) -> bytes:
    """A record as TensorFlow frames it: written here on its own, so that reader and writer cannot share a mistake."""
    header = struct.pack("<Q", len(record) if length is None else length)
    return header + checksum(header) + record + checksum(record)


def checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def make(folder: Path, *files: list[bytes], compression: str | None = None) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"train-{number}.tfrecord" for number in range(len(files))]
    for path, records in zip(paths, files, strict=True):
        path.write_bytes(COMPRESS[compression](b"".join(map(framed, records))))
    return paths


def split(records: list[bytes]) -> list[list[bytes]]:
    return [records[:11], [], records[11:70], records[70:]]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    """Chunks so small that records, headers and runs cross their borders."""
    monkeypatch.setattr(record_reader, "CHUNK_BYTES", 256)
    monkeypatch.setattr(record_reader, "COMPRESSED_BYTES", 64)


def open_files(folder: Path | str = "/") -> list[str]:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [path for link in links if os.path.exists(link) and (path := os.readlink(link)).startswith(str(folder))]


def test_every_record_of_every_file_in_order(tmp_path: Path) -> None:
    for compression in CODINGS:
        paths = make(tmp_path, *split(RECORDS), [], compression=compression)
        paths[-1].write_bytes(b"")  # empty files are legal, without any stream too
        for spelling in (str.upper, str.lower):
            dataset = mr.data.tfrecord_dataset(paths, compression and spelling(compression))
            assert isinstance(dataset, grain.IterDataset) and dataset.files == tuple(map(str, paths))
            assert list(dataset) == RECORDS == list(dataset)
        assert list(mr.data.tfrecord_dataset(paths[-1:], compression).batch(3)) == []
    data = b"".join(map(framed, RECORDS))
    members = [gzip.compress(data[start : start + 100]) for start in range(0, len(data) + 100, 100)]
    paths[0].write_bytes(b"".join(members))
    longest = max(map(len, RECORDS))
    assert list(mr.data.tfrecord_dataset(paths[0], "GZIP", max_record_bytes=longest)) == RECORDS
    with pytest.raises(
        mr.data.TFRecordError, match=f"claims to have {longest} bytes; expected at most max_record_bytes={longest - 1}"
    ):
        list(mr.data.tfrecord_dataset(paths[0], "GZIP", max_record_bytes=longest - 1))


def test_batches_go_across_the_borders_of_files_and_on_from_any_state(tmp_path: Path) -> None:
    sizes = [(None, False), (1, False), (10, False), (10, True), (93, True), (500, True)]
    for compression, (batch_size, drop_remainder) in itertools.product(CODINGS, sizes):
        dataset = mr.data.tfrecord_dataset(make(tmp_path, *split(RECORDS), compression=compression), compression)
        elements = RECORDS
        if batch_size is not None:
            dataset = dataset.batch(batch_size, drop_remainder=drop_remainder)
            whole = [RECORDS[start : start + batch_size] for start in range(0, len(RECORDS), batch_size)]
            elements = [batch for batch in whole if len(batch) == batch_size or not drop_remainder]
        iterator = iter(dataset)
        for taken in range(len(elements) + 1):
            state = json.loads(json.dumps(iterator.get_state()))
            if taken % 9 == 0 or taken > len(elements) - 2:
                resumed = iter(dataset)
                resumed.set_state(state)
                assert resumed.get_state() == state and list(resumed) == elements[taken:]
            assert next(iterator, None) == (elements[taken] if taken < len(elements) else None)
        iterator.set_state(iter(dataset).get_state())
        assert list(iterator) == elements


def test_the_rest_of_grain_follows(tmp_path: Path) -> None:
    dataset = mr.data.tfrecord_dataset(make(tmp_path, *split(RECORDS)))
    assert list(dataset.map(len).filter(lambda length: length > 400)) == [n for n in map(len, RECORDS) if n > 400]
    assert list(dataset.batch(50).map(len)) == [50, 43]
    assert list(dataset.batch(2, batch_fn=lambda records: records[0])) == RECORDS[::2]
    assert [list(map(len, pair)) for pair in dataset.batch(40).batch(2)] == [[40, 40], [13]]
    assert list(map(len, dataset.apply([grain.transforms.Batch(40)]))) == [40, 40, 13]
    assert len(dataset.batch(40).map(len).parents[0].files) == 4
    for duplicate in (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))):  # noqa: S301
        found = []
        for worker in range(6):
            mine = duplicate(dataset.batch(4))
            mine.set_slice(slice(worker, None, 6))
            found += itertools.chain(*mine)
        assert sorted(found) == sorted(RECORDS), "slices of the files are a partition"


def test_files_may_be_a_path_paths_or_a_pattern(tmp_path: Path) -> None:
    (path,) = make(tmp_path / "one", [b"x"])
    for files in (str(path), path, [str(path)], (path,), f"{path.parent}/*.tfrecord"):
        assert mr.data.tfrecord_dataset(files).files == (str(path),)
    for name in ("b.tfrecord", "a.tfrecord", "c[1].tfrecord"):  # sorted, and a file with such a name is a file
        (tmp_path / name).write_bytes(framed(name.encode()))
    assert list(mr.data.tfrecord_dataset(tmp_path / "[ab].tfrecord")) == [b"a.tfrecord", b"b.tfrecord"]
    assert list(mr.data.tfrecord_dataset(tmp_path / "c[1].tfrecord")) == [b"c[1].tfrecord"]
    (tmp_path / "one" / "more").mkdir()
    (tmp_path / "one" / "more" / "d.tfrecord").write_bytes(framed(b"d"))
    everywhere = mr.data.tfrecord_dataset(tmp_path / "**" / "*.tfrecord")  # ** stands for no folder, one and more
    assert list(everywhere) == [b"a.tfrecord", b"b.tfrecord", b"c[1].tfrecord", b"d", b"x"]
    os.mkfifo(tmp_path / "pipe-0")  # it would block when it is opened, and a second epoch would be empty
    for files in (tmp_path / "pipe-0", str(tmp_path / "pipe-*"), "/dev/zero"):
        with pytest.raises(ValueError, match="is a pipe or a device, which cannot be read again"):
            mr.data.tfrecord_dataset(files)


def test_states_of_something_else_are_refused_and_change_nothing(tmp_path: Path) -> None:
    iterator = iter(mr.data.tfrecord_dataset(make(tmp_path, [b"a", b"b", b"c"])))
    assert next(iterator) == b"a"
    for state, message in [
        (None, "expected what get_state"),
        ({}, "expected what get_state"),
        ({"file": 0, "record": 0, "offset": -1}, "expected what get_state"),
        ({"file": 0, "record": 0.0, "offset": 0}, "expected what get_state"),
        ({"file": 2, "record": 0, "offset": 0}, "in file 2, but the dataset has 1 files"),
        ({"file": 0, "record": 0, "offset": 0, "name": "b"}, "has 'b' as file 0, and the dataset 'train-0.tfrecord'; make"),
        ({"file": 0, "record": 0, "offset": 0, "name": None}, "has None as file 0"),  # the end of fewer files
    ]:
        with pytest.raises(ValueError, match=message):
            iterator.set_state(state)
    assert iterator.get_state() == {"file": 0, "record": 1, "offset": 17, "name": "train-0.tfrecord"}, "it names the next record"
    assert list(iterator) == [b"b", b"c"]
    for compression in CODINGS:
        iterator = iter(mr.data.tfrecord_dataset(make(tmp_path, [b"abc"] * 9, compression=compression), compression))
        for offset, message in ((10**6, "ends before this position"), (3, "its length is damaged")):
            iterator.set_state({"file": 0, "record": 1, "offset": offset})
            with pytest.raises(mr.data.TFRecordError, match=message):
                next(iterator)


@pytest.mark.usefixtures("real_chunks")
def test_runs_of_one_length_are_found_whatever_follows_them(tmp_path: Path) -> None:
    records = [b"x" * (5 + run % 3) for run in (1, 7, 8, 9, 10, 63, 64, 65, 500, 511, 512, 513, 3000, 2) for _ in range(run)]
    [path] = make(tmp_path, records)
    assert list(mr.data.tfrecord_dataset(path)) == records


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


SOUND = b"".join(map(framed, [b"one", b"two", b"three"]))  # records at bytes 0, 19 and 38, each 19 or 21 long


DAMAGED = [
    (damaged(SOUND, 20), 1, 19, "its length is damaged: the checksum is 0x.*, expected 0x"),
    (damaged(SOUND, 28), 1, 19, "its length is damaged"),
    (damaged(SOUND, 31), 1, 19, "its data is damaged: its 3 bytes have the checksum 0x.*, expected 0x"),
    (damaged(SOUND, 36), 1, 19, "its data is damaged"),
    (SOUND[:40], 2, 38, "the file ends 10 bytes too early, inside this record"),
    (SOUND[:50], 2, 38, "the file ends 9 bytes too early"),
    (SOUND[:-1], 2, 38, "the file ends 1 bytes too early"),
    (SOUND + b"x", 3, 59, "the file ends 11 bytes too early"),
    (SOUND + framed(b"x", 2**62), 3, 59, f"claims to have {2**62} bytes; expected at most max_record_bytes=268435456"),
    (SOUND + framed(b"x", 2**64 - 1), 3, 59, f"claims to have {2**64 - 1} bytes"),
    (SOUND + framed(b"x", 2**27), 3, 59, "the file ends 134217727 bytes too early"),
    (b"not a TFRecord file, but long enough", 0, 0, "The file is not a TFRecord file, or it was damaged"),
    (gzip.compress(SOUND, mtime=0), 0, 0, "looks like the start of a compressed file: compression='GZIP'"),
    (zlib.compress(SOUND), 0, 0, "looks like the start of a compressed file: compression='ZLIB'"),
]


def test_damage_says_where_and_what_comes_before_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.tfrecord"
    for (data, record, offset, message), is_batched in itertools.product(DAMAGED, (False, True)):
        path.write_bytes(data)
        dataset = mr.data.tfrecord_dataset(path)
        iterator = iter(dataset.batch(1) if is_batched else dataset)
        expected = [b"one", b"two", b"three"][:record]
        assert list(itertools.islice(iterator, record)) == ([[r] for r in expected] if is_batched else expected)
        for _ in range(2):  # it stays an error, and never becomes the end of the data
            with pytest.raises(mr.data.TFRecordError, match=rf"bad\.tfrecord: record {record}, at byte {offset}: .*{message}"):
                next(iterator)
        assert iterator.get_state() == {"file": 0, "record": record, "offset": offset, "name": "bad.tfrecord"}


NOT_COMPRESSED = "incorrect header check; expected a whole .* If the file is not compressed, leave out compression"


def test_damaged_compression_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.tfrecord"
    for harm, records, message in [
        (lambda data: data[:-1], {3}, "stream was cut short"),
        (lambda data: data[:30], {0, 1, 2}, "stream was cut short"),
        (lambda data: data[:1], {0}, "stream was cut short"),
        (lambda data: data[:-3] + b"xxx", {0, 1, 2, 3}, "incorrect"),  # zlib keeps back what it has not verified
        (lambda data: data + b"x", {3}, "incorrect header check|something follows|stream was cut short"),
        (lambda data: data + bytes(100), {3}, "incorrect header check|something follows"),
        (lambda data: SOUND, {0}, NOT_COMPRESSED),
    ]:
        for compression in ("GZIP", "ZLIB"):
            path.write_bytes(harm(COMPRESS[compression](SOUND)))
            iterator, found = iter(mr.data.tfrecord_dataset(path, compression)), []
            with pytest.raises(mr.data.TFRecordError, match=rf"at byte \d+ or later of what it .*: .*({message})") as caught:
                found.extend(iterator)
            assert len(found) in records and f"bad.tfrecord: record {len(found)}," in str(caught.value)
            with pytest.raises(mr.data.TFRecordError):
                next(iterator)
    data = zlib.compress(SOUND)  # garbage is found also where a read ends
    path.write_bytes(data + b"garbage")
    monkeypatch.setattr(record_reader, "COMPRESSED_BYTES", len(data))
    with pytest.raises(mr.data.TFRecordError, match="something follows the end"):
        list(mr.data.tfrecord_dataset(path, "ZLIB"))


@settings(deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(CODINGS),
    st.integers(0, 10**4),
    st.sampled_from([0, 1, 10**4]) | st.integers(0, 255),
    st.binary(max_size=3),
    st.sampled_from([None, 5]),
)
def test_whatever_is_in_a_file_only_our_error_escapes(tmp_path: Path, compression, at, num_removed, inserted, batch_size) -> None:
    path, data = tmp_path / "changed.tfrecord", COMPRESS[compression](b"".join(map(framed, RECORDS)))
    at %= len(data) + 1
    path.write_bytes(data[:at] + inserted + data[at + num_removed :])
    dataset = mr.data.tfrecord_dataset(path, compression)
    found = []
    with contextlib.suppress(mr.data.TFRecordError):
        for element in dataset if batch_size is None else dataset.batch(batch_size):
            found += [element] if batch_size is None else element
    assert found == RECORDS[: len(found)] or num_removed > 1  # a record may be removed whole; none is ever wrong
    assert set(found) <= set(RECORDS)


def peak(path: Path, data: bytes, compression: str | None, **options) -> int:
    """The most memory that a loop over a damaged file takes at a time."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(mr.data.TFRecordError):
            for _ in mr.data.tfrecord_dataset(path, compression, **options):
                pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def real_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record_reader, "CHUNK_BYTES", 1 << 19)
    monkeypatch.setattr(record_reader, "COMPRESSED_BYTES", 1 << 16)


@pytest.mark.usefixtures("small_chunks", "real_chunks")
def test_no_file_takes_more_memory_than_chunks_and_its_longest_record(tmp_path: Path) -> None:
    path = tmp_path / "hostile.tfrecord"
    for compression, length in itertools.product(CODINGS, (2**62, 200 << 20)):  # lengths that are only claimed
        assert peak(path, COMPRESS[compression](framed(b"small", length)), compression) < 5 << 20
    for compression, wbits in (("GZIP", 31), ("ZLIB", 15)):
        deflate = zlib.compressobj(wbits=wbits)
        parts = [deflate.compress(framed(b"x")), *(deflate.compress(bytes(1 << 20)) for _ in range(20)), deflate.flush()]
        bomb = b"".join(parts)
        assert len(bomb) < 50_000 and peak(path, bomb, compression) < 6 << 20
        header = struct.pack("<Q", 20 << 20)
        bomb = COMPRESS[compression](header + checksum(header) + bytes(20 << 20))
        assert peak(path, bomb, compression, max_record_bytes=1 << 20) < 6 << 20


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks", "real_chunks")
def test_records_as_long_as_they_may_be_take_their_own_memory_once(tmp_path: Path) -> None:
    longest = 8 << 20
    for compression, count in itertools.product(CODINGS, (1, 4)):
        frames = framed(bytes(longest)) * count
        data = COMPRESS[compression](frames[:-1] + b"?")  # the last one is damaged
        most = 1.2 * longest + (4 << 20) + (longest if count > 1 else 0)  # the loop holds the one before
        assert peak(tmp_path / "long.tfrecord", data, compression, max_record_bytes=longest) < most


def test_no_file_stays_open(tmp_path: Path) -> None:
    for leave, compression in itertools.product(("close", "exhaust", "collect", "fail"), (None, "ZLIB")):
        paths = make(tmp_path, RECORDS, RECORDS, compression=compression)
        if leave == "fail":
            paths[1].write_bytes(paths[1].read_bytes()[:-2])
        iterator = iter(mr.data.tfrecord_dataset(paths, compression).batch(10))
        next(iterator)
        assert open_files(tmp_path) == [str(paths[0])]
        if leave == "close":
            iterator.close()
            with pytest.raises(ValueError, match="the iterator is closed"):
                next(iterator)
            iterator.close()
        elif leave == "collect":
            del iterator
            gc.collect()
        else:
            with pytest.raises(mr.data.TFRecordError) if leave == "fail" else contextlib.nullcontext():
                list(iterator)
        assert open_files(tmp_path) == [], leave


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out.tfrecord"
    for compression, decompress in DECOMPRESS.items():
        assert mr.data.write_tfrecords(path, iter(RECORDS), compression) == len(RECORDS)
        assert decompress(path.read_bytes()) == b"".join(map(framed, RECORDS))
        assert list(mr.data.tfrecord_dataset(path, compression)) == RECORDS
        assert mr.data.write_tfrecords(str(path), [], compression) == 0
        assert list(mr.data.tfrecord_dataset(path, compression)) == []
    assert os.listdir(tmp_path) == ["out.tfrecord"]
    (other := tmp_path / "other").write_bytes(b"")
    assert path.stat().st_mode == other.stat().st_mode
    by_tensorflow = bytes.fromhex("0300000000000000b099490e6162636e57f121000000000000000029039807d8ea82a2")
    mr.data.write_tfrecords(path, [b"abc", b""])
    assert path.read_bytes() == by_tensorflow


def test_a_file_that_cannot_be_written_whole_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "out.tfrecord"
    path.write_bytes(b"as it was")
    for records, error, message in [
        ([b"a", "b"], TypeError, "record 1 is 'b' of type str; expected bytes"),
        ([bytearray(b"a")], TypeError, "record 0 is .* of type bytearray"),
        (3, TypeError, "records is int"),
        ((1 / 0 for _ in [0]), ZeroDivisionError, "division"),
    ]:
        with pytest.raises(error, match=message):
            mr.data.write_tfrecords(path, records)
        assert os.listdir(tmp_path) == ["out.tfrecord"] and path.read_bytes() == b"as it was"
    for wrong in (b"out.tfrecord", 3, None):
        with pytest.raises(TypeError, match=r"path is .* expected a path such as 'train-0\.tfrecord'"):
            mr.data.write_tfrecords(wrong, [])
