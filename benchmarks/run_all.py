"""Run every benchmark, each in a process of its own: `python benchmarks/run_all.py [--quick | --record FILE]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from _harness import parse

FILES = (
    "step_time",
    "loop",
    "libraries",
    "models",
    "uneven_step",
    "overhead",
    "compile_time",
    "memory",
    "all_reduce",
    "transfers",
    "random_numbers",
    "virtual_replicas",
    "scaling",
    "workers",
    "control_plane",
    "gpu",
    "tfrecord_read",
    "input_files",
    "input_overlap",
)


def main() -> None:
    options = parse(__doc__, peers_python=sys.executable)
    failed = []
    for name in FILES:
        print(f"\n## {name}", flush=True)
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *(["--quick"] if options.quick else [])]
        command += [f"--record={options.record}"] if options.record else []
        command += [f"--peers-python={options.peers_python}"] if name in ("step_time", "input_files") else []
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"these benchmarks stopped with an error: {', '.join(failed)}")


if __name__ == "__main__":
    main()
