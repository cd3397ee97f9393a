#!/usr/bin/env bash
# Two hosts, by torchrun, where the cluster has it already: run this on each, with its number and the name of the first one.
#
#   bash examples/clusters/torchrun.sh 0 gpu-0     # on gpu-0
#   bash examples/clusters/torchrun.sh 1 gpu-0     # on the other
#
# One worker on each host, with all its GPUs: torchrun's LOCAL_RANK does not choose a GPU for JAX.
set -euo pipefail
exec torchrun --nnodes 2 --nproc-per-node 1 --node-rank "$1" --master-addr "$2" --master-port 29500 --max-restarts 3 \
  examples/two_hosts.py --checkpoints "${CHECKPOINTS:-/shared/two_hosts}"
