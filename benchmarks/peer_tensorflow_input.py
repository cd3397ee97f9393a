"""The input pipeline with tf.data as its guide recommends: interleaved shards, whole batches parsed, everything automatic."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _peers

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf

BATCH, PIXELS = 256, 784
FEATURES = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}


def decode(examples: Any) -> tuple[Any, Any]:
    parsed = tf.io.parse_example(examples, FEATURES)
    pixels = tf.io.decode_raw(parsed["image"], tf.uint8, fixed_length=PIXELS)
    return tf.cast(pixels, tf.float32) / 255.0, tf.cast(parsed["label"], tf.int32)


def main(folder: str, num_replicas: int, how: str) -> None:
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_replicas)
    files = sorted(str(path) for path in Path(folder).glob("*.tfrecord"))
    dataset = tf.data.Dataset.from_tensor_slices(files).repeat()
    auto = tf.data.AUTOTUNE
    dataset = dataset.interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=auto, deterministic=True)
    dataset = dataset.batch(BATCH, drop_remainder=True).map(decode, num_parallel_calls=auto).prefetch(auto)
    iterator = iter(dataset) if how == "alone" else distributed(dataset, num_replicas)

    def run(num_batches: int) -> float:
        for _ in range(num_batches):
            images, _labels = next(iterator)
        return float((images if how == "alone" else images.values[0])[0, 0])

    _peers.serve(run)


def distributed(dataset: Any, num_replicas: int) -> Iterator[Any]:
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
    return iter(strategy.experimental_distribute_dataset(dataset))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
