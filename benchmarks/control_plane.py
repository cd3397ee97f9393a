"""What do many workers cost worker 0, which hosts the coordination service?

The service is a real one, in a process with worker 0; the others are emulated: clients in threads of four processes, which run
the library's own exchanges, agreements on the input and rounds of the guard. Counted is what each worker sends, and measured the
processor time of worker 0's process. All of it stays on 127.0.0.1 and ends by itself.
"""

from __future__ import annotations

import collections
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from _harness import Row, parse, print_table
from jax._src.lib import _jax

from mirrored._workers.coordination import Coordination
from mirrored._workers.guard import Guard, seconds_of_round
from mirrored._workers.progress import Progress
from mirrored.data._sharing.agree import InputWorker
from mirrored.data._sharing.plan import SharingPlan
from mirrored.data._sharing.steps import LocalReplicas
from mirrored.data._sources.open import open_source

SIZES = (8, 32, 128, 512)
FORETOLD = (1024, 4096)
NUM_PROCESSES = 4
MAX_SECONDS = 240.0
NUM_BATCHES, NUM_SAVES, NUM_ROUNDS = 40, 10, 12
#: Goals: messages of a worker, whatever their number, and per cent of a core of worker 0 with 1,024 of them.
MAX_MESSAGES = {"DATA": 0, "FILE, OFF, functions": 1, "saving": 6}
MAX_SHARE = 10
MARK = "RESULT "


class CountingClient:
    """A client of the service that counts what it sends."""

    def __init__(self, client: Any, calls: collections.Counter[str]) -> None:
        self._client, self._calls = client, calls

    def __getattr__(self, name: str) -> Any:
        self._calls["all"] += 1
        return getattr(self._client, name)


class Worker:
    """One worker as the control plane sees it."""

    def __init__(self, address: str, worker: int, num_workers: int) -> None:
        self.client = _jax.get_distributed_runtime_client(address, worker, init_timeout=120, use_compression=True)
        self.client.connect()
        self.calls: collections.Counter[str] = collections.Counter()
        self.here = Coordination(CountingClient(self.client, self.calls), worker, num_workers)

    def barrier(self, name: str) -> None:
        """Wait for all, in a message that is not counted."""
        self.client.wait_at_barrier(name, 120_000)


def compare(worker: Worker) -> int:
    """Find all equal, as before each program that is new or not expected, with the copies of variables, and at a barrier."""
    for number in range(NUM_BATCHES):
        worker.here.exchange("agreement", ["train", number])
    return NUM_BATCHES


def differ(worker: Worker) -> int:
    """Give what differs by worker to all, which is rare."""
    for number in range(4):
        worker.here.exchange("values", [worker.here.worker, number])
    return 4


def read_same(worker: Worker) -> int:
    """Read batches of which each worker takes its rows (DATA): all of a long epoch but its first and its end."""
    return _read(worker, "DATA", is_noted=True, lookahead=1)


def read_own(worker: Worker) -> int:
    """Read batches of one's own (FILE, OFF, functions)."""
    return _read(worker, "OFF", is_noted=False, lookahead=4)


def _read(worker: Worker, kind: str, is_noted: bool, lookahead: int) -> int:
    own = InputWorker(worker.here.worker, worker.here.num_workers, coordination=worker.here).for_iterator(is_noted=is_noted)
    layout = LocalReplicas(worker.here.num_workers, own, lookahead=lookahead)
    batches = [np.zeros(worker.here.num_workers, np.float32)] * (NUM_BATCHES + 1)
    for number, _ in enumerate(SharingPlan(batches, kind, "").steps(open_source(batches), layout, {})):
        if number == 0:
            worker.calls.clear()  # what comes once in an epoch
        if number == NUM_BATCHES:
            break
    own.close()
    return NUM_BATCHES


def save(worker: Worker) -> int:
    """Say what `Checkpoint.save` says, with positions of own files."""
    for step in range(NUM_SAVES):
        worker.here.tell_chief("positions", {"data": {"rows": step, "worker": worker.here.worker}})
        worker.here.exchange("checkpoint", ["save", {"step": step, "digest": "d" * 32}, [str(step), "00000000"]])
        worker.here.for_chief("positions", {})
        worker.here.of_chief("checkpoint", {"latest": step, "failures": []})
        worker.here.exchange("copies", [[str(step), "00000000"], "d" * 32])
    return NUM_SAVES


def guard(worker: Worker) -> int:
    """Look after the job while it runs."""
    return _guard(worker, waits=False)


def guard_waiting(worker: Worker) -> int:
    """Look after the job while all wait in a slow step."""
    return _guard(worker, waits=True)


def _guard(worker: Worker, waits: bool) -> int:
    progress = Progress()
    looking = Guard(worker.here, progress, exit=lambda code: None)
    looking._neighbours._num_meetings = 21  # the others of the host have been met
    # The kernel's list of connections would be that of all workers of this process.
    looking._links.look = lambda step, elapsed: worker.here.by_worker("guard/links") and None
    progress.enter("train", b"train")
    for _ in range(NUM_ROUNDS):
        progress.finished = progress.started - waits
        looking._round(looking._round_seconds)
    return NUM_ROUNDS


#: What is measured, with the unit in which it is shown.
WORKS: dict[str, tuple[Callable[[Worker], int], str]] = {
    "all are equal": (compare, "comparison"),
    "values that differ": (differ, "exchange"),
    "DATA": (read_same, "batch"),
    "FILE, OFF, functions": (read_own, "batch"),
    "saving": (save, "save"),
    "guard": (guard, "round"),
    "guard, all wait": (guard_waiting, "round"),
}


def together(workers: list[Worker], work: Callable[[Worker], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(work, workers))


def emulate(num_workers: int, process: int, port: int) -> None:
    """Be some of the workers, and print how much each sends; process 0 is worker 0."""
    threading.Timer(MAX_SECONDS, os._exit, (1,)).start()
    address = f"127.0.0.1:{port}"
    service = None if process else _jax.get_distributed_runtime_service(address, num_workers)
    mine = [0] if not process else [w for w in range(1, num_workers) if (w - 1) % NUM_PROCESSES == process - 1]
    with ThreadPoolExecutor(len(mine)) as pool:
        workers = list(pool.map(lambda worker: Worker(address, worker, num_workers), mine))
    found: dict[str, Any] = {}
    for name, (work, _) in WORKS.items():
        together(workers, lambda worker, name=name: worker.barrier(f"before {name}"))
        for worker in workers:
            worker.calls.clear()
        begun = time.process_time()
        counts = together(workers, work)
        calls = [worker.calls["all"] / count for worker, count in zip(workers, counts, strict=True)]
        together(workers, lambda worker, name=name: worker.barrier(f"after {name}"))
        found[name] = [statistics.median(calls), 1e3 * (time.process_time() - begun) / counts[0]]
    print(MARK + json.dumps(found), flush=True)
    together(workers, lambda worker: worker.barrier("the end"))
    time.sleep(0.2 if service else 0.0)
    os._exit(0)


def measured(num_workers: int) -> dict[str, tuple[float, float, float]]:
    """Return by kind of work what one thing takes: messages of a worker and of worker 0, and ms of worker 0's processor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = [[sys.executable, __file__, f"--emulate={num_workers},{process},{port}"] for process in range(NUM_PROCESSES + 1)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        outputs = [process.communicate(timeout=MAX_SECONDS + 10)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    chief, other, *_ = (json.loads(output.partition(MARK)[2]) for output in outputs)
    return {name: (other[name][0], chief[name][0], chief[name][1]) for name in WORKS}


def fit(sizes: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Return a and b of a + b W, so that the relative errors are small."""
    weights = 1 / np.maximum(np.array(values), 1e-6)
    columns = np.stack([np.ones(len(sizes)), np.array(sizes, float)], 1)
    (a, b), *_ = np.linalg.lstsq(columns * weights[:, None], np.array(values) * weights)
    return float(a), float(b)


def main() -> None:
    options = parse(__doc__, emulate="", sizes=",".join(map(str, SIZES)))
    if options.emulate:
        emulate(*map(int, options.emulate.split(",")))
    sizes = [6, 12] if options.quick else [int(size) for size in options.sizes.split(",")]
    found = {size: measured(size) for size in sizes}
    rows: list[Row] = []
    for name, (_, unit) in WORKS.items():
        messages, of_chief, times = zip(*(found[size][name] for size in sizes), strict=True)
        a, b = fit(sizes, times)
        sent = ", ".join(f"{count:.1f}" for count in messages)
        rows.append(Row(f"{name}, a {unit}: messages of a worker", sent, messages, MAX_MESSAGES.get(name), "messages"))
        sent = ", ".join(f"{count:.1f}" for count in of_chief)
        rows.append(Row(f"{name}, a {unit}: messages of worker 0", sent, of_chief, unit="messages"))
        value = ", ".join(f"{time:.2f}" for time in times) + f" ms; {a:.2f} + {b:.3f} W"
        for size in FORETOLD:
            rows.append(Row(f"{name}, a {unit}, {size:,} workers: worker 0's processor", value, [a + b * size], unit="ms"))
            if unit == "round":
                share = 100 * (a + b * size) / 1e3 / seconds_of_round(size)
                goal = MAX_SHARE if size == FORETOLD[0] else None
                rows.append(Row(f"{name}, {size:,} workers: share of a core", value, [share], goal, "%"))
    print_table(f"the control plane with {', '.join(map(str, sizes))} workers, emulated; foretold by a fit", rows)


if __name__ == "__main__":
    main()
