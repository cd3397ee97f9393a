"""A worker that starts a job, and says what it is; the first argument says in which way."""

import os
import sys
import time

import jax
from jax.extend.backend import register_backend_factory

import mirrored as mr

way = sys.argv[1]
options = mr.CommunicationOptions(timeout_seconds=float(sys.argv[2]))
if way == "different devices":
    jax.config.update("jax_num_cpu_devices", 1 + int(os.environ["JAX_PROCESS_ID"]))
if way == "own jax.distributed":
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
    )
if way == "gone after the meeting":
    connect = jax.distributed.initialize
    jax.distributed.initialize = lambda **given: os._exit(9) if given["process_id"] == 1 else connect(**given)
if way == "devices stuck" and os.environ["JAX_PROCESS_ID"] == "1":
    jax.local_devices = lambda **_: time.sleep(1000)
if way.startswith("accelerator") and os.environ["JAX_PROCESS_ID"] == "1":

    def start() -> None:
        if way == "accelerator hangs":
            time.sleep(1000)
        raise RuntimeError("the card has fallen off the bus")

    jax.config.update("jax_platforms", None)  # the tests' workers have the CPU alone
    register_backend_factory("broken", start, priority=500, fail_quietly=False)
strategy = mr.MultiWorkerMirroredStrategy(communication_options=options)
again = mr.MultiWorkerMirroredStrategy()
assert again.devices == strategy.devices
with strategy.scope():
    number = mr.Variable(1.0)
strategy.run(lambda: number.assign(mr.get_replica_context().all_reduce("sum", number.value)))
print("STARTED", strategy.num_workers, strategy.num_replicas_in_sync, strategy.is_chief, float(number), flush=True)
with mr.MirroredStrategy().scope():  # this worker's own devices
    assert float(mr.Variable(float(strategy.is_chief))) == strategy.is_chief
