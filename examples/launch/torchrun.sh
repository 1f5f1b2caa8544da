#!/usr/bin/env bash
# Start a run on several nodes with torchrun: this script on each node, at about the same time.
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash examples/launch/torchrun.sh examples/moe.yaml    # on the first node
#   NODES=2 NODE_RANK=1 MASTER_ADDR=node0 bash examples/launch/torchrun.sh examples/moe.yaml    # on the second
#
# What follows the configuration is passed on: --trainer.max_steps 2. All nodes need the same files and versions.
set -euo pipefail

config="${1:?usage: torchrun.sh CONFIG [FLAGS OF longctx fit]}"
nodes="${NODES:?how many nodes take part}"
devices="${DEVICES:-8}" # processes of each node, one a GPU

# One thread for each process unless you know better: torchrun would set this too, with a warning.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# A run that is told to stop ends its step and saves: seconds until torchrun kills it; its own 30 are too few.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"

# A process that fails ends those of its node, and the others end with it: no node waits for hours.
exec python -m torch.distributed.run \
  --nnodes="$nodes" \
  --node_rank="${NODE_RANK:?the number of this node, from 0}" \
  --nproc_per_node="$devices" \
  --master_addr="${MASTER_ADDR:?a name or address of the first node that all nodes reach}" \
  --master_port="${MASTER_PORT:-29500}" \
  -m lightning_longctx fit --config "$config" \
  --trainer.num_nodes "$nodes" --trainer.devices "$devices" "${@:2}"
