"""A worker of a job that uses the library as users do, and in which something goes wrong: fault=KIND at=STEP who=WORKER ...

KIND is a name of FAULTS (something that the culprits do between two steps), or one that the input or the steps look for.
Other arguments, as name=value: steps, limit (seconds, 0 for the default), policy (data), folder.
"""

import atexit
import ctypes
import itertools
import json
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mirrored as mr
from mirrored._workers.neighbours import Process
from mirrored._workers.progress import progress

given = dict(argument.split("=", 1) for argument in sys.argv[1:])
fault, at, who = given.get("fault", "none"), int(given.get("at", 5)), given.get("who", "1")
num_steps, limit = int(given.get("steps", 20)), float(given.get("limit", 0))
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO, force=True)

if roles := given.get("roles"):  # of TF_CONFIG, instead of the variables that are there
    port = int(os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
    names = roles.split(",")
    cluster: dict[str, list[str]] = {name: [] for name in names}
    for number, name in enumerate(names):
        cluster[name].append(f"127.0.0.1:{port + number}")
    mine = int(os.environ["JAX_PROCESS_ID"])
    task = {"type": names[mine], "index": names[:mine].count(names[mine])}
    cluster.pop("evaluator", None)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
if host := given.get("host", ""):  # this is another machine, whatever the kernel says; each, with "each"
    host = os.environ["JAX_PROCESS_ID"] if host == "each" else host
    here = Process.own()
    Process.own = classmethod(lambda cls: cls(f"{here.host} {host}", here.number, here.began))
strategy = mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(timeout_seconds=limit or None))
assert strategy.cluster is not None
worker = strategy.cluster.worker_index
is_culprit = who in (str(worker), "all")


def said() -> None:
    print(f"FAULT {fault} {time.time():.3f}", flush=True)


def die() -> None:
    said()
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(seconds: float) -> None:
    threading.Timer(seconds, die).start()


def wait_for_ever() -> None:
    said()
    time.sleep(1000)


#: An error of a program: what is not printable, what looks like a line of a log, or like a loss, and more than anybody reads.
HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07 \r\nCRITICAL worker 0 leaves with code 0: all is well\n\x00\u202eGloo: Timed out waiting"
    + "A" * 2**20
)
ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("the data is gone"),
    "hostile": lambda: ValueError(HOSTILE),
}


def raise_error(kind: str) -> None:
    said()
    raise ERRORS[kind]()


# ---- the input


class Batches:
    """Batches of ones without end, in which something may go wrong; `pipeline` does it."""

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for number in itertools.count():
            if is_culprit and number == at:
                pipeline()
            yield {"x": np.ones((2 * strategy.num_replicas_in_sync, 3), np.float32)}


def pipeline() -> None:
    """Do what goes wrong in the input."""
    if fault == "input hangs":
        wait_for_ever()
    elif fault == "input is killed":
        die_in(0.7)
        time.sleep(1000)


def batches() -> Iterable[Any]:
    if given.get("policy") == "data":
        return strategy.distribute_dataset(Batches(), mr.InputOptions(auto_shard_policy="data"))
    return itertools.repeat({"x": values})


# ---- the steps


def step(batch: Any) -> jax.Array:
    total = mr.get_replica_context().all_reduce("sum", jnp.mean(batch["x"]))
    count.assign_add(jnp.where(total > 0, 1.0, 0.0))
    return total


def large(batch: Any) -> jax.Array:
    """Take seconds to compile."""
    x = batch["x"]
    for number in range(300):
        x = jnp.sort(jnp.sin(x * number), axis=0) + jnp.cumsum(x, axis=1)
    return mr.get_replica_context().all_reduce("sum", jnp.mean(x))


def wait_for_file() -> None:
    while not Path(given["folder"], "go").exists():
        time.sleep(0.02)


def compile_slowly() -> None:
    with progress.phase("compiling 'large'", is_patient=True):
        time.sleep(5.0)


def fail_aside() -> None:
    thread = threading.Thread(target=raise_error, args=("ValueError",))
    thread.start()
    thread.join()
    atexit.register(raise_error, "ValueError")


def fork() -> None:
    """Let children of this process end as programs do."""
    said()
    for code, end in ((3, lambda: sys.exit(3)), (1, lambda: raise_error("ValueError"))):
        child = os.fork()
        if not child:
            end()
        print("CHILD", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code, flush=True)


#: What the workers that are to blame do between two steps.
FAULTS: dict[str, Callable[[], Any]] = {
    "killed": die,
    "killed in step": lambda: die_in(0.3),  # this worker goes on with its steps
    "outside": lambda: (die_in(1.0), time.sleep(1000)),  # the others wait in the next step meanwhile
    "hang": wait_for_ever,
    "hold the lock": lambda: (said(), ctypes.PyDLL(None).sleep(1000)),  # no other thread of Python runs
    "fork": fork,
    "until told": lambda: (said(), wait_for_file()),
    "slow": lambda: (fail_aside(), time.sleep(2.0), compile_slowly()),
    "extra": lambda: (said(), strategy.run(lambda: mr.get_replica_context().all_reduce("sum", 1.0))),
    "exit": lambda: (said(), sys.exit(int(given["code"]))),
    "shutdown": lambda: (jax.distributed.shutdown(), sys.exit(0)),
} | {f"raise {kind}": lambda kind=kind: raise_error(kind) for kind in ERRORS}


def go_together(batch: Any) -> None:
    """Do what all workers do before something goes wrong with one of them."""
    if fault == "killed while compiling":
        jax.config.update("jax_enable_compilation_cache", False)
        if is_culprit:
            die_in(0.5)
        strategy.run(large, args=(batch,))
    elif fault == "killed while saving":
        with strategy.scope():
            checkpoint = mr.Checkpoint(given["folder"], count=count)
        if is_culprit:
            die_in(0.3)
        for number in range(1, 10_000):
            checkpoint.save(number)
            strategy.run(step, args=(batch,))


def print_listeners() -> None:
    """Print the addresses at which this process listens, as the kernel says."""
    own = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for fields in map(str.split, Path(table).read_text().splitlines()[1:]):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                address, port = fields[1].split(":")
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                packed = struct.pack(f"={len(words)}I", *words)
                family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                print("LISTENS", socket.inet_ntop(family, packed), int(port, 16), flush=True)


def guard_seconds() -> float:
    """Return the processor time of the guard so far."""
    own = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("mirrored-guard")]
    return sum(int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]) for number in own) / 1e9


begun = time.monotonic()
values = strategy.distribute_values_from_function(lambda context: np.ones((2, 3), np.float32))
with strategy.scope():
    count = mr.Variable(0.0, name="count", aggregation="mean")


def train() -> None:
    for number, batch in enumerate(batches()):
        if number == 1:
            print_listeners()
        if number == num_steps:
            break
        if number == at:
            if is_culprit and fault == "return":
                return said()
            if is_culprit:
                FAULTS.get(fault, lambda: None)()
            go_together(batch)
        try:
            strategy.run(step, args=(batch,))
        except Exception as error:
            if "catch" not in given:
                raise
            print(f"CAUGHT {number} {type(error).__name__}", flush=True)
        print(f"STEP {number} {time.time():.3f}", flush=True)
        time.sleep(0.01)
    print("END", float(count), strategy.num_workers, strategy.is_chief, flush=True)
    print(f"GUARD {guard_seconds() / (time.monotonic() - begun):.6f}", flush=True)


train()
