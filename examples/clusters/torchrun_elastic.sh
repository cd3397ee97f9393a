#!/usr/bin/env bash
# Two to three hosts, by torchrun: the job goes on with two when one is lost, and with three when one comes. Run this on each host,
# with the name of the host that keeps torchrun's store, which must not be lost itself.
#
#   bash examples/clusters/torchrun_elastic.sh gpu-0
#
# A lost or a new host costs each of the others one of --max-restarts.
set -euo pipefail
# Else all agents fail a minute after a third joins, or after rank 0 is lost (torch 2.13): they keep the port of an old store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes 2:3 --nproc-per-node 1 --max-restarts 20 \
  --rdzv-backend c10d --rdzv-endpoint "$1:29400" --rdzv-id two_hosts \
  --rdzv-conf last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3 \
  examples/two_hosts.py --checkpoints "${CHECKPOINTS:-/shared/two_hosts}"
