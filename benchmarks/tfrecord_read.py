"""How fast are TFRecord files read, with every checksum verified, next to grain's own reader, which verifies none?

And what do whole batches cost as arrays: read, verified and parsed, next to one record at a time. Files lie in the page
cache; nothing is sent to devices (`input_files.py` does that).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import grain
import numpy as np
from _harness import Contender, Row, Times, check_losses, interleave, parse, print_table, show_seconds

import mirrored as mr
from mirrored.data._records import example

#: Seconds for a GB: 1 GB/s, for records of 100 KB.
GOAL_SECONDS = 1.0
#: A batch parsed at once, to one record at a time with the same parser: no slower than a plain reader.
GOAL_PARSED = 1.0
BATCH, PIXELS = 256, 784
SPEC = {"image": mr.data.FixedLenFeature((PIXELS,), np.uint8), "label": mr.data.FixedLenFeature((), np.int64)}


def main() -> None:
    options = parse(__doc__, rounds=30, turn=0.2)
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    megabytes = 4 if options.quick else 100
    with tempfile.TemporaryDirectory() as folder:
        for kib, batch_size in ((1, BATCH), (100, 16)):
            read(write(Path(folder) / f"{kib}-kib", megabytes, kib << 10), kib, batch_size, rounds, turn)
        parse_batches(write_examples(Path(folder) / "examples", megabytes), rounds, turn)


def write(path: Path, megabytes: int, size: int) -> str:
    """Write random records of equal size."""
    rng = np.random.default_rng(0)
    mr.data.write_tfrecords(path, (rng.bytes(size) for _ in range(megabytes * 10**6 // size)))
    return str(path)


def write_examples(path: Path, megabytes: int) -> str:
    rng = np.random.default_rng(0)
    count = megabytes * 10**6 // PIXELS // BATCH * BATCH
    examples = ({"image": rng.bytes(PIXELS), "label": int(rng.integers(10))} for _ in range(count))
    mr.data.write_tfrecords(path, map(mr.data.make_example, examples))
    return str(path)


def read(path: str, kib: int, batch_size: int, rounds: int, turn: float) -> None:
    ours, grains = mr.data.tfrecord_dataset(path), grain.experimental.TFRecordIterDataset(path)
    contenders = [
        Contender("grain, no checksums", passes(lambda: grains, len)),
        Contender("mirrored", passes(lambda: ours, len)),
        Contender("mirrored, in batches", passes(lambda: ours.batch(batch_size), lambda records: sum(map(len, records)))),
    ]
    times = measure(contenders, rounds, turn)
    gigabytes = Path(path).stat().st_size / 1e9
    rows = [
        Row(c.name, f"{gigabytes / times.median(c.name):.2f} GB/s", times.ratios(c.name, contenders[0].name)) for c in contenders
    ]
    if kib >= 100:
        seconds = [taken / gigabytes for taken in times.seconds["mirrored, in batches"]]
        rows.append(Row("mirrored, in batches: seconds for a GB", "", seconds, GOAL_SECONDS))
    print_table(f"records of {kib} KiB, {rounds} rounds; ratio of the time to grain's", rows)


def parse_batches(path: str, rounds: int, turn: float) -> None:
    records = mr.data.tfrecord_dataset(path)
    batches = Path(path).stat().st_size // (822 + 16) // BATCH
    contenders = [
        Contender("one record at a time", passes(lambda: one_at_a_time(records.batch(BATCH)), of_arrays)),
        Contender("parse_example", passes(lambda: map(parse_alike, records.batch(BATCH)), of_arrays)),
        Contender("grain, one record at a time", passes(lambda: grain_alone(path), of_arrays)),
    ]
    times = measure(contenders, rounds, turn)
    reference = contenders[0].name
    rows = [
        Row(
            c.name,
            show_seconds(times.median(c.name) / batches),
            times.ratios(c.name, reference),
            GOAL_PARSED if c.name == "parse_example" else None,
        )
        for c in contenders
    ]
    print_table(f"a batch of {BATCH} examples as arrays, {rounds} rounds; ratio to {reference}", rows)


def parse_alike(records: list[bytes]) -> dict[str, np.ndarray]:
    return mr.data.parse_example(records, SPEC)


def parse_record(record: bytes) -> tuple[np.ndarray, int]:
    """Parse as one would with protobuf alone."""
    features = example.example_class().FromString(record).features.feature
    return np.frombuffer(features["image"].bytes_list.value[0], np.uint8), features["label"].int64_list.value[0]


def one_at_a_time(batches: Iterable[list[bytes]]) -> Iterator[dict[str, np.ndarray]]:
    for records in batches:
        images, labels = zip(*map(parse_record, records), strict=True)
        yield {"image": np.stack(images), "label": np.asarray(labels)}


def grain_alone(path: str) -> Iterator[dict[str, np.ndarray]]:
    dataset = grain.experimental.TFRecordIterDataset(path).map(parse_record).batch(BATCH)
    for images, labels in dataset:
        yield {"image": images, "label": labels}


def of_arrays(batch: dict[str, np.ndarray]) -> float:
    return float(batch["label"].sum()) + float(batch["image"][:, 0].sum())


def passes(make: Callable[[], Iterable], measure: Callable) -> Callable[[int], float]:
    """Go over the data so many times; the sum of what is measured of the elements stands for a loss."""

    def run(num_passes: int) -> float:
        for _ in range(num_passes):
            total = sum(map(measure, make()))
        return float(total)

    return run


def measure(contenders: list[Contender], rounds: int, turn: float) -> Times:
    check_losses(contenders, num_steps=1, tolerance=1e-12)
    return interleave(contenders, rounds, turn)


if __name__ == "__main__":
    main()
