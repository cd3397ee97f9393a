"""What does a step of several workers cost, next to the same step written by hand with `jax.distributed`?

Both run in the same processes, so over the same gloo connections, and take turns. The guard, which looks after the workers in
threads of its own, slows both; so everything is measured again without it. Workers and replicas share this machine's cores.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from _harness import Contender, Row, check_losses, interleave, parse, print_table, show_seconds

#: By workload: at most so many times the step by hand. W1 takes a millisecond or two, W2 20 ms on an idle machine.
GOALS = {"W1": 1.15, "W2": 1.05}
#: The same with batches of rows in host memory, which travel to the devices in each step.
INPUT_GOAL = 1.1
#: Of an epoch; the workers agree on its end.
BATCHES = 1000
ROUNDS, TURN = 15, 0.5
START_ROUNDS = 5
#: Until the first worker is started: at most so many times a Python that imports what any launcher needs.
LAUNCHER_GOAL = 3.0
#: Ends at the first process that Python starts.
LAUNCHERS = {
    name: f"import os, sys; sys.addaudithook(lambda e, _: os._exit(0) if e == 'subprocess.Popen' else None)\n{code}"
    for name, code in {
        "by hand": "import argparse, select, socket, subprocess; subprocess.Popen(['true'])",
        "mirrored": "from mirrored.launch import main; main(['launch', '-n', '2', sys.argv[1]])",
    }.items()
}
MARK = "RESULT "

#: With the guard, without it, and with an input.
WAYS = ((1, 0), (0, 0), (1, 1))


def main() -> None:
    options = parse(__doc__, job="", rounds=ROUNDS, turn=TURN, guard=1, fresh=0)
    if options.job:
        print(MARK + json.dumps(JOBS[options.job](options)), flush=True)
        return
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    for num_workers, devices in ((2, 1),) if options.quick else ((2, 1), (2, 2), (4, 1)):
        rows = []
        for name, (guard, fresh) in itertools.product(["W1"] if options.quick else GOALS, WAYS[: 2 if options.quick else None]):
            more = [f"--job={name}", f"--rounds={rounds}", f"--turn={turn}", f"--guard={guard}", f"--fresh={fresh}"]
            found = launched(num_workers, devices, *more)
            goal = INPUT_GOAL if fresh else GOALS[name] if guard else None
            rows += rows_of(f"{name}{', with input' if fresh else '' if guard else ', no guard'}", found, goal)
        print_table(f"{num_workers} workers with {devices} CPU device{'s' * (devices > 1)} each: one step", rows)
    print_table("2 workers: from the command to the end of the first step", starts(1 if options.quick else START_ROUNDS))
    print_table("the launcher: from its start to the first worker's", launchers(2 if options.quick else ROUNDS))


def launched(num_workers: int, devices: int, *arguments: str) -> Any:
    """Run this file as a job, and return what its chief has found."""
    command = [sys.executable, "-m", "mirrored", "launch", "-n", str(num_workers), "--cpu-devices", str(devices), __file__]
    output = subprocess.run([*command, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout
    [found] = [line.removeprefix(f"[0] {MARK}") for line in output.splitlines() if line.startswith(f"[0] {MARK}")]
    return json.loads(found)


def rows_of(name: str, seconds: dict[str, list[float]], goal: float | None) -> list[Row]:
    def ratios(reference: str) -> list[float]:
        return [a / b for a, b in zip(seconds["mirrored"], seconds[reference], strict=True)]

    rows = [Row(f"{name}: {how}", show_seconds(statistics.median(seconds[how]))) for how in ("by hand", "by hand, packed")]
    rows.append(Row(f"{name}: mirrored", show_seconds(statistics.median(seconds["mirrored"])), ratios("by hand"), goal))
    return [*rows, Row(f"{name}: mirrored, ratio to by hand, packed", "", ratios("by hand, packed"), goal)]


def starts(num_rounds: int) -> list[Row]:
    jobs = {"by hand": "start by hand", "mirrored": "start"}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(num_rounds):
        for name, job in jobs.items():
            start = time.time()
            seconds[name].append(launched(2, 1, f"--job={job}") - start)
    ratios = [a / b for a, b in zip(seconds["mirrored"], seconds["by hand"], strict=True)]
    return [
        Row("start: by hand", show_seconds(statistics.median(seconds["by hand"]))),
        Row("start: mirrored", show_seconds(statistics.median(seconds["mirrored"])), ratios),
    ]


def launchers(num_rounds: int) -> list[Row]:
    seconds: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    for _ in range(num_rounds):
        for name, code in LAUNCHERS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code, __file__], check=True)
            seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["mirrored"], seconds["by hand"], strict=True)]
    return [
        Row("launcher: by hand", show_seconds(statistics.median(seconds["by hand"]))),
        Row("launcher: mirrored", show_seconds(statistics.median(seconds["mirrored"])), ratios, LAUNCHER_GOAL),
    ]


# -- in the workers


def step_times(options: Any) -> dict[str, list[float]]:
    """Let both take turns, and return the seconds of a step in each round."""
    import mirrored as mr

    if not options.guard:
        from mirrored._workers import guard as _guard

        _guard.Guard.start = lambda self: None
        _guard.Guard.stop = lambda self: self._stopped.set()
    strategy = mr.MultiWorkerMirroredStrategy()
    from _workloads import WORKLOADS

    workload = WORKLOADS[options.job]
    fresh = bool(options.fresh)
    by_hand = [written_by_hand(workload, is_packed, fresh) for is_packed in (False, True)]
    contenders = [*by_hand, with_mirrored(strategy, workload, fresh)]
    check_losses(contenders, num_steps=3, tolerance=1e-4)
    times = interleave(contenders, options.rounds, options.turn).seconds
    strategy.barrier("end")
    return times


def with_mirrored(strategy: Any, workload: Any, fresh: bool = False) -> Contender:
    from _jax_contenders import mirrored_step

    step = mirrored_step(strategy, workload)
    held = workload.batches()
    epochs = strategy.distribute_dataset(held * (BATCHES // len(held))).repeat()
    batches = iter(epochs) if fresh else itertools.cycle(list(strategy.distribute_dataset(held)))

    def run(num_steps: int) -> float:
        for batch in itertools.islice(batches, chief_s(num_steps)):
            losses = strategy.run(step, args=batch)
        strategy.barrier("end of a turn")
        return sum(map(float, losses.values))

    return Contender("mirrored", run)


def written_by_hand(workload: Any, is_packed: bool = False, fresh: bool = False) -> Contender:
    """`jit(shard_map)` with one psum of the gradient tree, over the devices of all processes; or the small ones packed."""
    import jax
    import numpy as np
    from _jax_contenders import by_hand_step, packed_psum
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))
    compiled, state = by_hand_step(workload, mesh, packed_psum if is_packed else None)
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def sent() -> Iterator[Any]:
        count, index = jax.process_count(), jax.process_index()
        own = [[np.array_split(array, count)[index] for array in batch] for batch in workload.batches()]
        for batch in itertools.cycle(own):
            yield [jax.make_array_from_process_local_data(rows, array) for array in batch]

    batches = sent() if fresh else itertools.cycle([jax.device_put(batch, rows) for batch in workload.batches()])

    def run(num_steps: int) -> float:
        nonlocal state
        for batch in itertools.islice(batches, chief_s(num_steps)):
            *state, losses = compiled(*state, *batch)
        jax.block_until_ready(state)
        multihost_utils.sync_global_devices("end of a turn")
        return sum(float(shard.data[0]) for shard in losses.addressable_shards)

    return Contender("by hand, packed" if is_packed else "by hand", run)


def chief_s(num_steps: int) -> int:
    """Return the chief's number: each worker has measured another one."""
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(num_steps))


def first_step(options: Any) -> float:
    """Make a strategy, take one step with it, and return when that was."""
    import mirrored as mr

    strategy = mr.MultiWorkerMirroredStrategy()
    from _workloads import WORKLOADS

    with_mirrored(strategy, WORKLOADS["W1"]).run(1)
    return time.time()


def first_step_by_hand(options: Any) -> float:
    import os

    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
    )
    from _workloads import WORKLOADS

    written_by_hand(WORKLOADS["W1"]).run(1)
    return time.time()


JOBS = {**dict.fromkeys(GOALS, step_times), "start": first_step, "start by hand": first_step_by_hand}

if __name__ == "__main__":
    main()
