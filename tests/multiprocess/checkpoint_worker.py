"""One worker of test_checkpoint_workers.py: python checkpoint_worker.py MODE DIRECTORY [...]; says what it found as JSON."""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flips import flip
from raised import error_of

import mirrored as mr
from mirrored._checkpoint import files, sole_writer
from mirrored._checkpoint.checkpoint import Checkpoint
from mirrored._checkpoint.preemption import PreemptionHandler

strategy = mr.MultiWorkerMirroredStrategy()
worker = strategy.cluster.worker_index if strategy.cluster is not None else 0
found: dict[str, Any] = {}


class Model:
    """A bit of everything."""

    def __init__(self) -> None:
        self.w = mr.Variable(np.zeros(4, np.float32), name="w")
        self.seen = mr.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
        self.mean = mr.Variable(0.0, name="mean", synchronization="on_read", aggregation="mean")
        self.key = mr.Variable(jax.random.key(0), name="key")
        self.optimizer = mr.Optimizer(optax.adam(0.1), [self.w], aggregate="sum")
        rows = strategy.make_numpy_dataset(np.arange(40, dtype=np.int32)).batch(4)
        self.data = iter(strategy.distribute_dataset(rows))
        self.state = {"epoch": 0, "ema": jnp.zeros(2)}

    def named(self) -> dict[str, Any]:
        return dict(vars(self))

    def step(self) -> list[int]:
        batch = next(self.data)

        def step(x: jax.Array) -> None:
            _, gradients = mr.value_and_grad(lambda: jnp.sum(self.w * jnp.sum(x)), [self.w])()
            self.optimizer.apply_gradients(gradients)
            self.seen.assign_add(x.shape[0])
            total = jnp.sum(x).astype(jnp.float32)
            self.mean.assign(mr.get_replica_context().all_reduce("mean", total, by_rows=False))

        strategy.run(step, args=(batch,))
        self.state["epoch"] += 1
        self.state["ema"] += 1.0
        return [int(row) for row in strategy.gather(batch, axis=0)]

    def values(self) -> dict[str, Any]:
        local = [np.asarray(x).tolist() for x in strategy.local_results(self.mean)]
        return {
            "w": self.w.numpy().tolist(), "seen": int(self.seen), "mean": float(self.mean), "local": local,
            "key": jax.random.key_data(self.key.value).tolist(), "mu": self.optimizer.state[0].mu[0].numpy().tolist(),
            "epoch": self.state["epoch"], "ema": self.state["ema"].tolist(),
        }  # fmt: skip


def save(directory: Path) -> None:
    """Take three steps, save, take another one, go back: the same again."""
    with strategy.scope():
        model = Model()
        with Checkpoint(directory, **model.named()) as checkpoint:
            rows = [model.step() for _ in range(3)]
            found["values"], found["rows"] = model.values(), [row for batch in rows for row in batch]
            checkpoint.save(3)
            found["next"] = model.step()
            assert checkpoint.wait() == 3
            assert checkpoint.restore_latest() == 3
            found["again"] = model.values()
            assert model.step() == found["next"]
            checkpoint.save(5)
        found["steps"] = checkpoint.steps()
        model.data.close()


def restore(directory: Path) -> None:
    """Restore and go on to the end of the data."""
    with strategy.scope():
        model = Model()
        with Checkpoint(directory, **model.named()) as checkpoint:
            found["step"] = checkpoint.restore_latest()
            found["values"] = model.values()
            found["rows"] = []
            try:
                while True:
                    found["rows"] += model.step()
            except StopIteration:
                pass
        model.data.close()


def refuse(directory: Path) -> None:
    """What must fail fails on all workers, and the next thing works."""
    with strategy.scope():
        w, extra = mr.Variable(np.ones(4, np.float32), name="w"), mr.Variable(0.0, name="extra")
    with mr.OneDeviceStrategy().scope():
        found["outside"] = error_of(lambda: Checkpoint(directory, w=w))
    found["without"] = Checkpoint(directory, w=w).steps()
    with strategy.scope():
        own = Checkpoint(directory / f"own{worker}", w=w)
        checkpoint = Checkpoint(directory / "shared", max_failed_saves=2, w=w)
        other = Checkpoint(directory / "other", w=w, **({"extra": extra} if worker else {}))
    found["kinds"] = error_of(lambda: other.save(1))
    found["steps"] = error_of(lambda: checkpoint.save(1 + worker))
    good = w._array
    if worker == 1:
        flip(w, word=1)
    found["diverged"] = error_of(lambda: checkpoint.save(1))
    w._array = good
    found["written"] = sorted(path.name for path in (directory / "shared").glob("[!.]*"))
    checkpoint.save(1)
    found["saved"] = checkpoint.wait()

    files._SEEN_SECONDS = 0.5
    found["apart"] = [error_of(lambda: own.save(1)), error_of(own.restore_latest)]
    found["own_written"] = sorted(path.name for path in (directory / f"own{worker}").glob("*"))
    own._is_shared = True  # as where worker 0 must not write
    own.save(1)
    found["own"] = error_of(own.restore_latest)
    found["marks"] = sorted(path.name for path in directory.rglob(".shared-*"))

    sole_writer._HERE_SECONDS = 0.0
    with strategy.scope():
        busy = Checkpoint(directory / "busy", w=w)
    (directory / "busy").mkdir(exist_ok=True)
    with open(directory / "busy" / sole_writer.LOCK, "w") as of_another_program:
        if worker == 0:
            fcntl.flock(of_another_program, fcntl.LOCK_EX)
        strategy.barrier("busy")
        found["busy"] = error_of(lambda: busy.save(1))
    busy.save(1)
    found["free"] = busy.wait()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    files._synced = full
    found["full"] = [error_of(lambda step=step: checkpoint.save(step)) for step in (7, 8, 9)]


def preempt(directory: Path, victim: str, at: str, last: str) -> None:
    """Train to step `last`; worker `victim` gets SIGTERM in step `at` of the first start."""
    with strategy.scope():
        w = mr.Variable(np.zeros((), np.float32), name="w")
        checkpoint = Checkpoint(directory, w=w)
    step = first = checkpoint.restore_latest() or 0
    print("FIRST", first, flush=True)
    with checkpoint, PreemptionHandler(checkpoint) as handler:
        while step < int(last):
            step += 1
            strategy.run(lambda: [w.assign_add(1.0), None][1])
            if first == 0 and step == int(at) and str(worker) == victim:
                print("SENT", time.time(), flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
            print("STEP", step, flush=True)
            handler.after_step(step)
    print("DONE", step, float(w), flush=True)


def end(directory: Path, is_interrupted: str) -> None:
    """End with a save under way, which takes a second; Ctrl-C may come to worker 0 meanwhile."""
    with strategy.scope():
        checkpoint = Checkpoint(directory, w=mr.Variable(np.zeros(100, np.float32), name="w"))
    write = files.StepFiles.write

    def written(*args: Any) -> Any:
        time.sleep(0.5)
        if is_interrupted == "yes":
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        return write(*args)

    files.StepFiles.write = written
    checkpoint.save(1)


if __name__ == "__main__":
    mode, directory, *rest = sys.argv[1:]
    {"save": save, "restore": restore, "refuse": refuse, "preempt": preempt, "end": end}[mode](Path(directory), *rest)
    print("FOUND" + json.dumps(found), flush=True)
