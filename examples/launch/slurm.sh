#!/usr/bin/env bash
# Start a run on a SLURM cluster, and let it go on by itself after a time limit or a preemption.
#
#   sbatch --nodes=2 examples/launch/slurm.sh examples/moe.yaml
#
# What follows the configuration is passed on: --trainer.max_steps 2.
#SBATCH --job-name=longctx
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Five minutes before the end each task gets SIGUSR1: AsyncDCPCheckpoint saves at the end of the step and asks SLURM once
# to queue the job again, and `ckpt_path: last` in the configuration takes it up where it was. A step and a save must fit
# in. A preemption sends it too on clusters with `PreemptParameters=send_user_signal`; a SIGTERM in its place (or of
# `scancel`) is answered by the save alone.
#SBATCH --signal=SIGUSR1@300
set -euo pipefail

config="${1:?usage: sbatch --nodes=N slurm.sh CONFIG [FLAGS OF longctx fit]}"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Since SLURM 22.05 srun does not take this over from sbatch: each task would share one core with its reading processes.
export SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-${SLURM_CPUS_PER_TASK:-1}}"

# One task for each GPU. Lightning reads ranks and addresses from SLURM's variables; both numbers must be what runs.
# Without --kill-on-bad-exit a task that fails would leave the others waiting.
exec srun --kill-on-bad-exit=1 python -m lightning_longctx fit --config "$config" \
  --trainer.num_nodes "$SLURM_JOB_NUM_NODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" "${@:2}"
