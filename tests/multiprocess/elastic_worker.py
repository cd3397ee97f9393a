"""One training, whoever starts it, with however many workers: it says each step, saves every third, and goes on from the last.

Arguments: the folder; the scheduler whose variables the worker is to find (torchrun or slurm; found: those that are there); the
seconds between steps; the number of epochs.
"""

import os
import sys
import time
from pathlib import Path


def started_by(scheduler: str) -> dict[str, str]:
    """Return the variables with which a scheduler starts this worker."""
    port = os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2]
    index, num_workers = os.environ["JAX_PROCESS_ID"], os.environ["JAX_NUM_PROCESSES"]
    if scheduler == "torchrun":
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return address | {"RANK": index, "WORLD_SIZE": num_workers, "LOCAL_RANK": index, "LOCAL_WORLD_SIZE": num_workers}
    step = {"SLURM_JOB_ID": port, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": num_workers}
    return step | {"SLURM_STEP_TASKS_PER_NODE": num_workers, "SLURM_PROCID": index, "SLURM_NODEID": "0"}


FOLDER, SCHEDULER, PAUSE, NUM_EPOCHS = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
if SCHEDULER != "found":
    variables = started_by(SCHEDULER)
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        del os.environ[name]
    os.environ.update(variables)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import mirrored as mr  # noqa: E402

NUM_ROWS, BATCH_SIZE = 29, 8


def main() -> None:
    rng = np.random.default_rng(0)
    x, ids = rng.normal(size=(NUM_ROWS, 5)).astype(np.float32), np.arange(NUM_ROWS)
    strategy = mr.MultiWorkerMirroredStrategy()
    with strategy.scope():
        first = mr.Variable(rng.normal(size=(5, 8)).astype(np.float32), name="first")
        last = mr.Variable(rng.normal(size=8).astype(np.float32), name="last")
        optimizer = mr.Optimizer(optax.adam(1e-2), [first, last])
    data = strategy.make_numpy_dataset((x, np.tanh(x[:, 0]), ids)).shuffle(seed=1).batch(BATCH_SIZE).repeat(NUM_EPOCHS)
    batches = iter(strategy.distribute_dataset(data))
    checkpoint = mr.Checkpoint(FOLDER / "checkpoints", first=first, last=last, optimizer=optimizer, batches=batches)

    def train_step(x: jax.Array, y: jax.Array) -> jax.Array:
        return optimizer.minimize(lambda: (jnp.tanh(x @ first) @ last - y) ** 2)

    step = checkpoint.restore_latest() or 0
    with batches, checkpoint, mr.PreemptionHandler(checkpoint) as preemption:
        for x, y, rows in batches:
            loss = float(strategy.reduce("sum", strategy.run(train_step, args=(x, y))))
            step += 1
            used = ",".join(map(str, np.asarray(strategy.gather(rows, axis=0))))
            print("STEP", step, f"{loss:.9g}", used, f"{strategy.num_workers} workers", flush=True)
            if step % 3 == 0:
                checkpoint.save(step)
            preemption.after_step(step)
            time.sleep(PAUSE)
    strategy.assert_mirrored()
    print("DONE", flush=True)


main()
