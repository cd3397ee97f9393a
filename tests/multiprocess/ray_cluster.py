"""A cluster of Ray on this machine, each node a few processes, on which ray_job.py trains while something happens to it.

Arguments: ray_job.py; a folder for its checkpoints; what happens; the seconds between steps, the number of epochs. An actor is
killed, a node comes and is lost (resized), or Ray is told that it will lose a node (drained). Prints what the job prints, and
exits as it does.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

os.environ |= {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",  # processes that nobody needs, each of which imports much
    "RAY_worker_register_timeout_seconds": "240",
    # By its default of 60, Ray starts actors again and again where a busy machine takes longer. So long it waits for a lost node.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "90" if sys.argv[3] == "resized" else "240",
}

from ray.cluster_utils import Cluster

_, JOB, FOLDER, EVENT, *PACE = sys.argv


class Watched:
    """A job, and the last step that its output names."""

    def __init__(self, address: str, workers: str) -> None:
        arguments = ["--cpu", "--workers", workers, FOLDER, "found", *PACE]
        self.process = subprocess.Popen(
            [sys.executable, JOB, *arguments],
            env=os.environ | {"RAY_ADDRESS": address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.step, self.num_workers, self._changed = 0, 0, threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            print(line, end="", flush=True)
            if found := re.search(r"STEP (\d+) .* (\d+) workers", line):
                with self._changed:
                    self.step, self.num_workers = int(found[1]), int(found[2])
                    self._changed.notify_all()

    def wait(self, num_workers: int, steps: int = 0) -> None:
        """Wait until so many workers have taken so many more steps."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_workers == num_workers, 400), "the number of workers does not change"
            until = self.step + steps
            assert self._changed.wait_for(lambda: self.step >= until, 100), "the job does not go on"

    def end(self) -> int:
        code = self.process.wait(300)
        self._reader.join()
        return code


def actors() -> dict[int, int]:
    """Return the processes of Ray that run the training function, and their parents."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    return {int(pid): int(parent) for pid, parent in re.findall(r"^ *(\d+) +(\d+) ray::RayTrainWorker", found, re.MULTILINE)}


def main() -> int:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3 if EVENT == "drained" else 2)]
        job = Watched(cluster.address, "2,3" if EVENT == "resized" else "2")
        job.wait(2, 5)
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
        of_this_cluster = {actor: raylets[parent] for actor, parent in actors().items() if parent in raylets}
        victim, node = max(of_this_cluster.items())
        if EVENT == "killed":
            os.kill(victim, signal.SIGKILL)
        elif EVENT == "drained":
            why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test", "--deadline-remaining-seconds", "120"]
            ray = [Path(sys.executable).with_name("ray"), "drain-node", "--address", cluster.address, "--node-id", node.node_id]
            subprocess.run([*ray, *why], check=True)
        else:
            third = cluster.add_node(num_cpus=1)
            job.wait(3, 5)
            cluster.remove_node(third, allow_graceful=False)
            job.wait(2, 5)
        return job.end()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
