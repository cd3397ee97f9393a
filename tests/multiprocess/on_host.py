"""Become a worker of faults.py on a host of its own: a network namespace, whose name and address the environment has."""

import json
import os
import sys
from pathlib import Path

index = int(os.environ["JAX_PROCESS_ID"])
hosts = os.environ["TEST_HOSTS"].split(",")
port = os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2]
namespace, host = hosts[index].split("=")
workers = [f"{entry.split('=')[1]}:{int(port) + number}" for number, entry in enumerate(hosts)]
for name in ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS", "TEST_HOSTS"):
    del os.environ[name]
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
script = str(Path(__file__).with_name("faults.py"))
os.execvp("ip", ["ip", "netns", "exec", namespace, sys.executable, script, f"host={index}", *sys.argv[1:]])
