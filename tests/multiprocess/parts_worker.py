"""One worker of test_parts_workers.py: python parts_worker.py MODE STORAGE DIRECTORY; says what it found as JSON."""

import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from raised import error_of

import mirrored as mr

mode, storage, directory = sys.argv[1:]
found: dict[str, Any] = {}


def norms(tree: Any) -> list[float]:
    return [round(float(np.abs(np.asarray(leaf, np.float64)).sum()), 3) for leaf in jax.tree.leaves(tree)]


class Model:
    """Weights that the devices divide with and without padding, what an optimizer keeps of them, and an array of a step."""

    def __init__(self, strategy: mr.Strategy) -> None:
        w = np.random.default_rng(0).normal(size=(200, 257)).astype(np.float32) / 16
        self.params = mr.Variable(lambda: {"w": w, "b": np.zeros(257, np.float32)}, name="params")
        self.odd = mr.Variable(np.ones((201, 203), np.float32), name="odd")
        self.optimizer = mr.Optimizer(optax.adam(0.1), [self.params, self.odd])
        self.state = {"ema": np.zeros((200, 256), np.float32)}
        self.strategy = strategy

    def train(self, batches: list[np.ndarray]) -> list[float]:
        def loss(x: jax.Array) -> jax.Array:
            params = self.params.value
            return ((x @ params["w"] + params["b"]) ** 2).mean(-1) + (x[:, :1] * self.odd.value[0]).mean(-1)

        def step(x: jax.Array, ema: jax.Array) -> Any:
            own = self.optimizer.minimize(lambda: loss(x))
            return own, 0.5 * ema + self.params.value["w"][:, :256]

        losses = []
        for x in self.strategy.distribute_dataset(batches):
            own, self.state["ema"] = self.strategy.run(step, args=(x, self.state["ema"]))
            losses.append(float(self.strategy.reduce("sum", own)))
        return losses

    def values(self) -> list[float]:
        whole = self.strategy.reduce("mean", self.state["ema"])
        return norms([self.params.numpy(), self.odd.numpy(), self.optimizer.state, whole])


def run(strategy: mr.Strategy) -> None:
    with strategy.scope():
        model = Model(strategy)
        named = {"params": model.params, "odd": model.odd, "optimizer": model.optimizer, "state": model.state}
        checkpoint = mr.Checkpoint(directory, **named)
    found["step"] = checkpoint.restore_latest()
    found["shards"] = [
        list(v._slot.array.sharding.shard_shape(v._slot.array.shape)) for v in (model.params.variables["w"], model.odd)
    ]
    if mode == "save":
        batches = [np.random.default_rng(i).normal(size=(12, 200)).astype(np.float32) for i in range(3)]
        found["losses"] = model.train(batches)
        strategy.assert_mirrored()
        checkpoint.save(3)
    checkpoint.close()
    found["values"] = model.values()
    found["again"] = model.train([np.ones((12, 200), np.float32)])  # even on 3 and 4 devices


def refuse(strategy: mr.Strategy) -> None:
    """What works alone, and what workers do differently."""
    worker = strategy.cluster.worker_index if strategy.cluster else 0
    key = jax.random.key(worker)
    with strategy.scope():
        w = mr.Variable(np.zeros((256, 256), np.float32), name="w")
        found["repr"] = repr(w)[:90]
        found["seeds"] = error_of(lambda: mr.Variable(lambda: jax.random.normal(key, (256, 256)), name="s"))
        own = ("whole", "parts")[worker]
        found["words"] = error_of(lambda: mr.Variable(np.zeros((256, 256)), name="v", storage=own))
        found["made"] = error_of(lambda: mr.Variable(lambda: jnp.zeros((256, 256)), name="u", storage=own))


strategy = mr.MultiWorkerMirroredStrategy(storage=storage)
if mode == "save":
    own = ("whole", "parts")[int(os.environ["JAX_PROCESS_ID"])]
    found["differ"] = error_of(lambda: mr.MultiWorkerMirroredStrategy(storage=own))
{"save": run, "restore": run, "refuse": refuse}[mode](strategy)
print("FOUND" + json.dumps(found), flush=True)
