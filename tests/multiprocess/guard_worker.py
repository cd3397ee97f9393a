"""A worker of a small job on raw jax.distributed, with a guard; the first argument says what goes wrong: docs/design/failures.md.

Arguments: KIND@STEP:WORKER or "none"; number of steps; seconds of the stall limit, 0 for the default.
"""

import atexit
import logging
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mirrored._workers.coordination import Coordination
from mirrored._workers.guard import Guard
from mirrored._workers.progress import progress
from mirrored._workers.same_program import Agreement

WORKER, NUM_WORKERS = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])


def start(stall_seconds: float | None) -> tuple[Coordination, Guard]:
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=os.environ["JAX_COORDINATOR_ADDRESS"],
        num_processes=NUM_WORKERS,
        process_id=WORKER,
        cluster_detection_method="deactivate",
        coordinator_bind_address=os.environ["JAX_COORDINATOR_ADDRESS"],
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=30,
    )
    coordination = Coordination(distributed.global_state.client, WORKER, NUM_WORKERS)
    guard = Guard(coordination, progress, stall_seconds=stall_seconds)
    guard.start()
    atexit.register(guard.stop)
    return coordination, guard


class Job:
    """One program that all workers take part in, and where to put its data."""

    def __init__(self, agreement: Agreement) -> None:
        mesh = Mesh(np.array(jax.devices()), ("replica",))
        self.split, self.whole = NamedSharding(mesh, PartitionSpec("replica")), NamedSharding(mesh, PartitionSpec())
        self._agreement = agreement
        self._programs: dict[str, object] = {}

    def run(self, name: str, function, rows: int = 4, dtype: type = np.float32) -> float:
        """Run a program on ones, one row for each device, and return its one number."""
        local = np.ones((len(jax.local_devices()), rows), dtype)
        argument = jax.make_array_from_process_local_data(self.split, local)
        if name not in self._programs:
            program = jax.jit(function, out_shardings=self.whole)
            self._agreement.check(name, program.lower(argument).as_text())
            with progress.phase(f"compiling {name!r}", is_patient=True):
                self._programs[name] = program.lower(argument).compile()
        program = self._programs[name]
        progress.enter(name, name.encode())
        progress.witness = result = program(argument)
        return float(result.addressable_data(0))


#: The new programs of worker 1, and those of all others, for each kind of difference.
DIFFERENT = {
    "shape": ([("evaluate", jnp.sum, 5, np.float32)], [("evaluate", jnp.sum, 4, np.float32)]),
    "dtype": ([("evaluate", jnp.sum, 4, np.int32)], [("evaluate", jnp.sum, 4, np.float32)]),
    "operation": ([("evaluate", jnp.max, 4, np.float32)], [("evaluate", jnp.sum, 4, np.float32)]),
    "order": ([("a", jnp.max), ("b", jnp.min)], [("b", jnp.min), ("a", jnp.max)]),
    "additional": ([("extra", jnp.min), ("evaluate", jnp.max)], [("evaluate", jnp.max)]),
}


def fail(kind: str, job: Job) -> None:
    """Do what goes wrong; what comes back goes on with the step."""
    print(f"FAULT {kind} {time.time():.3f}", flush=True)
    if kind in ("ValueError", "MemoryError", "KeyboardInterrupt"):
        raise {"ValueError": ValueError, "MemoryError": MemoryError, "KeyboardInterrupt": KeyboardInterrupt}[kind](
            "injected\x1b[2J"
        )
    elif kind.startswith("sys.exit"):
        sys.exit(int(kind.removeprefix("sys.exit")))
    elif kind == "SystemExit":
        raise SystemExit(3)
    elif kind == "os._exit":
        os._exit(9)
    elif kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(1000)
    elif kind == "slow_compile":
        with progress.phase("compiling 'large'", is_patient=True):
            time.sleep(5)
    elif kind == "extra":
        job.run("evaluate", jnp.max)
    elif kind in DIFFERENT:
        for program in DIFFERENT[kind][0 if WORKER == 1 else 1]:
            print("RAN", job.run(*program), flush=True)
    elif kind == "shutdown":
        jax.distributed.shutdown()
        sys.exit(0)


def main() -> None:
    fault, num_steps, stall_seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    logging.basicConfig(format="%(levelname)s %(message)s")
    coordination, _ = start(stall_seconds or None)
    job = Job(Agreement(coordination))
    kind, _, where = fault.partition("@")
    faulty_step, _, faulty_worker = where.partition(":")
    for step in range(num_steps):
        if where and step == int(faulty_step) and faulty_worker in (str(WORKER), "all"):
            if kind == "return":
                print(f"FAULT {kind} {time.time():.3f}", flush=True)
                return
            fail(kind, job)
        assert job.run("train", jnp.sum) == 4 * len(jax.devices())
        if step == 2:
            print(f"STEP {step}", flush=True)
        time.sleep(0.01)
    print("END", flush=True)


main()
