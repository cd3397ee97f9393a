"""A worker that trains and saves: folder=..., and other=FLAG, a flag of XLA that the last worker alone has."""

import logging
import os
import sys

import jax.numpy as jnp
import numpy as np

import mirrored as mr

given = dict(argument.split("=", 1) for argument in sys.argv[1:])
if int(os.environ["JAX_PROCESS_ID"]) == int(os.environ["JAX_NUM_PROCESSES"]) - 1:
    os.environ["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} {given['other']}"
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO, force=True)
for _ in range(2):  # of the second, nothing is said again
    strategy = mr.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = mr.Variable(np.linspace(0.1, 1.0, 10_000, dtype=np.float32), name="w")
    checkpoint = mr.Checkpoint(given["folder"], w=w)


def step() -> None:
    w.assign(jnp.exp(jnp.tanh(w.value)))


for _ in range(5):
    strategy.run(step)
checkpoint.save(1)
print("SAVED", flush=True)
