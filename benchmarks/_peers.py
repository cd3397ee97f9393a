"""Contenders of other frameworks: programs of their own that take steps when told to, skipped when not installed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from _harness import Contender

#: Name in the table, module that must be there, file.
PEERS = (
    ("TensorFlow MirroredStrategy", "tensorflow", "peer_tensorflow.py"),
    ("PyTorch DDP, one process each", "torch", "peer_torch.py"),
)
#: What they have.
WORKLOADS = ("W1", "W2", "W3")


@contextlib.contextmanager
def running(workload: str, num_replicas: int, python: str) -> Iterator[list[Contender]]:
    """Start the peers that `python` has, for the duration of a block."""
    with contextlib.ExitStack() as stack:
        contenders = []
        for name, module, file in PEERS if workload in WORKLOADS else ():
            if not has_module(python, module):
                print(f"skipped: {name}, because {python} has no {module}")
                continue
            command = [python, str(Path(__file__).with_name(file)), workload, str(num_replicas)]
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            contenders.append(Contender(name, remote(process)))
        yield contenders


def has_module(python: str, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def remote(process: subprocess.Popen[str]) -> Callable[[int], float]:
    def run(num_steps: int) -> float:
        assert process.stdin is not None and process.stdout is not None
        print(num_steps, file=process.stdin, flush=True)
        for line in process.stdout:
            if line.startswith("loss "):
                return float(line.removeprefix("loss "))
        raise RuntimeError(f"{process.args} ended; its messages are above")

    return run


def serve(run: Callable[[int], float]) -> None:
    """Answer the requests that come on standard input, in the peer's process."""
    for line in sys.stdin:
        print("loss", run(int(line)), flush=True)
