"""Kill a program that saves with SIGKILL, again and again at random moments, and see that no saved step is lost or wrong.

    python tests/chaos_saves.py 1000

Each process goes on where the one before was killed. Before it is killed, it has said which steps are committed; the next
must restore the last of these or a later one, with exactly the values of that step.
"""

import os
import random
import select
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

import mirrored as mr
from mirrored._checkpoint.checkpoint import Checkpoint

_SHAPE = (300, 100)


def weights_at(step: int) -> np.ndarray:
    """Return what training has made of the weights after a step; nothing like it was a step before."""
    return np.random.default_rng(step).standard_normal(_SHAPE).astype(np.float32)


def train(directory: Path, say: int) -> None:
    """Restore, check, and save without end; write `r <step>` and `c <step>` for what was restored and committed."""
    w, count = mr.Variable(np.zeros(_SHAPE, np.float32)), mr.Variable(0, synchronization="on_read", aggregation="sum")
    checkpoint = Checkpoint(directory, max_to_keep=2, w=w, count=count, state=(state := {"step": 0}))
    step = checkpoint.restore_latest() or 0
    if step:
        assert w.numpy().tobytes() == weights_at(step).tobytes() and int(count) == step == state["step"], step
    os.write(say, b"r %d\n" % step)
    while True:
        step += 1
        w.assign(weights_at(step))
        count.assign(step)
        state["step"] = step
        checkpoint.save(step)
        if step % 2:
            os.write(say, b"c %d\n" % checkpoint.wait())


def kill_once(directory: Path, rng: random.Random, committed: int) -> tuple[int, int]:
    """Let one process train for a moment; return the step that it restored and the last that it committed."""
    listen, say = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, about fork: its backends have not started
        child = os.fork()
    if not child:
        try:
            os.close(listen)
            train(directory, say)
        finally:
            os._exit(1)
    os.close(say)
    text = b""
    try:
        while b"\n" not in text:
            assert select.select([listen], [], [], 60)[0], "the process has not restored anything in 60 s"
            new = os.read(listen, 4096)
            assert new, "the process ended by itself: what it restored was wrong"
            text += new
        time.sleep(rng.uniform(0, 0.25))  # the random moment
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    while new := os.read(listen, 65536):
        text += new
    os.close(listen)
    said = [line.split() for line in text.decode().splitlines()]
    [restored] = [int(step) for kind, step in said if kind == "r"]
    assert restored >= committed, f"step {committed} was committed, and {restored} was restored"
    return restored, max([restored, *(int(step) for kind, step in said if kind == "c")])


def run(num_kills: int, seed: int = 0) -> int:
    """Kill so many processes, and return the last committed step."""
    rng, committed = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="mirrored-chaos-") as folder:
        for number in range(num_kills):
            _, committed = kill_once(Path(folder), rng, committed)
            if (number + 1) % 50 == 0:
                print(f"{number + 1} kills, step {committed} committed, none lost", flush=True)
    return committed


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
