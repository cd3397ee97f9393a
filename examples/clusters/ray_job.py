"""Two workers, by Ray Train's JaxTrainer, which places them, and starts both again when one fails.

    python examples/clusters/ray_job.py            # one GPU for each worker; in an environment that has ray[train]
    python examples/clusters/ray_job.py --cpu      # on the CPU, also without a cluster
    python examples/clusters/ray_job.py --workers 2,3  # with as many as there are machines: two or three

`examples/two_hosts.py` is the program of each worker; it knows nothing of Ray. It is a process of its own, because Ray runs a
training function in a thread, where Python receives no signals. Ray is told to leave JAX alone: the strategy starts it.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import ray
import ray.train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxConfig, JaxTrainer

PROGRAM = Path(__file__).resolve().parent.parent / "two_hosts.py"


def train(config: dict) -> None:
    """Run the program as one worker; an exit code other than 0 is a failure, after which Ray starts all again."""
    context = ray.train.get_context()
    with socket.socket() as sock:
        sock.bind(("", 0))
        address = f"{ray.util.get_node_ip_address()}:{sock.getsockname()[1]}"
    cluster = {
        "JAX_COORDINATOR_ADDRESS": broadcast_from_rank_zero(address),
        "JAX_NUM_PROCESSES": str(context.get_world_size()),
        "JAX_PROCESS_ID": str(context.get_world_rank()),
    }
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} if config["cpu"] else {}
    command = [sys.executable, str(PROGRAM), *config["arguments"]]
    # A session of its own, or Ray would kill it together with this worker: it gets SIGTERM when this worker dies, and saves.
    program = subprocess.Popen(command, env=os.environ | cluster | cpu, start_new_session=True, preexec_fn=end_with_parent)
    # A thread, because get_preemption_info waits for the other workers, and some may have ended.
    threading.Thread(target=hand_on_notice, args=(program,), daemon=True).start()
    if program.wait():
        raise subprocess.CalledProcessError(program.returncode, command)


def hand_on_notice(program: subprocess.Popen) -> None:
    """Send SIGTERM to the program when Ray says that a machine is about to be taken away."""
    while ray.train.get_preemption_info() is None:
        time.sleep(1)
    program.send_signal(signal.SIGTERM)


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def main() -> None:
    """Start the workers, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2", help="how many, or the least and the most")
    parser.add_argument("--cpu", action="store_true")
    options, arguments = parser.parse_known_args()  # the others are the program's
    if options.cpu and not os.environ.get("RAY_ADDRESS"):
        ray.init(include_dashboard=False)  # a local cluster, which need not show itself
    numbers = tuple(map(int, options.workers.split(",")))
    trainer = JaxTrainer(
        train,
        train_loop_config={"cpu": options.cpu, "arguments": arguments or ["--checkpoints", "/shared/two_hosts"]},
        jax_config=JaxConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=numbers[0] if len(numbers) == 1 else numbers, use_gpu=not options.cpu),
        run_config=ray.train.RunConfig(
            failure_config=ray.train.FailureConfig(max_failures=3),
            # When Ray ends a worker, to start another number of them, it would kill its program at once, which could not save.
            worker_runtime_env={"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}},
        ),
    )
    print(trainer.fit())


if __name__ == "__main__":
    main()
