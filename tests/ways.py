"""Through which of our files a call passes, and with how many calls; as a program: calls of the first run of a training step.

Its arguments are numbers of rows of a batch, for each of which it prints the calls in that order.
"""

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored as mr

PACKAGE = Path(mr.__file__).parent


def way(step: Callable[[], object]) -> tuple[set[str], int]:
    """Return the files of ours that a call passes through, and the number of calls of named functions in them.

    A generator expression is no named function: it would count once for each element. Nor is what 3.14 makes of annotations.
    """
    files, calls = set(), 0

    thread = threading.get_ident()

    def count(code: CodeType, *_: object) -> object:
        nonlocal calls
        if not code.co_filename.startswith(str(PACKAGE)):
            return sys.monitoring.DISABLE  # JAX's functions are called without us from now on
        if threading.get_ident() == thread:
            files.add(Path(code.co_filename).relative_to(PACKAGE).with_suffix("").as_posix())
            calls += not code.co_name.endswith(("<genexpr>", "__annotate__"))
        return None

    tool, watch, events = 3, sys.monitoring, sys.monitoring.events  # Python names no tool of this number
    gc.collect()
    gc.disable()  # variables of other tests would end in between
    watch.use_tool_id(tool, "way")
    try:
        for event in (events.PY_START, events.PY_RESUME):
            watch.register_callback(tool, event, count)
        watch.set_events(tool, events.PY_START | events.PY_RESUME)
        step()
    finally:
        watch.set_events(tool, events.NO_EVENTS)
        watch.free_tool_id(tool)
        gc.enable()
    return files, calls


def first_run(rows: int, num_replicas: int, transformation: optax.GradientTransformation) -> tuple[set[str], int]:
    """Return the way of the first run of a small training step."""
    strategy = mr.MirroredStrategy([f"cpu:{number}" for number in range(num_replicas)])
    with strategy.scope():
        weights = [mr.Variable(np.ones((5, 3), np.float32)), mr.Variable(np.ones(3, np.float32))]
        optimizer = mr.Optimizer(transformation, weights)

    def step(x: jax.Array) -> jax.Array:
        w, b = weights
        loss = lambda: mr.losses.compute_average_loss(jnp.sum((x @ w + b) ** 2, axis=-1))  # noqa: E731
        value, gradients = mr.value_and_grad(loss, weights)()
        optimizer.apply_gradients(gradients)
        return value

    [batch] = strategy.distribute_dataset([np.ones((rows, 5), np.float32)])
    return way(lambda: strategy.run(step, args=(batch,)))


if __name__ == "__main__":
    print(*(first_run(int(rows), 3, optax.adam(0.1))[1] for rows in sys.argv[1:]))
