"""Two workers, by Ray Train's JaxTrainer, which places them, and starts both again when one fails.

    python examples/clusters/ray_job.py            # one GPU for each worker; in an environment that has ray[train]
    python examples/clusters/ray_job.py --cpu      # on the CPU, also without a cluster

`examples/two_hosts.py` is the program of each worker; it knows nothing of Ray. It is a process of its own, because Ray runs a
training function in a thread, where Python receives no signals. Ray is told to leave JAX alone: the strategy starts it.
"""

import argparse
import os
import socket
import subprocess
import sys
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
    subprocess.run([sys.executable, str(PROGRAM), *config["arguments"]], env=os.environ | cluster | cpu, check=True)


def main() -> None:
    """Start the workers, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    options, arguments = parser.parse_known_args()  # the others are the program's
    if options.cpu and not os.environ.get("RAY_ADDRESS"):
        ray.init(include_dashboard=False)  # a local cluster, which need not show itself
    trainer = JaxTrainer(
        train,
        train_loop_config={"cpu": options.cpu, "arguments": arguments or ["--checkpoints", "/shared/two_hosts"]},
        jax_config=JaxConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=not options.cpu),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    print(trainer.fit())


if __name__ == "__main__":
    main()
