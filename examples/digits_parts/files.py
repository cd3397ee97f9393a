"""The digits as TFRecord shards, and batches of them."""

from pathlib import Path

import grain
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mirrored as mr

NUM_SHARDS = 4
NUM_HELD_OUT = 359
GLOBAL_BATCH_SIZE = 120
STEPS_PER_EPOCH = 12
FEATURES = {"image": mr.data.FixedLenFeature((8, 8, 1), np.uint8), "label": mr.data.FixedLenFeature((), np.int32)}


def write_shards(folder: Path) -> dict[str, list[Path]]:
    """Write scikit-learn's digits, images of 0 to 16 in uint8, as `tf.train.Example` records, unless they are there."""
    shards = {
        name: [folder / f"{name}-{i:05d}-of-{NUM_SHARDS:05d}.tfrecord" for i in range(NUM_SHARDS)] for name in ("train", "test")
    }
    if all(path.exists() for paths in shards.values() for path in paths):
        return shards
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    rows = train_test_split(np.arange(len(digits.target)), test_size=NUM_HELD_OUT, stratify=digits.target, random_state=0)
    for paths, members in zip(shards.values(), rows, strict=True):
        for i, path in enumerate(paths):
            images, labels = digits.images.astype(np.uint8)[members[i::NUM_SHARDS]], digits.target[members[i::NUM_SHARDS]]
            examples = [{"image": image.tobytes(), "label": int(label)} for image, label in zip(images, labels, strict=True)]
            mr.data.write_tfrecords(path, map(mr.data.make_example, examples))
    return shards


def batches_of(records: grain.IterDataset) -> grain.IterDataset:
    """Return global batches of (images, labels): images of shape [n, 8, 8, 1] in [0, 1]."""

    def parsed(examples: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        features = mr.data.parse_example(examples, FEATURES)
        return features["image"].astype(np.float32) / 16, features["label"]

    return records.batch(GLOBAL_BATCH_SIZE, batch_fn=list).map(parsed)


def shuffled(files: list[Path], epoch: int) -> grain.IterDataset:
    """Return the records of all files in an order of this epoch's own."""
    return grain.experimental.WindowShuffleIterDataset(mr.data.tfrecord_dataset(files), window_size=2048, seed=epoch)
