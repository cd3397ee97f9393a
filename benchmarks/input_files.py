"""How long does a global batch take from TFRecord files to the replicas' devices, next to tf.data and grain?

Eight shards of about 200 MB in all, small records (a 28 x 28 image and a label as `tf.train.Example`), batches of
256, converted to float32 on the host; the files lie in the page cache. Nothing is trained. Every contender checks what
its format can check: ours and tf.data verify both CRCs of each record, grain's reader and the plain one none. Turns are long,
because pipelines fill their buffers in the turns of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grain
import jax
import numpy as np
from _harness import Contender, Row, interleave, parse, print_table, show_seconds
from _peers import has_module, remote

import mirrored as mr
from mirrored.data._records.example import example_class

#: Of the time of tf.data with `experimental_distribute_dataset`; and of a plain Python reader with the same parser.
GOAL_DISTRIBUTED, GOAL_PLAIN = 0.8, 1.0
BATCH, PIXELS, NUM_SHARDS = 256, 784, 8
SPEC = {"image": mr.data.FixedLenFeature((PIXELS,), np.uint8), "label": mr.data.FixedLenFeature((), np.int64)}


def main() -> None:
    options = parse(__doc__, replicas=2, rounds=8, turn=1.0, peers_python=sys.executable)
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(options.replicas)])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        files = write_shards(Path(folder), 1024 if options.quick else 29440)
        contenders = [
            stack.enter_context(ours(strategy, files)),
            Contender("plain reader, one record at a time", plain_reader(strategy, files)),
            Contender("grain's TFRecord reader", grain_alone(files)),
            *tensorflow(stack, options, folder),
        ]
        times = interleave(contenders, rounds, turn)
    rows = [Row(c.name, show_seconds(times.median(c.name)), times.ratios(c.name, "mirrored")) for c in contenders[1:]]
    rows.insert(0, Row("mirrored", show_seconds(times.median("mirrored"))))
    references = {DISTRIBUTED: GOAL_DISTRIBUTED, contenders[1].name: GOAL_PLAIN}
    rows += [
        Row(f"mirrored, ratio to {name}", "", times.ratios("mirrored", name), goal)
        for name, goal in references.items()
        if name in times.seconds
    ]
    print_table(f"TFRecord to {options.replicas} replicas, a batch of {BATCH}, {rounds} rounds; ratio to mirrored", rows)


def write_shards(folder: Path, num_records: int) -> list[str]:
    rng = np.random.default_rng(0)
    paths = [folder / f"train-{i:05d}-of-{NUM_SHARDS:05d}.tfrecord" for i in range(NUM_SHARDS)]
    for path in paths:
        images, labels = rng.integers(0, 256, (num_records, PIXELS), np.uint8), rng.integers(0, 10, num_records)
        examples = (
            mr.data.make_example({"image": image.tobytes(), "label": int(label)})
            for image, label in zip(images, labels, strict=True)
        )
        mr.data.write_tfrecords(path, examples)
    return [str(path) for path in paths]


@contextlib.contextmanager
def ours(strategy: mr.Strategy, files: Sequence[str]) -> Iterator[Contender]:
    def parsed(records: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        return finish(**mr.data.parse_example(records, SPEC))

    batches = strategy.distribute_dataset(mr.data.tfrecord_dataset(files).batch(BATCH, drop_remainder=True).map(parsed))
    with contextlib.closing(forever(batches)) as endless:

        def run(num_batches: int) -> float:
            for images, _ in itertools.islice(endless, num_batches):
                last = images
            return float(jax.block_until_ready(last.values[0])[0, 0])

        yield Contender("mirrored", run)


def forever(batches: mr.data.DistributedDataset) -> Iterator[tuple[mr.PerReplica, mr.PerReplica]]:
    while True:
        with contextlib.closing(iter(batches)) as epoch:
            yield from epoch


def finish(image: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return image.astype(np.float32) * np.float32(1 / 255), label.astype(np.int32)


def plain_reader(strategy: mr.Strategy, files: Sequence[str]) -> Callable[[int], float]:
    """Read as a careful user would without our reader: frames in Python, one protobuf message each, one transfer a batch."""
    message = example_class()  # the same parser, so that only the way of using it differs

    def records() -> Iterator[bytes]:
        for file in itertools.cycle(files):
            with open(file, "rb") as stream:
                while header := stream.read(12):
                    (length,) = struct.unpack_from("<Q", header)
                    yield stream.read(length)
                    stream.read(4)

    endless, sharding = records(), strategy._mesh.stacked

    def run(num_batches: int) -> float:
        for _ in range(num_batches):
            features = [message.FromString(record).features.feature for record in itertools.islice(endless, BATCH)]
            image = np.stack([np.frombuffer(f["image"].bytes_list.value[0], np.uint8) for f in features])
            label = np.array([f["label"].int64_list.value[0] for f in features])
            arrays = [a.reshape(strategy.num_replicas_in_sync, -1, *a.shape[1:]) for a in finish(image, label)]
            images, _ = jax.device_put(arrays, sharding)
        return float(jax.block_until_ready(images)[0, 0, 0])

    return run


def grain_alone(files: Sequence[str]) -> Callable[[int], float]:
    """Read with grain's own reader, to the host only."""
    message = example_class()

    def parsed(record: bytes) -> tuple[np.ndarray, np.ndarray]:
        features = message.FromString(record).features.feature
        image = np.frombuffer(features["image"].bytes_list.value[0], np.uint8)
        return finish(image, np.asarray(features["label"].int64_list.value[0]))

    def epochs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            shards = [grain.experimental.TFRecordIterDataset(file) for file in files]
            records = grain.experimental.InterleaveIterDataset(shards, cycle_length=4)
            yield from records.map(parsed).batch(BATCH, drop_remainder=True)

    endless = epochs()

    def run(num_batches: int) -> float:
        for images, _ in itertools.islice(endless, num_batches):
            last = images
        return float(last[0, 0])

    return run


DISTRIBUTED = "tf.data, distributed"


def tensorflow(stack: contextlib.ExitStack, options: argparse.Namespace, folder: str) -> Iterator[Contender]:
    if not has_module(options.peers_python, "tensorflow"):
        print(f"skipped: tf.data, because {options.peers_python} has no tensorflow")
        return
    for name, how in ((DISTRIBUTED, "distributed"), ("tf.data, to the host only", "alone")):
        file = Path(__file__).with_name("peer_tensorflow_input.py")
        command = [options.peers_python, str(file), folder, str(options.replicas), how]
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        yield Contender(name, remote(process))


if __name__ == "__main__":
    main()
