"""The training workloads, in numpy only: every contender, of any framework, takes its numbers from here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

Arrays = dict[str, np.ndarray]
LEARNING_RATE = 1e-3
NUM_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its data, and Adam with optax's defaults.

    Attributes:
        name, what: for the command line and the table.
        batch: the global batch size; images have the shape `image`, labels are 0 to 9.
        parameters: makes the initial parameters.
        tokens: for a language model, how many different ones there are; `image` is the length of a sequence then.
    """

    name: str
    what: str
    batch: int
    image: tuple[int, ...]
    parameters: Callable[[], Arrays]
    tokens: int = 0

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(1)
        return [self._batch(rng) for _ in range(NUM_BATCHES)]

    def _batch(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        if self.tokens:
            text = rng.integers(0, self.tokens, (self.batch, self.image[0] + 1), np.int32)
            return text[:, :-1], text[:, 1:]
        return rng.standard_normal((self.batch, *self.image), np.float32), rng.integers(0, 10, self.batch, np.int32)


def _dense(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)


def _linear() -> Arrays:
    return {"w": _dense(np.random.default_rng(0), 784, 10), "b": np.zeros(10, np.float32)}


def mlp(width: int = 1024) -> Arrays:
    rng, arrays = np.random.default_rng(0), {}
    for i, (fan_in, fan_out) in enumerate([(784, width), (width, width), (width, 10)]):
        arrays |= {f"w{i}": _dense(rng, fan_in, fan_out), f"b{i}": np.zeros(fan_out, np.float32)}
    return arrays


def _conv() -> Arrays:
    rng, arrays = np.random.default_rng(0), {}
    for i, (fan_in, fan_out) in enumerate([(3, 32), (32, 64), (64, 64)]):
        arrays |= {f"w{i}": _dense(rng, 3, 3, fan_in, fan_out), f"b{i}": np.zeros(fan_out, np.float32)}
    return arrays | {"w": _dense(rng, 64, 10), "b": np.zeros(10, np.float32)}


#: Of the transformer: tokens, length of a sequence, width, heads, layers, width of the feed-forward part. 2.7 million parameters.
TOKENS, LENGTH, WIDTH, HEADS, LAYERS, INNER = 2048, 64, 256, 8, 2, 1024


def transformer(num_layers: int = LAYERS) -> Arrays:
    rng = np.random.default_rng(0)
    arrays = {"embedding": _dense(rng, TOKENS, WIDTH), "position": _dense(rng, LENGTH, WIDTH), "w": _dense(rng, WIDTH, TOKENS)}
    for i in range(num_layers):
        arrays |= {f"scale{i}{k}": np.ones(WIDTH, np.float32) for k in "ab"}
        arrays |= {f"{name}{i}": _dense(rng, WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
        arrays |= {f"up{i}": _dense(rng, WIDTH, INNER), f"down{i}": _dense(rng, INNER, WIDTH)}
    return arrays


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "linear model of seed 001, batch 64", 64, (784,), _linear),
        Workload("W2", "MLP 784-1024-1024-10, batch 256", 256, (784,), mlp),
        Workload("W3", "three convolutions on 32 x 32 images, batch 64", 64, (32, 32, 3), _conv),
        Workload("W4", "transformer of 2 layers on 64 tokens, batch 16", 16, (LENGTH,), transformer, TOKENS),
    )
}
