#!/bin/bash
# One run on two machines of 8 GPUs: `sbatch slurm.sh`. docs/how-to/several-machines.md says what they share.
# On one machine: --nodes=1, and neither trainer.hosts nor trainer.interface.
#SBATCH --job-name=skylite
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
set -eu

export RUN=/shared/run IFACE=eth1 # a folder that every node sees; the interface between them (`ip address`)

# The first task starts the run, or continues it after a requeue; the others wait for it. One that fails ends all.
srun --kill-on-bad-exit=1 bash -euc '
  . /shared/skylite/.venv/bin/activate # a checkout on the shared folder, after `make setup` on one node
  if [ "$SLURM_PROCID" != 0 ]; then
    skylite worker --join "$RUN"
  elif [ -e "$RUN/config.json" ]; then
    skylite train --resume "$RUN"
  else
    skylite train --rank 32 --alpha 32 --run "$RUN" --max-restarts 3 \
      --set trainer.hosts="$SLURM_NNODES" --set trainer.interface="$IFACE" --set trainer.num_ranks=8
  fi'
