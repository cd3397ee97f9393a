#!/usr/bin/env bash
# Two hosts, by hand: run this on each, with its number and the name of the first one.
#
#   bash examples/clusters/launch.sh 0 gpu-0     # on gpu-0
#   bash examples/clusters/launch.sh 1 gpu-0     # on the other
#
# One worker on each host, with all its GPUs. A host that was lost: the same command again, on it or on another.
set -euo pipefail
exec mirrored launch --nnodes 2 --node-rank "$1" --coordinator "$2:9000" --max-restarts 3 \
  examples/two_hosts.py --checkpoints "${CHECKPOINTS:-/shared/two_hosts}"
