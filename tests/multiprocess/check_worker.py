"""`mirrored check` as a worker with quick measurements: "right", or "wrong" with much that is wrong on worker 1."""

import os
import shutil
import socket
import sys
import time
from typing import Any, NoReturn

from mirrored import launch
from mirrored._command import check_cluster, check_folder, check_host, check_sums

_, kind, *arguments = sys.argv
worker = os.environ["JAX_PROCESS_ID"]
check_sums.SIZES, check_sums.LENGTHS = ((4, 2), (8192, 2)), (1, 1009)
check_folder._UNSEEN_SECONDS = 0.2


def unanswered(address: Any, timeout: float) -> NoReturn:
    """Wait in vain, as where a firewall drops the packets."""
    raise TimeoutError("timed out")


if (kind, worker) == ("wrong", "1"):
    os.environ["JAX_PLATFORMS"] = ""
    versions, usage, clock = check_host.versions(), shutil.disk_usage, time.time
    check_host.versions = lambda: {**versions, "nvidia-nccl-cu13": "2.1", "triton": "3"}
    check_host.num_gpus = lambda devices="/dev": 1
    check_host.gpus = lambda: check_host.Finding("1 NVIDIA GPU, driver 570.1")
    shutil.disk_usage = lambda path: usage("/")._replace(free=64 << 20) if path == "/dev/shm" else usage(path)
    check_cluster.clocks.__defaults__ = (lambda: clock() + 123.0,)
    socket.create_connection = unanswered
sys.exit(launch.main(["check", *(argument.replace("{worker}", worker) for argument in arguments)]))
