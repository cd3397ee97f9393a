"""The training that test_chaos.py kills: small, with a bit of everything whose state could get lost or be used twice.

It says what it is doing, on standard output, before it does it; and it records, in a file of each attempt, the rows that each of
its replicas has used in each step. Its last state is in a file too. Arguments: the folder, the numbers of rows and of epochs, and
the storage of what is the same on all replicas.
"""

import os
import time

WORKER, ATTEMPT = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["MIRRORED_ATTEMPT"])


def say(event: str, number: int = 0) -> None:
    """Write one line, in one call: no kill leaves half of it."""
    os.write(1, f"CHAOS {WORKER} {ATTEMPT} {event} {number} {time.monotonic():.6f}\n".encode())


say("START", os.getpid())  # before the imports, which take a second

import contextlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import compile_cache  # noqa: E402, F401
import grain  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import mirrored as mr  # noqa: E402

#: Neither 2, 3 nor 4 divides it.
BATCH_SIZE = 5
NUM_FEATURES = 6
#: A matrix of 6 x 7000 numbers is large enough to be in parts.
NUM_HIDDEN = 7000
#: So much of the rows is in each file.
FILE_PARTS = (13, 7, 21, 4, 9)


def make_rows(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    return {
        "id": np.arange(num_rows, dtype=np.int32),
        "x": rng.standard_normal((num_rows, NUM_FEATURES)).astype(np.float32),
        "y": rng.standard_normal(num_rows).astype(np.float32),
    }


def write_files(folder: Path, rows: dict[str, np.ndarray]) -> None:
    """Write the rows to TFRecord files of different lengths, each there whole or not at all."""
    folder.mkdir(exist_ok=True)
    examples = [mr.data.make_example({name: column[i] for name, column in rows.items()}) for i in range(len(rows["id"]))]
    ends = np.cumsum(FILE_PARTS) * len(examples) // sum(FILE_PARTS)
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        path = folder / f"{number}.tfrecord"
        if not path.exists():
            mr.data.write_tfrecords(str(path.with_suffix(".part")), examples[begin:end])
            path.with_suffix(".part").replace(path)


def batches_of_files(strategy: mr.Strategy, folder: Path, epoch: int) -> Iterator[dict[str, jax.Array]]:
    """Return the batches of an epoch; each worker reads files of its own."""
    files = mr.data.tfrecord_dataset(str(folder / "*.tfrecord"))
    records = grain.experimental.WindowShuffleIterDataset(files, window_size=8, seed=epoch).batch(BATCH_SIZE, batch_fn=list)
    features = {
        "id": mr.data.FixedLenFeature((), np.int32),
        "x": mr.data.FixedLenFeature((NUM_FEATURES,), np.float32),
        "y": mr.data.FixedLenFeature((), np.float32),
    }
    data = records.map(lambda batch: mr.data.parse_example(batch, features))
    return iter(strategy.distribute_dataset(data, mr.InputOptions(auto_shard_policy="file")))


class Training:
    """Two layers, dropout, Adam, statistics per replica, and the data: files with an iterator for each epoch."""

    def __init__(self, strategy: mr.Strategy, num_epochs: int, files: Path) -> None:
        rng = np.random.default_rng(0)
        self.strategy, self.files = strategy, files
        self.num_steps = num_epochs * sum(1 for _ in batches_of_files(strategy, files, 0))
        self.batches: dict[str, Any] = {"epoch": 0, "now": batches_of_files(strategy, files, 0)}
        self.hidden = mr.Variable(rng.standard_normal((NUM_FEATURES, NUM_HIDDEN)).astype(np.float32), name="hidden")
        self.out = mr.Variable(rng.standard_normal(NUM_HIDDEN).astype(np.float32), name="out")
        self.key = mr.Variable(jax.random.key(5), name="key")
        self.num_seen = mr.Variable(0, name="num_seen", synchronization="on_read", aggregation="sum")
        self.sum = mr.Variable(0.0, name="sum", synchronization="on_read", aggregation="sum")
        self.mean = mr.Variable(0.0, name="mean", synchronization="on_read", aggregation="mean")
        self.optimizer = mr.Optimizer(optax.adam(0.01), [self.hidden, self.out])
        self.losses = np.zeros(self.num_steps, np.float32)
        self.older = {"hidden": jnp.zeros((NUM_FEATURES, NUM_HIDDEN))}  # a step's array, as those of other libraries' models are
        self.state = {"step": 0, "sum_of_losses": 0.0}

    def saved(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("strategy", "files", "num_steps")}

    def go_on(self) -> None:
        """Let the restored position be one in the epoch that it is of: each has an order of its own."""
        position = self.batches["now"].get_state()
        self.batches["now"] = batches_of_files(self.strategy, self.files, self.batches["epoch"])
        self.batches["now"].set_state(position)

    def close(self) -> None:
        self.batches["now"].close()

    def train_step(self, batch: dict[str, jax.Array], older: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Take one step on one replica; return the rows that it used, the loss, and a mean of older weights."""
        say("COMPILE")  # while it is traced
        context = mr.get_replica_context()
        following, key = jax.random.split(self.key.value)
        self.key.assign(following)
        is_kept = jax.random.bernoulli(context.rng(key), 0.8, batch["x"].shape)

        def loss() -> tuple[jax.Array, jax.Array]:
            errors = (jnp.tanh((batch["x"] * is_kept) @ self.hidden) @ self.out - batch["y"]) ** 2
            return mr.losses.compute_average_loss(errors), jnp.sum(errors)

        (value, error), gradients = mr.value_and_grad(loss, [self.hidden, self.out], has_aux=True)()
        self.optimizer.apply_gradients(gradients)
        self.num_seen.assign_add(batch["id"].shape[0])
        self.sum.assign_add(error)
        self.mean.assign_add(context.all_reduce("sum", error))
        return batch["id"], context.all_reduce("sum", value), 0.9 * older + 0.1 * self.hidden.value

    def take_step(self, step: int) -> list[list[int]]:
        """Take a step; return the rows that each replica of this worker used."""
        say("READ", step)
        batch = next(self.batches["now"], None)
        if batch is None:
            self.batches["epoch"] += 1
            self.batches["now"] = batches_of_files(self.strategy, self.files, self.batches["epoch"])
            batch = next(self.batches["now"])
        say("RUN", step)
        used, loss, self.older["hidden"] = self.strategy.run(self.train_step, args=(batch, self.older["hidden"]))
        self.losses[step - 1] = loss
        self.state["step"], self.state["sum_of_losses"] = step, self.state["sum_of_losses"] + float(loss)
        return [np.asarray(rows).tolist() for rows in self.strategy.local_results(used)]

    def mirrored(self) -> dict[str, np.ndarray]:
        """Return all that is the same on every replica."""
        leaves = jax.tree.leaves(self.optimizer.state, is_leaf=lambda node: isinstance(node, mr.Variable))
        state = {f"optimizer{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        key = np.asarray(jax.random.key_data(self.key.value))
        numbers = np.array([self.state["step"], self.state["sum_of_losses"]])
        older = np.asarray(self.strategy.reduce("mean", self.older["hidden"]))
        return {"hidden": self.hidden.numpy(), "older": older, "out": self.out.numpy(), "key": key, **state} | {
            "losses": self.losses.copy(), "numbers": numbers,
        }  # fmt: skip

    def copies(self) -> dict[str, np.ndarray]:
        """Return what each replica of this worker has for itself."""
        variables = {"num_seen": self.num_seen, "sum": self.sum, "mean": self.mean}
        return {name: np.stack(list(map(np.asarray, self.strategy.local_results(v)))) for name, v in variables.items()}


def main() -> None:
    folder, num_rows, num_epochs, storage = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
    records = os.open(folder / f"rows-{ATTEMPT:03d}-{WORKER}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    files = folder / "files"
    if WORKER == 0:  # the others read them when all have met
        write_files(files, make_rows(np.random.default_rng(0), num_rows))
    say("MEET")
    strategy = mr.MultiWorkerMirroredStrategy(storage=storage)
    with strategy.scope():
        training = Training(strategy, num_epochs, files)
        checkpoint = mr.Checkpoint(folder / "checkpoints", max_to_keep=2, **training.saved())
    say("RESTORE")
    first = checkpoint.restore_latest() or 0
    training.go_on()
    say("RESTORED", first)
    with contextlib.closing(training), checkpoint, mr.PreemptionHandler(checkpoint) as preemption:
        for step in range(first + 1, training.num_steps + 1):
            os.write(records, (json.dumps([step, training.take_step(step)]) + "\n").encode())
            say("STEP", step)
            time.sleep(0.02)
            say("SAVE", step)
            checkpoint.save(step)
            if step % 2 == 0:
                say("COMMITTED", checkpoint.wait() or 0)
            preemption.after_step(step)
        say("END", training.num_steps)
        checkpoint.save(training.num_steps)
    result = folder / f"result-{WORKER}.npz"
    temporary = result.with_suffix(".tmp.npz")
    np.savez(temporary, **training.mirrored(), **training.copies())
    temporary.replace(result)
    say("DONE", training.num_steps)


if __name__ == "__main__":
    main()
