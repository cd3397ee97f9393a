"""Train a little with the installed package: what must work wherever it is installed."""

import importlib.metadata
import os
import pathlib
import sys

import numpy as np
import optax

import mirrored as mr

folder = pathlib.Path(mr.__file__).parent
assert "site-packages" in folder.parts, f"{folder} is no installed package"
assert importlib.metadata.version("mirrored") == mr.__version__
assert (folder / "py.typed").exists()
assert not {"orbax", "grain", "keras", "flax"} & {name.partition(".")[0] for name in sys.modules}

is_launched = "JAX_COORDINATOR_ADDRESS" in os.environ
strategy = mr.MultiWorkerMirroredStrategy() if is_launched else mr.MirroredStrategy(["cpu:0", "cpu:1"])
assert strategy.num_replicas_in_sync == 2
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 3)).astype("float32")
y = x @ np.array([1.0, -2.0, 3.0], "float32")
with strategy.scope():
    w = mr.Variable(np.zeros(3, "float32"), name="w")
    optimizer = mr.Optimizer(optax.sgd(0.1), [w])


def train_step(x, y):
    loss, gradients = mr.value_and_grad(lambda: mr.losses.compute_average_loss((x @ w - y) ** 2), [w])()
    optimizer.apply_gradients(gradients)
    return loss


batches = strategy.distribute_dataset(strategy.make_numpy_dataset((x, y)).batch(15))
losses = [float(strategy.reduce("sum", strategy.run(train_step, args=batch))) for _ in range(10) for batch in batches]
assert losses[-1] < 1e-3 * losses[0], losses
strategy.assert_mirrored()
assert mr.report(strategy, "report.html") if strategy.is_chief else mr.report(strategy) is None
print(f"mirrored {mr.__version__}: loss {losses[0]:.3f} -> {losses[-1]:.6f}")
